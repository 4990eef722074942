"""Space in the store: limits of tenants, the reserve for the controller's own writes, and the history."""

from __future__ import annotations

from pathlib import Path

import pytest

from genie.config import ControllerConfig
from genie.controller.jobs.space import (
    ALARM_STORE_SHARE_MIN,
    STORE_GROWTH_PER_WRITTEN_BYTE_MAX,
    SUBMISSION_STORE_SHARE_MAX,
    JobSpace,
)
from genie.controller.ledger import Ledger
from genie.controller.store import SpaceUsage
from genie.controller.store.etcd import EtcdStore
from genie.controller.store.protocol import TXN_BYTES_MAX
from genie.controller.store_monitor import StoreMonitor
from genie.errors import SpaceQuotaError
from genie.model.job import Job, JobSpec, JobState
from genie.model.messages import CancelJob, ListJobs
from genie.model.tenant import TokenKind
from genie.sim.store import MemoryStore
from tests.controller.running_controller import Client, RunningController, running_controller
from tests.controller.store.etcd_server import EtcdServer
from tests.fakes.clock import FakeClock
from tests.waiting import until

MIB = 1024 * 1024
HOUSEKEEPING_S = 11.0


def make_large_spec(kib: int = 100) -> JobSpec:
    return JobSpec(name="large", command=("true",), env={"A": "a" * kib * 1024})


async def submit_until_rejected(client: Client) -> int:
    """Submit large jobs until one is rejected; return how many were accepted."""
    for count in range(1000):
        try:
            await client.submit_spec(make_large_spec())
        except SpaceQuotaError:
            return count
    raise AssertionError("no job was rejected")


async def test_tenant_that_fills_its_share_of_the_store_does_not_stop_others(tmp_path: Path) -> None:
    clock = FakeClock()
    store = await MemoryStore.open(clock=clock, bytes_max=8 * MIB)
    async with running_controller(tmp_path, clock=clock, store=store) as one, one.client() as owner:
        red, blue = [await one.token(TokenKind.USER, tenant=name) for name in ("red", "blue")]
        async with one.agent() as agent, one.client(red) as hostile, one.client(blue) as other:
            running = await other.submit(gpus=1)
            launch = await agent.start_next()
            assert 15 <= await submit_until_rejected(hostile) <= 25, "a quarter of 8 MiB in jobs of 100 KiB"
            with pytest.raises(SpaceQuotaError, match=r"tenant red use 2 MiB of the store") as caught:
                await hostile.submit()
            assert caught.value.retryable and caught.value.retry_after_s > 0
            assert (await other.submit()).state in (JobState.QUEUED, JobState.PLACING)
            agent.end(launch)
            await agent.beat()
            assert (await other.job(running.job_id)).state is JobState.SUCCEEDED
            listed = (await hostile.ask(ListJobs(limit=1))).jobs
            await hostile.ask(CancelJob(job_id=listed[0].job_id))
        assert (await owner.status()).alarms == ()


async def test_submissions_are_rejected_before_the_store_is_full(tmp_path: Path) -> None:
    clock = FakeClock()
    store = await MemoryStore.open(clock=clock, bytes_max=8 * MIB)
    async with (
        running_controller(tmp_path, clock=clock, store=store, tenant_store_share=1.0) as one,
        one.client() as owner,
    ):
        async with one.agent() as agent:
            running = await owner.submit(gpus=1)
            launch = await agent.start_next()
            await submit_until_rejected(owner)
            for _ in range(6):  # after each measurement, a part of the rest is accepted
                await clock.advance(HOUSEKEEPING_S)
                await agent.beat()
                await submit_until_rejected(owner)
            used = (await store.measure_space()).used_bytes
            assert 0.5 * 8 * MIB < used < 0.75 * 8 * MIB
            with pytest.raises(SpaceQuotaError, match="the store is almost full") as caught:
                await owner.submit()
            assert caught.value.retryable and caught.value.retry_after_s > 0
            await agent.beat()
            agent.end(launch)
            await agent.beat()
            assert (await owner.job(running.job_id)).state is JobState.SUCCEEDED, "own writes have a reserve"
            status = await owner.status()
            assert "no job can be submitted" in status.alarms[0]
            assert status.store_bytes_max == 8 * MIB
            assert used <= status.store_used_bytes < 8 * MIB
        await one.restart()
        async with one.client() as again:
            assert (await again.status()).leading, "a new term can begin"


async def submit_and_cancel(one: RunningController, owner: Client, count: int, kib: int) -> None:
    for _ in range(count):
        job = await owner.submit_spec(make_large_spec(kib))
        await owner.ask(CancelJob(job_id=job.job_id))


async def is_history_bounded(clock: FakeClock, client: Client) -> bool:
    """Whether no more than the jobs of 100 KiB that fit into 1 MiB are left, after some time."""
    await clock.advance(2.0)
    return len((await client.ask(ListJobs())).jobs) <= 11


async def test_history_is_limited_by_bytes_and_by_age(tmp_path: Path) -> None:
    clock = FakeClock()
    async with (
        running_controller(tmp_path, clock=clock, history_bytes_max=MIB, history_days=0.002) as one,
        one.client() as owner,
    ):
        queued = await owner.submit()
        await submit_and_cancel(one, owner, 20, 100)
        await until(lambda: is_history_bounded(clock, owner))
        assert len((await owner.ask(ListJobs())).jobs) >= 9, "the newest ones are kept"
        await one.restart()
    async with running_controller(tmp_path, clock=clock, history_days=0.002) as one, one.client() as owner:
        await clock.advance(180.0)

        async def is_empty() -> bool:
            await clock.advance(2.0)
            jobs = (await owner.ask(ListJobs())).jobs
            return [job.job_id for job in jobs] == [queued.job_id]

        await until(is_empty, what="old jobs are deleted, queued ones are not")


async def test_tenant_with_large_finished_jobs_does_not_displace_those_of_others(tmp_path: Path) -> None:
    clock = FakeClock()
    async with running_controller(tmp_path, clock=clock, history_bytes_max=MIB) as one:
        red, blue = [await one.token(TokenKind.USER, tenant=name) for name in ("red", "blue")]
        async with one.client(red) as hostile, one.client(blue) as other:
            job = await other.submit()
            await other.ask(CancelJob(job_id=job.job_id))
            await submit_and_cancel(one, hostile, 20, 100)
            await until(lambda: is_history_bounded(clock, hostile))
            assert (await other.job(job.job_id)).state is JobState.CANCELLED
        await one.restart()
        async with one.client(red) as hostile, one.client(blue) as other:
            await submit_and_cancel(one, hostile, 3, 100)
            await until(lambda: is_history_bounded(clock, hostile))
            assert (await other.job(job.job_id)).state is JobState.CANCELLED


async def test_one_tenant_cannot_fill_etcd_with_jobs_or_with_history(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A quota of 64 MiB instead of 2 GiB is filled in a second.
    monkeypatch.setattr("genie.controller.terms.leader_work._HOUSEKEEPING_INTERVAL_S", 0.1)
    quota = 64 * MIB
    server = EtcdServer(tmp_path, options=["--quota-backend-bytes", str(quota)])
    server.start()
    try:
        store = await EtcdStore.open(server.url)
        async with (
            running_controller(tmp_path / "1", store=store, store_bytes_max=quota, leader_ttl_s=2.0) as one,
            one.client() as owner,
        ):
            await until(
                lambda: one.controller is not None and one.controller._jobs.space.store_bytes_max == quota
            )

            async def submit() -> Job | None:
                try:
                    return await owner.submit_spec(make_large_spec(40))
                except SpaceQuotaError:
                    return None

            for _ in range(quota * 5 // 4 // (2 * 40 * 1024)):
                job = await until(submit, timeout_s=30, what="space is freed")
                await owner.ask(CancelJob(job_id=job.job_id))
            token = (one.state_dir / "owner.token").read_text()
            await one.stop()
            async with running_controller(
                tmp_path / "2", store=await EtcdStore.open(server.url), leader_ttl_s=2.0, name="two"
            ) as two:
                assert two.controller is not None
                await until(lambda: two.controller is not None and two.controller.is_leading, timeout_s=20)
                async with two.client(token) as other:
                    await other.submit()
            await one.start()
    finally:
        server.stop()


def test_store_that_must_be_defragmented_accepts_no_jobs() -> None:
    ledger = Ledger(None, None, None)  # type: ignore[arg-type]  # its tables only
    space = JobSpace(ledger, ControllerConfig())
    space.check_submission("red")
    space.record_measurement(
        SpaceUsage(used_bytes=10, bytes_max=100, revision=1, fragmented_bytes=70), bytes_max=100
    )
    space.check_submission("red")
    space.record_measurement(
        SpaceUsage(used_bytes=10, bytes_max=100, revision=1, fragmented_bytes=80), bytes_max=100
    )
    with pytest.raises(SpaceQuotaError, match="must be defragmented"):
        space.check_submission("red")


ETCD_QUOTA_BYTES = 2 * 1024 * MIB
"""The default of etcd."""


@pytest.mark.parametrize("quota_bytes", [64 * MIB, ETCD_QUOTA_BYTES, 4 * ETCD_QUOTA_BYTES])
def test_space_reserve_is_kept_however_fast_jobs_are_submitted(quota_bytes: int) -> None:
    """Submissions are rejected by what was written, not by the next measurement. So neither the rate of
    requests nor the interval of measurements matters: only the shares do, and one transaction, whose
    submissions are all accepted before it counts."""
    ledger = Ledger(None, None, None)  # type: ignore[arg-type]  # its tables only
    space = JobSpace(ledger, ControllerConfig())
    space.record_measurement(
        SpaceUsage(used_bytes=0, bytes_max=quota_bytes, revision=1), bytes_max=quota_bytes
    )
    with pytest.raises(SpaceQuotaError, match="almost full"):
        for _ in range(quota_bytes // TXN_BYTES_MAX + 2):
            space.check_submission("red")
            ledger.written_bytes += TXN_BYTES_MAX
    grown_bytes = STORE_GROWTH_PER_WRITTEN_BYTE_MAX * ledger.written_bytes
    reserve_bytes = quota_bytes - grown_bytes
    assert (
        reserve_bytes
        >= (1 - SUBMISSION_STORE_SHARE_MAX) * quota_bytes - STORE_GROWTH_PER_WRITTEN_BYTE_MAX * TXN_BYTES_MAX
    )
    assert reserve_bytes > 0.2 * quota_bytes, "for the end of all running jobs, and for elections"
    assert ALARM_STORE_SHARE_MIN < SUBMISSION_STORE_SHARE_MAX


def test_measured_space_of_the_store_replaces_the_estimate() -> None:
    ledger = Ledger(None, None, None)  # type: ignore[arg-type]  # its tables only
    space = JobSpace(ledger, ControllerConfig())
    space.record_measurement(SpaceUsage(used_bytes=0, bytes_max=100, revision=1), bytes_max=100)
    ledger.written_bytes += 40
    with pytest.raises(SpaceQuotaError, match="almost full"):
        space.check_submission("red")
    space.record_measurement(SpaceUsage(used_bytes=45, bytes_max=100, revision=2), bytes_max=100)
    space.check_submission("red")


async def test_writes_during_a_measurement_count_as_written_after_it() -> None:
    store = await MemoryStore.open(clock=FakeClock())
    ledger = Ledger(store, None, None)  # type: ignore[arg-type]  # its tables only
    space = JobSpace(ledger, ControllerConfig())
    measure = store.measure_space

    async def measure_while_writing(*, timeout_s: float = 5.0) -> SpaceUsage:
        found = await measure(timeout_s=timeout_s)
        ledger.written_bytes += 40
        return found

    store.measure_space = measure_while_writing  # type: ignore[method-assign]
    monitor = StoreMonitor(store, space, config=ControllerConfig(), clock=FakeClock())
    ledger.written_bytes += 7
    await monitor.measure_and_compact_if_due()
    assert space.bytes_written_since_measurement == 40
    await store.close()
