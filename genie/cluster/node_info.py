"""Describes this process as a node: its ID, host and GPUs.

Re-exports NodeInfo, GPUInfo, NodeStatus and NodeRole of genie.model.node.
"""

from __future__ import annotations

from genie.config import ClusterConfig
from genie.hardware import HostFacts, host_facts, inventory
from genie.model.limits import NAME_CHARS_MAX
from genie.model.names import node_id_from, validate_node_id
from genie.model.node import GPUInfo, NodeInfo, NodeRole, NodeStatus
from genie.version import __version__

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


def create_local_node(
    config: ClusterConfig,
    *,
    suffix: str,
    host: str = "127.0.0.1",
    gpus: tuple[GPUInfo, ...] | None = None,
    facts: HostFacts | None = None,
    now: float = 0.0,
) -> NodeInfo:
    """Returns this process as a node. `suffix` is random and distinguishes processes of one host.

    `host` is its address for other machines, `now` the time of its first heartbeat. Reads GPUs and host facts
    (which blocks) if they are not given. Raises NameInvalidError for an invalid configured node ID.
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
    """The configured node ID, or host name and `suffix`; truncates the name, never the suffix."""
    if config.node_id is not None:
        return validate_node_id(config.node_id)
    name = node_id_from(hostname)[: NAME_CHARS_MAX - len(suffix) - 1].rstrip("-")
    return validate_node_id(f"{name}-{suffix}")


def new_session_id(node_id: str, *, suffix: str) -> str:
    """A unique ID for a session: several processes may share a node ID. Truncates the node ID, never the
    suffix."""
    return validate_node_id(f"{node_id[: NAME_CHARS_MAX - len(suffix) - 1].rstrip('-')}-{suffix}")


def detect_local_gpus(*, cpu_accelerators: int = 0) -> tuple[GPUInfo, ...]:
    """Reads the GPUs of this machine; without GPUs, returns this number of CPU accelerators. Blocks."""
    return inventory(cpu_accelerators)
