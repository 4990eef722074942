"""Holds: what the workers on one node hold. Written as a whole by compare-and-swap."""

from __future__ import annotations

import msgspec

from genie.model.record import Record

# gc=False below: for the reason, see job.py.

FULL_MILLI = 1000


class Hold(Record, frozen=True, kw_only=True, gc=False):
    """What one worker holds on its node. `job_id` is the name of the worker (`Job.worker_name`)."""

    job_id: str
    tenant: str
    epoch: int
    incarnation: int
    gpu_ids: tuple[int, ...] = ()
    gpu_milli: int = FULL_MILLI
    cpus: float = 0.0
    memory_bytes: int = 0
    has_deadman_timer: bool = msgspec.field(default=True, name="deadman")
    """Whether the worker was launched with a dead-man timer. One without it may run as long as its node is
    silent, so its resources are not reclaimed until the node returns or is removed."""


class NodeHolds(Record, frozen=True, kw_only=True, gc=False):
    """All holds on one node. There is one store key per node, so one comparison protects all."""

    node_id: str
    holds: tuple[Hold, ...] = ()

    @property
    def reclaimable_holds(self) -> tuple[Hold, ...]:
        """The holds of workers that have ended for certain when the dead-man time of the node is over."""
        return tuple([hold for hold in self.holds if hold.has_deadman_timer])

    @property
    def withheld_holds(self) -> tuple[Hold, ...]:
        """The holds of workers that may run as long as the node is silent."""
        return tuple([hold for hold in self.holds if not hold.has_deadman_timer])

    def gpu_used_milli(self, gpu_id: int) -> int:
        return sum([hold.gpu_milli for hold in self.holds if gpu_id in hold.gpu_ids])

    @property
    def cpus_used(self) -> float:
        return sum(hold.cpus for hold in self.holds)

    @property
    def memory_used_bytes(self) -> int:
        return sum(hold.memory_bytes for hold in self.holds)

    def with_hold(self, hold: Hold) -> NodeHolds:
        """These and one more hold; more than 100% of an accelerator is a bug of the scheduler."""
        after = NodeHolds(node_id=self.node_id, holds=(*self.holds, hold))
        for gpu_id in hold.gpu_ids:
            assert after.gpu_used_milli(gpu_id) <= FULL_MILLI, f"{self.node_id}/{gpu_id} over-allocated"
        return after

    def without_worker(self, worker_name: str, *, epoch: int) -> NodeHolds:
        """These without the hold of this placement of the worker; those of its other placements stay. The
        same object if there is none."""
        kept = tuple([hold for hold in self.holds if hold.job_id != worker_name or hold.epoch != epoch])
        if len(kept) == len(self.holds):
            return self
        return NodeHolds(node_id=self.node_id, holds=kept)
