"""The grid for Python programs without asyncio: `Executor().run_distributed("python train.py")`.

All functions block the calling thread; the I/O runs on a separate thread, so they also work where an event
loop runs. `await asyncio.to_thread(find_best_node)` does not block that loop.

Not used by the command line, which streams output (cli/grid/run.py).
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
import weakref
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from genie.config import load
from genie.errors import GenieError, RunLostError, UsageError
from genie.grid.grid_file import GridFile, read_grid_file
from genie.grid.runs.launch import RunLauncher, RunSpec, track_run_in_metrics
from genie.grid.runs.run import OutputCollector
from genie.grid.runs.run_client import Runner
from genie.grid.ssh.pool import SshPool

if TYPE_CHECKING:
    from genie.grid.health.check import NodeHealth
    from genie.grid.sync.syncer import SyncReport

RUN_OUTPUT_BYTES_MAX = 16 << 20
_INTERRUPT_RUN_TIMEOUT_S = 5.0
_CLOSE_LOOP_TIMEOUT_S = 10.0
_SIGNAL_CHECK_INTERVAL_S = 0.5
_Value = TypeVar("_Value")


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """The result of a command. Output is truncated to 16 MiB per stream; `grid-cli logs` shows all of it."""

    exit_code: int
    stdout: str
    stderr: str
    node: str
    run_id: str
    truncated: bool = False

    @property
    def ok(self) -> bool:
        return self.exit_code == 0

    def __str__(self) -> str:
        """Return the output; for a failed command also standard error and the exit code."""
        if self.ok:
            return self.stdout.removesuffix("\n")
        status = f"exit code {self.exit_code} on {self.node} (run {self.run_id})"
        return "\n".join(
            part for part in (self.stdout.rstrip("\n"), self.stderr.rstrip("\n"), status) if part
        )


class Executor:
    """Runs commands on grid nodes and waits for them. Connections stay open for the next call.

    `config` is the grid file, by default config/cluster_config.yaml. Thread-safe. Use as a context manager,
    or the connections are closed when the program exits.
    """

    def __init__(self, config: str | Path | None = None) -> None:
        settings = load({"grid.file": None if config is None else str(config)})
        self._grid_file: GridFile = read_grid_file(settings.grid.file)
        self._ssh_config = settings.grid.ssh_config
        self._state_dir = settings.paths.state_dir
        self._lock = threading.Lock()
        self._loop_thread: _GridLoopThread | None = None

    def run_distributed(
        self,
        command: str,
        *,
        node: str | None = None,
        gpus: int = 0,
        sync: str | Path | None = ".",
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        labels: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> RunResult:
        """Sync the folder `sync` to the best node, or to `node`, and run a shell command line there.

        `sync` defaults to the current directory; None sends nothing. A command that fails returns its exit
        code; an error is raised if there is none. Ctrl-C interrupts the command.
        """
        launch = RunSpec(
            command=command,
            env=env or {},
            cwd=cwd,
            gpus=gpus,
            labels=labels or {},
            timeout_s=timeout_s,
            sync=None if sync is None else _resolve_sync_folder(sync),
        )
        loop_thread = self._get_or_start_loop_thread()
        return loop_thread.run(self._run_command_and_wait(loop_thread, launch, node))

    def find_best_node(self, *, gpus: int = 0, labels: Mapping[str, str] | None = None) -> str:
        """Return the name of the node with the lowest score, `gpus` free GPUs and these labels.

        Readings are cached for health_check.refresh_interval. Raises NoNodeError with a reason per node.
        """
        loop_thread = self._get_or_start_loop_thread()
        return loop_thread.run(loop_thread.launcher.choose_best_node(gpus=gpus, labels=labels, without={}))

    def check_all_nodes(self, *, fresh: bool = False) -> list[NodeHealth]:
        """Return the health of every node, sorted by score, the best first. `fresh` ignores the cache."""
        loop_thread = self._get_or_start_loop_thread()
        return loop_thread.run(loop_thread.launcher.check_all_nodes(fresh=fresh))

    def smart_sync(self, folder: str | Path = ".", *, nodes: Sequence[str] | None = None) -> list[SyncReport]:
        """Send the changes in a folder to `nodes` (default: all nodes).

        Returns one report per node, which contains the node's error; local errors are raised.
        """
        names = list(nodes) if nodes is not None else [node.name for node in self._grid_file.nodes]
        loop_thread = self._get_or_start_loop_thread()
        return loop_thread.run(loop_thread.launcher.sync(Path(folder), names))

    def close(self) -> None:
        """Close the connections. Runs continue; threads that wait for one get a UsageError."""
        with self._lock:
            loop_thread, self._loop_thread = self._loop_thread, None
        if loop_thread is not None:
            loop_thread.close()

    def __enter__(self) -> Executor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _get_or_start_loop_thread(self) -> _GridLoopThread:
        with self._lock:
            if self._loop_thread is None:
                self._loop_thread = _GridLoopThread(
                    self._grid_file, self._ssh_config, state_dir=self._state_dir
                )
                weakref.finalize(self, self._loop_thread.close)
            return self._loop_thread

    async def _run_command_and_wait(
        self, loop_thread: _GridLoopThread, launch: RunSpec, node: str | None
    ) -> RunResult:
        runner, launcher = loop_thread.runner, loop_thread.launcher
        output = OutputCollector(bytes_max=RUN_OUTPUT_BYTES_MAX)
        run = await (
            launcher.start_on_best_node(launch) if node is None else launcher.start_on_node(node, launch)
        )
        ended = track_run_in_metrics(run, state_dir=self._state_dir, file=self._grid_file)
        try:
            code = await runner.follow_until_end(run, output)
        except asyncio.CancelledError:
            if loop_thread.is_closed:
                raise
            ended("cancelled")
            with contextlib.suppress(GenieError, TimeoutError):
                async with asyncio.timeout(_INTERRUPT_RUN_TIMEOUT_S):
                    await runner.send_signal(run, "INT")
            raise
        except RunLostError:
            ended("lost")
            raise
        ended("failed" if code else "succeeded")
        return RunResult(
            exit_code=code,
            stdout=output.text("out"),
            stderr=output.text("err"),
            node=run.node,
            run_id=run.run_id,
            truncated=output.truncated,
        )


def find_best_node(
    config: str | Path | None = None, *, gpus: int = 0, labels: Mapping[str, str] | None = None
) -> str:
    """Like Executor.find_best_node, with connections for this call only. `config` is the grid file."""
    with Executor(config) as executor:
        return executor.find_best_node(gpus=gpus, labels=labels)


def check_all_nodes(config: str | Path | None = None, *, fresh: bool = False) -> list[NodeHealth]:
    """Like Executor.check_all_nodes, with connections for this call only. `config` is the grid file."""
    with Executor(config) as executor:
        return executor.check_all_nodes(fresh=fresh)


def smart_sync(
    folder: str | Path = ".", *, nodes: Sequence[str] | None = None, config: str | Path | None = None
) -> list[SyncReport]:
    """Like Executor.smart_sync, with connections for this call only. `config` is the grid file."""
    with Executor(config) as executor:
        return executor.smart_sync(folder, nodes=nodes)


def _resolve_sync_folder(folder: str | Path) -> Path:
    """Return the resolved folder. Raises UsageError if it cannot be synced, before a node is chosen."""
    from genie.grid.sync.local_tree import resolve_local_root  # late, as in launch.py

    try:
        return resolve_local_root(Path(folder))
    except UsageError as error:
        raise UsageError(error.message, hint=f"{error.hint}, or sync=None to send nothing") from None


class _GridLoopThread:
    """An event loop on its own thread, with the connection pool."""

    def __init__(self, file: GridFile, ssh_config: Path, *, state_dir: Path) -> None:
        self.pool = SshPool(file, ssh_config=ssh_config)
        self.runner = Runner(self.pool, file)
        self.launcher = RunLauncher(self.pool, file, self.runner, state_dir=state_dir)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="genie-grid", daemon=True)
        self._thread.start()
        self._pending_tasks: set[asyncio.Task[Any]] = set()
        self._lock = threading.Lock()
        self.is_closed = False

    def run(self, work: Coroutine[Any, Any, _Value]) -> _Value:
        ended = threading.Event()

        async def run_tracked() -> _Value:
            own = asyncio.current_task()
            assert own is not None
            self._pending_tasks.add(own)
            try:
                return await work
            finally:
                self._pending_tasks.discard(own)
                ended.set()

        with self._lock:
            if self.is_closed:
                work.close()
                raise UsageError("this Executor is closed")
            future = asyncio.run_coroutine_threadsafe(run_tracked(), self._loop)
        try:
            # With a timeout: the kernel may deliver SIGINT to another thread, which does not wake this one.
            while not future.done():
                concurrent.futures.wait([future], timeout=_SIGNAL_CHECK_INTERVAL_S)
            return future.result()
        except KeyboardInterrupt:
            future.cancel()
            ended.wait(_INTERRUPT_RUN_TIMEOUT_S + 1)
            raise
        except concurrent.futures.CancelledError:
            raise UsageError(
                "this Executor was closed while waiting for a command",
                hint="a started command continues; list it: grid-cli ps",
            ) from None

    def close(self) -> None:
        with self._lock:
            if self.is_closed or threading.current_thread() is self._thread:
                return
            self.is_closed = True
        closing = asyncio.run_coroutine_threadsafe(self._close_on_loop(), self._loop)
        try:
            closing.result(_CLOSE_LOOP_TIMEOUT_S)
        except (TimeoutError, GenieError):
            pass
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CLOSE_LOOP_TIMEOUT_S)
        if not self._thread.is_alive():
            self._loop.close()

    async def _close_on_loop(self) -> None:
        self.runner.stop_interrupting_cancelled_starts()
        waiting = list(self._pending_tasks)
        for task in waiting:
            task.cancel()
        if waiting:
            await asyncio.wait(waiting)
        await self.pool.__aexit__(None, None, None)
