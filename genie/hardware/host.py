"""The processors, memory and name of this machine, within the limits of this process.

/proc shows the whole machine also in a container, so affinity masks and cgroup limits (v2 and v1) are read,
too.
"""

from __future__ import annotations

import os
import platform
import shutil
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import psutil


class HostFacts(NamedTuple):
    """`cpus` is a float because the limit of a cgroup may be a fraction."""

    cpus: float
    memory_total_bytes: int
    memory_used_bytes: int
    hostname: str


class DiskSpace(NamedTuple):
    total_bytes: int
    free_bytes: int
    """What this user may still write."""


def disk_space(path: Path) -> DiskSpace:
    """The space of the file system of this path. Blocks; raises OSError."""
    usage = shutil.disk_usage(path)
    return DiskSpace(total_bytes=usage.total, free_bytes=usage.free)


def host_facts(*, root: Path = Path("/")) -> HostFacts:
    """`root` is the directory of /proc and /sys; both may be missing."""
    limits = cgroup_limits(root=root)
    memory = psutil.virtual_memory()
    total, used = int(memory.total), int(memory.total - memory.available)
    if limits.memory_bytes is not None and limits.memory_bytes < total:
        total = limits.memory_bytes
        used = min(used if limits.memory_used_bytes is None else limits.memory_used_bytes, total)
    cpus = float(_allowed_cpu_count())
    if limits.cpus is not None:
        cpus = min(cpus, limits.cpus)
    return HostFacts(
        cpus=cpus, memory_total_bytes=total, memory_used_bytes=used, hostname=socket.gethostname()
    )


class CpuReading(NamedTuple):
    """Load and utilization of all cores of the machine, including those that this process may not use."""

    cores: int
    load_1m: float | None
    """Load average over one minute; None if the system does not provide it."""
    busy_pct: float | None
    """Utilization since the last reading, in percent; None if no time has passed."""


class CpuMeter:
    """Reads load and utilization. The first `busy_pct` covers the time since the construction."""

    def __init__(self) -> None:
        self._previous_busy_and_total_s = _busy_and_total_cpu_s()

    def read(self) -> CpuReading:
        (busy_s, total_s), now = self._previous_busy_and_total_s, _busy_and_total_cpu_s()
        self._previous_busy_and_total_s = now
        spent_s = now[1] - total_s
        busy_pct = min(max(100.0 * (now[0] - busy_s) / spent_s, 0.0), 100.0) if spent_s > 0 else None
        try:
            load_1m: float | None = os.getloadavg()[0]
        except OSError:
            load_1m = None
        return CpuReading(cores=os.cpu_count() or 1, load_1m=load_1m, busy_pct=busy_pct)


def _busy_and_total_cpu_s() -> tuple[float, float]:
    """Busy and total time, summed over all cores. Guest time is part of user time."""
    times = psutil.cpu_times()._asdict()
    total_s = sum(spent_s for name, spent_s in times.items() if not name.startswith("guest"))
    return total_s - times["idle"] - times.get("iowait", 0.0), total_s


def cpu_model(*, root: Path = Path("/")) -> str:
    """The model name of the processor, or its architecture."""
    for line in (_read_text(root / "proc/cpuinfo") or "").splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("model name", "Model", "cpu model") and value.strip():
            return value.strip()
    return platform.processor() or platform.machine() or "CPU"


@dataclass(frozen=True)
class CgroupLimits:
    """None: not limited."""

    cpus: float | None = None
    memory_bytes: int | None = None
    memory_used_bytes: int | None = None
    """Memory in use by the group with the limit, without reclaimable caches."""


def cgroup_limits(*, root: Path = Path("/")) -> CgroupLimits:
    """The tightest limit of the cgroup of this process and its ancestors."""
    base = root / "sys/fs/cgroup"
    paths = _cgroup_path_by_controller(root)
    if (base / "cgroup.controllers").exists():
        folders = list(_group_and_ancestors(base, paths.get("", "/")))
        cpus = [_cpu_limit_v2(folder) for folder in folders]
        memory = [
            _read_memory_limit_and_usage(folder, limit="memory.max", used="memory.current")
            for folder in folders
        ]
    else:
        cpus = [_cpu_limit_v1(folder) for folder in _group_and_ancestors(base / "cpu", paths.get("cpu", "/"))]
        memory = [
            _read_memory_limit_and_usage(folder, limit="memory.limit_in_bytes", used="memory.usage_in_bytes")
            for folder in _group_and_ancestors(base / "memory", paths.get("memory", "/"))
        ]
    limited = [pair for pair in memory if pair is not None]
    memory_bytes, memory_used_bytes = min(limited, key=lambda pair: pair[0], default=(None, None))
    return CgroupLimits(
        cpus=min((share for share in cpus if share is not None), default=None),
        memory_bytes=memory_bytes,
        memory_used_bytes=memory_used_bytes,
    )


def _cgroup_path_by_controller(root: Path) -> dict[str, str]:
    """Group path by controller name, from /proc/self/cgroup; the name is empty for version 2."""
    paths: dict[str, str] = {}
    for line in (_read_text(root / "proc/self/cgroup") or "").splitlines():
        parts = line.split(":", 2)
        if len(parts) == 3:
            paths |= dict.fromkeys(parts[1].split(","), parts[2])
    return paths


def _group_and_ancestors(base: Path, group: str) -> Iterator[Path]:
    folder = base / group.lstrip("/")
    # In a container the path may be that of the host and not exist; its parents end at `base`.
    while folder != base and base in folder.parents:
        yield folder
        folder = folder.parent
    yield base


def _cpu_limit_v2(folder: Path) -> float | None:
    quota, _, period = (_read_text(folder / "cpu.max") or "").partition(" ")
    return _cpus_of_quota(_parse_int(quota), _parse_int(period))


def _cpu_limit_v1(folder: Path) -> float | None:
    return _cpus_of_quota(
        _parse_int(_read_text(folder / "cpu.cfs_quota_us")),
        _parse_int(_read_text(folder / "cpu.cfs_period_us")),
    )


def _cpus_of_quota(quota: int | None, period: int | None) -> float | None:
    return quota / period if quota is not None and period is not None and quota > 0 and period > 0 else None


def _read_memory_limit_and_usage(folder: Path, *, limit: str, used: str) -> tuple[int, int | None] | None:
    limit_bytes, used_bytes = _parse_int(_read_text(folder / limit)), _parse_int(_read_text(folder / used))
    if limit_bytes is None:
        return None
    if used_bytes is None:
        return limit_bytes, None
    return limit_bytes, max(0, used_bytes - _reclaimable_bytes(folder))


def _reclaimable_bytes(folder: Path) -> int:
    """Page cache that the kernel reclaims first near the limit of the group."""
    stat = dict(line.partition(" ")[::2] for line in (_read_text(folder / "memory.stat") or "").splitlines())
    return _parse_int(stat.get("total_inactive_file", stat.get("inactive_file"))) or 0


def _allowed_cpu_count() -> int:
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _read_text(path: Path) -> str | None:
    try:
        return path.read_text("utf-8", errors="replace").strip()
    except OSError:
        return None


def _parse_int(text: str | None) -> int | None:
    """None for empty text and for words such as "max"."""
    try:
        return int(text or "")
    except ValueError:
        return None
