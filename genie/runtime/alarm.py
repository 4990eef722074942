"""An alarm for calls that may never return: rings in the thread that made the call.

Only in a process's first thread, which is the one that Python runs signal handlers in; elsewhere it never
rings. It interrupts Python code and waits of the system; not a library that computes without looking up.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType


class Alarm:
    """A context: when it lasts longer than `limit_s`, `error` is raised in the middle of it. Not nested."""

    def __init__(self, limit_s: float, error: type[BaseException]) -> None:
        self._limit_s = limit_s
        self._error = error
        self._is_armed = False
        self._works = threading.current_thread() is threading.main_thread()
        if self._works:
            signal.signal(signal.SIGALRM, self._ring)

    def __enter__(self) -> None:
        if self._works and threading.current_thread() is threading.main_thread():
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

    def _ring(self, number: int, frame: FrameType | None) -> None:
        if self._is_armed:  # it may have rung while the context was being left
            self._is_armed = False
            raise self._error
