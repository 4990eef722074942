"""`genie members`: servers and nodes as gossip reports them. Works without a leader and without the store."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from genie.cli import output
from genie.cli.app import Invocation, JsonOption, app, command
from genie.cli.quantities import format_duration
from genie.errors import (
    ConfigError,
    GossipError,
    LeadershipError,
    StoreError,
    TokenMissingError,
    TransportError,
)

if TYPE_CHECKING:
    from pathlib import Path

    from genie.config import Settings
    from genie.model.member import Member
    from genie.model.messages import MembersReply

_COLUMNS = ("name", "role", "address", "state", "since", "release")
_COLUMNS_DROPPED_IF_NARROW = ("release", "since")


@command(app, "members", example="genie members")
def members(invocation: Invocation, *, as_json: JsonOption = False) -> None:
    """List servers and nodes and whether they respond; works without a leader."""
    reply, source = asyncio.run(_fetch_or_read_members(invocation.load_settings()))
    if as_json:
        output.write_json({"source": source} | output.struct_to_json(reply))
        return
    now = time.time()
    output.write_table(
        _COLUMNS,
        [_format_member(member, now=now) for member in reply.members],
        droppable=_COLUMNS_DROPPED_IF_NARROW,
    )
    if reply.more:
        output.print_message(f"these are the first {len(reply.members)} members; the list has more")


async def _fetch_or_read_members(settings: Settings) -> tuple[MembersReply, str]:
    """Return the members, and the server or the directory that they are from. Asks any server, or else reads
    what a process on this machine has stored, unless an address was given: it may be another cluster's."""
    from genie.cluster.client import open_client

    try:
        async with open_client(settings) as client:
            reply, where = await client.members(), client.where
    except (ConfigError, LeadershipError, StoreError, TokenMissingError, TransportError) as error:
        is_address_given = settings.cluster.master_addr is not None
        stored = None if is_address_given else _find_stored_members(settings.paths.state_dir)
        if stored is None:
            raise
        age = _format_age(stored.observed_at, now=time.time())
        observer = output.to_one_line(stored.observer)
        output.print_message_lines(f"could not ask a server: {error.message}")
        output.print_message(f"listing the members that {observer} on this machine knew {age}")
        return stored, "this machine"
    if reply.off_reason:
        raise GossipError(
            f"the server at {where} takes no part in gossip: {reply.off_reason}",
            hint="'genie nodes' lists the nodes, 'genie status' shows the leader",
        )
    return reply, where


def _find_stored_members(state_dir: Path) -> MembersReply | None:
    from genie.agent.identity import AGENTS_DIR
    from genie.controller.store.open import CONTROLLER_DIRECTORY
    from genie.runtime.gossip.files import find_latest_members

    return find_latest_members([state_dir / CONTROLLER_DIRECTORY, *(state_dir / AGENTS_DIR).glob("*")])


def _format_member(member: Member, *, now: float) -> tuple[str, ...]:
    return (
        member.machine_name or member.name,
        member.role.value,
        member.controller_address or member.address,
        member.state.value,
        _format_age(member.since, now=now),
        member.release or "-",
    )


def _format_age(at: float, *, now: float) -> str:
    """Format how long ago a time in seconds since 1970 was. One before 1970 or in the future is clamped."""
    return f"{format_duration(now - min(max(at, 0.0), now))} ago"
