"""For scripts of test_interrupts.py: interrupts the main thread once it waits for a silent executor."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable

from tests.waiting import wait_until

IDLE_CHECKS = 20


def run_interrupted(
    work: Callable[[], object],
    *,
    stop_executor: Callable[[], None] = lambda: None,
    resume_executor: Callable[[], None] = lambda: None,
    progress: Callable[[], int] = lambda: 0,
) -> None:
    """Runs `work`, which must wait and be interrupted, between `stop_executor` and `resume_executor`.

    `progress` counts the work done before the wait.
    """
    stop_executor()
    watcher = threading.Thread(target=signal_when_waiting, args=(signal.SIGINT, progress))
    watcher.start()
    try:
        work()
    except KeyboardInterrupt:
        pass
    else:
        raise AssertionError("it was not interrupted")
    finally:
        resume_executor()
        watcher.join()


def signal_when_waiting(number: int, progress: Callable[[], int] = lambda: 0) -> None:
    """The main thread is waiting if it does not move while this thread repeatedly holds the GIL."""
    main = threading.main_thread().ident
    assert main is not None
    seen: list[tuple[int, int, int]] = []

    def still() -> bool:
        frame = sys._current_frames()[main]
        seen.append((id(frame), frame.f_lasti, progress()))
        return len(seen) > IDLE_CHECKS and len(set(seen[-IDLE_CHECKS:])) == 1

    wait_until(still, timeout_s=60, what="the main thread to wait")
    os.kill(os.getpid(), number)
