"""genie.init() and genie.shutdown(): the one session of this process.

    state = await genie.init(master_addr="gpu-box")
    ...
    await genie.shutdown()

A second init() with the same arguments gives the same state, one with others is an error. The session
ends at the latest when the interpreter does, and a forked child starts without one. Not for: what a
session consists of (session_run.py), and code without async (session.py).
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import dataclasses
import inspect
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, ParamSpec, TypeVar

from genie.cluster.events import Handler
from genie.cluster.session_run import SessionRun
from genie.cluster.state import ClusterState
from genie.config import ClusterConfig, Settings, cluster_arguments, load
from genie.errors import AlreadyInitializedError, DeadlineError, NotInitializedError, SessionError
from genie.model.node import GPUInfo, NodeInfo, NodeRole, NodeStatus

__all__ = [
    "ClusterConfig",
    "ClusterState",
    "GPUInfo",
    "NodeInfo",
    "NodeRole",
    "NodeStatus",
    "get_cluster_state",
    "init",
    "is_initialized",
    "shutdown",
]

_P = ParamSpec("_P")
_R = TypeVar("_R")

JOIN_S = 5.0


def documented(
    master_addr: str,
    master_port: int = 5555,
    backend: str = "auto",
    node_id: str | None = None,
    node_role: str = "client",
    timeout: float = 30.0,
    **kwargs: Any,  # Any: every other setting of ClusterConfig, each with its own type
) -> ClusterState:
    """Carries the signature that init(), connect() and session() show."""
    raise NotImplementedError


def signed_like(model: Callable[_P, object]) -> Callable[[Callable[..., _R]], Callable[_P, _R]]:
    """Shows the model's signature. The function itself takes anything, to know what was really given:
    an argument that is left out gives way to the environment and the settings file."""

    def sign(function: Callable[..., _R]) -> Callable[_P, _R]:
        function.__signature__ = inspect.signature(model)  # type: ignore[attr-defined]
        return function

    return sign


@signed_like(documented)
async def init(*args: Any, **kwargs: Any) -> ClusterState:
    """Connects this process to a cluster and gives it the device `remote_accelerator`.

    Settings come from the arguments, then GENIE_* variables, then the settings file, then defaults.
    Without master_addr the cluster that this machine hosts is taken. `**kwargs` are the other fields
    of ClusterConfig, and `progress`: called with each INIT_PHASE event as it happens, the one of a
    failure included. `timeout` seconds cover all five phases, and the end of an earlier session before
    them; past them it is a DeadlineError. Whatever goes wrong, nothing is left running.
    """
    began_s = time.monotonic()
    progress = kwargs.pop("progress", None)
    settings = load_settings(args, kwargs)
    while True:
        run, _ = claim(settings, began_s=began_s, progress=progress)
        if run.is_stopping:
            try:
                async with asyncio.timeout(left_s(settings, began_s)):
                    await _until(run.finished)
            except TimeoutError:
                raise still_ending(settings) from None
            continue
        try:
            return run.taken(await _until(run.ready))
        except BaseException:
            if run.leave():
                await _until(run.finished)
                run.join(timeout_s=JOIN_S)
            raise


async def shutdown() -> None:
    """Ends the session: what it holds is given back, its processes, thread and connections are gone.

    Harmless when there is none, and while another task does the same.
    """
    run = _place.run
    if run is None:
        return
    run.stop()
    await _until(run.finished)
    run.join(timeout_s=JOIN_S)


def is_initialized() -> bool:
    """Whether this process has a session that is ready to use."""
    run = _place.run
    return run is not None and run.is_ready


def get_cluster_state() -> ClusterState:
    """The state of the session; NotInitializedError when there is none."""
    run = _place.run
    if run is None or not run.is_ready:
        raise NotInitializedError(
            "this process has no session with a cluster", hint="call 'await genie.init(...)' first"
        )
    return run.state


# --- The one session: what session.py uses, too ----------------------------------------------


class _Place:
    """Where the session of this process is kept. Read without the lock, written with it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.run: SessionRun | None = None
        self.is_watched = False
        self.abandoned: list[SessionRun] = []


_place = _Place()


def load_settings(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Settings:
    """The settings for a call with these arguments."""
    given = inspect.signature(documented).bind_partial(*args, **kwargs).arguments
    others = given.pop("kwargs", {})
    return load(cluster_arguments({**given, **others}))


def left_s(settings: Settings, began_s: float) -> float:
    """Of the time that a call which began then has."""
    return max(began_s + settings.cluster.timeout - time.monotonic(), 0.0)


def still_ending(settings: Settings) -> DeadlineError:
    return DeadlineError(
        f"the session before this one has not ended within {settings.cluster.timeout:g} s",
        hint="wait for its jobs to end, or pass a larger timeout",
    )


def claim(settings: Settings, *, began_s: float, progress: Handler | None = None) -> tuple[SessionRun, bool]:
    """The session of this process, and whether it was started just now. It may be on its way out."""
    with _place.lock:
        run = _place.run
        if run is not None:
            if not run.is_stopping:
                _check_same(run.settings, settings)
                if progress is not None and not run.ready.done():
                    with contextlib.suppress(SessionError):  # it fails just now
                        run.follow(progress)
                run.join_waiters()
            return run, False
        _watch_exit()
        run = SessionRun(settings, began_s=began_s, on_end=_forget)
        if progress is not None:
            run.follow(progress)
        run.start()
        _place.run = run  # its end waits for the lock, so this comes first
        return run, True


def shutdown_blocking() -> None:
    """shutdown() for code without an event loop."""
    run = _place.run
    if run is not None:
        run.stop()
        run.finished.result()
        run.join(timeout_s=JOIN_S)


def _forget(run: SessionRun) -> None:
    with _place.lock:
        if _place.run is run:
            _place.run = None


async def _until(future: Future[_R]) -> _R:
    """Waits on the caller's loop for something of the session's; cancelling the wait does not touch it."""
    inner = asyncio.wrap_future(future)
    # Looked at even when nobody waits any more, or asyncio complains of an error that others have got.
    inner.add_done_callback(lambda done: done.cancelled() or done.exception())
    return await asyncio.shield(inner)


def _check_same(old: Settings, new: Settings) -> None:
    secret = {field.name for field in dataclasses.fields(ClusterConfig) if field.metadata["secret"]}
    before = dataclasses.asdict(old.cluster) | {"state_dir": old.paths.state_dir}
    after = dataclasses.asdict(new.cluster) | {"state_dir": new.paths.state_dir}
    different = [
        f"{name} is another" if name in secret else f"{name} is {after[name]!r} and was {before[name]!r}"
        for name in before
        if before[name] != after[name]
    ]
    if different:
        raise AlreadyInitializedError(
            f"this process has a session with other arguments: {', '.join(different)}",
            hint="use that one, or call 'await genie.shutdown()' first",
        )


def _watch_exit() -> None:
    """Ends the session before the interpreter takes its threads apart."""
    if _place.is_watched:
        return
    _place.is_watched = True
    # The plain atexit runs after thread pools have been closed for good, which a session in its last
    # moments may still want to use. This one is private to Python, so it may go away.
    register = getattr(threading, "_register_atexit", atexit.register)
    register(_at_exit)
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_after_fork)


def _at_exit() -> None:
    run = _place.run
    if run is not None:
        run.stop()
        run.join(timeout_s=run.close_s_max)


def _after_fork() -> None:
    """The child has a copy of the session's memory but not its thread: it must not touch it."""
    _place.lock = threading.Lock()
    if _place.run is not None:
        _place.abandoned.append(_place.run)  # kept, so that no destructor closes what the parent uses
        _place.run = None
