"""The sections of the settings tree.

GENIE_* names, keys in the file and the rows of docs/ENVIRONMENT_VARIABLES.md are derived from the fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from genie.config.labels import LABEL, LABELS
from genie.config.op_libraries import OP_LIBRARIES
from genie.config.schema import setting


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """The session of one process, with the argument names of genie.init(). Times are in seconds."""

    discovery_method: str = setting(
        "auto",
        "Find the cluster by address or state directory.",
        allowed=("auto", "address", "local"),
    )
    master_addr: str | None = setting(None, "Address of the controller.")
    master_port: int = setting(5555, "Port of the controller.", low=1, high=65535)
    node_id: str | None = setting(None, "Name of this process in the cluster (default: generated).")
    node_role: str = setting(
        "client",
        "Role of this process: use, host or join a cluster.",
        allowed=("client", "server", "worker"),
    )
    backend: str = setting("auto", "Network backend.", allowed=("auto", "tcp", "rdma", "dpdk", "dpdk_gpudev"))
    enable_heartbeat: bool = setting(True, "Send heartbeats to the controller.")
    heartbeat_interval: float = setting(
        10.0, "Seconds between heartbeats; at most 60 while a device is open.", low=0.05, high=3600
    )
    heartbeat_timeout: float = setting(
        60.0,
        "Heartbeat timeout of a node in seconds; if not set, at least two intervals.",
        low=0.1,
        high=86400,
    )
    enable_gpu_monitoring: bool = setting(True, "Poll the accelerators of this machine in the background.")
    gpu_poll_interval: float = setting(5.0, "Seconds between polls.", low=0.05, high=3600)
    enable_health_checks: bool = setting(True, "Check the health of this process in the background.")
    health_check_interval: float = setting(30.0, "Seconds between health checks.", low=0.05, high=3600)
    timeout: float = setting(30.0, "Timeout of init() in seconds.", low=0.1, high=3600)
    launch_blocking: bool = setting(
        False,
        "Wait for every op, so that an error is raised on the line that caused it.",
    )
    token: str | None = setting(
        None, "Access token; if not set, the token of 'genie login' or the local owner token.", secret=True
    )


@dataclass(frozen=True, kw_only=True)
class ControllerConfig:
    """The controller: its address, its store, its timeouts and limits."""

    bind: str = setting("127.0.0.1", "Address to listen on. Any address but loopback requires TLS.")
    port: int = setting(5555, "Port to listen on; 0 selects a free port.", low=0, high=65535)
    advertise: str | None = setting(
        None, "Address under which other machines reach this one, if it is not `bind`."
    )
    store: str = setting(
        "sqlite", "sqlite, sqlite:PATH, etcd (run by Genie), etcd://HOST:PORT or etcds://..."
    )
    etcd_client_port: int = setting(
        2379, "Port for clients of the etcd member that Genie starts.", low=1, high=65535
    )
    etcd_peer_port: int = setting(2380, "Port for the other members of that etcd cluster.", low=1, high=65535)
    tls: str = setting("on", "Encrypt and authenticate every connection.", allowed=("on", "off"))
    node_ttl_s: float = setting(
        19.5, "Seconds without a heartbeat after which a node is down.", low=0.5, high=600
    )
    node_suspect_s: float = setting(
        3.0, "Seconds without a heartbeat after which a node is suspect.", low=0.1, high=600
    )
    node_reclaim_grace_s: float = setting(
        3.0,
        "Grace period in seconds until GPUs of a down node are reused.",
        low=0.1,
        high=600,
    )
    leader_ttl_s: float = setting(3.0, "Lifetime of the leader lease in seconds.", low=1, high=60)
    etcd_election_timeout_s: float = setting(
        1.0, "Election timeout of etcd in seconds, as its --election-timeout.", low=0.1, high=50
    )
    certificate_days: float = setting(
        7.0, "Lifetime of node and executor certificates in days.", low=0.0001, high=365
    )
    node_grace_days: float = setting(
        90.0, "Days in which a node can renew an expired certificate.", low=0, high=3650
    )
    join_token_s: float = setting(3600.0, "Lifetime of a join token in seconds.", low=1, high=86400)
    policy: str = setting(
        "fair", "Order of the queue: fair, fifo, priority, or MODULE:CLASS, a custom policy."
    )
    policy_budget_s: float = setting(
        0.01, "Time limit in seconds for one call of a custom policy.", low=0.00001, high=1
    )
    session_grace_s: float = setting(
        10.0,
        "Seconds after which the session of a disconnected client ends.",
        low=5,
        high=60,
    )
    queue_max: int = setting(10_000, "Maximum number of queued jobs.", low=1, high=1_000_000)
    node_workers_max: int = setting(
        1000,
        "Maximum number of workers per node, including those without requests.",
        low=1,
        high=1000,
    )
    jobs_kept: int = setting(10_000, "Number of finished jobs to keep.", low=1, high=1_000_000)
    history_bytes_max: int = setting(
        256 * 1024**2, "Maximum space of finished jobs in the store in bytes.", low=1024, high=1 << 50
    )
    history_days: float = setting(30.0, "Days to keep finished jobs.", low=0.001, high=3650)
    store_bytes_max: int = setting(
        0,
        "Maximum size of the store in bytes, as the quota of etcd; 0: its default.",
        low=0,
        high=1 << 50,
    )
    tenant_store_share: float = setting(
        0.25, "Maximum share of the store for the jobs of one tenant.", low=0.001, high=1
    )
    compact_store: bool = setting(
        True, "Compact the history of the store; in etcd, also that of its other users."
    )
    compile_ahead: bool = setting(
        True,
        "Compile a missing scheduler library when the controller starts.",
    )
    blobs_bytes_max: int = setting(
        10 * 1024**3, "Maximum disk space of uploaded working directories in bytes.", low=1024, high=1 << 50
    )
    blobs_tenant_bytes_max: int = setting(
        2 * 1024**3, "Maximum of that space for one tenant in bytes.", low=1024, high=1 << 50
    )


@dataclass(frozen=True, kw_only=True)
class AgentConfig:
    """The agent: the resources that it offers and how it runs jobs."""

    heartbeat_s: float = setting(1.0, "Seconds between heartbeats.", low=0.05, high=60)
    cpu_accelerators: int = setting(
        1, "Number of CPU accelerators to offer on a machine without GPUs.", low=0, high=64
    )
    host: str | None = setting(
        None, "Address under which clients reach the executors of this machine (default: detected)."
    )
    labels: Mapping[str, str] = setting(
        {},
        "Labels of the node, as K=V,K=V (a table in the file); jobs select nodes by labels.",
        rule=LABELS,
    )
    rack: str | None = setting(None, "Rack name; nodes of one rack count as close.", rule=LABEL)
    log_bytes_max: int = setting(
        16 * 1024**2, "Size in bytes at which the log of a job is rotated.", low=4096, high=1 << 40
    )
    log_files_max: int = setting(4, "Number of rotated logs to keep for each job.", low=1, high=100)
    stop_grace_s: float = setting(
        5.0, "Grace period between SIGTERM and SIGKILL in seconds.", low=0, high=600
    )
    jobs_kept: int = setting(200, "Number of finished jobs whose logs to keep.", low=1, high=100_000)
    jobs_bytes_max: int = setting(
        10 * 1024**3,
        "Maximum size of the files of finished jobs in bytes.",
        low=0,
        high=1 << 60,
    )
    disk_free_min_bytes: int = setting(
        1024**3,
        "Minimum free disk space to accept jobs, at most 5%, in bytes.",
        low=0,
        high=1 << 60,
    )
    compile_ahead: bool = setting(True, "Compile a missing executor library when the agent starts.")
    executor_memory_bytes_max: int = setting(
        0,
        "Tensor memory per client and accelerator in bytes; 0: no limit.",
        low=0,
        high=1 << 50,
    )
    executor_op_libraries: Mapping[str, str] = setting(
        {},
        "Allowed op libraries, as NAMESPACE=LIBRARY (.so or Python module).",
        rule=OP_LIBRARIES,
    )


@dataclass(frozen=True, kw_only=True)
class GossipConfig:
    """Gossip between servers and nodes: the list of members, and faster detection of failures."""

    enabled: str = setting(
        "auto",
        "Use gossip; auto: if other machines can reach the servers.",
        allowed=("auto", "on", "off"),
    )
    server_port: int = setting(
        5556,
        "UDP and TCP port of gossip, the same on all servers; 0: a free port.",
        low=0,
        high=65535,
    )
    node_port: int = setting(5557, "UDP and TCP port of gossip on nodes; 0: a free port.", low=0, high=65535)


@dataclass(frozen=True, kw_only=True)
class PathsConfig:
    """Directories on this machine."""

    state_dir: Path = setting(
        Path("~/.local/state/genie"), "State directory: keys, tokens, the embedded store, logs."
    )


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    """The log on standard error."""

    level: str = setting(
        "INFO",
        "Log level (of short commands: WARNING).",
        allowed=("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"),
    )
    format: str = setting("text", "Format of log lines.", allowed=("text", "json"))


@dataclass(frozen=True, kw_only=True)
class WorkdirConfig:
    """Limits of `genie submit --workdir`."""

    bytes_max: int = setting(
        256 * 1024**2, "Maximum size of the working directory in bytes.", low=1024, high=1 << 40
    )
    files_max: int = setting(
        20_000, "Maximum number of files in the working directory.", low=1, high=10_000_000
    )


@dataclass(frozen=True, kw_only=True)
class GridConfig:
    """Files of `genie grid` (also `grid-cli`)."""

    file: Path = setting(
        Path("config/cluster_config.yaml"), "Grid file: the nodes of the grid and their settings."
    )
    ssh_config: Path = setting(
        Path("~/.ssh/config"), "Configuration of OpenSSH: aliases, users, ports, keys, jump hosts."
    )


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings tree. `sources` maps each dotted key to the source of its value."""

    cluster: ClusterConfig
    controller: ControllerConfig
    agent: AgentConfig
    gossip: GossipConfig
    paths: PathsConfig
    log: LogConfig
    workdir: WorkdirConfig
    grid: GridConfig
    sources: Mapping[str, str]


SECTIONS: dict[str, type[Any]] = {
    "cluster": ClusterConfig,
    "controller": ControllerConfig,
    "agent": AgentConfig,
    "gossip": GossipConfig,
    "paths": PathsConfig,
    "log": LogConfig,
    "workdir": WorkdirConfig,
    "grid": GridConfig,
}

# Alternative names from the visual guide.
ALIASES = {"enable_gpu_monitor": "enable_gpu_monitoring", "health_interval": "health_check_interval"}
