"""Backoff after rejected launches."""

from __future__ import annotations

from genie.controller.jobs.backoff import LaunchBackoff
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
