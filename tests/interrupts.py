"""Interrupting a test run: Ctrl-C, SIGTERM and SIGHUP tear fixtures down and end all its processes.

The plugin InterruptHandler handles SIGTERM and SIGHUP like Ctrl-C: fixtures are torn down, and the exit code
is 128 plus the signal number. A second signal ends the run at once and kills all its processes. With workers,
the main process forwards the signal; if the main process is killed, the workers kill all processes of the
run.

If the run was started with SIGINT ignored (`nohup make test &` in a script), the handler is reset, because
child processes would inherit it and ignore Ctrl-C.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
import pytest

from tests.leaks import kill_processes, processes_of_run

# A signal may arrive twice: sent to the process group by a terminal or `timeout`, and forwarded by make.
_SAME_SIGNAL_S = 1.0


class InterruptHandler:
    """The pytest hooks. `run_folder` returns the folder of all files of the run."""

    def __init__(self, config: pytest.Config, run_folder: Callable[[], Path | None]) -> None:
        self._is_worker = hasattr(config, "workerinput")
        self._run_folder = run_folder
        self._pid = os.getpid()
        self._signal = 0
        self._signal_at = 0.0
        self._unwinding_since = 0.0
        self._workers: list[Any] = []  # Any: xdist has no public type for it
        self._install_signal_handlers()
        if self._is_worker and hasattr(os, "pidfd_open"):
            folder = Path(config.workerinput["state_folder"]).parents[1]  # type: ignore[attr-defined]
            _kill_run_if_parent_dies(folder)

    def _install_signal_handlers(self) -> None:
        """Called before each test: an event loop resets a signal that it handled to the default."""
        if threading.current_thread() is not threading.main_thread():
            return  # pytest is embedded in another program, which handles signals
        if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if signal.getsignal(signal.SIGTERM) in (signal.SIG_DFL, signal.SIG_IGN):
            signal.signal(signal.SIGTERM, self._on_signal)
        if signal.getsignal(signal.SIGHUP) == signal.SIG_DFL:
            signal.signal(signal.SIGHUP, self._on_signal)
        elif signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
            signal.signal(signal.SIGHUP, _ignore_signal)  # for nohup; child processes get the default
        if signal.getsignal(signal.SIGQUIT) == signal.SIG_IGN:
            signal.signal(signal.SIGQUIT, signal.SIG_DFL)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self) -> None:
        self._install_signal_handlers()
        if self._signal and not self._unwinding_since:
            raise KeyboardInterrupt  # the previous test handled the signal itself

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        self._workers.append(node)

    def pytest_keyboard_interrupt(self) -> None:
        """Called before fixtures are torn down."""
        self._unwinding_since = time.monotonic()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._on_second_signal)
        for pid in self._worker_pids():
            os.kill(pid, signal.SIGINT)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._signal:
            session.exitstatus = 128 + self._signal

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        if os.getpid() != self._pid:  # forked by a test
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        if self._signal and time.monotonic() - self._signal_at < _SAME_SIGNAL_S:
            return
        self._signal, self._signal_at = self._signal or number, time.monotonic()
        signal.raise_signal(signal.SIGINT)  # cancels the task of a running event loop

    def _on_second_signal(self, number: int, _: FrameType | None) -> None:
        if self._is_worker or time.monotonic() - self._unwinding_since < _SAME_SIGNAL_S:
            return
        for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(each, signal.SIG_IGN)  # another signal would restart this
        os.write(2, b"\nsecond signal: killing all processes of the tests\n")
        kill_processes_of_run(self._run_folder())
        os._exit(128 + number)

    def _worker_pids(self) -> list[int]:
        processes = [getattr(node.gateway._io, "popen", None) for node in self._workers]
        return [process.pid for process in processes if process is not None and process.poll() is None]


def kill_processes_of_run(run_folder: Path | None) -> None:
    """Kills all descendants and the detached processes of the run."""
    pids = {child.pid for child in psutil.Process().children(recursive=True)}
    if run_folder is not None:
        pids |= processes_of_run(run_folder).keys()
    kill_processes(frozenset(pids))


def _kill_run_if_parent_dies(run_folder: Path) -> None:
    """Kills the processes of the run if the parent is killed: xdist would not tear fixtures down."""
    parent = os.pidfd_open(os.getppid())

    def wait_for_parent_and_kill_run() -> None:
        waiting = select.poll()
        waiting.register(parent, select.POLLIN)
        waiting.poll()
        kill_processes_of_run(run_folder)
        os._exit(128 + signal.SIGKILL)

    threading.Thread(target=wait_for_parent_and_kill_run, name="watch-parent", daemon=True).start()


def _ignore_signal(_: int, __: FrameType | None) -> None:
    pass
