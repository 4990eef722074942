"""Alarms for etcd members that do not respond."""

from __future__ import annotations

import logging

import pytest

from genie.controller.etcd.member_alarms import EtcdMemberAlarms
from genie.controller.etcd.membership import MemberInfo, MemberStatus

_NOON = 1_795_089_600.0


def status_of(number: int, *, problem: str = "", belongs_to_other_cluster: bool = False) -> MemberStatus:
    info = MemberInfo(
        member_id=number, name=f"s{number}", peer_url="", endpoint=f"10.0.0.{number}:2379", is_learner=False
    )
    return MemberStatus(info=info, problem=problem, belongs_to_other_cluster=belongs_to_other_cluster)


def test_alarm_names_the_member_its_address_the_time_and_what_to_do(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    alarms = EtcdMemberAlarms()
    statuses = [status_of(1), status_of(2, problem="refused"), status_of(3)]
    for number in range(4):
        alarms.record_statuses(statuses, now=_NOON + 5 * number)
    expected = (
        "etcd member s2 (10.0.0.2:2379) has not responded since 2026-11-19 12:00:00 UTC, 2 of 3 respond: run "
        "'genie up' on that server, or, if it is lost, 'genie etcd remove s2' on another one"
    )
    assert alarms.alarms() == [expected]
    assert [record.message for record in caplog.records] == [f"{expected} (refused)"], "logged once"
    alarms.record_statuses([status_of(1), status_of(2), status_of(3)], now=_NOON + 60)
    assert alarms.alarms() == []
    assert "etcd member s2 responds again" in caplog.records[-1].message


def test_alarm_of_a_silent_member_changes_when_it_returns_in_another_cluster() -> None:
    alarms = EtcdMemberAlarms()
    for _ in range(2):
        alarms.record_statuses([status_of(1), status_of(2, problem="no response")], now=_NOON)
    assert "has not responded since" in alarms.alarms()[0]
    other = status_of(2, problem="belongs to another etcd cluster", belongs_to_other_cluster=True)
    alarms.record_statuses([status_of(1), other], now=_NOON)
    (text,) = alarms.alarms()
    assert text.startswith("etcd member s2 (10.0.0.2:2379) belongs to another etcd cluster")
    assert "'genie down'" in text and "'genie etcd remove s2'" in text


def test_single_failed_check_is_no_alarm() -> None:
    alarms = EtcdMemberAlarms()
    for number in range(4):
        alarms.record_statuses(
            [status_of(1), status_of(2, problem="busy" if number % 2 == 0 else "")], now=_NOON + number
        )
        assert alarms.alarms() == []


def test_controller_that_no_longer_leads_has_no_alarms() -> None:
    alarms = EtcdMemberAlarms()
    for _ in range(2):
        alarms.record_statuses([status_of(1, problem="refused")], now=_NOON)
    assert len(alarms.alarms()) == 1
    alarms.clear()
    assert alarms.alarms() == []
