"""What 125 nodes with 1,000 GPUs cost a controller, the cost per event with up to 2,000 nodes, and failover.

    python benchmarks/bench_control.py [--json] [--nodes 125] [--seconds 600] [--only PART] [--quick]

heartbeats: a controller on SQLite in its own process, and the agents of genie/agent in two others, over
loopback with mutual TLS and a heartbeat per second (control_roles.py; GPUs and job processes are simulated).
The controller's CPU time divided by the elapsed time is its share of one core. A node is lost when the
controller logs that it is disconnected.

scale: the same controller in the simulator, with 250, 1,000 and 2,000 nodes of 8 GPUs in turn, each with its
own event loop in this process. CPU time of the whole process per heartbeat and per submitted job; it includes
the simulated network and nodes, whose cost per message does not depend on the number of nodes.

failover: two controllers on three etcd members, and as many nodes. The leading controller is killed,
alone and together with the leader of etcd; the time until a submission is accepted, and until all nodes are
healthy again. The baseline is the time in which etcd alone accepts a write after the loss of its leader.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import report
from control_roles import (
    AgentsReport,
    ControllerProcess,
    agents_process,
    controller_process,
    wait_for_nodes,
)
from failover import FailoverRun, measure_failover
from process_readings import read_cpu_s, read_rss_bytes
from simulated_nodes import SimulatedNodes

from genie.model.node import NodeStatus
from genie.processes.tasks import reduce_garbage_collection

CPU_SHARE = report.value_at_most(0.25)
NO_LOSSES = report.value_at_most(0.0)
FLAT = report.ratio_at_most(1.25)
FAILOVER = report.ratio_at_most(2.5)
FAILOVER_WITH_ETCD = report.value_at_most(8000.0)
GPUS = 8
SETTLE_S = 5.0
SAMPLE_S = 5.0
SIZES = (250, 1000, 2000)
QUICK_SIZES = (25, 100, 200)
PARTS = ("heartbeats", "scale", "failover")


# --- heartbeats over loopback -------------------------------------------------------------------


@dataclass
class HeartbeatRun:
    """What the controller used while the nodes sent heartbeats."""

    shares: list[float] = field(default_factory=list)
    """Of one core, by sample."""
    cpu_s: float = 0.0
    elapsed_s: float = 0.0
    node_bytes: float = 0.0
    suspects: int = 0
    losses: int = 0
    latencies_ms: list[float] = field(default_factory=list)


def measure_heartbeats(folder: Path, given: argparse.Namespace) -> HeartbeatRun:
    run = HeartbeatRun()
    with ExitStack() as stack:
        controller = stack.enter_context(controller_process(folder, profile=given.profile))
        empty_bytes = read_rss_bytes(controller.pid)
        split = [given.nodes // 2, given.nodes - given.nodes // 2]
        agents = [
            stack.enter_context(agents_process(folder, nodes=count, gpus=GPUS, first=first))
            for first, count in zip((0, split[0]), split, strict=True)
            if count
        ]
        wait_for_nodes(folder, given.nodes)
        time.sleep(SETTLE_S)
        for each in agents:
            each.take_report()
        losses = controller.count_logged(NodeStatus.DISCONNECTED)
        suspects = controller.count_logged(NodeStatus.SUSPECT)
        _sample_cpu(run, controller, seconds=given.seconds)
        reports: list[AgentsReport] = [each.take_report() for each in agents]
        run.latencies_ms = [latency for each in reports for latency in each.latencies_ms]
        run.losses = controller.count_logged(NodeStatus.DISCONNECTED) - losses
        run.suspects = controller.count_logged(NodeStatus.SUSPECT) - suspects
        run.node_bytes = (read_rss_bytes(controller.pid) - empty_bytes) / given.nodes
    return run


def _sample_cpu(run: HeartbeatRun, controller: ControllerProcess, *, seconds: float) -> None:
    began_s, began_cpu_s = time.monotonic(), read_cpu_s(controller.pid)
    at_s, cpu_s = began_s, began_cpu_s
    while (left_s := began_s + seconds - time.monotonic()) > 0:
        time.sleep(min(SAMPLE_S, left_s))
        controller.check_running()
        now_s, now_cpu_s = time.monotonic(), read_cpu_s(controller.pid)
        run.shares.append((now_cpu_s - cpu_s) / (now_s - at_s))
        at_s, cpu_s = now_s, now_cpu_s
    run.cpu_s, run.elapsed_s = cpu_s - began_cpu_s, at_s - began_s


def heartbeat_figures(run: HeartbeatRun) -> list[report.Figure]:
    figure, latencies_ms = report.make_figure, run.latencies_ms
    if not latencies_ms:
        raise SystemExit("the agents have sent no heartbeat")
    return [
        figure(
            "controller_cpu_share",
            run.cpu_s / run.elapsed_s,
            unit="core",
            samples=run.shares,
            goal=CPU_SHARE,
        ),
        figure("node_losses", run.losses, unit="", samples=[], goal=NO_LOSSES),
        figure("node_suspicions", run.suspects, unit="", samples=[]),
        figure("heartbeats_rate", len(latencies_ms) / run.elapsed_s, unit="1/s", samples=[]),
        figure("heartbeat_cpu", run.cpu_s / len(latencies_ms) * 1e6, unit="us", samples=[]),
        figure("heartbeat_p50", statistics.median(latencies_ms), samples=latencies_ms),
        figure(
            "heartbeat_p99", report.percentile(latencies_ms, 0.99), samples=report.p99_samples(latencies_ms)
        ),
        figure("node_memory", run.node_bytes, unit="B", samples=[]),
    ]


# --- cost per event in the simulator ------------------------------------------------------------


def measure_scale(given: argparse.Namespace) -> list[report.Figure]:
    sizes = QUICK_SIZES if given.quick else SIZES
    heartbeats_us: dict[int, list[float]] = {size: [] for size in sizes}
    submits_us: dict[int, list[float]] = {size: [] for size in sizes}
    # Enough heartbeats that each cluster has the same number of them, however many nodes it has.
    heartbeats, jobs = sizes[-1] * 2, sizes[0] * 6
    with ExitStack() as stack:
        clusters = [stack.enter_context(SimulatedNodes.started(size, gpus=GPUS)) for size in sizes]
        reduce_garbage_collection()
        for number in range(given.rounds + 1):
            for cluster in clusters:
                heartbeat_us = cluster.measure_heartbeats_us(heartbeats)
                submit_us = cluster.measure_submits_us(jobs, heartbeat_us=heartbeat_us)
                if number > 0:  # the first round fills caches
                    heartbeats_us[cluster.nodes].append(heartbeat_us)
                    submits_us[cluster.nodes].append(submit_us)
    return [*scale_figures("heartbeat", heartbeats_us), *scale_figures("submit", submits_us)]


def scale_figures(name: str, costs_us: dict[int, list[float]]) -> list[report.Figure]:
    smallest, *_, largest = costs_us
    base_us = statistics.median(costs_us[smallest])
    return [
        report.make_figure(
            f"sim_{name}_{size}_nodes",
            statistics.median(taken_us),
            unit="us",
            samples=taken_us,
            baseline=base_us,
            goal=FLAT if size == largest else None,
        )
        for size, taken_us in costs_us.items()
    ]


# --- failover -----------------------------------------------------------------------------------


def failover_figures(run: FailoverRun, *, nodes: int) -> list[report.Figure]:
    """A new leader of etcd first renews every lease, so the second failover begins after its election."""
    election_ms = statistics.median(run.election_ms)

    def compared_figure(name: str, samples_ms: list[float], goal: report.Goal | None) -> report.Figure:
        median_ms = statistics.median(samples_ms)
        return report.make_figure(name, median_ms, samples=samples_ms, baseline=election_ms, goal=goal)

    return [
        report.make_figure("failover_nodes", nodes, unit="", samples=[]),
        report.make_figure("etcd_election", election_ms, samples=run.election_ms),
        compared_figure("failover", run.controller_ms, FAILOVER),
        compared_figure("failover_recovery", run.controller_recovery_ms, None),
        compared_figure("failover_with_etcd", run.both_ms, FAILOVER_WITH_ETCD),
        compared_figure("failover_with_etcd_recovery", run.both_recovery_ms, None),
    ]


def main() -> int:
    parser = report.make_parser((__doc__ or "").splitlines()[0], rounds=7)
    parser.add_argument("--nodes", type=report.parse_positive_int, default=125, help="nodes (default: 125)")
    parser.add_argument(
        "--seconds",
        type=report.parse_positive_int,
        help="duration of the heartbeats (default: 600; quick: 10)",
    )
    parser.add_argument("--only", choices=PARTS, help="run one part (default: all)")
    parser.add_argument("--quick", action="store_true", help="fewer simulated nodes, shorter")
    parser.add_argument("--profile", type=Path, help="write a cProfile of the controller; slows it down")
    given = parser.parse_args()
    given.seconds = given.seconds or (10 if given.quick else 600)
    figures: list[report.Figure] = []
    with report.use_temporary_state() as folder:
        if given.only in (None, "heartbeats"):
            figures += heartbeat_figures(measure_heartbeats(folder, given))
        if given.only in (None, "scale"):
            figures += measure_scale(given)
        if given.only in (None, "failover"):
            if shutil.which("etcd") is None:
                print("skipping failover: etcd is not on PATH (Debian: etcd-server)", file=sys.stderr)
            else:
                run = measure_failover(folder, nodes=given.nodes, gpus=GPUS, rounds=given.rounds)
                figures += failover_figures(run, nodes=given.nodes)
    return report.print_figures(figures, as_json=given.json)


if __name__ == "__main__":
    sys.exit(main())
