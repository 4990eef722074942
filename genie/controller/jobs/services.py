"""Builds the parts that manage jobs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from genie.config import ControllerConfig
from genie.controller.change_notifier import ChangeNotifier
from genie.controller.jobs.backoff import LaunchBackoff
from genie.controller.jobs.catalog import JobCatalog
from genie.controller.jobs.history import JobHistory
from genie.controller.jobs.launches import JobLaunches
from genie.controller.jobs.lifecycle import JobLifecycle, NodeDiskSpace
from genie.controller.jobs.space import JobSpace
from genie.controller.jobs.submission import JobSubmission, SubmissionPlacer
from genie.controller.jobs.transitions import JobTransitions
from genie.controller.ledger import Ledger
from genie.model.job import Job
from genie.processes.clock import Clock


class JobPlacer(SubmissionPlacer, NodeDiskSpace, Protocol):
    """What jobs need from the planner (placement/planner.py)."""


@dataclass(frozen=True, slots=True)
class JobServices:
    catalog: JobCatalog
    submission: JobSubmission
    launches: JobLaunches
    lifecycle: JobLifecycle
    history: JobHistory
    space: JobSpace


def build_job_services(
    ledger: Ledger,
    *,
    config: ControllerConfig,
    clock: Clock,
    random_bytes: Callable[[int], bytes],
    notifier: ChangeNotifier,
    wake: Callable[[], None],
    placer: JobPlacer,
    backoff: LaunchBackoff,
    describe_unresponsive_node: Callable[[Job], str],
) -> JobServices:
    """`placer` places jobs at submission. On every change of a job, `notifier` is notified with the job ID
    and `wake` is called. `describe_unresponsive_node` is that of JobCatalog."""
    catalog = JobCatalog(
        ledger, notifier=notifier, wake=wake, describe_unresponsive_node=describe_unresponsive_node
    )
    space = JobSpace(ledger, config)
    transitions = JobTransitions(ledger, clock=clock)
    launches = JobLaunches(ledger, catalog, transitions, clock=clock, notifier=notifier, backoff=backoff)
    return JobServices(
        catalog=catalog,
        submission=JobSubmission(
            ledger, launches, space, config=config, clock=clock, random_bytes=random_bytes, placer=placer
        ),
        launches=launches,
        lifecycle=JobLifecycle(ledger, transitions, backoff=backoff, disk_space=placer),
        history=JobHistory(ledger, catalog, space, config=config, clock=clock),
        space=space,
    )
