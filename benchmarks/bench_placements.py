"""Placements per second of a controller, and the latency of a placement without other load.

    python benchmarks/bench_placements.py [--json] [--rounds N] [--tls on|off]

Three processes on loopback: a controller on SQLite in a fresh directory, 125 simulated nodes with 1,000 GPUs
that confirm launches and report exits (placement_roles.py), and this client. Each job requests one GPU; the
client counts it when the reply contains the placement, which the controller sends only after it is durable.
Under load REQUESTS_IN_FLIGHT requests are outstanding, otherwise one; both alternate round by round. Figures
without a goal: the CPU time of each process per placement; --profile lists it by function. Does not measure
the quality of placements.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import report

from genie import config
from genie.model.job import JobSpec, JobState, Resources
from genie.model.messages import GetJob, SubmitJob
from genie.processes.tasks import loop_factory
from genie.runtime.credentials import connect_authenticated, find_access
from genie.runtime.network import TcpNetwork
from genie.runtime.rpc import Peer

RATE_GOAL = report.Goal("value", ">=", 3000.0)
LATENCY_P50_GOAL = report.value_at_most(5.0)
REQUESTS_IN_FLIGHT = 256
LOAD_S = 4.0
WARM_UP_S = 1.0
UNLOADED_JOBS = 200
UNLOADED_GAP_S = 0.005
CALL_TIMEOUT_S = 30.0
ROLES_SCRIPT = Path(__file__).with_name("placement_roles.py")
_CLOCK_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass
class PlacementSamples:
    rates_per_s: list[float] = field(default_factory=list)
    busy_ms: list[float] = field(default_factory=list)
    latencies_ms: list[float] = field(default_factory=list)
    cpu_us: dict[str, list[float]] = field(default_factory=dict)
    """CPU time per placement, by process or thread."""


class PlacementClient:
    """Submits jobs and measures the time until their placement."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self._job_numbers = itertools.count()
        self._spec = JobSpec(name="bench", command=("true",), resources=Resources(gpus=1))

    async def measure_placement_ms(self) -> float:
        began = time.perf_counter()
        request = SubmitJob(spec=self._spec, request_id=f"bench-{next(self._job_numbers)}")
        job = (await self._peer.call(request, timeout_s=CALL_TIMEOUT_S)).job
        while job.state is JobState.QUEUED:
            request = GetJob(job_id=job.job_id, while_state=JobState.QUEUED, wait_s=CALL_TIMEOUT_S / 2)
            job = (await self._peer.call(request, timeout_s=CALL_TIMEOUT_S)).job
        if job.placement is None:
            raise SystemExit(f"{job.job_id} is {job.state}: {job.reason}")
        return (time.perf_counter() - began) * 1000


async def measure_under_load(client: PlacementClient, samples: PlacementSamples, parts: ProcessIds) -> None:
    """Keeps REQUESTS_IN_FLIGHT requests outstanding for LOAD_S, after a warm-up that is not counted."""
    began_s = time.perf_counter()
    from_s, until_s = began_s + WARM_UP_S, began_s + WARM_UP_S + LOAD_S
    placed_ms: list[float] = []
    cpu_s: dict[str, float] = {}

    async def work() -> None:
        while (now_s := time.perf_counter()) < until_s:
            if now_s >= from_s and not cpu_s:
                cpu_s.update(parts.cpu_s())
            latency_ms = await client.measure_placement_ms()
            if from_s <= time.perf_counter() < until_s:
                placed_ms.append(latency_ms)

    async with asyncio.TaskGroup() as group:
        for _ in range(REQUESTS_IN_FLIGHT):
            group.create_task(work())
    if not placed_ms:
        raise SystemExit("no job was placed")
    samples.rates_per_s.append(len(placed_ms) / LOAD_S)
    samples.busy_ms.extend(placed_ms)
    for part, now_s in parts.cpu_s().items():
        samples.cpu_us.setdefault(part, []).append((now_s - cpu_s[part]) / len(placed_ms) * 1e6)


async def measure_unloaded(client: PlacementClient, samples: PlacementSamples) -> None:
    for _ in range(UNLOADED_JOBS):
        samples.latencies_ms.append(await client.measure_placement_ms())
        await asyncio.sleep(UNLOADED_GAP_S)


@dataclass(frozen=True)
class ProcessIds:
    """Process IDs of controller and agents."""

    controller: int
    agents: int

    def cpu_s(self) -> dict[str, float]:
        """CPU time so far. The main thread of the controller runs its event loop, the other one its store."""
        controller = f"/proc/{self.controller}"
        loop_s = _cpu_seconds(f"{controller}/task/{self.controller}/stat")
        return {
            "controller_loop": loop_s,
            "controller_store": _cpu_seconds(f"{controller}/stat") - loop_s,
            "agents": _cpu_seconds(f"/proc/{self.agents}/stat"),
            "client": time.process_time(),
        }


def _cpu_seconds(path: str) -> float:
    """User and system time."""
    fields = Path(path).read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _CLOCK_TICKS_PER_S


@contextmanager
def start_role(name: str, folder: Path, *more: str) -> Iterator[int]:
    """Starts a role and yields its process ID once it is ready."""
    command = [sys.executable, str(ROLES_SCRIPT), name, "--state-dir", str(folder), *more]
    with (folder / f"{name}.log").open("wb") as output:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=output)
    assert process.stdout is not None
    try:
        if process.stdout.readline().strip() != b"ready":
            raise SystemExit(f"the {name} did not start:\n{(folder / f'{name}.log').read_text()[-2000:]}")
        yield process.pid
    finally:
        process.terminate()
        process.wait(timeout=60)


async def measure(folder: Path, *, rounds: int, parts: ProcessIds) -> PlacementSamples:
    settings = config.load({"paths.state_dir": str(folder)})
    network, samples = TcpNetwork(), PlacementSamples()
    access = await find_access(settings.cluster, state_dir=folder, network=network, timeout_s=CALL_TIMEOUT_S)
    async with connect_authenticated(network, access, timeout_s=CALL_TIMEOUT_S, program="bench") as (peer, _):
        client = PlacementClient(peer)
        await client.measure_placement_ms()
        for _ in range(rounds):
            await measure_unloaded(client, samples)
            await measure_under_load(client, samples, parts)
            print(f"round: {samples.rates_per_s[-1]:.0f}/s", file=sys.stderr)
    return samples


def make_figures(samples: PlacementSamples) -> list[report.Figure]:
    quiet_ms, busy_ms = samples.latencies_ms, samples.busy_ms
    return [
        report.make_figure(
            "placements_rate",
            statistics.median(samples.rates_per_s),
            unit="1/s",
            samples=samples.rates_per_s,
            goal=RATE_GOAL,
        ),
        report.make_figure(
            "placement_quiet_p50", statistics.median(quiet_ms), samples=quiet_ms, goal=LATENCY_P50_GOAL
        ),
        report.make_figure(
            "placement_quiet_p99", report.percentile(quiet_ms, 0.99), samples=report.p99_samples(quiet_ms)
        ),
        report.make_figure("placement_busy_p50", statistics.median(busy_ms), samples=busy_ms),
        report.make_figure(
            "placement_busy_p99", report.percentile(busy_ms, 0.99), samples=report.p99_samples(busy_ms)
        ),
        *(
            report.make_figure(f"cpu_{part}", statistics.median(taken_us), unit="us", samples=taken_us)
            for part, taken_us in samples.cpu_us.items()
        ),
    ]


def main() -> int:
    parser = report.make_parser((__doc__ or "").splitlines()[0], rounds=5)
    parser.add_argument("--tls", choices=("on", "off"), default="on")
    parser.add_argument(
        "--profile", type=Path, help="write a CPU profile of each role to this folder; slows them down"
    )
    given = parser.parse_args()
    with report.use_temporary_state() as folder, ExitStack() as stack:
        profiles: dict[str, list[str]] = {"controller": [], "agents": []}
        if given.profile:
            profiles = {name: ["--profile", str(given.profile / f"{name}.txt")] for name in profiles}
        more = ["--tls", given.tls, *profiles["controller"]]
        controller = stack.enter_context(start_role("controller", folder, *more))
        agents = stack.enter_context(start_role("agents", folder, *profiles["agents"]))
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            samples = runner.run(measure(folder, rounds=given.rounds, parts=ProcessIds(controller, agents)))
    return report.print_figures(make_figures(samples), as_json=given.json)


if __name__ == "__main__":
    sys.exit(main())
