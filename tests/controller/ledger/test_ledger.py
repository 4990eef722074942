"""Group commit: writes that share a transaction have the same results as sequential ones."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, nullcontext
from functools import partial
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from genie.config import ControllerConfig
from genie.controller.change_notifier import ChangeNotifier
from genie.controller.election import Election, StoreHealth
from genie.controller.jobs.backoff import LaunchBackoff
from genie.controller.jobs.launches import JOB_NODES_MAX
from genie.controller.jobs.lifecycle import LostWorker
from genie.controller.jobs.services import build_job_services
from genie.controller.ledger import Ledger, LedgerTable, Transaction
from genie.controller.rows import Counter, NodeRecord
from genie.controller.store import Compare, Delete, Put, RangeResult, TxnResult
from genie.controller.store.protocol import TXN_OPS_MAX
from genie.errors import FencedError, NotLeaderError, StoreFullError, StoreUnavailableError, UsageError
from genie.model.allocation import NodeHolds
from genie.model.job import Job, JobSpec, JobState, Resources
from genie.model.messages import ExitReport
from genie.model.tenant import Identity, TokenKind
from genie.scheduler.decisions import Decision, Start
from genie.scheduler.request import WorkerPlace
from genie.sim.store import MemoryStore
from tests.fakes.agent import make_node_info
from tests.fakes.clock import FakeClock
from tests.fakes.placer import NoOpPlacer
from tests.waiting import until

NODES = ("n0", "n1")
WHO = Identity(token_id="t", tenant="default", kind=TokenKind.USER, name="")


def job_id(number: int) -> str:
    """ID of the job that was submitted when the sequence counter was `number`."""
    return "j-" + _digest(number, 5).hex()


def _digest(number: int, count: int) -> bytes:
    return hashlib.sha256(b"%d" % number).digest()[:count]


class LedgerSetup:
    """A ledger with jobs. Job IDs derive from the sequence counter, so they are predictable."""

    def __init__(self, store: MemoryStore, clock: FakeClock, *, at_once: bool, queue_max: int) -> None:
        self.store = store
        self.election = Election(store, clock=clock, name="a", ttl_s=60.0, health=StoreHealth())
        self.ledger = Ledger(store, self.election, StoreHealth())
        self.placer = FirstFreeGpuPlacer(self.ledger)
        self.jobs = build_job_services(
            self.ledger,
            config=ControllerConfig(queue_max=queue_max),
            clock=clock,
            random_bytes=self._bytes,
            notifier=ChangeNotifier(clock),
            wake=lambda: None,
            describe_unresponsive_node=lambda job: "",
            placer=self.placer if at_once else NoOpPlacer(),
            backoff=LaunchBackoff(clock),
        )
        self.jobs.submission._new_job_id = self._new_id  # type: ignore[method-assign]
        self.changes: list[tuple[str, str, object, object]] = []
        self.commits = 0
        for table in self.ledger._tables:
            table.add_listener(partial(self._note, table.prefix))

    def _new_id(self) -> str:
        current = self.ledger.counters.get("sequence")
        return job_id(current.value if current else 0)

    def _bytes(self, count: int) -> bytes:
        raise AssertionError("ids come from _new_id here")

    def _note(self, prefix: str, row_id: str, before: object, after: object) -> None:
        self.changes.append((prefix, row_id, before, after))

    def shown(self) -> dict[str, Any]:
        return {table.prefix + row_id: row for table in self.ledger._tables for row_id, row in table.items()}

    async def kept(self) -> dict[str, bytes]:
        found = (await self.store.range("")).items
        return {item.key: item.value for item in found if item.key != "leader"}

    def indexes(self) -> object:
        index, staged = self.jobs.catalog._index, self.jobs.submission._staged_index
        states = {state: sorted(job.job_id for job in index.jobs_in_states([state])) for state in JobState}
        return states, index._job_ids_by_name, vars(staged)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Check during each commit that tables and indexes show only what was durable before it."""
        commit, store = self.store.commit, self.store

        async def checked(
            compares: Sequence[Compare], operations: Sequence[Put | Delete], *, timeout_s: float = 5.0
        ) -> TxnResult:
            self.commits += 1
            shown = {key: msgspec.json.encode(row) for key, row in self.shown().items()}
            assert shown == await self.kept(), "only builds may see changes that are not durable"
            states = {row_id: job.state for row_id, job in self.ledger.jobs.items()}
            indexed = {
                job.job_id: state for state in JobState for job in self.jobs.catalog.jobs_in_states(state)
            }
            assert indexed == states
            assert self.jobs.submission._staged_index.queued_count == list(states.values()).count(
                JobState.QUEUED
            )
            return await commit(compares, operations, timeout_s=timeout_s)

        store.commit = checked  # type: ignore[method-assign]
        try:
            yield
        finally:
            store.commit = commit  # type: ignore[method-assign]


class FirstFreeGpuPlacer:
    """Places every job at its submission, on the first free GPU as the builds see it."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.counted: set[str] = set()

    def place(self, new_job: Job | None = None) -> Sequence[Decision]:
        assert new_job is not None
        for node_id in NODES:
            held = self._ledger.holds.get(node_id) or NodeHolds(node_id=node_id)
            for gpu in range(2):
                if not held.gpu_used_milli(gpu):
                    self.counted.add(new_job.job_id)
                    return (Start(new_job.job_id, (WorkerPlace(node_id, (gpu,)),), "at once"),)
        return ()

    def undo_unrecorded_starts(self, job_ids: Iterable[str]) -> None:
        for job_id in job_ids:
            self.counted.remove(job_id)


@asynccontextmanager
async def open_ledger(
    *, at_once: bool = False, queue_max: int = 3, has_lost_replies: bool = False
) -> AsyncIterator[LedgerSetup]:
    """`has_lost_replies`: the tables lack a commit that was applied; otherwise each commit checks them."""
    clock = FakeClock()
    store = await MemoryStore.open(clock=clock)
    one = LedgerSetup(store, clock, at_once=at_once, queue_max=queue_max)
    assert await one.election.try_win_election("a:1")
    await one.ledger.load_tables()
    async with asyncio.TaskGroup() as group:
        writer = group.create_task(one.ledger.run())
        try:
            for node_id in NODES:
                record = NodeRecord(info=make_node_info(node_id, gpus=2))
                await one.ledger.write(partial(_stage_put, one.ledger.nodes, node_id, record))
            with nullcontext() if has_lost_replies else one.watched():
                yield one
        finally:
            writer.cancel()
    await one.election.resign()
    await store.close()


def _stage_put(table: LedgerTable[Any], row_id: str, row: Any, txn: Transaction) -> None:
    txn.put(table, row_id, row)


async def outcome_of(write: Awaitable[Any]) -> Any:
    (outcome,) = await gather_outcomes(write)
    return outcome


async def gather_outcomes(*writes: Awaitable[Any]) -> list[Any]:
    return await asyncio.gather(*writes, return_exceptions=True)


# --- batched equals sequential -------------------------------------------------------------

# Any: results of every type.
Step = Callable[[LedgerSetup], Awaitable[Any]]
few, epochs = st.integers(0, 4), st.integers(1, 5)


def submit_step(number: int) -> Step:
    spec = JobSpec(name=f"job-{number % 2}", command=("true",), resources=Resources(gpus=1))
    return lambda on: on.jobs.submission.submit(spec, WHO, f"request-{number}")


def place_step(number: int, node: int, gpu: int) -> Step:
    decision = Start(job_id(number), (WorkerPlace(NODES[node], (gpu,)),), "because")

    async def step(on: LedgerSetup) -> list[str]:
        placed: list[str] = []
        await on.jobs.launches.record_starts([decision], on_placed=lambda job: placed.append(job.job_id))
        return placed

    return step


def confirm_step(number: int, node: int, epoch: int) -> Step:
    return lambda on: on.jobs.launches.confirm_launch(NODES[node], job_id(number), epoch=epoch, incarnation=1)


def end_step(number: int, node: int, epoch: int) -> Step:
    report = ExitReport(job_id=job_id(number), epoch=epoch, exit_code=0, reason="", ended_at=0.0)
    return lambda on: on.jobs.lifecycle.record_exits(NODES[node], [report])


def cancel_step(number: int) -> Step:
    return lambda on: on.jobs.lifecycle.cancel(job_id(number), "asked for")


def requeue_step(number: int, epoch: int) -> Step:
    return lambda on: on.jobs.lifecycle.requeue_unconfirmed(job_id(number), epoch=epoch, reason="void")


def lose_step(number: int, epoch: int) -> Step:
    return lambda on: on.jobs.lifecycle.record_lost_workers(
        [LostWorker(job_id(number), NODES[0], epoch, "silent")]
    )


def delete_step(number: int) -> Step:
    return lambda on: on.ledger.write(lambda txn: txn.delete(on.ledger.jobs, job_id(number)))


def change_many_rows_step(rows: int) -> Step:
    """Change many rows: a few of these do not fit into one transaction."""

    def build(txn: Transaction) -> list[int]:
        return [txn.next_counter_value(f"row-{index}") for index in range(rows)]

    return lambda on: on.ledger.write(build)


def failing_step(number: int) -> Step:
    """Stage rows and fail, in the build or, with an invalid key, when it is added to the batch."""

    async def step(on: LedgerSetup) -> object:
        def build(txn: Transaction) -> None:
            txn.next_counter_value("sequence")
            txn.delete(on.ledger.jobs, job_id(number))
            txn.put(on.ledger.counters, "x" * 2000, Counter(value=1))
            if number % 2:
                raise ZeroDivisionError

        return await on.ledger.write(build)

    return step


steps = st.one_of(
    st.builds(submit_step, few),
    st.builds(place_step, few, st.integers(0, 1), st.integers(0, 1)),
    st.builds(confirm_step, few, st.integers(0, 1), epochs),
    st.builds(end_step, few, st.integers(0, 1), epochs),
    st.builds(cancel_step, few),
    st.builds(requeue_step, few, epochs),
    st.builds(lose_step, few, epochs),
    st.builds(delete_step, few),
    st.builds(change_many_rows_step, st.sampled_from([1, 2, 60, 120, TXN_OPS_MAX])),
    st.builds(failing_step, few),
)


def _comparable_outcome(outcome: object) -> object:
    return (type(outcome), str(outcome)) if isinstance(outcome, BaseException) else outcome


async def run_steps(groups: Sequence[Sequence[Step]], *, at_once: bool) -> tuple[object, ...]:
    """Return the result of each step and the visible state afterwards."""
    # A full queue refuses a submission at once, before earlier writes of its batch may have made room.
    async with open_ledger(at_once=at_once, queue_max=1000) as one:
        outcomes = [await gather_outcomes(*(step(one) for step in group)) for group in groups]
        flat = [_comparable_outcome(outcome) for group in outcomes for outcome in group]
        before = one.shown(), one.indexes()
        placed = {row_id for _, row_id, was, now in one.changes if was is None and is_placing(now)}
        assert one.placer.counted == placed, "placements that are not durable were rolled back"
        kept = await one.kept()
        await one.ledger.load_tables()
        assert one.shown() == before[0], "memory equals the store"
        assert one.indexes() == before[1], "indexes are consistent with the rows"
        return flat, kept, list(one.shown()), one.changes, before


def is_placing(row: object) -> bool:
    return isinstance(row, Job) and row.state is JobState.PLACING


@given(st.lists(st.lists(steps, min_size=1, max_size=12), max_size=5), st.booleans())
@example([[submit_step(0), confirm_step(0, 0, 1)]], True)
def test_batched_writes_equal_sequential_writes(groups: list[list[Step]], at_once: bool) -> None:
    together = asyncio.run(run_steps(groups, at_once=at_once))
    alone = asyncio.run(run_steps([[step] for group in groups for step in group], at_once=at_once))
    assert together == alone


# --- single properties ---------------------------------------------------------------------


async def test_queued_writes_share_a_commit_and_a_single_write_does_not_wait() -> None:
    async with open_ledger() as one:
        await submit_step(0)(one)
        assert one.commits == 1
        one.commits = 0
        ids = await gather_outcomes(
            *(one.ledger.write(lambda txn: txn.next_counter_value("epoch")) for _ in range(100))
        )
        assert ids == list(range(1, 101))
        assert one.commits == 1
        kept = await one.kept()
        assert kept["counter/epoch"] == b'{"value":100}'


async def test_job_is_placed_at_its_submission() -> None:
    async with open_ledger(at_once=True) as one:
        job = await submit_step(0)(one)
        assert one.commits == 1
        assert [step.state for step in job.history] == ["queued", "placing"]
        assert (job.reason, job.placement.gpu_ids) == ("at once", (0,))
        assert [hold.job_id for hold in one.ledger.holds["n0"].holds] == [job.job_id]
        assert one.jobs.catalog.jobs_in_states(JobState.PLACING) == [job]


async def test_job_is_not_placed_at_submission_while_others_are_queued() -> None:
    async with open_ledger(at_once=True) as one:
        place = one.placer.place

        def place_others(new_job: Job | None = None) -> Sequence[Decision]:
            return () if new_job is not None and new_job.spec.name == "job-1" else place(new_job)

        one.placer.place = place_others  # type: ignore[method-assign]
        before, waits, behind = await gather_outcomes(*(submit_step(number)(one) for number in (0, 1, 2)))
        assert one.commits == 1
        states = [job.state for job in (before, waits, behind)]
        assert states == [JobState.PLACING, JobState.QUEUED, JobState.QUEUED]
        assert (await submit_step(4)(one)).state is JobState.QUEUED


async def test_rollbacks_run_when_a_transaction_is_not_committed() -> None:
    async with open_ledger() as one:
        done: list[str] = []

        def build(name: str, fails: bool, txn: Transaction) -> None:
            txn.on_rollback(partial(done.append, name))
            txn.next_counter_value("sequence")
            if fails:
                raise ZeroDivisionError

        await gather_outcomes(
            one.ledger.write(partial(build, "good", False)), one.ledger.write(partial(build, "bad", True))
        )
        assert done == ["bad"]
        done.clear()

        async def full(*_: object, **__: object) -> TxnResult:
            raise StoreFullError("no space")

        commit, one.store.commit = one.store.commit, full  # type: ignore[method-assign]
        await gather_outcomes(*(one.ledger.write(partial(build, name, False)) for name in "ab"))
        one.store.commit = commit  # type: ignore[method-assign]
        assert done == ["b", "a"], "in reverse order"
        done.clear()

        def large(number: int, txn: Transaction) -> None:
            txn.on_rollback(partial(done.append, str(number)))
            for index in range(100):
                txn.put(one.ledger.counters, f"{number}-{index}", Counter(value=1))

        await gather_outcomes(*(one.ledger.write(partial(large, number)) for number in range(2)))
        assert done == ["1"], "built again for its own transaction"


async def test_writes_of_a_cancelled_caller_are_not_committed() -> None:
    async with open_ledger() as one:
        held = asyncio.Event()
        commit = one.store.commit

        async def slow(*arguments: Any, **more: Any) -> TxnResult:
            await held.wait()
            return await commit(*arguments, **more)

        one.store.commit = slow  # type: ignore[method-assign]
        async with asyncio.TaskGroup() as group:
            first = group.create_task(one.ledger.write(lambda txn: txn.next_counter_value("first")))
            await asyncio.sleep(0)
            builds = [lambda txn: txn.next_counter_value("second")] * 3
            several = group.create_task(one.ledger.write_each(builds))
            await until(lambda: len(one.ledger._write_queue) == 3, what="they are queued behind the first")
            several.cancel()
            await asyncio.wait([several])
            held.set()
        assert first.result() == 1
        await one.ledger.write(lambda txn: txn.next_counter_value("last"))
        assert "second" not in one.ledger.counters


async def test_two_submissions_with_one_request_id_in_one_commit_create_one_job() -> None:
    async with open_ledger() as one:
        first, second = await gather_outcomes(submit_step(0)(one), submit_step(0)(one))
        assert first == second
        assert len(one.ledger.jobs) == 1


async def test_queue_limit_holds_within_one_commit() -> None:
    async with open_ledger() as one:
        answers = await gather_outcomes(*(submit_step(number)(one) for number in range(5)))
        assert [isinstance(answer, Exception) for answer in answers] == [False] * 3 + [True] * 2
        assert len(one.jobs.catalog.jobs_in_states(JobState.QUEUED)) == 3


async def test_loading_the_ledger_discards_pending_reasons_of_deleted_jobs() -> None:
    async with open_ledger() as one:
        queued, ended = [await submit_step(number)(one) for number in (0, 1)]
        for job in (queued, ended):
            one.jobs.catalog.set_pending_reason(job.job_id, "waiting for GPUs")
            one.jobs.catalog.set_unkillable_reason(job, 0, "process 7 cannot be killed")
            one.jobs.launches._launch_backoff.delay_placement(job.job_id)
        await one.store.commit([], [Delete(one.ledger.jobs.prefix + ended.job_id)])
        await one.ledger.load_tables()
        assert one.jobs.catalog.with_pending_reason(queued).reason == "waiting for GPUs"
        assert one.jobs.catalog.with_pending_reason(ended).reason == "submitted"
        assert one.jobs.catalog._unkillable_reasons_by_job == {}, "neither is running"
        assert one.jobs.launches._launch_backoff.job_ids() == [queued.job_id]


async def test_transaction_stays_within_the_row_limit_of_the_store() -> None:
    async with open_ledger() as one:
        answers = await gather_outcomes(
            *(change_many_rows_step(60)(one) for _ in range(3)), change_many_rows_step(100)(one)
        )
        assert answers == [[value] * 60 for value in (1, 2, 3)] + [[4] * 60 + [1] * 40]
        assert one.commits == 1, "they share rows"
        one.commits = 0

        def build(number: int, txn: Transaction) -> None:
            for index in range(50):
                txn.put(one.ledger.counters, f"{number}-{index}", Counter(value=1))

        await gather_outcomes(*(one.ledger.write(partial(build, number)) for number in range(5)))
        assert one.commits == 3


async def test_transaction_stays_within_the_size_limit_of_the_store() -> None:
    large = JobSpec(name="large", command=("x" * 730_000,))
    async with open_ledger() as one:
        jobs = await gather_outcomes(
            *(one.jobs.submission.submit(large, WHO, f"r{number}") for number in range(3))
        )
        assert [job.sequence for job in jobs] == [1, 2, 3]
        assert one.commits == 3


async def test_job_on_too_many_nodes_is_cancelled() -> None:
    async with open_ledger() as one:
        several = tuple(f"many-{number}" for number in range(JOB_NODES_MAX + 1))
        for node_id in several:
            record = NodeRecord(info=make_node_info(node_id))
            await one.ledger.write(partial(_stage_put, one.ledger.nodes, node_id, record))
        one.commits = 0
        for number, nodes in enumerate((several[1:], several)):
            await submit_step(number)(one)
            start = Start(job_id(number), tuple(WorkerPlace(node_id, (0,)) for node_id in nodes), "because")
            await one.jobs.launches.record_starts([start], on_placed=lambda job: None)
        held, refused = one.ledger.jobs[job_id(0)], one.ledger.jobs[job_id(1)]
        assert (held.state, len(held.placements)) == (JobState.PLACING, JOB_NODES_MAX)
        assert refused.state is JobState.CANCELLED
        assert refused.reason == "cancelled: its workers would need 121 nodes; the maximum is 120"
        await one.jobs.lifecycle.cancel(job_id(0), "asked for")
        assert not any(one.ledger.holds[node_id].holds for node_id in several[1:])


async def test_write_that_fails_to_build_does_not_affect_other_writes() -> None:
    async with open_ledger() as one:
        first, bad, worse, last = await gather_outcomes(
            submit_step(0)(one), failing_step(0)(one), failing_step(1)(one), submit_step(1)(one)
        )
        assert isinstance(bad, UsageError)
        assert isinstance(worse, ZeroDivisionError)
        assert (first.sequence, last.sequence) == (1, 2)
        assert set(one.ledger.jobs) == {first.job_id, last.job_id}
        assert one.commits == 1


@pytest.mark.parametrize("is_certain", [True, False])
async def test_failed_commit_fails_all_its_writes(is_certain: bool) -> None:
    """Also one that failed because of changes that the others staged."""
    async with open_ledger() as one:
        await submit_step(0)(one)
        await place_step(0, 0, 0)(one)
        commit = one.store.commit

        async def full(*_: object, **__: object) -> TxnResult:
            raise StoreFullError("no space")

        if is_certain:
            one.store.commit = full  # type: ignore[method-assign]
        else:
            one.store.lose_next_commit_reply()
        wanted = StoreFullError if is_certain else StoreUnavailableError
        answers = await gather_outcomes(cancel_step(0)(one), confirm_step(0, 0, 1)(one), submit_step(1)(one))
        assert [type(answer) for answer in answers] == [wanted] * 3
        assert len({id(answer) for answer in answers}) == 3, "each caller gets its own exception"
        one.store.commit = commit  # type: ignore[method-assign]
        current = one.ledger.jobs[job_id(0)]
        assert current.state is JobState.PLACING, "the outcome is unknown"
        # The next write resolves it: nothing or everything was committed.
        if is_certain:
            await confirm_step(0, 0, 1)(one)
            assert one.ledger.jobs[job_id(0)].state is JobState.RUNNING
            return
        with pytest.raises(FencedError):
            await confirm_step(0, 0, 1)(one)
        assert one.ledger.jobs[job_id(0)].state is JobState.CANCELLED
        assert (await submit_step(1)(one)).sequence == 2


async def test_commit_without_a_reply_ends_within_the_lease_of_the_leader() -> None:
    """etcd never answers a commit that a member has forwarded to a leader which is then lost."""
    async with open_ledger() as one:
        commit, timeouts_s = one.store.commit, []

        async def record_timeout(
            compares: Sequence[Compare], operations: Sequence[Put | Delete], *, timeout_s: float
        ) -> TxnResult:
            timeouts_s.append(timeout_s)
            return await commit(compares, operations, timeout_s=timeout_s)

        one.store.commit = record_timeout  # type: ignore[method-assign,assignment]
        await submit_step(0)(one)
        one.store.commit = commit  # type: ignore[method-assign]
        assert len(timeouts_s) == 1
        assert timeouts_s[0] <= ControllerConfig().leader_ttl_s


@pytest.mark.parametrize("is_applied", [True, False])
async def test_writes_fail_when_the_term_ends_while_the_store_does_not_respond(is_applied: bool) -> None:
    async with open_ledger(has_lost_replies=True) as one:
        commit, is_committing = one.store.commit, asyncio.Event()

        async def hang(*arguments: Any, **more: Any) -> TxnResult:
            if is_applied:
                await commit(*arguments, **more)
            is_committing.set()
            await asyncio.Event().wait()
            raise AssertionError("cancelled")

        def count(name: str) -> Awaitable[int]:
            return one.ledger.write(lambda txn: txn.next_counter_value(name))

        one.store.commit = hang  # type: ignore[method-assign]
        async with asyncio.TaskGroup() as group:
            committing = group.create_task(outcome_of(count("first")))
            await is_committing.wait()
            queued = group.create_task(outcome_of(count("second")))
            await until(lambda: one.ledger._write_queue, what="it is queued behind the first")
            one.election.step_down("of a test")
            first, second = await committing, await queued
        assert isinstance(first, StoreUnavailableError) and "may or may not" in str(first)
        assert isinstance(second, NotLeaderError), "certainly not carried out"
        one.store.commit = commit  # type: ignore[method-assign]
        assert await one.election.try_win_election("a:1")
        assert await count("first") == 1 + is_applied
        assert await count("second") == 1


async def test_writes_fail_when_the_term_ends_while_the_tables_are_read_again() -> None:
    async with open_ledger(has_lost_replies=True) as one:
        one.store.lose_next_commit_reply()
        assert isinstance(await outcome_of(submit_step(0)(one)), StoreUnavailableError)
        is_reading, read = asyncio.Event(), one.store.range

        async def hang(*_: object, **__: object) -> RangeResult:
            is_reading.set()
            await asyncio.Event().wait()
            raise AssertionError("cancelled")

        one.store.range = hang  # type: ignore[method-assign]
        async with asyncio.TaskGroup() as group:
            submitted = group.create_task(outcome_of(submit_step(1)(one)))
            await is_reading.wait()
            one.election.step_down("of a test")
            assert isinstance(await submitted, NotLeaderError), "certainly not carried out"
        one.store.range = read  # type: ignore[method-assign]
        assert await one.election.try_win_election("a:1")
        await one.ledger.load_tables()
        assert list(one.ledger.jobs) == [job_id(0)]


async def test_cancelled_caller_does_not_affect_other_writes() -> None:
    async with open_ledger() as one:
        async with asyncio.TaskGroup() as group:
            gone, stays = (
                group.create_task(one.ledger.write(lambda txn: txn.next_counter_value("epoch")))
                for _ in range(2)
            )
            await asyncio.sleep(0)
            gone.cancel()
        assert stays.result() == 1
