"""Random sequences of calls: SQLite and the memory store return the same results."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Awaitable
from dataclasses import dataclass, field
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from genie.controller.store import Compare, Delete, Put, WatchEvent
from genie.controller.store.sqlite import SqliteStore
from genie.errors import GenieError
from genie.sim.store import MemoryStore
from tests.controller.store.conftest import ContractStore
from tests.fakes.clock import FakeClock

KEYS = st.sampled_from(["a", "a/1", "a/2", "a/\u00ff", "b", "b/1", "\U0001f600"])
PREFIXES = st.sampled_from(["", "a", "a/", "b", "c"])
# Indexes into earlier results, so that some compares succeed and some leases are active.
PAST = st.integers(0, 8)


@dataclass(frozen=True)
class CommitStep:
    compares: list[tuple[str, int | None, bool]]
    puts: dict[str, tuple[bytes, int | None] | None]


@dataclass(frozen=True)
class GrantLeaseStep:
    ttl_s: int


@dataclass(frozen=True)
class KeepAliveStep:
    lease: int


@dataclass(frozen=True)
class RevokeLeaseStep:
    lease: int


@dataclass(frozen=True)
class RangeStep:
    prefix: str
    after: str
    limit: int


@dataclass(frozen=True)
class GetStep:
    key: str


@dataclass(frozen=True)
class PassTimeStep:
    seconds: float


@dataclass(frozen=True)
class CompactStep:
    back: int


@dataclass(frozen=True)
class ReplayWatchStep:
    prefix: str
    back: int


Step = (
    CommitStep
    | GrantLeaseStep
    | KeepAliveStep
    | RevokeLeaseStep
    | RangeStep
    | GetStep
    | PassTimeStep
    | CompactStep
    | ReplayWatchStep
)

COMMITS = st.builds(
    CommitStep,
    compares=st.lists(st.tuples(KEYS, st.none() | PAST, st.booleans()), max_size=2),
    puts=st.dictionaries(KEYS, st.none() | st.tuples(st.binary(max_size=4), st.none() | PAST), max_size=4),
)
STEPS = st.one_of(
    COMMITS,
    COMMITS,
    COMMITS,
    st.builds(GrantLeaseStep, st.integers(1, 5)),
    st.builds(KeepAliveStep, PAST),
    st.builds(RevokeLeaseStep, PAST),
    st.builds(RangeStep, PREFIXES, st.just("") | KEYS, st.integers(1, 5)),
    st.builds(GetStep, KEYS),
    st.builds(PassTimeStep, st.sampled_from([0.5, 1.0, 2.5])),
    st.builds(CompactStep, st.integers(0, 6)),
    st.builds(ReplayWatchStep, PREFIXES, st.integers(0, 12)),
)


@dataclass
class EngineRun:
    """One engine, its clock and its results."""

    store: ContractStore
    clock: FakeClock
    leases: list[int] = field(default_factory=list)
    revision: int = 1
    answers: list[object] = field(default_factory=list)

    async def take(self, step: Step) -> None:
        self.answers.append(await answer_or_error(self._do(step)))

    async def _do(self, step: Step) -> object:
        match step:
            case CommitStep():
                result = await self.store.commit(self._compares(step), self._operations(step))
                self.revision = result.revision
                return result
            case GrantLeaseStep(ttl_s):
                self.leases.append(await self.store.grant_lease(ttl_s))
                return None
            case KeepAliveStep(lease):
                return await self.store.keep_alive(self._lease(lease))
            case RevokeLeaseStep(lease):
                return await self.store.revoke_lease(self._lease(lease))
            case RangeStep(prefix, after, limit):
                return await self.store.range(prefix, start_after=after, limit=limit)
            case GetStep(key):
                return await self.store.get(key)
            case PassTimeStep(seconds):
                return await self.clock.advance(seconds)
            case CompactStep(back):
                return await self.store.compact(max(1, self.revision - back))
            case ReplayWatchStep(prefix, back):
                return await self._replay(prefix, max(0, self.revision - back))

    async def _replay(self, prefix: str, after: int) -> list[WatchEvent]:
        """Returns all events so far, up to a marker that this call writes."""
        mark = prefix + "~mark"
        self.revision = (await self.store.commit([], [Put(mark, b"")])).revision
        events: list[WatchEvent] = []
        async with self.store.watch(prefix, after_revision=after) as watch, asyncio.timeout(10):
            while not events or events[-1].revision < self.revision:
                events.append(await anext(watch))
        return events

    def _compares(self, step: CommitStep) -> list[Compare]:
        return [
            Compare(key, 0 if back is None else max(0, self.revision - back), "create" if create else "mod")
            for key, back, create in step.compares
        ]

    def _operations(self, step: CommitStep) -> list[Put | Delete]:
        made: list[Put | Delete] = []
        for key, put in step.puts.items():
            if put is None:
                made.append(Delete(key))
            else:
                value, lease = put
                made.append(Put(key, value, 0 if lease is None else self._lease(lease)))
        return made

    def _lease(self, index: int) -> int:
        return self.leases[index] if index < len(self.leases) else 1_000_000 + index


async def answer_or_error(call: Awaitable[object]) -> object:
    try:
        return await call
    except GenieError as error:
        return type(error)


async def assert_engines_agree(steps: list[Step], folder: Path) -> None:
    one_clock, other_clock = FakeClock(), FakeClock()
    one = EngineRun(await SqliteStore.open(folder / "s.db", clock=one_clock, history_revisions=15), one_clock)
    other = EngineRun(await MemoryStore.open(clock=other_clock, history_revisions=15), other_clock)
    try:
        for step in steps:
            await one.take(step)
            await other.take(step)
            assert one.answers[-1] == other.answers[-1], step
        assert (await one.store.range("")).items == (await other.store.range("")).items
    finally:
        await one.store.close()
        await other.store.close()


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(steps=st.lists(STEPS, min_size=5, max_size=40))
def test_sqlite_store_behaves_as_the_memory_store(steps: list[Step]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(assert_engines_agree(steps, Path(folder)))
