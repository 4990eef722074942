"""Runs jobs with durations through genie.scheduler.scheduler, on simulated time, and notes what came of it.

Jobs arrive, end, are preempted (they go on for their grace period, then wait again), and nodes may fail.
What happens at one time happens together, and is followed by one decision. The same jobs, nodes and plan
give the same run. Not for: what the figures mean (measures.py), the scheduler's rules (genie/scheduler).
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from genie.errors import UsageError
from genie.runtime.placers import placer_factory
from genie.scheduler.book import Book
from genie.scheduler.placement.protocol import ANY_MODEL, MODELS_MAX, TypicalShape
from genie.scheduler.possible import why_never
from genie.scheduler.request import NodeFacts, Request, why_not
from genie.scheduler.scheduler import Preempt, Rules, Scheduler, Start
from genie.sim.workload import SimJob, gpu_milli_of

SAMPLES = 1000
"""Of what is free but of no use, at most so many while jobs arrive."""

Progress = Callable[[int, int], None]
"""Told how many of how many jobs are over."""


@dataclass(frozen=True)
class Failures:
    """A node fails after `every_s` on average and is back after `repair_s`; none after the last arrival."""

    every_s: float
    repair_s: float


@dataclass(frozen=True)
class Plan:
    """How a run is decided."""

    rules: Rules = field(default_factory=Rules)
    placement: str = "supply"
    seed: int = 0
    failures: Failures | None = None


@dataclass(slots=True)
class Record:
    """What became of a job. `lost_s` is work that was done in vain, `started_s` its first start."""

    job: SimJob
    started_s: float | None = None
    ended_s: float | None = None
    preemptions: int = 0
    failures: int = 0
    lost_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Moment:
    """From `at_s` until the next moment. Thousandths of GPUs."""

    at_s: float
    used_milli: int
    there_milli: int
    waiting: int


@dataclass(frozen=True, slots=True)
class Sample:
    """GPUs that were free at a time, and how much of that not one worker of the first who waits could use."""

    at_s: float
    free_milli: int
    useless_milli: int


@dataclass(frozen=True)
class Run:
    """`impossible` are jobs that would not start on the whole cluster; they were never submitted. `fault` is
    why a policy of the user's own was out of use in the end."""

    records: Sequence[Record]
    moments: Sequence[Moment]
    samples: Sequence[Sample]
    impossible: Sequence[str]
    gpu_milli: int
    placer: str
    decisions: int
    fault: str = ""


def simulate(
    nodes: Sequence[NodeFacts], jobs: Sequence[SimJob], plan: Plan, *, progress: Progress | None = None
) -> Run:
    """The whole run, until the last job is over."""
    if not any(node.gpus for node in nodes) or not jobs:
        raise UsageError("a simulation needs nodes with GPUs and jobs", hint="see genie sim run --help")
    return _Simulation(nodes, jobs, plan).run(progress or (lambda done, total: None))


def _typical(nodes: Sequence[NodeFacts], jobs: Sequence[SimJob], most: int = 64) -> list[TypicalShape]:
    """The most frequent requests of the workload; only FGD is told them beforehand."""
    models: dict[str, int] = {}
    for node in nodes:  # numbered as the book does it
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
class _Life:
    """A job on its way. `epoch` counts its runs: an event of an earlier one is void."""

    record: Record
    request: Request
    kept_s: float = 0.0
    since_s: float = 0.0
    epoch: int = 0
    nodes: frozenset[str] = frozenset()


_END, _LEAVE, _REPAIR, _FAIL, _ARRIVE = range(5)
"""What happens first when times are equal."""


class _Simulation:
    def __init__(self, nodes: Sequence[NodeFacts], jobs: Sequence[SimJob], plan: Plan) -> None:
        make, self._placer = placer_factory()
        typical = _typical(nodes, jobs)
        self._book = Book(lambda policy: make(policy, plan.seed, typical), policy=plan.placement)
        self._scheduler = Scheduler(self._book, plan.rules)
        self._nodes = {node.node_id: node for node in nodes}
        for node in nodes:
            self._scheduler.set_node(node)
        self._down: set[str] = set()
        self._running: dict[str, _Life] = {}
        self._lives: dict[str, _Life] = {}
        self._impossible: list[str] = []
        self._events: list[tuple[float, int, int, str, int]] = []
        self._pushed = 0
        self._used_milli = 0
        self._there_milli = gpu_milli_of(nodes)
        self._moments: list[Moment] = []
        self._samples: list[Sample] = []
        self._arrived = 0
        self._over = 0
        self._admit(nodes, jobs)
        self._last_arrival_s = max(
            (life.record.job.submitted_s for life in self._lives.values()), default=0.0
        )
        self._failures, self._chance = plan.failures, random.Random(f"failures {plan.seed}")
        if self._failures is not None:
            for node in nodes:
                self._plan_failure(node.node_id, 0.0)

    def _admit(self, nodes: Sequence[NodeFacts], jobs: Sequence[SimJob]) -> None:
        known: dict[tuple[object, ...], bool] = {}
        for number, job in enumerate(sorted(jobs, key=lambda job: job.submitted_s)):
            kind = (job.shape, job.workers, job.within)
            if kind not in known:
                known[kind] = not why_never(job.request(number), nodes)
            if job.job_id in self._lives:
                raise UsageError(f"there are two jobs {job.job_id!r}", hint="give each another name")
            if not known[kind]:
                self._impossible.append(job.job_id)
                continue
            self._lives[job.job_id] = _Life(Record(job), job.request(number))
            self._push(job.submitted_s, _ARRIVE, job.job_id)

    def _push(self, at_s: float, kind: int, name: str, epoch: int = 0) -> None:
        self._pushed += 1
        heapq.heappush(self._events, (at_s, kind, self._pushed, name, epoch))

    # -- time ---------------------------------------------------------------------------------

    def run(self, progress: Progress) -> Run:
        events, decisions = self._events, 0
        while events and self._over < len(self._lives):
            now, happened = events[0][0], False
            while events and events[0][0] == now:
                _, kind, _, name, epoch = heapq.heappop(events)
                happened |= self._happen(kind, name, epoch, now)
            if happened:
                self._decide(now)
                decisions += 1
                if not decisions % 1000:
                    progress(self._over, len(self._lives))
        records = [life.record for life in self._lives.values()]
        milli = gpu_milli_of(self._nodes.values())
        return Run(
            records=records,
            moments=self._moments,
            samples=self._samples,
            impossible=self._impossible,
            gpu_milli=milli,
            placer=self._placer,
            decisions=decisions,
            fault=self._scheduler.fault,
        )

    def _happen(self, kind: int, name: str, epoch: int, now: float) -> bool:
        """Whether there is something to decide afterwards."""
        if kind in (_END, _LEAVE):
            life = self._running.get(name)
            if life is None or life.epoch != epoch:
                return False
            if kind == _END:
                self._stop(life, now)
                life.record.ended_s = now
                self._over += 1
            else:
                self._send_back(life, now)
        elif kind == _ARRIVE:
            self._scheduler.submit(self._lives[name].request)
            self._arrived += 1
        elif kind == _FAIL:
            self._fail(name, now)
        else:
            self._repair(name, now)
        return True

    def _decide(self, now: float) -> None:
        for decision in self._scheduler.decide(now):
            if isinstance(decision, Start):
                life = self._lives[decision.job_id]
                life.nodes = frozenset(place.node_id for place in decision.places)
                self._start(life, now)
            elif isinstance(decision, Preempt):
                life = self._lives[decision.job_id]
                life.record.preemptions += 1
                self._push(now + decision.grace_s, _LEAVE, decision.job_id, life.epoch)
        waiting = self._arrived - self._over - len(self._running)  # not all of them are told something new
        self._moments.append(Moment(now, self._used_milli, self._there_milli, waiting))
        if waiting and now >= self._next_sample_s:
            self._samples.append(self._sample(now))

    # -- jobs ---------------------------------------------------------------------------------

    def _start(self, life: _Life, now: float) -> None:
        job, record = life.record.job, life.record
        life.epoch += 1
        life.since_s = now
        record.started_s = now if record.started_s is None else record.started_s
        self._running[job.job_id] = life
        self._used_milli += job.gpu_milli_all
        self._push(now + job.runs_s - life.kept_s, _END, job.job_id, life.epoch)

    def _stop(self, life: _Life, now: float, *, again: bool = False) -> None:
        job = life.record.job
        del self._running[job.job_id]
        self._used_milli -= job.gpu_milli_all
        self._scheduler.ended(job.job_id, again=again)

    def _send_back(self, life: _Life, now: float) -> None:
        """It waits again, with what it had saved."""
        done_s = life.kept_s + now - life.since_s
        step_s = life.record.job.checkpoint_s
        life.kept_s = 0.0 if step_s is None else max(life.kept_s, done_s - done_s % step_s)
        life.record.lost_s += done_s - life.kept_s
        self._stop(life, now, again=True)

    # -- nodes --------------------------------------------------------------------------------

    def _plan_failure(self, node_id: str, now: float) -> None:
        assert self._failures is not None
        at_s = now + self._chance.expovariate(1.0 / self._failures.every_s)
        if at_s <= self._last_arrival_s:
            self._push(at_s, _FAIL, node_id)

    def _fail(self, node_id: str, now: float) -> None:
        assert self._failures is not None
        facts = self._nodes[node_id]
        self._scheduler.set_node(replace(facts, closed="it has failed"))
        self._there_milli -= facts.amounts.gpu_milli
        self._down.add(node_id)
        for life in [life for life in self._running.values() if node_id in life.nodes]:
            life.record.failures += 1
            self._send_back(life, now)
        self._push(now + self._failures.repair_s, _REPAIR, node_id)

    def _repair(self, node_id: str, now: float) -> None:
        self._scheduler.set_node(self._nodes[node_id])
        self._there_milli += self._nodes[node_id].amounts.gpu_milli
        self._down.discard(node_id)
        self._plan_failure(node_id, now)

    # -- what is left over --------------------------------------------------------------------

    @property
    def _next_sample_s(self) -> float:
        last_s = self._samples[-1].at_s if self._samples else 0.0
        return last_s + self._last_arrival_s / SAMPLES

    def _sample(self, now: float) -> Sample:
        reservation = self._scheduler.reservation
        head = self._scheduler.waiting[0] if reservation is None else self._lives[reservation.job_id].request
        free = useless = 0
        for node_id, facts in self._nodes.items():
            if node_id in self._down:
                continue
            cpu_milli, memory_mib, gpus = self._book.free_on(node_id)
            shares = [milli for milli, _ in gpus]
            shape = head.shape
            fitting = [milli for milli in shares if milli >= shape.gpu_milli]
            free += sum(shares)
            if (
                why_not(shape, facts)
                or cpu_milli < shape.cpu_milli
                or memory_mib < shape.memory_mib
                or len(fitting) < shape.gpus
            ):
                useless += sum(shares)
            elif shape.gpus:
                useless += sum(shares) - sum(fitting)
        return Sample(now, free, useless)
