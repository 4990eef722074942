"""A timeout for calls that may never return, raised in the calling thread by SIGALRM.

Works only in the main thread, where Python runs signal handlers; elsewhere it has no effect. It interrupts
Python code and blocking system calls, but not native code that does not return to the interpreter.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType


class SignalTimeout:
    """A context manager that raises `error` inside its block after `limit_s` seconds. Not reentrant."""

    def __init__(self, limit_s: float, error: type[BaseException]) -> None:
        self._limit_s = limit_s
        self._error = error
        self._is_armed = False
        self._is_main_thread = threading.current_thread() is threading.main_thread()
        if self._is_main_thread:
            signal.signal(signal.SIGALRM, self._raise_error)

    def __enter__(self) -> None:
        if self._is_main_thread and threading.current_thread() is threading.main_thread():
            self._is_armed = True
            signal.setitimer(signal.ITIMER_REAL, self._limit_s)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._is_armed:
            self._is_armed = False
            signal.setitimer(signal.ITIMER_REAL, 0.0)

    def _raise_error(self, number: int, frame: FrameType | None) -> None:
        if self._is_armed:  # the signal may arrive while the block is exiting
            self._is_armed = False
            raise self._error
