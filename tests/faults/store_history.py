"""The revision history of etcd: every change of every key since the first revision, read by a watch."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from genie.controller.etcd.local_member import LocalMember
from genie.controller.etcd.membership import MemberStatus, open_etcd_cluster
from genie.controller.store.etcd import EtcdStore
from genie.controller.store.etcd_address import EtcdAddress
from genie.controller.store.protocol import Put, WatchEvent
from genie.errors import GenieError
from tests.faults.machines import Machine

END_MARK_KEY = "end-of-fault-run"
_READ_TIMEOUT_S = 60.0


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
    events: list[WatchEvent] = []
    async with asyncio.timeout(_READ_TIMEOUT_S):
        store = await EtcdStore.open_address(etcd_address_of(server))
        try:
            last = (await store.commit([], [Put(END_MARK_KEY, b"")])).revision
            async with store.watch("", after_revision=0) as changes:
                async for event in changes:
                    events.append(event)
                    if event.revision >= last:
                        break
        finally:
            await store.close()
    return list(group_by_revision(events))


async def fetch_revision(server: Machine) -> int:
    """The current revision of the store."""
    async with asyncio.timeout(_READ_TIMEOUT_S):
        store = await EtcdStore.open_address(etcd_address_of(server))
        try:
            async with store.snapshot() as snapshot:
                return snapshot.revision
        finally:
            await store.close()


async def fetch_member_statuses(servers: Sequence[Machine]) -> tuple[MemberStatus, ...]:
    """As the first server that responds reports them; empty if none does."""
    for server in servers:
        with suppress(GenieError, OSError, AssertionError):
            async with open_etcd_cluster(etcd_address_of(server)) as cluster:
                return await cluster.fetch_statuses()
    return ()
