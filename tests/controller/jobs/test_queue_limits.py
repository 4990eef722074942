"""Limits on the number of pending jobs: what is refused, and until when."""

from __future__ import annotations

import msgspec
import pytest

from genie.config import ControllerConfig
from genie.controller.jobs.index import StagedIndex
from genie.controller.jobs.queue_limits import RETRY_AFTER_S_MAX, RETRY_AFTER_S_MIN, QueueLimits
from genie.errors import QueueFullError
from genie.model.job import Job, JobState
from tests.controller.running_controller import job_spec
from tests.fakes.clock import FakeClock

QUEUE_MAX = 1000


class FullQueue:
    """A queue of some tenants, full by default, whose jobs leave it and are replaced."""

    def __init__(self, *, tenants: int = 10, jobs: int = QUEUE_MAX) -> None:
        self.clock = FakeClock()
        self._pending = StagedIndex()
        self._limits = QueueLimits(ControllerConfig(queue_max=QUEUE_MAX), self._pending, clock=self.clock)
        for number in range(jobs):
            self._change(None, _make_job(f"j-{number}", tenant=f"tenant-{number % tenants}"))

    def replace_jobs(self, count: int) -> None:
        for number in range(count):
            job = _make_job(f"j-{number}", tenant="tenant-0")
            self._change(job, msgspec.structs.replace(job, state=JobState.PLACING))
            self._change(None, job)

    def check_accepted(self, tenant: str) -> None:
        self._limits.check_submission(tenant)

    def retry_after_s(self, tenant: str = "other") -> float:
        with pytest.raises(QueueFullError) as caught:
            self._limits.check_submission(tenant)
        assert f"try again in {caught.value.retry_after_s:g} s" in str(caught.value)
        return caught.value.retry_after_s

    def _change(self, before: Job | None, after: Job) -> None:
        self._pending.update(after.job_id, before, after)
        self._limits.on_job_changed(after.job_id, before, after)


def _make_job(job_id: str, *, tenant: str) -> Job:
    return Job(
        job_id=job_id,
        tenant=tenant,
        owner="",
        spec=job_spec(),
        state=JobState.QUEUED,
        reason="",
        submitted_at=0.0,
        sequence=0,
    )


async def test_retry_time_follows_the_rate_at_which_jobs_leave_the_queue() -> None:
    queue = FullQueue()
    assert queue.retry_after_s() == RETRY_AFTER_S_MAX, "no job has left it"
    queue.replace_jobs(20)  # in five seconds: 10 places, a hundredth of the queue, take 2.5 s
    assert queue.retry_after_s() == 2.5
    queue.replace_jobs(480)
    assert queue.retry_after_s() == RETRY_AFTER_S_MIN
    await queue.clock.advance(4.0)
    assert queue.retry_after_s() == RETRY_AFTER_S_MIN, "they left within the last seconds"
    await queue.clock.advance(2.0)
    assert queue.retry_after_s() == RETRY_AFTER_S_MAX, "the queue has stopped moving"


async def test_tenant_that_has_used_its_share_of_the_queue_gets_a_retry_time() -> None:
    queue = FullQueue(tenants=1, jobs=QUEUE_MAX * 9 // 10)
    queue.check_accepted("other")
    assert queue.retry_after_s("tenant-0") == RETRY_AFTER_S_MAX
    queue.replace_jobs(20)
    assert queue.retry_after_s("tenant-0") == 2.5


async def test_jobs_that_stay_in_the_queue_do_not_shorten_the_retry_time() -> None:
    queue = FullQueue()
    job = _make_job("j-1", tenant="tenant-1")
    for number in range(500):
        queue._change(job, msgspec.structs.replace(job, reason=f"reason {number}"))
    assert queue.retry_after_s() == RETRY_AFTER_S_MAX
