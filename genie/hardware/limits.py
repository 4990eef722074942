"""Thresholds: when a GPU is busy, overheated, or available again after a fault. Pure."""

from __future__ import annotations

import msgspec

from genie.model.limits import TEMPERATURE_C_MAX
from genie.model.node import GPUInfo, Vendor

BUSY_ABOVE_UTILIZATION_PCT = 90.0
RECOVERY_GOOD_READINGS_MIN = 3
"""Consecutive good readings until a GPU is available again after a fault."""


def is_busy(gpu: GPUInfo) -> bool:
    """Whether the utilization is so high that no further job should be placed on it.

    A CPU accelerator is never busy: the load of the host includes all other programs.
    """
    if gpu.vendor is Vendor.CPU or gpu.utilization_pct is None:
        return False
    return gpu.utilization_pct > BUSY_ABOVE_UTILIZATION_PCT


def is_overheated(gpu: GPUInfo) -> bool:
    return gpu.temperature_c is not None and gpu.temperature_c > TEMPERATURE_C_MAX


def mark_unavailable_if_busy(gpu: GPUInfo) -> GPUInfo:
    """Marks a busy GPU as unavailable. A GPU that is already unavailable keeps its reason."""
    if not gpu.available or not is_busy(gpu):
        return gpu
    reason = f"utilization {gpu.utilization_pct:.0f}% is above {BUSY_ABOVE_UTILIZATION_PCT:.0f}%"
    return msgspec.structs.replace(gpu, available=False, reason=reason)


class RecoveryTracker:
    """Keeps a GPU that was throttled, faulty or lost unavailable until several readings are good.

    Otherwise a GPU that is throttled every few seconds would alternate between available and unavailable.
    """

    def __init__(self) -> None:
        self._reason_and_good_readings_by_gpu: dict[int, tuple[str, int]] = {}
        """By `gpu_id`: the last reason, and the number of good readings since."""

    def mark_unavailable_if_recovering(self, gpu: GPUInfo) -> GPUInfo:
        """Processes a new reading and returns it, marked as unavailable during recovery."""
        if not gpu.available:
            self._reason_and_good_readings_by_gpu[gpu.gpu_id] = (gpu.reason, 0)
            return gpu
        if gpu.gpu_id not in self._reason_and_good_readings_by_gpu:
            return gpu
        reason, good = self._reason_and_good_readings_by_gpu.pop(gpu.gpu_id)
        if good + 1 >= RECOVERY_GOOD_READINGS_MIN:
            return gpu
        self._reason_and_good_readings_by_gpu[gpu.gpu_id] = (reason, good + 1)
        return msgspec.structs.replace(gpu, available=False, reason=f"recovering from: {reason}")
