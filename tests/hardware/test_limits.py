"""When a GPU counts as busy, when as too hot, and when as well again."""

from __future__ import annotations

import msgspec
import pytest

from genie.hardware import is_busy, is_overheated
from genie.hardware.limits import GOOD_READINGS_MIN, Convalescence, with_verdict
from genie.model.node import GPUInfo, Vendor


def gpu(
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
def test_a_gpu_is_busy_above_ninety_percent(util: float | None, busy: bool) -> None:
    assert is_busy(gpu(util=util)) is busy
    assert with_verdict(gpu(util=util)).available is not busy


@pytest.mark.parametrize(("temp", "hot"), [(None, False), (85.0, False), (85.5, True)])
def test_a_gpu_is_overheated_above_eighty_five_degrees(temp: float | None, hot: bool) -> None:
    assert is_overheated(gpu(temp=temp)) is hot


def test_heat_alone_does_not_make_a_gpu_unavailable() -> None:
    assert with_verdict(gpu(temp=99.0)).available


def test_a_loaded_host_does_not_make_its_cpu_accelerator_unavailable() -> None:
    assert with_verdict(gpu(vendor=Vendor.CPU, util=100.0)).available


def test_a_gpu_that_is_lost_keeps_its_own_reason() -> None:
    assert with_verdict(gpu(util=99.0, reason="lost")).reason == "lost"


def test_a_gpu_that_was_unwell_comes_back_after_three_good_readings_in_a_row() -> None:
    ward = Convalescence()
    bad = gpu(reason="too hot")
    for readings in ([bad], [gpu(), gpu(), bad], [gpu(), gpu()]):
        assert not any(ward.judged(reading).available for reading in readings)
    assert ward.judged(gpu()) == gpu()
    assert ward.judged(gpu()) == gpu()
    assert GOOD_READINGS_MIN == 3


def test_a_gpu_on_the_mend_says_what_it_had_and_others_are_not_kept_back() -> None:
    ward = Convalescence()
    ward.judged(gpu(reason="lost"))
    assert ward.judged(gpu()).reason == "until just now: lost"
    other = msgspec.structs.replace(gpu(), gpu_id=1)
    assert ward.judged(other) == other
