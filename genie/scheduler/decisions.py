"""The decisions of a scheduling pass. Each carries its reason."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import msgspec

from genie.scheduler.request import WorkerPlace


class Start(msgspec.Struct, frozen=True):
    """Start the job at these places."""

    job_id: str
    places: tuple[WorkerPlace, ...]
    reason: str


@dataclass(frozen=True)
class Preempt:
    """Stop the job so that `preempting_job_id` can start; `grace_s` is its grace period."""

    job_id: str
    preempting_job_id: str
    grace_s: float
    reason: str


@dataclass(frozen=True)
class Wait:
    """The job stays queued. `starts_at` is the start of its reservation; None if it has none."""

    job_id: str
    reason: str
    starts_at: float | None = None


Decision: TypeAlias = Start | Preempt | Wait
