"""Fencing tokens: which of two leaders is the later one. Pure.

A token is one integer of 64 bits: the generation of the cluster, which each restore of a backup raises, and
below it the revision at which the leader's key was created in the store. The revisions of a restored store
start again, so nodes would reject its leader without the generation. In generation 0 the token is the
revision.
"""

from __future__ import annotations

_REVISION_BITS = 40
GENERATION_MAX = (1 << 24) - 1
REVISION_MAX = (1 << _REVISION_BITS) - 1


def make_fencing_token(*, generation: int, revision: int) -> int:
    """Raises ValueError for a number that does not fit."""
    if not 0 <= generation <= GENERATION_MAX or not 0 <= revision <= REVISION_MAX:
        raise ValueError(f"no fencing token for revision {revision} of generation {generation}")
    return generation << _REVISION_BITS | revision


def revision_of_token(token: int) -> int:
    return token & REVISION_MAX


def describe_token(token: int) -> str:
    """Such as "revision 7 of generation 2"."""
    return f"revision {revision_of_token(token)} of generation {token >> _REVISION_BITS}"
