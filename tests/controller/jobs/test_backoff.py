"""Backoff after rejected launches, and after runs that nodes have ended."""

from __future__ import annotations

from pathlib import Path

from genie.controller.jobs.backoff import LaunchBackoff
from tests.controller.running_controller import advance_until_launch, job_spec, running_controller
from tests.fakes.clock import FakeClock


async def test_backoff_doubles_with_each_rejected_launch() -> None:
    clock = FakeClock()
    backoff = LaunchBackoff(clock)
    assert backoff.not_before_s("j") == 0.0
    delays_s = []
    for epoch in (1, 2, 3):
        assert backoff.record_rejection("j", epoch) == epoch
        delays_s.append(backoff.not_before_s("j") - clock.monotonic_s())
    assert delays_s == [1.0, 2.0, 4.0]
    backoff.reset("j")
    assert backoff.not_before_s("j") == 0.0


async def test_rejections_of_one_launch_count_once() -> None:
    backoff = LaunchBackoff(FakeClock())
    assert [backoff.record_rejection("j", 7), backoff.record_rejection("j", 7)] == [1, 1]


async def test_faults_of_nodes_count_after_a_start_for_a_limited_time() -> None:
    clock = FakeClock()
    backoff = LaunchBackoff(clock)
    delays_s = []
    for epoch in range(1, 12):
        backoff.record_node_fault("j", epoch)
        delays_s.append(backoff.not_before_s("j") - clock.monotonic_s())
        await clock.advance(delays_s[-1])
        backoff.record_start("j")
        assert backoff.not_before_s("j") == 0.0
    assert delays_s == [0, 1, 2, 4, 8, 16, 32, 60, 60, 60, 60]
    await clock.advance(600.0)
    backoff.record_node_fault("j", 20)
    assert backoff.not_before_s("j") == clock.monotonic_s()


async def test_start_forgets_rejections_of_the_job() -> None:
    backoff = LaunchBackoff(FakeClock())
    backoff.record_rejection("j", 1)
    backoff.record_start("j")
    assert backoff.job_ids() == []


async def test_job_that_kills_its_shim_starts_again_with_a_growing_delay(tmp_path: Path) -> None:
    clock = FakeClock()
    async with running_controller(tmp_path, clock=clock) as one, one.client() as owner, one.agent() as agent:
        job = await owner.submit_spec(job_spec(gpus=1, preemptible=True))
        launch, waits_s = await agent.next_launch(), []
        for _ in range(6):
            await agent.confirm(launch)
            agent.end(launch, None, reason="ended by Genie: the shim exited unexpectedly")
            await agent.beat()
            ended_s = clock.monotonic_s()
            launch = await advance_until_launch(clock, agent)
            waits_s.append(clock.monotonic_s() - ended_s)
        assert waits_s == sorted(waits_s)
        assert waits_s[-1] >= 16.0
        assert not (await owner.job(job.job_id)).state.is_final
