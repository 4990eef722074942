"""The records of a server whose member is removed (the command: tests/integration/test_servers.py)."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from genie.controller.election import CONTROLLER_KEY_PREFIX, LEADER_KEY, LeaderRecord
from genie.controller.etcd.removed_server import (
    choose_owner_tokens_of_server,
    delete_records_of_controller,
    list_controllers_of_server,
)
from genie.controller.nodes.releases import SERVER_RELEASE_KEY_PREFIX, ServerRelease, ServerReleases
from genie.controller.store import Delete, Put
from genie.errors import UsageError
from genie.model.tenant import TokenKind, TokenRecord
from genie.sim.store import MemoryStore
from tests.controller.running_controller import running_controller
from tests.fakes.clock import FakeClock
from tests.waiting import until


async def store_records_of_server(store: MemoryStore, name: str, *, etcd_member: str) -> None:
    servers = ServerReleases(
        store,
        name=name,
        etcd_member=etcd_member,
        get_owner_token_id=lambda: f"token-of-{name}",
        clock=FakeClock(),
        set_cluster_release=lambda release: None,
    )
    await servers.announce(f"{name}:5555")
    await store.commit([], [Put(CONTROLLER_KEY_PREFIX + name, f"{name}:5555".encode())])


async def list_keys(store: MemoryStore) -> set[str]:
    return {item.key for item in (await store.range("")).items}


async def test_only_the_records_of_that_server_are_deleted() -> None:
    store = await MemoryStore.open(clock=FakeClock())
    for name, etcd_member in (("c1", "s1"), ("c2", "s2"), ("c3", "")):
        await store_records_of_server(store, name, etcd_member=etcd_member)
    await store.commit([], [Put(SERVER_RELEASE_KEY_PREFIX + "c4", b"{")])
    before = await list_keys(store)
    assert await list_controllers_of_server(store, "s9") == {}
    assert await list_keys(store) == before
    found = await list_controllers_of_server(store, "s2")
    assert [(name, each.address, each.owner_token_id) for name, each in found.items()] == [
        ("c2", "c2:5555", "token-of-c2")
    ]
    assert await list_keys(store) == before
    await delete_records_of_controller(store, "c2", etcd_member="s2")
    assert before - await list_keys(store) == {CONTROLLER_KEY_PREFIX + "c2", SERVER_RELEASE_KEY_PREFIX + "c2"}
    await store.close()


def test_only_owner_tokens_of_the_removed_server_are_revoked() -> None:
    def server(host: str, token_id: str) -> ServerRelease:
        return ServerRelease(
            version="0.1.0", address=f"{host}:5555", announced_at=0.0, owner_token_id=token_id
        )

    def token(token_id: str, name: str, *, kind: TokenKind = TokenKind.OWNER) -> TokenRecord:
        return TokenRecord(token_id=token_id, kind=kind, secret_sha256="", name=name, created_at=0.0)

    tokens = [
        token("now", "server-10.0.0.2"),
        token("earlier", "server-10.0.0.2"),
        token("renamed", "other"),
        token("user", "server-10.0.0.2", kind=TokenKind.USER),
        token("of-another", "server-10.0.0.2"),
        token("own", "server-10.0.0.2"),
        token("unrelated", "server-10.0.0.3"),
    ]

    def chosen(*others: ServerRelease) -> list[str]:
        removed = [server("10.0.0.2", "now"), server("10.0.0.2", "renamed")]
        return choose_owner_tokens_of_server(tokens, removed=removed, others=others, own_token_id="own")

    assert chosen(server("10.0.0.3", "of-another")) == ["now", "earlier", "renamed"]
    # Names decide nothing if another server has the same address.
    assert chosen(server("10.0.0.2", "of-another")) == ["now", "renamed"]


async def test_address_of_the_leader_is_not_deleted() -> None:
    store = await MemoryStore.open(clock=FakeClock())
    await store_records_of_server(store, "c1", etcd_member="s1")
    leader = LeaderRecord(name="c1", address="c1:5555")
    await store.commit([], [Put(LEADER_KEY, msgspec.json.encode(leader))])
    before = await list_keys(store)
    with pytest.raises(UsageError, match="etcd member s1: the controller of that server leads"):
        await delete_records_of_controller(store, "c1", etcd_member="s1")
    assert await list_keys(store) == before
    await store.commit([], [Delete(LEADER_KEY)])
    await delete_records_of_controller(store, "c1", etcd_member="s1")
    assert not await list_controllers_of_server(store, "s1")
    await store.close()


async def test_leader_stores_its_address_again(tmp_path: Path) -> None:
    clock = FakeClock()
    async with running_controller(tmp_path, clock=clock) as one:
        key = CONTROLLER_KEY_PREFIX + one.name
        await one.store.commit([], [Delete(key)])

        async def is_address_stored() -> bool:
            await clock.advance(1.0)
            return await one.store.get(key) is not None

        await until(is_address_stored)
