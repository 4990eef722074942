"""Touches accelerators: what this machine has, how it is right now, and which of it a process may see.

The door is here; one file per vendor stands behind it. Not for: deciding who gets what
(scheduler/) or telling others about it (agent/, cluster/).
"""

from __future__ import annotations

from genie.hardware.accelerators import Inventory, inventory
from genie.hardware.host import HostFacts, host_facts
from genie.hardware.limits import TEMPERATURE_C_MAX, UTILIZATION_PCT_MAX, is_busy, is_overheated
from genie.hardware.probes import ProbeResult, probe
from genie.hardware.visibility import visible_devices_env

__all__ = [
    "TEMPERATURE_C_MAX",
    "UTILIZATION_PCT_MAX",
    "HostFacts",
    "Inventory",
    "ProbeResult",
    "host_facts",
    "inventory",
    "is_busy",
    "is_overheated",
    "probe",
    "visible_devices_env",
]
