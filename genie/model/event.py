"""Events of a cluster."""

from __future__ import annotations

import enum

import msgspec

from genie.model.record import Record


class EventType(enum.StrEnum):
    INIT_PHASE = "init_phase"
    NODE_JOINED = "node_joined"
    NODE_SUSPECT = "node_suspect"
    NODE_LOST = "node_lost"
    NODE_RECOVERED = "node_recovered"
    HEALTH_CHANGED = "health_changed"
    GPU_AVAILABLE = "gpu_available"
    GPU_UNAVAILABLE = "gpu_unavailable"
    GPU_OVERHEATED = "gpu_overheated"
    BACKEND_FALLBACK = "backend_fallback"
    CONNECTION_LOST = "connection_lost"
    CONNECTION_RESTORED = "connection_restored"
    MONITOR_ERROR = "monitor_error"
    SHUTDOWN = "shutdown"


class ClusterEvent(Record, frozen=True, kw_only=True):
    """One event: node, time, and reason as text for a log line."""

    type: EventType
    node_id: str
    at: float
    reason: str
    facts: dict[str, str | int | float | bool | None] = msgspec.field(default_factory=dict)
