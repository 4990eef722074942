"""Starts runs on nodes and follows their output by offset, across lost connections.

The ID of a run is generated here, and a node starts a run with a given ID once. So a start whose reply was
lost is retried safely. A lost connection does not affect the run: `follow_until_end`
reconnects until the run has ended.

The node is chosen by launch.py; the node's side is in remote/runs.py and shell_runs.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import enum
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
    UnreachableError,
    UsageError,
)
from genie.grid.backoff import backoff_s, retry
from genie.grid.grid_file import GridFile
from genie.grid.remote import core
from genie.grid.runs import shell_runs
from genie.grid.runs.run import (
    OutputChunk,
    Run,
    RunState,
    is_run_id,
    new_run_id,
    parse_output_chunk,
    parse_run,
    validate_run_id,
    validate_run_id_prefix,
)
from genie.grid.ssh.node_helper import MALFORMED_REPLY_ERRORS
from genie.grid.ssh.pool import NodeConnection, SshPool
from genie.model.limits import GPUS_MAX, TIME_LIMIT_S_MAX
from genie.model.names import validate_env_key

_log = logging.getLogger(__name__)

COMMAND_BYTES_MAX = 131_000
"""Slightly less than the longest argument that Linux accepts."""
STDIN_BYTES_MAX = core.MESSAGE_BLOB_BYTES_MAX
_ENV_BYTES_MAX = 1 << 20
_OUTPUT_WAIT_S = 5.0
_CONTENDED_OUTPUT_WAIT_S = 0.5
_SHORT_RUN_WAIT_S = 0.02
"""How long a start waits for the run to end: saves two round trips for a short run."""
_START_TIMEOUT_MARGIN_S = 5.0
_GPU_START_TIMEOUT_MARGIN_S = 30.0
"""In addition to ssh.timeout: other runs may be choosing GPUs, and the GPU driver may be slow."""
_INTERRUPT_START_TIMEOUT_S = 2.0
_KILL_TIMEOUT_S = 10.0
"""How long a cancel waits for the end of a killed run, regardless of its grace period."""
_INTERRUPT_START_POLL_INTERVAL_S = 0.1
_OUTAGE_MESSAGE_INTERVAL_S = 10.0
_CANCELLED_STARTS_MAX = 4096
_CONCURRENT_READS_PER_NODE_MAX = 40
_CONCURRENT_STARTS_PER_NODE_MAX = 16
"""Concurrent requests of each kind per node: its helper accepts 64 in total."""
_CONNECTION_ERRORS = (UnreachableError, ConnectionLostError, DeadlineError)
_DISK_ERROR_REASONS = ("no_space", "read_only", "denied")

OnOutput = Callable[[str, bytes], None]
"""Called with 'out' or 'err' and the bytes that the command wrote."""
OnMessage = Callable[[str], None]


@dataclass(frozen=True)
class NodeRuns:
    """The runs of one node, newest first, or the error."""

    node: str
    runs: tuple[Run, ...] = ()
    error: GenieError | None = None


class CancelledStartState(enum.Enum):
    """State of a run whose start was cancelled."""

    NOT_SENT = "not started"
    INTERRUPTED = "started and interrupted"
    UNKNOWN = "may have started"


class Runner:
    """Runs on the nodes of a grid, over the connections of a pool that the caller keeps open."""

    def __init__(
        self,
        pool: SshPool,
        file: GridFile,
        *,
        requester: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pool = pool
        self._grid_file = file
        self._requester = requester
        self._clock = clock
        self._followed_count_by_node: dict[str, int] = {}
        self._read_slots_by_node: dict[str, asyncio.Semaphore] = {}
        self._start_slots_by_node: dict[str, asyncio.Semaphore] = {}
        # At most one per connection: waiting for a pool slot would count against the timeout.
        self._list_slots = asyncio.Semaphore(file.ssh.pool_size)
        self._cancelled_starts: dict[str, CancelledStartState] = {}
        self._interrupts_cancelled_starts = True

    def stop_interrupting_cancelled_starts(self) -> None:
        """From now on, cancelling a start does not interrupt the run."""
        self._interrupts_cancelled_starts = False

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
        """Starts a shell command, as `ssh NODE COMMAND` would, in `cwd` (relative to remote_root).

        Raises UnreachableError if it has not started, ConnectionLostError if that is unknown, and
        NodeRefusedError with reason 'busy' if too few GPUs are free. If the caller is cancelled, a run that
        may have started is interrupted, unless `stop_interrupting_cancelled_starts` was called.
        """
        args = {
            "id": validate_run_id(run_id or new_run_id()),
            "command": _validate_command(command),
            "env": _validate_env(env or {}),
            "cwd": _validate_cwd(cwd),
            "gpus": _validate_number(gpus, "gpus", GPUS_MAX),
            "timeout_s": _validate_timeout(timeout_s),
            "who": self._requester,
            "started": time.time(),
            "quick_s": _SHORT_RUN_WAIT_S,
        }
        if len(stdin) > STDIN_BYTES_MAX:
            raise UsageError(
                f"standard input has more than {STDIN_BYTES_MAX} bytes", hint="send it as a file"
            )
        _log.debug("starting a run", extra={"node": node, "run": args["id"]})
        async with self._start_slots_by_node.setdefault(
            node, asyncio.Semaphore(_CONCURRENT_STARTS_PER_NODE_MAX)
        ):
            reply, output = await self._send_start_with_retries(node, args, stdin)
        run = parse_run(node, reply)
        if run.run_id != args["id"]:
            raise ProtocolError(
                f"node {node}: requested run {args['id']}, but the reply is about {run.run_id}"
            )
        if reply.get("first") is None:
            return run
        return dataclasses.replace(run, output_if_ended=parse_output_chunk(node, reply["first"], output))

    async def _send_start_with_retries(
        self, node: str, args: Mapping[str, Any], stdin: bytes
    ) -> tuple[Any, bytes]:
        run_id = str(args["id"])
        request_sent = False

        def log(error: Exception, _: float) -> None:
            why = {"node": node, "run": run_id, "why": str(error)}
            _log.info("retrying the start of a run", extra=why)

        @retry(
            max_retries=self._grid_file.ssh.max_retries,
            when=lambda error: request_sent and isinstance(error, _CONNECTION_ERRORS),
            on_retry=log,
        )
        async def send() -> tuple[Any, bytes]:
            nonlocal request_sent
            async with self._pool.connect(node, retries=None if not request_sent else 0) as link:
                request_sent = True
                timeout_s = self._grid_file.ssh.timeout + (
                    _GPU_START_TIMEOUT_MARGIN_S if args["gpus"] else _START_TIMEOUT_MARGIN_S
                )
                return await self._request_on_connection(link, "start", args, stdin, timeout_s=timeout_s)

        try:
            return await send()
        except _CONNECTION_ERRORS as error:
            if not request_sent:
                raise
            raise ConnectionLostError(
                f"node {node}: could not determine whether run {run_id} has started: {error.message}",
                hint=f"when the node is reachable again, 'grid-cli attach {run_id}' follows the run",
            ) from None
        except asyncio.CancelledError:
            if request_sent:
                # First: another cancellation may abort the interrupt.
                self._record_cancelled_start(run_id, CancelledStartState.UNKNOWN)
                if (
                    self._interrupts_cancelled_starts
                    and await self._interrupt_cancelled_start_and_check_ended(node, run_id)
                ):
                    self._record_cancelled_start(run_id, CancelledStartState.INTERRUPTED)
            raise

    def cancelled_start_state(self, run_id: str) -> CancelledStartState:
        """Returns what is known about a run whose start was cancelled."""
        return self._cancelled_starts.get(run_id, CancelledStartState.NOT_SENT)

    def _record_cancelled_start(self, run_id: str, known: CancelledStartState) -> None:
        self._cancelled_starts[run_id] = known
        if len(self._cancelled_starts) > _CANCELLED_STARTS_MAX:
            del self._cancelled_starts[next(iter(self._cancelled_starts))]

    async def _interrupt_cancelled_start_and_check_ended(self, node: str, run_id: str) -> bool:
        """Interrupts a run whose start was cancelled. Returns whether it has ended; it may ignore the signal.

        The node may not have processed the start yet, so this retries for _INTERRUPT_START_TIMEOUT_S.
        """
        deadline = self._clock() + _INTERRUPT_START_TIMEOUT_S
        is_sent = False
        while self._clock() < deadline:
            with contextlib.suppress(GenieError, TimeoutError):
                async with asyncio.timeout(_INTERRUPT_START_TIMEOUT_S):
                    if not is_sent:
                        args = {"id": run_id, "signal": "INT"}
                        reply, _ = await self._request(node, "signal", args, retries=0)
                        is_sent = _was_signal_sent(node, reply)
                    else:
                        reply, _ = await self._request(node, "status", {"id": run_id}, retries=0)
                    if isinstance(reply, dict) and reply.get("state") in ("exited", "lost"):
                        return True
            await asyncio.sleep(_INTERRUPT_START_POLL_INTERVAL_S)
        return False

    async def follow_until_end(
        self, run: Run, on_output: OnOutput, *, out: int = 0, err: int = 0, on_note: OnMessage | None = None
    ) -> int:
        """Passes output from the offsets on to `on_output` until the run has ended; returns its exit code.

        Reconnects without limit; `on_note` gets status lines about that. Raises RunLostError for a run
        without an exit code, RunNotFoundError for an unknown run, and SshAccessError when the node rejects
        the login.
        """
        outage = _OutageReporter(run, clock=self._clock, note=on_note or _ignore_message)
        known = run.output_if_ended if out == err == 0 else None
        with self._counted_as_followed(run.node):
            while True:
                try:
                    chunk = known or await self.read_output(
                        run, out=out, err=err, wait_s=self._output_wait_s(run.node)
                    )
                    known = None
                except _CONNECTION_ERRORS as error:
                    await asyncio.sleep(outage.report_outage_and_get_delay_s(error))
                    continue
                except NodeRefusedError as error:
                    if error.reason != "busy":
                        raise
                    await asyncio.sleep(backoff_s(0))
                    continue
                outage.report_reachable_again()
                for stream, data in (("out", chunk.out), ("err", chunk.err)):
                    if data:
                        on_output(stream, data)
                out, err = out + len(chunk.out), err + len(chunk.err)
                if chunk.is_last:
                    return exit_code_of_ended_run(run, chunk)

    async def read_output(self, run: Run, *, out: int, err: int, wait_s: float = 0.0) -> OutputChunk:
        """Reads output from the offsets on; waits up to `wait_s` for some. Does not retry."""
        args = {"id": run.run_id, "out": out, "err": err, "wait_s": wait_s}
        async with self._read_slots_by_node.setdefault(
            run.node, asyncio.Semaphore(_CONCURRENT_READS_PER_NODE_MAX)
        ):
            reply, data = await self._request(run.node, "read", args, extra_s=wait_s, retries=0)
        return parse_output_chunk(run.node, reply, data)

    async def fetch_status(self, run: Run) -> Run:
        reply, _ = await self._request(run.node, "status", {"id": run.run_id})
        return parse_run(run.node, reply)

    async def send_signal(self, run: Run, name: str) -> bool:
        """Sends INT, TERM, KILL, ... to the process group of the run. False if the run has ended."""
        reply, _ = await self._request(run.node, "signal", {"id": run.run_id, "signal": name})
        return _was_signal_sent(run.node, reply)

    async def cancel(self, run: Run, *, signal: str = "TERM", grace_s: float = 10.0) -> Run:
        """Sends the signal, and KILL after a grace period of `grace_s`. Returns the run afterwards."""
        if await self.send_signal(run, signal):
            found = await self._wait_until_ended(run, _KILL_TIMEOUT_S if signal == "KILL" else grace_s)
            if not found.has_ended and signal != "KILL" and await self.send_signal(run, "KILL"):
                found = await self._wait_until_ended(run, _KILL_TIMEOUT_S)
            return found
        return await self.fetch_status(run)

    async def _wait_until_ended(self, run: Run, timeout_s: float) -> Run:
        deadline = self._clock() + timeout_s
        pause_s = 0.01
        while True:
            found = await self.fetch_status(run)
            if found.has_ended or self._clock() >= deadline:
                return found
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 1.5, 0.5)

    async def list_runs(self, node: str, *, prefix: str = "") -> tuple[Run, ...]:
        """Returns the runs of one node, newest first: active ones and the last ended ones."""
        reply, _ = await self._request(node, "list", {"prefix": prefix}, retries=0)
        try:
            entries = list(reply["runs"])
        except MALFORMED_REPLY_ERRORS as error:
            raise ProtocolError(f"node {node}: invalid list of runs: {error!r}") from None
        runs = (parse_run(node, each) for each in entries)
        return tuple(run for run in runs if run.run_id.startswith(prefix))

    async def list_runs_on_nodes(
        self, nodes: Sequence[str] | None = None, *, prefix: str = ""
    ) -> Sequence[NodeRuns]:
        """Lists the runs of several nodes concurrently; the error of a node is in its entry."""
        names = nodes if nodes is not None else [node.name for node in self._grid_file.nodes]
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._list_runs_or_error(name, prefix)) for name in names]
        return [task.result() for task in tasks]

    async def fetch_run_by_prefix(self, prefix: str, nodes: Sequence[str] | None = None) -> Run:
        """Returns the run whose ID starts with `prefix`, on any node. Raises RunNotFoundError."""
        validate_run_id_prefix(prefix)
        names = nodes if nodes is not None else [node.name for node in self._grid_file.nodes]
        found: list[NodeRuns] = []
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._list_runs_or_error(name, prefix)) for name in names]
            for each in asyncio.as_completed(tasks):
                reply = await each
                found.append(reply)
                if is_run_id(prefix) and reply.runs:  # complete IDs are unique: other nodes do not matter
                    for task in tasks:
                        task.cancel()
                    return reply.runs[0]
        return select_run_by_prefix(prefix, sorted(found, key=lambda each: names.index(each.node)))

    async def _list_runs_or_error(self, name: str, prefix: str) -> NodeRuns:
        try:
            async with self._list_slots:
                return NodeRuns(name, runs=await self.list_runs(name, prefix=prefix))
        except GenieError as error:
            return NodeRuns(name, error=error)

    async def remove_run(self, run: Run) -> None:
        """Removes an ended run and its output from the node."""
        await self._request(run.node, "remove", {"id": run.run_id})

    async def _request(
        self,
        node: str,
        op: str,
        args: Mapping[str, Any],
        *,
        extra_s: float = 0.0,
        retries: int | None = None,
    ) -> tuple[Any, bytes]:
        async with self._pool.connect(node, retries=retries) as link:
            return await self._request_on_connection(
                link, op, args, timeout_s=self._grid_file.ssh.timeout + extra_s
            )

    async def _request_on_connection(
        self, link: NodeConnection, op: str, args: Mapping[str, Any], blob: bytes = b"", *, timeout_s: float
    ) -> tuple[Any, bytes]:
        given = {"root": self._grid_file.remote_root, **args}
        try:
            if link.has_helper:
                module = "gpu_runs" if args.get("gpus") else "runs"
                return await link.call(f"{module}.{op}", given, blob, timeout_s=timeout_s)
            return await shell_runs.call_op_by_shell(link, op, given, blob, timeout_s=timeout_s)
        except NodeRefusedError as error:
            raise _with_run_hint(error, op, root=self._grid_file.remote_root) from None

    def _output_wait_s(self, node: str) -> float:
        """Wait time per read; short if more runs are followed than can be read concurrently."""
        crowded = (
            len(self._followed_count_by_node) > self._grid_file.ssh.pool_size
            or self._followed_count_by_node[node] > _CONCURRENT_READS_PER_NODE_MAX
        )
        return _CONTENDED_OUTPUT_WAIT_S if crowded else min(_OUTPUT_WAIT_S, self._grid_file.ssh.timeout)

    @contextlib.contextmanager
    def _counted_as_followed(self, node: str) -> Iterator[None]:
        self._followed_count_by_node[node] = self._followed_count_by_node.get(node, 0) + 1
        try:
            yield
        finally:
            self._followed_count_by_node[node] -= 1
            if not self._followed_count_by_node[node]:
                del self._followed_count_by_node[node]


class _OutageReporter:
    """Status lines and backoff while a node is unreachable."""

    def __init__(self, run: Run, *, clock: Callable[[], float], note: OnMessage) -> None:
        self._run = run
        self._clock = clock
        self._on_message = note
        self._last_reply_at_s = clock()
        self._attempt = 0
        self._last_message_s: float | None = None

    def report_outage_and_get_delay_s(self, error: GenieError) -> float:
        now = self._clock()
        if self._last_message_s is None or now - self._last_message_s >= _OUTAGE_MESSAGE_INTERVAL_S:
            self._last_message_s = now
            since = max(0.0, now - self._last_reply_at_s)
            why = "" if self._attempt else f" ({error.message})"
            node, run_id = self._run.node, self._run.run_id
            self._on_message(
                f"{node} has been unreachable for {since:.0f} s; run {run_id} continues there{why}"
            )
        self._attempt += 1
        return backoff_s(self._attempt)

    def report_reachable_again(self) -> None:
        now = self._clock()
        if self._last_message_s is not None:
            self._on_message(f"{self._run.node} is reachable again after {now - self._last_reply_at_s:.0f} s")
        self._last_reply_at_s, self._attempt, self._last_message_s = now, 0, None


def _was_signal_sent(node: str, reply: Any) -> bool:
    if not isinstance(reply, dict) or not isinstance(reply.get("sent"), bool):
        raise ProtocolError(f"node {node}: invalid reply to a signal request")
    return bool(reply["sent"])


def select_run_by_prefix(prefix: str, found: Sequence[NodeRuns]) -> Run:
    """Returns the only run whose ID starts with `prefix`. Raises RunNotFoundError, UnreachableError if it
    may be on an unreachable node, and the first error if all nodes failed."""
    runs = [run for each in found for run in each.runs if run.run_id.startswith(prefix)]
    if len(runs) == 1:
        return runs[0]
    failed = [each for each in found if each.error is not None]
    if not runs and failed and len(failed) == len(found):
        assert failed[0].error is not None
        raise failed[0].error
    if not runs:
        if failed:
            names = ", ".join(each.node for each in failed[:10])
            raise UnreachableError(
                f"run {prefix} is on no reachable node; could not reach {names}",
                hint="'grid-cli ps' shows why",
            )
        raise RunNotFoundError(f"no run has the ID {prefix}", hint="'grid-cli ps --all' lists them")
    raise RunNotFoundError(
        f"{len(runs)} runs have IDs that start with {prefix}: "
        f"{', '.join(f'{run.run_id} on {run.node}' for run in runs[:5])}",
        hint="use a longer prefix",
    )


def exit_code_of_ended_run(run: Run, chunk: OutputChunk) -> int:
    """Returns the exit code of an ended run. Raises RunLostError if there is none."""
    if chunk.state is RunState.LOST or chunk.exit_code is None:
        raise RunLostError(
            f"run {run.run_id} on {run.node} is lost: it has ended without an exit record",
            hint="the node went down, or the supervisor of the run was killed; "
            f"'grid-cli logs {run.run_id}' shows its output",
        )
    return chunk.exit_code


def _with_run_hint(error: NodeRefusedError, op: str, *, root: str) -> GenieError:
    if error.reason == "missing" and op not in ("start", "list"):
        return RunNotFoundError(error.message, hint="'grid-cli ps --all' lists them")
    if error.reason in _DISK_ERROR_REASONS:
        hint = f"free space on the node, or set another remote_root in the grid file (now {root})"
        if error.reason != "no_space":
            hint = f"set remote_root in the grid file to a writable folder (now {root})"
        return NodeRefusedError(error.message, hint=hint, reason=error.reason)
    return error


def _validate_command(command: str) -> str:
    if not command.strip():
        raise UsageError("no command given", hint='write it in quotes: grid-cli run "python train.py"')
    if "\0" in command or len(command.encode()) > COMMAND_BYTES_MAX:
        raise UsageError(
            f"the command contains a NUL character or has more than {COMMAND_BYTES_MAX} bytes",
            hint="put it into a script",
        )
    return command


def _validate_env(env: Mapping[str, str]) -> dict[str, str]:
    for name, value in env.items():
        validate_env_key(name)
        if not isinstance(value, str):
            raise UsageError(
                f"the environment variable {name} is {value!r}, not a string",
                hint="write the value in quotes",
            )
        if "\0" in value:
            raise UsageError(f"the environment variable {name} contains a NUL character", hint="remove it")
    if sum(len(name) + len(value.encode()) for name, value in env.items()) > _ENV_BYTES_MAX:
        raise UsageError(
            f"the environment variables have more than {_ENV_BYTES_MAX} bytes", hint="use a file"
        )
    return dict(env)


def _validate_cwd(cwd: str | None) -> str:
    if cwd == "":
        raise UsageError("the path of the working directory is empty", hint="use a path on the node")
    if cwd is not None and ("\0" in cwd or "\n" in cwd):
        raise UsageError(
            f"the working directory {cwd!r} contains a NUL character or a line break",
            hint="use a path on the node",
        )
    return cwd or ""


def _validate_number(number: int, what: str, high: int) -> int:
    if not 0 <= number <= high:
        raise UsageError(f"invalid value {what} = {number}", hint=f"use an integer from 0 to {high}")
    return number


def _validate_timeout(timeout_s: float | None) -> float | None:
    """Rejects NaN, among others: on the node, such a timeout would never expire."""
    try:
        is_allowed = timeout_s is None or 0 < float(timeout_s) <= TIME_LIMIT_S_MAX
    except (TypeError, ValueError):
        is_allowed = False
    if not is_allowed:
        raise UsageError(
            f"invalid value timeout_s = {timeout_s!r}",
            hint=f"use a number of seconds, at most {TIME_LIMIT_S_MAX:.0f} (10 years)",
        )
    return None if timeout_s is None else float(timeout_s)


def _ignore_message(_: str) -> None:
    pass
