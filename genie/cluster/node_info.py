"""This process as a node of the cluster: who it is and what the machine under it has.

NodeInfo, GPUInfo, NodeStatus and NodeRole live in genie.model.node, because they travel; they are
here under the names that users know. Not for: watching them change (monitoring.py, health.py).
"""

from __future__ import annotations

from genie import __version__
from genie.config import ClusterConfig
from genie.hardware import HostFacts, host_facts, inventory
from genie.model.names import checked_node_id, node_id_from
from genie.model.node import GPUInfo, NodeInfo, NodeRole, NodeStatus

__all__ = [
    "GPUInfo",
    "NodeInfo",
    "NodeRole",
    "NodeStatus",
    "create_local_node",
    "detect_local_gpus",
    "local_node_id",
    "new_session_id",
]

_NODE_ID_LENGTH_MAX = 63


def create_local_node(
    config: ClusterConfig,
    *,
    suffix: str,
    host: str = "127.0.0.1",
    gpus: tuple[GPUInfo, ...] | None = None,
    facts: HostFacts | None = None,
    now: float = 0.0,
) -> NodeInfo:
    """This process as a node. `suffix` tells processes of one host apart: the caller's random part.

    `host` is where others reach it, `now` the time of its first sign of life. GPUs and host are read
    (which blocks) when not given. NameInvalidError for a configured id with characters that may not be.
    """
    facts = host_facts() if facts is None else facts
    role = NodeRole(config.node_role)
    return NodeInfo(
        node_id=local_node_id(config, hostname=facts.hostname, suffix=suffix),
        hostname=facts.hostname,
        role=role,
        host=host,
        control_port=config.master_port if role is NodeRole.SERVER else 0,
        network_backend="tcp" if config.backend == "auto" else config.backend,
        gpus=detect_local_gpus() if gpus is None else gpus,
        cpus=facts.cpus,
        memory_total_bytes=facts.memory_total_bytes,
        memory_used_bytes=facts.memory_used_bytes,
        last_heartbeat=now,
        version=__version__,
    )


def local_node_id(config: ClusterConfig, *, hostname: str, suffix: str) -> str:
    """The configured id, or the host's name with `suffix` behind it; a long name is cut, the suffix never."""
    if config.node_id is not None:
        return checked_node_id(config.node_id)
    name = node_id_from(hostname)[: _NODE_ID_LENGTH_MAX - len(suffix) - 1].rstrip("-")
    return checked_node_id(f"{name}-{suffix}")


def new_session_id(node_id: str, *, suffix: str) -> str:
    """How the controller tells sessions apart that have one node id: this process may end, and another on
    the same machine go on. A long id is cut, the suffix never."""
    return checked_node_id(f"{node_id[: _NODE_ID_LENGTH_MAX - len(suffix) - 1].rstrip('-')}-{suffix}")


def detect_local_gpus(*, cpu_accelerators: int = 0) -> tuple[GPUInfo, ...]:
    """The GPUs of this machine as they are now, or as many CPU accelerators where it has none. Blocks."""
    return inventory(cpu_accelerators)
