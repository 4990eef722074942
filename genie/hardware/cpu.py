"""The CPU as an accelerator, so that everything works on a machine without a GPU.

Each of the N gets an equal share of the memory that this process may use; all show the
utilisation of the whole host. They are one island on one NUMA node: any of them runs on any
processor. What others on the host use is not told apart from what jobs use.

Not for: limiting what a process takes (agent/).
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import psutil

from genie.hardware.host import cpu_model, host_facts
from genie.model.node import GPUInfo, Vendor


class CpuReader:
    def __init__(self, count: int, *, root: Path = Path("/")) -> None:
        self._count = count
        self._root = root
        self._name = cpu_model(root=root)
        self._last_s: tuple[float, float] | None = None

    def read(self, held: Collection[int] = ()) -> tuple[GPUInfo, ...]:
        facts = host_facts(root=self._root)
        utilization_pct = self._utilization_pct()
        return tuple(
            GPUInfo(
                gpu_id=index,
                name=self._name,
                vendor=Vendor.CPU,
                memory_total_bytes=facts.memory_total_bytes // self._count,
                memory_used_bytes=facts.memory_used_bytes // self._count,
                utilization_pct=utilization_pct,
                island=0,
                numa=0,
            )
            for index in range(self._count)
        )

    def close(self) -> None:
        """Nothing is held; every reader has it."""

    def _utilization_pct(self) -> float | None:
        """Since the last call; None on the first. psutil's own version keeps that per thread."""
        times = psutil.cpu_times()
        # guest time is also counted as user time, so it is left out of the sum
        total_s: float = sum(
            value for name, value in times._asdict().items() if name not in ("guest", "guest_nice")
        )
        idle_s: float = times.idle + getattr(times, "iowait", 0.0)
        last, self._last_s = self._last_s, (total_s, idle_s)
        if last is None or total_s <= last[0]:
            return None
        busy_share = 1.0 - (idle_s - last[1]) / (total_s - last[0])
        return round(min(max(busy_share, 0.0), 1.0) * 100.0, 1)
