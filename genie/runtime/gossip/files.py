"""Files of one member: what it needs to take part in gossip without a leader, and the members that it knows.

    DIR/gossip.json     the last settings that the cluster returned: keys and seeds; mode 0600
    DIR/members.json    the members as of the last few seconds, for `genie members` on this machine

Both block, and are only caches.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path

import msgspec

from genie.errors import StoreFullError
from genie.model.messages import GossipSettings, MembersReply
from genie.processes import files

_log = logging.getLogger(__name__)

_SETTINGS_FILE = "gossip.json"
_MEMBERS_FILE = "members.json"
_FILE_BYTES_MAX = 8 << 20


class StoredGossip(msgspec.Struct, frozen=True, kw_only=True):
    """The content of gossip.json. `port`: the one that was used last, because the address of a member should
    stay the same."""

    settings: GossipSettings
    port: int = 0


def try_read_stored_gossip(directory: Path) -> StoredGossip | None:
    """None if there is none, or it cannot be read."""
    try:
        text = files.read_small_file(directory / _SETTINGS_FILE)
        return msgspec.json.decode(text, type=StoredGossip)
    except (OSError, UnicodeDecodeError, msgspec.DecodeError):
        return None


def write_stored_gossip(directory: Path, stored: StoredGossip) -> None:
    files.write_private(directory / _SETTINGS_FILE, msgspec.json.encode(stored))


def try_write_members(directory: Path, reply: MembersReply) -> bool:
    try:
        files.write_private(directory / _MEMBERS_FILE, msgspec.json.encode(reply))
    except StoreFullError as error:
        _log.debug("could not write the list of members: %s", error)
        return False
    return True


def find_latest_members(directories: Iterable[Path]) -> MembersReply | None:
    """The newest list of members in these directories; None if there is none."""
    found = [reply for directory in directories if (reply := _try_read_members(directory)) is not None]
    return max(found, key=lambda reply: reply.observed_at, default=None)


def _try_read_members(directory: Path) -> MembersReply | None:
    try:
        text = files.read_small_file(directory / _MEMBERS_FILE, bytes_max=_FILE_BYTES_MAX)
        return msgspec.json.decode(text, type=MembersReply)
    except (OSError, UnicodeDecodeError, msgspec.DecodeError):
        return None
