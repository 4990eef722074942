"""Synchronous sessions, for scripts and for notebooks, where an event loop is already running.

    with genie.session(master_addr="gpu-box") as state:
        ...

    state = genie.connect(master_addr="gpu-box")
    ...
    genie.disconnect()

These functions block until init.py has started or ended the session.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from genie.cluster import init
from genie.cluster.state import ClusterState


@init.with_signature_of(init.init_signature)
def connect(*args: Any, **kwargs: Any) -> ClusterState:
    """Blocking variant of genie.init(). The session ends with disconnect() or at interpreter exit."""
    state, _ = _connect_and_is_new_session(args, kwargs)
    return state


def disconnect() -> None:
    """Blocking variant of genie.shutdown(): ends the session and releases its executors.

    Does nothing without a session. Also ends a session of init().
    """
    init.shutdown_blocking()


@init.with_signature_of(init.init_signature)
@contextmanager
def session(*args: Any, **kwargs: Any) -> Iterator[ClusterState]:
    """Opens a session for the block. An existing session with the same arguments is used and not ended."""
    state, started_here = _connect_and_is_new_session(args, kwargs)
    try:
        yield state
    finally:
        if started_here:
            init.shutdown_blocking()


def _connect_and_is_new_session(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[ClusterState, bool]:
    began_s = time.monotonic()
    progress = kwargs.pop("progress", None)
    settings = init.load_settings_from_init_arguments(args, kwargs)
    while True:
        run, started_here = init.get_or_start_session_and_is_new(settings, began_s=began_s, progress=progress)
        if run.is_stopping:
            try:
                run.finished.result(init.remaining_init_timeout_s(settings, began_s))
            except TimeoutError:
                raise init.previous_session_timeout_error(settings) from None
            continue
        try:
            return run.mark_returned_to_caller(run.ready.result()), started_here
        except BaseException:  # a failure, or Ctrl-C while waiting
            if run.remove_waiter_and_end_if_unused():
                run.finished.result()
                run.join(timeout_s=init.SESSION_THREAD_JOIN_TIMEOUT_S)
            raise
