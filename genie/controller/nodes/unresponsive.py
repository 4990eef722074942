"""Describes for users what happens to the jobs of nodes that do not respond.

A worker without a dead-man timer may still run there, so its resources stay allocated until the node returns
or is removed. When workers are reclaimed is decided in agents.py.
"""

from __future__ import annotations

import math

from genie.controller.ledger import Ledger
from genie.controller.nodes.membership import Membership
from genie.model.allocation import NodeHolds
from genie.model.job import Job, JobState, parse_worker_name
from genie.processes.clock import Clock

_ALARMS_MAX = 5


class UnresponsiveNodes:
    def __init__(self, ledger: Ledger, membership: Membership, *, clock: Clock) -> None:
        self._ledger = ledger
        self._membership = membership
        self._clock = clock

    def describe_effect_on_job(self, job: Job) -> str:
        """Return which node of a running job does not respond, and what follows; empty if all do."""
        if job.state is not JobState.RUNNING:
            return ""
        now_s = self._clock.monotonic_s()
        for rank, placement in enumerate(job.placements):
            node_id = placement.node_id
            if placement.outcome is None and self._membership.is_disconnected(node_id, now_s):
                is_withheld = self._is_withheld(node_id, job.worker_name(rank))
                return f"{self._describe_silence(node_id, now_s)}; " + _describe_future_of_job(
                    job, node_id, is_withheld=is_withheld
                )
        return ""

    def alarms(self) -> list[str]:
        """Return the nodes without heartbeats whose jobs keep resources, for the owner."""
        now_s = self._clock.monotonic_s()
        found: list[str] = []
        if not self._ledger.is_up_to_date:
            return found
        for node_id, held in self._ledger.holds.items():
            if len(found) == _ALARMS_MAX:
                break
            if held.withheld_holds and self._membership.is_disconnected(node_id, now_s):
                found.append(f"{self._describe_silence(node_id, now_s)}; {describe_withheld_jobs(held)}")
        return found

    def _describe_silence(self, node_id: str, now_s: float) -> str:
        silence_s = math.floor(self._membership.time_since_heartbeat_s(node_id, now_s))
        return f"node {node_id} has not responded for {silence_s} s"

    def _is_withheld(self, node_id: str, worker_name: str) -> bool:
        held = self._ledger.holds.get(node_id)
        return held is not None and any(hold.job_id == worker_name for hold in held.withheld_holds)


def describe_withheld_jobs(node_holds: NodeHolds) -> str:
    """Return how many jobs keep their resources while the node does not respond; empty if none does."""
    withheld = node_holds.withheld_holds
    job_ids = {parse_worker_name(hold.job_id)[0] for hold in withheld}
    if not job_ids:
        return ""
    jobs_with_gpus = {parse_worker_name(hold.job_id)[0] for hold in withheld if hold.gpu_ids}
    what = "accelerators" if jobs_with_gpus == job_ids else "resources"
    jobs = f"its job keeps its {what}" if len(job_ids) == 1 else f"its {len(job_ids)} jobs keep their {what}"
    return f"{jobs} until the node returns or 'genie forget {node_holds.node_id}'"


def _describe_future_of_job(job: Job, node_id: str, *, is_withheld: bool) -> str:
    if is_withheld and job.stop:
        return f"the job ends when the node returns, or with 'genie forget {node_id}'"
    if is_withheld:
        what = "accelerators" if job.spec.resources.gpus else "resources"
        return f"the job keeps its {what} until the node returns or 'genie forget {node_id}'"
    if job.spec.is_restartable and not job.stop:
        return "the job ends there and is queued again"
    return "the job ends there"
