"""The grid's health and figures: health, top and metrics.

Not for: reading or judging (grid/health_check.py), or keeping figures (grid/metrics.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import sys
import time
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from genie.cli import output
from genie.cli.app import AsJson, Invocation, grid_command
from genie.cli.grid_node_commands import NodeNames, load_grid
from genie.cli.quantities import duration_text, parse_duration, parse_whole, size_text
from genie.errors import TransportError

if TYPE_CHECKING:
    from genie.config import Settings
    from genie.grid.grid_file import GridFile
    from genie.grid.health_check import GpuReading, HealthChecker, NodeHealth
    from genie.grid.metrics import GridMetrics

_COLUMNS = ("node", "state", "score", "cpu", "gpus", "gpu memory", "temp", "disk", "note")
_SPARE = ("disk", "temp", "gpu memory")
_GPU_COLUMNS = ("node", "gpu", "name", "memory", "used", "busy", "temp", "ecc")
_CLEAR = "\x1b[H\x1b[2J"
_OTHER_SCREEN, _OWN_SCREEN = "\x1b[?1049h", "\x1b[?1049l"
_INTERVAL_S_MAX = 3600.0

_Fresh = Annotated[bool, typer.Option("--fresh", help="Ask the nodes now, even if what is known is recent.")]
_Once = Annotated[bool, typer.Option("--once", help="Show it once and end.")]
_Interval = Annotated[str, typer.Option("--interval", metavar="TIME", help="Between two readings.")]
_Serve = Annotated[bool, typer.Option("--serve", help="Serve them over HTTP until Ctrl-C.")]
_Port = Annotated[str, typer.Option("--port", metavar="PORT", help="With --serve; 0 takes a free one.")]
_Bind = Annotated[str, typer.Option("--bind", metavar="ADDRESS", help="With --serve: where to listen.")]


@grid_command("health", example="grid-cli health --fresh")
def health(
    invocation: Invocation, *, nodes: NodeNames = None, fresh: _Fresh = False, as_json: AsJson = False
) -> None:
    """Read load, GPUs and disk of the nodes, all at once; the lowest score is chosen next.

    Ends with 1 when no node can be chosen, with 255 when none can be reached.
    """
    settings, file = load_grid(invocation)
    began = time.time()
    found = asyncio.run(_check(settings, file, nodes or [], fresh=fresh))
    best = _best(found)
    if as_json:
        output.write_json({"best": best, "nodes": [_as_object(node) for node in found]})
    else:
        _write_nodes(found)
        if best is not None and len(found) > 1:
            output.say(f"the best is {best}")
        age_s = began - min(node.at for node in found)
        if age_s >= 1:
            output.say(f"read {duration_text(age_s)} ago; --fresh reads again")
    if best is None:
        raise typer.Exit(_unreached(found) or 1)


@grid_command("top", example="grid-cli top --interval 5s")
def top(
    invocation: Invocation, *, interval: _Interval = "2s", once: _Once = False, as_json: AsJson = False
) -> None:
    """Watch the nodes and their GPUs. Without a terminal, and with --once or --json, it shows them once.

    Once, it ends with 255 when no node can be reached.
    """
    settings, file = load_grid(invocation)
    interval_s = parse_duration(interval, what="--interval", high_s=_INTERVAL_S_MAX)
    if as_json or once or not sys.stdout.isatty():
        found = asyncio.run(_check(settings, file, [], fresh=True))
        if as_json:
            output.write_json({"best": _best(found), "nodes": [_as_object(node) for node in found]})
        else:
            _write_all(found)
        raise typer.Exit(_unreached(found))
    sys.stdout.write(_OTHER_SCREEN)
    try:
        asyncio.run(_watch(settings, file, interval_s=interval_s))
    except KeyboardInterrupt:
        pass  # the way to leave it
    finally:
        sys.stdout.write(_OWN_SCREEN)
        sys.stdout.flush()


@grid_command("metrics", example="grid-cli metrics --serve --port 9464")
def metrics(
    invocation: Invocation,
    *,
    serve: _Serve = False,
    port: _Port = "9464",
    bind: _Bind = "127.0.0.1",
    as_json: AsJson = False,
) -> None:
    """Print the grid's figures as Prometheus reads them, or serve them for it to fetch."""
    settings, file = load_grid(invocation)
    if serve:
        number = parse_whole(port, what="--port", low=0, high=65535)
        asyncio.run(_serve(settings, file, bind=bind, port=number, as_json=as_json))
        return
    figures = asyncio.run(_refreshed(settings, file))
    if as_json:
        output.write_json(_figures_object(figures))
    else:
        output.write_line(figures.text().rstrip("\n"))


@contextlib.asynccontextmanager
async def open_checker(settings: Settings, file: GridFile) -> AsyncIterator[HealthChecker]:
    """A checker with connections of its own that shares what it reads with other processes."""
    from genie.grid.health_check import HealthCache, HealthChecker
    from genie.grid.ssh_pool import SshPool

    async with SshPool(file, ssh_config=settings.grid.ssh_config) as pool:
        yield HealthChecker(pool, file, clock=time.time, cache=HealthCache(settings.paths.state_dir))


async def _check(
    settings: Settings, file: GridFile, names: Sequence[str], *, fresh: bool
) -> list[NodeHealth]:
    for name in names:
        file.node(name)
    async with open_checker(settings, file) as checker:
        if not names:
            found = await checker.check_all(fresh=fresh)
        else:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(checker.check(name, fresh=fresh)) for name in names]
            found = [task.result() for task in tasks]
    if not names:
        _metrics(settings).node_scores({node.name: node.rank for node in found})
    return found


async def _watch(settings: Settings, file: GridFile, *, interval_s: float) -> None:
    async with open_checker(settings, file) as checker:
        while True:
            found = await checker.check_all(fresh=True)
            sys.stdout.write(_CLEAR)
            now = time.strftime("%H:%M:%S")
            output.write_line(f"{now}  every {duration_text(interval_s)}  Ctrl-C ends\n")
            _write_all(found)
            await asyncio.sleep(interval_s)


async def _refreshed(settings: Settings, file: GridFile) -> GridMetrics:
    from genie.grid.metrics_server import refresh

    figures = _metrics(settings)
    async with open_checker(settings, file) as checker:
        await refresh(checker, figures)
    return figures


async def _serve(settings: Settings, file: GridFile, *, bind: str, port: int, as_json: bool) -> None:
    from genie.grid.metrics_server import refresh_forever, serving

    figures = _metrics(settings)
    async with (
        open_checker(settings, file) as checker,
        serving(figures, bind=bind, port=port) as (host, number),
    ):
        url = f"http://{f'[{host}]' if ':' in host else host}:{number}/metrics"
        if as_json:
            output.write_json({"url": url})
        else:
            output.say(f"serving {url} until Ctrl-C")
        if not _is_loopback(host):
            output.say("anyone who reaches this address can read the names and load of your nodes")
        await refresh_forever(checker, figures, interval_s=file.health_check.refresh_interval)


def _metrics(settings: Settings) -> GridMetrics:
    from genie.grid.metrics import GridMetrics

    return GridMetrics(settings.paths.state_dir)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _figures_object(figures: GridMetrics) -> dict[str, Any]:
    found = figures.figures()
    return {
        "node_health_score": found.scores,
        "tasks_completed": found.completed,
        "task_duration_s": {"count": sum(found.tasks.counts), "sum": found.tasks.sum_s},
        "sync_duration_s": {"count": sum(found.syncs.counts), "sum": found.syncs.sum_s},
        "active_tasks": found.active_tasks,
    }


# --- tables -----------------------------------------------------------------------------------


def _best(nodes: Sequence[NodeHealth]) -> str | None:
    best = min(nodes, key=lambda node: node.order)
    return best.name if best.rank != float("inf") else None


def _unreached(nodes: Sequence[NodeHealth]) -> int:
    """The exit code if none of them can be reached, else 0."""
    from genie.grid.health_check import NodeState

    away = all(node.state is NodeState.UNREACHABLE for node in nodes)
    return TransportError.exit_code if away else 0


def _as_object(node: NodeHealth) -> dict[str, Any]:
    free = node.readings.gpus_free if node.readings else 0
    return output.as_object(node) | {"gpus_free": free}


def _write_nodes(nodes: Sequence[NodeHealth]) -> None:
    output.write_table(_COLUMNS, [_row(node) for node in nodes], spare=_SPARE)


def _write_all(nodes: Sequence[NodeHealth]) -> None:
    _write_nodes(nodes)
    rows = [_gpu_row(node.name, gpu) for node in nodes if node.readings for gpu in node.readings.gpus]
    if rows:
        output.write_line("")
        output.write_table(_GPU_COLUMNS, rows, spare=("ecc", "memory"))


def _row(node: NodeHealth) -> tuple[str, ...]:
    readings = node.readings
    if readings is None:
        return (node.name, node.state.value, "-", "-", "-", "-", "-", "-", node.note)
    gpus = f"{readings.gpus_free} of {len(readings.gpus)} free" if readings.gpus else "none"
    disk = readings.disk_free_bytes
    return (
        node.name,
        node.state.value,
        "-" if node.score is None else f"{node.score:.1f}",
        _percent(readings.load_pct),
        "-" if "gpus" in readings.failed and not readings.gpus else gpus,
        _percent(readings.gpu_memory_pct) if readings.gpus else "-",
        _degrees(readings.hottest_c),
        "-" if disk is None else size_text(disk),
        node.note,
    )


def _gpu_row(name: str, gpu: GpuReading) -> tuple[str, ...]:
    total, used = gpu.memory_total_bytes, gpu.memory_used_bytes
    return (
        name,
        str(gpu.index),
        gpu.name,
        "-" if total is None else size_text(total),
        "-" if used is None else size_text(used),
        _percent(gpu.utilization_pct),
        _degrees(gpu.temperature_c),
        "-" if gpu.ecc_uncorrected is None else str(gpu.ecc_uncorrected),
    )


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}%"


def _degrees(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f} C"
