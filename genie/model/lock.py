"""Locks: the stored record, the limits, and their checks. Pure.

A lock belongs to a tenant and has at most one holder. Each acquisition gets a fencing token that is higher
than all earlier ones of the cluster (docs/decisions/0031-locks.md).
"""

from __future__ import annotations

from genie.errors import UsageError
from genie.model.limits import check_number, check_text
from genie.model.names import validate_name
from genie.model.record import Record

LOCK_TTL_S_MIN, LOCK_TTL_S_MAX = 1.0, 3600.0
LOCK_TTL_S_DEFAULT = 15.0
HOLDER_LEASE_SHARE = 0.9
"""Part of the lease that the holder uses. The rest covers clocks that run at different rates, and gives the
holder time to stop before the lock can be granted to another one."""
LOCK_RENEWALS_PER_TTL = 3
LOCK_HOLDER_CHARS_MAX = 200


class LockRecord(Record, frozen=True, kw_only=True):
    """A lock that is held; without a row the lock is free. `acquisition_id` is chosen by the client for one
    acquisition and identifies its holder; `holder` describes the holder for people."""

    tenant: str
    name: str
    acquisition_id: str
    holder: str
    owner: str
    """ID of the token that acquired it."""
    fencing_token: int
    ttl_s: float
    acquired_at: float


def validate_lock_name(value: str) -> str:
    """Return `value` if it is a valid name of a lock; else raise NameInvalidError."""
    return validate_name(value, what="lock name")


def check_lock_ttl_s(ttl_s: float) -> float:
    """Return `ttl_s`; raise UsageError if the controller does not allow it."""
    check_number(ttl_s, "ttl_s", LOCK_TTL_S_MIN, LOCK_TTL_S_MAX)
    return ttl_s


def check_lock_holder(text: str) -> str:
    """Return the description of a holder; raise UsageError if it is too long."""
    if len(check_text(text, what="holder")) > LOCK_HOLDER_CHARS_MAX:
        raise UsageError(f"holder has {len(text)} characters; the maximum is {LOCK_HOLDER_CHARS_MAX}")
    return text


def lock_renewal_interval_s(ttl_s: float) -> float:
    """How often a holder renews its lease."""
    return ttl_s / LOCK_RENEWALS_PER_TTL
