"""The interface of a gossip implementation, and how members describe themselves in their metadata.

Metadata comes from other machines that share one key, so it is validated here; what is invalid is ignored.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from genie.errors import NameInvalidError, UsageError
from genie.model.member import Member, MemberRole
from genie.model.names import parse_endpoint, validate_name, validate_node_id

KEY_BYTES = 32
_SERVER_NAME_PREFIX = "server/"
_RELEASE_PATTERN = re.compile(r"[0-9A-Za-z.+-]{1,32}")
_RELEASE, _CONTROLLER, _MACHINE = "release", "controller", "machine"


@dataclass(frozen=True, kw_only=True)
class GossipIdentity:
    """What a member publishes about itself."""

    name: str
    role: MemberRole
    release: str
    controller_address: str = ""
    machine_name: str = ""

    @property
    def gossip_name(self) -> str:
        """Unique in the cluster: a node ID contains no slash."""
        return self.name if self.role is MemberRole.NODE else f"{_SERVER_NAME_PREFIX}{self.name}"

    @property
    def metadata(self) -> dict[str, str]:
        found = {_RELEASE: self.release, _CONTROLLER: self.controller_address, _MACHINE: self.machine_name}
        return {key: value for key, value in found.items() if value}


class Gossip(Protocol):
    """One member. All methods are called on one event loop; a stopped member is not started again."""

    @property
    def address(self) -> str:
        """HOST:PORT of this member, once it is started."""
        ...

    @property
    def is_running(self) -> bool:
        """False before the start, and after the end or an internal failure."""
        ...

    async def start(self, keys: Sequence[bytes]) -> None:
        """Opens the port; the member is alone until it joins others. The first key encrypts.

        Raises ConfigError without keys on an address that other machines can reach, AddressInUseError, and
        GossipError.
        """
        ...

    async def stop(self, *, leave: bool) -> None:
        """Closes the port. Without `leave`, others take it for a crash. Idempotent."""
        ...

    async def join(self, seeds: Sequence[str]) -> int:
        """Exchanges members with each seed; returns how many responded."""
        ...

    async def use_keys(self, keys: Sequence[bytes]) -> None:
        """Replaces the keys; the first one encrypts. Raises GossipError."""
        ...

    def members(self) -> tuple[Member, ...]:
        """All known members by role and name: this one, and those that are dead or have left."""
        ...

    def add_listener(self, listener: Callable[[], None]) -> None:
        """Calls `listener` after a member was added or changed."""
        ...


MakeGossip = Callable[[GossipIdentity, int], Gossip]
"""Creates a member that is not started yet. The number is the port of the last start; 0 if there was none."""


@dataclass(frozen=True)
class GossipSupport:
    """How this process can take part in gossip; `off_reason` says why it cannot.

    `is_disabled`: by a setting, which counts for the whole cluster if it is a server's."""

    make_gossip: MakeGossip | None = None
    off_reason: str = "it is not configured"
    is_disabled: bool = False
    machine_name: str = ""
    """Of a server: the name that its etcd member and its node have."""


def parse_gossip_name(gossip_name: str) -> tuple[MemberRole, str] | None:
    """Role and name of a member; None if the name is not one that Genie gives."""
    is_server = gossip_name.startswith(_SERVER_NAME_PREFIX)
    name = gossip_name.removeprefix(_SERVER_NAME_PREFIX)
    try:
        if is_server:
            return MemberRole.SERVER, validate_name(name, what="controller name")
        return MemberRole.NODE, validate_node_id(name)
    except NameInvalidError:
        return None


def release_in_metadata(metadata: Mapping[str, str]) -> str:
    release = metadata.get(_RELEASE, "")
    return release if _RELEASE_PATTERN.fullmatch(release) else ""


def controller_address_in_metadata(metadata: Mapping[str, str]) -> str:
    address = metadata.get(_CONTROLLER, "")
    try:
        parse_endpoint(address)
    except UsageError:
        return ""
    return address


def machine_name_in_metadata(metadata: Mapping[str, str]) -> str:
    try:
        return validate_node_id(metadata.get(_MACHINE, ""))
    except NameInvalidError:
        return ""
