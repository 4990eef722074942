"""Reads of a copy: the token must be valid in the copy, and older changes are ignored."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest

from genie.controller.connection import Connection
from genie.controller.ledger import LedgerTables
from genie.controller.requests.open_waits import OpenWaits
from genie.controller.rows import NodeRecord
from genie.controller.standby.copy_reads import CopyReads, _StoredNodes
from genie.controller.standby.ledger_copy import LedgerCopy
from genie.controller.store import Put, WatchEvent
from genie.errors import TokenRefusedError
from genie.model.messages import JobsReply, ListJobs
from genie.model.tenant import Identity, QuotaRecord, TokenKind, TokenRecord
from genie.runtime.rpc import Peer
from genie.sim.store import MemoryStore
from tests.fakes.agent import make_node_info
from tests.fakes.clock import FakeClock
from tests.waiting import until

TOKEN = TokenRecord(token_id="red1", kind=TokenKind.USER, secret_sha256="", tenant="red", created_at=1.0)
IDENTITY = Identity(token_id="red1", kind=TokenKind.USER, tenant="red")


class _NewerTokenRecord(TokenRecord, frozen=True, kw_only=True):
    """A token with a restriction that a newer release adds."""

    only_reads: bool = False


class _NoChannel:
    """The channel of a connection that only has an identity."""

    peer = "client"


def make_connection() -> Connection:
    return Connection(Peer(_NoChannel()), IDENTITY)  # type: ignore[arg-type]


@asynccontextmanager
async def reads_of(token: TokenRecord, clock: FakeClock) -> AsyncIterator[CopyReads]:
    memory = await MemoryStore.open(clock=clock)
    await memory.commit([], [Put(f"token/{token.token_id}", msgspec.json.encode(token))])

    async def write_mark() -> int:
        return 0

    copy = LedgerCopy(memory, clock=clock, write_mark=write_mark, on_leader_lost=lambda: None)
    async with asyncio.TaskGroup() as group:
        task = group.create_task(copy.follow())

        async def is_current() -> bool:
            await clock.advance(0.1)
            return copy.is_usable

        await until(is_current)
        yield CopyReads(copy, clock=clock, waits=OpenWaits())
        task.cancel()
    await memory.close()


async def test_valid_token_reads() -> None:
    clock = FakeClock()
    async with reads_of(TOKEN, clock) as reads:
        reply = await reads.respond(make_connection(), ListJobs())
        assert isinstance(reply, JobsReply) and reply.jobs == ()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"revoked_at": 2.0}, "was revoked"),
        ({"expires_at": 3.0}, "has expired"),
        ({"token_id": "other"}, "was revoked"),
    ],
)
async def test_token_that_is_not_valid_in_the_copy_is_rejected(
    changes: dict[str, object], message: str
) -> None:
    """Although its connection is still open."""
    clock = FakeClock()
    async with reads_of(msgspec.structs.replace(TOKEN, **changes), clock) as reads:
        with pytest.raises(TokenRefusedError, match=message):
            await reads.respond(make_connection(), ListJobs())


async def test_token_of_a_newer_release_in_the_copy_is_rejected_with_that_reason() -> None:
    clock, newer = FakeClock(), _NewerTokenRecord(**msgspec.structs.asdict(TOKEN), only_reads=True)
    async with reads_of(newer, clock) as reads:
        with pytest.raises(TokenRefusedError, match=r"newer release of Genie: .* does not know only_reads"):
            await reads.respond(make_connection(), ListJobs())


async def test_change_that_is_older_than_a_row_is_ignored() -> None:
    """The watch repeats changes that were read with the tables."""
    clock = FakeClock()
    memory = await MemoryStore.open(clock=clock)
    values = [msgspec.json.encode(QuotaRecord(tenant="red", gpus=gpus)) for gpus in (1.0, 2.0)]
    revisions = [(await memory.commit([], [Put("quota/red", value)])).revision for value in values]
    tables = LedgerTables(memory, clock=clock)
    await tables.read_all_tables()
    changed: list[str] = []
    tables.quotas.add_listener(lambda tenant, before, after: changed.append(tenant))
    tables.apply_stored_change(WatchEvent("quota/red", values[0], revisions[0]))
    assert tables.quotas["red"].gpus == 2.0 and changed == []
    tables.apply_stored_change(WatchEvent("quota/red", None, revisions[1] + 1))
    assert "red" not in tables.quotas and changed == ["red"]
    await memory.close()


async def test_snapshots_of_nodes_are_made_again_only_when_the_nodes_change() -> None:
    clock = FakeClock()
    memory = await MemoryStore.open(clock=clock)

    async def store_node(node_id: str, cpus: float) -> WatchEvent:
        value = msgspec.json.encode(NodeRecord(info=make_node_info(node_id, cpus=cpus)))
        key = f"node/{node_id}"
        return WatchEvent(key, value, (await memory.commit([], [Put(key, value)])).revision)

    await store_node("n1", 1.0)
    await store_node("n2", 1.0)
    tables = LedgerTables(memory, clock=clock)
    nodes = _StoredNodes(tables)
    await tables.read_all_tables()
    assert nodes.current_snapshots().keys() == {"n1", "n2"}
    changed = await store_node("n1", 2.0)
    tables.apply_stored_change(changed)
    tables.apply_stored_change(WatchEvent("node/n2", None, changed.revision + 1))
    after = dict(nodes.current_snapshots())
    assert after.keys() == {"n1"} and after["n1"].info.cpus == 2.0
    assert nodes.current_snapshots()["n1"] is after["n1"]
    await memory.close()
