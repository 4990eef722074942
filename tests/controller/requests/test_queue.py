"""The queue and explanations: with a real scheduler, and through a real controller."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from genie.controller.change_notifier import ChangeNotifier
from genie.controller.connection import Connection, Handler
from genie.controller.jobs.catalog import JobCatalog
from genie.controller.ledger import Ledger
from genie.controller.requests import queue as queue_module
from genie.controller.requests.queue import QueuePlanner, QueueRequests
from genie.errors import JobNotFoundError
from genie.model.job import Job, JobSpec, JobState, PlacementConstraints, Resources, Transition
from genie.model.messages import ExplainJob, ExplainReply, GetQueue, Message, NodesRuledOut, QueueReply
from genie.model.tenant import Identity, TokenKind
from genie.scheduler.decisions import Wait
from genie.scheduler.explain import PendingJobExplanation, explain_pending_job
from genie.scheduler.order import Fifo
from genie.scheduler.request import NodeFacts
from genie.scheduler.rules import Rules
from tests.controller.running_controller import running_controller
from tests.fakes.clock import FakeClock
from tests.scheduler.clusters import SchedulerHarness, node

OWNER = Identity(token_id="o", kind=TokenKind.OWNER, tenant="default")
BLUE = Identity(token_id="b", kind=TokenKind.USER, tenant="blue")
ONE, TWO, THREE, FOUR = (f"j-{letter * 8}" for letter in "abcd")


class FakePlanner:
    """Answers from a scheduler."""

    def __init__(self, desk: SchedulerHarness) -> None:
        self._desk = desk
        self._told: dict[str, Wait] = {}

    def decide(self) -> None:
        self._desk.decide()
        self._told = {each.job_id: each for each in self._desk.scheduler.last_wait_decisions}

    def pending_jobs(self) -> list[Wait]:
        def ahead(wait: Wait) -> int:
            found = self.explain(wait.job_id)
            assert found is not None
            return found.jobs_ahead

        return sorted(self._told.values(), key=ahead)

    def explain(self, job_id: str) -> PendingJobExplanation | None:
        if job_id not in self._told:
            return None
        return explain_pending_job(
            self._desk.scheduler, job_id, reason=self._told[job_id].reason, now=self._desk.now
        )


class QueueSetup:
    """Jobs in a ledger and in a scheduler, and the request handlers."""

    def __init__(self, *nodes: NodeFacts) -> None:
        self.desk = SchedulerHarness(*nodes, rules=Rules(order=Fifo()))
        self.planner = FakePlanner(self.desk)
        self.ledger = Ledger(None, None, None)  # type: ignore[arg-type]  # its tables only
        self.ledger.is_loaded = True
        clock = FakeClock()
        self.jobs = JobCatalog(self.ledger, notifier=ChangeNotifier(clock), wake=lambda: None)
        self.requests = QueueRequests(
            self.jobs, self.planner, clock=clock, check_readable=self.ledger.check_readable
        )

    def submit(
        self, job_id: str, tenant: str, gpus: int, *, known: bool = True, **constraints: object
    ) -> Job:
        """`known`: submit it to the scheduler, too."""
        request = self.desk.submit(job_id, gpus, tenant=tenant, **constraints) if known else None
        job = Job(
            job_id=job_id,
            tenant=tenant,
            owner="x",
            spec=JobSpec(
                name=f"name-{job_id[-1]}",
                command=("x",),
                resources=Resources(gpus=gpus),
                constraints=PlacementConstraints(priority=3),
            ),
            state=JobState.QUEUED,
            reason="submitted",
            submitted_at=5.0,
            sequence=request.sequence if request is not None else 99,
        )
        self.put(job)
        return job

    def put(self, job: Job) -> None:
        before = self.ledger.jobs.set_row(job.job_id, job)
        for listener in self.ledger.jobs.listeners:
            listener(job.job_id, before, job)

    def decide(self) -> None:
        """Decide, and mark started jobs as placing in the ledger."""
        for job_id in self.desk.started():
            self.put(msgspec.structs.replace(self.ledger.jobs[job_id], state=JobState.PLACING))
        self.planner.decide()

    async def queue(self, who: Identity, limit: int = 100) -> QueueReply:
        return await self.requests.get_queue(_make_connection(who), GetQueue(limit=limit))

    async def explain(self, who: Identity, job_id: str) -> ExplainReply:
        return await self.requests.explain_job(_make_connection(who), ExplainJob(job_id=job_id))


def _make_connection(who: Identity) -> Connection:
    return Connection(None, who)  # type: ignore[arg-type]  # nothing is sent over it


def make_busy_cluster() -> QueueSetup:
    """One job runs on both GPUs; three are pending, the second of tenant blue."""
    cluster = QueueSetup(node("n1", 2), node("tiny", 1), node("shut", 2, blocked_reason="draining"))
    cluster.submit(ONE, "red", 2, time_limit_s=60.0)
    cluster.decide()
    cluster.submit(TWO, "red", 2, time_limit_s=60.0)
    cluster.submit(THREE, "blue", 2, time_limit_s=600.0)
    cluster.submit(FOUR, "red", 2)
    cluster.decide()
    return cluster


def test_fake_planner_satisfies_the_protocol() -> None:
    planner: QueuePlanner = FakePlanner(SchedulerHarness())
    assert planner.pending_jobs() == []


async def test_queue_lists_pending_reasons_in_order() -> None:
    cluster = make_busy_cluster()
    reply = await cluster.queue(OWNER)
    assert [(each.position, each.job_id, each.tenant) for each in reply.jobs] == [
        (1, TWO, "red"),
        (2, THREE, "blue"),
        (3, FOUR, "red"),
    ]
    first, second, _ = reply.jobs
    assert (first.reason, first.starts_at) == ("waiting for resources on n1 (reserved for this job)", 60.0)
    assert (first.resources.gpus, first.constraints.priority, first.submitted_at) == (2, 3, 5.0)
    assert second.reason == f"not enough free resources, and behind {TWO}, which has a reservation"
    assert (reply.waiting, reply.more) == (3, False)


async def test_user_sees_its_own_jobs_and_only_the_number_of_others() -> None:
    cluster = make_busy_cluster()
    reply = await cluster.queue(BLUE)
    (mine,) = reply.jobs
    assert (mine.position, mine.job_id, reply.waiting) == (2, THREE, 3)
    assert mine.reason == "not enough free resources, and behind another job, which has a reservation"
    assert TWO not in str(reply) and "red" not in str(reply)


async def test_queue_listing_with_a_limit_omits_later_jobs() -> None:
    cluster = make_busy_cluster()
    reply = await cluster.queue(OWNER, limit=2)
    assert [each.job_id for each in reply.jobs] == [TWO, THREE]
    assert (reply.waiting, reply.more) == (3, True)


async def test_job_unknown_to_the_planner_is_listed_last() -> None:
    cluster = make_busy_cluster()
    late = cluster.submit("j-eeeeeeee", "blue", 1, known=False)
    cluster.jobs.set_pending_reason(late.job_id, "its launch was refused")
    last = (await cluster.queue(OWNER)).jobs[-1]
    assert (last.position, last.job_id, last.reason) == (4, late.job_id, "its launch was refused")
    reply = await cluster.explain(BLUE, late.job_id)
    assert (reply.job.reason, reply.ahead, reply.ruled_out) == ("its launch was refused", None, ())


async def test_ended_job_is_not_listed() -> None:
    cluster = make_busy_cluster()
    cluster.put(msgspec.structs.replace(cluster.ledger.jobs[TWO], state=JobState.CANCELLED))
    assert [each.job_id for each in (await cluster.queue(OWNER)).jobs] == [THREE, FOUR]
    assert (await cluster.explain(OWNER, TWO)).ahead is None


async def test_explanation_has_jobs_ahead_blocked_nodes_and_start_time() -> None:
    cluster = make_busy_cluster()
    reply = await cluster.explain(OWNER, TWO)
    assert (reply.ahead, reply.starts_at, reply.job.reason) == (
        0,
        60.0,
        "waiting for resources on n1 (reserved for this job)",
    )
    assert reply.ruled_out == (
        NodesRuledOut(reason="0 of 2 GPUs are free", count=1, nodes=("n1",), is_permanent=False),
        NodesRuledOut(reason="draining", count=1, nodes=("shut",), is_permanent=True),
        NodesRuledOut(reason="has 1 GPU", count=1, nodes=("tiny",), is_permanent=True),
    )


async def test_explanation_by_name_does_not_name_jobs_of_other_tenants() -> None:
    cluster = make_busy_cluster()
    reply = await cluster.explain(BLUE, "name-c")
    assert (reply.job.job_id, reply.ahead) == (THREE, 1)
    assert reply.job.reason == "not enough free resources, and behind another job, which has a reservation"
    with pytest.raises(JobNotFoundError):
        await cluster.explain(BLUE, TWO)


async def test_history_does_not_name_jobs_of_other_tenants() -> None:
    cluster = make_busy_cluster()
    steps = (
        Transition(state=JobState.RUNNING, at=1.0, reason="started"),
        Transition(state=JobState.QUEUED, at=2.0, reason=f"makes room for {TWO}"),
    )
    ran = msgspec.structs.replace(
        cluster.ledger.jobs[THREE], state=JobState.RUNNING, reason=f"after {TWO}", history=steps
    )
    cluster.put(ran)
    reply = await cluster.explain(BLUE, THREE)
    assert [step.reason for step in reply.job.history] == ["started", "makes room for another job"]
    assert (reply.job.reason, reply.ahead) == ("after another job", None)
    assert (await cluster.explain(OWNER, THREE)).job.history == steps


async def test_explanation_names_a_limited_number_of_nodes_and_reasons(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(queue_module, "RULED_OUT_REASONS_MAX", 2)
    monkeypatch.setattr(queue_module, "NODES_PER_REASON_MAX", 2)
    cluster = QueueSetup(*(node(f"n{number}", 1) for number in range(4)), *(node(f"m{g}", g) for g in (2, 3)))
    cluster.submit(ONE, "blue", 8)
    cluster.decide()
    reply = await cluster.explain(BLUE, ONE)
    assert [(each.count, each.nodes) for each in reply.ruled_out] == [(4, ("n0", "n1")), (1, ("m2",))]
    assert reply.ruled_out_more == 1


async def test_owner_does_not_wait_behind_tenants() -> None:
    handle = make_busy_cluster().requests.handlers()[GetQueue]
    async with asyncio.TaskGroup() as group:
        tenants = [group.create_task(_ask_queue(handle, BLUE)) for _ in range(20)]
        await asyncio.sleep(0)
        await _ask_queue(handle, OWNER)
        assert not all(task.done() for task in tenants)


async def _ask_queue(handle: Handler, who: Identity) -> Message:
    return await handle(_make_connection(who), GetQueue())


async def test_queue_is_served_by_a_real_controller(tmp_path: Path) -> None:
    async with running_controller(tmp_path) as one, one.client() as owner, one.agent(gpus=1) as agent:
        runs = await owner.submit(gpus=1)
        await agent.start_next()
        first = await owner.submit(gpus=1, name="first")
        token = await one.token(TokenKind.USER, tenant="blue")
        async with one.client(token) as blue:
            mine = await blue.submit(gpus=1)
            reply = await blue.ask(GetQueue())
            assert [(each.position, each.job_id) for each in reply.jobs] == [(2, mine.job_id)], (
                "its tenant holds nothing, but the first has a reservation"
            )
            with pytest.raises(JobNotFoundError):
                await blue.ask(ExplainJob(job_id=runs.job_id))
        reply = await owner.ask(GetQueue())
        assert [each.job_id for each in reply.jobs] == [first.job_id, mine.job_id]
        assert (await owner.ask(ExplainJob(job_id="first"))).job.job_id == first.job_id
        explained = await owner.ask(ExplainJob(job_id=runs.job_id))
        assert [step.state for step in explained.job.history] == ["queued", "placing", "running"]
        assert explained.job.placement is not None and explained.job.placement.node_id == "n1"
