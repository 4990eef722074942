"""Changes to the cluster that are tried and reverted: what would fit if some jobs ended."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from genie.errors import UsageError
from genie.scheduler.cluster.placer_group import HoldChange, PlacedHold, PlacerGroup
from genie.scheduler.placement.protocol import Placer
from genie.scheduler.request import Allocation, JobRequest, WorkerPlace

GetHold = Callable[[JobRequest, WorkerPlace], PlacedHold]
"""Returns what a worker of a running job holds at a place."""


class DryRun:
    """Created by ClusterAllocations.dry_run, which reverts it."""

    def __init__(self, placers: PlacerGroup, placer: Placer, get_hold: GetHold) -> None:
        self._placer_group = placers
        self._changed_placer = placer
        self._get_hold = get_hold
        self._applied_changes: list[HoldChange] = []

    def release(self, allocation: Allocation) -> None:
        request = allocation.request
        for place in allocation.places:
            self._apply_and_record((False, request.tenant, self._get_hold(request, place)))

    def place(
        self, request: JobRequest, workers: int, *, excluded_nodes: Collection[str] = ()
    ) -> tuple[WorkerPlace, ...] | None:
        places = self._placer_group.place(self._changed_placer, request, workers, workers, excluded_nodes)
        self._applied_changes += [
            (True, request.tenant, (request.shape.without_constraints, place)) for place in places or ()
        ]
        return places

    def try_hold(self, request: JobRequest, places: Sequence[WorkerPlace]) -> bool:
        """Take these places; False, and no change, if one is not free."""
        mark = self.savepoint
        try:
            for place in places:
                self._apply_and_record((True, request.tenant, (request.shape.without_constraints, place)))
        except UsageError:
            self.roll_back_to(mark)
            return False
        return True

    @property
    def savepoint(self) -> int:
        """The current position, for `roll_back_to`."""
        return len(self._applied_changes)

    def roll_back_to(self, savepoint: int = 0) -> None:
        """Revert all changes after `savepoint`."""
        while len(self._applied_changes) > savepoint:
            taken, tenant, hold = self._applied_changes.pop()
            self._apply_change((not taken, tenant, hold))

    def fewest_releases_to_fit(
        self, request: JobRequest, allocations_to_release: Sequence[Allocation]
    ) -> int | None:
        """Return how many of the first allocations must be released so that the request fits; None if all are
        not enough. Leaves exactly those released.

        More releases never make a request not fit, so the number is found by doubling and bisection.
        """
        marks = [self.savepoint]

        def fits(count: int) -> bool:
            self.roll_back_to(marks[min(count, len(marks) - 1)])
            del marks[count + 1 :]
            for allocation in allocations_to_release[len(marks) - 1 : count]:
                self.release(allocation)
                marks.append(self.savepoint)
            places = self.place(request, request.workers_required)
            self.roll_back_to(marks[count])
            return places is not None

        low, high = 0, min(1, len(allocations_to_release))
        while not fits(high):
            if high == len(allocations_to_release):
                return None
            low, high = high, min(2 * high, len(allocations_to_release))
        while low + 1 < high:
            middle = (low + high) // 2
            low, high = (low, middle) if fits(middle) else (middle, high)
        assert fits(high)
        return high

    def _apply_and_record(self, change: HoldChange) -> None:
        self._apply_change(change)
        self._applied_changes.append(change)

    def _apply_change(self, change: HoldChange) -> None:
        taken, tenant, hold = change
        if taken:
            self._placer_group.take_hold(self._changed_placer, tenant, hold)
        else:
            self._placer_group.release_hold(self._changed_placer, hold)


class FutureClusterState(DryRun):
    """The cluster at a later time. Real changes made meanwhile are deferred until `reset_to_present`."""

    def __init__(self, placers: PlacerGroup, get_hold: GetHold) -> None:
        super().__init__(placers, placers.projection_placer, get_hold)
        self._deferred_changes = placers.begin_projection()

    def reset_to_present(self) -> None:
        """Revert the projection and apply the deferred changes: the state is the current one."""
        self.roll_back_to()
        for change in self._deferred_changes:
            self._apply_change(change)
        self._deferred_changes.clear()

    def close(self) -> None:
        self.reset_to_present()
        self._placer_group.end_projection()
