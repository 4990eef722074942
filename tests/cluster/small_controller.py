"""The controller of the session tests: a fake controller on a thread of its own, with one node."""

from __future__ import annotations

from genie.cluster.events import EventType
from genie.cluster.state import ClusterState
from genie.model.node import GPUInfo, NodeInfo, NodeRole, NodeStatus, Vendor
from tests.fakes.controller import OWNER_TOKEN, ThreadedController, make_session_job

TOKEN = OWNER_TOKEN
QUIET_SETTINGS = {"enable_gpu_monitoring": False, "enable_health_checks": False}
"""Arguments of init for sessions without background work."""
__all__ = [
    "QUIET_SETTINGS",
    "TOKEN",
    "SmallController",
    "has_event",
    "make_gpu",
    "make_node",
    "make_session_job",
]


def has_event(state: ClusterState, kind: EventType) -> bool:
    return any(event.type is kind for event in state.events.history())


def make_gpu(gpu_id: int = 0, *, vendor: Vendor = Vendor.CPU, name: str = "Test CPU") -> GPUInfo:
    return GPUInfo(gpu_id=gpu_id, name=name, vendor=vendor, memory_total_bytes=1 << 30)


def make_node(
    node_id: str,
    *gpus: GPUInfo,
    status: NodeStatus = NodeStatus.HEALTHY,
    last_heartbeat: float = 1.0,
) -> NodeInfo:
    return NodeInfo(
        node_id=node_id,
        hostname=f"host-of-{node_id}",
        role=NodeRole.WORKER,
        host="127.0.0.1",
        gpus=gpus,
        status=status,
        last_heartbeat=last_heartbeat,
    )


class SmallController(ThreadedController):
    """Accepts the owner token only."""

    def __init__(self) -> None:
        super().__init__(only_token=OWNER_TOKEN, nodes=(make_node("n1", make_gpu()),))
