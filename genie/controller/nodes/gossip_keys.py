"""The keys of gossip: derived from the CA's private key, the generation of the cluster and a number, so that
the store contains no secret.

Every server has the CA's key, and no node has. The number is raised after a node was removed or its token
revoked, which cannot compute the next key. A change takes three steps, each long enough for all members to
read it: accept the new key, use it, remove the old one. A restore sets the number back but raises the
generation, so that no key is used again. Pure; Certificates derives the keys.
"""

from __future__ import annotations

import msgspec

from genie.controller.rows import ClusterRecord

KEY_CHANGE_STEP_S = 60.0
"""Longer than several intervals in which members read the settings (runtime/gossip/participant.py)."""


def can_change_key(record: ClusterRecord, *, now: float) -> bool:
    """Whether a requested change can begin: one at a time. A clock that was set back delays nothing."""
    elapsed_s = now - record.gossip_key_changed_at
    return record.is_gossip_key_change_due and not 0 <= elapsed_s < 2 * KEY_CHANGE_STEP_S


def with_next_key(record: ClusterRecord, *, now: float) -> ClusterRecord:
    return msgspec.structs.replace(
        record,
        gossip_key_number=record.gossip_key_number + 1,
        gossip_key_changed_at=now,
        is_gossip_key_change_due=False,
    )


def current_key_numbers(record: ClusterRecord, *, now: float) -> tuple[int, ...]:
    """The keys that members have at this time; the first one encrypts."""
    number, elapsed_s = record.gossip_key_number, now - record.gossip_key_changed_at
    if number == 0 or not 0 <= elapsed_s < 2 * KEY_CHANGE_STEP_S:
        return (number,)
    return (number - 1, number) if elapsed_s < KEY_CHANGE_STEP_S else (number, number - 1)


def gossip_key_purpose(*, generation: int, number: int) -> str:
    """What the secret is derived for."""
    return f"genie gossip key {generation}.{number}"
