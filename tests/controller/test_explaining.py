"""The queue and explanations: over a real scheduler, and through a real controller."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from genie.config import ControllerConfig
from genie.controller import explaining
from genie.controller.connection import Connection
from genie.controller.explaining import Explaining, Planner
from genie.controller.jobs import Jobs
from genie.controller.ledger import Ledger
from genie.controller.users import Cluster
from genie.controller.waiting import Bell
from genie.errors import JobNotFoundError
from genie.model.job import Job, JobSpec, JobState, Resources, Transition, Wishes
from genie.model.messages import ExplainJob, ExplainReply, GetQueue, NodesRuledOut, QueueReply
from genie.model.tenant import Identity, TokenKind
from genie.scheduler.explain import Explanation, explain
from genie.scheduler.order import Fifo
from genie.scheduler.request import NodeFacts
from genie.scheduler.scheduler import Rules, Wait
from tests.controller.standing import standing
from tests.fakes.clock import FakeClock
from tests.scheduler.clusters import Desk, node

OWNER = Identity(token_id="o", kind=TokenKind.OWNER, tenant="default")
BLUE = Identity(token_id="b", kind=TokenKind.USER, tenant="blue")
ONE, TWO, THREE, FOUR = (f"j-{letter * 8}" for letter in "abcd")


class DeskPlanner:
    """What a planner tells, from the scheduler itself."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._told: dict[str, Wait] = {}

    def decide(self) -> None:
        self._desk.decide()
        self._told = {each.job_id: each for each in self._desk.scheduler.told}

    def waiting(self) -> list[Wait]:
        def ahead(wait: Wait) -> int:
            found = self.explained(wait.job_id)
            assert found is not None
            return found.ahead

        return sorted(self._told.values(), key=ahead)

    def explained(self, job_id: str) -> Explanation | None:
        if job_id not in self._told:
            return None
        return explain(self._desk.scheduler, job_id, reason=self._told[job_id].reason, now=self._desk.now)


class Office:
    """Jobs in a ledger and in a scheduler, and someone who is asked about them."""

    def __init__(self, *nodes: NodeFacts) -> None:
        self.desk = Desk(*nodes, rules=Rules(order=Fifo()))
        self.planner = DeskPlanner(self.desk)
        self.ledger = Ledger(None, None, None)  # type: ignore[arg-type]  # its tables only
        self.ledger.is_loaded = True
        clock = FakeClock()
        self.jobs = Jobs(
            self.ledger,
            config=ControllerConfig(),
            clock=clock,
            random_bytes=bytes,
            bell=Bell(clock),
            wake=lambda: None,
        )
        nothing: dict[str, object] = dict.fromkeys(Cluster.__dataclass_fields__)
        parts = {**nothing, "ledger": self.ledger, "jobs": self.jobs}
        self.explaining = Explaining(Cluster(**parts), self.planner)  # type: ignore[arg-type]

    def submit(self, job_id: str, tenant: str, gpus: int, *, known: bool = True, **wishes: object) -> Job:
        """`known`: the scheduler has been told of it."""
        request = self.desk.submit(job_id, gpus, tenant=tenant, **wishes) if known else None
        job = Job(
            job_id=job_id,
            tenant=tenant,
            owner="x",
            spec=JobSpec(
                name=f"name-{job_id[-1]}",
                command=("x",),
                resources=Resources(gpus=gpus),
                wishes=Wishes(priority=3),
            ),
            state=JobState.QUEUED,
            reason="submitted",
            submitted_at=5.0,
            sequence=request.sequence if request is not None else 99,
        )
        self.put(job)
        return job

    def put(self, job: Job) -> None:
        self.ledger.jobs._show(job.job_id, job)

    def decide(self) -> None:
        """What starts is on its way in the ledger, too."""
        for job_id in self.desk.started():
            self.put(msgspec.structs.replace(self.ledger.jobs[job_id], state=JobState.PLACING))
        self.planner.decide()

    async def queue(self, who: Identity, limit: int = 100) -> QueueReply:
        return await self.explaining.get_queue(_connection(who), GetQueue(limit=limit))

    async def explain(self, who: Identity, job_id: str) -> ExplainReply:
        return await self.explaining.explain_job(_connection(who), ExplainJob(job_id=job_id))


def _connection(who: Identity) -> Connection:
    return Connection(None, who)  # type: ignore[arg-type]  # nothing is sent over it


def busy_office() -> Office:
    """One runs on both GPUs; three wait, the second of them for blue."""
    office = Office(node("n1", 2), node("tiny", 1), node("shut", 2, closed="draining"))
    office.submit(ONE, "red", 2, time_limit_s=60.0)
    office.decide()
    office.submit(TWO, "red", 2, time_limit_s=60.0)
    office.submit(THREE, "blue", 2, time_limit_s=600.0)
    office.submit(FOUR, "red", 2)
    office.decide()
    return office


def test_the_stand_in_is_a_planner() -> None:
    planner: Planner = DeskPlanner(Desk())
    assert planner.waiting() == []


async def test_the_queue_is_in_order_with_what_each_waits_for() -> None:
    office = busy_office()
    reply = await office.queue(OWNER)
    assert [(each.position, each.job_id, each.tenant) for each in reply.jobs] == [
        (1, TWO, "red"),
        (2, THREE, "blue"),
        (3, FOUR, "red"),
    ]
    first, second, _ = reply.jobs
    assert (first.reason, first.starts_at) == ("has a reservation on n1", 60.0)
    assert (first.resources.gpus, first.wishes.priority, first.submitted_at) == (2, 3, 5.0)
    assert second.reason == f"no room now, and behind {TWO}, which has a reservation"
    assert (reply.waiting, reply.more) == (3, False)


async def test_a_user_sees_its_own_and_others_are_counted_only() -> None:
    office = busy_office()
    reply = await office.queue(BLUE)
    (mine,) = reply.jobs
    assert (mine.position, mine.job_id, reply.waiting) == (2, THREE, 3)
    assert mine.reason == "no room now, and behind another job, which has a reservation"
    assert TWO not in str(reply) and "red" not in str(reply)


async def test_a_limit_leaves_the_later_ones_out() -> None:
    office = busy_office()
    reply = await office.queue(OWNER, limit=2)
    assert [each.job_id for each in reply.jobs] == [TWO, THREE]
    assert (reply.waiting, reply.more) == (3, True)
    assert len((await office.queue(OWNER, limit=-5)).jobs) == 1


async def test_a_job_that_the_planner_does_not_know_yet_waits_at_the_end() -> None:
    office = busy_office()
    late = office.submit("j-eeeeeeee", "blue", 1, known=False)
    office.jobs.explain(late.job_id, "its launch was refused")
    last = (await office.queue(OWNER)).jobs[-1]
    assert (last.position, last.job_id, last.reason) == (4, late.job_id, "its launch was refused")
    reply = await office.explain(BLUE, late.job_id)
    assert (reply.job.reason, reply.ahead, reply.ruled_out) == ("its launch was refused", None, ())


async def test_a_job_that_is_over_in_the_ledger_waits_no_longer() -> None:
    office = busy_office()
    office.put(msgspec.structs.replace(office.ledger.jobs[TWO], state=JobState.CANCELLED))
    assert [each.job_id for each in (await office.queue(OWNER)).jobs] == [THREE, FOUR]
    assert (await office.explain(OWNER, TWO)).ahead is None


async def test_an_explanation_has_who_is_ahead_what_is_in_the_way_and_when() -> None:
    office = busy_office()
    reply = await office.explain(OWNER, TWO)
    assert (reply.ahead, reply.starts_at, reply.job.reason) == (0, 60.0, "has a reservation on n1")
    assert reply.ruled_out == (
        NodesRuledOut(reason="0 of 2 GPUs are free", count=1, nodes=("n1",), ever=False),
        NodesRuledOut(reason="draining", count=1, nodes=("shut",), ever=True),
        NodesRuledOut(reason="has 1 GPU", count=1, nodes=("tiny",), ever=True),
    )


async def test_an_explanation_names_no_job_of_others_and_a_name_will_do() -> None:
    office = busy_office()
    reply = await office.explain(BLUE, "name-c")
    assert (reply.job.job_id, reply.ahead) == (THREE, 1)
    assert reply.job.reason == "no room now, and behind another job, which has a reservation"
    with pytest.raises(JobNotFoundError):
        await office.explain(BLUE, TWO)


async def test_the_history_names_no_job_of_others_either() -> None:
    office = busy_office()
    steps = (
        Transition(state=JobState.RUNNING, at=1.0, reason="started"),
        Transition(state=JobState.QUEUED, at=2.0, reason=f"makes room for {TWO}"),
    )
    ran = msgspec.structs.replace(
        office.ledger.jobs[THREE], state=JobState.RUNNING, reason=f"after {TWO}", history=steps
    )
    office.put(ran)
    reply = await office.explain(BLUE, THREE)
    assert [step.reason for step in reply.job.history] == ["started", "makes room for another job"]
    assert (reply.job.reason, reply.ahead) == ("after another job", None)
    assert (await office.explain(OWNER, THREE)).job.history == steps


async def test_of_many_nodes_and_reasons_only_some_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explaining, "REASONS_MAX", 2)
    monkeypatch.setattr(explaining, "NODES_NAMED_MAX", 2)
    office = Office(*(node(f"n{number}", 1) for number in range(4)), *(node(f"m{g}", g) for g in (2, 3)))
    office.submit(ONE, "blue", 8)
    office.decide()
    reply = await office.explain(BLUE, ONE)
    assert [(each.count, each.nodes) for each in reply.ruled_out] == [(4, ("n0", "n1")), (1, ("m2",))]
    assert reply.ruled_out_more == 1


async def test_through_a_controller_the_queue_is_asked_for_over_the_wire(tmp_path: Path) -> None:
    async with standing(tmp_path) as one, one.client() as owner, one.agent(gpus=1) as agent:
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
