"""The contract of every inventory: the fake NVML in tests/hardware, the real one in tests/gpu."""

from __future__ import annotations

import re
from collections.abc import Callable

from genie.model.node import GPUInfo, Vendor

_UUID = re.compile(r"GPU-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


def check_nvidia_inventory(read: Callable[[], tuple[GPUInfo, ...]]) -> None:
    """For a machine with at least one NVIDIA GPU, without faults."""
    first, second = read(), read()
    assert first, "there is at least one GPU"
    assert [gpu.gpu_id for gpu in first] == list(range(len(first)))
    assert [(gpu.gpu_id, gpu.uuid) for gpu in first] == [(gpu.gpu_id, gpu.uuid) for gpu in second]
    assert len({gpu.uuid for gpu in first}) == len(first)
    for gpu in (*first, *second):
        _check_gpu(gpu)


def _check_gpu(gpu: GPUInfo) -> None:
    assert gpu.vendor is Vendor.NVIDIA
    assert gpu.name
    assert _UUID.fullmatch(gpu.uuid)
    assert 0 < gpu.memory_used_bytes < gpu.memory_total_bytes
    assert gpu.utilization_pct is None or 0 <= gpu.utilization_pct <= 100
    assert gpu.temperature_c is None or 0 < gpu.temperature_c < 120
    assert gpu.power_w is None or 0 < gpu.power_w < 3000
    assert gpu.available == (gpu.reason == "")
    assert gpu.memory_outside_bytes == gpu.memory_used_bytes, "no job runs on it"
    assert (3, 0) <= gpu.capability < (100, 0)
    assert 0 <= gpu.island <= gpu.gpu_id, "an island has the number of its first"
    assert 0 <= gpu.numa < 1024
