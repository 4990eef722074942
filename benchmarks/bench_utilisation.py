"""How much of the GPU time is in use while jobs wait, and how long large gangs wait for that.

    python benchmarks/bench_utilisation.py [--json] [--rounds N] [--jobs N] [--load X] [--nodes N]

A mixed, saturated workload is made up (durations, gangs of up to 128 GPUs, fractions of GPUs, three
priorities, eight tenants; --load is what they ask for by what there is) and run through the real scheduler on
simulated time. A round is a seed. The goal is about the time while jobs wait and still arrive: afterwards the
queue is no mixture any more; that time has a figure of its own. The waiting time of large gangs stands beside
that of all jobs, and beside that of fifo without backfill, which serves strictly in turn. With --rounds 1 the
workload is small, and says little.

Not for: real workloads (genie sim run --trace).
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator
from typing import Any

import report

UTILISATION_MIN = 97.0
LARGE_WAIT_RATIO_MAX = 1.0
"""p99 of large gangs, by what it is when everybody is served strictly in turn."""


def summaries(rounds: int, *, jobs: int, load: float, nodes: int, **how: Any) -> list[Any]:
    from genie.scheduler.scheduler import Rules
    from genie.sim.events import Plan, simulate
    from genie.sim.measures import summarise
    from genie.sim.synthetic import Mix, synthetic_jobs
    from genie.sim.workload import alike_nodes

    machines = alike_nodes(nodes)
    found = []
    for seed in range(rounds):
        work = synthetic_jobs(Mix(jobs=jobs, load=load), machines, seed=seed)
        found.append(summarise(simulate(machines, work, Plan(Rules(**how), seed=seed))))
    return found


def measured(rounds: int, *, jobs: int, load: float, nodes: int) -> Iterator[report.Figure]:
    from genie.scheduler.order import Fifo

    ours = summaries(rounds, jobs=jobs, load=load, nodes=nodes)
    strict = summaries(rounds, jobs=jobs, load=load, nodes=nodes, order=Fifo(), backfills=False, preempts=False)
    yield share(
        "in_use_while_waiting_and_arriving",
        [it.utilisation_while_arriving for it in ours],
        [it.utilisation_while_arriving for it in strict],
        report.value_at_least(UTILISATION_MIN),
    )
    yield share(
        "in_use_while_waiting",
        [it.utilisation_while_waiting for it in ours],
        [it.utilisation_while_waiting for it in strict],
    )
    yield share("free_but_of_no_use", [it.fragmentation for it in ours], [it.fragmentation for it in strict])
    for name, large in (("large_gangs", True), ("all", False)):
        values, others = (
            [(it.wait_large_s if large else it.wait_s).p99 for it in each] for each in (ours, strict)
        )
        yield report.figure(
            f"wait_p99_{name}",
            statistics.fmean(values),
            samples=values,
            unit="s",
            baseline=statistics.fmean(others) or None,
            goal=report.ratio_at_most(LARGE_WAIT_RATIO_MAX) if large else None,
        )
    most = [it.wait_large_s.most for it in ours]
    yield report.figure("wait_most_large_gangs", max(most), samples=most, unit="s")
    preempted = [float(it.preemptions) for it in ours]
    yield report.figure("preemptions", statistics.fmean(preempted), samples=preempted, unit="jobs")


def share(
    name: str, values: list[float], others: list[float], goal: report.Goal | None = None
) -> report.Figure:
    """In percent; the baseline is fifo without backfill and preemption."""
    percents = [100 * value for value in values]
    baseline = 100 * statistics.fmean(others) or None
    return report.figure(
        name, statistics.fmean(percents), samples=percents, unit="%", baseline=baseline, goal=goal
    )


def main() -> int:
    parser = report.options((__doc__ or "").splitlines()[0], rounds=3)
    parser.add_argument("--jobs", type=int, help="12000; 1500 with one round")
    parser.add_argument("--load", type=float, default=1.3, help="what is asked for by what there is")
    parser.add_argument("--nodes", type=int, default=128, help="with 8 GPUs each")
    given = parser.parse_args()
    jobs = given.jobs or (12_000 if given.rounds > 1 else 1500)
    figures = measured(given.rounds, jobs=jobs, load=given.load, nodes=given.nodes)
    return report.conclude(figures, as_json=given.json)


if __name__ == "__main__":
    sys.exit(main())
