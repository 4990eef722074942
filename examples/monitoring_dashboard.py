"""Nodes and GPUs in the terminal, redrawn every few seconds.

    python examples/monitoring_dashboard.py                 this machine only
    python examples/monitoring_dashboard.py gpu-box         a cluster
    python examples/monitoring_dashboard.py gpu-box --rounds 1

Ends with Ctrl-C, or after --rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import secrets
import time
from collections.abc import Mapping

import genie
from genie.cluster.dashboard import show
from genie.cluster.events import ClusterEvent, EventBus
from genie.cluster.monitoring import ResourceMonitor, create_resource_monitor
from genie.cluster.node_info import NodeInfo, create_local_node, detect_local_gpus


class ThisMachine:
    """What the dashboard shows when there is no cluster: one node, with the monitor's readings."""

    def __init__(self, monitor: ResourceMonitor) -> None:
        self._monitor = monitor

    @property
    def local_node(self) -> NodeInfo:
        return self._monitor.local_node

    @property
    def nodes(self) -> Mapping[str, NodeInfo]:
        return {}


async def show_this_machine(*, refresh_s: float, rounds: int | None) -> None:
    gpus = detect_local_gpus(cpu_accelerators=1)
    node = create_local_node(genie.ClusterConfig(), suffix=secrets.token_hex(3), gpus=gpus, now=time.time())
    events = EventBus()
    events.subscribe(None, print_event)
    try:
        async with create_resource_monitor(node, interval_s=refresh_s, events=events) as monitor:
            await show(ThisMachine(monitor), refresh_s, rounds=rounds)
    finally:
        events.close()


async def show_cluster(address: str, *, port: int, refresh_s: float, rounds: int | None) -> None:
    state = await genie.init(master_addr=address, master_port=port)
    try:
        await show(state, refresh_s, rounds=rounds)
    finally:
        await genie.shutdown()


def print_event(event: ClusterEvent) -> None:
    print(f"{event.type}: {event.reason}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("address", nargs="?", help="the controller; this machine alone when not given")
    parser.add_argument("--port", type=int, default=5555)
    parser.add_argument("--refresh", type=float, default=2.0, metavar="SECONDS")
    parser.add_argument("--rounds", type=int, default=None, help="stop after so many pictures")
    given = parser.parse_args()
    if given.address is None:
        work = show_this_machine(refresh_s=given.refresh, rounds=given.rounds)
    else:
        work = show_cluster(given.address, port=given.port, refresh_s=given.refresh, rounds=given.rounds)
    try:
        asyncio.run(work)
    except KeyboardInterrupt:
        pass


if __name__ == "__main__":
    main()
