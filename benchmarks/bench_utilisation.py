"""GPU utilisation while jobs are pending, and the pending time of large gangs.

    python benchmarks/bench_utilisation.py [--json] [--rounds N] [--jobs N] [--nodes N]

Runs a synthetic workload (mixed durations, gangs of up to 128 GPUs, GPU fractions, three priorities, eight
tenants) through the real scheduler on simulated time, with two loads: jobs request 1.3 times and twice the
available GPU time. A round is a seed. The goal covers the time in which jobs are pending and still arrive,
while the queue is mixed; the whole time has its own figure. The baseline is strict FIFO without backfill and
preemption. With --rounds 1 the workload is too small for conclusions. For real workloads use
`genie sim run --trace`.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator
from typing import Any

import report

UTILISATION_MIN = 97.0
REQUESTED_LOADS = (1.3, 2.0)


def simulate_rounds(rounds: int, *, jobs: int, load: float, nodes: int, **rules: Any) -> list[Any]:
    from genie.scheduler.rules import Rules
    from genie.sim.events import SimulationParameters, simulate
    from genie.sim.metrics import summarise_simulation
    from genie.sim.workloads.synthetic import SyntheticJobMix, synthetic_jobs
    from genie.sim.workloads.workload import uniform_nodes

    machines = uniform_nodes(nodes)
    found = []
    for seed in range(rounds):
        work = synthetic_jobs(SyntheticJobMix(job_count=jobs, load=load), machines, seed=seed)
        found.append(
            summarise_simulation(simulate(machines, work, SimulationParameters(Rules(**rules), seed=seed)))
        )
    return found


def measure(rounds: int, *, jobs: int, load: float, nodes: int) -> Iterator[report.Figure]:
    from genie.scheduler.order import Fifo

    ours = simulate_rounds(rounds, jobs=jobs, load=load, nodes=nodes)
    strict = simulate_rounds(
        rounds,
        jobs=jobs,
        load=load,
        nodes=nodes,
        order=Fifo(),
        allows_backfill=False,
        allows_preemption=False,
    )
    yield percent_figure(
        f"in_use_while_arriving_{load:g}",
        [it.utilisation_until_last_arrival for it in ours],
        [it.utilisation_until_last_arrival for it in strict],
        report.value_at_least(UTILISATION_MIN),
    )
    yield percent_figure(
        f"in_use_while_waiting_{load:g}",
        [it.utilisation_while_pending for it in ours],
        [it.utilisation_while_pending for it in strict],
    )
    fragmentation = [[it.fragmentation for it in each] for each in (ours, strict)]
    yield percent_figure(f"free_but_of_no_use_{load:g}", *fragmentation)
    for name, of in (("large_gangs", "large_gang_wait_s"), ("all", "wait_s")):
        values, others = ([getattr(it, of).p99 for it in each] for each in (ours, strict))
        baseline = statistics.fmean(others) or None
        yield report.make_figure(
            f"wait_p99_{name}_{load:g}", statistics.fmean(values), samples=values, unit="s", baseline=baseline
        )
    most = [it.large_gang_wait_s.maximum for it in ours]
    yield report.make_figure(f"wait_most_large_gangs_{load:g}", max(most), samples=most, unit="s")
    preempted = [float(it.preemptions) for it in ours]
    yield report.make_figure(
        f"preemptions_{load:g}", statistics.fmean(preempted), samples=preempted, unit="jobs"
    )


def percent_figure(
    name: str, values: list[float], others: list[float], goal: report.Goal | None = None
) -> report.Figure:
    """Figure in percent; the baseline is strict FIFO."""
    percents = [100 * value for value in values]
    baseline = 100 * statistics.fmean(others) or None
    return report.make_figure(
        name, statistics.fmean(percents), samples=percents, unit="%", baseline=baseline, goal=goal
    )


def main() -> int:
    parser = report.make_parser((__doc__ or "").splitlines()[0], rounds=2)
    parser.add_argument("--jobs", type=int, help="number of jobs (default: 6000, or 1200 with --rounds 1)")
    parser.add_argument("--nodes", type=int, default=128, help="number of nodes with 8 GPUs (default: 128)")
    given = parser.parse_args()
    jobs = given.jobs or (6000 if given.rounds > 1 else 1200)
    figures = [
        each
        for load in REQUESTED_LOADS
        for each in measure(given.rounds, jobs=jobs, load=load, nodes=given.nodes)
    ]
    return report.print_figures(figures, as_json=given.json)


if __name__ == "__main__":
    sys.exit(main())
