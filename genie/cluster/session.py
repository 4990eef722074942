"""The session without async: for scripts, and for notebooks, where an event loop already runs.

    with genie.session(master_addr="gpu-box") as state:
        ...

Not for: anything that init.py does; this only waits for it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from genie.cluster import init
from genie.cluster.state import ClusterState
from genie.config import Settings


@init.signed_like(init.documented)
def connect(*args: Any, **kwargs: Any) -> ClusterState:
    """genie.init() that blocks. The session ends with genie.shutdown() or with the interpreter."""
    state, _ = _connect(init.load_settings(args, kwargs))
    return state


@init.signed_like(init.documented)
@contextmanager
def session(*args: Any, **kwargs: Any) -> Iterator[ClusterState]:
    """A session for the length of the block. One that was there before with the same arguments stays."""
    state, started_here = _connect(init.load_settings(args, kwargs))
    try:
        yield state
    finally:
        if started_here:
            init.shutdown_blocking()


def _connect(settings: Settings) -> tuple[ClusterState, bool]:
    began_s = time.monotonic()
    while True:
        run, started_here = init.claim(settings, began_s=began_s)
        if run.is_stopping:
            run.finished.result()
            continue
        try:
            return run.taken(run.ready.result()), started_here
        except BaseException:  # a failure, or Ctrl-C while waiting
            if run.leave():
                run.finished.result()
                run.join(timeout_s=init.JOIN_S)
            raise
