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
from genie.scheduler.order import OrderInputs, QueueGroupKey
from genie.scheduler.policies import IsolatedPolicy
from genie.scheduler.preemption.victims import StartedJob
from genie.scheduler.request import Allocation, JobRequest, NodeFacts, WorkerPlace
from genie.scheduler.rules import Rules
from genie.scheduler.scheduling_pass import SchedulingPass


class Scheduler:
    """The same calls in the same order return the same decisions."""

    def __init__(self, allocations: ClusterAllocations, rules: Rules) -> None:
        self.allocations = allocations
        self.job_table = JobTable(allocations, rules)
        self._seen_policy_fault = self.policy_fault
        allocations.set_node_filter(rules.node_filter)

    @property
    def rules(self) -> Rules:
        return self.job_table.rules

    @property
    def policy_fault(self) -> str:
        """Why the user's policy was disabled and a built-in one replaces it; empty while it works."""
        order = self.job_table.rules.order
        return order.disabled_reason if isinstance(order, IsolatedPolicy) else ""

    @property
    def queued_requests(self) -> list[JobRequest]:
        return [job.request for job in self.job_table.queued_jobs.values()]

    @property
    def requests_and_queue_groups(self) -> list[tuple[JobRequest, QueueGroupKey]]:
        """The queued jobs, each with the key of its group."""
        return [(job.request, job.queue_group_key) for job in self.job_table.queued_jobs.values()]

    @property
    def last_wait_decisions(self) -> list[Wait]:
        """The last decision about each queued job."""
        return [job.last_decision for job in self.job_table.queued_jobs.values()]

    @property
    def queue_group_count(self) -> int:
        """Number of groups of equal jobs in the queue; a pass considers each."""
        return len(self.job_table.queue)

    def has_queue_group_of(self, request: JobRequest) -> bool:
        """Whether a job of the same group is queued."""
        return self.job_table.queue.has_group(
            request.tenant, (self.job_table.job_class_numbers.get_number(request), request.priority)
        )

    def is_queued(self, job_id: str) -> bool:
        return job_id in self.job_table.queued_jobs

    def is_running(self, job_id: str) -> bool:
        """Whether it holds resources, by a decision or by `record_start`."""
        return job_id in self.job_table.running_jobs

    @property
    def running_jobs(self) -> list[StartedJob]:
        return list(self.job_table.running_jobs.values())

    @property
    def reservation(self) -> Reservation | None:
        """As of the last pass."""
        return self.job_table.reservation

    @property
    def gpu_reservations(self) -> GpuReservations:
        return self.job_table.gpu_reservations

    def order_inputs(self, now: float) -> OrderInputs:
        return self.job_table.order_inputs(now)

    # -- events -------------------------------------------------------------------------------

    def set_node(self, facts: NodeFacts) -> None:
        """Add or update a node."""
        self.allocations.set_node(facts)
        self.job_table.on_nodes_changed()

    def remove_node(self, node_id: str) -> None:
        """Remove a node. UsageError if a job runs there: it must end first."""
        self.allocations.remove_node(node_id)
        self.job_table.on_nodes_changed()

    def set_rules(self, rules: Rules) -> None:
        """Apply new rules from the next pass on. Running jobs continue; all reservations are dropped and
        all queued jobs are considered again."""
        self.allocations.set_node_filter(rules.node_filter)
        self.job_table.set_rules(rules)
        self._seen_policy_fault = self.policy_fault

    def submit(self, request: JobRequest) -> None:
        if request.job_id in self.job_table.queued_jobs or request.job_id in self.job_table.running_jobs:
            raise UsageError(f"job {request.job_id} already exists")
        self.job_table.enqueue(request)
        self.allocations.record_arrival(request)

    def record_start(self, request: JobRequest, places: tuple[WorkerPlace, ...], started_at: float) -> None:
        """The job runs at these places, even if its nodes have lost resources since its start."""
        self.allocations.hold(request, places, is_running=True)
        self.job_table.dequeue(request.job_id)
        self.job_table.add_running_job(request, started_at)
        self.job_table.require_full_pass()

    def retain_only_workers_at(self, job_id: str, places: tuple[WorkerPlace, ...]) -> None:
        """Only the workers at these places still run; the others have ended."""
        running = self.job_table.running_jobs[job_id]
        self.allocations.release(job_id)
        self.allocations.hold(running.request, places, is_running=True)
        allocation = Allocation(running.request, places)
        self.job_table.running_jobs[job_id] = msgspec.structs.replace(running, allocation=allocation)
        self.job_table.require_full_pass()

    def mark_stopping(self, job_id: str, ends_at: float) -> None:
        """A running job is being stopped and ends at `ends_at` at the latest."""
        running = self.job_table.running_jobs[job_id]
        self.job_table.running_jobs[job_id] = msgspec.structs.replace(
            running, ends_at=min(running.ends_at, ends_at), is_stopping=True
        )

    def withdraw(self, job_id: str) -> None:
        """Remove a job from the queue; does nothing if it is not queued."""
        self.job_table.dequeue(job_id)
        self.job_table.migration_count_by_job.pop(job_id, None)
        self.job_table.drop_reservation(job_id)
        self.job_table.require_full_pass()

    def record_end(self, job_id: str, *, requeue: bool = False) -> None:
        """Release what the job holds. `requeue`: queue it again, as after a preemption."""
        self.job_table.end_job(job_id, requeue=requeue)

    # -- decisions ----------------------------------------------------------------------------

    def decide(self, now: float) -> list[Decision]:
        """Run a scheduling pass. Returns a Wait only for jobs whose pending reason or start time changed."""
        if (
            self.policy_fault != self._seen_policy_fault
        ):  # the policy was disabled: discard what its order and filter returned
            self.set_rules(self.job_table.rules)
        return SchedulingPass(self.job_table, now).run()

    def try_start_now(self, request: JobRequest, now: float) -> Start | None:
        """Start a new job without a pass. Returns None, and changes nothing, if jobs are queued, anything is
        reserved, or the job does not fit. `record_end` reverts it."""
        jobs = self.job_table
        is_idle = not jobs.queued_jobs and jobs.reservation is None and not len(jobs.gpu_reservations)
        if not is_idle or request.near_job_names or isinstance(jobs.rules.order, IsolatedPolicy):
            return None
        start = SchedulingPass(jobs, now).try_start(request, "fits")
        if start is not None:
            self.allocations.record_arrival(request)
        return start
