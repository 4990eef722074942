"""Processors and memory within the limits of a container, with fake /proc and /sys."""

from __future__ import annotations

import os
import time
from pathlib import Path

import psutil
import pytest

from genie.hardware import CpuMeter, CpuReading, host, host_facts
from genie.hardware.host import cgroup_limits, cpu_model

MIB = 1024**2


def write_files(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


def test_host_without_proc_and_sys_has_no_limits(tmp_path: Path) -> None:
    facts = host_facts(root=tmp_path)
    assert facts.cpus >= 1
    assert facts.memory_total_bytes == psutil.virtual_memory().total
    assert 0 < facts.memory_used_bytes < facts.memory_total_bytes
    assert facts.hostname


def test_host_facts_unpack_in_the_documented_order(tmp_path: Path) -> None:
    cpus, total, used, hostname = host_facts(root=tmp_path)
    assert isinstance(cpus, float)
    assert total > used
    assert isinstance(hostname, str)


def test_cgroup_v2_limits_processors_and_memory(tmp_path: Path) -> None:
    root = write_files(
        tmp_path,
        {
            "proc/self/cgroup": "0::/pod/box",
            "sys/fs/cgroup/cgroup.controllers": "cpu memory",
            "sys/fs/cgroup/pod/box/cpu.max": "50000 100000",
            "sys/fs/cgroup/pod/box/memory.max": str(64 * MIB),
            "sys/fs/cgroup/pod/box/memory.current": str(30 * MIB),
            "sys/fs/cgroup/pod/box/memory.stat": f"anon 1\ninactive_file {10 * MIB}",
        },
    )
    facts = host_facts(root=root)
    assert facts.cpus == 0.5
    assert facts.memory_total_bytes == 64 * MIB
    assert facts.memory_used_bytes == 20 * MIB


def test_tightest_limit_of_all_ancestors_applies(tmp_path: Path) -> None:
    root = write_files(
        tmp_path,
        {
            "proc/self/cgroup": "0::/pod/box",
            "sys/fs/cgroup/cgroup.controllers": "",
            "sys/fs/cgroup/pod/cpu.max": "20000 100000",
            "sys/fs/cgroup/pod/memory.max": str(8 * MIB),
            "sys/fs/cgroup/pod/memory.current": str(3 * MIB),
            "sys/fs/cgroup/pod/box/cpu.max": "90000 100000",
            "sys/fs/cgroup/pod/box/memory.max": "max",
            "sys/fs/cgroup/pod/box/memory.current": str(2 * MIB),
        },
    )
    limits = cgroup_limits(root=root)
    assert limits.cpus == 0.2
    assert (limits.memory_bytes, limits.memory_used_bytes) == (8 * MIB, 3 * MIB)


def test_cgroup_v1_with_a_host_path_is_read_from_its_mount(tmp_path: Path) -> None:
    root = write_files(
        tmp_path,
        {
            "proc/self/cgroup": "5:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "150000",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": str(32 * MIB),
            "sys/fs/cgroup/memory/memory.usage_in_bytes": str(16 * MIB),
            "sys/fs/cgroup/memory/memory.stat": f"inactive_file 1\ntotal_inactive_file {4 * MIB}",
        },
    )
    limits = cgroup_limits(root=root)
    assert limits.cpus == 1.5
    assert (limits.memory_bytes, limits.memory_used_bytes) == (32 * MIB, 12 * MIB)


def test_unlimited_and_invalid_values_set_no_limit(tmp_path: Path) -> None:
    root = write_files(
        tmp_path,
        {
            "proc/self/cgroup": "nonsense\n0::/",
            "sys/fs/cgroup/cgroup.controllers": "",
            "sys/fs/cgroup/cpu.max": "max 100000",
            "sys/fs/cgroup/memory.max": "what",
        },
    )
    limits = cgroup_limits(root=root)
    assert (limits.cpus, limits.memory_bytes) == (None, None)


def test_cgroup_v1_unlimited_values_set_no_limit(tmp_path: Path) -> None:
    root = write_files(
        tmp_path,
        {
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
        },
    )
    assert cgroup_limits(root=root).cpus is None
    assert host_facts(root=root).memory_total_bytes == psutil.virtual_memory().total


def test_cpu_model_is_read_from_cpuinfo(tmp_path: Path) -> None:
    root = write_files(tmp_path, {"proc/cpuinfo": "processor : 0\nmodel name\t: Some CPU @ 2.0GHz\n"})
    assert cpu_model(root=root) == "Some CPU @ 2.0GHz"


def test_cpu_model_has_a_fallback_without_cpuinfo(tmp_path: Path) -> None:
    assert cpu_model(root=tmp_path)


def test_cpu_meter_measures_since_the_previous_reading() -> None:
    meter = CpuMeter()
    deadline = time.process_time() + 0.1  # long enough for the system's clock ticks
    while time.process_time() < deadline:
        pass
    found = meter.read()
    assert found.cores == os.cpu_count()
    assert found.load_1m is not None and found.load_1m >= 0.0
    assert found.busy_pct is not None and 0.0 < found.busy_pct <= 100.0


def test_load_is_none_if_the_system_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> tuple[float, float, float]:
        raise OSError("no load average")

    monkeypatch.setattr(os, "getloadavg", absent)
    monkeypatch.setattr(host, "_busy_and_total_cpu_s", lambda: (1.0, 2.0))
    assert CpuMeter().read() == CpuReading(cores=os.cpu_count() or 1, load_1m=None, busy_pct=None)
