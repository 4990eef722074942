"""Members of the cluster as gossip reports them: servers and nodes with their state. Pure.

The information is advisory. Leases, fencing tokens and reclaims never depend on it.
"""

from __future__ import annotations

import enum

from genie.model.record import Record

MEMBERS_MAX = 4096
"""Of one list, including dead members and those that have left."""


class MemberRole(enum.StrEnum):
    SERVER = "server"
    NODE = "node"


class MemberState(enum.StrEnum):
    """SUSPECT members did not respond to probes, and become DEAD unless they respond in time. LEFT members
    were stopped."""

    ALIVE = "alive"
    SUSPECT = "suspect"
    DEAD = "dead"
    LEFT = "left"


class Member(Record, frozen=True, kw_only=True):
    """One server or node. `state` and `since` are those of the member that reports it."""

    name: str
    """Node ID, or the name of a controller."""
    role: MemberRole
    address: str
    """HOST:PORT of its gossip."""
    state: MemberState
    since: float
    """When the state was first seen, in seconds since 1970."""
    release: str = ""
    controller_address: str = ""
    """Servers: HOST:PORT of the controller."""
    machine_name: str = ""
    """Servers: name of the machine, which its etcd member and its node have as well; empty if unknown."""

    @property
    def key(self) -> tuple[MemberRole, str]:
        """A node may have the name of a controller."""
        return self.role, self.name
