"""The messages about locks."""

from __future__ import annotations

from genie.model.messages.base import Message, Request
from genie.model.messages.numbers import Counter, LockTtlS, WaitS
from genie.model.record import Facts


class LockGrant(Message, frozen=True, kw_only=True):
    """`fencing_token` is 0 unless the client holds the lock; then `holder` describes another holder, if it is
    known."""

    fencing_token: int = 0
    holder: str = ""


class AcquireLock(Request[LockGrant], frozen=True, kw_only=True):
    """Acquires a lock of the tenant, or waits in the queue for `wait_s`. Without `wait_s` the client does not
    enter the queue. `acquisition_id` is an idempotency key: each poll of one acquisition has the same. The
    lease of `ttl_s` counts from the time at which the request was sent."""

    name: str
    acquisition_id: str
    holder: str
    ttl_s: LockTtlS
    wait_s: WaitS = 0.0


class LockRenewal(Message, frozen=True, kw_only=True):
    """`lost_reason` is empty if the client holds the lock; its lease then counts from the request."""

    lost_reason: str = ""


class RenewLock(Request[LockRenewal], frozen=True, kw_only=True):
    name: str
    acquisition_id: str
    fencing_token: Counter


class LockReleased(Message, frozen=True, kw_only=True):
    """`was_held`: whether the client held the lock until now."""

    was_held: bool


class ReleaseLock(Request[LockReleased], frozen=True, kw_only=True):
    """Releases a lock, or stops waiting for it. The acquisition ID cannot be used again."""

    name: str
    acquisition_id: str


class LockView(Facts, frozen=True, kw_only=True):
    """A lock that is held. `waiting`: number of clients that wait for it."""

    name: str
    tenant: str
    holder: str
    fencing_token: int
    ttl_s: float
    acquired_at: float
    expires_in_s: float
    """Until the lease expires if it is not renewed."""
    waiting: int


class LocksReply(Message, frozen=True, kw_only=True):
    """Ordered by tenant and name. `more`: further locks did not fit into one frame."""

    locks: tuple[LockView, ...]
    more: bool = False


class ListLocks(Request[LocksReply], frozen=True, kw_only=True):
    """A user gets the locks of its tenant, the owner those of all tenants."""


class LockBroken(Message, frozen=True, kw_only=True):
    """The holder that lost the lock; empty if its record could not be read."""

    holder: str = ""
    fencing_token: int = 0


class BreakLock(Request[LockBroken], frozen=True, kw_only=True):
    """Releases a lock of any tenant, regardless of its holder. Not idempotent."""

    tenant: str
    name: str
