"""The session without async: for scripts, and for notebooks, where an event loop already runs.

    with genie.session(master_addr="gpu-box") as state:
        ...

    state = genie.connect(master_addr="gpu-box")
    ...
    genie.disconnect()

Not for: anything that init.py does; this only waits for it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from genie.cluster import init
from genie.cluster.state import ClusterState


@init.signed_like(init.documented)
def connect(*args: Any, **kwargs: Any) -> ClusterState:
    """genie.init() that blocks. The session ends with disconnect() or with the interpreter."""
    state, _ = _connect(args, kwargs)
    return state


def disconnect() -> None:
    """genie.shutdown() that blocks: when it returns, what the session held is given back.

    Harmless when there is no session. It ends one that init() made, too.
    """
    init.shutdown_blocking()


@init.signed_like(init.documented)
@contextmanager
def session(*args: Any, **kwargs: Any) -> Iterator[ClusterState]:
    """A session for the length of the block. One that was there before with the same arguments stays."""
    state, started_here = _connect(args, kwargs)
    try:
        yield state
    finally:
        if started_here:
            init.shutdown_blocking()


def _connect(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[ClusterState, bool]:
    began_s = time.monotonic()
    progress = kwargs.pop("progress", None)
    settings = init.load_settings(args, kwargs)
    while True:
        run, started_here = init.claim(settings, began_s=began_s, progress=progress)
        if run.is_stopping:
            try:
                run.finished.result(init.left_s(settings, began_s))
            except TimeoutError:
                raise init.still_ending(settings) from None
            continue
        try:
            return run.taken(run.ready.result()), started_here
        except BaseException:  # a failure, or Ctrl-C while waiting
            if run.leave():
                run.finished.result()
                run.join(timeout_s=init.JOIN_S)
            raise
