"""The revision history of etcd: every change of every key since the first revision, read by a watch."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from genie.controller.etcd.local_member import LocalMember
from genie.controller.etcd.membership import MemberStatus, open_etcd_cluster
from genie.controller.store.etcd import EtcdStore
from genie.controller.store.etcd_address import EtcdAddress
from genie.controller.store.protocol import Put, WatchEvent
from genie.errors import GenieError, StoreUnavailableError
from tests.faults.machines import Machine

END_MARK_KEY = "end-of-fault-run"
_READ_TIMEOUT_S = 60.0
_RETRY_INTERVAL_S = 0.25

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Revision:
    """The changes of one revision: values by key, None for a deleted key."""

    number: int
    changes: dict[str, bytes | None]


def group_by_revision(events: Sequence[WatchEvent]) -> Iterator[Revision]:
    """Ascending, as a watch yields them."""
    for number, group in itertools.groupby(events, key=lambda event: event.revision):
        yield Revision(number, {event.key: event.value for event in group})


def etcd_address_of(server: Machine) -> EtcdAddress:
    """Address and certificate of all members, as `server` knows them."""
    member = LocalMember.read(server.state_dir)
    assert member is not None, f"{server.name} has no etcd member"
    return member.address(server.state_dir)


async def read_revisions(server: Machine) -> list[Revision]:
    """Reads the history of the whole store. Writes a key that marks its end."""

    async def read(store: EtcdStore) -> list[WatchEvent]:
        events: list[WatchEvent] = []
        last = (await store.commit([], [Put(END_MARK_KEY, b"")])).revision
        async with store.watch("", after_revision=0) as changes:
            async for event in changes:
                events.append(event)
                if event.revision >= last:
                    break
        return events

    return list(group_by_revision(await _call_store(server, read)))


async def fetch_revision(server: Machine) -> int:
    """The current revision of the store."""

    async def fetch(store: EtcdStore) -> int:
        async with store.snapshot() as snapshot:
            return snapshot.revision

    return await _call_store(server, fetch)


async def _call_store(server: Machine, call: Callable[[EtcdStore], Awaitable[_Result]]) -> _Result:
    """Calls `call`, which must be repeatable, with the store as `server` knows it."""

    async def connect_and_call() -> _Result:
        store = await EtcdStore.open_address(etcd_address_of(server))
        try:
            return await call(store)
        finally:
            await store.close()

    return await repeat_until_store_responds(connect_and_call, timeout_s=_READ_TIMEOUT_S)


async def repeat_until_store_responds(call: Callable[[], Awaitable[_Result]], *, timeout_s: float) -> _Result:
    """Repeats the call while the store is unavailable, such as during an election of etcd. Raises
    StoreUnavailableError with the last reason after `timeout_s`."""
    reason = "no response"
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                try:
                    return await call()
                except StoreUnavailableError as error:
                    reason = str(error)
                await asyncio.sleep(_RETRY_INTERVAL_S)
    except TimeoutError as error:
        raise StoreUnavailableError(f"the store was unavailable for {timeout_s:g} s: {reason}") from error


async def fetch_member_statuses(servers: Sequence[Machine]) -> tuple[MemberStatus, ...]:
    """As the first server that responds reports them; empty if none does."""
    for server in servers:
        with suppress(GenieError, OSError, AssertionError):
            async with open_etcd_cluster(etcd_address_of(server)) as cluster:
                return await cluster.fetch_statuses()
    return ()


def find_etcd_problem(statuses: Sequence[MemberStatus], *, members: int) -> str:
    """Why the etcd cluster is not healthy; empty if every member responds and follows the same leader. A
    member that has just returned may still be campaigning, and an election would follow."""
    problems = [f"{each.info.name}: {each.problem or ', '.join(each.alarms)}" for each in statuses]
    problems = [line for line, each in zip(problems, statuses, strict=True) if each.problem or each.alarms]
    leaders = sorted(each.info.name for each in statuses if each.is_leader)
    if len(statuses) != members:
        problems.append(f"{len(statuses)} of {members} members")
    if len(leaders) != 1:
        problems.append(f"leaders: {', '.join(leaders) or 'none'}")
    return "; ".join(problems)
