"""Runs for Python programs that do not use asyncio: `Executor().run_distributed("python train.py")`.

Not for: the command line, which shows output while it comes (cli/grid_run_commands.py).
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
import weakref
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from genie.config import load
from genie.errors import GenieError, RunLostError, UsageError
from genie.grid.grid_file import GridFile, read_grid_file
from genie.grid.launch import Launch, Launcher, counted
from genie.grid.run import Collected
from genie.grid.runner import Runner
from genie.grid.ssh_pool import SshPool

OUTPUT_BYTES_MAX = 16 << 20
_INTERRUPT_S = 5.0
_CLOSE_S = 10.0
_Value = TypeVar("_Value")


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """How a command ended. Output beyond 16 MiB of a stream is left out; `grid-cli logs` has all of it."""

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
        """The output; of a command that failed also what it said about it."""
        if self.ok:
            return self.stdout.removesuffix("\n")
        told = f"exit code {self.exit_code} on {self.node} (run {self.run_id})"
        return "\n".join(part for part in (self.stdout.rstrip("\n"), self.stderr.rstrip("\n"), told) if part)


class Executor:
    """Runs commands on the nodes of a grid and waits for them. Connections stay open for the next one.

    `config` is the grid's file, else what the settings say. May be used by several threads, and as a
    context; without that, connections are closed when the program ends.
    """

    def __init__(self, config: str | Path | None = None) -> None:
        settings = load({"grid.file": None if config is None else str(config)})
        self._file: GridFile = read_grid_file(settings.grid.file)
        self._ssh_config = settings.grid.ssh_config
        self._state_dir = settings.paths.state_dir
        self._lock = threading.Lock()
        self._session: _Session | None = None

    def run_distributed(
        self,
        command: str,
        *,
        node: str | None = None,
        gpus: int = 0,
        sync: str | Path | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        labels: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> RunResult:
        """Runs a line of shell on the best node, or on `node`, after `sync` was sent there.

        A command that fails is a result with its exit code; an error is raised where there is none.
        Ctrl-C interrupts the command, too.
        """
        launch = Launch(
            command=command,
            env=env or {},
            cwd=cwd,
            gpus=gpus,
            labels=labels or {},
            timeout_s=timeout_s,
            sync=None if sync is None else Path(sync),
        )
        session = self._open()
        return session.run(self._run(session, launch, node))

    def close(self) -> None:
        """Closes the connections. Runs go on; who waits for one in another thread gets a UsageError."""
        with self._lock:
            session, self._session = self._session, None
        if session is not None:
            session.close()

    def __enter__(self) -> Executor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open(self) -> _Session:
        with self._lock:
            if self._session is None:
                self._session = _Session(self._file, self._ssh_config, state_dir=self._state_dir)
                weakref.finalize(self, self._session.close)
            return self._session

    async def _run(self, session: _Session, launch: Launch, node: str | None) -> RunResult:
        runner, launcher = session.runner, session.launcher
        kept = Collected(bytes_max=OUTPUT_BYTES_MAX)
        with counted(self._state_dir) as ended:
            run = await (launcher.on_best(launch) if node is None else launcher.on(node, launch))
            try:
                code = await runner.wait(run, kept)
            except asyncio.CancelledError:
                if session.is_closed:
                    raise
                ended("cancelled")
                with contextlib.suppress(GenieError, TimeoutError):
                    async with asyncio.timeout(_INTERRUPT_S):
                        await runner.signal(run, "INT")
                raise
            except RunLostError:
                ended("lost")
                raise
            ended("failed" if code else "succeeded")
        return RunResult(
            exit_code=code,
            stdout=kept.text("out"),
            stderr=kept.text("err"),
            node=run.node,
            run_id=run.run_id,
            truncated=kept.truncated,
        )


class _Session:
    """A loop in a thread of its own, with the pool that lives on it."""

    def __init__(self, file: GridFile, ssh_config: Path, *, state_dir: Path) -> None:
        self.pool = SshPool(file, ssh_config=ssh_config)
        self.runner = Runner(self.pool, file)
        self.launcher = Launcher(self.pool, file, self.runner, state_dir=state_dir)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="genie-grid", daemon=True)
        self._thread.start()
        self._waiting: set[asyncio.Task[Any]] = set()
        self._lock = threading.Lock()
        self.is_closed = False

    def run(self, work: Coroutine[Any, Any, _Value]) -> _Value:
        over = threading.Event()

        async def watched() -> _Value:
            own = asyncio.current_task()
            assert own is not None
            self._waiting.add(own)
            try:
                return await work
            finally:
                self._waiting.discard(own)
                over.set()

        with self._lock:
            if self.is_closed:
                work.close()
                raise UsageError("this Executor is closed")
            future = asyncio.run_coroutine_threadsafe(watched(), self._loop)
        try:
            return future.result()
        except KeyboardInterrupt:
            future.cancel()
            over.wait(_INTERRUPT_S + 1)
            raise
        except concurrent.futures.CancelledError:
            raise UsageError(
                "this Executor was closed while it waited for a command",
                hint="the command goes on if it had begun; 'grid-cli ps' shows it",
            ) from None

    def close(self) -> None:
        with self._lock:
            if self.is_closed or threading.current_thread() is self._thread:
                return
            self.is_closed = True
        closing = asyncio.run_coroutine_threadsafe(self._close(), self._loop)
        try:
            closing.result(_CLOSE_S)
        except (TimeoutError, GenieError):
            pass
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CLOSE_S)
        if not self._thread.is_alive():
            self._loop.close()

    async def _close(self) -> None:
        self.runner.is_closing = True
        waiting = list(self._waiting)
        for task in waiting:
            task.cancel()
        if waiting:
            await asyncio.wait(waiting)
        await self.pool.__aexit__(None, None, None)
