"""The members that one member knows, with the time of their last change; bounded.

Pure: the current time is an argument. Dead members and those that have left are kept for a day.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from genie.model.member import MEMBERS_MAX, Member, MemberRole, MemberState

GONE_MEMBER_RETENTION_S = 86400.0
_GONE_STATES = (MemberState.DEAD, MemberState.LEFT)


class MemberTable:
    def __init__(self) -> None:
        self._member_by_key: dict[tuple[MemberRole, str], Member] = {}

    def known_keys(self) -> list[tuple[MemberRole, str]]:
        return list(self._member_by_key)

    def sorted_members(self) -> tuple[Member, ...]:
        """Servers first, then by name."""
        found = self._member_by_key.values()
        return tuple(sorted(found, key=lambda member: (member.role is not MemberRole.SERVER, member.name)))

    def update(self, found: Iterable[Member], *, now: float) -> bool:
        """Records members as they are now; returns whether any has changed. `since` is kept while the state
        stays the same."""
        has_changed = False
        for member in found:
            before = self._member_by_key.get(member.key)
            if before is None and len(self._member_by_key) >= MEMBERS_MAX and not self._discard_oldest_gone():
                continue
            is_same_state = before is not None and before.state is member.state
            since = before.since if before is not None and is_same_state else now
            after = msgspec.structs.replace(member, since=since)
            if after != before:
                self._member_by_key[member.key] = after
                has_changed = True
        return self._discard_expired(now) or has_changed

    def _discard_expired(self, now: float) -> bool:
        expired = [
            key
            for key, member in self._member_by_key.items()
            if member.state in _GONE_STATES and now - member.since > GONE_MEMBER_RETENTION_S
        ]
        for key in expired:
            del self._member_by_key[key]
        return bool(expired)

    def _discard_oldest_gone(self) -> bool:
        """Makes room for a new member; False if every known member is alive or suspect."""
        gone = [member for member in self._member_by_key.values() if member.state in _GONE_STATES]
        if not gone:
            return False
        del self._member_by_key[min(gone, key=lambda member: member.since).key]
        return True
