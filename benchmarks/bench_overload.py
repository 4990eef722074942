"""A controller that is offered twice the requests it can handle: what it refuses, and how it recovers.

    python benchmarks/bench_overload.py [--json] [--seconds 60] [--nodes 125] [--quick]

A controller in its own process, 125 nodes with 1,000 GPUs that end each job at their next tick, and clients
of several tenants, which submit jobs and list jobs (nine to one). First each client waits for its replies:
the rate is the capacity. Then the clients together send requests at twice that rate, without regard to the
replies. Then they wait for their replies again.

Under overload memory, requests in flight and pending jobs must stay bounded, every refusal must say when to
retry, and no node may be lost. Afterwards the rate of one second must reach RECOVERED of the capacity within
five seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import statistics
import sys
import time
from collections import Counter
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import report
from control_roles import AgentsProcess, ControllerProcess, agents_process, controller_process, wait_for_nodes
from process_readings import read_rss_bytes

from genie import config
from genie.cluster.client import ClusterClient, open_client
from genie.errors import GenieError, OverloadedError, QueueFullError
from genie.model.job import JobSpec, JobState, Resources
from genie.model.messages import ListJobs, SubmitJob
from genie.model.node import NodeStatus
from genie.model.tenant import TokenKind
from genie.processes.tasks import loop_factory
from genie.runtime.credentials import connect_authenticated, find_access
from genie.runtime.network import TcpNetwork
from genie.runtime.rpc import IN_FLIGHT_MAX, Peer

TENANTS = 8
WORKERS = 16
"""Requests in flight of each client while the capacity is measured."""
OVERLOAD = 2.0
LIST_EVERY = 10
LIST_LIMIT = 100
STEP_S = 0.01
CALL_S = 60.0
CAPACITY_S = 10.0
RECOVERY_S = 10.0
RECOVERED = 0.8
MIB = 1024**2
SETTINGS = {"GENIE_CONTROLLER_JOBS_KEPT": "1000"}

NONE = report.value_at_most(0.0)
GROWTH = report.value_at_most(128.0)
IN_FLIGHT = report.value_at_most(2.0 * IN_FLIGHT_MAX)
"""Those that the controller handles, and as many that are on their way."""
PENDING = report.value_at_most(10_000.0)
RECOVERY = report.value_at_most(5.0)


@dataclass
class Outcomes:
    """Of the requests of all clients."""

    done_s: list[float] = field(default_factory=list)
    """When each was answered, except refusals."""
    offered: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    """By error code."""
    without_retry_time: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    in_flight_max: int = 0

    def rates(self, began_s: float, seconds: float) -> list[float]:
        """Answers in each whole second."""
        counts = Counter(int(at_s - began_s) for at_s in self.done_s)
        return [float(counts[second]) for second in range(int(seconds))]


class Client:
    """One tenant with one connection."""

    def __init__(self, peer: Peer, name: str) -> None:
        self._peer = peer
        self._name = name
        self._numbers = itertools.count()
        self._spec = JobSpec(name="bench", command=("true",), resources=Resources(gpus=1))
        self._in_flight = 0

    async def work(self, outcomes: Outcomes, *, until_s: float) -> None:
        """Sends one request after another until `until_s`."""
        while time.monotonic() < until_s:
            await self._send(outcomes)

    async def flood(self, outcomes: Outcomes, *, rate: float, until_s: float) -> None:
        """Sends requests at this rate until `until_s`, whatever the replies are; then waits for them."""
        async with asyncio.TaskGroup() as group:
            due, at_s = 0.0, time.monotonic()
            while (now_s := time.monotonic()) < until_s:
                due, at_s = due + rate * (now_s - at_s), now_s
                while due >= 1:
                    due -= 1
                    group.create_task(self._send(outcomes))
                await asyncio.sleep(STEP_S)

    async def _send(self, outcomes: Outcomes) -> None:
        number = next(self._numbers)
        outcomes.offered += 1
        self._in_flight += 1
        outcomes.in_flight_max = max(outcomes.in_flight_max, self._in_flight)
        try:
            if number % LIST_EVERY == 0:
                await self._peer.call(ListJobs(limit=LIST_LIMIT), timeout_s=CALL_S)
            else:
                request = SubmitJob(spec=self._spec, request_id=f"{self._name}-{number}")
                await self._peer.call(request, timeout_s=CALL_S)
            outcomes.done_s.append(time.monotonic())
        except (OverloadedError, QueueFullError) as error:
            outcomes.refused[error.code] += 1
            outcomes.without_retry_time += error.retry_after_s <= 0
        except GenieError as error:
            outcomes.failed[error.code] += 1
        finally:
            self._in_flight -= 1


@dataclass
class Run:
    capacities: list[float] = field(default_factory=list)
    overload: Outcomes = field(default_factory=Outcomes)
    seconds: float = 0.0
    rss_bytes: list[int] = field(default_factory=list)
    """Once before the overload, then during it."""
    pending_max: int = 0
    recovery: list[float] = field(default_factory=list)
    losses: int = 0
    suspects: int = 0
    heartbeats_ms: list[float] = field(default_factory=list)


async def connect_clients(folder: Path, owner: ClusterClient, stack: AsyncExitStack) -> list[Client]:
    clients = []
    for number in range(TENANTS):
        token = (await owner.create_token(TokenKind.USER, tenant=f"tenant-{number}")).token
        settings = config.load({"paths.state_dir": str(folder), "cluster.token": token})
        network = TcpNetwork()
        access = await find_access(settings.cluster, state_dir=folder, network=network, timeout_s=CALL_S)
        connection = connect_authenticated(network, access, timeout_s=CALL_S, program="bench")
        peer, _ = await stack.enter_async_context(connection)
        clients.append(Client(peer, f"tenant-{number}"))
    return clients


async def measure_rates(clients: list[Client], seconds: float) -> list[float]:
    """Answers per second while every client waits for its replies."""
    outcomes, began_s = Outcomes(), time.monotonic()
    async with asyncio.TaskGroup() as group:
        for client in clients:
            for _ in range(WORKERS):
                group.create_task(client.work(outcomes, until_s=began_s + seconds))
    if outcomes.failed:
        raise SystemExit(f"requests failed without overload: {dict(outcomes.failed)}")
    return outcomes.rates(began_s, seconds)


async def overload(
    run: Run, clients: list[Client], owner: ClusterClient, controller: ControllerProcess, *, seconds: float
) -> None:
    rate = OVERLOAD * statistics.median(run.capacities) / len(clients)
    run.rss_bytes.append(read_rss_bytes(controller.pid))
    run.seconds, until_s = seconds, time.monotonic() + seconds

    async def watch() -> None:
        while time.monotonic() < until_s:
            await asyncio.sleep(min(1.0, seconds / 4))
            controller.check_running()
            run.rss_bytes.append(read_rss_bytes(controller.pid))
            status = await owner.status()
            run.pending_max = max(run.pending_max, status.jobs.get(JobState.QUEUED, 0))

    async with asyncio.TaskGroup() as group:
        group.create_task(watch())
        for client in clients:
            group.create_task(client.flood(run.overload, rate=rate, until_s=until_s))


async def measure(
    folder: Path, controller: ControllerProcess, agents: AgentsProcess, given: argparse.Namespace
) -> Run:
    run = Run()
    settings = config.load({"paths.state_dir": str(folder)})
    async with open_client(settings, program="bench") as owner, AsyncExitStack() as stack:
        clients = await connect_clients(folder, owner, stack)
        phase_s = 3.0 if given.quick else CAPACITY_S
        await measure_rates(clients, phase_s / 2)  # fills caches
        run.capacities = await measure_rates(clients, phase_s)
        agents.take_report()
        await overload(run, clients, owner, controller, seconds=given.seconds)
        run.heartbeats_ms = agents.take_report().latencies_ms
        run.recovery = await measure_rates(clients, RECOVERY_S)
    run.losses = controller.count_logged(NodeStatus.DISCONNECTED)
    run.suspects = controller.count_logged(NodeStatus.SUSPECT)
    return run


def recovery_s(run: Run) -> float:
    """Seconds after the overload until the rate of one second has reached RECOVERED of the capacity."""
    needed = RECOVERED * statistics.median(run.capacities)
    reached = [second + 1 for second, rate in enumerate(run.recovery) if rate >= needed]
    return float(reached[0] if reached else len(run.recovery) + 1)


def figures(run: Run) -> list[report.Figure]:
    figure, outcomes = report.make_figure, run.overload
    capacity, offered = statistics.median(run.capacities), outcomes.offered / run.seconds
    refused, grown = outcomes.refused.total(), [each - run.rss_bytes[0] for each in run.rss_bytes[1:]]
    print(f"refused: {dict(outcomes.refused)}, failed: {dict(outcomes.failed)}", file=sys.stderr)
    return [
        figure("capacity", capacity, unit="1/s", samples=run.capacities),
        figure("overload_offered", offered, unit="1/s", samples=[], baseline=capacity),
        figure(
            "overload_answered", len(outcomes.done_s) / run.seconds, unit="1/s", samples=[], baseline=capacity
        ),
        figure("overload_refused", refused / outcomes.offered, unit="", samples=[]),
        figure("refusals_no_retry_time", outcomes.without_retry_time, unit="", samples=[], goal=NONE),
        figure("overload_failed", outcomes.failed.total(), unit="", samples=[], goal=NONE),
        figure("in_flight_max", outcomes.in_flight_max, unit="", samples=[], goal=IN_FLIGHT),
        figure("pending_jobs_max", run.pending_max, unit="", samples=[], goal=PENDING),
        figure(
            "controller_memory_grown",
            max(grown) / MIB,
            unit="MiB",
            samples=[each / MIB for each in grown],
            goal=GROWTH,
        ),
        figure("overload_node_losses", run.losses, unit="", samples=[], goal=NONE),
        figure("overload_node_suspicions", run.suspects, unit="", samples=[]),
        figure("overload_heartbeat_p50", statistics.median(run.heartbeats_ms), samples=run.heartbeats_ms),
        figure(
            "overload_heartbeat_p99",
            report.percentile(run.heartbeats_ms, 0.99),
            samples=report.p99_samples(run.heartbeats_ms),
        ),
        figure("recovery", recovery_s(run), unit="s", samples=run.recovery, goal=RECOVERY),
    ]


def main() -> int:
    parser = report.make_parser((__doc__ or "").splitlines()[0], rounds=1)
    parser.add_argument("--nodes", type=report.parse_positive_int, default=125, help="nodes (default: 125)")
    parser.add_argument(
        "--seconds", type=report.parse_positive_int, help="duration of the overload (default: 60; quick: 5)"
    )
    parser.add_argument("--quick", action="store_true", help="shorter measurements")
    given = parser.parse_args()
    given.seconds = given.seconds or (5 if given.quick else 60)
    with report.use_temporary_state() as folder, ExitStack() as stack:
        os.environ.update(SETTINGS)
        controller = stack.enter_context(controller_process(folder))
        agents = stack.enter_context(agents_process(folder, nodes=given.nodes, kind="light"))
        wait_for_nodes(folder, given.nodes)
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            run = runner.run(measure(folder, controller, agents, given))
    return report.print_figures(figures(run), as_json=given.json)


if __name__ == "__main__":
    sys.exit(main())
