"""The printed results of a fault run: one line per fault, a table over all rounds, and the goals."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tests.faults.rounds import FaultResult

ACCEPT_GOAL_S = 5.0
"""Until another server accepts a submission."""
ACCEPT_WITH_ETCD_LEADER_GOAL_S = 8.0
"""The same where the leader of etcd was on the silent machine."""
NODE_LOSS_GOAL_S = 20.0


@dataclass
class SummaryRow:
    """One fault over all rounds. Times in seconds, one per round in which there was one."""

    fault: str
    rounds: int = 0
    accepted_s: list[float] = field(default_factory=list)
    """Until the last of the other servers accepted."""
    accepted_with_etcd_leader_s: list[float] = field(default_factory=list)
    node_lost_s: list[float] = field(default_factory=list)
    settled_s: list[float] = field(default_factory=list)
    goals_missed: int = 0
    problems: int = 0


def make_summary_rows(results: Iterable[FaultResult]) -> list[SummaryRow]:
    rows: dict[str, SummaryRow] = {}
    for result in results:
        row = rows.setdefault(result.fault, SummaryRow(result.fault))
        row.rounds += 1
        row.problems += bool(result.problem)
        accepted = row.accepted_with_etcd_leader_s if result.had_etcd_leader else row.accepted_s
        accepted += [max(result.accepted_s.values())] if result.accepted_s else []
        row.node_lost_s += [result.node_lost_s] if result.node_lost_s is not None else []
        row.settled_s += [result.settled_s] if result.settled_s is not None else []
        row.goals_missed += len(missed_goals(result))
    return sorted(rows.values(), key=lambda row: row.fault)


@dataclass(frozen=True)
class GoalResult:
    """One goal, and the times of all faults and servers to which it applies."""

    what: str
    limit_s: float
    times_s: Sequence[float]

    @property
    def is_met(self) -> bool:
        return all(time_s <= self.limit_s for time_s in self.times_s)


def make_goal_results(results: Sequence[FaultResult]) -> list[GoalResult]:
    """A goal for accepting submissions applies only if a majority of the servers remained."""

    def list_accepted_s(*, had_etcd_leader: bool) -> list[float]:
        applicable = [
            each for each in results if each.had_etcd_leader is had_etcd_leader and not each.is_outage
        ]
        return [time_s for each in applicable for time_s in each.accepted_s.values()]

    return [
        GoalResult("accepted by another server", ACCEPT_GOAL_S, list_accepted_s(had_etcd_leader=False)),
        GoalResult(
            "the same, etcd's leader was there",
            ACCEPT_WITH_ETCD_LEADER_GOAL_S,
            list_accepted_s(had_etcd_leader=True),
        ),
        GoalResult(
            "lost node reported",
            NODE_LOSS_GOAL_S,
            [each.node_lost_s for each in results if each.node_lost_s is not None],
        ),
    ]


def missed_goals(result: FaultResult) -> list[str]:
    """The goals that one fault has missed."""
    goal_s = ACCEPT_WITH_ETCD_LEADER_GOAL_S if result.had_etcd_leader else ACCEPT_GOAL_S
    missed = [
        f"{server} accepted after {accepted_s:g} s, goal {goal_s:g} s"
        for server, accepted_s in sorted(result.accepted_s.items())
        if accepted_s > goal_s and not result.is_outage
    ]
    if result.node_lost_s is not None and result.node_lost_s > NODE_LOSS_GOAL_S:
        missed.append(f"node lost after {result.node_lost_s:g} s, goal {NODE_LOSS_GOAL_S:g} s")
    return missed


def format_row(result: FaultResult) -> str:
    """One line for a fault."""
    accepted = ", ".join(f"{name} {time_s:.2f} s" for name, time_s in sorted(result.accepted_s.items()))
    parts = [f"{result.fault:<30} accepted: {accepted or 'not measured'}"]
    parts += ["etcd's leader was there"] if result.had_etcd_leader else []
    parts += ["since the end of the fault"] if result.is_outage else []
    parts += [f"node lost: {result.node_lost_s:.2f} s"] if result.node_lost_s is not None else []
    parts += [f"healthy: {result.settled_s:.2f} s"] if result.settled_s is not None else []
    parts += [f"MISSED: {text}" for text in missed_goals(result)]
    parts += [f"FAILED: {result.problem}"] if result.problem else []
    return "; ".join(parts)


def format_summary(rows: Sequence[SummaryRow]) -> str:
    """A table of the largest and the median times. ETCD: where the leader of etcd was on the silent
    machine."""
    columns = ("FAULT", "ROUNDS", "ACCEPTED", "ETCD", "NODE LOST", "HEALTHY", "MISSED", "FAILED")
    widths = (30, 7, 16, 16, 16, 16, 8, 8)
    lines = ["seconds: largest / median over all rounds", _format_cells(columns, widths)]
    for row in rows:
        times_s = (row.accepted_s, row.accepted_with_etcd_leader_s, row.node_lost_s, row.settled_s)
        cells = [row.fault, str(row.rounds), *map(_format_times, times_s)]
        lines.append(_format_cells([*cells, str(row.goals_missed), str(row.problems)], widths))
    return "\n".join(lines)


def format_goals(goals: Sequence[GoalResult]) -> str:
    """A table of the goals, and whether each was met."""
    columns, widths = ("GOAL", "LIMIT", "MEASURED", "TIMES", "MET"), (34, 8, 16, 7, 14)
    lines = [_format_cells(columns, widths)]
    for goal in goals:
        is_met = ("yes" if goal.is_met else "NO") if goal.times_s else "not measured"
        cells = [
            goal.what,
            f"{goal.limit_s:g} s",
            _format_times(goal.times_s),
            str(len(goal.times_s)),
            is_met,
        ]
        lines.append(_format_cells(cells, widths))
    return "\n".join(lines)


def _format_cells(cells: Sequence[str], widths: Sequence[int]) -> str:
    """The first column is aligned to the left."""
    return f"{cells[0]:<{widths[0]}}" + "".join(
        f"{cell:>{width}}" for cell, width in zip(cells[1:], widths[1:], strict=True)
    )


def _format_times(times_s: Sequence[float]) -> str:
    return f"{max(times_s):.2f} / {statistics.median(times_s):.2f}" if times_s else "-"
