"""When a GPU is busy, overheated, or available again."""

from __future__ import annotations

import msgspec
import pytest

from genie.hardware import is_busy, is_overheated
from genie.hardware.limits import RECOVERY_GOOD_READINGS_MIN, RecoveryTracker, mark_unavailable_if_busy
from genie.model.node import GPUInfo, Vendor


def make_gpu(
    *, vendor: Vendor = Vendor.NVIDIA, util: float | None = None, temp: float | None = None, reason: str = ""
) -> GPUInfo:
    return GPUInfo(
        gpu_id=0,
        name="x",
        vendor=vendor,
        utilization_pct=util,
        temperature_c=temp,
        available=not reason,
        reason=reason,
    )


@pytest.mark.parametrize(("util", "busy"), [(None, False), (0.0, False), (90.0, False), (90.1, True)])
def test_gpu_is_busy_above_ninety_percent(util: float | None, busy: bool) -> None:
    assert is_busy(make_gpu(util=util)) is busy
    assert mark_unavailable_if_busy(make_gpu(util=util)).available is not busy


@pytest.mark.parametrize(("temp", "hot"), [(None, False), (85.0, False), (85.5, True)])
def test_gpu_is_overheated_above_eighty_five_degrees(temp: float | None, hot: bool) -> None:
    assert is_overheated(make_gpu(temp=temp)) is hot


def test_overheated_gpu_stays_available() -> None:
    assert mark_unavailable_if_busy(make_gpu(temp=99.0)).available


def test_cpu_accelerator_of_a_loaded_host_stays_available() -> None:
    assert mark_unavailable_if_busy(make_gpu(vendor=Vendor.CPU, util=100.0)).available


def test_lost_gpu_keeps_its_reason() -> None:
    assert mark_unavailable_if_busy(make_gpu(util=99.0, reason="lost")).reason == "lost"


def test_gpu_recovers_after_three_consecutive_good_readings() -> None:
    tracker = RecoveryTracker()
    bad = make_gpu(reason="too hot")
    for readings in ([bad], [make_gpu(), make_gpu(), bad], [make_gpu(), make_gpu()]):
        assert not any(tracker.mark_unavailable_if_recovering(reading).available for reading in readings)
    assert tracker.mark_unavailable_if_recovering(make_gpu()) == make_gpu()
    assert tracker.mark_unavailable_if_recovering(make_gpu()) == make_gpu()
    assert RECOVERY_GOOD_READINGS_MIN == 3


def test_recovering_gpu_keeps_its_last_reason_and_other_gpus_are_not_affected() -> None:
    tracker = RecoveryTracker()
    tracker.mark_unavailable_if_recovering(make_gpu(reason="lost"))
    assert tracker.mark_unavailable_if_recovering(make_gpu()).reason == "recovering from: lost"
    other = msgspec.structs.replace(make_gpu(), gpu_id=1)
    assert tracker.mark_unavailable_if_recovering(other) == other
