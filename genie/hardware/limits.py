"""From readings to a verdict: when a GPU counts as busy, and when as too hot. Pure."""

from __future__ import annotations

import msgspec

from genie.model.node import GPUInfo, Vendor

UTILIZATION_PCT_MAX = 90.0
TEMPERATURE_C_MAX = 85.0


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
