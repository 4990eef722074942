"""Runs scheduling passes: runs the planner, records its decisions, and launches placed jobs.

Jobs that were placed at their submission are launched here, too. Not responsible for the decisions
(placement/planner.py) and their transactions (jobs/launches.py).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence

from genie.controller.jobs.catalog import JobCatalog
from genie.controller.jobs.launches import JobLaunches
from genie.controller.jobs.lifecycle import JobLifecycle
from genie.controller.ledger import Ledger
from genie.controller.nodes.agents import Agents
from genie.controller.placement.launch_queue import LaunchQueue
from genie.controller.placement.planner import Planner
from genie.model.job import Job, JobState, StopReason
from genie.scheduler.decisions import Preempt, Start, Wait

_log = logging.getLogger(__name__)

_JOBS_LOGGED_MAX = 8
_CACHE_REFRESHES_PER_PASS_MAX = 8
"""Refreshes after a pass: a large cluster needs several, and the next pass must not wait long for them."""


class PassRunner:
    def __init__(
        self,
        ledger: Ledger,
        planner: Planner,
        jobs: JobCatalog,
        job_launches: JobLaunches,
        lifecycle: JobLifecycle,
        agents: Agents,
        launches: LaunchQueue,
    ) -> None:
        self._ledger = ledger
        self._planner = planner
        self._jobs = jobs
        self._job_launches = job_launches
        self._lifecycle = lifecycle
        self._agents = agents
        self._launch_queue = launches
        self._unlogged_launches: list[Job] = []
        """Not logged yet."""
        self._logged_policy_fault = ""
        ledger.jobs.add_listener(self._on_job_changed)

    async def run(self) -> None:
        """Run one scheduling pass."""
        decisions = self._planner.place()
        self._log_policy_fault()
        starts = [each for each in decisions if isinstance(each, Start)]
        for decision in decisions:
            if isinstance(decision, Wait):
                self._jobs.set_pending_reason(decision.job_id, decision.reason)
        try:
            await self._record_starts(starts)
            await self._preempt([each for each in decisions if isinstance(each, Preempt)])
        except Exception:
            self._planner.invalidate()  # decisions that were not carried out must not count
            raise
        finally:
            self._planner.undo_unrecorded_pass_starts(start.job_id for start in starts)
        await self._refresh_planner_caches()

    async def stop_jobs(self, jobs: Iterable[tuple[Job, str]], stop_kind: StopReason) -> list[Job]:
        """Mark running jobs, each with a reason, and send the kills to their agents. Return those that were
        marked."""
        stopping = await self._lifecycle.mark_jobs_stopping(jobs, stop_kind)
        for job in stopping:
            self._agents.send_kills(job)
        return stopping

    def log_launches(self) -> None:
        """Log the jobs that were launched since the last call."""
        jobs, self._unlogged_launches = self._unlogged_launches, []
        if len(jobs) > _JOBS_LOGGED_MAX:
            # One line per job would cost more than placing it.
            _log.info("placed %d jobs since the last log of placements", len(jobs))
            return
        for job in jobs:
            _log.info("placed job %s: %s", job.job_id, job.reason)

    async def _refresh_planner_caches(self) -> None:
        """Refresh the planner's caches; requests are answered between the parts."""
        for _ in range(_CACHE_REFRESHES_PER_PASS_MAX):
            if self._planner.refresh_caches():
                return
            await asyncio.sleep(0)

    async def _record_starts(self, starts: list[Start]) -> None:
        placed: list[Job] = []
        try:
            with self._launch_queue.reserve_capacity(sum(len(start.places) for start in starts)):
                await self._job_launches.record_starts(starts, on_placed=placed.append)
        finally:
            # All starts of the pass together, so that each node gets one message.
            self._launch_queue.add(placed)
            self._launch_placed_jobs()

    async def _preempt(self, decisions: Sequence[Preempt]) -> None:
        found = [(self._jobs.get(each.job_id), each.reason) for each in decisions]
        jobs = [(job, reason) for job, reason in found if job is not None]
        for job, reason in jobs[:_JOBS_LOGGED_MAX]:
            _log.info("stopping job %s: %s", job.job_id, reason)
        if len(jobs) > _JOBS_LOGGED_MAX:
            _log.info("stopping %d more jobs", len(jobs) - _JOBS_LOGGED_MAX)
        await self._lifecycle.requeue_unconfirmed_jobs(
            each for each in jobs if each[0].state is JobState.PLACING
        )
        # No effect on a job that was just queued again; but its launch may have been confirmed meanwhile.
        await self.stop_jobs(jobs, StopReason.PREEMPT)
        if any(self._ledger.jobs.prefix + job.job_id in self._ledger.quarantined for job, _ in jobs):
            self._planner.invalidate()  # it was not stopped

    def _on_job_changed(self, job_id: str, before: Job | None, after: Job | None) -> None:
        """Launch a job that was placed at its submission, together with the others of its transaction."""
        if before is None and after is not None and after.state is JobState.PLACING:
            if self._launch_queue.is_empty:
                asyncio.get_running_loop().call_soon(self._launch_placed_jobs)
            self._launch_queue.add((after,))

    def _launch_placed_jobs(self) -> None:
        jobs = self._launch_queue.take_all()
        self._agents.send_launches(jobs)
        self._unlogged_launches.extend(jobs)

    def _log_policy_fault(self) -> None:
        if self._planner.policy_fault != self._logged_policy_fault:
            self._logged_policy_fault = self._planner.policy_fault
            _log.error("custom scheduling policy: %s", self._logged_policy_fault)
