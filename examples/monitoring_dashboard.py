"""A dashboard of nodes and GPUs in the terminal, refreshed every few seconds.

    python examples/monitoring_dashboard.py                 this machine only
    python examples/monitoring_dashboard.py gpu-box         a cluster; on another machine after `genie login`
    python examples/monitoring_dashboard.py gpu-box --rounds 1

Runs until Ctrl-C, or for --rounds refreshes.
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
from genie.cluster.dashboard import DashboardState, show
from genie.cluster.events import ClusterEvent, EventBus
from genie.cluster.health import HealthReport, check_cpu, check_gpus, check_memory, worst_status
from genie.cluster.monitoring import ResourceMonitor, create_resource_monitor
from genie.cluster.node_info import NodeInfo, create_local_node, detect_local_gpus
from genie.errors import GenieError
from genie.hardware import CpuMeter


class ThisMachine:
    """Dashboard state without a cluster: one node, with its health from the readings of the monitor."""

    def __init__(self, monitor: ResourceMonitor) -> None:
        self._monitor = monitor
        self._cpu = CpuMeter()
        self._report: HealthReport | None = None

    @property
    def local_node(self) -> NodeInfo:
        node, report = self._monitor.local_node, self.health_report
        if report is None:
            return node
        return msgspec.structs.replace(
            node, status=report.status, status_reason=report.reason, last_heartbeat=report.at
        )

    @property
    def health_report(self) -> HealthReport | None:
        read = self._monitor.snapshot()
        if read is not None and (self._report is None or self._report.at != read.at):
            checks = (check_gpus(read.gpus), check_cpu(self._cpu.read()), check_memory(read.host))
            self._report = HealthReport(status=worst_status(checks), checks=checks, at=read.at)
        return self._report

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
    # Only a given port is passed: an argument overrides GENIE_MASTER_PORT and the settings file.
    state = await genie.init(master_addr=address, **({} if port is None else {"master_port": port}))
    try:
        await draw(state, refresh_s=refresh_s, rounds=rounds)
    finally:
        await genie.shutdown()


async def draw(state: DashboardState, *, refresh_s: float, rounds: int | None) -> None:
    try:
        await show(state, refresh_s, rounds=rounds)
    finally:
        if not sys.stdout.isatty():
            print()  # in a file or a pipe the last frame has no newline


def print_event(event: ClusterEvent) -> None:
    print(f"{event.type}: {event.reason}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("address", nargs="?", help="address of the controller (default: only this machine)")
    parser.add_argument("--port", type=int, help="port of the controller (default: from the settings)")
    parser.add_argument(
        "--refresh", type=float, default=2.0, metavar="SECONDS", help="refresh interval (default: 2)"
    )
    parser.add_argument("--rounds", type=int, default=None, help="stop after this number of refreshes")
    given = parser.parse_args()
    if given.address is None:
        work = show_this_machine(refresh_s=given.refresh, rounds=given.rounds)
    else:
        work = show_cluster(given.address, port=given.port, refresh_s=given.refresh, rounds=given.rounds)
    try:
        asyncio.run(work)
    except KeyboardInterrupt:
        pass
    except GenieError as error:
        sys.exit(f"monitoring_dashboard: {error}")


if __name__ == "__main__":
    main()
