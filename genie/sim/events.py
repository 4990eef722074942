"""Event-driven simulation: runs jobs with durations through genie.scheduler on simulated time.

Events are arrivals, ends, preemptions (a job runs on for its grace period and is then queued again), node
failures and repairs. All events of one moment are followed by one scheduling pass. Equal jobs, nodes and plan
give equal results.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from genie.controller.placement.placers import placer_factory
from genie.errors import UsageError
from genie.scheduler.cluster.allocations import ClusterAllocations
from genie.scheduler.decisions import Preempt, Start
from genie.scheduler.feasibility import why_infeasible
from genie.scheduler.placement.protocol import ANY_MODEL, MODELS_MAX, TypicalShape
from genie.scheduler.request import JobRequest, NodeFacts, why_unsuitable
from genie.scheduler.rules import Rules
from genie.scheduler.scheduler import Scheduler
from genie.sim.workloads.workload import SimJob, gpu_milli_of

FRAGMENTATION_SAMPLES_MAX = 1000
"""Maximum number of fragmentation samples until the last arrival."""

Progress = Callable[[int, int], None]
"""Called with the numbers of finished and of all jobs."""


@dataclass(frozen=True)
class Failures:
    """Mean time between failures and repair time of each node; no node fails after the last arrival."""

    every_s: float
    repair_s: float


@dataclass(frozen=True)
class SimulationPlan:
    """Parameters of a simulation."""

    rules: Rules = field(default_factory=Rules)
    placement: str = "supply"
    seed: int = 0
    failures: Failures | None = None


@dataclass(slots=True)
class SimJobResult:
    """Result of a job. `lost_s` is unsaved work that was repeated, `started_s` the first start."""

    job: SimJob
    started_s: float | None = None
    ended_s: float | None = None
    preemptions: int = 0
    failures: int = 0
    lost_s: float = 0.0


@dataclass(frozen=True, slots=True)
class UsageSample:
    """GPU usage from `at_s` until the next sample, in thousandths of GPUs, and the number of pending jobs."""

    at_s: float
    used_milli: int
    available_milli: int
    waiting: int


@dataclass(frozen=True, slots=True)
class FragmentationSample:
    """Free GPUs, and the part of them that fits no worker of the first pending job."""

    at_s: float
    free_milli: int
    unusable_milli: int


@dataclass(frozen=True)
class SimulatedRun:
    """Result of a simulation. `impossible` lists skipped jobs, which do not fit the empty cluster; `fault` is
    the reason why a custom policy was disabled."""

    records: Sequence[SimJobResult]
    usage: Sequence[UsageSample]
    samples: Sequence[FragmentationSample]
    impossible: Sequence[str]
    gpu_milli: int
    placer: str
    decisions: int
    fault: str = ""


def simulate(
    nodes: Sequence[NodeFacts],
    jobs: Sequence[SimJob],
    plan: SimulationPlan,
    *,
    progress: Progress | None = None,
) -> SimulatedRun:
    """Simulate until the last job has ended."""
    if not any(node.gpus for node in nodes) or not jobs:
        raise UsageError("a simulation needs nodes with GPUs and jobs", hint="see genie sim run --help")
    return _Simulation(nodes, jobs, plan).run(progress or (lambda done, total: None))


def _typical_shapes(nodes: Sequence[NodeFacts], jobs: Sequence[SimJob], most: int = 64) -> list[TypicalShape]:
    """Return the most frequent request shapes of the workload, which FGD needs in advance."""
    models: dict[str, int] = {}
    for node in nodes:  # same numbering as in the book
        models.setdefault(node.gpus[0].model if node.gpus else "", len(models) % MODELS_MAX)
    counts = Counter((job.gpus, job.gpu_milli if job.gpus else 0, job.cpu_milli, job.models) for job in jobs)
    common = sorted(counts.items(), key=lambda item: (-item[1], item[0][:3], sorted(item[0][3])))[:most]
    total = sum(count for _, count in common)
    return [
        TypicalShape(
            gpus,
            milli,
            cpu,
            sum({1 << models[it] for it in wanted if it in models}) or ANY_MODEL,
            count / total,
        )
        for (gpus, milli, cpu, wanted), count in common
    ]


@dataclass(slots=True)
class _ActiveJob:
    """State of a submitted job. Events with an older `epoch` are ignored."""

    record: SimJobResult
    request: JobRequest
    saved_s: float = 0.0
    since_s: float = 0.0
    epoch: int = 0
    nodes: frozenset[str] = frozenset()


_END, _PREEMPTED, _REPAIR, _FAIL, _ARRIVE = range(5)
"""Event kinds, in the order of handling at equal times."""


class _Simulation:
    def __init__(self, nodes: Sequence[NodeFacts], jobs: Sequence[SimJob], plan: SimulationPlan) -> None:
        make, self._placer = placer_factory()
        typical = _typical_shapes(nodes, jobs)
        self._allocations = ClusterAllocations(
            lambda policy: make(policy, plan.seed, typical), policy=plan.placement
        )
        self._scheduler = Scheduler(self._allocations, plan.rules)
        self._nodes = {node.node_id: node for node in nodes}
        for node in nodes:
            self._scheduler.set_node(node)
        self._down: set[str] = set()
        self._running: dict[str, _ActiveJob] = {}
        self._active: dict[str, _ActiveJob] = {}
        self._impossible: list[str] = []
        self._events: list[tuple[float, int, int, str, int]] = []
        self._event_count = 0
        self._used_milli = 0
        self._available_milli = gpu_milli_of(nodes)
        self._usage_samples: list[UsageSample] = []
        self._fragmentation_samples: list[FragmentationSample] = []
        self._arrived = 0
        self._finished = 0
        self._admit(nodes, jobs)
        self._last_arrival_s = max(
            (active.record.job.submitted_s for active in self._active.values()), default=0.0
        )
        self._failures, self._random = plan.failures, random.Random(f"failures {plan.seed}")
        if self._failures is not None:
            for node in nodes:
                self._schedule_failure(node.node_id, 0.0)

    def _admit(self, nodes: Sequence[NodeFacts], jobs: Sequence[SimJob]) -> None:
        known: dict[tuple[object, ...], bool] = {}
        for number, job in enumerate(sorted(jobs, key=lambda job: job.submitted_s)):
            kind = (job.shape, job.workers, job.within)
            if kind not in known:
                known[kind] = not why_infeasible(job.request(number), nodes)
            if job.job_id in self._active:
                raise UsageError(f"duplicate job ID {job.job_id!r}", hint="give each job a unique ID")
            if not known[kind]:
                self._impossible.append(job.job_id)
                continue
            self._active[job.job_id] = _ActiveJob(SimJobResult(job), job.request(number))
            self._push(job.submitted_s, _ARRIVE, job.job_id)

    def _push(self, at_s: float, kind: int, name: str, epoch: int = 0) -> None:
        self._event_count += 1
        heapq.heappush(self._events, (at_s, kind, self._event_count, name, epoch))

    # -- time ---------------------------------------------------------------------------------

    def run(self, progress: Progress) -> SimulatedRun:
        events, decisions = self._events, 0
        while events and self._finished < len(self._active):
            now, changed = events[0][0], False
            while events and events[0][0] == now:
                _, kind, _, name, epoch = heapq.heappop(events)
                changed |= self._handle_event(kind, name, epoch, now)
            if changed:
                self._schedule(now)
                decisions += 1
                if not decisions % 1000:
                    progress(self._finished, len(self._active))
        records = [active.record for active in self._active.values()]
        milli = gpu_milli_of(self._nodes.values())
        return SimulatedRun(
            records=records,
            usage=self._usage_samples,
            samples=self._fragmentation_samples,
            impossible=self._impossible,
            gpu_milli=milli,
            placer=self._placer,
            decisions=decisions,
            fault=self._scheduler.policy_fault,
        )

    def _handle_event(self, kind: int, name: str, epoch: int, now: float) -> bool:
        """Handle one event and return whether a scheduling pass is needed."""
        if kind in (_END, _PREEMPTED):
            active = self._running.get(name)
            if active is None or active.epoch != epoch:
                return False
            if kind == _END:
                self._stop(active, now)
                active.record.ended_s = now
                self._finished += 1
            else:
                self._requeue(active, now)
        elif kind == _ARRIVE:
            self._scheduler.submit(self._active[name].request)
            self._arrived += 1
        elif kind == _FAIL:
            self._fail(name, now)
        else:
            self._repair(name, now)
        return True

    def _schedule(self, now: float) -> None:
        for decision in self._scheduler.decide(now):
            if isinstance(decision, Start):
                active = self._active[decision.job_id]
                active.nodes = frozenset(place.node_id for place in decision.places)
                self._start(active, now)
            elif isinstance(decision, Preempt):
                active = self._active[decision.job_id]
                active.record.preemptions += 1
                self._push(now + decision.grace_s, _PREEMPTED, decision.job_id, active.epoch)
        waiting = self._arrived - self._finished - len(self._running)  # decisions do not list all of them
        self._usage_samples.append(UsageSample(now, self._used_milli, self._available_milli, waiting))
        if waiting and now >= self._next_sample_s:
            self._fragmentation_samples.append(self._sample(now))

    # -- jobs ---------------------------------------------------------------------------------

    def _start(self, active: _ActiveJob, now: float) -> None:
        job, record = active.record.job, active.record
        active.epoch += 1
        active.since_s = now
        record.started_s = now if record.started_s is None else record.started_s
        self._running[job.job_id] = active
        self._used_milli += job.gpu_milli_all
        self._push(now + job.runs_s - active.saved_s, _END, job.job_id, active.epoch)

    def _stop(self, active: _ActiveJob, now: float, *, requeue: bool = False) -> None:
        job = active.record.job
        del self._running[job.job_id]
        self._used_milli -= job.gpu_milli_all
        self._scheduler.record_end(job.job_id, requeue=requeue)

    def _requeue(self, active: _ActiveJob, now: float) -> None:
        """Queue the job again, with the work saved at its last checkpoint."""
        done_s = active.saved_s + now - active.since_s
        step_s = active.record.job.checkpoint_s
        active.saved_s = 0.0 if step_s is None else max(active.saved_s, done_s - done_s % step_s)
        active.record.lost_s += done_s - active.saved_s
        self._stop(active, now, requeue=True)

    # -- nodes --------------------------------------------------------------------------------

    def _schedule_failure(self, node_id: str, now: float) -> None:
        assert self._failures is not None
        at_s = now + self._random.expovariate(1.0 / self._failures.every_s)
        if at_s <= self._last_arrival_s:
            self._push(at_s, _FAIL, node_id)

    def _fail(self, node_id: str, now: float) -> None:
        assert self._failures is not None
        facts = self._nodes[node_id]
        self._scheduler.set_node(replace(facts, blocked_reason="it has failed"))
        self._available_milli -= facts.amounts.gpu_milli
        self._down.add(node_id)
        for active in [active for active in self._running.values() if node_id in active.nodes]:
            active.record.failures += 1
            self._requeue(active, now)
        self._push(now + self._failures.repair_s, _REPAIR, node_id)

    def _repair(self, node_id: str, now: float) -> None:
        self._scheduler.set_node(self._nodes[node_id])
        self._available_milli += self._nodes[node_id].amounts.gpu_milli
        self._down.discard(node_id)
        self._schedule_failure(node_id, now)

    # -- fragmentation ------------------------------------------------------------------------

    @property
    def _next_sample_s(self) -> float:
        last_s = self._fragmentation_samples[-1].at_s if self._fragmentation_samples else 0.0
        return last_s + self._last_arrival_s / FRAGMENTATION_SAMPLES_MAX

    def _sample(self, now: float) -> FragmentationSample:
        reservation = self._scheduler.reservation
        head = (
            self._scheduler.queued_requests[0]
            if reservation is None
            else self._active[reservation.job_id].request
        )
        free = useless = 0
        for node_id, facts in self._nodes.items():
            if node_id in self._down:
                continue
            cpu_milli, memory_mib, gpus = self._allocations.free_resources_of_node(node_id)
            shares = [milli for milli, _ in gpus]
            shape = head.shape
            fitting = [milli for milli in shares if milli >= shape.gpu_milli]
            free += sum(shares)
            if (
                why_unsuitable(shape, facts)
                or cpu_milli < shape.cpu_milli
                or memory_mib < shape.memory_mib
                or len(fitting) < shape.gpus
            ):
                useless += sum(shares)
            elif shape.gpus:
                useless += sum(shares) - sum(fitting)
        return FragmentationSample(now, free, useless)
