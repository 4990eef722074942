"""A controller that is offered twice the requests it can handle: what it refuses, and how it recovers.

    python benchmarks/bench_overload.py [--json] [--seconds 60] [--nodes 125] [--quick]

A controller in its own process, 125 nodes with 2,000 GPUs that end each job at their next tick, and clients
of several tenants, which submit jobs and list jobs (nine to one). First each client waits for its replies:
the rate is the capacity. Then the clients together send requests at twice that rate, whatever the replies
are. Then they wait for their replies again, and after a refusal for the stated retry time.

- Queues are bounded: jobs are pending up to the limit of the queue, and the controller's memory grows by at
  most 128 MiB. The requests that the controller has accepted cannot be counted from outside: those without a
  reply may be in the buffers of the sockets. So a client sends until UNANSWERED_MAX requests have no reply,
  which is twice the number that the controller accepts from a connection, so that it must refuse some.
  Further requests are held back and dropped; they count as offered. Without that limit, a client that gets
  too little CPU time would read replies for seconds after the overload.
- Every refusal states when to retry, and no node is lost.
- Full speed within five seconds (`recovery`). The overload leaves thousands of pending jobs, and the
  capacity is measured without any. While the controller works them off, it answers fewer submissions, but
  does the same work: it starts a job for each answer, or an older one instead. So in both phases the rate is
  that of answered requests plus that by which the pending jobs become fewer; refusals do not count. It must
  reach RECOVERED of the capacity for one second. `recovery_of_answers` counts the answers alone, so it
  includes the time in which the queue is worked off; it has no goal, and is that of the whole phase if the
  queue is still long at its end (`recovery_pending_jobs`).

The clients, the agents and the controller compete for the cores, with other programs, too. So the rate per
CPU second of the controller must also be RECOVERED of that before the overload (`recovery_per_cpu_s`), and
`recovery_cpu_share` is the CPU time per second that the controller got: where it is far from its baseline,
that before the overload, `recovery` says more about the other programs than about the controller.
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
from process_readings import read_cpu_s, read_rss_bytes

from genie import config
from genie.cluster.client import ClusterClient, open_client
from genie.errors import GenieError, OverloadedError, QueueFullError
from genie.model.job import JobSpec, JobState, Resources
from genie.model.messages import ListJobs, SubmitJob
from genie.model.node import NodeStatus
from genie.model.tenant import TokenKind
from genie.native import libraries
from genie.processes.tasks import loop_factory
from genie.runtime.credentials import connect_authenticated, find_access
from genie.runtime.network import TcpNetwork
from genie.runtime.rpc import REQUESTS_IN_FLIGHT_MAX, Peer

GPUS = 16
"""Of each node: the controller must be the limit, not the GPUs. A job occupies one for about 0.3 s."""
TENANTS = 8
WORKERS = 16
"""Requests in flight of each client while the capacity is measured."""
OVERLOAD = 2.0
UNANSWERED_MAX = 2 * REQUESTS_IN_FLIGHT_MAX
"""Requests of each client without a reply during the overload."""
LIST_EVERY = 10
LIST_LIMIT = 100
STEP_S = 0.01
CALL_S = 60.0
CAPACITY_S = 10
RECOVERY_S = 10
CPU_STEP_S = 0.01
SAMPLE_S = 1.0
RECOVERED = 0.8
MIB = 1024**2
SETTINGS = {"GENIE_CONTROLLER_JOBS_KEPT": "1000"}

NONE = report.value_at_most(0.0)
GROWTH = report.value_at_most(128.0)
PENDING = report.value_at_most(10_000.0)
RECOVERY = report.value_at_most(5.0)
EFFICIENCY = report.ratio_at_least(RECOVERED)


@dataclass
class RequestOutcomes:
    """Of the requests of all clients."""

    done_s: list[float] = field(default_factory=list)
    """When each was answered, except refusals."""
    offered: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    """By error code."""
    without_retry_time: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    held_back: int = 0
    """Requests that were due but not sent; they count as offered."""
    unanswered_max: int = 0
    """Of one client."""


@dataclass(frozen=True)
class ControllerSample:
    at_s: float
    answered: int
    """Requests since the begin of the phase, without refusals."""
    pending: int
    """Pending jobs."""
    cpu_s: float
    """Of the controller since its start."""


@dataclass
class Phase:
    """A phase in which clients wait for their replies, with a sample about every second."""

    samples: list[ControllerSample] = field(default_factory=list)

    @property
    def answer_rates(self) -> list[float]:
        return [
            (after.answered - before.answered) / (after.at_s - before.at_s) for before, after in self._pairs
        ]

    @property
    def work_rates(self) -> list[float]:
        """Per second: answered requests, and by how many the pending jobs have become fewer. So every job
        counts when it leaves the queue."""
        return [_work_between(before, after) / (after.at_s - before.at_s) for before, after in self._pairs]

    @property
    def work_per_cpu_s(self) -> float:
        first, last = self.samples[0], self.samples[-1]
        return _work_between(first, last) / max(last.cpu_s - first.cpu_s, CPU_STEP_S)

    @property
    def cpu_share(self) -> float:
        first, last = self.samples[0], self.samples[-1]
        return (last.cpu_s - first.cpu_s) / (last.at_s - first.at_s)

    @property
    def _pairs(self) -> list[tuple[ControllerSample, ControllerSample]]:
        return list(itertools.pairwise(self.samples))


def _work_between(before: ControllerSample, after: ControllerSample) -> float:
    return (after.answered - before.answered) - (after.pending - before.pending)


class Client:
    """One tenant with one connection."""

    def __init__(self, peer: Peer, name: str) -> None:
        self._peer = peer
        self._name = name
        self._numbers = itertools.count()
        self._spec = JobSpec(name="bench", command=("true",), resources=Resources(gpus=1))
        self._unanswered = 0

    async def work(self, outcomes: RequestOutcomes, *, until_s: float) -> None:
        """Sends one request after another until `until_s`. After a refusal, waits for its retry time."""
        while (now_s := time.monotonic()) < until_s:
            retry_after_s = await self._send(outcomes)
            if retry_after_s:
                await asyncio.sleep(min(retry_after_s, until_s - now_s))

    async def flood(self, outcomes: RequestOutcomes, *, rate: float, until_s: float) -> None:
        """Sends requests at this rate until `until_s`, whatever the replies are; then waits for them."""
        async with asyncio.TaskGroup() as group:
            due, at_s = 0.0, time.monotonic()
            while (now_s := time.monotonic()) < until_s:
                due, at_s = due + rate * (now_s - at_s), now_s
                while due >= 1:
                    due -= 1
                    if self._unanswered < UNANSWERED_MAX:
                        self._unanswered += 1
                        group.create_task(self._send_counted(outcomes))
                    else:
                        outcomes.offered += 1
                        outcomes.held_back += 1
                outcomes.unanswered_max = max(outcomes.unanswered_max, self._unanswered)
                await asyncio.sleep(STEP_S)

    async def _send_counted(self, outcomes: RequestOutcomes) -> None:
        try:
            await self._send(outcomes)
        finally:
            self._unanswered -= 1

    async def _send(self, outcomes: RequestOutcomes) -> float:
        """Returns the retry time of a refusal, otherwise 0."""
        number = next(self._numbers)
        outcomes.offered += 1
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
            return error.retry_after_s
        except GenieError as error:
            outcomes.failed[error.code] += 1
        return 0.0


@dataclass
class OverloadRun:
    capacity: Phase = field(default_factory=Phase)
    overload: RequestOutcomes = field(default_factory=RequestOutcomes)
    seconds: float = 0.0
    rss_bytes: list[int] = field(default_factory=list)
    """Once before the overload, then during it."""
    pending_max: int = 0
    ended_s: float = 0.0
    """When the clients sent the last request of the overload."""
    recovery: Phase = field(default_factory=Phase)
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


async def count_pending(owner: ClusterClient) -> int:
    return (await owner.status()).jobs.get(JobState.QUEUED, 0)


async def measure_phase(
    clients: list[Client], owner: ClusterClient, controller: ControllerProcess, *, seconds: int
) -> Phase:
    """Measures while every client waits for its replies."""
    outcomes, phase, until_s = RequestOutcomes(), Phase(), time.monotonic() + seconds

    async def take_samples() -> None:
        while not phase.samples or phase.samples[-1].at_s < until_s:
            pending, answered = await count_pending(owner), len(outcomes.done_s)
            phase.samples.append(
                ControllerSample(time.monotonic(), answered, pending, read_cpu_s(controller.pid))
            )
            await asyncio.sleep(SAMPLE_S)

    async with asyncio.TaskGroup() as group:
        group.create_task(take_samples())
        for client in clients:
            for _ in range(WORKERS):
                group.create_task(client.work(outcomes, until_s=until_s + SAMPLE_S))
    if outcomes.failed:
        raise SystemExit(f"requests failed without overload: {dict(outcomes.failed)}")
    return phase


async def run_overload(
    run: OverloadRun,
    clients: list[Client],
    owner: ClusterClient,
    controller: ControllerProcess,
    *,
    seconds: float,
) -> None:
    rate = OVERLOAD * statistics.median(run.capacity.work_rates) / len(clients)
    run.rss_bytes.append(read_rss_bytes(controller.pid))
    until_s = time.monotonic() + seconds
    run.seconds, run.ended_s = seconds, until_s

    async def watch() -> None:
        while time.monotonic() < until_s:
            await asyncio.sleep(min(1.0, seconds / 4))
            controller.check_running()
            run.rss_bytes.append(read_rss_bytes(controller.pid))
            try:
                run.pending_max = max(run.pending_max, await count_pending(owner))
            except GenieError as error:  # the owner's requests must be answered, too
                run.overload.failed[error.code] += 1

    async with asyncio.TaskGroup() as group:
        group.create_task(watch())
        for client in clients:
            group.create_task(client.flood(run.overload, rate=rate, until_s=until_s))


async def measure(
    folder: Path, controller: ControllerProcess, agents: AgentsProcess, given: argparse.Namespace
) -> OverloadRun:
    run = OverloadRun()
    settings = config.load({"paths.state_dir": str(folder)})
    async with open_client(settings, program="bench") as owner, AsyncExitStack() as stack:
        clients = await connect_clients(folder, owner, stack)
        phase_s = 4 if given.quick else CAPACITY_S
        await measure_phase(clients, owner, controller, seconds=phase_s // 2)  # fills caches
        run.capacity = await measure_phase(clients, owner, controller, seconds=phase_s)
        agents.take_report()
        await run_overload(run, clients, owner, controller, seconds=given.seconds)
        run.heartbeats_ms = agents.take_report().latencies_ms
        run.recovery = await measure_phase(clients, owner, controller, seconds=RECOVERY_S)
    run.losses = controller.count_logged(NodeStatus.DISCONNECTED)
    run.suspects = controller.count_logged(NodeStatus.SUSPECT)
    return run


def recovery_s(run: OverloadRun, rates: list[float]) -> float:
    """Seconds from the end of the overload until one of these rates of the recovery phase has reached
    RECOVERED of the capacity; those of the whole phase if none has."""
    needed = RECOVERED * statistics.median(run.capacity.work_rates)
    ends_s = [sample.at_s for sample in run.recovery.samples[1:]]
    reached_s = [at_s for at_s, rate in zip(ends_s, rates, strict=True) if rate >= needed]
    return (reached_s or ends_s[-1:])[0] - run.ended_s


def make_figures(run: OverloadRun) -> list[report.Figure]:
    figure, outcomes = report.make_figure, run.overload
    capacity, offered = statistics.median(run.capacity.work_rates), outcomes.offered / run.seconds
    refused, grown = outcomes.refused.total(), [each - run.rss_bytes[0] for each in run.rss_bytes[1:]]
    print(f"refused: {dict(outcomes.refused)}, failed: {dict(outcomes.failed)}", file=sys.stderr)
    return [
        figure("capacity", capacity, unit="1/s", samples=run.capacity.work_rates),
        figure("overload_offered", offered, unit="1/s", samples=[], baseline=capacity),
        figure(
            "overload_answered", len(outcomes.done_s) / run.seconds, unit="1/s", samples=[], baseline=capacity
        ),
        figure("overload_refused", refused / outcomes.offered, unit="", samples=[]),
        figure("refusals_no_retry_time", outcomes.without_retry_time, unit="", samples=[], goal=NONE),
        figure("overload_failed", outcomes.failed.total(), unit="", samples=[], goal=NONE),
        figure("overload_held_back", outcomes.held_back / outcomes.offered, unit="", samples=[]),
        figure("overload_unanswered_max", outcomes.unanswered_max, unit="", samples=[]),
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
        *recovery_figures(run, capacity),
    ]


def recovery_figures(run: OverloadRun, capacity: float) -> list[report.Figure]:
    figure, before, after = report.make_figure, run.capacity, run.recovery
    return [
        figure("recovery", recovery_s(run, after.work_rates), unit="s", samples=[], goal=RECOVERY),
        figure(
            "recovery_rate",
            statistics.median(after.work_rates),
            unit="1/s",
            samples=after.work_rates,
            baseline=capacity,
        ),
        figure(
            "recovery_per_cpu_s",
            after.work_per_cpu_s,
            unit="",
            samples=[],
            baseline=before.work_per_cpu_s,
            goal=EFFICIENCY,
        ),
        figure("recovery_of_answers", recovery_s(run, after.answer_rates), unit="s", samples=[]),
        figure("recovery_pending_jobs", after.samples[-1].pending, unit="", samples=[]),
        figure("recovery_cpu_share", after.cpu_share, unit="", samples=[], baseline=before.cpu_share),
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
    libraries.load("genie_scheduler")  # compiles it: otherwise the controller would, during the measurement
    with report.use_temporary_state() as folder, ExitStack() as stack:
        os.environ.update(SETTINGS)
        controller = stack.enter_context(controller_process(folder))
        agents = stack.enter_context(agents_process(folder, nodes=given.nodes, gpus=GPUS, kind="light"))
        wait_for_nodes(folder, given.nodes)
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            run = runner.run(measure(folder, controller, agents, given))
    return report.print_figures(make_figures(run), as_json=given.json)


if __name__ == "__main__":
    sys.exit(main())
