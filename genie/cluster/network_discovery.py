"""Public alias of genie.runtime.network_discovery, which Genie's own code imports."""

from __future__ import annotations

from genie.runtime.network_discovery import (
    DiscoveryResult,
    NetworkDiscovery,
    Probe,
    Recommendation,
    Selection,
    probe_of_backend,
    recommend,
    select_backend,
)

__all__ = [
    "DiscoveryResult",
    "NetworkDiscovery",
    "Probe",
    "Recommendation",
    "Selection",
    "probe_of_backend",
    "recommend",
    "select_backend",
]
