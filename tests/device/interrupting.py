"""For scripts of test_interrupts.py: interrupts the main thread once it waits for a silent executor."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable

from tests.waiting import wait_until

STILL_LOOKS = 20


def interrupted(
    work: Callable[[], object],
    *,
    silence: Callable[[], None],
    speech: Callable[[], None],
    progress: Callable[[], int] = lambda: 0,
) -> None:
    """Runs `work`, which must wait, between `silence()` and `speech()`; it must be interrupted.

    `progress` counts the work done before the wait.
    """
    silence()
    watcher = threading.Thread(target=signal_when_waiting, args=(signal.SIGINT, progress))
    watcher.start()
    try:
        work()
    except KeyboardInterrupt:
        pass
    else:
        raise AssertionError("it was not interrupted")
    finally:
        speech()
        watcher.join()


def signal_when_waiting(number: int, progress: Callable[[], int] = lambda: 0) -> None:
    """The main thread is waiting if it does not move while this thread repeatedly holds the GIL."""
    main = threading.main_thread().ident
    assert main is not None
    seen: list[tuple[int, int, int]] = []

    def still() -> bool:
        frame = sys._current_frames()[main]
        seen.append((id(frame), frame.f_lasti, progress()))
        return len(seen) > STILL_LOOKS and len(set(seen[-STILL_LOOKS:])) == 1

    wait_until(still, timeout_s=60, what="the main thread to wait")
    os.kill(os.getpid(), number)
