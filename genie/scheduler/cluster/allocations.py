"""The nodes of the cluster and what each job and tenant holds.

Placers (placer_group.py) choose the places; this module accounts for them and explains what does not fit.
Does not order jobs (scheduling_pass.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar

from genie.errors import UsageError
from genie.scheduler.cluster.dry_run import DryRun, FutureClusterState
from genie.scheduler.cluster.filters import NodeFilter, without_volatile_facts
from genie.scheduler.cluster.placer_group import (
    PlacedHold,
    PlacerFactory,
    PlacerGroup,
    PlacerNode,
    make_affinity_filter,
)
from genie.scheduler.placement.python_placer import PythonPlacer
from genie.scheduler.quota import UNBOUNDED, ResourceClaim
from genie.scheduler.request import Allocation, Amounts, JobRequest, NodeFacts, WorkerPlace, why_unsuitable

_CountedKey = TypeVar("_CountedKey", bound=Hashable)

_ZERO_AMOUNTS = Amounts()
_PLACE_ATTEMPTS_MAX = 8
"""Attempts to find places that do not exceed the workers per node."""


class ClusterAllocations:
    """The same calls in the same order return the same results."""

    def __init__(
        self, make_placer: PlacerFactory, *, policy: str, workers_per_node_max: int = UNBOUNDED
    ) -> None:
        """`workers_per_node_max` is the maximum number of workers per node, whatever they hold."""
        self.workers_per_node_max = workers_per_node_max
        self.full_nodes_version = 0
        """Grows whenever a node reaches or leaves its maximum number of workers."""
        self.placers = PlacerGroup(make_placer, policy=policy)
        self._nodes = self.placers.nodes
        self._reserved_gpus_by_node: dict[str, set[int]] = {}
        self._allocations_by_job: dict[str, Allocation] = {}
        self._reduced_holds: dict[tuple[str, WorkerPlace], PlacedHold] = {}
        """What remains of the holds of jobs at places that have lost resources."""
        self._usage_by_tenant: dict[str, Amounts] = {}
        self._nonpreemptible_usage_by_tenant: dict[str, Amounts] = {}
        self.capacity = Amounts()

    # -- reading ------------------------------------------------------------------------------

    @property
    def allocations_by_job(self) -> dict[str, Allocation]:
        """The allocations by job. Read only."""
        return self._allocations_by_job

    @property
    def uses_python_placer(self) -> bool:
        """Whether the Python placer is used, which examines every node for each choice."""
        return isinstance(self.placers.main_placer, PythonPlacer)

    @property
    def nodes(self) -> list[NodeFacts]:
        return [node.facts for node in self._nodes.values()]

    def usage(self, tenant: str) -> Amounts:
        return self._usage_by_tenant.get(tenant, _ZERO_AMOUNTS)

    def nonpreemptible_usage(self, tenant: str) -> Amounts:
        """Usage of the tenant's jobs that are not preemptible."""
        return self._nonpreemptible_usage_by_tenant.get(tenant, _ZERO_AMOUNTS)

    def claims_of_tenant(self, tenant: str) -> list[ResourceClaim]:
        return [
            (it.request, it.amounts)
            for it in self._allocations_by_job.values()
            if it.request.tenant == tenant
        ]

    def get_node_facts(self, node_id: str) -> NodeFacts | None:
        node = self._nodes.get(node_id)
        return None if node is None else node.facts

    def jobs_on_node(self, node_id: str) -> list[str]:
        """The jobs with a worker on the node."""
        node = self._nodes.get(node_id)
        return [] if node is None else list(node.workers_by_job)

    def jobs_on_gpu(self, node_id: str, gpu: int) -> list[JobRequest]:
        """The jobs that hold the GPU or a fraction of it."""
        return [
            allocation.request
            for allocation in (self._allocations_by_job[job_id] for job_id in self.jobs_on_node(node_id))
            if any(place.node_id == node_id and gpu in place.gpu_ids for place in allocation.places)
        ]

    def reserved_gpus(self, node_id: str) -> frozenset[int]:
        return frozenset(self._reserved_gpus_by_node.get(node_id, ()))

    def free_resources_of_node(self, node_id: str) -> tuple[int, int, tuple[tuple[int, int], ...]]:
        """Free CPU thousandths and memory, and the free fraction and memory of each GPU."""
        _, cpu_milli, memory_mib, gpus = self.placers.main_placer.node_state(self._nodes[node_id].node_number)
        return cpu_milli, memory_mib, tuple((milli, mib) for milli, mib, _ in gpus)

    def accepts_placements(self, place: WorkerPlace) -> bool:
        """Whether the node and GPUs accept placements."""
        if (node := self._nodes.get(place.node_id)) is None or self._is_node_full(node):
            return False
        return not node.facts.blocked_reason and not node.facts.blocked_gpus & set(place.gpu_ids)

    def _is_node_full(self, node: PlacerNode) -> bool:
        return node.worker_count >= self.workers_per_node_max

    # -- reasons ------------------------------------------------------------------------------

    def why_unsuitable(self, request: JobRequest, facts: NodeFacts) -> str:
        """Why the node could not hold one such worker even if it were free; empty if it could."""
        filters = self.placers.filter_cache
        return why_unsuitable(request.shape, facts) or filters.why_node_excluded(
            filters.to_filter_request(request), facts
        )

    def is_suitable_if_open(self, request: JobRequest, facts: NodeFacts) -> bool:
        """Whether the node could hold one such worker if it were free and not blocked."""
        return not self.why_unsuitable(request, replace(facts, blocked_reason=""))

    def why_node_full(self, facts: NodeFacts) -> str:
        """Why the node accepts no further worker; empty if it does."""
        if not self._is_node_full(self._nodes[facts.node_id]):
            return ""
        return f"runs {self.workers_per_node_max} workers, the maximum per node (controller.node_workers_max)"

    def why_affinity_unsatisfied(self, request: JobRequest) -> str:
        """Why no node meets the `near` and `apart` constraints; empty if one does."""
        if not request.near_job_names and not request.apart_job_names:
            return ""
        if any(map(make_affinity_filter(request), self._nodes.values())):
            return ""
        near, apart = (
            " or ".join(sorted(names)) for names in (request.near_job_names, request.apart_job_names)
        )
        if not near:
            return f"every node runs a job named {apart}"
        running = {name for node in self._nodes.values() for name in node.workers_by_job_name}
        if not any((request.tenant, name) in running for name in request.near_job_names):
            return f"no job named {near} is running"
        return f"every node with a job named {near} also runs a job named {apart}"

    def why_node_violates_affinity(self, request: JobRequest, facts: NodeFacts) -> str:
        """Why the node does not meet the `near` and `apart` constraints; empty if it does."""
        node = self._nodes[facts.node_id]
        if (not request.near_job_names and not request.apart_job_names) or make_affinity_filter(request)(
            node
        ):
            return ""
        names = {name for tenant, name in node.workers_by_job_name if tenant == request.tenant}
        if conflicts := sorted(names & request.apart_job_names):
            return f"runs a job named {conflicts[0]}"
        return f"runs no job named {' or '.join(sorted(request.near_job_names))}"

    # -- nodes --------------------------------------------------------------------------------

    def set_node_filter(self, node_filter: NodeFilter | None) -> None:
        self.placers.set_node_filter(node_filter)

    def set_node(self, facts: NodeFacts) -> None:
        """Add or update a node.

        If its resources change, running jobs keep what still exists: nothing of GPUs that are missing, and of
        other resources at most what the node has. Their usage does not change.
        """
        placers, node = self.placers, self._nodes.get(facts.node_id)
        if node is None:
            node = self._nodes[facts.node_id] = PlacerNode(placers.add_node(facts), facts)
            self.capacity += facts.amounts
            is_other = True
        else:
            is_other = (node.facts.amounts, node.facts.gpus) != (facts.amounts, facts.gpus)
            if is_other:
                self._reregister_node(node, facts)
        before, node.facts = node.facts, facts
        if is_other:
            placers.node_sets.clear()
        if is_other or without_volatile_facts(before) != without_volatile_facts(facts):
            placers.filter_cache.forget_node(facts.node_id)
            placers.request_classes.clear()
        if is_other or before.rack != facts.rack:
            placers.drop_rack_node_sets()
        self._update_node_open(node)
        self._update_gpus_open(node)

    def remove_node(self, node_id: str) -> None:
        """UsageError if it does not exist or a job runs there."""
        node = self.placers.get_node(node_id)
        if node.workers_by_job:
            raise UsageError(
                f"cannot remove node {node_id}: job {next(iter(node.workers_by_job))} runs there",
                hint="stop the jobs on the node first",
            )
        self.placers.drop_node(node)
        del self._nodes[node_id]
        self._reserved_gpus_by_node.pop(node_id, None)
        self.placers.filter_cache.forget_node(node_id)
        self.capacity -= node.facts.amounts
        self.placers.node_sets.clear()
        self.placers.request_classes.clear()
        self.placers.drop_rack_node_sets()

    def set_gpus_reserved(self, places: Iterable[WorkerPlace], *, is_reserved: bool) -> None:
        """Nothing is placed on reserved GPUs; jobs there continue, and `hold` may use them."""
        for place in places:
            if (node := self._nodes.get(place.node_id)) is None:
                continue
            reserved, gpus = self._reserved_gpus_by_node.pop(place.node_id, set()), set(place.gpu_ids)
            if reserved := reserved | gpus if is_reserved else reserved - gpus:
                self._reserved_gpus_by_node[place.node_id] = reserved
            self._update_gpus_open(node)

    def _update_node_open(self, node: PlacerNode) -> None:
        self.placers.set_node_open(
            node, is_open=not node.facts.blocked_reason and not self._is_node_full(node)
        )

    def _update_gpus_open(self, node: PlacerNode) -> None:
        self.placers.update_gpus_open(
            node, reserved_gpus=self._reserved_gpus_by_node.get(node.facts.node_id, ())
        )

    def _reregister_node(self, node: PlacerNode, facts: NodeFacts) -> None:
        """Register the node anew with its new resources, and hold what its jobs can keep of them."""
        assert not self.placers.is_projecting, "nodes do not change within a pass"
        running = [
            (self._allocations_by_job[job_id].request, place) for job_id, place in self._workers_on_node(node)
        ]
        for request, place in running:
            self.placers.change_hold_in_all_placers(
                request.tenant, self.get_hold(request, place), is_taken=False
            )
        for request, place in running:
            self._reduced_holds.pop((request.job_id, place), None)
        self.placers.drop_node(node)
        self.capacity += facts.amounts - node.facts.amounts
        node.node_number = self.placers.add_node(facts)
        for (request, place), count in Counter(running).items():
            hold = self._reduce_hold_to_free_resources(request, place, facts, count)
            if hold != (request.shape.without_constraints, place):
                self._reduced_holds[request.job_id, place] = hold
            for _ in range(count):
                self.placers.change_hold_in_all_placers(request.tenant, hold, is_taken=True)

    def _workers_on_node(self, node: PlacerNode) -> list[tuple[str, WorkerPlace]]:
        node_id = node.facts.node_id
        return [
            (job_id, place)
            for job_id in node.workers_by_job
            for place in self._allocations_by_job[job_id].places
            if place.node_id == node_id
        ]

    def _reduce_hold_to_free_resources(
        self, request: JobRequest, place: WorkerPlace, facts: NodeFacts, worker_count: int
    ) -> PlacedHold:
        """Return what each of `worker_count` workers at one place can hold now; all get the same."""
        cpu_milli, memory_mib, gpus = self.free_resources_of_node(place.node_id)
        kept = tuple(gpu for gpu in place.gpu_ids if gpu < len(facts.gpus))
        free_mib = min((gpus[gpu][1] for gpu in kept), default=0)
        whole = request.shape.without_constraints
        shape = replace(
            whole,
            gpus=len(kept),
            gpu_memory_mib=min(whole.gpu_memory_mib, free_mib // worker_count),
            cpu_milli=min(whole.cpu_milli, cpu_milli // worker_count),
            memory_mib=min(whole.memory_mib, memory_mib // worker_count),
        )
        return (whole, place) if shape == whole else (shape, WorkerPlace(place.node_id, kept))

    # -- jobs ---------------------------------------------------------------------------------

    def prepare_placements(self, evaluations_max: int) -> bool:
        """Prepare the next choices, with at most `evaluations_max` evaluations; True if nothing is left to
        prepare."""
        return self.placers.main_placer.precompute(evaluations_max)

    def record_arrival(self, request: JobRequest) -> None:
        """Record an arrival; policies learn from it."""
        self.placers.record_arrival(request)

    def place(
        self,
        request: JobRequest,
        workers: int,
        *,
        workers_min: int | None = None,
        excluded_nodes: Collection[str] = (),
    ) -> tuple[WorkerPlace, ...] | None:
        """Place and hold all workers, or as many as fit if `workers_min` or more do; None if fewer do. Nodes
        in `excluded_nodes` are not used."""
        placers = self.placers
        places = self._place_within_worker_limit(
            request, workers, workers_min or workers, set(excluded_nodes)
        )
        if places is None:
            return None
        for place in places:
            placers.change_hold_in_all_placers(
                request.tenant,
                (request.shape.without_constraints, place),
                is_taken=True,
                skip=placers.main_placer,
            )
        self._record_allocation(request, places)
        return places

    def _place_within_worker_limit(
        self, request: JobRequest, workers: int, workers_min: int, excluded_nodes: set[str]
    ) -> tuple[WorkerPlace, ...] | None:
        """Choose and take places in the main placer without exceeding the workers per node."""
        placers = self.placers
        for _ in range(_PLACE_ATTEMPTS_MAX):
            places = placers.place(placers.main_placer, request, workers, workers_min, excluded_nodes)
            if places is None or not (overfull := self._nodes_exceeding_worker_limit(places)):
                return places
            for place in places:
                placers.release_hold(placers.main_placer, (request.shape.without_constraints, place))
            excluded_nodes |= overfull
        return None

    def _nodes_exceeding_worker_limit(self, places: Sequence[WorkerPlace]) -> set[str]:
        """Nodes that would exceed the maximum number of workers with these."""
        if len(places) == 1:  # a full node is not chosen
            return set()
        more = Counter(place.node_id for place in places)
        return {
            name
            for name, count in more.items()
            if self._nodes[name].worker_count + count > self.workers_per_node_max
        }

    def hold(self, request: JobRequest, places: Sequence[WorkerPlace], *, is_running: bool = False) -> None:
        """Hold exactly these places. UsageError, and no change, if they are not free.

        `is_running`: the job runs there already. It holds what its nodes still have, as in `set_node`.
        """
        if not is_running and self._nodes_exceeding_worker_limit(places):
            raise UsageError(
                f"a node would run more than {self.workers_per_node_max} workers, the maximum per node"
            )
        placers = self.placers
        counts = Counter(places) if is_running else {}
        holds: dict[WorkerPlace, PlacedHold] = {}
        taken: list[PlacedHold] = []
        try:
            for place in sorted(places):  # equal ones together: they get the same
                if place not in holds:
                    facts, whole = (
                        placers.get_node(place.node_id).facts,
                        (request.shape.without_constraints, place),
                    )
                    holds[place] = (
                        self._reduce_hold_to_free_resources(request, place, facts, counts[place])
                        if is_running
                        else whole
                    )
                placers.take_hold(placers.main_placer, request.tenant, holds[place])
                taken.append(holds[place])
        except UsageError:
            for hold in reversed(taken):
                placers.release_hold(placers.main_placer, hold)
            raise
        for hold in taken:
            placers.change_hold_in_all_placers(request.tenant, hold, is_taken=True, skip=placers.main_placer)
        for place, hold in holds.items():
            if hold != (request.shape.without_constraints, place):
                self._reduced_holds[request.job_id, place] = hold
        self._record_allocation(request, tuple(places))

    def release(self, job_id: str) -> Allocation:
        allocation = self._allocations_by_job.pop(job_id)
        request = allocation.request
        for place in allocation.places:
            self.placers.change_hold_in_all_placers(
                request.tenant, self.get_hold(request, place), is_taken=False
            )
            self._add_to_worker_counts(request, place, -1)
        if self._reduced_holds:
            for place in allocation.places:
                self._reduced_holds.pop((job_id, place), None)
        self._add_usage(request, allocation.amounts.multiplied_by(-1))
        return allocation

    def get_hold(self, request: JobRequest, place: WorkerPlace) -> PlacedHold:
        """Return what a worker of a running job holds at the place."""
        whole = (request.shape.without_constraints, place)
        return self._reduced_holds.get((request.job_id, place), whole) if self._reduced_holds else whole

    def _record_allocation(self, request: JobRequest, places: tuple[WorkerPlace, ...]) -> None:
        allocation = self._allocations_by_job[request.job_id] = Allocation(request, places)
        self._add_usage(request, allocation.amounts)
        for place in places:
            self._add_to_worker_counts(request, place, 1)

    def _add_usage(self, request: JobRequest, change: Amounts) -> None:
        self._usage_by_tenant[request.tenant] = self.usage(request.tenant) + change
        if not request.preemptible:
            self._nonpreemptible_usage_by_tenant[request.tenant] = (
                self.nonpreemptible_usage(request.tenant) + change
            )

    def _add_to_worker_counts(self, request: JobRequest, place: WorkerPlace, change: int) -> None:
        node = self._nodes[place.node_id]
        _add_count(node.workers_by_job_name, (request.tenant, request.name), change)
        _add_count(node.workers_by_job, request.job_id, change)
        before, node.worker_count = node.worker_count, node.worker_count + change
        if (before >= self.workers_per_node_max) is not (node.worker_count >= self.workers_per_node_max):
            self.full_nodes_version += 1
            self._update_node_open(node)

    # -- dry runs -----------------------------------------------------------------------------

    @contextmanager
    def dry_run(self) -> Iterator[DryRun]:
        """Try changes to the current state. One at a time; the real state must not change meanwhile."""
        trial = DryRun(self.placers, self.placers.dry_run_placer, self.get_hold)
        try:
            yield trial
        finally:
            trial.roll_back_to()

    @contextmanager
    def project_future(self) -> Iterator[FutureClusterState]:
        """Try changes to a later state. One at a time; the real state may change and dry runs may be made."""
        projection = FutureClusterState(self.placers, self.get_hold)
        try:
            yield projection
        finally:
            projection.close()


def _add_count(counts: dict[_CountedKey, int], key: _CountedKey, change: int) -> None:
    """Counts of 0 are removed."""
    counts[key] = counts.get(key, 0) + change
    if not counts[key]:
        del counts[key]
