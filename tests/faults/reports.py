"""The printed results of a fault run: one line per fault, and a table over all rounds with the goals."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tests.faults.rounds import FaultResult

ACCEPT_GOAL_S = 5.0
"""Until another server accepts a submission."""
ACCEPT_WITH_ETCD_LEADER_GOAL_S = 8.0
"""The same where the leader of etcd was on the silent machine."""
NODE_LOSS_GOAL_S = 20.0


@dataclass
class SummaryRow:
    """One fault over all rounds. Times are the largest ones, in seconds; None if there are none."""

    fault: str
    rounds: int = 0
    accepted_s: float | None = None
    accepted_with_etcd_leader_s: float | None = None
    node_lost_s: float | None = None
    settled_s: float | None = None
    goals_missed: int = 0
    problems: int = 0


def make_summary_rows(results: Iterable[FaultResult]) -> list[SummaryRow]:
    rows: dict[str, SummaryRow] = {}
    for result in results:
        row = rows.setdefault(result.fault, SummaryRow(result.fault))
        row.rounds += 1
        row.problems += bool(result.problem)
        longest_s = max(result.accepted_s.values(), default=None)
        if result.had_etcd_leader:
            row.accepted_with_etcd_leader_s = _largest(row.accepted_with_etcd_leader_s, longest_s)
        else:
            row.accepted_s = _largest(row.accepted_s, longest_s)
        row.node_lost_s = _largest(row.node_lost_s, result.node_lost_s)
        row.settled_s = _largest(row.settled_s, result.settled_s)
        row.goals_missed += len(missed_goals(result))
    return sorted(rows.values(), key=lambda row: row.fault)


def missed_goals(result: FaultResult) -> list[str]:
    """A goal for accepting submissions applies only if a majority of the servers remained."""
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
    """A table of the largest times. ETCD: where the leader of etcd was on the silent machine."""
    columns = ("FAULT", "ROUNDS", "ACCEPTED", "ETCD", "NODE LOST", "HEALTHY", "GOALS MISSED", "FAILED")
    lines = [f"{columns[0]:<30}" + "".join(f"{column:>14}" for column in columns[1:])]
    for row in rows:
        times_s = (row.accepted_s, row.accepted_with_etcd_leader_s, row.node_lost_s, row.settled_s)
        cells = [str(row.rounds), *map(_format_time, times_s), str(row.goals_missed), str(row.problems)]
        lines.append(f"{row.fault:<30}" + "".join(f"{cell:>14}" for cell in cells))
    return "\n".join(lines)


def _format_time(time_s: float | None) -> str:
    return "-" if time_s is None else f"{time_s:.2f} s"


def _largest(first_s: float | None, second_s: float | None) -> float | None:
    known = [time_s for time_s in (first_s, second_s) if time_s is not None]
    return max(known, default=None)
