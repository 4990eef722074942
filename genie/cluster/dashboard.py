"""Tables of nodes, accelerators and health checks in a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from genie.cluster.health import HealthReport
from genie.hardware import is_overheated
from genie.model.names import address_text
from genie.model.node import GPUInfo, NodeInfo, NodeStatus
from genie.processes.clock import Clock, SystemClock

_STYLE_BY_STATUS = {
    NodeStatus.HEALTHY: "green",
    NodeStatus.DEGRADED: "yellow",
    NodeStatus.SUSPECT: "yellow",
    NodeStatus.UNHEALTHY: "red",
    NodeStatus.CRITICAL: "bold red",
    NodeStatus.DISCONNECTED: "red",
}
_UNKNOWN_TEXT = "-"


class DashboardState(Protocol):
    """What the dashboard reads at every refresh; implemented by ClusterState."""

    @property
    def local_node(self) -> NodeInfo: ...

    @property
    def nodes(self) -> Mapping[str, NodeInfo]: ...

    @property
    def health_report(self) -> HealthReport | None: ...


def render(nodes: Iterable[NodeInfo], *, now: float, report: HealthReport | None = None) -> RenderableType:
    """Tables of nodes and accelerators, sorted by node ID, and of the health checks if there is a report.
    `now` is the reference for the age of heartbeats."""
    ordered = sorted(nodes, key=lambda node: node.node_id)
    tables = [_make_node_table(ordered, now=now), _make_gpu_table(ordered)]
    return Group(*tables, *([] if report is None else [_make_health_table(report)]))


async def show(
    state: DashboardState,
    refresh_s: float = 1.0,
    *,
    console: Console | None = None,
    clock: Clock | None = None,
    rounds: int | None = None,
) -> None:
    """Redraws until cancelled, or `rounds` times. Includes the local node."""
    clock = clock or SystemClock()
    # No refresh thread: the tables change only when the state is read.
    with Live(console=console, auto_refresh=False) as live:
        drawn = 0
        while True:
            nodes = {state.local_node.node_id: state.local_node, **state.nodes}
            tables = render(nodes.values(), now=clock.wall_s(), report=state.health_report)
            live.update(tables, refresh=True)
            drawn += 1
            if drawn == rounds:
                return
            await clock.sleep(refresh_s)


def _make_node_table(nodes: list[NodeInfo], *, now: float) -> Table:
    table = _make_table("Nodes", "Node", "Role", "Address", "Status", "Heartbeat", "CPUs", "Memory", "GPUs")
    for node in nodes:
        status = f"{node.status}: {node.status_reason}" if node.status_reason else str(node.status)
        table.add_row(
            Text(node.node_id),
            Text(node.role),
            Text(address_text(node.host, node.control_port) if node.control_port else node.host),
            Text(status, style=_STYLE_BY_STATUS.get(node.status, "")),
            Text(
                f"{max(0.0, now - node.last_heartbeat):.0f} s ago" if node.last_heartbeat else _UNKNOWN_TEXT
            ),
            Text(f"{node.cpus:g}"),
            Text(_format_memory(node.memory_used_bytes, node.memory_total_bytes)),
            Text(str(node.gpu_count)),
        )
    return table


def _make_gpu_table(nodes: list[NodeInfo]) -> Table:
    table = _make_table("Accelerators", "Node", "#", "Name", "Memory", "Util", "Temp", "Power", "State")
    for node in nodes:
        for gpu in node.gpus:
            table.add_row(
                Text(node.node_id),
                Text(str(gpu.gpu_id)),
                Text(gpu.name),
                Text(_format_memory(gpu.memory_used_bytes, gpu.memory_total_bytes)),
                Text(_format_reading(gpu.utilization_pct, "%")),
                Text(_format_reading(gpu.temperature_c, " C"), style="red" if is_overheated(gpu) else ""),
                Text(_format_reading(gpu.power_w, " W")),
                _gpu_state_text(gpu),
            )
    return table


def _make_health_table(report: HealthReport) -> Table:
    table = _make_table("Health of this machine", "Check", "Status", "Reading")
    for check in report.checks:
        table.add_row(
            Text(check.name),
            Text(str(check.status), style=_STYLE_BY_STATUS.get(check.status, "")),
            Text(check.reason),
        )
    return table


def _make_table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", expand=False)
    for name in columns:
        table.add_column(name, overflow="fold")
    return table


def _gpu_state_text(gpu: GPUInfo) -> Text:
    return Text("available", style="green") if gpu.available else Text(gpu.reason, style="red")


def _format_memory(used_bytes: int, total_bytes: int) -> str:
    if total_bytes == 0:
        return _UNKNOWN_TEXT
    return f"{used_bytes / 1024**3:.1f} / {total_bytes / 1024**3:.1f} GiB"


def _format_reading(value: float | None, unit: str) -> str:
    return _UNKNOWN_TEXT if value is None else f"{value:.0f}{unit}"
