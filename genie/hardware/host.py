"""The machine around the accelerators: processors, memory, name, within what this process may use.

A container sees the whole machine in /proc but may use a part of it; affinity masks and cgroup
limits (v2 and v1) are read where the system has them. Not for: accelerators.
"""

from __future__ import annotations

import os
import platform
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import psutil


class HostFacts(NamedTuple):
    """`cpus` is a float because a cgroup can allow one and a half."""

    cpus: float
    memory_total_bytes: int
    memory_used_bytes: int
    hostname: str


def host_facts(*, root: Path = Path("/")) -> HostFacts:
    """`root` is where /proc and /sys are looked for; both may be missing."""
    limits = cgroup_limits(root=root)
    memory = psutil.virtual_memory()
    total, used = int(memory.total), int(memory.total - memory.available)
    if limits.memory_bytes is not None and limits.memory_bytes < total:
        total = limits.memory_bytes
        used = min(used if limits.memory_used_bytes is None else limits.memory_used_bytes, total)
    cpus = float(_cpus_allowed())
    if limits.cpus is not None:
        cpus = min(cpus, limits.cpus)
    return HostFacts(
        cpus=cpus, memory_total_bytes=total, memory_used_bytes=used, hostname=socket.gethostname()
    )


def cpu_model(*, root: Path = Path("/")) -> str:
    """The processor's name as people know it, or the nearest that the system gives."""
    for line in (_read(root / "proc/cpuinfo") or "").splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("model name", "Model", "cpu model") and value.strip():
            return value.strip()
    return platform.processor() or platform.machine() or "CPU"


@dataclass(frozen=True)
class CgroupLimits:
    """None where nothing is limited."""

    cpus: float | None = None
    memory_bytes: int | None = None
    memory_used_bytes: int | None = None
    """What the group that holds the limit uses now, caches that can be dropped left out."""


def cgroup_limits(*, root: Path = Path("/")) -> CgroupLimits:
    """The tightest limit from this process's group up to the top; an ancestor's counts like its own."""
    base = root / "sys/fs/cgroup"
    paths = _group_paths(root)
    if (base / "cgroup.controllers").exists():
        folders = list(_upwards(base, paths.get("", "/")))
        cpus = [_cpus_v2(folder) for folder in folders]
        memory = [_memory(folder, limit="memory.max", used="memory.current") for folder in folders]
    else:
        cpus = [_cpus_v1(folder) for folder in _upwards(base / "cpu", paths.get("cpu", "/"))]
        memory = [
            _memory(folder, limit="memory.limit_in_bytes", used="memory.usage_in_bytes")
            for folder in _upwards(base / "memory", paths.get("memory", "/"))
        ]
    limited = [pair for pair in memory if pair is not None]
    memory_bytes, memory_used_bytes = min(limited, key=lambda pair: pair[0], default=(None, None))
    return CgroupLimits(
        cpus=min((share for share in cpus if share is not None), default=None),
        memory_bytes=memory_bytes,
        memory_used_bytes=memory_used_bytes,
    )


def _group_paths(root: Path) -> dict[str, str]:
    """Controller name to group path, as /proc/self/cgroup has it; the name is empty for version 2."""
    paths: dict[str, str] = {}
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        parts = line.split(":", 2)
        if len(parts) == 3:
            paths |= dict.fromkeys(parts[1].split(","), parts[2])
    return paths


def _upwards(base: Path, group: str) -> Iterator[Path]:
    folder = base / group.lstrip("/")
    # In a container the path can be the host's and not exist here; its parents end at `base`.
    while folder != base and base in folder.parents:
        yield folder
        folder = folder.parent
    yield base


def _cpus_v2(folder: Path) -> float | None:
    quota, _, period = (_read(folder / "cpu.max") or "").partition(" ")
    return _share(_number(quota), _number(period))


def _cpus_v1(folder: Path) -> float | None:
    return _share(_number(_read(folder / "cpu.cfs_quota_us")), _number(_read(folder / "cpu.cfs_period_us")))


def _share(quota: int | None, period: int | None) -> float | None:
    return quota / period if quota is not None and period is not None and quota > 0 and period > 0 else None


def _memory(folder: Path, *, limit: str, used: str) -> tuple[int, int | None] | None:
    limit_bytes, used_bytes = _number(_read(folder / limit)), _number(_read(folder / used))
    if limit_bytes is None:
        return None
    if used_bytes is None:
        return limit_bytes, None
    return limit_bytes, max(0, used_bytes - _droppable_bytes(folder))


def _droppable_bytes(folder: Path) -> int:
    """Page cache that the kernel takes back first when the group comes near its limit."""
    stat = dict(line.partition(" ")[::2] for line in (_read(folder / "memory.stat") or "").splitlines())
    return _number(stat.get("total_inactive_file", stat.get("inactive_file"))) or 0


def _cpus_allowed() -> int:
    if hasattr(os, "sched_getaffinity"):  # Linux has it, macOS does not
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _read(path: Path) -> str | None:
    try:
        return path.read_text("utf-8", errors="replace").strip()
    except OSError:
        return None


def _number(text: str | None) -> int | None:
    """None for nothing and for words such as "max"."""
    try:
        return int(text or "")
    except ValueError:
        return None
