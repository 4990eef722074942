"""What the system says about a process: CPU time, resident memory, descriptors and threads, and the slope of
such readings over the number of operations. Linux only."""

from __future__ import annotations

import itertools
import os
import resource
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = resource.getpagesize()


@dataclass(frozen=True)
class ProcessReading:
    """One process at one time."""

    rss_bytes: int
    descriptors: int
    threads: int


def read_process(pid: int) -> ProcessReading:
    """Raises FileNotFoundError if the process has ended."""
    proc = Path(f"/proc/{pid}")
    return ProcessReading(
        rss_bytes=read_rss_bytes(pid),
        descriptors=sum(1 for _ in (proc / "fd").iterdir()),
        threads=sum(1 for _ in (proc / "task").iterdir()),
    )


def read_rss_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_BYTES


def read_cpu_s(pid: int) -> float:
    """User and system time of all threads so far, in steps of 10 ms."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def theil_sen_slope(points: Sequence[tuple[float, float]]) -> float:
    """The median of the slopes between all pairs of points (x, y): a few outliers do not change it."""
    slopes = [(y2 - y1) / (x2 - x1) for (x1, y1), (x2, y2) in itertools.combinations(points, 2) if x1 != x2]
    return statistics.median(slopes)
