"""Commands for Ray on a grid: setup, and cluster start, stop, status, dashboard and submit.

Implemented in grid/setup.py, grid/ray/cluster.py and grid/ray/jobs.py.
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
from genie.cli.app import Invocation, JsonOption, grid_app, grid_command
from genie.cli.grid.nodes import complete_node_name, load_settings_and_grid_file, local_user_at_host
from genie.cli.quantities import parse_integer, parse_number, parse_pairs
from genie.errors import ConnectionLostError, UsageError
from genie.model.limits import GPUS_MAX

if TYPE_CHECKING:
    from genie.config import Settings
    from genie.grid.grid_file import GridFile
    from genie.grid.ray.cluster import RayCluster, RayStopReport
    from genie.grid.ray.jobs import RayJobResult, RayJobs
    from genie.grid.ray.plan import RayClusterView
    from genie.grid.setup import EnvironmentSpec, SetupReport
    from genie.grid.ssh.pool import SshPool

_cluster_app = typer.Typer(name="cluster", help="Run a Ray cluster on the nodes.", no_args_is_help=True)
grid_app.add_typer(_cluster_app)

_NodesOption = Annotated[
    list[str] | None,
    typer.Option(
        "--node", metavar="NODE", help="Use only this node; repeatable.", autocompletion=complete_node_name
    ),
]
_STOP_JOB_TIMEOUT_S = 30.0
_DEFAULT_REQUIREMENTS_FILE = Path("requirements.txt")


@grid_command(
    "setup",
    example="grid-cli setup --package 'ray[default]' --package numpy",
    arguments_hint="give packages with --package, nodes with --node",
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
            help="Requirements file to install.",
        ),
    ] = None,
    package: Annotated[
        list[str] | None, typer.Option(metavar="PACKAGE", help="Package to install on the nodes; repeatable.")
    ] = None,
    python: Annotated[
        str, typer.Option(metavar="PROGRAM", help="Python on the nodes for creating the environment.")
    ] = "python3",
    system_packages: Annotated[
        bool, typer.Option("--system-packages", help="Make system packages visible in the environment.")
    ] = False,
    wheels: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Install from the wheels in DIR, for nodes without internet access."
        ),
    ] = None,
    node: _NodesOption = None,
    again: Annotated[
        bool, typer.Option("--again", help="Install even if the environment is up to date.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Create a Python environment on all nodes (grid_env in remote_root) and install packages.

    Default packages: ray[default], torch, numpy, and ./requirements.txt; with --wheels, only those of ray,
    torch and numpy that are in DIR.
    """
    from genie.grid.setup import read_environment_spec

    settings, file = load_settings_and_grid_file(invocation)
    if requirements is None and not package:
        requirements = _DEFAULT_REQUIREMENTS_FILE if _DEFAULT_REQUIREMENTS_FILE.is_file() else None
        package = _print_and_get_default_packages(wheels, requirements)
    wanted = read_environment_spec(
        requirements=requirements,
        packages=package or [],
        python=python,
        system_packages=system_packages,
        wheels=wheels,
    )
    reports = asyncio.run(_run_setup(settings, file, wanted, node or [], again=again))
    _print_setup_reports_and_exit(reports, as_json=as_json)


def _print_and_get_default_packages(wheels: Path | None, requirements: Path | None) -> list[str]:
    """Return and print the default packages. Raises UsageError if there are none."""
    from genie.grid.setup import DEFAULT_PACKAGES, default_packages

    packages = list(default_packages(wheels))
    missing = [each for each in DEFAULT_PACKAGES if each not in packages]
    if missing:
        output.print_message(f"not installing {', '.join(missing)}: not in {wheels}")
    names = ", ".join(packages)
    wanted = " and ".join(each for each in (names, str(requirements or "")) if each)
    if not wanted:
        raise UsageError(f"nothing to install from {wheels}", hint="name packages with --package")
    output.print_message(f"installing {wanted} (override with --package or --requirements)")
    return packages


def _print_setup_reports_and_exit(reports: list[SetupReport], *, as_json: bool) -> None:
    """Print the reports and exit with the highest exit code."""
    if as_json:
        output.write_json([dataclasses.asdict(report) for report in reports])
    else:
        rows = [
            [each.node, each.state, each.python, _last_line(output.strip_node_prefix(each.error, each.node))]
            for each in reports
        ]
        output.write_table(("node", "state", "python", "message"), rows)
    for report in reports:
        if report.exit_code:
            output.print_message_lines(
                f"genie: {report.error}" + (f"\nhint: {report.hint}" if report.hint else "")
            )
    raise typer.Exit(max(report.exit_code for report in reports))


@grid_command("start", group=_cluster_app, example="grid-cli cluster start")
def start(
    invocation: Invocation,
    *,
    node: _NodesOption = None,
    head: Annotated[
        str | None,
        typer.Option(
            metavar="NODE",
            help="Head node (default: the first node).",
            autocompletion=complete_node_name,
        ),
    ] = None,
    allow_missing: Annotated[
        bool, typer.Option("--allow-missing", help="Continue without nodes that fail.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Start Ray on the nodes, one as the head. If one fails, none is started."""
    settings, file = load_settings_and_grid_file(invocation)

    async def work() -> RayClusterView:
        async with _open_pool_and_cluster(settings, file) as (_, cluster):
            return await cluster.start(
                nodes=node or [], head=head, allow_missing=allow_missing, on_progress=_print_node_message
            )

    view = asyncio.run(work())
    if as_json:
        output.write_json(dataclasses.asdict(view))
        return
    _write_cluster_view(view)
    output.print_message("next: grid-cli cluster dashboard, or grid-cli cluster submit -- CMD")


@grid_command("stop", group=_cluster_app, example="grid-cli cluster stop")
def stop(invocation: Invocation, *, as_json: JsonOption = False) -> None:
    """Stop the Ray processes that 'cluster start' started, and no others.

    Exits with 255 if a node is unreachable; Ray may still be running there.
    """
    settings, file = load_settings_and_grid_file(invocation)

    async def work() -> list[RayStopReport]:
        async with _open_pool_and_cluster(settings, file) as (_, cluster):
            return await cluster.stop(on_progress=_print_node_message)

    reports = asyncio.run(work())
    if as_json:
        output.write_json([dataclasses.asdict(report) for report in reports])
    elif not any(report.role or report.error for report in reports):
        output.write_line("no Ray cluster is running")
    else:
        rows = [
            [
                *(each.node, each.role, str(each.ended), str(each.killed)),
                output.strip_node_prefix(each.error, each.node),
            ]
            for each in reports
        ]
        output.write_table(("node", "role", "processes stopped", "processes killed", "message"), rows)
    raise typer.Exit(max(report.exit_code for report in reports))


@grid_command("status", group=_cluster_app, example="grid-cli cluster status --json")
def status(invocation: Invocation, *, as_json: JsonOption = False) -> None:
    """Show the nodes of the Ray cluster with their resources and processes.

    Exits with 255 if no node is reachable.
    """
    settings, file = load_settings_and_grid_file(invocation)

    async def work() -> RayClusterView:
        async with _open_pool_and_cluster(settings, file) as (_, cluster):
            return await cluster.status()

    view = asyncio.run(work())
    if as_json:
        output.write_json(dataclasses.asdict(view))
    else:
        _write_cluster_view(view)
    raise typer.Exit(view.exit_code)


@grid_command("dashboard", group=_cluster_app, example="grid-cli cluster dashboard --port 8265")
def dashboard(
    invocation: Invocation,
    *,
    port: Annotated[
        str | None,
        typer.Option(metavar="PORT", help="Local port, 0: any free one (default: ray.dashboard_port)."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Open a tunnel from this machine to Ray's dashboard until Ctrl-C."""
    given = None if port is None else parse_integer(port, what="--port", low=0, high=65535)
    settings, file = load_settings_and_grid_file(invocation)

    async def work() -> None:
        async with _open_pool_and_cluster(settings, file) as (_, cluster):
            local = given if given is not None else file.ray.dashboard_port
            async with cluster.open_dashboard_tunnel(local_port=local) as tunnel:
                if as_json:
                    output.write_json({"url": tunnel.url, "token_file": str(cluster.token_file)})
                else:
                    output.write_line(tunnel.url)
                    output.print_message(
                        f"log in with the token in {cluster.token_file}. Press Ctrl-C to close the tunnel."
                    )
                await tunnel.wait_until_lost()
                raise ConnectionLostError(f"node {tunnel.head}: connection lost")

    asyncio.run(work())


@grid_command(
    "submit",
    group=_cluster_app,
    example="grid-cli cluster submit -- python train.py",
    context_settings={"allow_interspersed_args": False},
)
def submit(
    invocation: Invocation,
    *,
    argv: Annotated[
        list[str] | None, typer.Argument(metavar="-- CMD", help="Command to run, with its arguments.")
    ] = None,
    gpus: Annotated[
        str, typer.Option(metavar="N", help="GPUs on the head node for the program itself.")
    ] = "0",
    env: Annotated[
        list[str] | None, typer.Option(metavar="K=V", help="Environment variable of the job; repeatable.")
    ] = None,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Print the job ID and exit.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Run a program as a Ray job on the head node, print its output, and exit with its exit code."""
    from genie.grid.ray.jobs import RayJobs, to_shell_line

    if not argv:
        raise UsageError(
            "no command given",
            hint="put the command after --, as in: grid-cli cluster submit -- python train.py",
        )
    program_gpus = parse_number(gpus, what="--gpus", high=GPUS_MAX)
    settings, file = load_settings_and_grid_file(invocation)
    variables = {"RAY_NAMESPACE": file.ray.namespace, **_parse_env_options(env or [])}

    async def work() -> RayJobResult | str:
        async with _open_pool_and_cluster(settings, file) as (_, cluster):
            jobs = RayJobs(cluster)
            job = await jobs.submit(to_shell_line(argv), env=variables, gpus=program_gpus)
            return job if detach else await _follow_job(jobs, job, as_json=as_json)

    end = asyncio.run(work())
    if isinstance(end, str):
        output.write_json({"job": end}) if as_json else output.write_line(end)
        return
    if as_json:
        output.write_json(dataclasses.asdict(end))
    elif end.exit_code and end.status == "FAILED" and "exit code" not in end.message:
        output.print_message_lines(f"genie: {_first_line(end.message)}")
    raise typer.Exit(end.exit_code)


async def _follow_job(jobs: RayJobs, job: str, *, as_json: bool) -> RayJobResult:
    """Print the output of a job until it ends. The first Ctrl-C stops the job and waits for its end."""
    write = _write_stderr if as_json else output.write_bytes
    try:
        return await jobs.follow(job, write)
    except asyncio.CancelledError:
        output.print_message(f"stopping job {job}")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_STOP_JOB_TIMEOUT_S):
                await jobs.stop(job)
                await jobs.follow(job, lambda _data: None)
        raise


def _write_stderr(data: bytes) -> None:
    output.print_message(data.decode("utf-8", "replace").rstrip("\n"))


def _parse_env_options(pairs: list[str]) -> dict[str, str]:
    from genie.model.names import validate_env_key

    found = parse_pairs(pairs, what="--env")
    return {validate_env_key(key, what="--env"): value for key, value in found.items()}


async def _run_setup(
    settings: Settings, file: GridFile, wanted: EnvironmentSpec, nodes: list[str], *, again: bool
) -> list[SetupReport]:
    from genie.grid.setup import EnvironmentSetup

    async with _open_pool_and_cluster(settings, file) as (pool, _):
        return await EnvironmentSetup(pool, file, requester=local_user_at_host()).run(
            wanted, nodes, again=again, on_progress=_print_node_message
        )


@contextlib.asynccontextmanager
async def _open_pool_and_cluster(
    settings: Settings, file: GridFile
) -> AsyncIterator[tuple[SshPool, RayCluster]]:
    from genie.grid.ray.cluster import RayCluster
    from genie.grid.ssh.pool import SshPool

    async with SshPool(file, ssh_config=settings.grid.ssh_config) as pool:
        yield pool, RayCluster(pool, file, state_dir=settings.paths.state_dir)


def _print_node_message(node: str, text: str) -> None:
    output.print_message_lines(f"{node}: {_first_line(output.strip_node_prefix(text, node))}")


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0] if text.strip() else ""


def _last_line(text: str) -> str:
    """Return the last line: the one with the error in the output of pip."""
    return text.strip().splitlines()[-1] if text.strip() else ""


def _write_cluster_view(view: RayClusterView) -> None:
    facts = [("state", view.state)]
    if view.cluster:
        facts += [("head", view.head), ("ray", view.version or "not responding"), ("id", view.cluster)]
    output.write_fields(facts)
    rows = [
        [
            each.node,
            each.state,
            each.role or "-",
            each.address or "-",
            f"{each.cpus:g}" if each.role else "-",
            f"{each.gpus:g}" if each.role else "-",
            f"{each.alive} of {each.recorded}" if each.recorded else "-",
            output.strip_node_prefix(each.message, each.node),
        ]
        for each in view.nodes
    ]
    columns = ("node", "state", "role", "address", "cpus", "gpus", "processes alive", "message")
    output.write_table(columns, rows, droppable=("address", "processes alive"))
