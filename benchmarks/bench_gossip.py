"""Time until gossip detects that a member was killed, against heartbeats, and the CPU time of a member.

    python benchmarks/bench_gossip.py [--json] [--rounds 5] [--members 5 10 20]

Each member is a process with the real gossip on loopback; one member observes the others. In each round one
of them is killed with SIGKILL. Without gossip, a node is suspect 3 s after its last heartbeat, which is up to
1 s before the failure. With gossip it is suspect once gossip reports it, but at least 1.5 s after its last
heartbeat (genie/controller/nodes/membership.py); the phase of the heartbeats is drawn with a fixed seed.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import report

from genie.config import AgentConfig, ControllerConfig
from genie.controller.nodes.membership import GOSSIP_SUSPECT_SHARE
from genie.model.member import MemberRole, MemberState
from genie.processes.clock import SystemClock
from genie.runtime.gossip.kinship_gossip import KinshipGossip
from genie.runtime.gossip.protocol import Gossip, GossipIdentity

MEMBER_SCRIPT = Path(__file__).with_name("gossip_member.py")
HEARTBEAT_S, SUSPECT_S = AgentConfig().heartbeat_s, ControllerConfig().node_suspect_s
IDLE_S = 10.0
SETTLE_TIMEOUT_S = 60.0
CPU_MS_PER_S_MAX = 5.0


@dataclass
class Detections:
    """Seconds from SIGKILL until the observer reports it."""

    suspect_s: list[float] = field(default_factory=list)
    dead_s: list[float] = field(default_factory=list)


@asynccontextmanager
async def run_members(count: int) -> AsyncIterator[tuple[Gossip, dict[str, subprocess.Popen[bytes]]]]:
    """The observer, and the processes of the other members by name."""
    key = os.urandom(32)
    identity = GossipIdentity(name="observer", role=MemberRole.SERVER, release="1.0")
    observer = KinshipGossip(identity, host="127.0.0.1", port=0, clock=SystemClock())
    await observer.start([key])
    processes: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for number in range(count - 1):
            processes[f"n{number}"] = start_member(f"n{number}", observer.address, key)
        await wait_until(observer, lambda: count_alive(observer) == count)
        yield observer, processes
    finally:
        for process in processes.values():
            process.kill()
            process.wait()
        await observer.stop(leave=False)


def start_member(name: str, seed: str, key: bytes) -> subprocess.Popen[bytes]:
    command = [sys.executable, str(MEMBER_SCRIPT), name, seed, key.hex()]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


async def wait_until(gossip: Gossip, condition: Callable[[], bool]) -> None:
    changed = asyncio.Event()
    gossip.add_listener(changed.set)
    async with asyncio.timeout(SETTLE_TIMEOUT_S):
        while not condition():
            await changed.wait()
            changed.clear()


def count_alive(gossip: Gossip) -> int:
    return sum(member.state is MemberState.ALIVE for member in gossip.members())


def get_state(gossip: Gossip, name: str) -> MemberState:
    return next(member.state for member in gossip.members() if member.name == name)


async def measure_cpu_ms_per_s(processes: dict[str, subprocess.Popen[bytes]]) -> float:
    """Mean CPU time of an idle member."""

    def read_cpu_s() -> float:
        return sum(sum(psutil.Process(process.pid).cpu_times()[:2]) for process in processes.values())

    before_s, start_s = read_cpu_s(), time.monotonic()
    await asyncio.sleep(IDLE_S)
    return 1000 * (read_cpu_s() - before_s) / len(processes) / (time.monotonic() - start_s)


async def measure_detections(count: int, rounds: int) -> tuple[Detections, float]:
    found = Detections()
    async with run_members(count) as (observer, processes):
        cpu_ms_per_s = await measure_cpu_ms_per_s(processes)
        for name in list(processes)[:rounds]:
            start_s = time.monotonic()
            processes[name].send_signal(signal.SIGKILL)
            await wait_until(observer, lambda name=name: get_state(observer, name) is not MemberState.ALIVE)
            found.suspect_s.append(time.monotonic() - start_s)
            await wait_until(observer, lambda name=name: get_state(observer, name) is MemberState.DEAD)
            found.dead_s.append(time.monotonic() - start_s)
    return found, cpu_ms_per_s


def make_figures(count: int, found: Detections, cpu_ms_per_s: float) -> list[report.Figure]:
    rng = random.Random(count)
    phases_s = [rng.uniform(0, HEARTBEAT_S) for _ in found.suspect_s]
    heartbeats_s = statistics.median(SUSPECT_S - phase_s for phase_s in phases_s)
    nodes_s = [
        max(gossip_s, GOSSIP_SUSPECT_SHARE * SUSPECT_S - phase_s)
        for gossip_s, phase_s in zip(found.suspect_s, phases_s, strict=True)
    ]
    suspect_s, dead_s = found.suspect_s, found.dead_s
    return [
        report.make_figure(
            f"member suspect, {count} members", statistics.median(suspect_s), samples=suspect_s, unit="s"
        ),
        report.make_figure(
            f"member dead, {count} members", statistics.median(dead_s), samples=dead_s, unit="s"
        ),
        report.make_figure(
            f"node suspect, {count} members, against heartbeats alone",
            statistics.median(nodes_s),
            samples=nodes_s,
            baseline=heartbeats_s,
            unit="s",
            goal=report.ratio_at_most(1.0),
        ),
        report.make_figure(
            f"CPU of an idle member, {count} members",
            cpu_ms_per_s,
            samples=(),
            unit="ms/s",
            goal=report.value_at_most(CPU_MS_PER_S_MAX),
        ),
    ]


async def measure(sizes: list[int], rounds: int) -> list[report.Figure]:
    figures: list[report.Figure] = []
    for count in sizes:
        found, cpu_ms_per_s = await measure_detections(count, min(rounds, count - 2))
        figures += make_figures(count, found, cpu_ms_per_s)
    return figures


def main() -> int:
    parser = report.make_parser((__doc__ or "").splitlines()[0], rounds=5)
    parser.add_argument(
        "--members",
        type=report.parse_positive_int,
        nargs="+",
        default=[5, 10, 20],
        help="numbers of members, at least 3 (default: 5 10 20)",
    )
    given = parser.parse_args()
    figures = asyncio.run(measure([max(size, 3) for size in given.members], given.rounds))
    return report.print_figures(figures, as_json=given.json)


if __name__ == "__main__":
    sys.exit(main())
