"""Starts runs on nodes and follows them: through lost links, by offset, nothing twice and nothing lost.

The id of a run is made here, and a node starts a run of one id once. So a start whose answer was lost is
asked for again, and never begins a second time. A link that is gone says nothing about the run: it goes
on, and `wait` connects again until it has the end.

Not for: choosing the node (launch.py), what happens on it (remote/runs.py, plain_runs.py), or
people's terminals (cli/grid_run_commands.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from genie.errors import (
    ConnectionLostError,
    DeadlineError,
    GenieError,
    NodeRefusedError,
    ProtocolError,
    RunLostError,
    RunNotFoundError,
    TransportError,
    UnreachableError,
    UsageError,
)
from genie.grid import plain_runs
from genie.grid.grid_file import GridFile
from genie.grid.remote import core
from genie.grid.run import (
    MALFORMED,
    Chunk,
    Run,
    RunState,
    checked_id_beginning,
    checked_run_id,
    chunk_of,
    is_run_id,
    new_run_id,
    run_of,
)
from genie.grid.ssh_pool import Link, SshPool, pause_s
from genie.model.names import checked_env_key

_log = logging.getLogger(__name__)

COMMAND_BYTES_MAX = 131_000
"""The longest single argument that Linux takes, less a little."""
STDIN_BYTES_MAX = core.BLOB_BYTES_MAX
GPUS_MAX = 1024
_ENV_BYTES_MAX = 1 << 20
_WAIT_S = 5.0
_WAIT_S_SHORT = 0.5
_QUICK_S = 0.02
"""How long the answer to a start waits for the end of the run: it saves a short one two round trips."""
_START_S = 5.0
_START_S_GPUS = 30.0
"""Beyond ssh.timeout: others may be choosing GPUs, and their driver may be slow to say which are in use."""
_INTERRUPT_S = 2.0
_PAUSE_S = 0.1
_NOTE_EVERY_S = 10.0
_READS_MAX = 40
_STARTS_MAX = 16
"""Of each, to one node at a time: its helper takes 64 requests of all kinds."""
_GONE = (UnreachableError, ConnectionLostError, DeadlineError)
_KEPT_REASONS = ("no_space", "read_only", "denied")

OnOutput = Callable[[str, bytes], None]
"""Gets 'out' or 'err', and bytes as the command wrote them."""
OnNote = Callable[[str], None]


@dataclass(frozen=True)
class NodeRuns:
    """The runs of one node, newest first, or why they are not known."""

    node: str
    runs: tuple[Run, ...] = ()
    error: GenieError | None = None


class Runner:
    """Runs on the nodes of a grid, over the connections of a pool that the caller keeps open."""

    def __init__(
        self,
        pool: SshPool,
        file: GridFile,
        *,
        who: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.is_closing = False
        """Set before all who wait are cancelled, to leave what they have begun alone."""
        self._pool = pool
        self._file = file
        self._who = who
        self._clock = clock
        self._followed: dict[str, int] = {}
        self._reads: dict[str, asyncio.Semaphore] = {}
        self._starts: dict[str, asyncio.Semaphore] = {}
        # Not more than there are connections: a node must not spend its time waiting for another's.
        self._lists = asyncio.Semaphore(file.ssh.pool_size)

    async def start(
        self,
        node: str,
        command: str,
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        gpus: int = 0,
        stdin: bytes = b"",
        timeout_s: float | None = None,
        run_id: str | None = None,
    ) -> Run:
        """Starts a line of shell, as `ssh NODE COMMAND` would, in `cwd` (below remote_root unless whole).

        Raises UnreachableError where it provably has not begun, ConnectionLostError where that is not
        known, and NodeRefusedError with reason 'busy' where not so many GPUs are free. When the caller
        is cancelled meanwhile, what may have begun is interrupted, unless `is_closing`.
        """
        args = {
            "id": checked_run_id(run_id or new_run_id()),
            "command": _checked_command(command),
            "env": _checked_env(env or {}),
            "cwd": _checked_cwd(cwd),
            "gpus": _checked_number(gpus, "gpus", GPUS_MAX),
            "timeout_s": timeout_s,
            "who": self._who,
            "started": time.time(),
            "quick_s": _QUICK_S,
        }
        if len(stdin) > STDIN_BYTES_MAX:
            raise UsageError(
                f"standard input has more than {STDIN_BYTES_MAX} bytes", hint="send it as a file"
            )
        _log.debug("starting a run", extra={"node": node, "run": args["id"]})
        async with self._starts.setdefault(node, asyncio.Semaphore(_STARTS_MAX)):
            answer, output = await self._start(node, args, stdin)
        run = run_of(node, answer)
        if run.run_id != args["id"]:
            raise ProtocolError(f"node {node}: it was asked for run {args['id']} and tells of {run.run_id}")
        if answer.get("first") is None:
            return run
        return dataclasses.replace(run, first=chunk_of(node, answer["first"], output))

    async def _start(self, node: str, args: Mapping[str, Any], stdin: bytes) -> tuple[Any, bytes]:
        asked = False
        error: TransportError | None = None
        for attempt in range(1 + self._file.ssh.max_retries):
            if attempt:
                await asyncio.sleep(pause_s(attempt))
            try:
                async with self._pool.use(node, retries=None if not asked else 0) as link:
                    asked = True
                    timeout_s = self._file.ssh.timeout + (_START_S_GPUS if args["gpus"] else _START_S)
                    return await self._ask_link(link, "start", args, stdin, timeout_s=timeout_s)
            except _GONE as gone:
                if not asked:
                    raise
                error = gone
                _log.info(
                    "asking again for a start", extra={"node": node, "run": args["id"], "why": gone.message}
                )
            except asyncio.CancelledError:
                if asked and not self.is_closing:
                    await self._interrupt_begun(node, str(args["id"]))
                raise
        assert error is not None
        raise ConnectionLostError(
            f"node {node}: whether run {args['id']} has begun is not known: {error.message}",
            hint=f"when the node is back, 'grid-cli attach {args['id']}' follows it, if it has",
        )

    async def _interrupt_begun(self, node: str, run_id: str) -> None:
        """Nobody waits for that start any more. It may be under way there, so it is looked for a while."""
        deadline = self._clock() + _INTERRUPT_S
        while self._clock() < deadline:
            with contextlib.suppress(GenieError, TimeoutError):
                async with asyncio.timeout(_INTERRUPT_S):
                    args = {"id": run_id, "signal": "INT"}
                    answer, _ = await self._ask(node, "signal", args, retries=0)
                    if _sent(node, answer) or answer.get("state") in ("exited", "lost"):
                        return
            await asyncio.sleep(_PAUSE_S)

    async def wait(
        self, run: Run, on_output: OnOutput, *, out: int = 0, err: int = 0, on_note: OnNote | None = None
    ) -> int:
        """Gives output from the offsets on to `on_output` until the run has ended; its exit code.

        Connects again for as long as it takes; `on_note` gets a line of text about that. Raises
        RunLostError for a run that is gone without an exit code, RunNotFoundError for an unknown one,
        and SshAccessError when the node does not let us in any more.
        """
        outage = _Outage(run, clock=self._clock, note=on_note or _ignore)
        known = run.first if out == err == 0 else None
        with self._following(run.node):
            while True:
                try:
                    chunk = known or await self.read(run, out=out, err=err, wait_s=self._wait_s(run.node))
                    known = None
                except _GONE as error:
                    await asyncio.sleep(outage.goes_on(error))
                    continue
                except NodeRefusedError as error:
                    if error.reason != "busy":
                        raise
                    await asyncio.sleep(pause_s(0))
                    continue
                outage.is_over()
                for stream, data in (("out", chunk.out), ("err", chunk.err)):
                    if data:
                        on_output(stream, data)
                out, err = out + len(chunk.out), err + len(chunk.err)
                if chunk.end:
                    return exit_code_of(run, chunk)

    async def read(self, run: Run, *, out: int, err: int, wait_s: float = 0.0) -> Chunk:
        """Output from the offsets on; waits up to `wait_s` for some. One question, asked once."""
        args = {"id": run.run_id, "out": out, "err": err, "wait_s": wait_s}
        async with self._reads.setdefault(run.node, asyncio.Semaphore(_READS_MAX)):
            answer, data = await self._ask(run.node, "read", args, more_s=wait_s, retries=0)
        return chunk_of(run.node, answer, data)

    async def status(self, run: Run) -> Run:
        answer, _ = await self._ask(run.node, "status", {"id": run.run_id})
        return run_of(run.node, answer)

    async def signal(self, run: Run, name: str) -> bool:
        """Sends INT, TERM, KILL, ... to the run's process group. False for a run that has ended."""
        answer, _ = await self._ask(run.node, "signal", {"id": run.run_id, "signal": name})
        return _sent(run.node, answer)

    async def cancel(self, run: Run, *, signal: str = "TERM", grace_s: float = 10.0) -> Run:
        """The signal, and KILL if the run is still there after `grace_s`. The run as it is afterwards."""
        if await self.signal(run, signal):
            found = await self._until_over(run, grace_s)
            if not found.is_over and signal != "KILL" and await self.signal(run, "KILL"):
                found = await self._until_over(run, grace_s)
            return found
        return await self.status(run)

    async def _until_over(self, run: Run, within_s: float) -> Run:
        deadline = self._clock() + within_s
        pause_s = 0.01
        while True:
            found = await self.status(run)
            if found.is_over or self._clock() >= deadline:
                return found
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 1.5, 0.5)

    async def list(self, node: str, *, prefix: str = "") -> tuple[Run, ...]:
        """The runs of one node, newest first: those that run, and the last ones that have ended."""
        answer, _ = await self._ask(node, "list", {"prefix": prefix}, retries=0)
        try:
            told = list(answer["runs"])
        except MALFORMED as error:
            raise ProtocolError(
                f"node {node}: runs are told in a way that we do not know: {error!r}"
            ) from None
        runs = (run_of(node, each) for each in told)
        return tuple(run for run in runs if run.run_id.startswith(prefix))

    async def list_all(self, nodes: Sequence[str] | None = None, *, prefix: str = "") -> Sequence[NodeRuns]:
        """Of all nodes at the same time. One that does not answer says so, and holds up no other."""
        names = nodes if nodes is not None else [node.name for node in self._file.nodes]
        async with asyncio.TaskGroup() as group:
            asked = [group.create_task(self._runs_of(name, prefix)) for name in names]
        return [task.result() for task in asked]

    async def find(self, beginning: str, nodes: Sequence[str] | None = None) -> Run:
        """The one run whose id begins so, wherever it is. Raises RunNotFoundError."""
        checked_id_beginning(beginning)
        names = nodes if nodes is not None else [node.name for node in self._file.nodes]
        found: list[NodeRuns] = []
        async with asyncio.TaskGroup() as group:
            asked = [group.create_task(self._runs_of(name, beginning)) for name in names]
            for each in asyncio.as_completed(asked):
                answer = await each
                found.append(answer)
                if is_run_id(beginning) and answer.runs:  # there is no other: nobody else need answer
                    for task in asked:
                        task.cancel()
                    return answer.runs[0]
        return the_one(beginning, sorted(found, key=lambda each: names.index(each.node)))

    async def _runs_of(self, name: str, prefix: str) -> NodeRuns:
        try:
            async with self._lists:
                return NodeRuns(name, runs=await self.list(name, prefix=prefix))
        except GenieError as error:
            return NodeRuns(name, error=error)

    async def remove(self, run: Run) -> None:
        """Forgets a run that has ended, and its output."""
        await self._ask(run.node, "remove", {"id": run.run_id})

    async def _ask(
        self,
        node: str,
        op: str,
        args: Mapping[str, Any],
        *,
        more_s: float = 0.0,
        retries: int | None = None,
    ) -> tuple[Any, bytes]:
        async with self._pool.use(node, retries=retries) as link:
            return await self._ask_link(link, op, args, timeout_s=self._file.ssh.timeout + more_s)

    async def _ask_link(
        self, link: Link, op: str, args: Mapping[str, Any], blob: bytes = b"", *, timeout_s: float
    ) -> tuple[Any, bytes]:
        given = {"root": self._file.remote_root, **args}
        try:
            if link.has_helper:
                module = "gpu_runs" if args.get("gpus") else "runs"
                return await link.call(f"{module}.{op}", given, blob, timeout_s=timeout_s)
            return await plain_runs.call(link, op, given, blob, timeout_s=timeout_s)
        except NodeRefusedError as error:
            raise _explained(error, op, root=self._file.remote_root) from None

    def _wait_s(self, node: str) -> float:
        """Short where more is followed than can be asked for at a time: everything gets its turn."""
        crowded = len(self._followed) > self._file.ssh.pool_size or self._followed[node] > _READS_MAX
        return _WAIT_S_SHORT if crowded else min(_WAIT_S, self._file.ssh.timeout)

    @contextlib.contextmanager
    def _following(self, node: str) -> Iterator[None]:
        self._followed[node] = self._followed.get(node, 0) + 1
        try:
            yield
        finally:
            self._followed[node] -= 1
            if not self._followed[node]:
                del self._followed[node]


class _Outage:
    """What is said while a node cannot be reached, and how long until it is tried again."""

    def __init__(self, run: Run, *, clock: Callable[[], float], note: OnNote) -> None:
        self._run = run
        self._clock = clock
        self._note = note
        self._answered = clock()
        self._attempt = 0
        self._noted: float | None = None

    def goes_on(self, error: GenieError) -> float:
        now = self._clock()
        if self._noted is None or now - self._noted >= _NOTE_EVERY_S:
            self._noted = now
            since = max(0.0, now - self._answered)
            why = "" if self._attempt else f" ({error.message})"
            node, run_id = self._run.node, self._run.run_id
            self._note(f"{node} is unreachable since {since:.0f} s; run {run_id} goes on there{why}")
        self._attempt += 1
        return pause_s(self._attempt)

    def is_over(self) -> None:
        now = self._clock()
        if self._noted is not None:
            self._note(f"{self._run.node} is back after {now - self._answered:.0f} s")
        self._answered, self._attempt, self._noted = now, 0, None


def _sent(node: str, answer: Any) -> bool:
    if not isinstance(answer, dict) or not isinstance(answer.get("sent"), bool):
        raise ProtocolError(f"node {node}: whether a signal was sent is told in a way that we do not know")
    return bool(answer["sent"])


def the_one(beginning: str, found: Sequence[NodeRuns]) -> Run:
    """Raises RunNotFoundError unless exactly one run begins so; UnreachableError where a node that cannot
    be asked may have it, and what all nodes failed with."""
    runs = [run for each in found for run in each.runs if run.run_id.startswith(beginning)]
    if len(runs) == 1:
        return runs[0]
    silent = [each for each in found if each.error is not None]
    if not runs and silent and len(silent) == len(found):
        assert silent[0].error is not None
        raise silent[0].error
    if not runs:
        if silent:
            names = ", ".join(each.node for each in silent[:10])
            raise UnreachableError(
                f"run {beginning} is on no node that answers; {names} cannot be asked",
                hint="'grid-cli ps' says why",
            )
        raise RunNotFoundError(f"no run has the id {beginning}", hint="'grid-cli ps --all' lists them")
    raise RunNotFoundError(
        f"{len(runs)} runs have ids that begin with {beginning}: "
        f"{', '.join(f'{run.run_id} on {run.node}' for run in runs[:5])}",
        hint="write more of it",
    )


def exit_code_of(run: Run, chunk: Chunk) -> int:
    """Of a run that is over. Raises RunLostError for one that left no exit code."""
    if chunk.state is RunState.LOST or chunk.exit_code is None:
        raise RunLostError(
            f"run {run.run_id} on {run.node} is lost: it runs no more, and how it ended is not known",
            hint="the node went down, or someone killed the run's supervisor there; "
            f"'grid-cli logs {run.run_id}' has what it wrote",
        )
    return chunk.exit_code


def _explained(error: NodeRefusedError, op: str, *, root: str) -> GenieError:
    if error.reason == "missing" and op not in ("start", "list"):
        return RunNotFoundError(error.message, hint="'grid-cli ps --all' lists them")
    if error.reason in _KEPT_REASONS:
        hint = f"make room there, or name another folder with remote_root in the grid's file (now {root})"
        if error.reason != "no_space":
            hint = f"name a folder that can be written with remote_root in the grid's file (now {root})"
        return NodeRefusedError(error.message, hint=hint, reason=error.reason)
    return error


def _checked_command(command: str) -> str:
    if not command.strip():
        raise UsageError(
            "there is no command to run", hint='write it in quotes: grid-cli run "python train.py"'
        )
    if "\0" in command or len(command.encode()) > COMMAND_BYTES_MAX:
        raise UsageError(
            f"the command has a NUL character in it, or more than {COMMAND_BYTES_MAX} bytes",
            hint="put it into a script and run that",
        )
    return command


def _checked_env(env: Mapping[str, str]) -> dict[str, str]:
    for name, value in env.items():
        checked_env_key(name)
        if "\0" in value:
            raise UsageError(
                f"the variable {name} has a NUL character in it", hint="no program can be given one"
            )
    if sum(len(name) + len(value.encode()) for name, value in env.items()) > _ENV_BYTES_MAX:
        raise UsageError(f"the variables have more than {_ENV_BYTES_MAX} bytes", hint="put them into a file")
    return dict(env)


def _checked_cwd(cwd: str | None) -> str:
    if cwd is not None and ("\0" in cwd or "\n" in cwd or not cwd):
        raise UsageError(f"the folder {cwd!r} is not allowed", hint="give a path on the node")
    return cwd or ""


def _checked_number(number: int, what: str, high: int) -> int:
    if not 0 <= number <= high:
        raise UsageError(f"{what} = {number} is not allowed", hint=f"give a whole number from 0 to {high}")
    return number


def _ignore(_: str) -> None:
    pass
