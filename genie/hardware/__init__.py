"""The hardware of this machine: accelerators, their readings and their visibility to processes.

This is the public interface; there is one module per vendor. Allocation is in scheduler/, reporting in agent/
and cluster/.
"""

from __future__ import annotations

from genie.hardware.accelerators import Inventory, inventory
from genie.hardware.host import CpuMeter, CpuReading, DiskSpace, HostFacts, disk_space, host_facts
from genie.hardware.limits import BUSY_ABOVE_UTILIZATION_PCT, is_busy, is_overheated
from genie.hardware.probes import ProbeResult, probe_accelerators
from genie.hardware.visibility import visible_devices_env
from genie.model.limits import TEMPERATURE_C_MAX

__all__ = [
    "BUSY_ABOVE_UTILIZATION_PCT",
    "TEMPERATURE_C_MAX",
    "CpuMeter",
    "CpuReading",
    "DiskSpace",
    "HostFacts",
    "Inventory",
    "ProbeResult",
    "disk_space",
    "host_facts",
    "inventory",
    "is_busy",
    "is_overheated",
    "probe_accelerators",
    "visible_devices_env",
]
