"""From readings to a verdict: when a GPU counts as busy, when as too hot, and when as well again. Pure."""

from __future__ import annotations

import msgspec

from genie.model.node import GPUInfo, Vendor

UTILIZATION_PCT_MAX = 90.0
TEMPERATURE_C_MAX = 85.0
GOOD_READINGS_MIN = 3
"""In a row, until a GPU that was unwell is available again."""


def is_busy(gpu: GPUInfo) -> bool:
    """Above the utilisation at which nobody else should be sent to it.

    A CPU accelerator is never busy in this sense: the host's processors are shared with
    everything else on the machine, so their load says little about the accelerator.
    """
    if gpu.vendor is Vendor.CPU or gpu.utilization_pct is None:
        return False
    return gpu.utilization_pct > UTILIZATION_PCT_MAX


def is_overheated(gpu: GPUInfo) -> bool:
    return gpu.temperature_c is not None and gpu.temperature_c > TEMPERATURE_C_MAX


def with_verdict(gpu: GPUInfo) -> GPUInfo:
    """The same GPU, not available when it is busy. One that already is not stays so, with its own reason."""
    if not gpu.available or not is_busy(gpu):
        return gpu
    reason = f"utilisation {gpu.utilization_pct:.0f}% is above {UTILIZATION_PCT_MAX:.0f}%"
    return msgspec.structs.replace(gpu, available=False, reason=reason)


class Convalescence:
    """Keeps a GPU that was throttled, faulty or lost away from work until it has been well for a while.

    Without it a GPU that is throttled every few seconds would be taken and given up as often.
    """

    def __init__(self) -> None:
        self._unwell: dict[int, tuple[str, int]] = {}
        """By `gpu_id`: what it had last, and how many good readings there were since."""

    def judged(self, gpu: GPUInfo) -> GPUInfo:
        """One new reading of it. Being busy is no illness: that verdict comes afterwards."""
        if not gpu.available:
            self._unwell[gpu.gpu_id] = (gpu.reason, 0)
            return gpu
        if gpu.gpu_id not in self._unwell:
            return gpu
        reason, good = self._unwell.pop(gpu.gpu_id)
        if good + 1 >= GOOD_READINGS_MIN:
            return gpu
        self._unwell[gpu.gpu_id] = (reason, good + 1)
        return msgspec.structs.replace(gpu, available=False, reason=f"until just now: {reason}")
