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
from genie.sim.workloads.workload import SimJob, total_gpu_milli_of

FRAGMENTATION_SAMPLES_MAX = 1000
"""Maximum number of fragmentation samples until the last arrival."""

ProgressCallback = Callable[[int, int], None]
"""Called with the numbers of finished and of all jobs."""


@dataclass(frozen=True)
class NodeFailures:
    """Mean time between failures and repair time of each node; no node fails after the last arrival."""

    mean_between_failures_s: float
    repair_s: float


@dataclass(frozen=True)
class SimulationParameters:
    """Parameters of a simulation."""

    rules: Rules = field(default_factory=Rules)
    placement_policy: str = "supply"
    seed: int = 0
    node_failures: NodeFailures | None = None


@dataclass(slots=True)
class SimJobResult:
    """Result of a job. `lost_work_s` is unsaved work that was repeated, `first_started_s` the first start."""

    job: SimJob
    first_started_s: float | None = None
    ended_s: float | None = None
    preemption_count: int = 0
    node_failure_count: int = 0
    lost_work_s: float = 0.0


@dataclass(frozen=True, slots=True)
class UsageSample:
    """GPU usage from `time_s` until the next sample, in thousandths of GPUs, and the number of pending
    jobs."""

    time_s: float
    used_gpu_milli: int
    available_gpu_milli: int
    pending_jobs: int


@dataclass(frozen=True, slots=True)
class FragmentationSample:
    """Free GPUs, and the part of them that fits no worker of the first pending job."""

    time_s: float
    free_gpu_milli: int
    unusable_gpu_milli: int


@dataclass(frozen=True)
class SimulationResult:
    """Result of a simulation. `infeasible_job_ids` lists skipped jobs, which do not fit the empty cluster;
    `policy_fault` is the reason why a custom policy was disabled."""

    job_results: Sequence[SimJobResult]
    usage_samples: Sequence[UsageSample]
    fragmentation_samples: Sequence[FragmentationSample]
    infeasible_job_ids: Sequence[str]
    total_gpu_milli: int
    placer_kind: str
    pass_count: int
    policy_fault: str = ""


def simulate(
    nodes: Sequence[NodeFacts],
    jobs: Sequence[SimJob],
    plan: SimulationParameters,
    *,
    progress: ProgressCallback | None = None,
) -> SimulationResult:
    """Simulate until the last job has ended."""
    if not any(node.gpus for node in nodes) or not jobs:
        raise UsageError("a simulation needs nodes with GPUs and jobs", hint="see genie sim run --help")
    return _Simulation(nodes, jobs, plan).run(progress or (lambda done, total: None))


def _typical_shapes(
    nodes: Sequence[NodeFacts], jobs: Sequence[SimJob], shapes_max: int = 64
) -> list[TypicalShape]:
    """Return the most frequent request shapes of the workload, which FGD needs in advance."""
    models: dict[str, int] = {}
    for node in nodes:  # same numbering as in PlacerGroup
        models.setdefault(node.gpus[0].model if node.gpus else "", len(models) % MODELS_MAX)
    counts = Counter(
        (
            job.gpus_per_worker,
            job.gpu_milli if job.gpus_per_worker else 0,
            job.cpu_milli_per_worker,
            job.gpu_models,
        )
        for job in jobs
    )
    common = sorted(counts.items(), key=lambda item: (-item[1], item[0][:3], sorted(item[0][3])))[:shapes_max]
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

    result: SimJobResult
    request: JobRequest
    checkpointed_work_s: float = 0.0
    running_since_s: float = 0.0
    epoch: int = 0
    node_ids: frozenset[str] = frozenset()


_END_EVENT, _PREEMPTED_EVENT, _REPAIR_EVENT, _FAIL_EVENT, _ARRIVE_EVENT = range(5)
"""Event kinds, in the order of handling at equal times."""


class _Simulation:
    def __init__(
        self, nodes: Sequence[NodeFacts], jobs: Sequence[SimJob], plan: SimulationParameters
    ) -> None:
        make, self._placer_kind = placer_factory()
        typical = _typical_shapes(nodes, jobs)
        self._allocations = ClusterAllocations(
            lambda policy: make(policy, plan.seed, typical), policy=plan.placement_policy
        )
        self._scheduler = Scheduler(self._allocations, plan.rules)
        self._nodes = {node.node_id: node for node in nodes}
        for node in nodes:
            self._scheduler.set_node(node)
        self._failed_node_ids: set[str] = set()
        self._running_jobs: dict[str, _ActiveJob] = {}
        self._submitted_jobs: dict[str, _ActiveJob] = {}
        self._infeasible_job_ids: list[str] = []
        self._event_heap: list[tuple[float, int, int, str, int]] = []
        self._scheduled_event_count = 0
        self._used_gpu_milli = 0
        self._available_gpu_milli = total_gpu_milli_of(nodes)
        self._usage_samples: list[UsageSample] = []
        self._fragmentation_samples: list[FragmentationSample] = []
        self._arrived_job_count = 0
        self._finished_job_count = 0
        self._schedule_arrivals(nodes, jobs)
        self._last_arrival_s = max(
            (active.result.job.submitted_s for active in self._submitted_jobs.values()), default=0.0
        )
        self._node_failures, self._random = plan.node_failures, random.Random(f"failures {plan.seed}")
        if self._node_failures is not None:
            for node in nodes:
                self._schedule_node_failure(node.node_id, 0.0)

    def _schedule_arrivals(self, nodes: Sequence[NodeFacts], jobs: Sequence[SimJob]) -> None:
        known: dict[tuple[object, ...], bool] = {}
        for number, job in enumerate(sorted(jobs, key=lambda job: job.submitted_s)):
            kind = (job.shape, job.workers, job.within)
            if kind not in known:
                known[kind] = not why_infeasible(job.to_job_request(number), nodes)
            if job.job_id in self._submitted_jobs:
                raise UsageError(f"duplicate job ID {job.job_id!r}", hint="give each job a unique ID")
            if not known[kind]:
                self._infeasible_job_ids.append(job.job_id)
                continue
            self._submitted_jobs[job.job_id] = _ActiveJob(SimJobResult(job), job.to_job_request(number))
            self._schedule_event(job.submitted_s, _ARRIVE_EVENT, job.job_id)

    def _schedule_event(self, time_s: float, kind: int, target_id: str, epoch: int = 0) -> None:
        self._scheduled_event_count += 1
        heapq.heappush(self._event_heap, (time_s, kind, self._scheduled_event_count, target_id, epoch))

    # -- time ---------------------------------------------------------------------------------

    def run(self, progress: ProgressCallback) -> SimulationResult:
        events, decisions = self._event_heap, 0
        while events and self._finished_job_count < len(self._submitted_jobs):
            now, changed = events[0][0], False
            while events and events[0][0] == now:
                _, kind, _, name, epoch = heapq.heappop(events)
                changed |= self._handle_event_and_check_pass_needed(kind, name, epoch, now)
            if changed:
                self._run_scheduling_pass(now)
                decisions += 1
                if not decisions % 1000:
                    progress(self._finished_job_count, len(self._submitted_jobs))
        records = [active.result for active in self._submitted_jobs.values()]
        milli = total_gpu_milli_of(self._nodes.values())
        return SimulationResult(
            job_results=records,
            usage_samples=self._usage_samples,
            fragmentation_samples=self._fragmentation_samples,
            infeasible_job_ids=self._infeasible_job_ids,
            total_gpu_milli=milli,
            placer_kind=self._placer_kind,
            pass_count=decisions,
            policy_fault=self._scheduler.policy_fault,
        )

    def _handle_event_and_check_pass_needed(self, kind: int, name: str, epoch: int, now: float) -> bool:
        """Handle one event and return whether a scheduling pass is needed."""
        if kind in (_END_EVENT, _PREEMPTED_EVENT):
            active = self._running_jobs.get(name)
            if active is None or active.epoch != epoch:
                return False
            if kind == _END_EVENT:
                self._stop_job(active, now)
                active.result.ended_s = now
                self._finished_job_count += 1
            else:
                self._requeue_from_checkpoint(active, now)
        elif kind == _ARRIVE_EVENT:
            self._scheduler.submit(self._submitted_jobs[name].request)
            self._arrived_job_count += 1
        elif kind == _FAIL_EVENT:
            self._fail_node(name, now)
        else:
            self._repair_node(name, now)
        return True

    def _run_scheduling_pass(self, now: float) -> None:
        for decision in self._scheduler.decide(now):
            if isinstance(decision, Start):
                active = self._submitted_jobs[decision.job_id]
                active.node_ids = frozenset(place.node_id for place in decision.places)
                self._start_job(active, now)
            elif isinstance(decision, Preempt):
                active = self._submitted_jobs[decision.job_id]
                active.result.preemption_count += 1
                self._schedule_event(now + decision.grace_s, _PREEMPTED_EVENT, decision.job_id, active.epoch)
        waiting = (
            self._arrived_job_count - self._finished_job_count - len(self._running_jobs)
        )  # decisions do not list all of them
        self._usage_samples.append(UsageSample(now, self._used_gpu_milli, self._available_gpu_milli, waiting))
        if waiting and now >= self._next_fragmentation_sample_s:
            self._fragmentation_samples.append(self._sample_fragmentation(now))

    # -- jobs ---------------------------------------------------------------------------------

    def _start_job(self, active: _ActiveJob, now: float) -> None:
        job, record = active.result.job, active.result
        active.epoch += 1
        active.running_since_s = now
        record.first_started_s = now if record.first_started_s is None else record.first_started_s
        self._running_jobs[job.job_id] = active
        self._used_gpu_milli += job.total_gpu_milli
        self._schedule_event(
            now + job.limited_duration_s - active.checkpointed_work_s, _END_EVENT, job.job_id, active.epoch
        )

    def _stop_job(self, active: _ActiveJob, now: float, *, requeue: bool = False) -> None:
        job = active.result.job
        del self._running_jobs[job.job_id]
        self._used_gpu_milli -= job.total_gpu_milli
        self._scheduler.record_end(job.job_id, requeue=requeue)

    def _requeue_from_checkpoint(self, active: _ActiveJob, now: float) -> None:
        """Queue the job again, with the work saved at its last checkpoint."""
        done_s = active.checkpointed_work_s + now - active.running_since_s
        step_s = active.result.job.checkpoint_interval_s
        active.checkpointed_work_s = (
            0.0 if step_s is None else max(active.checkpointed_work_s, done_s - done_s % step_s)
        )
        active.result.lost_work_s += done_s - active.checkpointed_work_s
        self._stop_job(active, now, requeue=True)

    # -- nodes --------------------------------------------------------------------------------

    def _schedule_node_failure(self, node_id: str, now: float) -> None:
        assert self._node_failures is not None
        at_s = now + self._random.expovariate(1.0 / self._node_failures.mean_between_failures_s)
        if at_s <= self._last_arrival_s:
            self._schedule_event(at_s, _FAIL_EVENT, node_id)

    def _fail_node(self, node_id: str, now: float) -> None:
        assert self._node_failures is not None
        facts = self._nodes[node_id]
        self._scheduler.set_node(replace(facts, blocked_reason="it has failed"))
        self._available_gpu_milli -= facts.amounts.gpu_milli
        self._failed_node_ids.add(node_id)
        for active in [active for active in self._running_jobs.values() if node_id in active.node_ids]:
            active.result.node_failure_count += 1
            self._requeue_from_checkpoint(active, now)
        self._schedule_event(now + self._node_failures.repair_s, _REPAIR_EVENT, node_id)

    def _repair_node(self, node_id: str, now: float) -> None:
        self._scheduler.set_node(self._nodes[node_id])
        self._available_gpu_milli += self._nodes[node_id].amounts.gpu_milli
        self._failed_node_ids.discard(node_id)
        self._schedule_node_failure(node_id, now)

    # -- fragmentation ------------------------------------------------------------------------

    @property
    def _next_fragmentation_sample_s(self) -> float:
        last_s = self._fragmentation_samples[-1].time_s if self._fragmentation_samples else 0.0
        return last_s + self._last_arrival_s / FRAGMENTATION_SAMPLES_MAX

    def _sample_fragmentation(self, now: float) -> FragmentationSample:
        reservation = self._scheduler.reservation
        head = (
            self._scheduler.queued_requests[0]
            if reservation is None
            else self._submitted_jobs[reservation.job_id].request
        )
        free = useless = 0
        for node_id, facts in self._nodes.items():
            if node_id in self._failed_node_ids:
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
