"""Runs of the grid: run, ps, logs, attach, cancel.

A run belongs to its node: it goes on when this program ends. What it writes goes through untouched, and
its exit code becomes ours; 255 is ours alone, for what did not get through.
Not for: what runs are (grid/run.py), following them (grid/runner.py), and where output goes (run_output.py).
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
from genie.cli.app import INTERRUPTED, AsJson, Invocation, grid_command
from genie.cli.grid_node_commands import complete_node, who_asks
from genie.cli.interrupts import caught_interrupts
from genie.cli.quantities import duration_text, parse_duration, parse_pairs, parse_whole
from genie.cli.run_output import (
    COLLECTED_BYTES_MAX,
    PrefixedLines,
    Write,
    collected_object,
    write_stream,
)
from genie.errors import GenieError, RunLostError, UsageError

if TYPE_CHECKING:
    from genie.config import Settings
    from genie.grid.grid_file import GridFile
    from genie.grid.launch import Launch, Launcher
    from genie.grid.run import Collected, Run
    from genie.grid.runner import NodeRuns, Runner
    from genie.grid.ssh_pool import SshPool

_COLUMNS = ("run", "node", "state", "exit", "gpus", "age", "command")
_SPARE = ("gpus", "exit", "age")
_SIGNALS = ("HUP", "INT", "QUIT", "KILL", "USR1", "USR2", "TERM", "CONT", "STOP")
_TRANSPORT = 255
_TIMED_OUT = 124
_GRACE_S_MAX = 3600.0

_RunId = Annotated[str, typer.Argument(metavar="RUN", help="Id of the run; its beginning is enough.")]


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """As typed."""

    node: Annotated[
        list[str] | None,
        typer.Option(
            "--node", metavar="NAME", help="On this node; may be repeated.", autocompletion=complete_node
        ),
    ] = None
    everywhere: Annotated[bool, typer.Option("--all", help="On every node.")] = False
    gpus: Annotated[
        str, typer.Option(metavar="N", help="GPUs that nobody else uses; CUDA_VISIBLE_DEVICES names them.")
    ] = "0"
    label: Annotated[
        list[str] | None,
        typer.Option(metavar="K=V", help="The best of the nodes with this label; may be repeated."),
    ] = None
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="Print the run's id, and do not wait for it.")
    ] = False
    env: Annotated[
        list[str] | None, typer.Option(metavar="K=V", help="Variable for the command; may be repeated.")
    ] = None
    cwd: Annotated[
        str | None,
        typer.Option(
            metavar="DIR", help="Folder on the node, below remote_root unless it begins with / or ~."
        ),
    ] = None
    sync: Annotated[Path | None, typer.Option(metavar="DIR", help="Bring this folder to the node first.")] = (
        None
    )
    timeout: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="The node ends the run after this long, with exit code 124."),
    ] = None
    stdin: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="What the command reads, '-' for our own standard input; at most 16 MiB."
        ),
    ] = None


@grid_command(
    "run",
    example='grid-cli run "python train.py --epochs 100"',
    about_arguments='the command is one argument, in quotes: grid-cli run "nvidia-smi -L"; '
    "one that begins with '-' goes behind --",
)
def run(
    invocation: Invocation,
    *,
    command: Annotated[str, typer.Argument(metavar="COMMAND", help="A line of shell, in quotes.")],
    options: RunOptions,
    as_json: AsJson = False,
) -> None:
    """Run a command on the best node, show its output, and end with its exit code.

    Ctrl-C interrupts it there; a second one kills it.

    When this program ends, the command goes on: 'grid-cli attach' follows it again.
    """
    settings = invocation.load_settings()
    launch = _launch(command, options)
    raise typer.Exit(asyncio.run(_run(settings, launch, options, as_json=as_json)))


@grid_command("ps", example="grid-cli ps --all")
def ps(
    invocation: Invocation,
    *,
    everything: Annotated[bool, typer.Option("--all", "-a", help="Those that have ended, too.")] = False,
    node: Annotated[
        list[str] | None,
        typer.Option("--node", metavar="NAME", help="Only of this node.", autocompletion=complete_node),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the runs of all nodes, newest first: those that go on, unless told otherwise."""
    found = asyncio.run(_list(invocation.load_settings(), node))
    runs = [each for one in found for each in one.runs if everything or not each.is_over]
    runs.sort(key=lambda each: -each.started)
    silent = [one for one in found if one.error is not None]
    if as_json:
        told = [{"node": one.node, "error": one.error.message} for one in silent if one.error is not None]
        output.write_json({"runs": [_as_object(each) for each in runs], "unreachable": told})
    elif runs or silent:
        now = time.time()
        rows = [_row(each, now=now) for each in runs] + [_silent_row(one) for one in silent]
        output.write_table(_COLUMNS, rows, spare=_SPARE)
    else:
        output.say("no runs" if everything else "no runs; --all shows those that have ended")
    if silent and len(silent) == len(found):
        raise typer.Exit(max(one.error.exit_code for one in silent if one.error is not None))


@grid_command("logs", example="grid-cli logs -f r-7k2m4xabcd")
def logs(
    invocation: Invocation,
    *,
    run_id: _RunId,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the run ends.")] = False,
    stderr: Annotated[
        bool, typer.Option("--stderr", help="What it wrote to standard error, instead of output.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Print what a run has written to standard output, on ours."""
    asyncio.run(_logs(invocation.load_settings(), run_id, follow=follow, stderr=stderr, as_json=as_json))


@grid_command("attach", example="grid-cli attach r-7k2m4xabcd")
def attach(invocation: Invocation, *, run_id: _RunId, as_json: AsJson = False) -> None:
    """Follow a run as 'grid-cli run' does: its output from the beginning, its exit code, and Ctrl-C."""
    settings = invocation.load_settings()
    raise typer.Exit(asyncio.run(_attach(settings, run_id, as_json=as_json)))


@grid_command("cancel", example="grid-cli cancel r-7k2m4xabcd")
def cancel(
    invocation: Invocation,
    *,
    run_ids: Annotated[
        list[str], typer.Argument(metavar="RUN...", help="Ids of runs; their beginnings are enough.")
    ],
    signal: Annotated[str, typer.Option(metavar="NAME", help="What is sent first.")] = "TERM",
    grace: Annotated[str, typer.Option(metavar="TIME", help="How long until SIGKILL follows.")] = "10s",
    as_json: AsJson = False,
) -> None:
    """End runs: SIGTERM to all of their processes, SIGKILL to those that do not listen."""
    name = signal.upper().removeprefix("SIG")
    if name not in _SIGNALS:
        raise UsageError(f"--signal {signal!r} is not known", hint=f"allowed: {', '.join(_SIGNALS)}")
    grace_s = parse_duration(grace, what="--grace", none_too=True, high_s=_GRACE_S_MAX)
    settings = invocation.load_settings()
    ended, failed = asyncio.run(_cancel(settings, run_ids, signal=name, grace_s=grace_s))
    if as_json:
        output.write_json({"runs": [_as_object(each) for each in ended]})
    else:
        for each in ended:
            output.write_line(f"{each.run_id}  {each.node}  {_ending(each)}")
    for error in failed:
        output.show_error(error, debug=invocation.debug)
    if failed:
        raise typer.Exit(max(error.exit_code for error in failed))


# --- what the options say -------------------------------------------------------------------------


def _launch(command: str, options: RunOptions) -> Launch:
    from genie.grid.launch import Launch
    from genie.grid.runner import GPUS_MAX
    from genie.model.names import checked_env_key, checked_labels

    if options.everywhere and options.node:
        raise UsageError("--all and --node exclude each other", hint="take one of them")
    if options.label and (options.everywhere or options.node):
        raise UsageError(
            "--label chooses the node; it goes with neither --node nor --all", hint="leave it out"
        )
    if options.sync is not None and not options.sync.is_dir():
        raise UsageError(f"--sync {str(options.sync)!r} is not a folder", hint="give one that exists")
    env = parse_pairs(options.env, what="--env")
    for name in env:
        checked_env_key(name, what="--env")
    return Launch(
        command=command,
        env=env,
        cwd=options.cwd,
        gpus=parse_whole(options.gpus, what="--gpus", low=0, high=GPUS_MAX),
        stdin=_read_stdin(options.stdin),
        timeout_s=None if options.timeout is None else parse_duration(options.timeout, what="--timeout"),
        labels=checked_labels(parse_pairs(options.label, what="--label"), what="--label"),
        sync=options.sync,
    )


def _read_stdin(name: str | None) -> bytes:
    from genie.grid.runner import STDIN_BYTES_MAX

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
            f"--stdin {name!r} cannot be read: {error.strerror}", hint="give a file that can be read"
        ) from None
    if len(data) > STDIN_BYTES_MAX:
        raise UsageError(
            f"--stdin {name!r} has more than {STDIN_BYTES_MAX} bytes", hint="bring it to the node with --sync"
        )
    return data


# --- running --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Outcome:
    """How following one run ended, for us."""

    node: str
    run: Run | None
    exit_code: int
    error: BaseException | None = None
    took_s: float = 0.0
    left: bool = False
    """Nobody waited for its end."""

    @property
    def word(self) -> str:
        if isinstance(self.error, RunLostError):
            return "lost"
        if self.error is not None:
            return "unreachable" if getattr(self.error, "exit_code", 1) == _TRANSPORT else "refused"
        return f"exit code {self.exit_code}"


@contextlib.asynccontextmanager
async def _open(settings: Settings) -> AsyncIterator[tuple[SshPool, GridFile, Runner]]:
    from genie.grid.grid_file import read_grid_file
    from genie.grid.runner import Runner
    from genie.grid.ssh_pool import SshPool

    file = read_grid_file(settings.grid.file)
    async with SshPool(file, ssh_config=settings.grid.ssh_config) as pool:
        yield pool, file, Runner(pool, file, who=who_asks())


async def _run(settings: Settings, launch: Launch, options: RunOptions, *, as_json: bool) -> int:
    from genie.cli.grid_sync_commands import SyncBar
    from genie.grid.launch import Launcher

    async with _open(settings) as (pool, file, runner):
        named = [node.name for node in file.nodes] if options.everywhere else options.node or []
        names = list(dict.fromkeys(named))
        for name in names:
            file.node(name)  # before anything starts anywhere
        with contextlib.closing(SyncBar()) as bar:
            launcher = Launcher(pool, file, runner, state_dir=settings.paths.state_dir, progress=bar)
            if len(names) <= 1:
                runs, failed = [await _start_one(launcher, names, launch)], list[_Outcome]()
            else:
                runs, failed = await _start_all(launcher, names, launch)
        for one in failed:
            assert one.error is not None
            output.show_error(one.error, debug=False)
        if options.detach:
            return _show_started(runs, failed, as_json=as_json)
        several = len(names) > 1
        for each in runs:
            output.say(f"run {each.run_id} on {each.node}")
        followed = _Follower(runner, settings, several=several, as_json=as_json)
        outcomes = failed + await followed.follow(runs)
        for one in outcomes:
            if (
                launch.timeout_s is not None
                and one.exit_code == _TIMED_OUT
                and one.took_s >= launch.timeout_s
            ):
                output.say(f"{one.node}: the node ended the run after its --timeout {options.timeout}")
        return _conclude(outcomes, followed, several=several, as_json=as_json)


async def _start_one(launcher: Launcher, names: Sequence[str], launch: Launch) -> Run:
    from genie.grid.run import new_run_id

    known = dataclasses.replace(launch, run_id=new_run_id())
    try:
        return await (launcher.on(names[0], known) if names else launcher.on_best(known))
    except asyncio.CancelledError:
        output.say(f"if run {known.run_id} still goes on, 'grid-cli cancel {known.run_id}' ends it")
        raise


async def _start_all(
    launcher: Launcher, names: Sequence[str], launch: Launch
) -> tuple[list[Run], list[_Outcome]]:
    async def start(name: str) -> Run | GenieError:
        try:
            return await launcher.on(name, dataclasses.replace(launch, sync=None))
        except GenieError as error:
            return error

    wrong = await launcher.sync(launch.sync, names) if launch.sync is not None else {}
    async with asyncio.TaskGroup() as group:
        tasks = {name: group.create_task(start(name)) for name in names if name not in wrong}
    runs = []
    for name, task in tasks.items():
        result = task.result()
        if isinstance(result, GenieError):
            wrong[name] = result
        else:
            runs.append(result)
    return runs, [_Outcome(name, None, error.exit_code, error) for name, error in wrong.items()]


def _as_object(run: Run) -> dict[str, Any]:
    """As --json shows it: how it is, without what it wrote."""
    return {name: value for name, value in vars(run).items() if name != "first"}


def _show_started(runs: Sequence[Run], failed: Sequence[_Outcome], *, as_json: bool) -> int:
    if as_json:
        output.write_json({"runs": [_as_object(each) for each in runs]})
    else:
        for each in runs:
            output.write_line(each.run_id)
            output.say(f"run {each.run_id} on {each.node}; 'grid-cli attach {each.run_id}' follows it")
    return max((each.exit_code for each in failed), default=0)


def _conclude(outcomes: Sequence[_Outcome], followed: _Follower, *, several: bool, as_json: bool) -> int:
    code = max((each.exit_code for each in outcomes), default=0)
    if as_json:
        output.write_json({"runs": [_told(each, followed) for each in outcomes], "exit_code": code})
    elif several:
        for each in outcomes:
            took = f" after {duration_text(each.took_s)}" if each.run is not None else ""
            output.say(f"{each.node}: {each.word}{took}")
    if not several:
        for each in outcomes:
            if each.error is not None:
                raise each.error
    return code


def _told(outcome: _Outcome, followed: _Follower) -> dict[str, Any]:
    error = outcome.error
    return {
        "run_id": outcome.run.run_id if outcome.run is not None else None,
        "node": outcome.node,
        "exit_code": None if error is not None else outcome.exit_code,
        "error": error.message if isinstance(error, GenieError) else error and str(error),
        "took_s": round(outcome.took_s, 3),
        **followed.collected(outcome.node),
    }


class _Follower:
    """Follows runs to their ends, with Ctrl-C for all of them."""

    def __init__(
        self, runner: Runner, settings: Settings, *, several: bool, as_json: bool, counts: bool = True
    ) -> None:
        self._runner = runner
        self._counts = counts
        self._state_dir = settings.paths.state_dir
        self._several = several
        self._as_json = as_json
        self._kept: dict[str, Collected] = {}
        self._interrupted = False
        self._out_of_reach: set[Run] = set()

    def collected(self, node: str) -> dict[str, object]:
        return collected_object(self._kept.get(node))

    async def follow(self, runs: Sequence[Run]) -> list[_Outcome]:
        with caught_interrupts() as presses:
            async with asyncio.TaskGroup() as group:
                tasks = {each: group.create_task(self._one(each)) for each in runs}
                watch = group.create_task(self._pass_on(presses, tasks, group))
                if tasks:
                    await asyncio.wait(tasks.values())
                watch.cancel()
        return [self._left(each) if task.cancelled() else task.result() for each, task in tasks.items()]

    async def _one(self, run: Run) -> _Outcome:
        """Errors are part of the outcome: a TaskGroup would end the others for them."""
        from genie.grid.launch import counted

        began = time.monotonic()
        error: BaseException | None = None
        code = _TRANSPORT
        counting = counted(self._state_dir) if self._counts else contextlib.nullcontext(_not_counted)
        with counting as ended, self._sink(run.node) as sink:
            try:
                code = await self._runner.wait(run, sink, on_note=output.say_lines)
            except RunLostError as lost:
                ended("lost")
                error = lost
            except GenieError as trouble:
                error, code = trouble, trouble.exit_code
            except OSError as trouble:  # of our own output: whoever read it has gone, or the disk is full
                error, code = trouble, 1
                output.say(f"run {run.run_id} goes on; 'grid-cli attach {run.run_id}' follows it")
            else:
                ended("cancelled" if self._interrupted and code else "failed" if code else "succeeded")
        return _Outcome(run.node, run, code, error, took_s=time.monotonic() - began)

    @contextlib.contextmanager
    def _sink(self, node: str) -> Any:
        if self._as_json:
            from genie.grid.run import Collected

            self._kept[node] = Collected(bytes_max=COLLECTED_BYTES_MAX)
            yield self._kept[node]
        elif self._several:
            lines = PrefixedLines(node, write_stream)
            try:
                yield lines
            finally:
                lines.close()
        else:
            sink: Write = write_stream
            yield sink

    def _left(self, run: Run) -> _Outcome:
        output.say(f"run {run.run_id} may go on on {run.node}; 'grid-cli attach {run.run_id}' follows it")
        code = _TRANSPORT if run in self._out_of_reach else INTERRUPTED
        return _Outcome(run.node, run, code, left=True)

    async def _pass_on(
        self,
        presses: asyncio.Queue[None],
        tasks: dict[Run, asyncio.Task[_Outcome]],
        group: asyncio.TaskGroup,
    ) -> None:
        """The first Ctrl-C interrupts the runs, the second kills them, the third leaves them alone."""
        sending: list[asyncio.Task[None]] = []
        for name, word in (("INT", "interrupting"), ("KILL", "killing")):
            await presses.get()
            self._interrupted = True
            left = {run: task for run, task in tasks.items() if not task.done()}
            output.say(f"{word} {', '.join(run.run_id for run in left)}; Ctrl-C again to {_NEXT[name]}")
            sending += [group.create_task(self._signal(run, name, task)) for run, task in left.items()]
        await presses.get()
        for each in (*sending, *tasks.values()):
            each.cancel()

    async def _signal(self, run: Run, name: str, following: asyncio.Task[_Outcome]) -> None:
        try:
            await self._runner.signal(run, name)
        except GenieError as error:
            output.show_error(error, debug=False)
            output.say(f"run {run.run_id} on {run.node} has not got the signal")
            if name == "KILL":
                self._out_of_reach.add(run)
                following.cancel()


def _not_counted(_: str) -> None:
    pass


_NEXT = {"INT": "kill", "KILL": "leave at once"}


# --- the other commands ---------------------------------------------------------------------------


async def _list(settings: Settings, nodes: Sequence[str] | None) -> Sequence[NodeRuns]:
    async with _open(settings) as (_, file, runner):
        for name in nodes or []:
            file.node(name)
        return await runner.list_all(nodes or None)


async def _logs(settings: Settings, run_id: str, *, follow: bool, stderr: bool, as_json: bool) -> None:
    from genie.grid.run import Collected

    wanted = "err" if stderr else "out"
    kept = Collected(bytes_max=COLLECTED_BYTES_MAX)

    def show(stream: str, data: bytes) -> None:
        if as_json:
            kept(stream, data)
        elif stream == wanted:
            write_stream("out", data)

    async with _open(settings) as (_, _, runner):
        found = await runner.find(run_id)
        if follow:
            with contextlib.suppress(RunLostError):
                await runner.wait(found, show, on_note=output.say_lines)
        else:
            await _read_all(runner, found, show)
        if as_json:
            output.write_json({"run_id": found.run_id, "node": found.node, **collected_object(kept)})


async def _read_all(runner: Runner, run: Run, show: Write) -> None:
    out = err = 0
    while True:
        chunk = await runner.read(run, out=out, err=err)
        show("out", chunk.out)
        show("err", chunk.err)
        out, err = out + len(chunk.out), err + len(chunk.err)
        if chunk.end or not (chunk.out or chunk.err):
            return


async def _attach(settings: Settings, run_id: str, *, as_json: bool) -> int:
    async with _open(settings) as (_, _, runner):
        found = await runner.find(run_id)
        # One that has ended was counted by whoever saw its end.
        counts = not found.is_over
        followed = _Follower(runner, settings, several=False, as_json=as_json, counts=counts)
        outcomes = [await _with_duration(each, runner) for each in await followed.follow([found])]
        return _conclude(outcomes, followed, several=False, as_json=as_json)


async def _with_duration(outcome: _Outcome, runner: Runner) -> _Outcome:
    """A run that is attached to began before we did; its node knows how long it took."""
    if outcome.run is None or outcome.error is not None or outcome.left:
        return outcome
    with contextlib.suppress(GenieError):
        told = await runner.status(outcome.run)
        if told.ended is not None:
            return dataclasses.replace(outcome, took_s=max(0.0, told.ended - told.started))
    return outcome


async def _cancel(
    settings: Settings, run_ids: Sequence[str], *, signal: str, grace_s: float
) -> tuple[list[Run], list[GenieError]]:
    ended: list[Run] = []
    failed: list[GenieError] = []
    async with _open(settings) as (_, _, runner):
        for run_id in run_ids:
            try:
                found = await runner.find(run_id)
                ended.append(await runner.cancel(found, signal=signal, grace_s=grace_s))
            except GenieError as error:
                failed.append(error)
    return ended, failed


def _ending(run: Run) -> str:
    if run.exit_code is None:
        return run.state.value
    return f"{run.state.value} with exit code {run.exit_code}"


def _row(run: Run, *, now: float) -> tuple[str, ...]:
    return (
        run.run_id,
        run.node,
        run.state.value,
        "-" if run.exit_code is None else str(run.exit_code),
        ",".join(map(str, run.gpus)) or "-",
        duration_text(now - run.started),
        run.command,
    )


def _silent_row(one: NodeRuns) -> tuple[str, ...]:
    assert one.error is not None
    state = "unreachable" if one.error.exit_code == _TRANSPORT else "refused"
    return ("-", one.node, state, "-", "-", "-", output.without_node(one.error.message, one.node))
