"""Who holds what: the ledger's entry for one node. Compared and swapped as a whole."""

from __future__ import annotations

import msgspec

from genie.model.record import Record

# gc=False below: for the reason, see job.py.

FULL_MILLI = 1000


class Hold(Record, frozen=True, kw_only=True, gc=False):
    """One job's grip on one node's resources."""

    job_id: str
    tenant: str
    epoch: int
    incarnation: int
    gpu_ids: tuple[int, ...] = ()
    gpu_milli: int = FULL_MILLI
    cpus: float = 0.0
    memory_bytes: int = 0


class NodeLedger(Record, frozen=True, kw_only=True, gc=False):
    """Everything that is held on one node. One store key per node, so one compare guards it all."""

    node_id: str
    holds: tuple[Hold, ...] = ()

    def gpu_used_milli(self, gpu_id: int) -> int:
        return sum(hold.gpu_milli for hold in self.holds if gpu_id in hold.gpu_ids)

    @property
    def cpus_used(self) -> float:
        return sum(hold.cpus for hold in self.holds)

    @property
    def memory_used_bytes(self) -> int:
        return sum(hold.memory_bytes for hold in self.holds)

    def with_hold(self, hold: Hold) -> NodeLedger:
        """The ledger with one more hold; over 100% of an accelerator is a bug in the decider."""
        after = msgspec.structs.replace(self, holds=(*self.holds, hold))
        for gpu_id in hold.gpu_ids:
            assert after.gpu_used_milli(gpu_id) <= FULL_MILLI, f"{self.node_id}/{gpu_id} over-allocated"
        return after

    def without_job(self, job_id: str) -> NodeLedger:
        return msgspec.structs.replace(
            self, holds=tuple(hold for hold in self.holds if hold.job_id != job_id)
        )
