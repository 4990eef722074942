"""CPU accelerators, for machines without a GPU.

Each accelerator has an equal share of the memory that this process may use, and the utilization of the whole
host. All are one island on one NUMA node. Memory of jobs is not distinguished from other memory in use. Does
not limit the resources of processes (agent/).
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import psutil

from genie.hardware.host import cpu_model, host_facts
from genie.model.node import GPUInfo, Vendor


class CpuReader:
    def __init__(self, count: int, *, root: Path = Path("/")) -> None:
        self._accelerator_count = count
        self._root = root
        self._cpu_model = cpu_model(root=root)
        self._last_total_and_idle_s: tuple[float, float] | None = None

    def read(self, held: Collection[int] = ()) -> tuple[GPUInfo, ...]:
        facts = host_facts(root=self._root)
        utilization_pct = self._utilization_pct()
        return tuple(
            GPUInfo(
                gpu_id=index,
                name=self._cpu_model,
                vendor=Vendor.CPU,
                memory_total_bytes=facts.memory_total_bytes // self._accelerator_count,
                memory_used_bytes=facts.memory_used_bytes // self._accelerator_count,
                utilization_pct=utilization_pct,
                island=0,
                numa=0,
            )
            for index in range(self._accelerator_count)
        )

    def close(self) -> None:
        """Does nothing; part of the interface of readers."""

    def _utilization_pct(self) -> float | None:
        """Utilization since the last call; None on the first. The function of psutil is per thread."""
        times = psutil.cpu_times()
        # guest time is part of user time
        total_s: float = sum(
            value for name, value in times._asdict().items() if name not in ("guest", "guest_nice")
        )
        idle_s: float = times.idle + getattr(times, "iowait", 0.0)
        last, self._last_total_and_idle_s = self._last_total_and_idle_s, (total_s, idle_s)
        if last is None or total_s <= last[0]:
            return None
        busy_share = 1.0 - (idle_s - last[1]) / (total_s - last[0])
        return round(min(max(busy_share, 0.0), 1.0) * 100.0, 1)
