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
import sys
import time
from collections.abc import Mapping

import msgspec

import genie
from genie.cluster.dashboard import ShownState, show
from genie.cluster.events import ClusterEvent, EventBus
from genie.cluster.health import HealthReport, check_gpus, check_memory, overall
from genie.cluster.monitoring import ResourceMonitor, create_resource_monitor
from genie.cluster.node_info import NodeInfo, create_local_node, detect_local_gpus


class ThisMachine:
    """What the dashboard shows when there is no cluster: one node, judged by the monitor's readings."""

    def __init__(self, monitor: ResourceMonitor) -> None:
        self._monitor = monitor

    @property
    def local_node(self) -> NodeInfo:
        node, read = self._monitor.local_node, self._monitor.snapshot()
        if read is None:
            return node
        checks = (check_gpus(read.gpus), check_memory(read.host))
        report = HealthReport(status=overall(checks), checks=checks, at=read.at)
        return msgspec.structs.replace(
            node, status=report.status, status_reason=report.reason, last_heartbeat=read.at
        )

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
            await draw(ThisMachine(monitor), refresh_s=refresh_s, rounds=rounds)
    finally:
        events.close()


async def show_cluster(address: str, *, port: int | None, refresh_s: float, rounds: int | None) -> None:
    # Only what was given: an argument wins over GENIE_MASTER_PORT and the settings file.
    state = await genie.init(master_addr=address, **({} if port is None else {"master_port": port}))
    try:
        await draw(state, refresh_s=refresh_s, rounds=rounds)
    finally:
        await genie.shutdown()


async def draw(state: ShownState, *, refresh_s: float, rounds: int | None) -> None:
    try:
        await show(state, refresh_s, rounds=rounds)
    finally:
        if not sys.stdout.isatty():
            print()  # in a file or a pipe the last picture has no end of line


def print_event(event: ClusterEvent) -> None:
    print(f"{event.type}: {event.reason}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("address", nargs="?", help="the controller; this machine alone when not given")
    parser.add_argument("--port", type=int, help="its port; without, the one of the settings")
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
