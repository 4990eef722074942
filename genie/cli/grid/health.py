"""Commands for the health of a grid: health, top and metrics.

Health is checked by grid/health/check.py; metrics are kept by grid/metrics.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from genie.cli import output
from genie.cli.app import Invocation, JsonOption, grid_command
from genie.cli.grid.nodes import NodeNamesArgument, load_settings_and_grid_file
from genie.cli.quantities import format_duration, format_size, parse_duration, parse_integer
from genie.errors import TransportError
from genie.model.names import address_text, is_loopback

if TYPE_CHECKING:
    from genie.config import Settings
    from genie.grid.grid_file import GridFile
    from genie.grid.health.check import GpuReading, NodeHealth, NodeHealthChecker
    from genie.grid.metrics import GridMetrics
    from genie.grid.runs.run_client import Runner

_NODE_COLUMNS = (
    "node",
    "state",
    "score",
    "cpu load",
    "gpus",
    "gpu memory used",
    "gpu temp",
    "disk free",
    "reason",
)
_NODE_DROPPABLE_COLUMNS = ("disk free", "gpu temp", "gpu memory used")
_GPU_COLUMNS = (
    "node",
    "gpu",
    "name",
    "gpu memory total",
    "gpu memory used",
    "utilization",
    "temp",
    "ecc errors",
)
_CLEAR_SCREEN = "\x1b[H\x1b[2J"
_ENTER_ALTERNATE_SCREEN, _LEAVE_ALTERNATE_SCREEN = "\x1b[?1049h", "\x1b[?1049l"
_REFRESH_INTERVAL_S_MAX = 3600.0

_FreshOption = Annotated[bool, typer.Option("--fresh", help="Ignore cached readings.")]
_OnceOption = Annotated[bool, typer.Option("--once", help="Print once and exit.")]
_IntervalOption = Annotated[
    str, typer.Option("--interval", metavar="TIME", help="Refresh interval, such as 5s.")
]
_ServeOption = Annotated[bool, typer.Option("--serve", help="Serve the metrics over HTTP until Ctrl-C.")]
_PortOption = Annotated[
    str, typer.Option("--port", metavar="PORT", help="Port for --serve; 0 picks a free port.")
]
_BindOption = Annotated[
    str, typer.Option("--bind", metavar="ADDRESS", help="Address to listen on with --serve.")
]


@grid_command("health", example="grid-cli health --fresh")
def health(
    invocation: Invocation,
    *,
    nodes: NodeNamesArgument = None,
    fresh: _FreshOption = False,
    as_json: JsonOption = False,
) -> None:
    """Check load, GPUs and disk of the nodes. The node with the lowest score is chosen for the next run.

    DISK FREE is the free space on the file system of remote_root.

    Exits with 1 if no node is usable, with 255 if none is reachable.
    """
    settings, file = load_settings_and_grid_file(invocation)
    began = time.time()
    found = asyncio.run(_check_nodes(settings, file, nodes or [], fresh=fresh))
    best = _find_best_node(found)
    if as_json:
        output.write_json({"best": best, "nodes": [_node_to_json(node) for node in found]})
    else:
        _write_node_table(found)
        if best is not None and len(found) > 1:
            output.print_message(f"best node: {best}")
        age_s = began - min(node.at for node in found)
        if age_s >= 1:
            output.print_message(f"cached readings, {format_duration(age_s)} old; use --fresh to read again")
    if best is None:
        raise typer.Exit(_exit_code_if_none_reachable(found) or 1)


@grid_command("top", example="grid-cli top --interval 5s")
def top(
    invocation: Invocation,
    *,
    interval: _IntervalOption = "2s",
    once: _OnceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Monitor nodes and GPUs. Prints once with --once, with --json or without a terminal.

    When printing once, exits with 255 if no node is reachable.
    """
    settings, file = load_settings_and_grid_file(invocation)
    interval_s = parse_duration(interval, what="--interval", high_s=_REFRESH_INTERVAL_S_MAX)
    if as_json or once or not sys.stdout.isatty():
        found = asyncio.run(_check_nodes(settings, file, [], fresh=True))
        if as_json:
            output.write_json(
                {"best": _find_best_node(found), "nodes": [_node_to_json(node) for node in found]}
            )
        else:
            _write_node_and_gpu_tables(found)
        raise typer.Exit(_exit_code_if_none_reachable(found))
    sys.stdout.write(_ENTER_ALTERNATE_SCREEN)
    try:
        asyncio.run(_redraw_until_interrupted(settings, file, interval_s=interval_s))
    except KeyboardInterrupt:
        pass  # normal exit
    finally:
        sys.stdout.write(_LEAVE_ALTERNATE_SCREEN)
        sys.stdout.flush()


@grid_command("metrics", example="grid-cli metrics --serve --port 9464")
def metrics(
    invocation: Invocation,
    *,
    serve: _ServeOption = False,
    port: _PortOption = "9464",
    bind: _BindOption = "127.0.0.1",
    as_json: JsonOption = False,
) -> None:
    """Print or serve the metrics of the grid in Prometheus format."""
    settings, file = load_settings_and_grid_file(invocation)
    if serve:
        number = parse_integer(port, what="--port", low=0, high=65535)
        asyncio.run(_serve_metrics(settings, file, bind=bind, port=number, as_json=as_json))
        return
    metrics_now = asyncio.run(_refresh_metrics(settings, file))
    if as_json:
        output.write_json(_metrics_to_json(metrics_now))
    else:
        output.write_line(metrics_now.text().rstrip("\n"))


@contextlib.asynccontextmanager
async def open_health_checker(settings: Settings, file: GridFile) -> AsyncIterator[NodeHealthChecker]:
    """Yield a health checker with its own connections and a cache shared with other processes."""
    from genie.grid.health.check import HealthCache, NodeHealthChecker
    from genie.grid.ssh.pool import SshPool

    async with SshPool(file, ssh_config=settings.grid.ssh_config) as pool:
        yield NodeHealthChecker(pool, file, clock=time.time, cache=HealthCache(settings.paths.state_dir))


@contextlib.asynccontextmanager
async def _open_checker_and_runner(
    settings: Settings, file: GridFile
) -> AsyncIterator[tuple[NodeHealthChecker, Runner]]:
    """Yield a health checker and a runner that share connections, for refreshing the metrics."""
    from genie.grid.health.check import HealthCache, NodeHealthChecker
    from genie.grid.runs.run_client import Runner
    from genie.grid.ssh.pool import SshPool

    async with SshPool(file, ssh_config=settings.grid.ssh_config) as pool:
        cache = HealthCache(settings.paths.state_dir)
        yield NodeHealthChecker(pool, file, clock=time.time, cache=cache), Runner(pool, file)


async def _check_nodes(
    settings: Settings, file: GridFile, names: Sequence[str], *, fresh: bool
) -> list[NodeHealth]:
    for name in names:
        file.node(name)
    async with open_health_checker(settings, file) as checker:
        if not names:
            found = await checker.check_all_nodes(fresh=fresh)
        else:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(checker.check(name, fresh=fresh)) for name in names]
            found = sorted((task.result() for task in tasks), key=lambda node: node.sort_key)
    if not names:
        _open_metrics(settings).record_node_scores({node.name: node.effective_score for node in found})
    return found


async def _redraw_until_interrupted(settings: Settings, file: GridFile, *, interval_s: float) -> None:
    async with open_health_checker(settings, file) as checker:
        while True:
            found = await checker.check_all_nodes(fresh=True)
            sys.stdout.write(_CLEAR_SCREEN)
            now = time.strftime("%H:%M:%S")
            output.write_line(f"{now}  every {format_duration(interval_s)}  Ctrl-C to exit\n")
            _write_node_and_gpu_tables(found)
            await asyncio.sleep(interval_s)


async def _refresh_metrics(settings: Settings, file: GridFile) -> GridMetrics:
    from genie.grid.metrics_server import refresh_metrics

    grid_metrics = _open_metrics(settings)
    async with _open_checker_and_runner(settings, file) as (checker, runner):
        await refresh_metrics(checker, runner, file, grid_metrics)
    return grid_metrics


async def _serve_metrics(settings: Settings, file: GridFile, *, bind: str, port: int, as_json: bool) -> None:
    from genie.grid.metrics_server import refresh_metrics_forever, serve_metrics

    grid_metrics = _open_metrics(settings)
    async with (
        _open_checker_and_runner(settings, file) as (checker, runner),
        serve_metrics(grid_metrics, bind=bind, port=port) as (host, number),
    ):
        url = f"http://{address_text(host, number)}/metrics"
        if as_json:
            output.write_json({"url": url})
        else:
            output.print_message(f"serving {url}; press Ctrl-C to stop")
        if not is_loopback(host):
            output.print_message(
                "warning: anyone who can reach this address can read the names and load of your nodes"
            )
        await refresh_metrics_forever(checker, runner, file, grid_metrics)


def _open_metrics(settings: Settings) -> GridMetrics:
    from genie.grid.metrics import GridMetrics

    return GridMetrics(settings.paths.state_dir)


def _metrics_to_json(grid_metrics: GridMetrics) -> dict[str, Any]:
    found = grid_metrics.read_snapshot()
    return {
        "node_health_score": found.scores,
        "tasks_completed": found.completed,
        "task_duration_s": {"count": sum(found.tasks.counts), "sum": found.tasks.sum_s},
        "sync_duration_s": {"count": sum(found.syncs.counts), "sum": found.syncs.sum_s},
        "active_tasks": found.active_tasks,
    }


# --- tables -----------------------------------------------------------------------------------


def _find_best_node(nodes: Sequence[NodeHealth]) -> str | None:
    best = min(nodes, key=lambda node: node.sort_key)
    return best.name if best.effective_score != float("inf") else None


def _exit_code_if_none_reachable(nodes: Sequence[NodeHealth]) -> int:
    """Return exit code 255 if no node is reachable, else 0."""
    from genie.grid.health.check import HealthState

    none_reachable = all(node.state is HealthState.UNREACHABLE for node in nodes)
    return TransportError.exit_code if none_reachable else 0


def _node_to_json(node: NodeHealth) -> dict[str, Any]:
    free = node.readings.gpus_free if node.readings else 0
    return output.struct_to_json(node) | {"gpus_free": free}


def _write_node_table(nodes: Sequence[NodeHealth]) -> None:
    output.write_table(_NODE_COLUMNS, [_node_row(node) for node in nodes], droppable=_NODE_DROPPABLE_COLUMNS)


def _write_node_and_gpu_tables(nodes: Sequence[NodeHealth]) -> None:
    _write_node_table(nodes)
    rows = [_gpu_row(node.name, gpu) for node in nodes if node.readings for gpu in node.readings.gpus]
    if rows:
        output.write_line("")
        output.write_table(_GPU_COLUMNS, rows, droppable=("ecc errors", "gpu memory total"))


def _node_row(node: NodeHealth) -> tuple[str, ...]:
    readings = node.readings
    if readings is None:
        return (node.name, node.state.value, "-", "-", "-", "-", "-", "-", node.note)
    gpus = f"{readings.gpus_free} of {len(readings.gpus)} free" if readings.gpus else "none"
    disk = readings.disk_free_bytes
    return (
        node.name,
        node.state.value,
        "-" if node.score is None else f"{node.score:.1f}",
        _format_percent(readings.load_pct),
        "-" if "gpus" in readings.failed and not readings.gpus else gpus,
        _format_percent(readings.gpu_memory_pct) if readings.gpus else "-",
        _format_celsius(readings.hottest_c),
        "-" if disk is None else format_size(disk),
        node.note,
    )


def _gpu_row(name: str, gpu: GpuReading) -> tuple[str, ...]:
    total, used = gpu.memory_total_bytes, gpu.memory_used_bytes
    return (
        name,
        str(gpu.index),
        gpu.name,
        "-" if total is None else format_size(total),
        "-" if used is None else format_size(used),
        _format_percent(gpu.utilization_pct),
        _format_celsius(gpu.temperature_c),
        "-" if gpu.ecc_uncorrected is None else str(gpu.ecc_uncorrected),
    )


def _format_percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}%"


def _format_celsius(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f} C"
