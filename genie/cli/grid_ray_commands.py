"""Ray on the grid: setup, and cluster start, stop, status, dashboard and submit.

Not for: what these do (grid/setup.py, grid/ray_cluster.py, grid/ray_jobs.py); here that is asked for.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from genie.cli import output
from genie.cli.app import AsJson, Invocation, grid, grid_command
from genie.cli.grid_node_commands import complete_node, load_grid, who_asks
from genie.cli.quantities import parse_pairs
from genie.errors import ConnectionLostError, UsageError

if TYPE_CHECKING:
    from genie.config import Settings
    from genie.grid.grid_file import GridFile
    from genie.grid.ray_cluster import RayCluster, StopReport
    from genie.grid.ray_jobs import JobEnd, RayJobs
    from genie.grid.ray_plan import ClusterView
    from genie.grid.setup import SetupReport, Wish
    from genie.grid.ssh_pool import SshPool

_cluster = typer.Typer(name="cluster", help="A Ray cluster on the nodes.", no_args_is_help=True)
grid.add_typer(_cluster)

_Nodes = Annotated[
    list[str] | None,
    typer.Option(
        "--node", metavar="NODE", help="Only these nodes; may be repeated.", autocompletion=complete_node
    ),
]
_STOP_S = 30.0
_REQUIREMENTS = Path("requirements.txt")


@grid_command(
    "setup",
    example="grid-cli setup --package 'ray[default]' --package numpy",
    about_arguments="packages go behind --package, nodes behind --node",
)
def setup(
    invocation: Invocation,
    *,
    requirements: Annotated[
        Path | None,
        typer.Option(
            "--requirements",
            "-r",
            metavar="FILE",
            help="What to install; without this and without --package, requirements.txt of this folder.",
        ),
    ] = None,
    package: Annotated[
        list[str] | None, typer.Option(metavar="PACKAGE", help="A package to install; may be repeated.")
    ] = None,
    python: Annotated[
        str, typer.Option(metavar="PROGRAM", help="The nodes' Python to make the environment with.")
    ] = "python3",
    system_packages: Annotated[
        bool, typer.Option("--system-packages", help="The environment sees the node's own packages too.")
    ] = False,
    wheels: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Wheels to send along and install from, for nodes without a network."
        ),
    ] = None,
    node: _Nodes = None,
    again: Annotated[bool, typer.Option("--again", help="Also where all of it is there already.")] = False,
    as_json: AsJson = False,
) -> None:
    """Make a Python environment on all nodes, grid_env below remote_root, and install into it."""
    from genie.grid.setup import wish

    if requirements is None and not package:
        if not _REQUIREMENTS.is_file():
            raise UsageError(
                "nothing to install was given, and there is no requirements.txt here",
                hint="give --package NAME or --requirements FILE",
            )
        requirements = _REQUIREMENTS
    settings, file = load_grid(invocation)
    wanted = wish(
        requirements=requirements,
        packages=package or [],
        python=python,
        system_packages=system_packages,
        wheels=wheels,
    )
    reports = asyncio.run(_setup(settings, file, wanted, node or [], again=again))
    _end_setup(reports, as_json=as_json)


def _end_setup(reports: list[SetupReport], *, as_json: bool) -> None:
    """Shows them, and ends with the highest of their codes."""
    if as_json:
        output.write_json([dataclasses.asdict(report) for report in reports])
    else:
        rows = [
            [each.node, each.state, each.python, _last_line(output.without_node(each.error, each.node))]
            for each in reports
        ]
        output.write_table(("node", "state", "python", "message"), rows)
    for report in reports:
        if report.exit_code:
            output.say_lines(f"genie: {report.error}" + (f"\nhint: {report.hint}" if report.hint else ""))
    raise typer.Exit(max(report.exit_code for report in reports))


@grid_command("start", group=_cluster, example="grid-cli cluster start")
def start(
    invocation: Invocation,
    *,
    node: _Nodes = None,
    head: Annotated[
        str | None,
        typer.Option(
            metavar="NODE",
            help="The node of the head; without it the first one.",
            autocompletion=complete_node,
        ),
    ] = None,
    allow_missing: Annotated[
        bool, typer.Option("--allow-missing", help="Go on without nodes that cannot take part.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Start Ray on the nodes: one head, the others as workers. All of them or none."""
    settings, file = load_grid(invocation)

    async def work() -> ClusterView:
        async with _opened(settings, file) as (_, cluster):
            return await cluster.start(nodes=node or [], head=head, allow_missing=allow_missing, say=_say)

    view = asyncio.run(work())
    if as_json:
        output.write_json(dataclasses.asdict(view))
        return
    _write_view(view)
    output.say("the dashboard: grid-cli cluster dashboard; a program on it: grid-cli cluster submit -- CMD")


@grid_command("stop", group=_cluster, example="grid-cli cluster stop")
def stop(invocation: Invocation, *, as_json: AsJson = False) -> None:
    """End the Ray that was started with cluster start, and nothing else.

    Ends with 255 when a node cannot be reached: what was started there may go on.
    """
    settings, file = load_grid(invocation)

    async def work() -> list[StopReport]:
        async with _opened(settings, file) as (_, cluster):
            return await cluster.stop(say=_say)

    reports = asyncio.run(work())
    if as_json:
        output.write_json([dataclasses.asdict(report) for report in reports])
    elif not any(report.was or report.error for report in reports):
        output.write_line("no Ray cluster was running")
    else:
        rows = [
            [
                *(each.node, each.was, str(each.ended), str(each.killed)),
                output.without_node(each.error, each.node),
            ]
            for each in reports
        ]
        output.write_table(("node", "was", "ended", "killed", "message"), rows)
    raise typer.Exit(max(report.exit_code for report in reports))


@grid_command("status", group=_cluster, example="grid-cli cluster status --json")
def status(invocation: Invocation, *, as_json: AsJson = False) -> None:
    """Show the Ray cluster: its nodes, what they have, and what was started but has ended.

    Ends with 255 when no node can be reached.
    """
    settings, file = load_grid(invocation)

    async def work() -> ClusterView:
        async with _opened(settings, file) as (_, cluster):
            return await cluster.status()

    view = asyncio.run(work())
    if as_json:
        output.write_json(dataclasses.asdict(view))
    else:
        _write_view(view)
    raise typer.Exit(view.exit_code)


@grid_command("dashboard", group=_cluster, example="grid-cli cluster dashboard --port 8265")
def dashboard(
    invocation: Invocation,
    *,
    port: Annotated[
        int | None,
        typer.Option(
            metavar="PORT", min=0, max=65535, help="Port of this machine; without it ray.dashboard_port."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Keep a way to Ray's dashboard open, from this machine only, until Ctrl-C."""
    settings, file = load_grid(invocation)

    async def work() -> None:
        async with _opened(settings, file) as (_, cluster):
            local = port if port is not None else file.ray.dashboard_port
            async with cluster.tunnel(local_port=local) as tunnel:
                if as_json:
                    output.write_json({"url": tunnel.url, "token_file": str(cluster.token_file)})
                else:
                    output.write_line(tunnel.url)
                    output.say(f"it asks for the token in {cluster.token_file}; Ctrl-C closes the way")
                await tunnel.wait_lost()
                raise ConnectionLostError(f"node {tunnel.head}: the connection broke")

    asyncio.run(work())


@grid_command(
    "submit",
    group=_cluster,
    example="grid-cli cluster submit -- python train.py",
    context_settings={"allow_interspersed_args": False},
)
def submit(
    invocation: Invocation,
    *,
    argv: Annotated[
        list[str] | None, typer.Argument(metavar="-- CMD", help="The program and its arguments.")
    ] = None,
    gpus: Annotated[
        float, typer.Option(metavar="N", min=0, help="GPUs for the program itself, on the head.")
    ] = 0,
    env: Annotated[
        list[str] | None, typer.Option(metavar="K=V", help="Variable for the job; may be repeated.")
    ] = None,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Print the job's id and end.")] = False,
    as_json: AsJson = False,
) -> None:
    """Run a program as a Ray job on the head; its output and its exit code become ours."""
    from genie.grid.ray_jobs import RayJobs, shell_line

    if not argv:
        raise UsageError("no program was given", hint="grid-cli cluster submit -- python train.py")
    settings, file = load_grid(invocation)
    variables = {"RAY_NAMESPACE": file.ray.namespace, **_environment(env or [])}

    async def work() -> JobEnd | str:
        async with _opened(settings, file) as (_, cluster):
            jobs = RayJobs(cluster)
            job = await jobs.submit(shell_line(argv), env=variables, gpus=gpus)
            return job if detach else await _follow(jobs, job, as_json=as_json)

    end = asyncio.run(work())
    if isinstance(end, str):
        output.write_json({"job": end}) if as_json else output.write_line(end)
        return
    if as_json:
        output.write_json(dataclasses.asdict(end))
    elif end.exit_code and end.status == "FAILED" and "exit code" not in end.message:
        output.say_lines(f"genie: {_first_line(end.message)}")
    raise typer.Exit(end.exit_code)


async def _follow(jobs: RayJobs, job: str, *, as_json: bool) -> JobEnd:
    """The first Ctrl-C asks Ray to end the job and waits for that."""
    write = _to_stderr if as_json else output.write_bytes
    try:
        return await jobs.follow(job, write)
    except asyncio.CancelledError:
        output.say(f"ending job {job}")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_STOP_S):
                await jobs.stop(job)
                await jobs.follow(job, lambda _data: None)
        raise


def _to_stderr(data: bytes) -> None:
    output.say(data.decode("utf-8", "replace").rstrip("\n"))


def _environment(pairs: list[str]) -> dict[str, str]:
    from genie.model.names import checked_env_key

    found = parse_pairs(pairs, what="--env")
    return {checked_env_key(key, what="--env"): value for key, value in found.items()}


async def _setup(
    settings: Settings, file: GridFile, wanted: Wish, nodes: list[str], *, again: bool
) -> list[SetupReport]:
    from genie.grid.setup import Setup

    async with _opened(settings, file) as (pool, _):
        return await Setup(pool, file, who=who_asks()).run(wanted, nodes, again=again, say=_say)


@contextlib.asynccontextmanager
async def _opened(settings: Settings, file: GridFile) -> AsyncIterator[tuple[SshPool, RayCluster]]:
    from genie.grid.ray_cluster import RayCluster
    from genie.grid.ssh_pool import SshPool

    async with SshPool(file, ssh_config=settings.grid.ssh_config) as pool:
        yield pool, RayCluster(pool, file, state_dir=settings.paths.state_dir)


def _say(node: str, text: str) -> None:
    output.say_lines(f"{node}: {_first_line(output.without_node(text, node))}")


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0] if text.strip() else ""


def _last_line(text: str) -> str:
    """Of what pip writes, the last line says what went wrong."""
    return text.strip().splitlines()[-1] if text.strip() else ""


def _write_view(view: ClusterView) -> None:
    facts = [("state", view.state)]
    if view.cluster:
        facts += [("head", view.head), ("ray", view.version or "does not answer"), ("id", view.cluster)]
    output.write_facts(facts)
    rows = [
        [
            each.node,
            each.state,
            each.role,
            each.address,
            f"{each.cpus:g}",
            f"{each.gpus:g}",
            f"{each.alive}/{each.recorded}",
            output.without_node(each.message, each.node),
        ]
        for each in view.nodes
    ]
    columns = ("node", "state", "role", "address", "cpus", "gpus", "processes", "message")
    output.write_table(columns, rows, spare=("address", "processes"))
