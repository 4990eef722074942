"""Ray as a peer: a few nodes on one machine with 1,000 logical GPUs.

    RAY_PYTHON benchmarks/peers/ray_peer.py FOLDER NODES        in a sandbox (peer_sandbox.py)

RAY_PYTHON is an interpreter with Ray; Genie need not be installed there. A job is a placement group with one
bundle of one GPU. It is placed when wait() returns True: the bundle is reserved on a node, and no process is
started (ready() would start one).
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import peer_sandbox

RAY_VERSION = "2.60.0"
GPUS_PER_NODE = 1000
NODE_COUNT = 8
"""Each node is several processes that use CPU time even when idle: 125 would overload a small machine."""
WORKER_COUNT = 64
"""Concurrent requests under load: more increased latency several times, and throughput only slightly."""
INSTALL_COMMAND = (
    f"python3 -m venv DIR && DIR/bin/pip install ray=={RAY_VERSION}, then --ray-python DIR/bin/python"
)
WAIT_TIMEOUT_S = 30
# For 127.0.0.1 Ray would detect and use another address.
_ADDRESS = "127.0.0.2"
_OBJECT_STORE_BYTES = 80 << 20
_FOLDER_CHARS_MAX = 36  # its socket paths are 70 characters longer, and the limit is 107


def unavailable_reason(python: str) -> str | None:
    """Why Ray cannot be measured, with a hint; None if it can."""
    command = [python, "-c", "import ray; print(ray.__version__)"]
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
        version = done.stdout.strip() if done.returncode == 0 else None
    except (OSError, subprocess.TimeoutExpired):
        version = None
    if version is None:
        return f"{python} has no Ray; {INSTALL_COMMAND}"
    if version != RAY_VERSION:
        return f"{python} has Ray {version}, but {RAY_VERSION} is required; {INSTALL_COMMAND}"
    return None


def count_alive_gpus(nodes: Iterable[Mapping[str, Any]]) -> int:
    """Number of GPUs of the alive nodes in the result of ray.nodes()."""
    return int(sum(node["Resources"].get("GPU", 0) for node in nodes if node["Alive"]))


def find_placement_node(table: Mapping[str, Any]) -> str:
    """Node of the bundle in the result of placement_group_table(). Raises ValueError if it has none."""
    nodes = [node for node in table["bundles_to_node_id"].values() if node]
    if table["state"] != "CREATED" or len(nodes) != 1:
        raise ValueError(f"placement group is {table['state']} on {nodes}")
    return str(nodes[0])


def measure_placement_ms() -> float:
    """Places a group, removes it, and returns the placement latency."""
    from ray.util.placement_group import placement_group, remove_placement_group

    began = time.perf_counter()
    group = placement_group([{"GPU": 1}])
    if not group.wait(WAIT_TIMEOUT_S):
        raise SystemExit("could not place a placement group")
    latency_ms = (time.perf_counter() - began) * 1000
    remove_placement_group(group)
    return latency_ms


def run_measurement(kind: str, count: int, time_s: float) -> list[str]:
    lines = [f"began {time.monotonic():.6f}"]

    def place() -> None:
        latency_ms = measure_placement_ms()
        lines.append(f"placed {time.monotonic():.6f} {latency_ms:.3f}")

    def work(until_s: float) -> None:
        while time.monotonic() < until_s:
            place()

    if kind == "quiet":
        for _ in range(count):
            place()
            time.sleep(time_s)
        return lines
    workers = [threading.Thread(target=work, args=(time.monotonic() + time_s,)) for _ in range(count)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return lines


def check_placement() -> None:
    """Verifies for one group with the placement group table that wait() means placed."""
    from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group

    group = placement_group([{"GPU": 1}])
    if not group.wait(WAIT_TIMEOUT_S):
        raise SystemExit("could not place the first placement group")
    find_placement_node(placement_group_table(group))
    remove_placement_group(group)


def main() -> int:
    folder, nodes = Path(sys.argv[1]), int(sys.argv[2])
    if len(str(folder)) > _FOLDER_CHARS_MAX:
        raise SystemExit(f"path {folder} is too long for the sockets of Ray; set TMPDIR to a shorter one")
    peer_sandbox.bring_up_loopback()
    os.environ |= {"RAY_TMPDIR": str(folder), "HOME": str(folder), "RAY_USAGE_STATS_ENABLED": "0"}
    import ray
    from ray.cluster_utils import Cluster

    node = {
        "num_cpus": GPUS_PER_NODE // nodes,
        "num_gpus": GPUS_PER_NODE // nodes,
        "object_store_memory": _OBJECT_STORE_BYTES,
        "node_ip_address": _ADDRESS,
    }
    cluster = Cluster(initialize_head=True, head_node_args=node | {"include_dashboard": False})
    for _ in range(nodes - 1):
        cluster.add_node(wait=False, **node)
    cluster.wait_for_nodes()
    ray.init(address=cluster.address, log_to_driver=False, _node_ip_address=_ADDRESS)
    if count_alive_gpus(ray.nodes()) != GPUS_PER_NODE:
        raise SystemExit(f"not all nodes are alive: {ray.nodes()}")
    check_placement()
    peer_sandbox.serve_requests(run_measurement)
    ray.shutdown()
    cluster.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
