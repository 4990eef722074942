"""Placements a second and their latency: Genie, Slurm and Ray in turns, on this machine, in one run.

    python benchmarks/peers/bench_peers.py [--json] [--rounds N] [--only genie slurm ray]
        [--ray-python FILE] [--ray-nodes N]

Every job asks for one of 1,000 simulated GPUs and is over soon; none starts a process. In each round each of
them is started anew, measured alone (quiet: one job at a time; busy: many at a time) and ended. Those that
are not installed are named on standard error and left out. Lines of the peers have Genie's figure as their
baseline. README.md says how to install them, and what can and what cannot be compared. Not for: goals
(bench_placements.py has them).
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
import peer_room
import ray_peer
import report
import slurm_peer
from bench_placements import Samples

from genie.runtime.tasks import loop_factory

NAMES = ("genie", "slurm", "ray")
NO_ROOM = "a peer runs in namespaces of its own, and `unshare` may not make them here for this user"


def measure_genie(samples: Samples) -> None:
    """As bench_placements.py does."""
    with report.own_place() as folder, ExitStack() as stack:
        controller = stack.enter_context(bench_placements.role("controller", folder))
        agents = stack.enter_context(bench_placements.role("agents", folder))
        parts = bench_placements.Parts(controller, agents)
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            found = runner.run(bench_placements.measure(folder, rounds=1, parts=parts))
    samples.rates_per_s += found.rates_per_s
    samples.latencies_ms += found.latencies_ms
    samples.busy_ms += found.busy_ms


def measure_peer(name: str, samples: Samples, *more: str, python: str, workers: int) -> None:
    script = Path(__file__).with_name(f"{name}_peer.py")
    with report.own_place() as folder:
        command = peer_room.room_command(python, str(script), str(folder), *more)
        with peer_room.open_room(command, name=name, folder=folder) as room:
            take(room, samples, workers=workers)
    print(f"round: {name} {samples.rates_per_s[-1]:.0f}/s", file=sys.stderr)


def take(room: peer_room.Room, samples: Samples, *, workers: int) -> None:
    """What bench_placements.py asks of Genie: the same numbers, times and pauses. The first job is not
    counted."""
    room.ask("quiet", 1, 0)
    quiet = room.ask("quiet", bench_placements.QUIET_JOBS, bench_placements.QUIET_GAP_S)
    samples.latencies_ms += [each.taken_ms for each in quiet.placements]
    from_s, until_s = bench_placements.WARM_UP_S, bench_placements.WARM_UP_S + bench_placements.LOAD_S
    counted = room.ask("busy", workers, until_s).within(from_s, until_s)
    if not counted:
        raise ValueError("nothing was placed")
    samples.rates_per_s.append(len(counted) / bench_placements.LOAD_S)
    samples.busy_ms += [each.taken_ms for each in counted]


def why_not(name: str, ray_python: str) -> str | None:
    if name == "genie":
        return None
    absent = slurm_peer.missing() if name == "slurm" else ray_peer.missing(ray_python)
    return absent or (None if peer_room.rooms_allowed() else NO_ROOM)


def values(samples: Samples) -> dict[str, tuple[float, str, Sequence[float]]]:
    quiet_ms, busy_ms = samples.latencies_ms, samples.busy_ms
    return {
        "rate": (statistics.median(samples.rates_per_s), "1/s", samples.rates_per_s),
        "quiet_p50": (statistics.median(quiet_ms), "ms", quiet_ms),
        "quiet_p99": (report.percentile(quiet_ms, 0.99), "ms", report.p99s(quiet_ms)),
        "busy_p50": (statistics.median(busy_ms), "ms", busy_ms),
        "busy_p99": (report.percentile(busy_ms, 0.99), "ms", report.p99s(busy_ms)),
    }


def figures(measured: dict[str, Samples]) -> list[report.Figure]:
    own = values(measured["genie"]) if "genie" in measured else {}
    return [
        report.figure(
            f"{name}_{what}",
            value,
            unit=unit,
            samples=taken,
            baseline=own[what][0] if own and name != "genie" else None,
        )
        for name, samples in measured.items()
        for what, (value, unit, taken) in values(samples).items()
    ]


def main() -> int:
    parser = report.options((__doc__ or "").splitlines()[0], rounds=3)
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--ray-python", default=sys.executable, help="an interpreter that has Ray")
    parser.add_argument("--ray-nodes", type=int, choices=(1, 2, 4, 8, 20, 40), default=ray_peer.NODES)
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that nothing is left behind
    measures: dict[str, Callable[[Samples], None]] = {
        "genie": measure_genie,
        "slurm": lambda samples: measure_peer(
            "slurm", samples, python=sys.executable, workers=slurm_peer.WORKERS
        ),
        "ray": lambda samples: measure_peer(
            "ray", samples, str(given.ray_nodes), python=given.ray_python, workers=ray_peer.WORKERS
        ),
    }
    measured: dict[str, Samples] = {}
    for name in (each for each in NAMES if each in given.only):
        reason = why_not(name, given.ray_python)
        if reason is None:
            measured[name] = Samples()
        else:
            print(f"{name} is not measured: {reason}", file=sys.stderr)
    if not measured:
        raise SystemExit("there is nothing to measure")
    for _ in range(given.rounds):
        for name, samples in measured.items():
            measures[name](samples)
    return report.conclude(figures(measured), as_json=given.json)


if __name__ == "__main__":
    sys.exit(main())
