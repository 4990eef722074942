"""The scheduler of one cluster: receives events, and decides in passes over the queue.

What a pass decides counts as done: the allocations include it. `ended` and `withdraw` revert it. Pure: the
time is an argument. Does not carry out decisions (controller/) or choose among nodes (placement/).
"""

from __future__ import annotations

import msgspec

from genie.errors import UsageError
from genie.scheduler.cluster.allocations import ClusterAllocations
from genie.scheduler.decisions import Decision, Start, Wait
from genie.scheduler.gpu_reservations import GpuReservations, Reservation
from genie.scheduler.job_table import JobTable
from genie.scheduler.order import GroupKey, Scales
from genie.scheduler.policies import IsolatedPolicy
from genie.scheduler.preemption.victims import StartedJob
from genie.scheduler.request import Allocation, JobRequest, NodeFacts, WorkerPlace
from genie.scheduler.rules import Rules
from genie.scheduler.scheduling_pass import SchedulingPass


class Scheduler:
    """The same calls in the same order return the same decisions."""

    def __init__(self, allocations: ClusterAllocations, rules: Rules) -> None:
        self.allocations = allocations
        self.jobs = JobTable(allocations, rules)
        self._fault = self.fault
        allocations.set_filter(rules.allowed)

    @property
    def rules(self) -> Rules:
        return self.jobs.rules

    @property
    def fault(self) -> str:
        """Why the user's policy was disabled and a built-in one replaces it; empty while it works."""
        order = self.jobs.rules.order
        return order.fault if isinstance(order, IsolatedPolicy) else ""

    @property
    def waiting(self) -> list[JobRequest]:
        return [job.request for job in self.jobs.queued.values()]

    @property
    def queue_groups(self) -> list[tuple[JobRequest, GroupKey]]:
        """The queued jobs, each with the key of its group."""
        return [(job.request, job.group) for job in self.jobs.queued.values()]

    @property
    def waits(self) -> list[Wait]:
        """The last decision about each queued job."""
        return [job.pending for job in self.jobs.queued.values()]

    @property
    def queued_kinds(self) -> int:
        """Number of groups of equal jobs in the queue; a pass considers each."""
        return len(self.jobs.queue)

    def has_queued_kind(self, request: JobRequest) -> bool:
        """Whether a job of the same group is queued."""
        return self.jobs.queue.has(request.tenant, (self.jobs.kinds.of(request), request.priority))

    def is_queued(self, job_id: str) -> bool:
        return job_id in self.jobs.queued

    def is_running(self, job_id: str) -> bool:
        """Whether it holds resources, by a decision or by `started`."""
        return job_id in self.jobs.running

    @property
    def running(self) -> list[StartedJob]:
        return list(self.jobs.running.values())

    @property
    def reservation(self) -> Reservation | None:
        """As of the last pass."""
        return self.jobs.reservation

    @property
    def gpu_reservations(self) -> GpuReservations:
        return self.jobs.gpu_reservations

    def scales(self, now: float) -> Scales:
        return self.jobs.scales(now)

    # -- events -------------------------------------------------------------------------------

    def set_node(self, facts: NodeFacts) -> None:
        """Add or update a node."""
        self.allocations.set_node(facts)
        self.jobs.nodes_changed()

    def remove_node(self, node_id: str) -> None:
        """Remove a node. UsageError if a job runs there: it must end first."""
        self.allocations.remove_node(node_id)
        self.jobs.nodes_changed()

    def set_rules(self, rules: Rules) -> None:
        """Apply new rules from the next pass on. Running jobs continue; all reservations are dropped and
        all queued jobs are considered again."""
        self.allocations.set_filter(rules.allowed)
        self.jobs.set_rules(rules)
        self._fault = self.fault

    def submit(self, request: JobRequest) -> None:
        if request.job_id in self.jobs.queued or request.job_id in self.jobs.running:
            raise UsageError(f"job {request.job_id} already exists")
        self.jobs.enqueue(request)
        self.allocations.observe(request)

    def started(self, request: JobRequest, places: tuple[WorkerPlace, ...], at: float) -> None:
        """The job runs at these places, even if its nodes have lost resources since its start."""
        self.allocations.hold(request, places, is_running=True)
        self.jobs.dequeue(request.job_id)
        self.jobs.run(request, at)
        self.jobs.require_full_pass()

    def retain_workers(self, job_id: str, places: tuple[WorkerPlace, ...]) -> None:
        """Only the workers at these places still run; the others have ended."""
        running = self.jobs.running[job_id]
        self.allocations.release(job_id)
        self.allocations.hold(running.request, places, is_running=True)
        allocation = Allocation(running.request, places)
        self.jobs.running[job_id] = msgspec.structs.replace(running, allocation=allocation)
        self.jobs.require_full_pass()

    def mark_stopping(self, job_id: str, until: float) -> None:
        """A running job is being stopped and ends at `until` at the latest."""
        running = self.jobs.running[job_id]
        self.jobs.running[job_id] = msgspec.structs.replace(
            running, ends_at=min(running.ends_at, until), is_stopping=True
        )

    def withdraw(self, job_id: str) -> None:
        """Remove a job from the queue; does nothing if it is not queued."""
        self.jobs.dequeue(job_id)
        self.jobs.moves.pop(job_id, None)
        self.jobs.drop_reservation(job_id)
        self.jobs.require_full_pass()

    def ended(self, job_id: str, *, requeue: bool = False) -> None:
        """Release what the job holds. `requeue`: queue it again, as after a preemption."""
        self.jobs.end(job_id, requeue=requeue)

    # -- decisions ----------------------------------------------------------------------------

    def decide(self, now: float) -> list[Decision]:
        """Run a scheduling pass. Returns a Wait only for jobs whose pending reason or start time changed."""
        if self.fault != self._fault:  # the policy was disabled: discard what its order and filter returned
            self.set_rules(self.jobs.rules)
        return SchedulingPass(self.jobs, now).run()

    def start_now(self, request: JobRequest, now: float) -> Start | None:
        """Start a new job without a pass. Returns None, and changes nothing, if jobs are queued, anything is
        reserved, or the job does not fit. `ended` reverts it."""
        jobs = self.jobs
        is_idle = not jobs.queued and jobs.reservation is None and not len(jobs.gpu_reservations)
        if not is_idle or request.near or isinstance(jobs.rules.order, IsolatedPolicy):
            return None
        start = SchedulingPass(jobs, now).try_start(request, "fits")
        if start is not None:
            self.allocations.observe(request)
        return start
