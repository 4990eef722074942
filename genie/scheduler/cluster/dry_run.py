"""Changes to the cluster that are tried and reverted: what would fit if some jobs ended."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from genie.errors import UsageError
from genie.scheduler.cluster.placer_group import Change, Hold, PlacerGroup
from genie.scheduler.placement.protocol import Placer
from genie.scheduler.request import Allocation, JobRequest, WorkerPlace

GetHold = Callable[[JobRequest, WorkerPlace], Hold]
"""Returns what a worker of a running job holds at a place."""


class DryRun:
    """Created by ClusterAllocations.dry_run, which reverts it."""

    def __init__(self, placers: PlacerGroup, placer: Placer, get_hold: GetHold) -> None:
        self._placers = placers
        self._placer = placer
        self._get_hold = get_hold
        self._changes: list[Change] = []

    def release(self, allocation: Allocation) -> None:
        request = allocation.request
        for place in allocation.places:
            self._change((False, request.tenant, self._get_hold(request, place)))

    def place(
        self, request: JobRequest, workers: int, *, avoiding: Collection[str] = ()
    ) -> tuple[WorkerPlace, ...] | None:
        places = self._placers.place(self._placer, request, workers, workers, avoiding)
        self._changes += [
            (True, request.tenant, (request.shape.without_constraints, place)) for place in places or ()
        ]
        return places

    def hold(self, request: JobRequest, places: Sequence[WorkerPlace]) -> bool:
        """Take these places; False, and no change, if one is not free."""
        mark = self.mark
        try:
            for place in places:
                self._change((True, request.tenant, (request.shape.without_constraints, place)))
        except UsageError:
            self.undo(mark)
            return False
        return True

    @property
    def mark(self) -> int:
        """The current position, for `undo`."""
        return len(self._changes)

    def undo(self, mark: int = 0) -> None:
        """Revert all changes after `mark`."""
        while len(self._changes) > mark:
            taken, tenant, hold = self._changes.pop()
            self._apply((not taken, tenant, hold))

    def fewest_releases(self, request: JobRequest, ends: Sequence[Allocation]) -> int | None:
        """Return how many of the first allocations must be released so that the request fits; None if all are
        not enough. Leaves exactly those released.

        More releases never make a request not fit, so the number is found by doubling and bisection.
        """
        marks = [self.mark]

        def fits(count: int) -> bool:
            self.undo(marks[min(count, len(marks) - 1)])
            del marks[count + 1 :]
            for allocation in ends[len(marks) - 1 : count]:
                self.release(allocation)
                marks.append(self.mark)
            places = self.place(request, request.least_workers)
            self.undo(marks[count])
            return places is not None

        low, high = 0, min(1, len(ends))
        while not fits(high):
            if high == len(ends):
                return None
            low, high = high, min(2 * high, len(ends))
        while low + 1 < high:
            middle = (low + high) // 2
            low, high = (low, middle) if fits(middle) else (middle, high)
        assert fits(high)
        return high

    def _change(self, change: Change) -> None:
        self._apply(change)
        self._changes.append(change)

    def _apply(self, change: Change) -> None:
        taken, tenant, hold = change
        if taken:
            self._placers.take(self._placer, tenant, hold)
        else:
            self._placers.release(self._placer, hold)


class FutureClusterState(DryRun):
    """The cluster at a later time. Real changes made meanwhile are deferred until `reset`."""

    def __init__(self, placers: PlacerGroup, get_hold: GetHold) -> None:
        super().__init__(placers, placers.projected, get_hold)
        self._deferred = placers.begin_projection()

    def reset(self) -> None:
        """Revert the projection and apply the deferred changes: the state is the current one."""
        self.undo()
        for change in self._deferred:
            self._apply(change)
        self._deferred.clear()

    def close(self) -> None:
        self.reset()
        self._placers.end_projection()
