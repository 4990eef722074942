"""The table of members: times of changes, order and bounds."""

from __future__ import annotations

import msgspec

from genie.model.member import MEMBERS_MAX, Member, MemberRole, MemberState
from genie.runtime.gossip.member_table import GONE_MEMBER_RETENTION_S, MemberTable


def make_member(
    name: str, state: MemberState = MemberState.ALIVE, role: MemberRole = MemberRole.NODE
) -> Member:
    return Member(name=name, role=role, address="127.0.0.1:1", state=state, since=0.0)


def test_since_is_the_time_of_the_last_change_of_state() -> None:
    table, member = MemberTable(), make_member("n1")
    assert table.update([member], now=1.0)
    assert not table.update([member], now=2.0)
    assert table.update([msgspec.structs.replace(member, release="2.0")], now=3.0)
    assert table.sorted_members()[0].since == 1.0
    assert table.update([make_member("n1", MemberState.DEAD)], now=4.0)
    assert table.sorted_members()[0].since == 4.0


def test_servers_come_first_and_members_are_sorted_by_name() -> None:
    table = MemberTable()
    table.update([make_member("b"), make_member("a"), make_member("z", role=MemberRole.SERVER)], now=0.0)
    assert [member.name for member in table.sorted_members()] == ["z", "a", "b"]


def test_gone_members_are_forgotten_after_a_day() -> None:
    table = MemberTable()
    table.update([make_member("a", MemberState.LEFT), make_member("b")], now=0.0)
    assert not table.update([], now=GONE_MEMBER_RETENTION_S)
    assert table.update([], now=GONE_MEMBER_RETENTION_S + 1)
    assert [member.name for member in table.sorted_members()] == ["b"]


def test_table_is_bounded_and_forgets_the_oldest_gone_members_first() -> None:
    table = MemberTable()
    table.update([make_member("old", MemberState.DEAD)], now=0.0)
    table.update([make_member("dead", MemberState.DEAD)], now=1.0)
    table.update([make_member(f"n{number}") for number in range(MEMBERS_MAX)], now=2.0)
    names = {member.name for member in table.sorted_members()}
    assert len(names) == MEMBERS_MAX
    assert not names & {"old", "dead"} and f"n{MEMBERS_MAX - 1}" in names
    table.update([make_member("more")], now=3.0)
    assert "more" not in {member.name for member in table.sorted_members()}
