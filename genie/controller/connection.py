"""One connection to the controller: who is on it, and what it may be asked."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from genie.errors import PermissionError_
from genie.model.job import JobSpec
from genie.model.messages import Message
from genie.model.tenant import Identity
from genie.runtime.rpc import Peer


@dataclass(slots=True, eq=False)
class Connection:
    """`who` is set by a Hello that was accepted, and by nothing else."""

    peer: Peer
    who: Identity | None = None
    checked: JobSpec | None = None
    """The last job that was submitted on it and found good: jobs come in series."""
    told: tuple[str, ...] = ()
    """The controllers that the answer to Hello named."""

    @property
    def identity(self) -> Identity:
        assert self.who is not None, "asked before Hello; the dispatcher does not let that through"
        return self.who

    def check_is(self, node_id: str) -> str:
        """A node speaks for itself only."""
        if node_id != self.identity.name:
            raise PermissionError_(f"this connection is node {self.identity.name}'s, not {node_id[:80]}'s")
        return node_id


# Any: each handler takes its own type of request; the table that holds them is keyed by that type.
Handler = Callable[[Connection, Any], Awaitable[Message]]
Handlers = dict[type[Message], Handler]
