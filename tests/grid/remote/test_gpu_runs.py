"""Choice of GPUs for a run: those that are free according to health and that no run holds."""

from __future__ import annotations

from typing import Any

import pytest

from genie.grid.remote import gpu_runs
from genie.grid.remote.core import OpError

MIB = 1 << 20


def make_gpu_reading(
    index: int, used_mib: int, *, total_mib: int | None = 40_000, busy: float | None = 0.0
) -> Any:
    total = None if total_mib is None else total_mib * MIB
    return {
        "index": index,
        "memory_total_bytes": total,
        "memory_used_bytes": used_mib * MIB,
        "utilization_pct": busy,
    }


def test_choose_skips_held_and_used_gpus() -> None:
    gpus = [
        make_gpu_reading(0, 0),
        make_gpu_reading(1, 1900),
        make_gpu_reading(2, 30_000),
        make_gpu_reading(3, 0, busy=50),
        make_gpu_reading(4, 900, total_mib=None),
    ]
    assert gpu_runs.choose_free_gpus(gpus, {}, 3) == [0, 1, 4]
    assert gpu_runs.choose_free_gpus(gpus, {0: "r-a"}, 1) == [1]


def test_choose_error_has_a_reason_per_gpu() -> None:
    with pytest.raises(OpError, match="1 of 3 GPUs are free, 2 requested") as caught:
        gpu_runs.choose_free_gpus(
            [make_gpu_reading(0, 0), make_gpu_reading(1, 0), make_gpu_reading(2, 9000, busy=7)], {0: "r-a"}, 2
        )
    assert caught.value.reason == "busy"
    assert "GPU 0 is held by run r-a; GPU 2 has 9000 MiB in use and 7% utilization" in str(caught.value)
