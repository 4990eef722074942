"""Commands for runs on a grid: run, ps, logs, attach, cancel.

A run continues on its node when this program exits. Its output is printed unchanged and its exit code is
returned; 255 means a connection failure. Runs are implemented in grid/runs, following in run_follower.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from genie.cli import output
from genie.cli.app import INTERRUPTED_EXIT_CODE, Invocation, JsonOption, grid_command
from genie.cli.grid.nodes import complete_node_name, local_user_at_host
from genie.cli.grid.run_follower import TRANSPORT_EXIT_CODE, RunFollower, RunOutcome
from genie.cli.grid.run_output import (
    COLLECTED_OUTPUT_BYTES_MAX,
    StreamWriter,
    output_to_json,
    write_to_own_stream,
)
from genie.cli.quantities import format_duration, parse_duration, parse_integer, parse_labels, parse_pairs
from genie.errors import GenieError, RunLostError, UsageError

if TYPE_CHECKING:
    from genie.config import Settings
    from genie.grid.grid_file import GridFile
    from genie.grid.runs.launch import RunLauncher, RunSpec
    from genie.grid.runs.run import Run
    from genie.grid.runs.run_client import NodeRuns, Runner
    from genie.grid.ssh.pool import SshPool

_RUN_COLUMNS = ("run", "node", "state", "exit code", "gpu indices", "age", "command")
_RUN_DROPPABLE_COLUMNS = ("gpu indices", "exit code", "age")
_CANCEL_SIGNAL_NAMES = ("HUP", "INT", "QUIT", "KILL", "USR1", "USR2", "TERM", "CONT", "STOP")
_RUN_TIMEOUT_EXIT_CODE = 124
_CANCEL_GRACE_S_MAX = 3600.0

_RunIdArgument = Annotated[str, typer.Argument(metavar="RUN", help="Run ID, or a unique prefix.")]


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Option values as text."""

    node: Annotated[
        list[str] | None,
        typer.Option(
            "--node",
            metavar="NAME",
            help="Run on this node; repeatable (default: the best node).",
            autocompletion=complete_node_name,
        ),
    ] = None
    all_nodes: Annotated[bool, typer.Option("--all", help="Run on all nodes.")] = False
    gpus: Annotated[
        str, typer.Option(metavar="N", help="Number of exclusive GPUs; sets CUDA_VISIBLE_DEVICES.")
    ] = "0"
    label: Annotated[
        list[str] | None,
        typer.Option(metavar="K=V", help="Choose among nodes with this label; repeatable."),
    ] = None
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="Print the run ID and exit; the run continues.")
    ] = False
    env: Annotated[
        list[str] | None, typer.Option(metavar="K=V", help="Environment variable of the command; repeatable.")
    ] = None
    cwd: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help="Working directory on the node; relative paths start at remote_root.",
        ),
    ] = None
    sync: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Sync this directory to the node first.")
    ] = None
    timeout: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Maximum run time; exit code 124 when it expires (default: none)."),
    ] = None
    stdin: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="File for the standard input of the command; - forwards that of grid-cli; at most 16 MiB.",
        ),
    ] = None


@grid_command(
    "run",
    example='grid-cli run "python train.py --epochs 100"',
    arguments_hint='quote the command, as in: grid-cli run "nvidia-smi -L"; '
    "put a command that starts with '-' after --",
)
def run(
    invocation: Invocation,
    *,
    command: Annotated[str, typer.Argument(metavar="COMMAND", help="Shell command, as one quoted argument.")],
    options: RunOptions,
    as_json: JsonOption = False,
) -> None:
    """Run a command on the best node, print its output, and exit with its exit code.

    Ctrl-C interrupts the command; a second Ctrl-C kills it.

    If the connection is lost, the command continues; 'grid-cli attach' follows it again.
    """
    settings = invocation.load_settings()
    launch = _build_run_spec(command, options)
    raise typer.Exit(asyncio.run(_run_command_and_get_exit_code(settings, launch, options, as_json=as_json)))


@grid_command("ps", example="grid-cli ps --all")
def ps(
    invocation: Invocation,
    *,
    everything: Annotated[bool, typer.Option("--all", "-a", help="Include finished runs.")] = False,
    node: Annotated[
        list[str] | None,
        typer.Option(
            "--node",
            metavar="NAME",
            help="Only runs on this node; repeatable.",
            autocompletion=complete_node_name,
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """List the running commands of all nodes, newest first."""
    found = asyncio.run(_fetch_runs(invocation.load_settings(), node))
    runs = [each for one in found for each in one.runs if everything or not each.has_ended]
    runs.sort(key=lambda each: -each.started)
    failed = [one for one in found if one.error is not None]
    if as_json:
        errors = [{"node": one.node, "error": one.error.message} for one in failed if one.error is not None]
        output.write_json({"runs": [_run_to_json(each) for each in runs], "unreachable": errors})
    elif runs or failed:
        now = time.time()
        rows = [_run_row(each, now=now) for each in runs] + [_failed_node_row(one) for one in failed]
        output.write_table(_RUN_COLUMNS, rows, droppable=_RUN_DROPPABLE_COLUMNS)
    else:
        output.print_message("no runs" if everything else "no runs; use --all to include finished runs")
    if failed and len(failed) == len(found):
        raise typer.Exit(max(one.error.exit_code for one in failed if one.error is not None))


@grid_command("logs", example="grid-cli logs -f r-7k2m4xabcd")
def logs(
    invocation: Invocation,
    *,
    run_id: _RunIdArgument,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Follow the output until the run ends.")
    ] = False,
    stderr: Annotated[
        bool, typer.Option("--stderr", help="Print standard error instead of standard output.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Print the standard output of a run."""
    asyncio.run(
        _print_run_output(invocation.load_settings(), run_id, follow=follow, stderr=stderr, as_json=as_json)
    )


@grid_command("attach", example="grid-cli attach r-7k2m4xabcd")
def attach(invocation: Invocation, *, run_id: _RunIdArgument, as_json: JsonOption = False) -> None:
    """Follow a run from its first output until it ends, and exit with its exit code."""
    settings = invocation.load_settings()
    raise typer.Exit(asyncio.run(_attach_and_get_exit_code(settings, run_id, as_json=as_json)))


@grid_command("cancel", example="grid-cli cancel r-7k2m4xabcd")
def cancel(
    invocation: Invocation,
    *,
    run_ids: Annotated[list[str], typer.Argument(metavar="RUN...", help="Run IDs, or unique prefixes.")],
    signal: Annotated[
        str, typer.Option(metavar="NAME", help="Signal to send before SIGKILL, such as INT.")
    ] = "TERM",
    grace: Annotated[str, typer.Option(metavar="TIME", help="Grace period before SIGKILL.")] = "10s",
    as_json: JsonOption = False,
) -> None:
    """Cancel runs: send SIGTERM to their processes, then SIGKILL after the grace period."""
    name = signal.upper().removeprefix("SIG")
    if name not in _CANCEL_SIGNAL_NAMES:
        raise UsageError(
            f"--signal {signal!r} is invalid", hint=f"allowed: {', '.join(_CANCEL_SIGNAL_NAMES)}"
        )
    grace_s = parse_duration(grace, what="--grace", zero_allowed=True, high_s=_CANCEL_GRACE_S_MAX)
    settings = invocation.load_settings()
    ended, failed = asyncio.run(_cancel_runs(settings, run_ids, signal=name, grace_s=grace_s))
    if as_json:
        output.write_json({"runs": [_run_to_json(each) for each in ended]})
    else:
        for each in ended:
            output.write_line(f"{each.run_id}  {each.node}  {_format_run_end(each)}")
    for error in failed:
        output.show_error(error, debug=invocation.debug)
    if failed:
        raise typer.Exit(max(error.exit_code for error in failed))


# --- options --------------------------------------------------------------------------------------


def _build_run_spec(command: str, options: RunOptions) -> RunSpec:
    from genie.grid.runs.launch import RunSpec
    from genie.model.limits import GPUS_MAX
    from genie.model.names import validate_env_key

    if options.all_nodes and options.node:
        raise UsageError("--all and --node are mutually exclusive", hint="give one of them")
    if options.label and (options.all_nodes or options.node):
        raise UsageError("--label cannot be combined with --node or --all", hint="remove --label")
    if options.sync is not None and not options.sync.is_dir():
        raise UsageError(
            f"--sync {str(options.sync)!r} is not a directory", hint="give an existing directory"
        )
    env = parse_pairs(options.env, what="--env")
    for name in env:
        validate_env_key(name, what="--env")
    return RunSpec(
        command=command,
        env=env,
        cwd=options.cwd,
        gpus=parse_integer(options.gpus, what="--gpus", low=0, high=GPUS_MAX),
        stdin=_read_stdin_option(options.stdin),
        timeout_s=None if options.timeout is None else parse_duration(options.timeout, what="--timeout"),
        labels=parse_labels(options.label),
        sync=options.sync,
    )


def _read_stdin_option(name: str | None) -> bytes:
    from genie.grid.runs.run_client import STDIN_BYTES_MAX

    if name is None:
        return b""
    try:
        if name == "-":
            data = sys.stdin.buffer.read(STDIN_BYTES_MAX + 1)
        else:
            with Path(name).expanduser().open("rb") as file:
                data = file.read(STDIN_BYTES_MAX + 1)
    except OSError as error:
        raise UsageError(
            f"could not read --stdin {name!r}: {error.strerror}", hint="give a readable file"
        ) from None
    if len(data) > STDIN_BYTES_MAX:
        raise UsageError(
            f"--stdin {name!r} is larger than {STDIN_BYTES_MAX} bytes", hint="copy it with --sync"
        )
    return data


# --- running --------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def _open_runner(settings: Settings) -> AsyncIterator[tuple[SshPool, GridFile, Runner]]:
    from genie.grid.grid_file import read_grid_file
    from genie.grid.runs.run_client import Runner
    from genie.grid.ssh.pool import SshPool

    file = read_grid_file(settings.grid.file)
    async with SshPool(file, ssh_config=settings.grid.ssh_config) as pool:
        yield pool, file, Runner(pool, file, requester=local_user_at_host())


async def _run_command_and_get_exit_code(
    settings: Settings, launch: RunSpec, options: RunOptions, *, as_json: bool
) -> int:
    from genie.cli.grid.sync import SyncProgressBar
    from genie.grid.runs.launch import RunLauncher

    async with _open_runner(settings) as (pool, file, runner):
        named = [node.name for node in file.nodes] if options.all_nodes else options.node or []
        names = list(dict.fromkeys(named))
        for name in names:
            file.node(name)  # before anything starts anywhere
        several = len(names) > 1
        with contextlib.closing(SyncProgressBar()) as bar:
            launcher = RunLauncher(pool, file, runner, state_dir=settings.paths.state_dir, progress=bar)
            follower = RunFollower(
                runner,
                file,
                state_dir=settings.paths.state_dir,
                several=several,
                as_json=as_json,
                detach=options.detach,
                on_start=bar.close,
            )
            if several:
                outcomes = await _run_on_several_nodes(launcher, follower, names, launch)
            else:
                run = await _start_on_named_or_best_node(launcher, names, launch)
                bar.close()
                outcomes = [await follower.follow(run, announce=True)]
        if options.detach:
            return _report_detached_and_get_exit_code(outcomes, follower, as_json=as_json)
        for one in outcomes:
            if (
                launch.timeout_s is not None
                and one.exit_code == _RUN_TIMEOUT_EXIT_CODE
                and one.took_s >= launch.timeout_s
            ):
                output.print_message(
                    f"{one.node}: the run exceeded --timeout {options.timeout} and was terminated"
                )
        return _report_outcomes_and_get_exit_code(outcomes, follower, several=several, as_json=as_json)


async def _start_on_named_or_best_node(launcher: RunLauncher, names: Sequence[str], launch: RunSpec) -> Run:
    from genie.grid.runs.run import new_run_id

    known = dataclasses.replace(launch, run_id=new_run_id())
    try:
        run = await (launcher.start_on_node(names[0], known) if names else launcher.start_on_best_node(known))
    except asyncio.CancelledError:
        output.print_message(
            f"run {known.run_id} may have started; to cancel it: grid-cli cancel {known.run_id}"
        )
        raise
    return run


async def _run_on_several_nodes(
    launcher: RunLauncher, follower: RunFollower, names: Sequence[str], launch: RunSpec
) -> list[RunOutcome]:
    from genie.grid.runs.run import new_run_id

    run_ids = {name: new_run_id() for name in names}
    launches = {
        name: dataclasses.replace(launch, sync=None, run_id=run_id) for name, run_id in run_ids.items()
    }
    async with launcher.open_starter_after_sync(launches, sync=launch.sync) as start:
        return await follower.start_and_follow(run_ids, start)


def _run_to_json(run: Run) -> dict[str, Any]:
    """Return the fields of a run for --json, without its output."""
    return {name: value for name, value in vars(run).items() if name != "first"}


def _report_detached_and_get_exit_code(
    outcomes: Sequence[RunOutcome], follower: RunFollower, *, as_json: bool
) -> int:
    if as_json:
        started = [_run_to_json(each.run) for each in outcomes if each.run is not None]
        output.write_json({"runs": started})
    for each in outcomes:
        if isinstance(each.error, OSError) and len(outcomes) == 1:
            raise each.error
        if each.abandoned_state or isinstance(each.error, OSError):
            output.print_message(f"{each.node}: {each.summary}")
    return _combined_exit_code(outcomes, follower)


def _report_outcomes_and_get_exit_code(
    outcomes: Sequence[RunOutcome], follower: RunFollower, *, several: bool, as_json: bool
) -> int:
    code = _combined_exit_code(outcomes, follower) if several else outcomes[0].exit_code
    if as_json:
        output.write_json(
            {"runs": [_outcome_to_json(each, follower) for each in outcomes], "exit_code": code}
        )
    elif several:
        for each in outcomes:
            took = f" after {format_duration(each.took_s)}" if each.took_s else ""
            output.print_message(f"{each.node}: {each.summary}{took}")
    if not several:
        for each in outcomes:
            if each.error is not None:
                raise each.error
    return code


def _combined_exit_code(outcomes: Sequence[RunOutcome], follower: RunFollower) -> int:
    """Return the highest exit code of all nodes; after Ctrl-C, that of started runs and at least 130."""
    if not follower.was_interrupted:
        return max(each.exit_code for each in outcomes)
    return max(INTERRUPTED_EXIT_CODE, *(each.exit_code for each in outcomes if each.run is not None), 0)


def _outcome_to_json(outcome: RunOutcome, follower: RunFollower) -> dict[str, Any]:
    error = outcome.error
    ended = error is None and not outcome.abandoned_state
    return {
        "run_id": outcome.run.run_id if outcome.run is not None else None,
        "node": outcome.node,
        "exit_code": outcome.exit_code if ended else None,
        "error": error.message
        if isinstance(error, GenieError)
        else str(error or outcome.abandoned_state) or None,
        "took_s": round(outcome.took_s, 3),
        **follower.collected_output_json(outcome.node),
    }


# --- the other commands ---------------------------------------------------------------------------


async def _fetch_runs(settings: Settings, nodes: Sequence[str] | None) -> Sequence[NodeRuns]:
    async with _open_runner(settings) as (_, file, runner):
        for name in nodes or []:
            file.node(name)
        return await runner.list_runs_on_nodes(nodes or None)


async def _print_run_output(
    settings: Settings, run_id: str, *, follow: bool, stderr: bool, as_json: bool
) -> None:
    from genie.grid.runs.run import OutputCollector

    wanted = "err" if stderr else "out"
    kept = OutputCollector(bytes_max=COLLECTED_OUTPUT_BYTES_MAX)

    def show(stream: str, data: bytes) -> None:
        if as_json:
            kept(stream, data)
        elif stream == wanted:
            write_to_own_stream("out", data)

    async with _open_runner(settings) as (_, _, runner):
        found = await runner.fetch_run_by_prefix(run_id)
        if follow:
            with contextlib.suppress(RunLostError):
                await runner.follow_until_end(found, show, on_note=output.print_message_lines)
        else:
            await _show_output_so_far(runner, found, show)
        if as_json:
            output.write_json({"run_id": found.run_id, "node": found.node, **output_to_json(kept)})


async def _show_output_so_far(runner: Runner, run: Run, show: StreamWriter) -> None:
    out = err = 0
    while True:
        chunk = await runner.read_output(run, out=out, err=err)
        show("out", chunk.out)
        show("err", chunk.err)
        out, err = out + len(chunk.out), err + len(chunk.err)
        if chunk.is_last or not (chunk.out or chunk.err):
            return


async def _attach_and_get_exit_code(settings: Settings, run_id: str, *, as_json: bool) -> int:
    async with _open_runner(settings) as (_, file, runner):
        found = await runner.fetch_run_by_prefix(run_id)
        follower = RunFollower(
            runner, file, state_dir=settings.paths.state_dir, several=False, as_json=as_json
        )
        outcome = await _with_duration_from_node(await follower.follow(found), runner)
        return _report_outcomes_and_get_exit_code([outcome], follower, several=False, as_json=as_json)


async def _with_duration_from_node(outcome: RunOutcome, runner: Runner) -> RunOutcome:
    """Set the duration from the node: an attached run started before this command."""
    if outcome.run is None or outcome.error is not None or outcome.abandoned_state:
        return outcome
    with contextlib.suppress(GenieError):
        final = await runner.fetch_status(outcome.run)
        if final.ended is not None:
            return dataclasses.replace(outcome, took_s=max(0.0, final.ended - final.started))
    return outcome


async def _cancel_runs(
    settings: Settings, run_ids: Sequence[str], *, signal: str, grace_s: float
) -> tuple[list[Run], list[GenieError]]:
    from genie.grid.runs.launch import track_run_in_metrics

    ended: list[Run] = []
    failed: list[GenieError] = []
    async with _open_runner(settings) as (_, file, runner):
        for run_id in run_ids:
            try:
                found = await runner.fetch_run_by_prefix(run_id)
                after = await runner.cancel(found, signal=signal, grace_s=grace_s)
            except GenieError as error:
                failed.append(error)
            else:
                ended.append(after)
                if after.has_ended and not found.has_ended:
                    count = track_run_in_metrics(
                        after, state_dir=settings.paths.state_dir, file=file, is_new=False
                    )
                    count("cancelled")
    return ended, failed


def _format_run_end(run: Run) -> str:
    if run.exit_code is None:
        return run.state.value
    return f"{run.state.value} with exit code {run.exit_code}"


def _run_row(run: Run, *, now: float) -> tuple[str, ...]:
    return (
        run.run_id,
        run.node,
        run.state.value,
        "-" if run.exit_code is None else str(run.exit_code),
        ",".join(map(str, run.gpus)) or "-",
        format_duration(now - run.started),
        run.command,
    )


def _failed_node_row(one: NodeRuns) -> tuple[str, ...]:
    assert one.error is not None
    state = "unreachable" if one.error.exit_code == TRANSPORT_EXIT_CODE else "refused"
    return ("-", one.node, state, "-", "-", "-", output.strip_node_prefix(one.error.message, one.node))
