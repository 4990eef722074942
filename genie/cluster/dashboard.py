"""Nodes and accelerators as tables in a terminal. Shows what it is given, and nothing more."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from genie.hardware import is_overheated
from genie.model.node import GPUInfo, NodeInfo, NodeStatus
from genie.runtime.clock import Clock, SystemClock

_STYLES = {
    NodeStatus.HEALTHY: "green",
    NodeStatus.DEGRADED: "yellow",
    NodeStatus.SUSPECT: "yellow",
    NodeStatus.UNHEALTHY: "red",
    NodeStatus.CRITICAL: "bold red",
    NodeStatus.DISCONNECTED: "red",
}
_UNKNOWN = "-"


class ShownState(Protocol):
    """What the dashboard reads again at every refresh; ClusterState is one."""

    @property
    def local_node(self) -> NodeInfo: ...

    @property
    def nodes(self) -> Mapping[str, NodeInfo]: ...


def render(nodes: Iterable[NodeInfo], *, now: float) -> RenderableType:
    """Two tables, sorted by node id. `now` is what ages of heartbeats are counted to."""
    ordered = sorted(nodes, key=lambda node: node.node_id)
    return Group(_node_table(ordered, now=now), _gpu_table(ordered))


async def show(
    state: ShownState,
    refresh_s: float = 1.0,
    *,
    console: Console | None = None,
    clock: Clock | None = None,
    rounds: int | None = None,
) -> None:
    """Redraws until cancelled, or `rounds` times. The local node is shown with the others."""
    clock = clock or SystemClock()
    # Without its own refreshing thread: the picture changes when the state is read, not in between.
    with Live(console=console, auto_refresh=False) as live:
        drawn = 0
        while True:
            nodes = {state.local_node.node_id: state.local_node, **state.nodes}
            live.update(render(nodes.values(), now=clock.wall_s()), refresh=True)
            drawn += 1
            if drawn == rounds:
                return
            await clock.sleep(refresh_s)


def _node_table(nodes: list[NodeInfo], *, now: float) -> Table:
    table = _table("Nodes", "Node", "Role", "Address", "Status", "Heard", "CPUs", "Memory", "GPUs")
    for node in nodes:
        status = f"{node.status}: {node.status_reason}" if node.status_reason else str(node.status)
        table.add_row(
            Text(node.node_id),
            Text(node.role),
            Text(f"{node.host}:{node.control_port}" if node.control_port else node.host),
            Text(status, style=_STYLES.get(node.status, "")),
            Text(f"{max(0.0, now - node.last_heartbeat):.0f} s ago" if node.last_heartbeat else _UNKNOWN),
            Text(f"{node.cpus:g}"),
            Text(_memory(node.memory_used_bytes, node.memory_total_bytes)),
            Text(str(node.gpu_count)),
        )
    return table


def _gpu_table(nodes: list[NodeInfo]) -> Table:
    table = _table("Accelerators", "Node", "#", "Name", "Memory", "Use", "Heat", "Power", "State")
    for node in nodes:
        for gpu in node.gpus:
            table.add_row(
                Text(node.node_id),
                Text(str(gpu.gpu_id)),
                Text(gpu.name),
                Text(_memory(gpu.memory_used_bytes, gpu.memory_total_bytes)),
                Text(_reading(gpu.utilization_pct, "%")),
                Text(_reading(gpu.temperature_c, " C"), style="red" if is_overheated(gpu) else ""),
                Text(_reading(gpu.power_w, " W")),
                _state(gpu),
            )
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", expand=False)
    for name in columns:
        table.add_column(name, overflow="fold")
    return table


def _state(gpu: GPUInfo) -> Text:
    return Text("available", style="green") if gpu.available else Text(gpu.reason, style="red")


def _memory(used_bytes: int, total_bytes: int) -> str:
    if total_bytes == 0:
        return _UNKNOWN
    return f"{used_bytes / 1024**3:.1f} / {total_bytes / 1024**3:.1f} GiB"


def _reading(value: float | None, unit: str) -> str:
    return _UNKNOWN if value is None else f"{value:.0f}{unit}"
