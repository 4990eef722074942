"""Keeps the scheduler in step with the ledger, and turns what it decides into steps of jobs.

The scheduler (scheduler/scheduler.py) counts what it decides as done. What the ledger says in the end counts
more: every row of a job that changes is compared with what the scheduler believes, and so is every decision
that was not carried out. After a load everything is told to it anew. Not for: writing (jobs.py), talking to
agents (agents.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from genie.controller.jobs import Jobs
from genie.controller.ledger import Ledger
from genie.controller.views import NodeState, Views
from genie.errors import UsageError
from genie.model.job import Job, JobSpec, JobState, Resources, Wishes
from genie.model.node import NodeInfo, Vendor
from genie.runtime.clock import Clock
from genie.scheduler import possible
from genie.scheduler.book import Book, MakePlacer
from genie.scheduler.explain import Explanation, explain, in_order
from genie.scheduler.facts import GPU_UNKNOWN, facts_of, request_of, shape_of
from genie.scheduler.placement.protocol import GPUS_MAX
from genie.scheduler.quota import UNBOUNDED
from genie.scheduler.request import CPU, NodeFacts, Request, Shape, WorkerPlace
from genie.scheduler.scheduler import Decision, Rules, Scheduler, Start, Wait

_log = logging.getLogger(__name__)

KINDS_WAITING_MAX = 1000
"""Lines of jobs of one tenant that ask for the same. A pass looks at each, and the book knows about so
many."""
_REFRESH_BUDGET = 20_000
"""Judgements of a request on a node at a time: some milliseconds."""
_KINDS_MAX = 1024
"""Of wishes that are remembered."""
_HELD = (JobState.PLACING, JobState.RUNNING)


class Planner:
    """`make_placer` gives an empty placer of a policy; `policy` is the one that places jobs. No node runs
    more than `workers_max` workers at a time; `room` says how many more launches can be sent."""

    def __init__(
        self,
        ledger: Ledger,
        jobs: Jobs,
        views: Views,
        *,
        clock: Clock,
        make_placer: MakePlacer,
        policy: str,
        rules: Callable[[], Rules] = Rules,
        workers_max: int = UNBOUNDED,
        room: Callable[[], int] = lambda: 1,
    ) -> None:
        self._ledger = ledger
        self._jobs = jobs
        self._views = views
        self._clock = clock
        self._make_placer = make_placer
        self._policy = policy
        self._make_rules = rules
        self._workers_max = workers_max
        self._room = room
        self._gpu_ids: dict[str, tuple[int, ...]] = {}
        """Of each node: the ids of its accelerators by their positions."""
        self._has_gpus = False
        self._later: dict[str, float] = {}
        """Queued jobs that are not to be placed before a time, because an agent has just refused them."""
        self._never: dict[tuple[object, ...], str] = {}
        """Why requests could never run, while the nodes have what they have."""
        self._shapes: dict[Resources, tuple[Wishes, Shape]] = {}
        """Of jobs that may go to any node, the last of each."""
        self._seen: dict[str, tuple[tuple[object, ...], str]] = {}
        """What the scheduler was told of each node."""
        self._pending: dict[str, tuple[Request, tuple[WorkerPlace, ...]]] = {}
        """Started with their submission, which is not durable yet; no more than one transaction has."""
        self._is_stale = True
        self._scheduler = self._new_scheduler()
        ledger.on_load.append(self.forget)
        ledger.jobs.on_change.append(self._job_changed)
        ledger.quotas.on_change.append(self._quota_changed)
        views.on_look.append(self._node_looked_at)

    # -- reading ------------------------------------------------------------------------------

    def why_never(self, spec: JobSpec) -> str:
        """Why this could not run on the registered nodes, were all well and free; empty if it could."""
        self._views.registered()
        if self._is_stale:
            self._start_anew()
        if missing := self._missing_gpus(spec):
            return f"node {spec.node_id} has no accelerator {min(missing)}"
        shape, wishes = self._shape(spec), spec.wishes
        key = (shape, wishes.workers, wishes.workers_min, wishes.within, wishes.spread)
        if key not in self._never:
            if len(self._never) >= _KINDS_MAX:
                self._never.clear()
            request = request_of(_asked(spec, tenant=""), shape)
            nodes = self._scheduler.book.nodes
            self._never[key] = possible.why_never(request, nodes, workers_max=self._workers_max)
        return self._never[key]

    def why_over_quota(self, spec: JobSpec, tenant: str) -> str:
        """Why its tenant could not start it, held it nothing else; empty if it could."""
        if self._is_stale:
            self._start_anew()
        quotas = self._scheduler.rules.quotas
        if tenant not in quotas.by_tenant:
            return ""
        return quotas.why_never(request_of(_asked(spec, tenant), self._shape(spec)))

    def has_room(self, spec: JobSpec, tenant: str) -> bool:
        """Whether one more kind of jobs may wait, or this one does already: each kind costs a decision."""
        if self._is_stale or self._scheduler.kinds_waiting < KINDS_WAITING_MAX:
            return True
        return self._scheduler.has_alike(request_of(_asked(spec, tenant), self._shape(spec)))

    def waiting(self) -> list[Wait]:
        """Who waits and for what, in the order in which they are gone through."""
        told = {wait.job_id: wait for wait in self._scheduler.told}
        return [told[request.job_id] for request in in_order(self._scheduler, self._clock.wall_s())]

    def explained(self, job_id: str) -> Explanation | None:
        """Why it waits; None when it does not."""
        told = next((wait for wait in self._scheduler.told if wait.job_id == job_id), None)
        if told is None:
            return None
        return explain(self._scheduler, job_id, reason=told.reason, now=self._clock.wall_s())

    @property
    def fault(self) -> str:
        """Why a policy of the user's own is out of use; empty while it is well."""
        return self._scheduler.fault

    @property
    def pending(self) -> int:
        """How many were started with their submission, which is not durable yet."""
        return len(self._pending)

    # -- deciding -----------------------------------------------------------------------------

    def decide(self) -> list[Decision]:
        """What is to be done now. Accelerators go by their ids. `settle` must follow for every start."""
        self._views.current()
        if self._is_stale:
            self._start_anew()
        self._take_up_later()
        decisions = self._scheduler.decide(self._clock.wall_s())
        return [self._by_id(each) if isinstance(each, Start) else each for each in decisions]

    def start_now(self, job: Job) -> Start | None:
        """Where a job goes that is about to be submitted, so that both are one step; None when it has to be
        decided on like all others. It counts as started: `take_back` must follow if it is not submitted."""
        if job.spec.wishes.workers > 1 or self._room() <= len(self._pending):
            return None
        self._views.by_clock()
        if self._is_stale:
            return None
        request = self._request(job)
        start = self._scheduler.start_now(request, self._clock.wall_s())
        if start is None:
            return None
        if not self._views.is_connected(start.places[0].node_id):
            self._scheduler.ended(job.job_id)
            return None
        self._pending[job.job_id] = (request, start.places)
        return self._by_id(start)

    def take_back(self, job_id: str) -> None:
        """It was not submitted after all."""
        is_pending = self._pending.pop(job_id, None) is not None
        if is_pending and not self._is_stale and self._scheduler.is_running(job_id):
            self._scheduler.ended(job_id)

    def refresh(self) -> None:
        """Between two decisions: what the next one would have to work out first, so that it need not."""
        if not self._is_stale:
            self._scheduler.book.refresh(_REFRESH_BUDGET)

    def settle(self, job_ids: Iterable[str]) -> None:
        """These were decided on. What has not come about is undone."""
        if not self._is_stale:
            for job_id in job_ids:
                self._compare(job_id, self._ledger.jobs.get(job_id))

    def forget(self) -> None:
        """Everything is told anew before the next decision."""
        self._is_stale = True

    # -- following ----------------------------------------------------------------------------

    def _new_scheduler(self) -> Scheduler:
        book = Book(self._make_placer, policy=self._policy, workers_max=self._workers_max)
        return Scheduler(book, self._make_rules())

    def _start_anew(self) -> None:
        self._scheduler = self._new_scheduler()
        self._gpu_ids.clear()
        self._never.clear()
        self._shapes.clear()
        self._seen.clear()
        self._later.clear()
        states = self._views.current()
        self._has_gpus = any(_has_gpu(state.info) for state in states.values())
        self._is_stale = False
        for node_id, state in states.items():
            self._set_node(node_id, state)
        for job in sorted(self._ledger.jobs.values(), key=lambda job: job.sequence):
            self._compare(job.job_id, job)
        for request, places in self._pending.values():
            self._account(request, places, self._clock.wall_s())

    def _node_looked_at(self, node_id: str, state: NodeState | None) -> None:
        if self._is_stale:
            return
        if state is not None and not self._has_gpus and _has_gpu(state.info):
            self.forget()  # what AUTO means is another thing from now on
        elif state is None:
            self._remove_node(node_id)
        else:
            self._set_node(node_id, state)

    def _set_node(self, node_id: str, state: NodeState) -> None:
        info, closed = state.info, state.closed
        has = (info.gpus, info.cpus, info.memory_total_bytes, info.labels, info.rack)
        if self._seen.get(node_id) == (has, closed):
            return
        self._seen[node_id] = (has, closed)
        facts = facts_of(info, closed=closed)
        known = self._scheduler.book.facts(node_id)
        if known == facts:
            return
        self._never.clear()
        gpu_ids = tuple(gpu.gpu_id for gpu in info.gpus[:GPUS_MAX])
        if self._gpu_ids.setdefault(node_id, gpu_ids) != gpu_ids:
            self.forget()  # what was said of its accelerators by their positions holds no longer
            return
        if known is None and len(state.info.gpus) > GPUS_MAX:
            _log.warning("of node %s only the first %d accelerators are given to jobs", node_id, GPUS_MAX)
        self._scheduler.set_node(facts)

    def _remove_node(self, node_id: str) -> None:
        if self._scheduler.book.facts(node_id) is None:
            return
        try:
            self._scheduler.remove_node(node_id)
            self._gpu_ids.pop(node_id, None)
            self._seen.pop(node_id, None)
            self._never.clear()
            if self._has_gpus and not any(map(_has_gpu_facts, self._scheduler.book.nodes)):
                self.forget()  # as in _node_looked_at
        except UsageError:  # something is still held there in the book
            self.forget()

    def _quota_changed(self, tenant: str, before: object, after: object) -> None:
        if not self._is_stale:
            self._scheduler.set_rules(self._make_rules())

    def _job_changed(self, job_id: str, before: Job | None, after: Job | None) -> None:
        self._pending.pop(job_id, None)
        is_forgotten = after is None and before is not None and before.state.is_final
        if not self._is_stale and not is_forgotten:  # of those it has known nothing for long
            self._compare(job_id, after)

    def _compare(self, job_id: str, job: Job | None) -> None:
        """Makes the scheduler believe what the ledger says of this job."""
        scheduler = self._scheduler
        if job is None or job.state.is_final:
            self._later.pop(job_id, None)
            if scheduler.is_running(job_id):
                scheduler.ended(job_id)
            else:
                scheduler.withdraw(job_id)
        elif job.state in _HELD:
            if not scheduler.is_running(job_id):
                self._hold(job)
            elif len(job.placements) > 1:
                self._give_back(job)
            if job.stop and scheduler.is_running(job_id):
                scheduler.leaves(job_id, self._clock.wall_s() + job.spec.wishes.grace_s)
        elif self._jobs.not_before_s(job_id) > self._clock.monotonic_s():
            self._later[job_id] = self._jobs.not_before_s(job_id)
            if scheduler.is_running(job_id):
                scheduler.ended(job_id)
        elif scheduler.is_running(job_id):
            scheduler.ended(job_id, again=True)
        elif not scheduler.is_waiting(job_id):
            scheduler.submit(self._request(job))

    def _hold(self, job: Job) -> None:
        """It runs, as another controller decided or this one in an earlier term."""
        self._account(self._request(job), self._places(job), job.started_at or job.history[-1].at)

    def _account(self, request: Request, places: tuple[WorkerPlace, ...], at: float) -> None:
        try:
            self._scheduler.started(request, places, at)
        except (UsageError, KeyError) as error:
            # It runs on; what it holds counts in the ledger.
            _log.warning("job %s cannot be accounted for where it runs: %s", request.job_id, error)

    def _give_back(self, job: Job) -> None:
        """What those of its workers held that are over."""
        left = sum(placement.outcome is None for placement in job.placements)
        if left < len(self._scheduler.book.held[job.job_id].places):
            self._scheduler.keeps(job.job_id, self._places(job))

    def _take_up_later(self) -> None:
        now_s = self._clock.monotonic_s()
        for job_id in [job_id for job_id, at_s in self._later.items() if at_s <= now_s]:
            del self._later[job_id]
            self._compare(job_id, self._ledger.jobs.get(job_id))

    # -- names and numbers --------------------------------------------------------------------

    def _missing_gpus(self, spec: JobSpec) -> set[int]:
        known = self._gpu_ids.get(spec.node_id)
        return set() if known is None else set(spec.gpu_ids) - set(known)

    def _request(self, job: Job) -> Request:
        return request_of(job, self._shape(job.spec))

    def _shape(self, spec: JobSpec) -> Shape:
        """The same object for the same wish, mostly: it is what decisions look things up by."""
        if spec.node_id:
            known = self._gpu_ids.get(spec.node_id, ())
            positions = {gpu_id: position for position, gpu_id in enumerate(known)}
            return shape_of(spec, has_gpus=self._has_gpus, positions=positions)
        found = self._shapes.get(spec.resources)
        if found is not None and found[0] == spec.wishes:
            return found[1]
        if len(self._shapes) >= _KINDS_MAX:
            self._shapes.clear()
        shape = shape_of(spec, has_gpus=self._has_gpus, positions={})
        self._shapes[spec.resources] = (spec.wishes, shape)
        return shape

    def _places(self, job: Job) -> tuple[WorkerPlace, ...]:
        """Where it holds something."""
        return tuple(
            self._by_position(placement.node_id, placement.gpu_ids)
            for placement in job.placements
            if placement.outcome is None
        )

    def _by_position(self, node_id: str, gpu_ids: tuple[int, ...]) -> WorkerPlace:
        known = self._gpu_ids.get(node_id, ())  # a node that is not registered any more has none
        return WorkerPlace(
            node_id, tuple(known.index(gpu_id) if gpu_id in known else GPU_UNKNOWN for gpu_id in gpu_ids)
        )

    def _by_id(self, start: Start) -> Start:
        places = []
        for place in start.places:
            ids = self._gpu_ids[place.node_id]
            places.append(WorkerPlace(place.node_id, tuple([ids[position] for position in place.gpu_ids])))
        return Start(start.job_id, tuple(places), start.reason)


def _asked(spec: JobSpec, tenant: str) -> Job:
    """A job that nobody has submitted."""
    return Job(
        job_id="",
        tenant=tenant,
        owner="",
        spec=spec,
        state=JobState.QUEUED,
        reason="",
        submitted_at=0.0,
        sequence=0,
    )


def _has_gpu(info: NodeInfo) -> bool:
    return any(gpu.vendor is not Vendor.CPU for gpu in info.gpus)


def _has_gpu_facts(facts: NodeFacts) -> bool:
    return any(gpu.vendor != CPU for gpu in facts.gpus)
