"""The life cycle of jobs with a real controller, a real store and a fake agent."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from genie.controller.jobs.backoff import LaunchFailureCause
from genie.controller.jobs.lifecycle import LAUNCH_ATTEMPTS_MAX
from genie.errors import (
    FencedError,
    GenieError,
    JobNotFoundError,
    JobRefusedError,
    LaunchError,
    ProtocolError,
    QueueFullError,
    UsageError,
)
from genie.model.job import JobSpec, JobState, Resources, StopReason
from genie.model.messages import CancelJob, GetJob, ListJobs, ReadLog, SubmitJob
from genie.scheduler.scheduler import Scheduler
from tests.controller.running_controller import advance_until_launch, running_controller
from tests.fakes.clock import FakeClock
from tests.waiting import until


async def test_job_is_placed_confirmed_and_ends_with_its_exit_code(tmp_path: Path) -> None:
    async with running_controller(tmp_path) as one, one.client() as owner, one.agent() as agent:
        job = await owner.submit("python", "train.py", gpus=1)
        launch = await agent.next_launch()
        assert (launch.job_id, launch.spec.command, launch.placement.gpu_ids) == (
            job.job_id,
            ("python", "train.py"),
            (0,),
        )
        assert (await owner.job(job.job_id)).state is JobState.PLACING
        await agent.confirm(launch)
        assert (await owner.job(job.job_id)).state is JobState.RUNNING
        assert await owner.held("n1") == [job.job_id]
        agent.end(launch, 3)
        await agent.beat()
        assert agent.exits == {}, "the exit was settled"
        ended = await owner.job(job.job_id)
        assert (ended.state, ended.reason, ended.exit_code) == (JobState.FAILED, "exit code 3", 3)
        assert [step.state for step in ended.history] == ["queued", "placing", "running", "failed"]
        assert await owner.held("n1") == []


@pytest.mark.parametrize(
    ("code", "how", "state", "reason"),
    [
        (0, {}, JobState.SUCCEEDED, "exit code 0"),
        (-9, {}, JobState.FAILED, "killed by signal 9"),
        (None, {}, JobState.LOST, "said by the node"),
        (None, {"started": False}, JobState.FAILED, "said by the node"),
    ],
)
async def test_exit_report_determines_final_state_and_reason(
    tmp_path: Path, code: int | None, how: dict[str, bool], state: JobState, reason: str
) -> None:
    async with running_controller(tmp_path) as one, one.client() as owner, one.agent() as agent:
        job = await owner.submit(gpus=1)
        launch = await agent.start_next()
        agent.end(launch, code, reason="said by the node", **how)
        await agent.beat()
        ended = await owner.job(job.job_id)
        assert (ended.state, ended.reason) == (state, reason)


async def test_submitting_twice_with_one_request_id_creates_one_job(tmp_path: Path) -> None:
    async with running_controller(tmp_path) as one, one.client() as owner:
        first = await owner.submit("a", request_id="same")
        again = await owner.submit("b", request_id="same")
        assert (again.job_id, again.spec.command) == (first.job_id, ("a",))


async def test_impossible_job_is_rejected_and_job_without_free_gpus_is_pending(
    tmp_path: Path,
) -> None:
    async with running_controller(tmp_path) as one, one.client() as owner, one.agent(gpus=2) as agent:
        with pytest.raises(JobRefusedError, match=r"requests 3 GPUs on one node; n1: has 2 GPUs"):
            await owner.submit(gpus=3)
        with pytest.raises(JobRefusedError, match="64 CPUs"):
            await owner.submit(cpus=64)
        first = await owner.submit(gpus=2)
        launch = await agent.start_next()
        waiting = await owner.submit(gpus=1)
        assert waiting.state is JobState.QUEUED
        assert waiting.reason == "waiting for resources on n1 (reserved for this job)"
        agent.end(launch)
        await agent.beat()
        await agent.start_next()
        assert (await owner.job(first.job_id)).state is JobState.SUCCEEDED
        assert (await owner.job(waiting.job_id)).state is JobState.RUNNING


async def test_job_is_pending_until_a_node_joins(tmp_path: Path) -> None:
    async with running_controller(tmp_path) as one, one.client() as owner:
        job = await owner.submit()
        assert (job.state, job.reason) == (JobState.QUEUED, "no node has joined the cluster yet")
        async with one.agent() as agent:
            assert (await agent.next_launch()).job_id == job.job_id


async def test_cancelling_a_queued_job_ends_it_at_once(tmp_path: Path) -> None:
    async with running_controller(tmp_path) as one, one.client() as owner:
        job = await owner.submit()
        after = (await owner.ask(CancelJob(job_id=job.job_id))).job
        assert after.state is JobState.CANCELLED
        again = (await owner.ask(CancelJob(job_id=job.job_id))).job
        assert again == after, "cancelling an ended job changes nothing"


async def test_cancelling_a_placing_job_voids_the_launch(tmp_path: Path) -> None:
    async with running_controller(tmp_path) as one, one.client() as owner, one.agent() as agent:
        job = await owner.submit(gpus=1)
        launch = await agent.next_launch()
        after = (await owner.ask(CancelJob(job_id=job.job_id))).job
        assert after.state is JobState.CANCELLED
        assert await owner.held("n1") == []
        assert (await agent.next_kill()).job_id == job.job_id
        with pytest.raises(FencedError):
            await agent.confirm(launch)


async def test_job_with_a_process_that_cannot_be_killed_shows_it(tmp_path: Path) -> None:
    async with running_controller(tmp_path) as one, one.client() as owner, one.agent() as agent:
        job = await owner.submit(gpus=1)
        launch = await agent.start_next()
        stopping = (await owner.ask(CancelJob(job_id=job.job_id))).job
        running = agent.running[launch.job_id]
        agent.running[launch.job_id] = msgspec.structs.replace(
            running, status_note="cannot kill process 7 (uninterruptible)"
        )
        await agent.beat()
        shown = [await owner.job(job.job_id), *(await owner.ask(ListJobs())).jobs]
        assert [each.reason for each in shown] == [
            f"{stopping.reason}; node n1: cannot kill process 7 (uninterruptible)"
        ] * 2
        agent.running[launch.job_id] = running
        await agent.beat()
        assert (await owner.job(job.job_id)).reason == stopping.reason


async def test_kill_of_a_cancelled_job_is_repeated_until_it_has_ended(tmp_path: Path) -> None:
    async with running_controller(tmp_path) as one, one.client() as owner, one.agent() as agent:
        job = await owner.submit(gpus=1)
        launch = await agent.start_next()
        after = (await owner.ask(CancelJob(job_id=job.job_id))).job
        assert (after.state, after.stop) == (JobState.RUNNING, StopReason.CANCEL)
        assert (await agent.next_kill()).epoch == launch.placement.epoch
        for _ in range(2):
            ack = await agent.beat()
            assert [order.job_id for order in ack.jobs_to_kill] == [job.job_id]
        assert await owner.held("n1") == [job.job_id], "held until the process has ended"
        agent.end(launch, None, reason="killed")
        await agent.beat()
        ended = await owner.job(job.job_id)
        assert ended.state is JobState.CANCELLED
        assert ended.reason.startswith("cancelled: requested with token")
        assert await owner.held("n1") == []


async def test_confirmation_with_a_stale_epoch_or_incarnation_is_rejected(tmp_path: Path) -> None:
    async with running_controller(tmp_path) as one, one.client() as owner, one.agent() as agent:
        job = await owner.submit(gpus=1)
        launch = await agent.next_launch()
        with pytest.raises(FencedError):
            await agent.confirm(launch, epoch=launch.placement.epoch - 1)
        agent.running.clear()
        await agent.confirm(launch)
        await agent.confirm(launch)  # idempotent: the reply may have been lost
        assert (await owner.job(job.job_id)).state is JobState.RUNNING


async def test_undelivered_launch_is_queued_again_and_its_hold_released(
    tmp_path: Path,
) -> None:
    async with running_controller(tmp_path) as one, one.client() as owner:
        access = await one.join("n1")
        async with one.agent("n2") as other:
            other.hang = asyncio.Event()  # receives the launch and never replies
            job = await owner.submit(gpus=1)
            await owner.until_state(job.job_id, JobState.PLACING)
        queued = await owner.until_state(job.job_id, JobState.QUEUED)
        assert "could not be delivered" in queued.history[-1].reason
        assert queued.placement is None
        assert await owner.held("n2") == []
        assert access.token.kind == "node"


async def test_launch_that_is_not_confirmed_before_the_timeout_is_placed_again(tmp_path: Path) -> None:
    clock = FakeClock()
    async with running_controller(tmp_path, clock=clock) as one, one.client() as owner, one.agent() as agent:
        began_s = clock.monotonic_s()
        job = await owner.submit(gpus=1)
        first = await agent.next_launch()
        second = await advance_until_launch(clock, agent)
        assert clock.monotonic_s() - began_s >= 13.0
        assert second.placement.epoch > first.placement.epoch
        with pytest.raises(FencedError):
            await agent.confirm(first)
        agent.running.clear()
        await agent.confirm(second)
        assert (await owner.job(job.job_id)).state is JobState.RUNNING
        assert await owner.held("n1") == [job.job_id], "held once"


@pytest.mark.parametrize("refusal", [LaunchError("no shim here"), ProtocolError("no shim here")])
async def test_job_fails_after_repeated_launch_rejections(refusal: GenieError, tmp_path: Path) -> None:
    clock = FakeClock()
    async with running_controller(tmp_path, clock=clock) as one, one.client() as owner, one.agent() as agent:
        agent.refuse = refusal
        job = await owner.submit(gpus=1)

        async def failed() -> bool:
            await clock.advance(2.0)
            await agent.beat()
            return (await owner.job(job.job_id)).state is JobState.FAILED

        await until(failed)
        ended = await owner.job(job.job_id)
        assert "rejected 5 times" in ended.reason
        assert "no shim here" in ended.reason
        assert await owner.held("n1") == []


async def test_rejection_of_a_void_launch_does_not_count_as_an_attempt(tmp_path: Path) -> None:
    async with running_controller(tmp_path) as one, one.client() as owner, one.agent() as agent:
        job = await owner.submit(gpus=1)
        assert one.controller is not None
        jobs = one.controller._jobs.lifecycle
        for _ in range(2 * LAUNCH_ATTEMPTS_MAX):
            epoch = (await agent.next_launch()).placement.epoch
            await jobs.requeue_unconfirmed(job.job_id, epoch=epoch, reason="makes room for another")
            await jobs.requeue_unconfirmed(
                job.job_id, epoch=epoch, reason="it is refused", cause=LaunchFailureCause.JOB
            )
        await agent.start_next()
        assert (await owner.job(job.job_id)).state is JobState.RUNNING


async def test_get_job_waits_while_the_job_is_in_a_state(tmp_path: Path) -> None:
    async with running_controller(tmp_path) as one, one.client() as owner, one.agent() as agent:
        job = await owner.submit(gpus=1)
        launch = await agent.start_next()
        request = GetJob(job_id=job.job_id, while_state=JobState.RUNNING, wait_s=20)
        async with asyncio.TaskGroup() as group:
            waiting = group.create_task(owner.peer.call(request, timeout_s=30))
            agent.end(launch)
            await agent.beat()
        assert waiting.result().job.state is JobState.SUCCEEDED
        at_once = GetJob(job_id=job.job_id, while_state=JobState.RUNNING, wait_s=20)
        assert (await owner.ask(at_once)).job.state is JobState.SUCCEEDED


async def test_get_job_returns_when_its_timeout_expires(tmp_path: Path) -> None:
    clock = FakeClock()
    async with running_controller(tmp_path, clock=clock) as one, one.client() as owner:
        job = await owner.submit()
        request = GetJob(job_id=job.job_id, while_state=JobState.QUEUED, wait_s=1e9)
        async with asyncio.TaskGroup() as group:
            waiting = group.create_task(owner.peer.call(request, timeout_s=30))

            async def answered() -> bool:
                await clock.advance(5.0)
                return waiting.done()

            await until(answered)
        assert waiting.result().job.state is JobState.QUEUED


async def test_job_is_found_by_a_unique_name(tmp_path: Path) -> None:
    async with running_controller(tmp_path) as one, one.client() as owner:
        job = await owner.submit(name="unique")
        assert (await owner.job("unique")).job_id == job.job_id
        await owner.submit(name="twice")
        await owner.submit(name="twice")
        with pytest.raises(JobNotFoundError, match="2 jobs are named 'twice'"):
            await owner.job("twice")
        with pytest.raises(JobNotFoundError, match=r"no job 'nothing' .*genie jobs --all"):
            await owner.job("nothing")


async def test_cancel_by_name_takes_the_only_unfinished_job(tmp_path: Path) -> None:
    async with running_controller(tmp_path) as one, one.client() as owner:
        finished = await owner.submit(name="again")
        await owner.ask(CancelJob(job_id="again"))
        job = await owner.submit(name="again")
        states = rf"{finished.job_id} \(cancelled\)"
        with pytest.raises(JobNotFoundError, match=rf"2 jobs are named 'again'.*{states}"):
            await owner.job("again")
        after = (await owner.ask(CancelJob(job_id="again"))).job
        assert (after.job_id, after.state) == (job.job_id, JobState.CANCELLED)
        with pytest.raises(JobNotFoundError, match="2 jobs are named 'again'"):
            await owner.ask(CancelJob(job_id="again"))


async def test_cancel_by_an_ambiguous_name_shows_the_states(tmp_path: Path) -> None:
    async with running_controller(tmp_path) as one, one.client() as owner:
        ids = [(await owner.submit(name="twice")).job_id for _ in range(2)]
        with pytest.raises(JobNotFoundError, match="2 unfinished jobs are named 'twice'") as found:
            await owner.ask(CancelJob(job_id="twice"))
        assert all(f"{job_id} (queued)" in found.value.hint for job_id in ids)


async def test_jobs_are_listed_newest_first_in_pages(tmp_path: Path) -> None:
    async with running_controller(tmp_path) as one, one.client() as owner:
        ids = [(await owner.submit(name=f"job{index}")).job_id for index in range(5)]
        first = await owner.ask(ListJobs(limit=2))
        assert ([job.job_id for job in first.jobs], first.more) == ([ids[4], ids[3]], True)
        rest = await owner.ask(ListJobs(before_sequence=first.jobs[-1].sequence))
        assert ([job.job_id for job in rest.jobs], rest.more) == ([ids[2], ids[1], ids[0]], False)
        assert (await owner.ask(ListJobs(states=(JobState.RUNNING,)))).jobs == ()


async def test_list_of_large_jobs_stays_below_the_frame_size_limit(tmp_path: Path) -> None:
    async with running_controller(tmp_path) as one, one.client() as owner:
        for _ in range(12):
            await owner.submit("true", "x" * 100_000)
        listed = await owner.ask(ListJobs())
        assert 0 < len(listed.jobs) < 12
        assert listed.more


async def test_finished_jobs_beyond_jobs_kept_are_deleted(tmp_path: Path) -> None:
    clock = FakeClock()
    async with running_controller(tmp_path, clock=clock, jobs_kept=2) as one, one.client() as owner:
        ids = [(await owner.submit(name=f"job{index}")).job_id for index in range(4)]
        for job_id in ids:
            await owner.ask(CancelJob(job_id=job_id))

        async def dropped() -> bool:
            await clock.advance(10.0)
            return len((await owner.ask(ListJobs())).jobs) == 2

        await until(dropped)
        assert {job.job_id for job in (await owner.ask(ListJobs())).jobs} == set(ids[2:])


async def test_deleting_finished_jobs_does_not_affect_pending_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    withdrawn: list[str] = []
    withdraw = Scheduler.withdraw

    def record(scheduler: Scheduler, job_id: str) -> None:
        withdrawn.append(job_id)  # triggers a full pass
        withdraw(scheduler, job_id)

    monkeypatch.setattr(Scheduler, "withdraw", record)
    async with running_controller(tmp_path, clock=FakeClock(), jobs_kept=1) as one, one.client() as owner:
        ids = [(await owner.submit()).job_id for _ in range(4)]
        for job_id in ids[:3]:
            await owner.ask(CancelJob(job_id=job_id))
        assert one.controller is not None
        await one.controller._jobs.history.delete_old_jobs()
        assert {job.job_id for job in (await owner.ask(ListJobs())).jobs} == set(ids[2:])
        assert withdrawn == ids[:3], "each when it was cancelled, none when it was deleted"


async def test_job_deleted_from_the_store_is_no_longer_pending(tmp_path: Path) -> None:
    async with running_controller(tmp_path, clock=FakeClock()) as one, one.client() as owner:
        gone, stays = [(await owner.submit()).job_id for _ in range(2)]
        assert one.controller is not None
        ledger, planner = one.controller._ledger, one.controller._planner
        await until(lambda: [wait.job_id for wait in planner.pending_jobs()] == [gone, stays])
        await ledger.write(lambda txn: txn.delete(ledger.jobs, gone))
        assert [wait.job_id for wait in planner.pending_jobs()] == [stays]


async def test_submission_to_a_full_queue_is_rejected_with_a_retry_time(tmp_path: Path) -> None:
    async with running_controller(tmp_path, queue_max=2) as one, one.client() as owner:
        job = await owner.submit()
        await owner.submit()
        with pytest.raises(QueueFullError, match="the queue is full: 2 jobs are pending") as caught:
            await owner.submit()
        assert caught.value.retryable and caught.value.retry_after_s > 0
        await owner.ask(CancelJob(job_id=job.job_id))
        assert await owner.submit(), "there is room again"


async def test_log_is_read_from_the_agent_that_has_it(tmp_path: Path) -> None:
    async with running_controller(tmp_path) as one, one.client() as owner, one.agent() as agent:
        job = await owner.submit(gpus=1, name="talks")
        empty = await owner.ask(ReadLog(job_id=job.job_id))
        assert (empty.data, empty.eof) == (b"", False)
        launch = await agent.start_next()
        agent.logs[job.job_id] = b"hello world"
        chunk = await owner.ask(ReadLog(job_id="talks", offset=6, wait_s=1))
        assert (chunk.data, chunk.next_offset) == (b"world", 11)
        agent.end(launch)
        with pytest.raises(UsageError, match="bytes_max"):
            await owner.ask(ReadLog(job_id=job.job_id, bytes_max=1 << 40))


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (JobSpec(name="no/slash", command=("a",)), "job name"),
        (JobSpec(name="ok", command=()), "command is empty"),
        (JobSpec(name="ok", command=("a",) * 1025), "1025 arguments"),
        (JobSpec(name="ok", command=("a" * 200_000,)), "200000 bytes"),
        (JobSpec(name="ok", command=("a\0b",)), "NUL"),
        (JobSpec(name="ok", command=("a",), env={"A=B": "x"}), "environment variable"),
        (JobSpec(name="ok", command=("a",), env={f"K{i}": "" for i in range(257)}), "257 entries"),
        (JobSpec(name="ok", command=("a",), resources=Resources(gpus=-1)), "gpus = -1"),
        (JobSpec(name="ok", command=("a",), resources=Resources(gpus=1025)), "gpus = 1025"),
        (JobSpec(name="ok", command=("a",), resources=Resources(gpu_milli=0)), "gpu_milli = 0"),
        (JobSpec(name="ok", command=("a",), resources=Resources(cpus=float("nan"))), "cpus = nan"),
        (JobSpec(name="ok", command=("a",), resources=Resources(cpus=float("inf"))), "cpus = inf"),
        (JobSpec(name="ok", command=("a",), resources=Resources(memory_bytes=-1)), "memory_bytes = -1"),
        (JobSpec(name="ok", command=("a",), gpu_ids=(0,)), "gpu_ids requires node_id"),
        (JobSpec(name="ok", command=("a",), node_id="n1", gpu_ids=(0, 0)), "gpu_ids lists 2"),
        (JobSpec(name="ok", command=("a",), kind="session"), "OpenDevice"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_error_names_the_invalid_field_of_a_job(tmp_path: Path, spec: JobSpec, words: str) -> None:
    async with running_controller(tmp_path) as one, one.client() as owner:
        with pytest.raises(UsageError, match=words):
            await owner.ask(SubmitJob(spec=spec, request_id="r"))
        with pytest.raises(UsageError, match="request id"):
            good = JobSpec(name="ok", command=("a",))
            await owner.ask(SubmitJob(spec=good, request_id="../x"))
