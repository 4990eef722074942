"""The printed results of a fault run: missed goals, and the largest times over all rounds."""

from __future__ import annotations

from dataclasses import replace

from tests.faults.reports import (
    format_goals,
    format_row,
    format_summary,
    make_goal_results,
    make_summary_rows,
    missed_goals,
)
from tests.faults.rounds import FaultResult, RoundResult

RESULT = FaultResult("etcd-leader-killed", "s1", False, {"s2": 4.9, "s3": 5.1}, settled_s=0.5)


def test_goal_is_longer_if_the_leader_of_etcd_was_lost() -> None:
    assert missed_goals(RESULT) == ["s3 accepted after 5.1 s, goal 5 s"]
    assert missed_goals(replace(RESULT, had_etcd_leader=True)) == []


def test_no_goal_applies_to_an_outage_of_all_servers() -> None:
    assert missed_goals(replace(RESULT, is_outage=True)) == []


def test_node_that_is_lost_late_is_a_missed_goal() -> None:
    result = replace(RESULT, accepted_s={}, node_lost_s=20.5)
    assert missed_goals(result) == ["node lost after 20.5 s, goal 20 s"]
    assert "MISSED: node lost after 20.5 s" in format_row(result)


def test_summary_has_the_largest_and_median_times_of_each_fault() -> None:
    slower = replace(RESULT, had_etcd_leader=True, accepted_s={"s2": 7.0}, settled_s=2.0)
    (row,) = make_summary_rows([RESULT, slower, replace(slower, accepted_s={"s2": 6.0, "s3": 6.5})])
    assert (row.rounds, row.accepted_s, row.accepted_with_etcd_leader_s) == (3, [5.1], [7.0, 6.5])
    assert (row.settled_s, row.goals_missed, row.problems) == ([0.5, 2.0, 2.0], 1, 0)
    line = format_summary([row]).splitlines()[-1]
    assert line.split() == [
        *("etcd-leader-killed", "3", "5.10", "/", "5.10", "7.00", "/", "6.75", "-"),
        *("2.00", "/", "2.00", "1", "0"),
    ]


def test_goals_say_whether_they_were_met() -> None:
    with_etcd = replace(RESULT, had_etcd_leader=True, accepted_s={"s2": 7.0})
    outage = replace(RESULT, is_outage=True, accepted_s={"s2": 50.0})
    goals = make_goal_results([RESULT, with_etcd, outage])
    assert [(goal.limit_s, goal.times_s, goal.is_met) for goal in goals[:2]] == [
        (5.0, [4.9, 5.1], False),
        (8.0, [7.0], True),
    ]
    header, accepted, accepted_with_etcd, lost = format_goals(goals).splitlines()
    assert header.split() == ["GOAL", "LIMIT", "MEASURED", "TIMES", "MET"]
    assert accepted.endswith("NO") and accepted_with_etcd.endswith("yes") and lost.endswith("not measured")
    assert make_goal_results([replace(RESULT, node_lost_s=20.5)])[2].is_met is False


def test_result_of_a_round_survives_the_sandbox() -> None:
    result = RoundResult([RESULT], ["a violation"])
    assert RoundResult.from_json(result.to_json()) == result
