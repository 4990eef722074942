"""The base classes of messages, and the empty reply."""

from __future__ import annotations

from typing import Generic, TypeVar

from genie.model.record import Record


class Message(Record, frozen=True, kw_only=True, tag=True):
    """Base of all requests and replies."""


_Reply = TypeVar("_Reply", bound=Message)


class Request(Message, Generic[_Reply], frozen=True, kw_only=True):
    """A request; the reply is of type `_Reply`, or an error. Unknown fields are rejected by name: they could
    change its meaning, such as a constraint on nodes. In a reply they are ignored."""


class Report(Request[_Reply], Generic[_Reply], frozen=True, kw_only=True, forbid_unknown_fields=False):
    """A request that only states facts: unknown fields are ignored."""


class Done(Message, frozen=True, kw_only=True):
    """The empty reply."""
