"""CPU accelerators."""

from __future__ import annotations

import hashlib
from pathlib import Path

from genie.hardware import host_facts
from genie.hardware.cpu import CpuReader
from genie.model.node import GPUInfo, Vendor
from tests.waiting import wait_until


def test_accelerators_share_the_memory_equally(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text("model name : Some CPU\n")
    gpus = CpuReader(4, root=tmp_path).read()
    assert [gpu.gpu_id for gpu in gpus] == [0, 1, 2, 3]
    assert {gpu.name for gpu in gpus} == {"Some CPU"}
    assert {gpu.vendor for gpu in gpus} == {Vendor.CPU}
    assert {gpu.memory_total_bytes for gpu in gpus} == {host_facts(root=tmp_path).memory_total_bytes // 4}
    assert all(gpu.available for gpu in gpus)


def test_cpu_accelerators_are_one_island_on_one_numa_node_without_a_capability() -> None:
    gpus = CpuReader(3).read(held=[1])
    assert {(gpu.island, gpu.numa, gpu.capability, gpu.memory_outside_bytes) for gpu in gpus} == {
        (0, 0, (0, 0), 0)
    }


def test_zero_accelerators_are_allowed() -> None:
    assert CpuReader(0).read() == ()


def test_utilization_is_none_at_first_and_then_a_percentage() -> None:
    reader = CpuReader(1)
    assert reader.read()[0].utilization_pct is None

    def busy_reading() -> GPUInfo | None:
        hashlib.sha256(bytes(1_000_000)).digest()  # the counters have a resolution of 10 ms
        (gpu,) = reader.read()
        return gpu if gpu.utilization_pct else None

    utilization_pct = wait_until(busy_reading).utilization_pct
    assert utilization_pct is not None
    assert 0 < utilization_pct <= 100
