"""Placements per second and their latency: Genie, Slurm and Ray alternately on this machine.

    python benchmarks/peers/bench_peers.py [--json] [--rounds N] [--only genie slurm ray]
        [--ray-python FILE] [--ray-nodes N]

Every job requests one of 1,000 simulated GPUs and ends soon; none starts a process. In each round each system
is started, measured alone (quiet: one request at a time; busy: concurrent requests) and stopped. Systems that
are not installed are listed on standard error and skipped. The baseline of each figure of a peer is that of
Genie. README.md describes the installation and the limits of the comparison; goals are in
bench_placements.py.
"""

from __future__ import annotations

import asyncio
import signal
import statistics
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the other benchmarks

import bench_placements
import peer_sandbox
import ray_peer
import report
import slurm_peer
from bench_placements import PlacementSamples

from genie.processes.tasks import loop_factory

PEER_NAMES = ("genie", "slurm", "ray")
NO_NAMESPACES_MESSAGE = (
    "a peer runs in its own namespaces, and this user is not permitted to create them (unshare)"
)


def measure_genie(samples: PlacementSamples) -> None:
    """Measures Genie like bench_placements.py."""
    with report.use_temporary_state() as folder, ExitStack() as stack:
        controller = stack.enter_context(bench_placements.start_role("controller", folder))
        agents = stack.enter_context(bench_placements.start_role("agents", folder))
        parts = bench_placements.ProcessIds(controller, agents)
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            found = runner.run(bench_placements.measure(folder, rounds=1, parts=parts))
    samples.rates_per_s += found.rates_per_s
    samples.latencies_ms += found.latencies_ms
    samples.busy_ms += found.busy_ms


def measure_peer(name: str, samples: PlacementSamples, *more: str, python: str, workers: int) -> None:
    script = Path(__file__).with_name(f"{name}_peer.py")
    with report.use_temporary_state() as folder:
        command = peer_sandbox.sandbox_command(python, str(script), str(folder), *more)
        with peer_sandbox.open_sandbox(command, name=name, folder=folder) as sandbox:
            measure_in_sandbox(sandbox, samples, workers=workers)
    print(f"round: {name} {samples.rates_per_s[-1]:.0f}/s", file=sys.stderr)


def measure_in_sandbox(sandbox: peer_sandbox.Sandbox, samples: PlacementSamples, *, workers: int) -> None:
    """Uses the number of jobs, durations and pauses of bench_placements.py. The first job is not counted."""
    sandbox.request("quiet", 1, 0)
    quiet = sandbox.request("quiet", bench_placements.UNLOADED_JOBS, bench_placements.UNLOADED_GAP_S)
    samples.latencies_ms += [each.latency_ms for each in quiet.placements]
    from_s, until_s = bench_placements.WARM_UP_S, bench_placements.WARM_UP_S + bench_placements.LOAD_S
    counted = sandbox.request("busy", workers, until_s).placements_between(from_s, until_s)
    if not counted:
        raise ValueError("no job was placed")
    samples.rates_per_s.append(len(counted) / bench_placements.LOAD_S)
    samples.busy_ms += [each.latency_ms for each in counted]


def unavailable_reason(name: str, ray_python: str) -> str | None:
    if name == "genie":
        return None
    missing = slurm_peer.unavailable_reason() if name == "slurm" else ray_peer.unavailable_reason(ray_python)
    return missing or (None if peer_sandbox.namespaces_allowed() else NO_NAMESPACES_MESSAGE)


def summarize(samples: PlacementSamples) -> dict[str, tuple[float, str, Sequence[float]]]:
    quiet_ms, busy_ms = samples.latencies_ms, samples.busy_ms
    return {
        "rate": (statistics.median(samples.rates_per_s), "1/s", samples.rates_per_s),
        "quiet_p50": (statistics.median(quiet_ms), "ms", quiet_ms),
        "quiet_p99": (report.percentile(quiet_ms, 0.99), "ms", report.p99_samples(quiet_ms)),
        "busy_p50": (statistics.median(busy_ms), "ms", busy_ms),
        "busy_p99": (report.percentile(busy_ms, 0.99), "ms", report.p99_samples(busy_ms)),
    }


def make_figures(measured: dict[str, PlacementSamples]) -> list[report.Figure]:
    own = summarize(measured["genie"]) if "genie" in measured else {}
    return [
        report.make_figure(
            f"{name}_{metric}",
            value,
            unit=unit,
            samples=taken,
            baseline=own[metric][0] if own and name != "genie" else None,
        )
        for name, samples in measured.items()
        for metric, (value, unit, taken) in summarize(samples).items()
    ]


def main() -> int:
    parser = report.make_parser((__doc__ or "").splitlines()[0], rounds=3)
    parser.add_argument("--only", nargs="+", choices=PEER_NAMES, default=PEER_NAMES)
    parser.add_argument(
        "--ray-python", default=sys.executable, help="Python interpreter with Ray (default: this one)"
    )
    parser.add_argument("--ray-nodes", type=int, choices=(1, 2, 4, 8, 20, 40), default=ray_peer.NODE_COUNT)
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # cleans up
    measures: dict[str, Callable[[PlacementSamples], None]] = {
        "genie": measure_genie,
        "slurm": lambda samples: measure_peer(
            "slurm", samples, python=sys.executable, workers=slurm_peer.WORKER_COUNT
        ),
        "ray": lambda samples: measure_peer(
            "ray", samples, str(given.ray_nodes), python=given.ray_python, workers=ray_peer.WORKER_COUNT
        ),
    }
    measured: dict[str, PlacementSamples] = {}
    for name in (each for each in PEER_NAMES if each in given.only):
        reason = unavailable_reason(name, given.ray_python)
        if reason is None:
            measured[name] = PlacementSamples()
        else:
            print(f"{name}: skipped: {reason}", file=sys.stderr)
    if not measured:
        raise SystemExit("nothing to measure: no selected system is available")
    for _ in range(given.rounds):
        for name, samples in measured.items():
            measures[name](samples)
    return report.print_figures(make_figures(measured), as_json=given.json)


if __name__ == "__main__":
    sys.exit(main())
