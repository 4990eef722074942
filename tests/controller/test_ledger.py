"""Group commit: writes that share a transaction come out as they would one after the other."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from genie.config import ControllerConfig
from genie.controller.election import Election, StoreHealth
from genie.controller.jobs import NODES_OF_JOB_MAX, Jobs
from genie.controller.ledger import Counter, Ledger, NodeRecord, Table, Transaction
from genie.controller.store import Compare, Delete, Put, TxnResult
from genie.controller.store.protocol import TXN_OPS_MAX
from genie.controller.waiting import Bell
from genie.errors import FencedError, StoreFullError, StoreUnavailableError, UsageError
from genie.model.allocation import NodeLedger
from genie.model.job import Job, JobSpec, JobState, Resources
from genie.model.messages import ExitReport
from genie.model.tenant import Identity, TokenKind
from genie.scheduler.request import WorkerPlace
from genie.scheduler.scheduler import Start
from genie.sim.store import MemoryStore
from tests.fakes.agent import node_info
from tests.fakes.clock import FakeClock
from tests.waiting import until

NODES = ("n0", "n1")
WHO = Identity(token_id="t", tenant="default", kind=TokenKind.USER, name="")


def job_id(number: int) -> str:
    """Of the job that was submitted when the counter of arrivals stood at `number`."""
    return "j-" + _digest(number, 5).hex()


def _digest(number: int, count: int) -> bytes:
    return hashlib.sha256(b"%d" % number).digest()[:count]


class Books:
    """A ledger with jobs on it. Ids follow from the counter as builds see it, so they can be foretold."""

    def __init__(self, store: MemoryStore, clock: FakeClock) -> None:
        self.store = store
        self.election = Election(store, clock=clock, name="a", ttl_s=60.0, health=StoreHealth())
        self.ledger = Ledger(store, self.election, StoreHealth())
        self.jobs = Jobs(
            self.ledger,
            config=ControllerConfig(queue_max=3),
            clock=clock,
            random_bytes=self._bytes,
            bell=Bell(clock),
            wake=lambda: None,
        )
        self.jobs._new_id = self._new_id  # type: ignore[method-assign]
        self.starter = AtOnce(self.ledger)
        self.told: list[tuple[str, str, object, object]] = []
        self.commits = 0
        for table in self.ledger._tables:
            table.on_change.append(partial(self._note, table.prefix))

    def _new_id(self) -> str:
        standing = self.ledger.counters.get("sequence")
        return job_id(standing.value if standing else 0)

    def _bytes(self, count: int) -> bytes:
        raise AssertionError("ids come from _new_id here")

    def _note(self, prefix: str, row_id: str, before: object, after: object) -> None:
        self.told.append((prefix, row_id, before, after))

    def shown(self) -> dict[str, Any]:
        return {table.prefix + row_id: row for table in self.ledger._tables for row_id, row in table.items()}

    async def kept(self) -> dict[str, bytes]:
        found = (await self.store.range("")).items
        return {item.key: item.value for item in found if item.key != "leader"}

    def indexes(self) -> object:
        jobs = self.jobs
        return jobs._by_state, jobs._by_name, jobs._by_request

    @contextmanager
    def watched(self) -> Iterator[None]:
        """While a commit is under way, the tables and indexes show what was durable before it."""
        commit, store = self.store.commit, self.store

        async def checked(
            compares: Sequence[Compare], operations: Sequence[Put | Delete], *, timeout_s: float = 5.0
        ) -> TxnResult:
            self.commits += 1
            shown = {key: msgspec.json.encode(row) for key, row in self.shown().items()}
            assert shown == await self.kept(), "nobody but the builds may see what is not durable"
            states = {row_id: job.state for row_id, job in self.ledger.jobs.items()}
            indexed = {key: state for state, jobs in self.jobs._by_state.items() for key in jobs}
            assert indexed == states
            return await commit(compares, operations, timeout_s=timeout_s)

        store.commit = checked  # type: ignore[method-assign]
        try:
            yield
        finally:
            store.commit = commit  # type: ignore[method-assign]


class AtOnce:
    """Starts every job with its submission, on the first GPU that nobody holds as the builds see it."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.counted: set[str] = set()

    def start_now(self, job: Job) -> Start | None:
        for node_id in NODES:
            held = self._ledger.holds.get(node_id) or NodeLedger(node_id=node_id)
            for gpu in range(2):
                if not held.gpu_used_milli(gpu):
                    self.counted.add(job.job_id)
                    return Start(job.job_id, (WorkerPlace(node_id, (gpu,)),), "at once")
        return None

    def take_back(self, job_id: str) -> None:
        self.counted.remove(job_id)


@asynccontextmanager
async def books(*, at_once: bool = False) -> AsyncIterator[Books]:
    clock = FakeClock()
    store = await MemoryStore.open(clock=clock)
    one = Books(store, clock)
    if at_once:
        one.jobs.starter = one.starter
    assert await one.election.try_win("a:1")
    await one.ledger.load()
    async with asyncio.TaskGroup() as group:
        writer = group.create_task(one.ledger.run())
        try:
            for node_id in NODES:
                record = NodeRecord(info=node_info(node_id, gpus=2))
                await one.ledger.write(partial(_put, one.ledger.nodes, node_id, record))
            with one.watched():
                yield one
        finally:
            writer.cancel()
    await one.election.resign()
    await store.close()


def _put(table: Table[Any], row_id: str, row: Any, txn: Transaction) -> None:
    txn.put(table, row_id, row)


async def all_at_once(*writes: Awaitable[Any]) -> list[Any]:
    return await asyncio.gather(*writes, return_exceptions=True)


# --- batched is the same as one by one -------------------------------------------------------

# Any: what comes of a step is of every type.
Step = Callable[[Books], Awaitable[Any]]
few, epochs = st.integers(0, 4), st.integers(1, 5)


def submit(number: int) -> Step:
    spec = JobSpec(name=f"job-{number % 2}", command=("true",), resources=Resources(gpus=1))
    return lambda on: on.jobs.submit(spec, WHO, f"request-{number}")


def place(number: int, node: int, gpu: int) -> Step:
    decision = Start(job_id(number), (WorkerPlace(NODES[node], (gpu,)),), "because")

    async def step(on: Books) -> list[str]:
        placed: list[str] = []
        await on.jobs.place([decision], placed=lambda job: placed.append(job.job_id))
        return placed

    return step


def confirm(number: int, node: int, epoch: int) -> Step:
    return lambda on: on.jobs.confirm(NODES[node], job_id(number), epoch=epoch, incarnation=1)


def end(number: int, node: int, epoch: int) -> Step:
    report = ExitReport(job_id=job_id(number), epoch=epoch, exit_code=0, reason="", ended_at=0.0)
    return lambda on: on.jobs.exited(NODES[node], [report])


def cancel(number: int) -> Step:
    return lambda on: on.jobs.cancel(job_id(number), "asked for")


def requeue(number: int, epoch: int) -> Step:
    return lambda on: on.jobs.requeue(job_id(number), epoch=epoch, reason="void")


def lose(number: int, epoch: int) -> Step:
    return lambda on: on.jobs.lose(job_id(number), epoch=epoch, reason="silent")


def drop(number: int) -> Step:
    return lambda on: on.ledger.write(lambda txn: txn.delete(on.ledger.jobs, job_id(number)))


def count_up(rows: int) -> Step:
    """Many rows: a few of these do not fit into one transaction."""

    def build(txn: Transaction) -> list[int]:
        return [txn.next_number(f"row-{index}") for index in range(rows)]

    return lambda on: on.ledger.write(build)


def fail(number: int) -> Step:
    """Stages rows, and then fails by itself or, with a key that no store takes, at the end."""

    async def step(on: Books) -> object:
        def build(txn: Transaction) -> None:
            txn.next_number("sequence")
            txn.delete(on.ledger.jobs, job_id(number))
            txn.put(on.ledger.counters, "x" * 2000, Counter(value=1))
            if number % 2:
                raise ZeroDivisionError

        return await on.ledger.write(build)

    return step


steps = st.one_of(
    st.builds(submit, few),
    st.builds(place, few, st.integers(0, 1), st.integers(0, 1)),
    st.builds(confirm, few, st.integers(0, 1), epochs),
    st.builds(end, few, st.integers(0, 1), epochs),
    st.builds(cancel, few),
    st.builds(requeue, few, epochs),
    st.builds(lose, few, epochs),
    st.builds(drop, few),
    st.builds(count_up, st.sampled_from([1, 2, 60, 120, TXN_OPS_MAX])),
    st.builds(fail, few),
)


def _plain(outcome: object) -> object:
    return (type(outcome), str(outcome)) if isinstance(outcome, BaseException) else outcome


async def carried_out(groups: Sequence[Sequence[Step]], *, at_once: bool) -> tuple[object, ...]:
    """What came of each step, and everything that can be seen of the books afterwards."""
    async with books(at_once=at_once) as one:
        outcomes = [await all_at_once(*(step(one) for step in group)) for group in groups]
        flat = [_plain(outcome) for group in outcomes for outcome in group]
        before = one.shown(), one.indexes()
        placed = {row_id for _, row_id, was, now in one.told if was is None and is_placing(now)}
        assert one.starter.counted == placed, "what is not durable was taken back"
        kept = await one.kept()
        await one.ledger.load()
        assert one.shown() == before[0], "memory is what the store has"
        assert one.indexes() == before[1], "indexes are what follows from the rows"
        return flat, kept, list(one.shown()), one.told, before


def is_placing(row: object) -> bool:
    return isinstance(row, Job) and row.state is JobState.PLACING


@given(st.lists(st.lists(steps, min_size=1, max_size=12), max_size=5), st.booleans())
def test_writes_together_come_out_as_one_by_one(groups: list[list[Step]], at_once: bool) -> None:
    together = asyncio.run(carried_out(groups, at_once=at_once))
    alone = asyncio.run(carried_out([[step] for group in groups for step in group], at_once=at_once))
    assert together == alone


# --- one by one, by name ---------------------------------------------------------------------


async def test_what_waits_together_is_one_commit_and_one_alone_does_not_wait() -> None:
    async with books() as one:
        await submit(0)(one)
        assert one.commits == 1
        one.commits = 0
        ids = await all_at_once(*(one.ledger.write(lambda txn: txn.next_number("epoch")) for _ in range(100)))
        assert ids == list(range(1, 101))
        assert one.commits == 1
        kept = await one.kept()
        assert kept["counter/epoch"] == b'{"value":100}'


async def test_a_job_that_need_not_wait_is_placed_with_its_submission() -> None:
    async with books(at_once=True) as one:
        job = await submit(0)(one)
        assert one.commits == 1
        assert [step.state for step in job.history] == ["queued", "placing"]
        assert (job.reason, job.placement.gpu_ids) == ("at once", (0,))
        assert [hold.job_id for hold in one.ledger.holds["n0"].holds] == [job.job_id]
        assert one.jobs.in_states(JobState.PLACING) == [job]


async def test_nobody_is_placed_at_once_past_those_who_wait_even_in_one_commit() -> None:
    async with books(at_once=True) as one:
        start_now = one.starter.start_now

        def refusing(job: Job) -> Start | None:
            return None if job.spec.name == "job-1" else start_now(job)

        one.starter.start_now = refusing  # type: ignore[method-assign]
        before, waits, behind = await all_at_once(*(submit(number)(one) for number in (0, 1, 2)))
        assert one.commits == 1
        states = [job.state for job in (before, waits, behind)]
        assert states == [JobState.PLACING, JobState.QUEUED, JobState.QUEUED]
        assert (await submit(4)(one)).state is JobState.QUEUED


async def test_what_a_build_counted_on_is_taken_back_when_it_is_not_committed() -> None:
    async with books() as one:
        done: list[str] = []

        def build(name: str, fails: bool, txn: Transaction) -> None:
            txn.otherwise(partial(done.append, name))
            txn.next_number("sequence")
            if fails:
                raise ZeroDivisionError

        await all_at_once(
            one.ledger.write(partial(build, "good", False)), one.ledger.write(partial(build, "bad", True))
        )
        assert done == ["bad"]
        done.clear()

        async def full(*_: object, **__: object) -> TxnResult:
            raise StoreFullError("no space")

        commit, one.store.commit = one.store.commit, full  # type: ignore[method-assign]
        await all_at_once(*(one.ledger.write(partial(build, name, False)) for name in "ab"))
        one.store.commit = commit  # type: ignore[method-assign]
        assert done == ["b", "a"], "in reverse order"
        done.clear()

        def large(number: int, txn: Transaction) -> None:
            txn.otherwise(partial(done.append, str(number)))
            for index in range(100):
                txn.put(one.ledger.counters, f"{number}-{index}", Counter(value=1))

        await all_at_once(*(one.ledger.write(partial(large, number)) for number in range(2)))
        assert done == ["1"], "built once more, for a transaction of its own"


async def test_several_writes_whose_caller_goes_away_are_not_made() -> None:
    async with books() as one:
        held = asyncio.Event()
        commit = one.store.commit

        async def slow(*arguments: Any, **more: Any) -> TxnResult:
            await held.wait()
            return await commit(*arguments, **more)

        one.store.commit = slow  # type: ignore[method-assign]
        async with asyncio.TaskGroup() as group:
            first = group.create_task(one.ledger.write(lambda txn: txn.next_number("first")))
            await asyncio.sleep(0)
            builds = [lambda txn: txn.next_number("second")] * 3
            several = group.create_task(one.ledger.write_each(builds))
            await until(lambda: len(one.ledger._queue) == 3, what="they wait behind the first")
            several.cancel()
            await asyncio.wait([several])
            held.set()
        assert first.result() == 1
        await one.ledger.write(lambda txn: txn.next_number("last"))
        assert "second" not in one.ledger.counters


async def test_the_same_request_twice_in_one_commit_is_one_job() -> None:
    async with books() as one:
        first, second = await all_at_once(submit(0)(one), submit(0)(one))
        assert first == second
        assert len(one.ledger.jobs) == 1


async def test_the_bound_of_the_queue_holds_within_one_commit() -> None:
    async with books() as one:
        answers = await all_at_once(*(submit(number)(one) for number in range(5)))
        assert [isinstance(answer, Exception) for answer in answers] == [False] * 3 + [True] * 2
        assert len(one.jobs.in_states(JobState.QUEUED)) == 3


async def test_a_transaction_has_no_more_rows_than_a_store_takes() -> None:
    async with books() as one:
        answers = await all_at_once(*(count_up(60)(one) for _ in range(3)), count_up(100)(one))
        assert answers == [[value] * 60 for value in (1, 2, 3)] + [[4] * 60 + [1] * 40]
        assert one.commits == 1, "they change the same rows"
        one.commits = 0

        def build(number: int, txn: Transaction) -> None:
            for index in range(50):
                txn.put(one.ledger.counters, f"{number}-{index}", Counter(value=1))

        await all_at_once(*(one.ledger.write(partial(build, number)) for number in range(5)))
        assert one.commits == 3


async def test_a_transaction_has_no_more_bytes_than_a_store_takes() -> None:
    large = JobSpec(name="large", command=("x" * 730_000,))
    async with books() as one:
        jobs = await all_at_once(*(one.jobs.submit(large, WHO, f"r{number}") for number in range(3)))
        assert [job.sequence for job in jobs] == [1, 2, 3]
        assert one.commits == 3


async def test_a_job_on_as_many_nodes_as_are_allowed_is_one_transaction_and_on_more_it_ends() -> None:
    async with books() as one:
        several = tuple(f"many-{number}" for number in range(NODES_OF_JOB_MAX + 1))
        for node_id in several:
            record = NodeRecord(info=node_info(node_id))
            await one.ledger.write(partial(_put, one.ledger.nodes, node_id, record))
        one.commits = 0
        for number, nodes in enumerate((several[1:], several)):
            await submit(number)(one)
            start = Start(job_id(number), tuple(WorkerPlace(node_id, (0,)) for node_id in nodes), "because")
            await one.jobs.place([start], placed=lambda job: None)
        held, refused = one.ledger.jobs[job_id(0)], one.ledger.jobs[job_id(1)]
        assert (held.state, len(held.placements)) == (JobState.PLACING, NODES_OF_JOB_MAX)
        assert refused.state is JobState.CANCELLED
        assert refused.reason == "cancelled: its workers would be on 121 nodes, and 120 are the most"
        await one.jobs.cancel(job_id(0), "asked for")
        assert not any(one.ledger.holds[node_id].holds for node_id in several[1:])


async def test_a_bad_write_fails_alone_and_leaves_nothing() -> None:
    async with books() as one:
        first, bad, worse, last = await all_at_once(
            submit(0)(one), fail(0)(one), fail(1)(one), submit(1)(one)
        )
        assert isinstance(bad, UsageError)
        assert isinstance(worse, ZeroDivisionError)
        assert (first.sequence, last.sequence) == (1, 2)
        assert set(one.ledger.jobs) == {first.job_id, last.job_id}
        assert one.commits == 1


@pytest.mark.parametrize("is_certain", [True, False])
async def test_a_commit_that_fails_fails_all_that_share_it(is_certain: bool) -> None:
    """Also one that failed because of what the others staged: that has not come to be."""
    async with books() as one:
        await submit(0)(one)
        await place(0, 0, 0)(one)
        commit = one.store.commit

        async def full(*_: object, **__: object) -> TxnResult:
            raise StoreFullError("no space")

        if is_certain:
            one.store.commit = full  # type: ignore[method-assign]
        else:
            one.store.lose_next_answer()
        wanted = StoreFullError if is_certain else StoreUnavailableError
        answers = await all_at_once(cancel(0)(one), confirm(0, 0, 1)(one), submit(1)(one))
        assert [type(answer) for answer in answers] == [wanted] * 3
        assert len({id(answer) for answer in answers}) == 3, "each raises its own"
        one.store.commit = commit  # type: ignore[method-assign]
        standing = one.ledger.jobs[job_id(0)]
        assert standing.state is JobState.PLACING, "not durable as far as is known"
        # The next write knows what came of it: certainly nothing, or all of it.
        if is_certain:
            await confirm(0, 0, 1)(one)
            assert one.ledger.jobs[job_id(0)].state is JobState.RUNNING
            return
        with pytest.raises(FencedError):
            await confirm(0, 0, 1)(one)
        assert one.ledger.jobs[job_id(0)].state is JobState.CANCELLED
        assert (await submit(1)(one)).sequence == 2


async def test_a_caller_that_goes_away_takes_no_other_with_it() -> None:
    async with books() as one:
        async with asyncio.TaskGroup() as group:
            gone, stays = (
                group.create_task(one.ledger.write(lambda txn: txn.next_number("epoch"))) for _ in range(2)
            )
            await asyncio.sleep(0)
            gone.cancel()
        assert stays.result() == 1
