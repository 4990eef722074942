"""What a server has stored about itself in etcd, deleted when its member is removed for good.

Agents try every controller whose address is stored. That of a machine that no longer exists times out, so
that restartable jobs would end whenever no leader can be found (docs/decisions/0002-dead-man-timer.md).
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from genie.controller.election import CONTROLLER_KEY_PREFIX, LEADER_KEY, LeaderRecord
from genie.controller.nodes.releases import SERVER_RELEASE_KEY_PREFIX, ServerRelease
from genie.controller.store import Compare, Delete, KeyValue, Store
from genie.errors import StoreCorruptError, UsageError
from genie.model.names import parse_endpoint
from genie.model.tenant import TokenKind, TokenRecord, server_token_name


async def list_controllers_of_server(store: Store, etcd_member: str) -> dict[str, ServerRelease]:
    """The releases of the controllers beside this member of etcd, by name of the controller."""
    return {name: server for name, server in await _list_servers(store) if server.etcd_member == etcd_member}


async def list_other_servers(store: Store, etcd_member: str) -> list[ServerRelease]:
    """The releases of the controllers beside other members of etcd."""
    return [server for _, server in await _list_servers(store) if server.etcd_member != etcd_member]


def choose_owner_tokens_of_server(
    tokens: Iterable[TokenRecord],
    *,
    removed: Iterable[ServerRelease],
    others: Iterable[ServerRelease],
    own_token_id: str,
) -> list[str]:
    """The IDs of the valid owner tokens of a removed server: those that it has announced, and those of its
    earlier joins, which are named after its address. Never one of another server."""
    removed, others = list(removed), list(others)
    hosts = {parse_endpoint(server.address)[0] for server in removed}
    hosts -= {parse_endpoint(server.address)[0] for server in others}
    names = {server_token_name(host) for host in hosts}
    announced = {server.owner_token_id for server in removed}
    kept = {own_token_id, *(server.owner_token_id for server in others)}
    return [
        each.token_id
        for each in tokens
        if each.kind is TokenKind.OWNER
        and each.revoked_at is None
        and each.token_id not in kept
        and (each.token_id in announced or each.name in names)
    ]


async def delete_records_of_controller(store: Store, name: str, *, etcd_member: str) -> None:
    """Delete the address and the release of the controller.

    Raise UsageError while it leads: agents must know the address of the leader."""
    leader_key = await store.get(LEADER_KEY)
    if leader_key is not None and _decode_leader(leader_key).name == name:
        raise UsageError(
            f"cannot remove etcd member {etcd_member}: the controller of that server leads",
            hint="stop that server with 'genie down' on its machine, or wait until its lease has expired",
        )
    revision = 0 if leader_key is None else leader_key.create_revision
    keys = (CONTROLLER_KEY_PREFIX + name, SERVER_RELEASE_KEY_PREFIX + name)
    done = await store.commit([Compare(LEADER_KEY, revision, field="create")], [Delete(key) for key in keys])
    if not done.succeeded:
        raise UsageError(
            f"cannot remove etcd member {etcd_member}: the leader has just changed", hint="try again"
        )


async def _list_servers(store: Store) -> list[tuple[str, ServerRelease]]:
    """With the names of their controllers."""
    found = []
    for item in (await store.range(SERVER_RELEASE_KEY_PREFIX)).items:
        try:
            server = msgspec.json.decode(item.value, type=ServerRelease)
        except msgspec.DecodeError:
            continue  # of a much newer release: then it has no member of that name
        found.append((item.key.removeprefix(SERVER_RELEASE_KEY_PREFIX), server))
    return found


def _decode_leader(leader_key: KeyValue) -> LeaderRecord:
    try:
        return msgspec.json.decode(leader_key.value, type=LeaderRecord)
    except msgspec.DecodeError as error:
        raise StoreCorruptError(f"store key {LEADER_KEY!r} cannot be read: {error}") from error
