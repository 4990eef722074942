"""Placement from submission to launch: constraints, preemption, time limits, quotas."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest

from genie.controller.jobs.lifecycle import JobLifecycle, LostWorker
from genie.controller.placement import planner as planning
from genie.errors import (
    JobRefusedError,
)
from genie.model.job import (
    Job,
    JobSpec,
    JobState,
    PlacementConstraints,
    Resources,
    StopReason,
)
from genie.model.messages import (
    CancelJob,
    DrainNode,
    ExitReport,
    ExplainJob,
    GetQueue,
    Launch,
    RemoveNode,
    SetQuota,
)
from genie.model.node import GPUInfo, NodeInfo, Vendor
from genie.model.tenant import QuotaRecord, TokenKind
from genie.processes.clock import SystemClock
from genie.scheduler.cluster.allocations import ClusterAllocations
from genie.scheduler.decisions import Decision, Start
from genie.scheduler.request import WorkerPlace
from genie.scheduler.scheduler import Scheduler
from tests.controller.running_controller import (
    Client,
    connect_agent,
    job_spec,
    running_controller,
)
from tests.fakes.agent import FakeAgent, make_node_info
from tests.fakes.clock import FakeClock
from tests.waiting import until

# -- constraints ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wish", "there"),
    [
        ({"gpu_models": ("H200", "H100")}, {"name": "H100"}),
        ({"vendor": "amd"}, {"vendor": Vendor.AMD}),
        ({"gpu_memory_min_bytes": 1 << 36}, {"memory_total_bytes": 1 << 36}),
        ({"capability_min": (9, 0)}, {"capability": (9, 0)}),
    ],
)
async def test_job_is_placed_on_gpus_that_satisfy_its_constraints(
    tmp_path: Path, wish: dict[str, object], there: dict[str, object]
) -> None:
    plain = make_node_info("plain")
    other = make_node_info("other")
    gpu = msgspec.structs.replace(other.gpus[0], **there)
    async with running_controller(tmp_path) as one, one.client() as owner, AsyncExitStack() as stack:
        await connect_agent(one, plain, stack)
        with pytest.raises(JobRefusedError, match="plain: GPU"):
            await owner.submit_spec(job_spec(**wish))
        agent = await connect_agent(one, msgspec.structs.replace(other, gpus=(gpu,)), stack)
        job = await owner.submit_spec(job_spec(**wish))
        assert (await agent.next_launch()).job_id == job.job_id


async def test_job_is_placed_on_nodes_with_its_labels(tmp_path: Path) -> None:
    labelled = msgspec.structs.replace(make_node_info("b"), labels={"zone": "east", "disk": "nvme"})
    async with (
        running_controller(tmp_path) as one,
        one.client() as owner,
        one.agent("a"),
        AsyncExitStack() as stack,
    ):
        agent = await connect_agent(one, labelled, stack)
        job = await owner.submit_spec(job_spec(labels={"zone": "east"}))
        assert (await agent.next_launch()).job_id == job.job_id
        with pytest.raises(JobRefusedError, match="missing label zone=west"):
            await owner.submit_spec(job_spec(labels={"zone": "west"}))


async def test_gpu_memory_in_use_outside_is_not_allocated(tmp_path: Path) -> None:
    def with_outside(size_bytes: int) -> NodeInfo:
        info = make_node_info("n1")
        gpu = msgspec.structs.replace(info.gpus[0], memory_outside_bytes=size_bytes)
        return msgspec.structs.replace(info, gpus=(gpu,))

    async with running_controller(tmp_path) as one, one.client() as owner, AsyncExitStack() as stack:
        agent = await connect_agent(one, with_outside(6 << 30), stack)
        wish = JobSpec(name="large", command=("true",), resources=Resources(gpus=1, gpu_memory_bytes=4 << 30))
        job = await owner.submit_spec(wish)
        assert job.state is JobState.QUEUED
        await agent.beat(node=with_outside(1 << 30))
        assert (await agent.next_launch()).job_id == job.job_id


# -- preemption and time limits ---------------------------------------------------------------------


async def _start_low_job(owner: Client, agent: FakeAgent, **constraints: object) -> tuple[Job, Launch]:
    job = await owner.submit_spec(job_spec("low", **constraints))
    return job, await agent.start_next()


async def test_higher_priority_preempts_a_job_which_is_queued_again(
    tmp_path: Path,
) -> None:
    async with running_controller(tmp_path) as one, one.client() as owner, one.agent("a") as a:
        low, launch = await _start_low_job(owner, a, preemptible=True, grace_s=5.0)
        high = await owner.submit_spec(job_spec("high", priority=10))
        assert high.reason == f"waiting for {low.job_id} to stop"
        kill = await a.next_kill()
        assert (kill.job_id, kill.reason) == (low.job_id, f"preempted for {high.job_id}")
        assert (await owner.job(low.job_id)).stop is StopReason.PREEMPT
        a.end(launch, None, reason=kill.reason)
        await a.beat()
        second = await a.start_next()
        assert second.job_id == high.job_id
        waiting = await owner.job(low.job_id)
        assert (waiting.state, waiting.stop, waiting.exit_code) == (
            JobState.QUEUED,
            StopReason.NONE,
            None,
        )
        a.end(second)
        await a.beat()
        assert (await a.start_next()).job_id == low.job_id


async def test_job_confirmed_during_its_preemption_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_controller(tmp_path) as one, one.client() as owner, one.agent("a") as a:
        low = await owner.submit_spec(job_spec("low", preemptible=True))
        launch = await a.next_launch()
        requeue_each = JobLifecycle.requeue_unconfirmed_jobs

        async def too_late(self: JobLifecycle, jobs: Iterable[tuple[Job, str]]) -> None:
            if given := list(jobs):
                await a.confirm(launch)
                await requeue_each(self, given)

        monkeypatch.setattr(JobLifecycle, "requeue_unconfirmed_jobs", too_late)
        high = await owner.submit_spec(job_spec("high", priority=10))
        assert (await a.next_kill()).job_id == low.job_id
        a.end(launch, -15)
        await a.beat()
        assert (await a.start_next()).job_id == high.job_id


async def test_placement_that_was_not_recorded_is_decided_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_controller(tmp_path) as one, one.client() as owner, one.agent("a") as a:
        low, _ = await _start_low_job(owner, a, preemptible=True)

        async def broken(self: JobLifecycle, jobs: Iterable[tuple[Job, str]], stop: StopReason) -> list[Job]:
            if not list(jobs):
                return []
            monkeypatch.undo()
            raise AssertionError("broken once")

        monkeypatch.setattr(JobLifecycle, "mark_jobs_stopping", broken)
        await owner.submit_spec(job_spec("high", priority=10))
        assert (await a.next_kill()).job_id == low.job_id


async def test_start_decided_before_a_reload_of_the_ledger_is_dropped(tmp_path: Path) -> None:
    async with running_controller(tmp_path) as one, one.client() as owner, one.agent("a"):
        await owner.ask(DrainNode(node_id="a"))
        job = await owner.submit_spec(job_spec())
        assert one.controller is not None
        jobs, ledger = one.controller._jobs.launches, one.controller._ledger
        start, placed = Start(job.job_id, (WorkerPlace("a", (0,)),), "decided"), list[Job]()
        ledger._needs_reload = True
        await jobs.record_starts([start], on_placed=placed.append)
        assert (placed, (await owner.job(job.job_id)).state) == ([], JobState.QUEUED)
        await jobs.record_starts([start], on_placed=placed.append)
        assert [one.job_id for one in placed] == [job.job_id]


async def test_job_that_is_not_preemptible_is_not_preempted(tmp_path: Path) -> None:
    async with running_controller(tmp_path) as one, one.client() as owner, one.agent("a") as a:
        low, _ = await _start_low_job(owner, a)
        high = await owner.submit_spec(job_spec("high", priority=10))
        assert high.state is JobState.QUEUED
        await a.beat()
        assert a.kills.empty()
        assert not (await owner.job(low.job_id)).stop


async def test_job_can_be_cancelled_while_it_is_being_preempted(tmp_path: Path) -> None:
    async with running_controller(tmp_path) as one, one.client() as owner, one.agent("a") as a:
        low, launch = await _start_low_job(owner, a, preemptible=True)
        await owner.submit_spec(job_spec("high", priority=10))
        await a.next_kill()
        await owner.ask(CancelJob(job_id=low.job_id))
        a.end(launch, -15)
        await a.beat()
        assert (await owner.job(low.job_id)).state is JobState.CANCELLED


async def test_preemption_survives_a_controller_restart(tmp_path: Path) -> None:
    async with running_controller(tmp_path) as one:
        access = await one.join("a")
        agent = FakeAgent(make_node_info("a", gpus=2))
        async with one.client() as owner, agent.connected(one.network, access):
            await agent.register()
            await agent.beat()
            low, _ = await _start_low_job(owner, agent, preemptible=True)
            other, _ = await _start_low_job(owner, agent, preemptible=True)
            await owner.submit_spec(job_spec("high", priority=10))
            victim = (await agent.next_kill()).job_id
        await one.restart()
        async with one.client() as owner, agent.connected(one.network, access):
            await agent.register()
            ack = await agent.beat()
            assert [order.job_id for order in ack.jobs_to_kill] == [victim]
            await owner.submit_spec(job_spec("last"))
            stops = {job.job_id: (await owner.job(job.job_id)).stop for job in (low, other)}
            assert sorted(stops.values()) == ["", "preempt"], "one job is preempted for one placement"


async def test_job_ends_at_its_time_limit(tmp_path: Path) -> None:
    clock = FakeClock()
    async with running_controller(tmp_path, clock=clock) as one, one.client() as owner, one.agent("a") as a:
        job = await owner.submit_spec(job_spec(time_limit_s=5.0))

        async def given() -> bool:
            await clock.advance(0.1)
            return not a.launches.empty()

        await until(given)
        launch = await a.start_next()

        async def is_notified() -> bool:
            await clock.advance(1.0)
            await a.beat()
            return not a.kills.empty()

        await until(is_notified)
        assert (await a.next_kill()).reason == "exceeded its time limit of 5 s"
        a.end(launch, -15)
        await a.beat()
        over = await owner.job(job.job_id)
        assert (over.state, over.reason) == (
            JobState.FAILED,
            "exceeded its time limit of 5 s (killed by signal 15)",
        )


async def test_job_over_its_time_limit_fails_even_if_its_node_is_lost(tmp_path: Path) -> None:
    async with running_controller(tmp_path) as one, one.client() as owner, one.agent("a") as a:
        job, launch = await _start_low_job(owner, a, time_limit_s=3600.0)
        assert one.controller is not None
        jobs, epoch = one.controller._jobs.lifecycle, launch.placement.epoch
        await jobs.mark_jobs_stopping(
            [(await owner.job(job.job_id), "its time limit is over")], StopReason.TIME_LIMIT
        )
        await jobs.record_lost_workers([LostWorker(job.job_id, "a", epoch, "node a was silent")])
        over = await owner.job(job.job_id)
        assert (over.state, over.reason) == (JobState.FAILED, "its time limit is over (node a was silent)")


async def test_small_jobs_with_time_limits_are_backfilled(tmp_path: Path) -> None:
    async with running_controller(tmp_path) as one, one.client() as owner, one.agent("a", gpus=2) as a:
        await _start_low_job(owner, a, time_limit_s=1000.0)
        large = await owner.submit_spec(job_spec("large", gpus=2))
        assert large.reason == "waiting for resources on a (reserved for this job)"
        long = await owner.submit_spec(job_spec("long"))
        assert long.reason == f"would delay {large.job_id}, which has a reservation"
        short = await owner.submit_spec(job_spec("short", time_limit_s=10.0))
        assert (await a.next_launch()).job_id == short.job_id


class _AdjustableClock(SystemClock):
    wall_offset_s = 0.0

    def wall_s(self) -> float:
        return super().wall_s() + self.wall_offset_s


async def test_setting_the_wall_clock_does_not_change_reservations(tmp_path: Path) -> None:
    clock = _AdjustableClock()
    async with (
        running_controller(tmp_path, clock=clock) as one,
        one.client() as owner,
        one.agent("a", gpus=2) as a,
    ):
        await _start_low_job(owner, a, time_limit_s=1000.0)
        large = await owner.submit_spec(job_spec("large", gpus=2))
        assert large.reason == "waiting for resources on a (reserved for this job)"
        clock.wall_offset_s = 3600.0
        short = await owner.submit_spec(job_spec("short", time_limit_s=10.0))
        assert (await a.next_launch()).job_id == short.job_id
        queue = await owner.ask(GetQueue())
        assert queue.jobs[0].starts_at == pytest.approx(clock.wall_s() + 1000.0, abs=100.0)


async def test_accelerator_auto_means_cpus_after_the_last_gpu_node_is_removed(tmp_path: Path) -> None:
    async with running_controller(tmp_path) as one, one.client() as owner, AsyncExitStack() as stack:
        cpu = await connect_agent(one, make_node_info("c", vendor=Vendor.CPU), stack)
        gpu = await connect_agent(one, make_node_info("g"), stack)
        job = await owner.submit_spec(job_spec())
        assert (await gpu.next_launch()).job_id == job.job_id
        await owner.ask(CancelJob(job_id=job.job_id))
        await gpu.leave()
        await owner.ask(RemoveNode(node_id="g"))
        job = await owner.submit_spec(job_spec())
        assert (await cpu.next_launch()).job_id == job.job_id


async def test_near_and_apart_select_nodes_by_job_names(tmp_path: Path) -> None:
    async with (
        running_controller(tmp_path) as one,
        one.client() as owner,
        one.agent("a", gpus=3) as a,
        one.agent("b", gpus=3) as b,
    ):
        lonely = await owner.submit_spec(job_spec("lonely", near=("nobody",)))
        assert lonely.reason == "no job named nobody is running"
        await owner.submit_spec(job_spec("base", node_id="b"))
        await b.start_next()
        beside = await owner.submit_spec(job_spec("beside", near=("base",)))
        away = await owner.submit_spec(job_spec("away", apart=("base",)))
        assert (await b.next_launch()).job_id == beside.job_id
        assert (await a.next_launch()).job_id == away.job_id


async def test_only_the_first_accelerators_of_a_large_node_are_used(tmp_path: Path) -> None:
    info = make_node_info("big")
    gpus = tuple(GPUInfo(gpu_id=n, name="Fake", vendor=Vendor.NVIDIA) for n in range(20))
    async with running_controller(tmp_path) as one, one.client() as owner, AsyncExitStack() as stack:
        agent = await connect_agent(one, msgspec.structs.replace(info, gpus=gpus), stack)
        await owner.submit_spec(job_spec(gpus=16))
        assert (await agent.next_launch()).placement.gpu_ids == tuple(range(16))
        with pytest.raises(JobRefusedError, match="big: has 16 GPUs"):
            await owner.submit_spec(job_spec(gpus=17))


# -- quotas -----------------------------------------------------------------------------------------


async def test_quota_takes_effect_when_it_is_set(tmp_path: Path) -> None:
    async with running_controller(tmp_path) as one, one.client() as owner, one.agent("a", gpus=4) as a:
        token = await one.token(TokenKind.USER, tenant="blue")
        await owner.ask(SetQuota(quota=QuotaRecord(tenant="blue", gpus=1.0, borrow_gpus=1.0)))
        async with one.client(token) as blue:
            await blue.submit_spec(job_spec("own"))
            await a.start_next()
            second = await blue.submit_spec(job_spec("second"))
            assert "its quota of 1 GPU; only preemptible jobs may borrow more" in second.reason
            loan = await blue.submit_spec(job_spec("loan", preemptible=True))
            assert (await a.start_next()).job_id == loan.job_id
            more = await blue.submit_spec(job_spec("more", preemptible=True))
            assert "and may borrow 1 GPU" in more.reason
        await owner.ask(SetQuota(quota=QuotaRecord(tenant="blue", gpus=3.0, borrow_gpus=1.0)))
        assert {(await a.start_next()).job_id, (await a.start_next()).job_id} == {
            second.job_id,
            more.job_id,
        }


async def test_borrowed_gpus_are_reclaimed_for_their_tenant(tmp_path: Path) -> None:
    async with running_controller(tmp_path) as one, one.client() as owner, one.agent("a", gpus=2) as a:
        for tenant in ("blue", "red"):
            await owner.ask(SetQuota(quota=QuotaRecord(tenant=tenant, gpus=1.0)))
        blue_token = await one.token(TokenKind.USER, tenant="blue")
        red_token = await one.token(TokenKind.USER, tenant="red")
        async with one.client(blue_token) as blue, one.client(red_token) as red:
            for _ in range(2):
                await blue.submit_spec(job_spec("blue", preemptible=True))
                await a.start_next()
            mine = await red.submit_spec(job_spec("red"))
            assert "waiting for another job to stop" in mine.reason
            assert "j-" not in mine.reason, "jobs of other tenants are not named"
            kill = await a.next_kill()
            running = a.running[kill.job_id]
            a.running.pop(kill.job_id)
            a.exits[kill.job_id] = ExitReport(
                job_id=kill.job_id, epoch=running.epoch, exit_code=-15, reason="", ended_at=0.0
            )
            await a.beat()
            assert (await a.start_next()).job_id == mine.job_id


async def test_placer_caches_are_refreshed_between_decisions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    budgets: list[int] = []
    refresh = ClusterAllocations.prepare_placements

    def counted(allocations: ClusterAllocations, budget: int) -> bool:
        budgets.append(budget)
        return refresh(allocations, budget)

    monkeypatch.setattr(ClusterAllocations, "prepare_placements", counted)
    async with running_controller(tmp_path) as one, one.client() as owner, one.agent("a") as a:
        await owner.submit_spec(job_spec())
        await a.start_next()
        await until(lambda: bool(budgets))
        assert 0 < budgets[0] <= 100_000, "the refresh must be short"


async def test_incomplete_refresh_of_placer_caches_is_continued_in_the_same_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    refresh, decide = ClusterAllocations.prepare_placements, Scheduler.decide

    def recorded_refresh(allocations: ClusterAllocations, budget: int) -> bool:
        is_complete = refresh(allocations, budget)
        events.append("complete" if is_complete else "incomplete")
        return is_complete

    def recorded_decide(scheduler: Scheduler, now: float) -> list[Decision]:
        events.append("pass")
        return decide(scheduler, now)

    monkeypatch.setattr(planning, "CACHE_REFRESH_EVALUATIONS_MAX", 1)
    monkeypatch.setattr(ClusterAllocations, "prepare_placements", recorded_refresh)
    monkeypatch.setattr(Scheduler, "decide", recorded_decide)
    async with running_controller(tmp_path) as one, one.client() as owner, one.agent("a", gpus=8) as a:
        for gpus in (1, 2, 3):
            await owner.submit_spec(job_spec(gpus=gpus))
            await a.start_next()
        await until(lambda: ("incomplete", "complete") in itertools.pairwise(events))


# -- limits -----------------------------------------------------------------------------------------


async def test_one_tenant_cannot_fill_the_queue(tmp_path: Path) -> None:
    async with running_controller(tmp_path, queue_max=10) as one, one.client() as owner:
        token = await one.token(TokenKind.USER, tenant="blue")
        async with one.client(token) as blue:
            for _ in range(9):
                await blue.submit_spec(job_spec())
            with pytest.raises(JobRefusedError, match="9 jobs of tenant blue are pending; a tenth"):
                await blue.submit_spec(job_spec())
        await owner.submit_spec(job_spec())
        with pytest.raises(JobRefusedError, match="the queue is full"):
            await owner.submit_spec(job_spec())


async def test_number_of_different_kinds_of_pending_jobs_is_limited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "PENDING_QUEUE_GROUPS_MAX", 3)
    async with running_controller(tmp_path) as one, one.client() as owner, one.agent("a", gpus=8) as a:
        await owner.submit_spec(job_spec("all", gpus=8))
        await a.start_next()
        for gpus in (1, 2, 3):
            await owner.submit_spec(job_spec(gpus=gpus))
        with pytest.raises(JobRefusedError, match="different kinds of jobs are pending already"):
            await owner.submit_spec(job_spec(gpus=4))
        await owner.submit_spec(job_spec(gpus=3))


async def test_reason_of_a_cancelled_job_does_not_name_jobs_of_other_tenants(tmp_path: Path) -> None:
    async with running_controller(tmp_path) as one, one.client() as owner, one.agent("a") as a:
        token = await one.token(TokenKind.USER, tenant="blue")
        async with one.client(token) as blue:
            mine = await blue.submit_spec(job_spec(preemptible=True))
            launch = await a.start_next()
            high = await owner.submit_spec(job_spec("high", priority=9))
            await a.next_kill()
            a.end(launch, -15)
            await a.beat()
            await a.start_next()
            cancelled = (await blue.ask(CancelJob(job_id=mine.job_id))).job
        assert high.job_id not in str(cancelled)
        assert "preempted for another job" in str(cancelled.history)


async def test_error_names_unknown_accelerators(tmp_path: Path) -> None:
    async with running_controller(tmp_path) as one, one.client() as owner, one.agent("a"):
        pinned = msgspec.structs.replace(job_spec(node_id="a"), gpu_ids=(99,))
        with pytest.raises(JobRefusedError, match="node a has no accelerator 99"):
            await owner.submit_spec(pinned)


async def test_launch_has_the_new_ids_of_renumbered_accelerators(tmp_path: Path) -> None:
    async with running_controller(tmp_path) as one, one.client() as owner, one.agent("a", gpus=2) as a:
        a.info = msgspec.structs.replace(
            a.info, gpus=tuple(msgspec.structs.replace(gpu, gpu_id=gpu.gpu_id + 4) for gpu in a.info.gpus)
        )
        await a.beat()
        await owner.submit_spec(job_spec(gpus=2))
        assert (await a.next_launch()).placement.gpu_ids == (4, 5)


async def test_grace_period_applies_to_preemption_and_not_to_cancelling(tmp_path: Path) -> None:
    async with running_controller(tmp_path) as one, one.client() as owner, one.agent("a") as a:
        low, _ = await _start_low_job(owner, a, preemptible=True, grace_s=86400.0)
        await owner.submit_spec(job_spec("high", priority=9))
        assert (await a.next_kill()).grace_s == 86400.0
        assert [order.grace_s for order in (await a.beat()).jobs_to_kill] == [86400.0]
        await owner.ask(CancelJob(job_id=low.job_id))
        assert (await a.next_kill()).grace_s is None
        assert [order.grace_s for order in (await a.beat()).jobs_to_kill] == [None]


async def test_preempted_job_ends_at_its_time_limit_at_the_latest(tmp_path: Path) -> None:
    clock = FakeClock()
    async with running_controller(tmp_path, clock=clock) as one, one.client() as owner, one.agent("a") as a:

        async def next_grace_s() -> float:
            """The grace period in a later heartbeat reply."""
            await clock.advance(0.25)
            (order,) = (await a.beat()).jobs_to_kill
            assert order.grace_s is not None
            return order.grace_s

        async def until_something(queue: asyncio.Queue[Any]) -> None:
            async def is_filled() -> bool:
                await clock.advance(0.05)
                await a.beat()
                return not queue.empty()

            await until(is_filled)

        low = await owner.submit_spec(job_spec("low", preemptible=True, grace_s=600.0, time_limit_s=12.0))
        await until_something(a.launches)
        launch = await a.start_next()
        started_at = (await owner.job(low.job_id)).started_at
        assert started_at is not None
        await owner.submit_spec(job_spec("high", priority=9))
        await until_something(a.kills)
        first_s = (await a.next_kill()).grace_s
        assert first_s is not None and first_s <= 12.0
        graces = [await next_grace_s() for _ in range(3)]
        assert graces[-1] == pytest.approx(started_at + 12.0 - clock.wall_s(), abs=0.5)
        assert first_s > graces[0] > graces[1] > graces[2]
        while clock.wall_s() < started_at + 12.5:
            last_s = await next_grace_s()
        assert last_s == 0.0
        a.end(launch, -9)
        await a.beat()
        assert (await owner.job(low.job_id)).state is JobState.QUEUED, (
            "it had time left when it was preempted"
        )


async def test_number_of_workers_on_a_node_is_limited(tmp_path: Path) -> None:
    async with (
        running_controller(tmp_path, node_workers_max=2) as one,
        one.client() as owner,
        one.agent("a", gpus=1) as a,
    ):
        await owner.submit()
        first = await a.start_next()
        await owner.submit()
        await a.start_next()
        third = await owner.submit()
        why = "runs 2 workers, the maximum per node (controller.node_workers_max)"
        assert (third.state, third.reason) == (JobState.QUEUED, f"no suitable node: a: {why}")
        (ruled_out,) = (await owner.ask(ExplainJob(job_id=third.job_id))).ruled_out
        assert (ruled_out.reason, ruled_out.is_permanent) == (why, False)
        with pytest.raises(JobRefusedError, match="3 workers in total; 2 fit"):
            await owner.submit_spec(
                JobSpec(name="x", command=("x",), constraints=PlacementConstraints(workers=3))
            )
        a.end(first)
        await a.beat()
        assert (await a.start_next()).job_id == third.job_id
