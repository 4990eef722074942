"""Planted defects in the adoption of running jobs by a restarted agent (defects.py)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from genie.agent.jobs import NodeJobs
from genie.agent.journal import JobRecord, Journal
from genie.agent.leftovers import AdoptedJob
from genie.controller.nodes.agents import Agents
from genie.model.messages import Register
from genie.sim.processes import SimLauncher
from tests.sim.defect import Defect


def _plant_jobs_that_are_not_adopted(patch: pytest.MonkeyPatch) -> None:
    """A restarted agent ends the jobs of its node."""
    patch.setattr(NodeJobs, "_is_last_launch", lambda self, record: False)


def _plant_registration_that_ends_adopted_jobs(patch: pytest.MonkeyPatch) -> None:
    """A leader ends all jobs of earlier incarnations."""
    real = Agents._end_jobs_of_earlier_incarnations

    async def end_jobs(self: Agents, node_id: str, request: Register) -> None:
        await real(self, node_id, Register(node=request.node, exits=request.exits))

    patch.setattr(Agents, "_end_jobs_of_earlier_incarnations", end_jobs)


def _plant_jobs_kept_without_adoption(patch: pytest.MonkeyPatch) -> None:
    """An agent reports jobs as running whose processes it has not adopted."""
    real = SimLauncher.adopt_jobs_and_kill_leftovers

    async def adopt(
        self: SimLauncher, jobs_dir: Path, *, may_adopt: Callable[[JobRecord], bool]
    ) -> tuple[list[AdoptedJob], int]:
        adopted, count = await real(self, jobs_dir, may_adopt=may_adopt)
        journal = Journal(jobs_dir.parent)
        found = {job.record.job_id for job in adopted} | journal.unsettled_exits().keys()
        records = [
            record
            for job_id in journal.list_job_ids()
            if job_id not in found and not (journal.job_dir(job_id) / "settled.json").exists()
            if (record := journal.read_job_record(job_id)) is not None
        ]
        return [*adopted, *(_make_adopted_job(record) for record in records)], count

    patch.setattr(SimLauncher, "adopt_jobs_and_kill_leftovers", adopt)


def _make_adopted_job(record: JobRecord) -> AdoptedJob:
    return AdoptedJob(record=record, started_s=0.0, kill_reason="")


def _plant_dead_man_timers_extended_by_a_restart(patch: pytest.MonkeyPatch) -> None:
    """A restarted agent extends the dead-man timers before a leader has acknowledged its heartbeat."""
    real = NodeJobs.adopt_jobs_and_kill_leftovers

    async def adopt(self: NodeJobs) -> int:
        count = await real(self)
        self._launcher.extend_deadman_timers(self._clock.monotonic_s() + 60.0)
        return count

    patch.setattr(NodeJobs, "adopt_jobs_and_kill_leftovers", adopt)


def _plant_launches_that_a_restart_forgets(patch: pytest.MonkeyPatch) -> None:
    """A restarted agent does not start what the leader has confirmed to the earlier one."""
    patch.setattr(Journal, "take_prepared_launches", lambda self, *, boot_id: [])


ADOPTION_DEFECTS = {
    "jobs that are not adopted": Defect(
        _plant_jobs_that_are_not_adopted, "skew", ("upgrade_node",), (3, 4), "without a fault"
    ),
    "registration that ends adopted jobs": Defect(
        _plant_registration_that_ends_adopted_jobs, "skew", ("upgrade_node",), (3, 4), "without a fault"
    ),
    "jobs kept without adoption": Defect(
        _plant_jobs_kept_without_adoption, "power", ("power_node",), (0, 1), "have not ended"
    ),
    "dead-man timers extended by a restart": Defect(
        _plant_dead_man_timers_extended_by_a_restart,
        "outage",
        ("isolate_node", "restart_repeatedly"),
        (8, 31, 33),
        "of another epoch",
    ),
    "launches that a restart forgets": Defect(
        _plant_launches_that_a_restart_forgets, "recovery", ("restart_agents",), (14,), "without a fault"
    ),
}
