"""Ray as a peer: a few nodes on one machine, with 1,000 GPUs that are only numbers.

    RAY_PYTHON benchmarks/peers/ray_peer.py FOLDER NODES        inside a room (peer_room.py)

RAY_PYTHON is an interpreter with Ray in it; Genie is not needed there. A job is a placement group with one
bundle of one GPU. It is placed when wait() says so: the bundle is held on a node, and no process is started
(ready() would start one). Not for: measuring (bench_peers.py counts).
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

import peer_room

VERSION = "2.60.0"
GPUS = 1000
NODES = 8
"""Each is several processes that are never quite idle: 125 of them are too much for a small machine."""
WORKERS = 64
"""Asked at once under load: more gave little more, at several times the latency."""
INSTALL = f"python3 -m venv DIR && DIR/bin/pip install ray=={VERSION}, then --ray-python DIR/bin/python"
WAIT_S = 30
# Ray takes 127.0.0.1 for "find my address" and would go and look for another.
_ADDRESS = "127.0.0.2"
_OBJECT_STORE_BYTES = 80 << 20
_LONGEST_FOLDER = 36  # its sockets lie 70 characters below, and a socket's path may have 107


def missing(python: str) -> str | None:
    """Why it cannot be measured and what to do about it; None when it can."""
    ask = [python, "-c", "import ray; print(ray.__version__)"]
    try:
        done = subprocess.run(ask, check=False, capture_output=True, text=True, timeout=60)
        version = done.stdout.strip() if done.returncode == 0 else None
    except (OSError, subprocess.TimeoutExpired):
        version = None
    if version is None:
        return f"{python} has no Ray; {INSTALL}"
    if version != VERSION:
        return f"{python} has Ray {version}, and the recipe is for {VERSION}; {INSTALL}"
    return None


def alive_gpus(nodes: Iterable[Mapping[str, Any]]) -> int:
    """Of what ray.nodes() says."""
    return int(sum(node["Resources"].get("GPU", 0) for node in nodes if node["Alive"]))


def placed_on(table: Mapping[str, Any]) -> str:
    """Of what placement_group_table() says: the node of its bundle; ValueError when it has none."""
    nodes = [node for node in table["bundles_to_node_id"].values() if node]
    if table["state"] != "CREATED" or len(nodes) != 1:
        raise ValueError(f"the group is {table['state']} on {nodes}")
    return str(nodes[0])


def place_ms() -> float:
    """Until it was known to be placed; it is removed when this returns."""
    from ray.util.placement_group import placement_group, remove_placement_group

    began = time.perf_counter()
    group = placement_group([{"GPU": 1}])
    if not group.wait(WAIT_S):
        raise SystemExit("a group was not placed")
    taken_ms = (time.perf_counter() - began) * 1000
    remove_placement_group(group)
    return taken_ms


def measure(kind: str, count: int, time_s: float) -> list[str]:
    said = [f"began {time.monotonic():.6f}"]

    def place() -> None:
        taken_ms = place_ms()
        said.append(f"placed {time.monotonic():.6f} {taken_ms:.3f}")

    def work(until_s: float) -> None:
        while time.monotonic() < until_s:
            place()

    if kind == "quiet":
        for _ in range(count):
            place()
            time.sleep(time_s)
        return said
    workers = [threading.Thread(target=work, args=(time.monotonic() + time_s,)) for _ in range(count)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return said


def check_placing() -> None:
    """wait() is believed for every group; here once, the table is asked."""
    from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group

    group = placement_group([{"GPU": 1}])
    if not group.wait(WAIT_S):
        raise SystemExit("the first group was not placed")
    placed_on(placement_group_table(group))
    remove_placement_group(group)


def main() -> int:
    folder, nodes = Path(sys.argv[1]), int(sys.argv[2])
    if len(str(folder)) > _LONGEST_FOLDER:
        raise SystemExit(f"{folder} is too long for Ray's sockets; set TMPDIR to a short one")
    peer_room.raise_loopback()
    os.environ |= {"RAY_TMPDIR": str(folder), "HOME": str(folder), "RAY_USAGE_STATS_ENABLED": "0"}
    import ray
    from ray.cluster_utils import Cluster

    node = {
        "num_cpus": GPUS // nodes,
        "num_gpus": GPUS // nodes,
        "object_store_memory": _OBJECT_STORE_BYTES,
        "node_ip_address": _ADDRESS,
    }
    cluster = Cluster(initialize_head=True, head_node_args=node | {"include_dashboard": False})
    for _ in range(nodes - 1):
        cluster.add_node(wait=False, **node)
    cluster.wait_for_nodes()
    ray.init(address=cluster.address, log_to_driver=False, _node_ip_address=_ADDRESS)
    if alive_gpus(ray.nodes()) != GPUS:
        raise SystemExit(f"not all nodes are alive: {ray.nodes()}")
    check_placing()
    peer_room.answer_all(measure)
    ray.shutdown()
    cluster.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
