"""Launches that fail because of the node count against the node, not the job."""

from __future__ import annotations

from pathlib import Path

import msgspec

from genie.controller.jobs.backoff import LaunchBackoff
from genie.controller.jobs.lifecycle import LAUNCH_ATTEMPTS_MAX
from genie.controller.nodes.faults import BLOCKED_S_MAX, NodeFaults
from genie.errors import NodeUnfitError
from genie.model.job import JobState
from genie.model.node import NodeStatus
from tests.controller.running_controller import Client, advance_until_launch, running_controller
from tests.fakes.agent import FakeAgent
from tests.fakes.clock import FakeClock
from tests.waiting import until

GIB = 1 << 30
FULL = NodeUnfitError("the launch is rejected: no space left on device")


def test_time_for_which_a_node_is_closed_doubles_until_it_starts_a_job() -> None:
    clock = FakeClock()
    faults = NodeFaults(clock)
    closed_s = []
    for _ in range(9):
        faults.record_fault("n1", "disk full")
        faults.record_fault("n1", "disk full")  # of the same batch of launches
        assert faults.blocked_reason("n1") == "it rejected launches: disk full"
        closed_s.append(faults.blocked_reason_valid_until_s("n1") - clock.monotonic_s())
        clock._now_s += closed_s[-1]
        assert faults.blocked_reason("n1") == ""
    assert closed_s == [1, 2, 4, 8, 16, 32, BLOCKED_S_MAX, BLOCKED_S_MAX, BLOCKED_S_MAX]
    faults.unblock_node("n1")
    faults.record_fault("n1", "disk full")
    assert faults.blocked_reason_valid_until_s("n1") == clock.monotonic_s() + 1
    assert faults.blocked_reason("n2") == ""
    faults.clear()
    assert faults.blocked_reason("n1") == ""


def test_job_is_placed_at_once_after_the_first_fault_of_a_node_and_later_after_a_delay() -> None:
    clock = FakeClock()
    backoff = LaunchBackoff(clock)
    delays_s = []
    for epoch in (1, 1, 2, 3, 4):
        backoff.record_node_fault("j", epoch)
        delays_s.append(backoff.not_before_s("j") - clock.monotonic_s())
    assert delays_s == [0, 0, 1, 2, 4]
    assert backoff.record_rejection("j", 5) == 1, "they are not rejections of the job"


async def test_job_that_a_node_rejects_often_does_not_fail_and_runs_on_another_node(tmp_path: Path) -> None:
    clock = FakeClock()
    async with running_controller(tmp_path, clock=clock) as one, one.client() as owner, one.agent() as full:
        full.refuse = FULL
        job = await owner.submit(gpus=1)

        async def rejected_often() -> bool:
            await clock.advance(2.0)
            await full.beat()
            steps = (await owner.job(job.job_id)).history
            return sum(step.state is JobState.PLACING for step in steps) > LAUNCH_ATTEMPTS_MAX + 1

        await until(rejected_often)
        assert (await owner.job(job.job_id)).state is not JobState.FAILED
        async with one.agent("n2") as empty:
            launch = await advance_until_launch(clock, empty, full)
            await empty.confirm(launch)
            empty.end(launch)
            await empty.beat()
            assert (await owner.job(job.job_id)).state is JobState.SUCCEEDED


async def test_all_jobs_succeed_next_to_a_full_node(tmp_path: Path) -> None:
    async with (
        running_controller(tmp_path) as one,
        one.client() as owner,
        one.agent("a", gpus=8) as full,
        one.agent("b", gpus=2) as empty,
    ):
        full.refuse = FULL
        jobs = [await owner.submit(gpus=1) for _ in range(40)]
        for _ in jobs:
            launch = await empty.start_next()
            empty.end(launch)
            await empty.beat()
            await full.beat()
        states = {(await owner.job(job.job_id)).state for job in jobs}
        assert states == {JobState.SUCCEEDED}


async def test_node_that_rejected_a_launch_is_shown_as_degraded(tmp_path: Path) -> None:
    clock = FakeClock()
    async with running_controller(tmp_path, clock=clock) as one, one.client() as owner, one.agent() as full:
        full.refuse = FULL
        job = await owner.submit(gpus=1)

        async def degraded() -> bool:
            return (await owner.node("n1")).status is NodeStatus.DEGRADED

        await until(degraded)
        assert (await owner.node("n1")).status_reason == f"it rejected launches: {FULL.message}"
        full.refuse = None
        launch = await advance_until_launch(clock, full)
        await full.confirm(launch)
        assert launch.job_id == job.job_id
        assert (await owner.node("n1")).status is NodeStatus.HEALTHY


async def test_job_that_did_not_start_because_of_its_node_is_placed_again(tmp_path: Path) -> None:
    async with (
        running_controller(tmp_path) as one,
        one.client() as owner,
        one.agent("a") as full,
    ):
        job = await owner.submit(gpus=1)
        launch = await full.start_next()
        async with one.agent("b") as empty:
            full.end(
                launch, None, reason="cannot start the shim: disk full", started=False, is_caused_by_node=True
            )
            await full.beat()
            again = await empty.start_next()
            assert again.placement.epoch > launch.placement.epoch
            assert (await owner.node("a")).status is NodeStatus.DEGRADED
            assert await owner.held("a") == []
            assert (await owner.job(job.job_id)).state is JobState.RUNNING


async def test_closed_node_gets_no_jobs(tmp_path: Path) -> None:
    async with running_controller(tmp_path) as one, one.client() as owner, one.agent("a") as low:
        open_info = low.info
        low.info = msgspec.structs.replace(
            open_info,
            closed="low disk space: 0.5 GiB free",
            status=NodeStatus.DEGRADED,
            status_reason="low disk space: 0.5 GiB free",
        )
        await low.beat()
        job = await owner.submit(gpus=1)

        async def pending() -> bool:
            return "low disk space" in (await owner.job(job.job_id)).reason

        await until(pending)
        assert low.launches.empty()
        low.info = open_info
        await low.beat()
        assert (await low.next_launch()).job_id == job.job_id


async def report_missing_disk_space(agent: FakeAgent, *, free_bytes: int, needed_bytes: int) -> None:
    """Report for the next launch that its working directory does not fit on the disk."""
    launch = await agent.next_launch()
    set_free_disk_space(agent, free_bytes)
    reason = "not started: the working directory needs more space"
    agent.end(
        launch, None, reason=reason, started=False, is_caused_by_node=True, needed_disk_bytes=needed_bytes
    )
    await agent.beat()


def set_free_disk_space(agent: FakeAgent, free_bytes: int) -> FakeAgent:
    agent.info = msgspec.structs.replace(agent.info, disk_total_bytes=100 * GIB, disk_free_bytes=free_bytes)
    return agent


async def advance_until_launched(clock: FakeClock, *agents: FakeAgent) -> FakeAgent:
    async def launched() -> FakeAgent | None:
        await clock.advance(1.0)
        for agent in agents:
            await agent.beat()
        return next((agent for agent in agents if not agent.launches.empty()), None)

    return await until(launched, what="a launch")


async def node_status(owner: Client, agent: FakeAgent) -> NodeStatus:
    return (await owner.node(agent.info.node_id)).status


async def test_job_whose_working_directory_fits_on_no_node_fails_and_the_nodes_stay_open(
    tmp_path: Path,
) -> None:
    clock = FakeClock()
    async with (
        running_controller(tmp_path, clock=clock) as one,
        one.client() as owner,
        one.agent("a") as a,
        one.agent("b") as b,
    ):
        await set_free_disk_space(a, 2 * GIB).beat()
        await set_free_disk_space(b, 3 * GIB).beat()
        job = await owner.submit(gpus=1)
        for _ in range(LAUNCH_ATTEMPTS_MAX):
            agent = await advance_until_launched(clock, a, b)
            free_bytes = agent.info.disk_free_bytes
            await report_missing_disk_space(agent, free_bytes=free_bytes, needed_bytes=4 * GIB)
            assert await node_status(owner, agent) is NodeStatus.HEALTHY
        failed = await owner.job(job.job_id)
        assert failed.state is JobState.FAILED
        assert failed.reason == (
            f"rejected {LAUNCH_ATTEMPTS_MAX} times, most recently: its working directory needs {4 * GIB} "
            f"bytes of free disk space (4.00 GiB), packed and unpacked; the largest free space of a node is "
            f"{3 * GIB} bytes (3.00 GiB)"
        )
        other = await owner.submit(gpus=1)
        assert (await (await advance_until_launched(clock, a, b)).start_next()).job_id == other.job_id


async def test_job_goes_to_the_node_with_space_for_its_working_directory(tmp_path: Path) -> None:
    clock = FakeClock()
    async with (
        running_controller(tmp_path, clock=clock) as one,
        one.client() as owner,
        one.agent("a") as a,
        one.agent("b") as b,
    ):
        await set_free_disk_space(a, 2 * GIB).beat()
        await set_free_disk_space(b, 2 * GIB).beat()
        job = await owner.submit(gpus=1)
        small = await advance_until_launched(clock, a, b)
        large = b if small is a else a
        await set_free_disk_space(large, 5 * GIB).beat()
        await report_missing_disk_space(small, free_bytes=2 * GIB, needed_bytes=4 * GIB)
        for _ in range(2 * LAUNCH_ATTEMPTS_MAX):
            assert await advance_until_launched(clock, a, b) is large
            await report_missing_disk_space(large, free_bytes=5 * GIB, needed_bytes=4 * GIB)
        assert (await owner.job(job.job_id)).state is not JobState.FAILED, "a node has enough space"
        await advance_until_launched(clock, a, b)
        assert (await large.start_next()).job_id == job.job_id
        assert await node_status(owner, small) is NodeStatus.HEALTHY


async def test_job_goes_to_a_new_node_with_space_for_its_working_directory(tmp_path: Path) -> None:
    clock = FakeClock()
    async with (
        running_controller(tmp_path, clock=clock) as one,
        one.client() as owner,
        one.agent("a") as a,
    ):
        await set_free_disk_space(a, 2 * GIB).beat()
        job = await owner.submit(gpus=1)
        await advance_until_launched(clock, a)
        await report_missing_disk_space(a, free_bytes=2 * GIB, needed_bytes=4 * GIB)
        async with one.agent("b") as b:
            await set_free_disk_space(b, 5 * GIB).beat()
            while await advance_until_launched(clock, a, b) is a:
                await report_missing_disk_space(a, free_bytes=2 * GIB, needed_bytes=4 * GIB)
            assert (await b.start_next()).job_id == job.job_id
