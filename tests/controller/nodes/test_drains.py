"""Drains that empty a node: restartable jobs move, others stay, and a new leader continues."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from genie.controller.jobs.transitions import JobTransitions
from genie.controller.ledger import Transaction
from genie.controller.nodes import drains
from genie.controller.rows import NodeRecord
from genie.errors import GenieError, NodeNotFoundError, UsageError
from genie.model.job import Job, JobSpec, JobState, StopReason
from genie.model.messages import (
    CancelJob,
    DrainNode,
    DrainStarted,
    EmptyNode,
    ExplainJob,
    Kill,
    Launch,
    ListNodes,
    OpenDevice,
    SessionHeartbeat,
    UndrainNode,
)
from genie.model.tenant import TokenKind
from tests.controller.running_controller import (
    Client,
    RunningController,
    advance_until_launch,
    job_spec,
    running_controller,
)
from tests.fakes.agent import FakeAgent, make_node_info
from tests.fakes.clock import FakeClock
from tests.waiting import until

MOVED = "moved from a: draining (new fans)"


@dataclass
class TwoNodes:
    """A controller with nodes a and b of two GPUs each."""

    one: RunningController
    owner: Client
    a: FakeAgent
    b: FakeAgent
    clock: FakeClock

    async def start_on_a(self, spec: JobSpec) -> tuple[Job, Launch]:
        """Submit a job that starts on node a, because b accepts no jobs meanwhile."""
        await self.owner.ask(DrainNode(node_id="b"))
        job = await self.owner.submit_spec(spec)
        launch = await advance_until_launch(self.clock, self.a, self.b)
        await self.a.confirm(launch)
        await self.owner.ask(UndrainNode(node_id="b"))
        return job, launch

    async def empty_a(self) -> DrainStarted:
        return await self.owner.ask(EmptyNode(node_id="a", reason="new fans"))

    async def advance(self, seconds: float) -> None:
        """Advance the clock, with heartbeats of both nodes."""
        for _ in range(int(seconds / 0.5)):
            await self.clock.advance(0.5)
            await self.a.beat()
            await self.b.beat()

    async def advance_until_kill(self) -> Kill:
        async def is_sent() -> bool:
            await self.advance(0.5)
            return not self.a.kills.empty()

        await until(is_sent, what="a kill")
        return await self.a.next_kill()

    async def end_on_a(self, launch: Launch, exit_code: int | None = -15) -> None:
        """`exit_code`: None as of a job that its agent has stopped, whatever its exit code."""
        self.a.end(launch, exit_code)
        await self.a.beat()


def restartable(name: str = "train", **constraints: object) -> JobSpec:
    return job_spec(name, preemptible=True, **constraints)


@asynccontextmanager
async def two_nodes(folder: Path) -> AsyncIterator[TwoNodes]:
    clock = FakeClock()
    async with (
        running_controller(folder, clock=clock) as one,
        one.client() as owner,
        one.agent("a", gpus=2) as a,
        one.agent("b", gpus=2) as b,
    ):
        yield TwoNodes(one, owner, a, b, clock)


async def test_restartable_job_moves_with_its_grace_period_and_others_stay(tmp_path: Path) -> None:
    async with two_nodes(tmp_path) as setup:
        moving, launch = await setup.start_on_a(restartable(grace_s=7.0))
        staying, _ = await setup.start_on_a(job_spec("serve"))
        started = await setup.empty_a()
        assert started == DrainStarted(
            moving_job_ids=(moving.job_id,), staying_job_ids=(staying.job_id,), grace_s_max=7.0
        )
        kill = await setup.advance_until_kill()
        assert (kill.job_id, kill.grace_s) == (moving.job_id, 7.0)
        during = await setup.owner.job(moving.job_id)
        assert (during.state, during.reason) == (
            JobState.RUNNING,
            "being stopped: moving from a: draining (new fans)",
        )
        await setup.end_on_a(launch, None)
        again = await advance_until_launch(setup.clock, setup.b, setup.a)
        await setup.b.confirm(again)
        moved = await setup.owner.job(moving.job_id)
        assert (moved.state, moved.run_number) == (JobState.RUNNING, 2)
        assert MOVED in [step.reason for step in moved.history if step.state is JobState.QUEUED]
        await setup.advance(5.0)
        assert (await setup.owner.job(staying.job_id)).stop is StopReason.NONE
        assert await setup.owner.held("a") == [staying.job_id]
        assert setup.a.kills.empty()


async def test_drain_of_an_idle_node_moves_nothing(tmp_path: Path) -> None:
    async with two_nodes(tmp_path) as setup:
        assert await setup.empty_a() == DrainStarted()


async def test_session_stays_until_it_is_closed(tmp_path: Path) -> None:
    async with two_nodes(tmp_path) as setup:
        client = make_node_info("client", gpus=0)
        await setup.owner.ask(SessionHeartbeat(node=client))
        opened = await setup.owner.ask(
            OpenDevice(session_node_id="client", node_id="a", gpu_id=0, request_id="r")
        )
        await setup.a.confirm(await advance_until_launch(setup.clock, setup.a, setup.b))
        started = await setup.empty_a()
        assert (started.moving_job_ids, started.staying_job_ids) == ((), (opened.job.job_id,))
        await setup.advance(2.0)
        assert setup.a.kills.empty()


async def _start_gang_on_both(setup: TwoNodes, **constraints: object) -> tuple[Job, Launch, Launch]:
    gang = await setup.owner.submit_spec(restartable("gang", gpus=2, workers=2, **constraints))
    on_a = await advance_until_launch(setup.clock, setup.a, setup.b)
    on_b = await setup.b.next_launch()
    with pytest.raises(GenieError, match="workers are not ready yet"):
        await setup.a.confirm(on_a)
    await setup.b.confirm(on_b)
    await setup.a.confirm(on_a)
    return gang, on_a, on_b


async def test_gang_with_one_worker_on_the_node_is_queued_again_as_a_whole(tmp_path: Path) -> None:
    async with two_nodes(tmp_path) as setup:
        gang, on_a, on_b = await _start_gang_on_both(setup)
        assert (await setup.empty_a()).moving_job_ids == (gang.job_id,)
        assert (await setup.advance_until_kill()).job_id == on_a.job_id
        assert (await setup.b.next_kill()).job_id == on_b.job_id
        await setup.end_on_a(on_a)
        assert (await setup.owner.job(gang.job_id)).state is JobState.RUNNING, "a worker is left"
        setup.b.end(on_b, -15)
        await setup.b.beat()
        waiting = await setup.owner.job(gang.job_id)
        assert (waiting.state, waiting.history[-1].reason) == (JobState.QUEUED, MOVED)


async def test_elastic_gang_restarts_smaller_on_the_other_node(tmp_path: Path) -> None:
    async with two_nodes(tmp_path) as setup:
        gang, on_a, on_b = await _start_gang_on_both(setup, workers_min=1)
        await setup.empty_a()
        await setup.advance_until_kill()
        setup.b.end(on_b, -15)
        await setup.b.beat()
        await setup.end_on_a(on_a)
        again = await advance_until_launch(setup.clock, setup.b, setup.a)
        assert again.job_id == gang.job_id, "one worker has no rank"
        assert [each.node_id for each in (await setup.owner.job(gang.job_id)).placements] == ["b"]


@pytest.mark.parametrize("spec", [restartable(), job_spec("serve")], ids=["restartable", "other"])
async def test_command_that_has_not_started_is_queued_again(tmp_path: Path, spec: JobSpec) -> None:
    async with two_nodes(tmp_path) as setup:
        await setup.owner.ask(DrainNode(node_id="b"))
        job = await setup.owner.submit_spec(spec)
        launch = await advance_until_launch(setup.clock, setup.a, setup.b)
        await setup.owner.ask(UndrainNode(node_id="b"))
        started = await setup.empty_a()
        assert (started.moving_job_ids, started.grace_s_max) == ((job.job_id,), 0.0)
        again = await advance_until_launch(setup.clock, setup.b, setup.a)
        assert again.job_id == job.job_id
        with pytest.raises(GenieError):
            await setup.a.confirm(launch)
        moved = await setup.owner.job(job.job_id)
        assert (moved.run_number, MOVED in [step.reason for step in moved.history]) == (1, True)


async def test_a_reason_that_is_not_one_line_is_rejected_by_value(tmp_path: Path) -> None:
    async with running_controller(tmp_path) as one, one.client() as owner, one.agent("n1"):
        for reason in ("two\nlines", "x" * 201, "\x1b[31m"):
            with pytest.raises(UsageError, match=re.escape(repr(reason[:60]))) as caught:
                await owner.ask(DrainNode(node_id="n1", reason=reason))
            assert "200 printable characters" in caught.value.hint


async def test_job_that_matches_only_the_draining_node_waits_with_that_reason(tmp_path: Path) -> None:
    async with two_nodes(tmp_path) as setup:
        job = await setup.owner.submit_spec(job_spec("pinned", node_id="a", preemptible=True))
        launch = await advance_until_launch(setup.clock, setup.a, setup.b)
        await setup.a.confirm(launch)
        await setup.empty_a()
        await setup.advance_until_kill()
        await setup.end_on_a(launch)
        await setup.advance(1.0)
        waiting = await setup.owner.job(job.job_id)
        why = "only node a matches, but it accepts no jobs (draining: new fans)"
        assert (waiting.state, why in waiting.reason) == (JobState.QUEUED, True), waiting.reason
        assert waiting.history[-1].reason == MOVED
        explained = await setup.owner.ask(ExplainJob(job_id=job.job_id))
        assert "draining: new fans" in [each.reason for each in explained.ruled_out]
        await setup.owner.ask(UndrainNode(node_id="a"))
        assert (await advance_until_launch(setup.clock, setup.a, setup.b)).job_id == job.job_id


async def test_jobs_move_in_batches_by_priority_until_the_node_is_undrained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drains, "MOVED_JOBS_PER_TICK_MAX", 1)
    async with two_nodes(tmp_path) as setup:
        low, _ = await setup.start_on_a(restartable("low"))
        high, _ = await setup.start_on_a(restartable("high", priority=5))
        assert (await setup.empty_a()).moving_job_ids == (high.job_id, low.job_id)

        async def is_first_job_stopped() -> bool:
            if (await setup.owner.job(high.job_id)).stop is StopReason.PREEMPT:
                return True
            await setup.clock.advance(0.2)  # less than a tick
            await setup.a.beat()
            return False

        await until(is_first_job_stopped)
        await setup.owner.ask(UndrainNode(node_id="a"))
        await setup.advance(3.0)
        assert (await setup.owner.job(low.job_id)).stop is StopReason.NONE
        assert (await setup.owner.job(high.job_id)).stop is StopReason.PREEMPT, "it has been stopped"


async def test_job_that_cannot_be_changed_neither_delays_others_nor_is_retried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="genie.controller.nodes.drains")
    monkeypatch.setattr(drains, "MOVED_JOBS_PER_TICK_MAX", 1)
    stage_stop, attempts = JobTransitions.stage_stop, list[str]()

    def stage_stop_except_high(
        self: JobTransitions, txn: Transaction, job: Job, stop: StopReason, reason: str
    ) -> Job:
        attempts.append(job.spec.name)
        if job.spec.name == "high":
            raise ValueError("a row that cannot be changed")
        return stage_stop(self, txn, job, stop, reason)

    monkeypatch.setattr(JobTransitions, "stage_stop", stage_stop_except_high)
    async with two_nodes(tmp_path) as setup:
        low, _ = await setup.start_on_a(restartable("low"))
        high, _ = await setup.start_on_a(restartable("high", priority=5))
        await setup.empty_a()
        assert (await setup.advance_until_kill()).job_id == low.job_id
        count = attempts.count("high")
        await setup.advance(3.0)
        assert attempts.count("high") == count, "it is not retried at each tick"
        logged = [record.getMessage() for record in caplog.records if "moving" in record.getMessage()]
        assert logged == [
            f"moving 1 jobs off draining nodes, first {low.job_id}: moving from a: draining (new fans)"
        ]
        assert [row.key for row in (await setup.owner.status()).quarantined] == [f"job/{high.job_id}"]


async def test_latest_drain_decides_whether_jobs_move(tmp_path: Path) -> None:
    async with two_nodes(tmp_path) as setup:
        job, _ = await setup.start_on_a(restartable())
        await setup.owner.ask(DrainNode(node_id="a", reason="new fans"))
        await setup.advance(3.0)
        assert setup.a.kills.empty()
        await setup.owner.ask(EmptyNode(node_id="a"))
        assert (await setup.advance_until_kill()).job_id == job.job_id
        (view, _) = (await setup.owner.ask(ListNodes())).nodes
        assert view.drained == "draining: new fans"
        await setup.owner.ask(DrainNode(node_id="a"))
        assert setup.one.controller is not None
        assert not setup.one.controller._ledger.nodes["a"].moves_jobs


async def test_new_leader_moves_the_jobs_of_a_node_that_was_disconnected_meanwhile(tmp_path: Path) -> None:
    clock = FakeClock()
    async with running_controller(tmp_path, clock=clock) as one, one.client() as owner:
        access = await one.join("a")
        agent = FakeAgent(make_node_info("a"))
        async with agent.connected(one.network, access):
            await agent.register()
            await agent.beat()
            job = await owner.submit_spec(restartable())
            await agent.confirm(await advance_until_launch(clock, agent))
        await clock.advance(5.0)
        await owner.ask(EmptyNode(node_id="a", reason="new fans"))
        await clock.advance(1.0)
        assert (await owner.job(job.job_id)).stop is StopReason.NONE, "it may have ended"
        await one.restart()
        async with one.client() as again, agent.connected(one.network, access):
            await agent.register()
            await agent.beat()

            async def is_stopping() -> bool:
                await clock.advance(0.5)
                return (await again.job(job.job_id)).stop is StopReason.PREEMPT

            await until(is_stopping)
            (order,) = (await agent.beat()).jobs_to_kill
            assert (order.job_id, order.reason) == (job.job_id, "moving from a: draining (new fans)")


async def test_stopped_job_is_queued_again_when_its_node_is_lost(tmp_path: Path) -> None:
    async with two_nodes(tmp_path) as setup:
        job, _ = await setup.start_on_a(restartable(grace_s=60.0))
        await setup.empty_a()
        await setup.advance_until_kill()
        setup.a._peer.close()

        async def is_launched_on_b() -> bool:
            await setup.clock.advance(0.5)
            await setup.b.beat()
            return not setup.b.launches.empty()

        await until(is_launched_on_b)
        moved = await setup.owner.job(job.job_id)
        assert MOVED in [step.reason for step in moved.history]


async def test_job_that_is_cancelled_during_its_grace_period_is_not_queued_again(tmp_path: Path) -> None:
    async with two_nodes(tmp_path) as setup:
        job, launch = await setup.start_on_a(restartable())
        await setup.empty_a()
        await setup.advance_until_kill()
        await setup.owner.ask(CancelJob(job_id=job.job_id))
        await setup.end_on_a(launch)
        assert (await setup.owner.job(job.job_id)).state is JobState.CANCELLED


async def test_moved_job_preempts_jobs_of_lower_priority_elsewhere(tmp_path: Path) -> None:
    async with two_nodes(tmp_path) as setup:
        job, launch = await setup.start_on_a(restartable("high", priority=5, gpus=2))
        low = await setup.owner.submit_spec(restartable("low", gpus=2))
        on_b = await advance_until_launch(setup.clock, setup.b, setup.a)
        await setup.b.confirm(on_b)
        await setup.empty_a()
        await setup.advance_until_kill()
        await setup.end_on_a(launch)

        async def is_preempted() -> bool:
            await setup.advance(0.5)
            return not setup.b.kills.empty()

        await until(is_preempted)
        assert (await setup.b.next_kill()).job_id == low.job_id
        setup.b.end(on_b, -15)
        await setup.b.beat()
        assert (await advance_until_launch(setup.clock, setup.b, setup.a)).job_id == job.job_id
        preempted = await setup.owner.job(low.job_id)
        assert preempted.history[-1].reason.startswith("was preempted: "), preempted.history[-1]


async def test_job_that_holds_a_reservation_on_the_node_starts_elsewhere(tmp_path: Path) -> None:
    async with two_nodes(tmp_path) as setup:
        _, on_a = await setup.start_on_a(job_spec("blocker", gpus=2, time_limit_s=60.0))
        await setup.owner.submit_spec(job_spec("blocker", gpus=2, time_limit_s=600.0))
        on_b = await advance_until_launch(setup.clock, setup.b, setup.a)
        await setup.b.confirm(on_b)
        waiting = await setup.owner.submit_spec(job_spec("large", gpus=2))
        await setup.advance(1.0)
        assert "on a (reserved for this job)" in (await setup.owner.job(waiting.job_id)).reason
        await setup.empty_a()
        await setup.advance(1.0)
        assert "on b (reserved for this job)" in (await setup.owner.job(waiting.job_id)).reason
        setup.b.end(on_b)
        await setup.b.beat()
        assert (await advance_until_launch(setup.clock, setup.b, setup.a)).job_id == waiting.job_id
        await setup.end_on_a(on_a, 0)


async def test_emptying_checks_its_arguments_and_only_the_owner_may(tmp_path: Path) -> None:
    async with running_controller(tmp_path) as one, one.client() as owner, one.agent("a"):
        with pytest.raises(NodeNotFoundError, match="no node 'n9'"):
            await owner.ask(EmptyNode(node_id="n9"))
        with pytest.raises(UsageError, match="one line of at most 200"):
            await owner.ask(EmptyNode(node_id="a", reason="two\nlines"))
        async with one.client(await one.token(TokenKind.USER, tenant="team")) as user:
            with pytest.raises(GenieError, match="user tokens cannot drain nodes"):
                await user.ask(EmptyNode(node_id="a"))


async def test_job_that_succeeded_by_itself_just_before_the_drain_stopped_it_does_not_run_again(
    tmp_path: Path,
) -> None:
    async with two_nodes(tmp_path) as setup:
        job, launch = await setup.start_on_a(restartable())
        await setup.empty_a()
        await setup.advance_until_kill()
        await setup.end_on_a(launch, 0)
        over = await setup.owner.job(job.job_id)
        assert (over.state, over.exit_code, over.reason) == (JobState.SUCCEEDED, 0, "exit code 0")
        assert await setup.owner.held("a") == []


@pytest.mark.parametrize("second_exit_code", [0, None])
async def test_drained_gang_is_queued_again_unless_all_workers_succeeded_by_themselves(
    tmp_path: Path, second_exit_code: int | None
) -> None:
    async with two_nodes(tmp_path) as setup:
        gang, first, second = await _start_gang_on_both(setup)
        await setup.empty_a()
        await setup.advance_until_kill()
        await setup.end_on_a(first, 0)
        assert (await setup.owner.job(gang.job_id)).state is JobState.RUNNING, "a worker is left"
        setup.b.end(second, second_exit_code)
        await setup.b.beat()
        over = await setup.owner.job(gang.job_id)
        if second_exit_code == 0:
            assert (over.state, over.exit_code) == (JobState.SUCCEEDED, 0)
        else:
            assert MOVED in [step.reason for step in over.history if step.state is JobState.QUEUED]


def test_drain_that_an_earlier_version_recorded_moves_nothing() -> None:
    row = json.loads(msgspec.json.encode(NodeRecord(info=make_node_info("a"), drain_status="draining")))
    assert "moves_jobs" not in row
    record = msgspec.json.decode(json.dumps(row), type=NodeRecord)
    assert (record.drain_status, record.moves_jobs) == ("draining", False)
