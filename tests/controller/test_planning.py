"""What jobs wish for, from the submission to what agents are told: gangs, preemption, time limits."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest

from genie.controller import planning
from genie.controller.jobs import Jobs
from genie.errors import (
    FencedError,
    JobNotFoundError,
    JobRefusedError,
    LaunchError,
    WorkersMissingError,
)
from genie.model.job import Job, JobSpec, JobState, Resources, Spread, Stop, Wishes, Within, parse_unit
from genie.model.messages import (
    CancelJob,
    DrainNode,
    ExitReport,
    ExplainJob,
    Launch,
    ReadLog,
    RemoveNode,
    RunningJob,
    SetQuota,
)
from genie.model.node import GPUInfo, NodeInfo, Vendor
from genie.model.tenant import QuotaRecord, TokenKind
from genie.scheduler.book import Book
from genie.scheduler.request import WorkerPlace
from genie.scheduler.scheduler import Start
from tests.controller.standing import Client, Standing, launched_while, standing
from tests.fakes.agent import FakeAgent, node_info
from tests.fakes.clock import FakeClock
from tests.waiting import until


def spec(name: str = "job", *, gpus: int = 1, node_id: str = "", **wishes: object) -> JobSpec:
    return JobSpec(
        name=name,
        command=("true",),
        resources=Resources(gpus=gpus),
        node_id=node_id,
        wishes=Wishes(**wishes),  # type: ignore[arg-type]
    )


async def agent_of(one: Standing, info: NodeInfo, stack: AsyncExitStack) -> FakeAgent:
    access = await one.join(info.node_id)
    agent = await stack.enter_async_context(FakeAgent(info).connected(one.network, access))
    await agent.register()
    await agent.beat()
    return agent


async def started_together(*launches: tuple[FakeAgent, Launch]) -> None:
    """As agents do: those that come first ask again."""
    for agent, launch in launches[:-1]:
        with pytest.raises(WorkersMissingError, match="workers are not ready yet"):
            await agent.confirm(launch)
    for agent, launch in reversed(launches):
        await agent.confirm(launch)


# -- what nodes must have ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wish", "there"),
    [
        ({"gpu_models": ("H200", "H100")}, {"name": "H100"}),
        ({"vendor": "amd"}, {"vendor": Vendor.AMD}),
        ({"gpu_memory_min_bytes": 1 << 36}, {"memory_total_bytes": 1 << 36}),
        ({"capability_min": (9, 0)}, {"capability": (9, 0)}),
    ],
)
async def test_a_job_goes_where_the_gpus_are_as_it_asks(
    tmp_path: Path, wish: dict[str, object], there: dict[str, object]
) -> None:
    plain = node_info("plain")
    other = node_info("other")
    gpu = msgspec.structs.replace(other.gpus[0], **there)
    async with standing(tmp_path) as one, one.client() as owner, AsyncExitStack() as stack:
        await agent_of(one, plain, stack)
        with pytest.raises(JobRefusedError, match="plain: its GPUs"):
            await owner.submit_spec(spec(**wish))
        agent = await agent_of(one, msgspec.structs.replace(other, gpus=(gpu,)), stack)
        job = await owner.submit_spec(spec(**wish))
        assert (await agent.next_launch()).job_id == job.job_id


async def test_a_job_goes_where_the_labels_are(tmp_path: Path) -> None:
    labelled = msgspec.structs.replace(node_info("b"), labels={"zone": "east", "disk": "nvme"})
    async with standing(tmp_path) as one, one.client() as owner, one.agent("a"), AsyncExitStack() as stack:
        agent = await agent_of(one, labelled, stack)
        job = await owner.submit_spec(spec(labels={"zone": "east"}))
        assert (await agent.next_launch()).job_id == job.job_id
        with pytest.raises(JobRefusedError, match="no label zone=west"):
            await owner.submit_spec(spec(labels={"zone": "west"}))


async def test_memory_that_others_use_is_not_given_out(tmp_path: Path) -> None:
    def with_outside(size_bytes: int) -> NodeInfo:
        info = node_info("n1")
        gpu = msgspec.structs.replace(info.gpus[0], memory_outside_bytes=size_bytes)
        return msgspec.structs.replace(info, gpus=(gpu,))

    async with standing(tmp_path) as one, one.client() as owner, AsyncExitStack() as stack:
        agent = await agent_of(one, with_outside(6 << 30), stack)
        wish = JobSpec(name="large", command=("true",), resources=Resources(gpus=1, gpu_memory_bytes=4 << 30))
        job = await owner.submit_spec(wish)
        assert job.state is JobState.QUEUED
        await agent.beat(node=with_outside(1 << 30))
        assert (await agent.next_launch()).job_id == job.job_id


# -- gangs ------------------------------------------------------------------------------------------


async def test_workers_start_together_and_know_each_other(tmp_path: Path) -> None:
    async with standing(tmp_path) as one, one.client() as owner, one.agent("a") as a, one.agent("b") as b:
        job = await owner.submit_spec(spec(workers=2))
        first, second = await a.next_launch(), await b.next_launch()
        assert {first.job_id, second.job_id} == {f"{job.job_id}.0", f"{job.job_id}.1"}
        assert {first.rank, second.rank} == {0, 1}
        assert first.hosts == second.hosts == ("127.0.0.1", "127.0.0.1")
        assert first.placement.epoch == second.placement.epoch
        await started_together((a, first), (b, second))
        running = await owner.job(job.job_id)
        assert (running.state, running.reason) == (JobState.RUNNING, "started on 2 nodes")
        a.end(first)
        await a.beat()
        assert (await owner.job(job.job_id)).state is JobState.RUNNING
        assert (await owner.held("a"), await owner.held("b")) == ([], [second.job_id])
        b.end(second)
        await b.beat()
        over = await owner.job(job.job_id)
        assert (over.state, over.exit_code, over.reason) == (JobState.SUCCEEDED, 0, "exit code 0")
        assert [place.outcome for place in over.placements] == [JobState.SUCCEEDED] * 2


async def test_a_gang_that_does_not_fit_as_a_whole_holds_nothing(tmp_path: Path) -> None:
    async with standing(tmp_path) as one, one.client() as owner, one.agent("a") as a, one.agent("b") as b:
        busy = await owner.submit_spec(spec("busy", node_id="b"))
        launch = await b.start_next()
        gang = await owner.submit_spec(spec("gang", workers=2))
        assert (gang.state, await owner.held("a")) == (JobState.QUEUED, [])
        b.end(launch)
        await b.beat()
        assert (await owner.job(busy.job_id)).state is JobState.SUCCEEDED
        assert {parse_unit((await agent.next_launch()).job_id)[0] for agent in (a, b)} == {gang.job_id}


async def test_a_gang_too_large_for_the_cluster_is_refused(tmp_path: Path) -> None:
    async with standing(tmp_path) as one, one.client() as owner, one.agent("a", gpus=2):
        with pytest.raises(JobRefusedError, match="asks for 3 workers in all; there is room for 2"):
            await owner.submit_spec(spec(workers=3))
        with pytest.raises(JobRefusedError, match="there is room for 1"):
            await owner.submit_spec(spec(workers=2, spread=Spread.SPREAD))
        with pytest.raises(JobRefusedError, match="3 workers in one node; there is room for 2"):
            await owner.submit_spec(spec(workers=3, within=Within.NODE))


async def test_an_elastic_gang_starts_with_what_there_is(tmp_path: Path) -> None:
    async with standing(tmp_path) as one, one.client() as owner, one.agent("a", gpus=2) as a:
        job = await owner.submit_spec(spec(workers=8, workers_min=2))
        launches = [await a.next_launch(), await a.next_launch()]
        assert {len(launch.hosts) for launch in launches} == {2}
        assert {launch.placement.gpu_ids for launch in launches} == {(0,), (1,)}
        await started_together(*((a, launch) for launch in launches))
        assert (await owner.job(job.job_id)).state is JobState.RUNNING


async def test_a_worker_that_fails_ends_the_others_and_the_job(tmp_path: Path) -> None:
    async with standing(tmp_path) as one, one.client() as owner, one.agent("a") as a, one.agent("b") as b:
        job = await owner.submit_spec(spec(workers=2))
        first, second = await a.next_launch(), await b.next_launch()
        await started_together((a, first), (b, second))
        a.end(first, 3)
        await a.beat()
        ending = await owner.job(job.job_id)
        assert (ending.state, ending.stop) == (JobState.RUNNING, Stop.WORKER)
        ack = await b.beat()
        assert [order.job_id for order in ack.kill] == [second.job_id]
        b.end(second, -15)
        await b.beat()
        over = await owner.job(job.job_id)
        assert (over.state, over.exit_code) == (JobState.FAILED, 3)
        assert over.reason == f"worker {first.rank} on node a: exit code 3"
        assert (await owner.held("a"), await owner.held("b")) == ([], [])


async def test_a_worker_whose_node_is_gone_makes_the_job_lost(tmp_path: Path) -> None:
    clock = FakeClock()
    async with (
        standing(tmp_path, clock=clock) as one,
        one.client() as owner,
        one.agent("a") as a,
        AsyncExitStack() as stack,
    ):
        b = await agent_of(one, node_info("b"), stack)
        job = await owner.submit_spec(spec(workers=2))

        async def launched() -> bool:
            await clock.advance(0.1)
            return not a.launches.empty() and not b.launches.empty()

        await until(launched)
        first, second = await a.next_launch(), await b.next_launch()
        await started_together((a, first), (b, second))
        await stack.aclose()

        async def lost() -> bool:
            await clock.advance(1.0)
            await a.beat()
            return (await owner.job(job.job_id)).stop is Stop.WORKER

        await until(lost)
        a.end(first, -15)
        await a.beat()
        over = await owner.job(job.job_id)
        assert over.state is JobState.LOST
        assert "on node b: node b was silent" in over.reason


async def test_a_launch_that_one_node_refuses_is_void_on_all(tmp_path: Path) -> None:
    async with standing(tmp_path) as one, one.client() as owner, one.agent("a") as a, one.agent("b") as b:
        b.refuse = LaunchError("not today")
        job = await owner.submit_spec(spec(workers=2))
        first = await a.next_launch()

        async def queued() -> bool:
            return "not today" in "".join(step.reason for step in (await owner.job(job.job_id)).history)

        await until(queued)
        with pytest.raises(FencedError):
            await a.confirm(first)
        b.refuse = None
        again, other = await a.next_launch(), await b.next_launch()
        assert again.placement.epoch > first.placement.epoch
        await started_together((a, again), (b, other))


async def test_what_is_left_of_a_gang_that_lost_an_accelerator_is_held(tmp_path: Path) -> None:
    async with standing(tmp_path) as one, one.client() as owner, one.agent("a") as a, one.agent("b") as b:
        await owner.submit_spec(spec("gang", workers=2))
        first, second = await a.next_launch(), await b.next_launch()
        await started_together((a, first), (b, second))
        await a.beat(node=msgspec.structs.replace(a.info, gpus=()))
        job = await owner.submit_spec(spec("next"))
        assert job.state is JobState.QUEUED
        assert "has a reservation on b" in job.reason
        for agent, launch in ((a, first), (b, second)):
            agent.end(launch)
            await agent.beat(node=msgspec.structs.replace(agent.info, gpus=b.info.gpus * (agent is b)))
        assert (await b.next_launch()).job_id == job.job_id


async def test_what_a_worker_held_that_is_over_goes_to_others_while_the_rest_runs_on(tmp_path: Path) -> None:
    async with standing(tmp_path) as one, one.client() as owner, one.agent("a") as a, one.agent("b") as b:
        gang = await owner.submit_spec(spec("gang", workers=2))
        first, second = await a.next_launch(), await b.next_launch()
        await started_together((a, first), (b, second))
        a.end(first)
        await a.beat()
        job = await owner.submit_spec(spec("next"))
        assert (await a.start_next()).job_id == job.job_id
        assert (await owner.submit_spec(spec("last"))).state is JobState.QUEUED
        assert (await owner.job(gang.job_id)).state is JobState.RUNNING


async def test_a_gang_of_which_one_worker_cannot_start_is_launched_again(tmp_path: Path) -> None:
    async with standing(tmp_path) as one, one.client() as owner, one.agent("a") as a, one.agent("b") as b:
        job = await owner.submit_spec(spec(workers=2))
        first, second = await a.next_launch(), await b.next_launch()
        b.end(second, None, reason="the node lost contact", started=False)
        await b.beat()
        waiting = await owner.job(job.job_id)
        assert waiting.state is JobState.QUEUED
        assert [step.reason for step in waiting.history][-1] == (
            f"worker {second.rank} on node b: the node lost contact"
        )
        assert (await owner.held("a"), await owner.held("b")) == ([], [])
        with pytest.raises(FencedError):
            await a.confirm(first)
        await started_together((a, await a.next_launch()), (b, await b.next_launch()))
        assert (await owner.job(job.job_id)).state is JobState.RUNNING


async def test_a_gang_of_which_one_launch_is_lost_does_not_wait_for_it_for_ever(tmp_path: Path) -> None:
    clock = FakeClock()
    async with (
        standing(tmp_path, clock=clock) as one,
        one.client() as owner,
        one.agent("a") as a,
        one.agent("b") as b,
    ):
        job = await owner.submit_spec(spec(workers=2))
        first = await launched_while(clock, a, b)
        a.running[first.job_id] = RunningJob(job_id=first.job_id, epoch=first.placement.epoch)

        async def is_void() -> bool:
            await clock.advance(1.0)
            await a.beat()
            await b.beat()
            steps = (await owner.job(job.job_id)).history
            return any("not confirmed in time on b" in step.reason for step in steps)

        await until(is_void)


async def test_each_worker_has_its_own_log(tmp_path: Path) -> None:
    async with standing(tmp_path) as one, one.client() as owner, one.agent("a", gpus=2) as a:
        job = await owner.submit_spec(spec("pair", workers=2))
        launches = [await a.next_launch(), await a.next_launch()]
        await started_together(*((a, launch) for launch in launches))
        for rank in range(2):
            a.logs[f"{job.job_id}.{rank}"] = f"rank {rank}".encode()
        logs = [
            (await owner.ask(ReadLog(job_id=key))).data
            for key in (job.job_id, f"{job.job_id}.0", f"{job.job_id}.1", "pair.1", "pair")
        ]
        assert logs == [b"rank 0", b"rank 0", b"rank 1", b"rank 1", b"rank 0"]
        with pytest.raises(JobNotFoundError, match="has no worker of rank 2: the last is 1"):
            await owner.ask(ReadLog(job_id=f"{job.job_id}.2"))


async def test_cancelling_a_gang_ends_every_worker(tmp_path: Path) -> None:
    async with standing(tmp_path) as one, one.client() as owner, one.agent("a") as a, one.agent("b") as b:
        job = await owner.submit_spec(spec(workers=2))
        first, second = await a.next_launch(), await b.next_launch()
        await started_together((a, first), (b, second))
        await owner.ask(CancelJob(job_id=job.job_id))
        assert (await a.next_kill()).job_id == first.job_id
        assert (await b.next_kill()).job_id == second.job_id
        for agent, launch in ((a, first), (b, second)):
            agent.end(launch, -15)
            await agent.beat()
        assert (await owner.job(job.job_id)).state is JobState.CANCELLED


async def test_a_gang_outlives_its_controller(tmp_path: Path) -> None:
    async with standing(tmp_path) as one:
        access = {name: await one.join(name) for name in ("a", "b")}
        async with AsyncExitStack() as stack:
            owner = await stack.enter_async_context(one.client())
            a, b = [
                await stack.enter_async_context(
                    FakeAgent(node_info(name)).connected(one.network, access[name])
                )
                for name in ("a", "b")
            ]
            for agent in (a, b):
                await agent.register()
                await agent.beat()
            job = await owner.submit_spec(spec(workers=2))
            first, second = await a.next_launch(), await b.next_launch()
            await started_together((a, first), (b, second))
        await one.restart()
        async with AsyncExitStack() as stack:
            owner = await stack.enter_async_context(one.client())
            for agent in (a, b):
                await stack.enter_async_context(agent.connected(one.network, access[agent.info.node_id]))
                await agent.register()
                await agent.beat()
            more = await owner.submit_spec(spec("more"))
            assert more.state is JobState.QUEUED, "what runs is held in the new life, too"
            for agent, launch in ((a, first), (b, second)):
                agent.end(launch)
                await agent.beat()
            assert (await owner.job(job.job_id)).state is JobState.SUCCEEDED
            await until(lambda: not a.launches.empty() or not b.launches.empty())


# -- preemption and time limits ---------------------------------------------------------------------


async def _running(owner: Client, agent: FakeAgent, **wishes: object) -> tuple[Job, Launch]:
    job = await owner.submit_spec(spec("low", **wishes))
    return job, await agent.start_next()


async def test_a_higher_priority_takes_the_place_of_what_may_be_preempted_which_waits_again(
    tmp_path: Path,
) -> None:
    async with standing(tmp_path) as one, one.client() as owner, one.agent("a") as a:
        low, launch = await _running(owner, a, preemptible=True, grace_s=5.0)
        high = await owner.submit_spec(spec("high", priority=10))
        assert high.reason == f"waits for {low.job_id} to make room"
        kill = await a.next_kill()
        assert (kill.job_id, kill.reason) == (low.job_id, f"makes room for {high.job_id}")
        assert (await owner.job(low.job_id)).stop is Stop.PREEMPT
        a.end(launch, 0)
        await a.beat()
        second = await a.start_next()
        assert second.job_id == high.job_id
        waiting = await owner.job(low.job_id)
        assert (waiting.state, waiting.stop, waiting.exit_code) == (JobState.QUEUED, Stop.NO, None)
        a.end(second)
        await a.beat()
        assert (await a.start_next()).job_id == low.job_id


async def test_what_is_confirmed_while_it_is_taken_back_is_told_to_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with standing(tmp_path) as one, one.client() as owner, one.agent("a") as a:
        low = await owner.submit_spec(spec("low", preemptible=True))
        launch = await a.next_launch()
        requeue = Jobs.requeue

        async def too_late(self: Jobs, job_id: str, *, epoch: int, reason: str) -> None:
            await a.confirm(launch)
            await requeue(self, job_id, epoch=epoch, reason=reason)

        monkeypatch.setattr(Jobs, "requeue", too_late)
        high = await owner.submit_spec(spec("high", priority=10))
        assert (await a.next_kill()).job_id == low.job_id
        a.end(launch, -15)
        await a.beat()
        assert (await a.start_next()).job_id == high.job_id


async def test_what_was_decided_and_not_done_is_decided_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with standing(tmp_path) as one, one.client() as owner, one.agent("a") as a:
        low, _ = await _running(owner, a, preemptible=True)

        async def broken(self: Jobs, job_id: str, *, epoch: int, stop: Stop, reason: str) -> None:
            monkeypatch.undo()
            raise AssertionError("broken once")

        monkeypatch.setattr(Jobs, "stop", broken)
        await owner.submit_spec(spec("high", priority=10))
        assert (await a.next_kill()).job_id == low.job_id


async def test_a_start_that_was_decided_before_everything_was_read_anew_is_left_out(tmp_path: Path) -> None:
    async with standing(tmp_path) as one, one.client() as owner, one.agent("a"):
        await owner.ask(DrainNode(node_id="a"))
        job = await owner.submit_spec(spec())
        assert one.controller is not None
        jobs, ledger = one.controller._jobs, one.controller._ledger
        start, placed = Start(job.job_id, (WorkerPlace("a", (0,)),), "decided"), list[Job]()
        ledger._uncertain = True
        await jobs.place([start], placed=placed.append)
        assert (placed, (await owner.job(job.job_id)).state) == ([], JobState.QUEUED)
        await jobs.place([start], placed=placed.append)
        assert [one.job_id for one in placed] == [job.job_id]


async def test_what_may_not_be_preempted_is_left_alone(tmp_path: Path) -> None:
    async with standing(tmp_path) as one, one.client() as owner, one.agent("a") as a:
        low, _ = await _running(owner, a)
        high = await owner.submit_spec(spec("high", priority=10))
        assert high.state is JobState.QUEUED
        await a.beat()
        assert a.kills.empty()
        assert not (await owner.job(low.job_id)).stop


async def test_a_preempted_job_can_be_cancelled_on_its_way_out(tmp_path: Path) -> None:
    async with standing(tmp_path) as one, one.client() as owner, one.agent("a") as a:
        low, launch = await _running(owner, a, preemptible=True)
        await owner.submit_spec(spec("high", priority=10))
        await a.next_kill()
        await owner.ask(CancelJob(job_id=low.job_id))
        a.end(launch, -15)
        await a.beat()
        assert (await owner.job(low.job_id)).state is JobState.CANCELLED


async def test_a_preemption_is_remembered_by_the_next_controller(tmp_path: Path) -> None:
    async with standing(tmp_path) as one:
        access = await one.join("a")
        agent = FakeAgent(node_info("a", gpus=2))
        async with one.client() as owner, agent.connected(one.network, access):
            await agent.register()
            await agent.beat()
            low, _ = await _running(owner, agent, preemptible=True)
            other, _ = await _running(owner, agent, preemptible=True)
            await owner.submit_spec(spec("high", priority=10))
            victim = (await agent.next_kill()).job_id
        await one.restart()
        async with one.client() as owner, agent.connected(one.network, access):
            await agent.register()
            ack = await agent.beat()
            assert [order.job_id for order in ack.kill] == [victim]
            await owner.submit_spec(spec("last"))
            stops = {job.job_id: (await owner.job(job.job_id)).stop for job in (low, other)}
            assert sorted(stops.values()) == ["", "preempt"], "one place was wanted, one job goes"


async def test_a_job_ends_when_its_time_is_over(tmp_path: Path) -> None:
    clock = FakeClock()
    async with standing(tmp_path, clock=clock) as one, one.client() as owner, one.agent("a") as a:
        job = await owner.submit_spec(spec(time_limit_s=5.0))

        async def given() -> bool:
            await clock.advance(0.1)
            return not a.launches.empty()

        await until(given)
        launch = await a.start_next()

        async def told() -> bool:
            await clock.advance(1.0)
            await a.beat()
            return not a.kills.empty()

        await until(told)
        assert (await a.next_kill()).reason == "its time limit of 5 s is over"
        a.end(launch, -15)
        await a.beat()
        over = await owner.job(job.job_id)
        assert (over.state, over.reason) == (
            JobState.FAILED,
            "its time limit of 5 s is over (killed by signal 15)",
        )


async def test_a_job_that_had_its_time_has_failed_although_its_node_is_gone(tmp_path: Path) -> None:
    async with standing(tmp_path) as one, one.client() as owner, one.agent("a") as a:
        job, launch = await _running(owner, a, time_limit_s=3600.0)
        assert one.controller is not None
        jobs, epoch = one.controller._jobs, launch.placement.epoch
        await jobs.stop(job.job_id, epoch=epoch, stop=Stop.LIMIT, reason="its time limit is over")
        await jobs.lose(job.job_id, epoch=epoch, reason="node a was silent")
        over = await owner.job(job.job_id)
        assert (over.state, over.reason) == (JobState.FAILED, "its time limit is over (node a was silent)")


async def test_small_jobs_with_time_limits_go_before_a_large_one_that_waits(tmp_path: Path) -> None:
    async with standing(tmp_path) as one, one.client() as owner, one.agent("a", gpus=2) as a:
        await _running(owner, a, time_limit_s=1000.0)
        large = await owner.submit_spec(spec("large", gpus=2))
        assert large.reason == "has a reservation on a"
        long = await owner.submit_spec(spec("long"))
        assert long.reason == f"would delay {large.job_id}, which has a reservation"
        short = await owner.submit_spec(spec("short", time_limit_s=10.0))
        assert (await a.next_launch()).job_id == short.job_id


async def test_when_the_last_gpus_are_gone_for_good_accelerators_are_cpus_again(tmp_path: Path) -> None:
    async with standing(tmp_path) as one, one.client() as owner, AsyncExitStack() as stack:
        cpu = await agent_of(one, node_info("c", vendor=Vendor.CPU), stack)
        gpu = await agent_of(one, node_info("g"), stack)
        job = await owner.submit_spec(spec())
        assert (await gpu.next_launch()).job_id == job.job_id
        await owner.ask(CancelJob(job_id=job.job_id))
        await gpu.leave()
        await owner.ask(RemoveNode(node_id="g"))
        job = await owner.submit_spec(spec())
        assert (await cpu.next_launch()).job_id == job.job_id


async def test_near_and_apart_go_by_names(tmp_path: Path) -> None:
    async with (
        standing(tmp_path) as one,
        one.client() as owner,
        one.agent("a", gpus=3) as a,
        one.agent("b", gpus=3) as b,
    ):
        lonely = await owner.submit_spec(spec("lonely", near=("nobody",)))
        assert lonely.reason == "waits for a job named nobody to run"
        await owner.submit_spec(spec("base", node_id="b"))
        await b.start_next()
        beside = await owner.submit_spec(spec("beside", near=("base",)))
        away = await owner.submit_spec(spec("away", apart=("base",)))
        assert (await b.next_launch()).job_id == beside.job_id
        assert (await a.next_launch()).job_id == away.job_id


async def test_a_node_with_more_accelerators_than_are_counted_gives_out_the_first(tmp_path: Path) -> None:
    info = node_info("big")
    gpus = tuple(GPUInfo(gpu_id=n, name="Fake", vendor=Vendor.NVIDIA) for n in range(20))
    async with standing(tmp_path) as one, one.client() as owner, AsyncExitStack() as stack:
        agent = await agent_of(one, msgspec.structs.replace(info, gpus=gpus), stack)
        await owner.submit_spec(spec(gpus=16))
        assert (await agent.next_launch()).placement.gpu_ids == tuple(range(16))
        with pytest.raises(JobRefusedError, match="big: has 16 GPUs"):
            await owner.submit_spec(spec(gpus=17))


# -- quotas -----------------------------------------------------------------------------------------


async def test_a_quota_bounds_its_tenant_from_the_moment_that_it_is_set(tmp_path: Path) -> None:
    async with standing(tmp_path) as one, one.client() as owner, one.agent("a", gpus=4) as a:
        token = await one.token(TokenKind.USER, tenant="blue")
        await owner.ask(SetQuota(quota=QuotaRecord(tenant="blue", gpus=1.0, borrow_gpus=1.0)))
        async with one.client(token) as blue:
            await blue.submit_spec(spec("own"))
            await a.start_next()
            second = await blue.submit_spec(spec("second"))
            assert "its quota is 1 GPU; only preemptible jobs may borrow more" in second.reason
            loan = await blue.submit_spec(spec("loan", preemptible=True))
            assert (await a.start_next()).job_id == loan.job_id
            more = await blue.submit_spec(spec("more", preemptible=True))
            assert "it may borrow 1 GPU" in more.reason
        await owner.ask(SetQuota(quota=QuotaRecord(tenant="blue", gpus=3.0, borrow_gpus=1.0)))
        assert {(await a.start_next()).job_id, (await a.start_next()).job_id} == {
            second.job_id,
            more.job_id,
        }


async def test_what_is_borrowed_is_taken_back_by_whom_it_belongs_to(tmp_path: Path) -> None:
    async with standing(tmp_path) as one, one.client() as owner, one.agent("a", gpus=2) as a:
        for tenant in ("blue", "red"):
            await owner.ask(SetQuota(quota=QuotaRecord(tenant=tenant, gpus=1.0)))
        blue_token = await one.token(TokenKind.USER, tenant="blue")
        red_token = await one.token(TokenKind.USER, tenant="red")
        async with one.client(blue_token) as blue, one.client(red_token) as red:
            for _ in range(2):
                await blue.submit_spec(spec("blue", preemptible=True))
                await a.start_next()
            mine = await red.submit_spec(spec("red"))
            assert "to make room" in mine.reason
            assert "j-" not in mine.reason, "jobs of others are not named"
            kill = await a.next_kill()
            running = a.running[kill.job_id]
            a.running.pop(kill.job_id)
            a.exits[kill.job_id] = ExitReport(
                job_id=kill.job_id, epoch=running.epoch, exit_code=-15, reason="", ended_at=0.0
            )
            await a.beat()
            assert (await a.start_next()).job_id == mine.job_id


async def test_the_next_choice_is_prepared_between_decisions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    budgets: list[int] = []
    refresh = Book.refresh

    def counted(book: Book, budget: int) -> bool:
        budgets.append(budget)
        return refresh(book, budget)

    monkeypatch.setattr(Book, "refresh", counted)
    async with standing(tmp_path) as one, one.client() as owner, one.agent("a") as a:
        await owner.submit_spec(spec())
        await a.start_next()
        await until(lambda: bool(budgets))
        assert 0 < budgets[0] <= 100_000, "it must not hold up what comes meanwhile"


# -- bounds -----------------------------------------------------------------------------------------


async def test_no_tenant_fills_the_queue_alone(tmp_path: Path) -> None:
    async with standing(tmp_path, queue_max=10) as one, one.client() as owner:
        token = await one.token(TokenKind.USER, tenant="blue")
        async with one.client(token) as blue:
            for _ in range(9):
                await blue.submit_spec(spec())
            with pytest.raises(JobRefusedError, match="9 jobs of tenant blue wait, and a tenth"):
                await blue.submit_spec(spec())
        await owner.submit_spec(spec())
        with pytest.raises(JobRefusedError, match="the queue is full"):
            await owner.submit_spec(spec())


async def test_so_many_kinds_of_jobs_may_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "KINDS_WAITING_MAX", 3)
    async with standing(tmp_path) as one, one.client() as owner, one.agent("a", gpus=8) as a:
        await owner.submit_spec(spec("all", gpus=8))
        await a.start_next()
        for gpus in (1, 2, 3):
            await owner.submit_spec(spec(gpus=gpus))
        with pytest.raises(JobRefusedError, match="different kinds of jobs wait already"):
            await owner.submit_spec(spec(gpus=4))
        await owner.submit_spec(spec(gpus=3))


async def test_a_cancelled_job_names_no_job_of_others(tmp_path: Path) -> None:
    async with standing(tmp_path) as one, one.client() as owner, one.agent("a") as a:
        token = await one.token(TokenKind.USER, tenant="blue")
        async with one.client(token) as blue:
            mine = await blue.submit_spec(spec(preemptible=True))
            launch = await a.start_next()
            high = await owner.submit_spec(spec("high", priority=9))
            await a.next_kill()
            a.end(launch, -15)
            await a.beat()
            await a.start_next()
            told = (await blue.ask(CancelJob(job_id=mine.job_id))).job
        assert high.job_id not in str(told)
        assert "makes room for another job" in str(told.history)


async def test_accelerators_that_are_not_there_are_named(tmp_path: Path) -> None:
    async with standing(tmp_path) as one, one.client() as owner, one.agent("a"):
        pinned = msgspec.structs.replace(spec(node_id="a"), gpu_ids=(99,))
        with pytest.raises(JobRefusedError, match="node a has no accelerator 99"):
            await owner.submit_spec(pinned)


async def test_a_grace_counts_for_preemption_and_not_for_cancelling(tmp_path: Path) -> None:
    async with standing(tmp_path) as one, one.client() as owner, one.agent("a") as a:
        low, _ = await _running(owner, a, preemptible=True, grace_s=86400.0)
        await owner.submit_spec(spec("high", priority=9))
        assert (await a.next_kill()).grace_s == 86400.0
        assert [order.grace_s for order in (await a.beat()).kill] == [86400.0]
        await owner.ask(CancelJob(job_id=low.job_id))
        assert (await a.next_kill()).grace_s is None
        assert [order.grace_s for order in (await a.beat()).kill] == [None]


async def test_who_is_preempted_is_over_no_later_than_at_its_limit(tmp_path: Path) -> None:
    clock = FakeClock()
    async with standing(tmp_path, clock=clock) as one, one.client() as owner, one.agent("a") as a:

        async def next_grace_s() -> float:
            """A little later, as the answer to a heartbeat says it."""
            await clock.advance(0.25)
            (order,) = (await a.beat()).kill
            assert order.grace_s is not None
            return order.grace_s

        async def until_something(queue: asyncio.Queue[Any]) -> None:
            async def has_come() -> bool:
                await clock.advance(0.05)
                await a.beat()
                return not queue.empty()

            await until(has_come)

        low = await owner.submit_spec(spec("low", preemptible=True, grace_s=600.0, time_limit_s=12.0))
        await until_something(a.launches)
        launch = await a.start_next()
        started_at = (await owner.job(low.job_id)).started_at
        assert started_at is not None
        await owner.submit_spec(spec("high", priority=9))
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
        assert (await owner.job(low.job_id)).state is JobState.QUEUED, "it had time left when it had to go"


async def test_jobs_of_nothing_are_bounded_on_a_node_and_hear_it(tmp_path: Path) -> None:
    async with (
        standing(tmp_path, node_workers_max=2) as one,
        one.client() as owner,
        one.agent("a", gpus=1) as a,
    ):
        await owner.submit()
        first = await a.start_next()
        await owner.submit()
        await a.start_next()
        third = await owner.submit()
        why = "runs 2 workers, the most on one node (controller.node_workers_max)"
        assert (third.state, third.reason) == (JobState.QUEUED, f"no node will do: a: {why}")
        (ruled_out,) = (await owner.ask(ExplainJob(job_id=third.job_id))).ruled_out
        assert (ruled_out.reason, ruled_out.ever) == (why, False)
        with pytest.raises(JobRefusedError, match="3 workers in all; there is room for 2"):
            await owner.submit_spec(JobSpec(name="x", command=("x",), wishes=Wishes(workers=3)))
        a.end(first)
        await a.beat()
        assert (await a.start_next()).job_id == third.job_id
