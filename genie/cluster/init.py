"""genie.init() and genie.shutdown(): the one session of this process.

    state = await genie.init(master_addr="gpu-box")
    ...
    await genie.shutdown()

A second init() with the same arguments returns the same state; with other arguments it is an error. The
session ends at the latest at interpreter exit, and a forked child starts without one. session.py has the
synchronous variants.
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

from genie.cluster.events import EventHandler
from genie.cluster.lifecycle.session_run import SessionRun
from genie.cluster.state import ClusterState
from genie.config import ClusterConfig, Settings, cluster_settings_from_arguments, load
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

SESSION_THREAD_JOIN_TIMEOUT_S = 5.0


def init_signature(
    master_addr: str | None = None,
    master_port: int = 5555,
    backend: str = "auto",
    node_id: str | None = None,
    node_role: str = "client",
    timeout: float = 30.0,
    **kwargs: Any,  # Any: every other setting of ClusterConfig, each with its own type
) -> ClusterState:
    """Defines the signature of init(), connect() and session()."""
    raise NotImplementedError


def with_signature_of(model: Callable[_P, object]) -> Callable[[Callable[..., _R]], Callable[_P, _R]]:
    """Gives a function the signature of `model`. The function itself accepts anything, to tell which
    arguments were passed: the others come from the environment and the settings file."""

    def set_signature(function: Callable[..., _R]) -> Callable[_P, _R]:
        function.__signature__ = inspect.signature(model)  # type: ignore[attr-defined]
        return function

    return set_signature


@with_signature_of(init_signature)
async def init(*args: Any, **kwargs: Any) -> ClusterState:
    """Connects this process to a cluster and gives it the device `remote_accelerator`.

    Settings come from the arguments, then GENIE_* variables, then the settings file, then defaults. Without
    master_addr it connects to the cluster of this machine, or else to that of the last `genie login`.
    Without a token it uses that of `genie login`, or else the owner token of the cluster of this machine.
    `**kwargs` are the other fields of ClusterConfig, and `progress`, which is called with each INIT_PHASE
    event, including that of a failure. `timeout` covers all five phases and the end of an earlier session;
    then DeadlineError is raised. After an error nothing is left running.
    """
    began_s = time.monotonic()
    progress = kwargs.pop("progress", None)
    settings = load_settings_from_init_arguments(args, kwargs)
    while True:
        run, _ = get_or_start_session_and_is_new(settings, began_s=began_s, progress=progress)
        if run.is_stopping:
            try:
                async with asyncio.timeout(remaining_init_timeout_s(settings, began_s)):
                    await _wait_for_future(run.finished)
            except TimeoutError:
                raise previous_session_timeout_error(settings) from None
            continue
        try:
            return run.mark_returned_to_caller(await _wait_for_future(run.ready))
        except BaseException:
            if run.remove_waiter_and_end_if_unused():
                await _wait_for_future(run.finished)
                run.join(timeout_s=SESSION_THREAD_JOIN_TIMEOUT_S)
            raise


async def shutdown() -> None:
    """Ends the session: releases its executors and ends its processes, thread and connections.

    Does nothing without a session. May be called concurrently.
    """
    run = _current_session.session_run
    if run is None:
        return
    run.stop()
    await _wait_for_future(run.finished)
    run.join(timeout_s=SESSION_THREAD_JOIN_TIMEOUT_S)


def is_initialized() -> bool:
    """Whether this process has a session that is ready to use."""
    run = _current_session.session_run
    return run is not None and run.is_ready


def get_cluster_state() -> ClusterState:
    """Returns the state of the session. Raises NotInitializedError without one."""
    run = _current_session.session_run
    if run is None or not run.is_ready:
        raise NotInitializedError(
            "this process has no session", hint="call 'await genie.init(...)' or 'genie.connect(...)' first"
        )
    return run.state


# --- The current session: also used by session.py ---------------------------------------------


class _CurrentSession:
    """The session of this process. Read without the lock, written with it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.session_run: SessionRun | None = None
        self.has_exit_and_fork_hooks = False
        self.runs_of_parent_process: list[SessionRun] = []


_current_session = _CurrentSession()


def load_settings_from_init_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Settings:
    """Loads the settings for a call with these arguments."""
    given = inspect.signature(init_signature).bind_partial(*args, **kwargs).arguments
    others = given.pop("kwargs", {})
    return load(cluster_settings_from_arguments({**given, **others}))


def remaining_init_timeout_s(settings: Settings, began_s: float) -> float:
    """Remaining time of a call that began at `began_s` (monotonic)."""
    return max(began_s + settings.cluster.timeout - time.monotonic(), 0.0)


def previous_session_timeout_error(settings: Settings) -> DeadlineError:
    return DeadlineError(
        f"the previous session did not end within {settings.cluster.timeout:g} s",
        hint="wait until its jobs have ended, or pass a larger timeout",
    )


def get_or_start_session_and_is_new(
    settings: Settings, *, began_s: float, progress: EventHandler | None = None
) -> tuple[SessionRun, bool]:
    """Returns the session of this process, which may be ending, and whether this call started it."""
    with _current_session.lock:
        run = _current_session.session_run
        if run is not None:
            if not run.is_stopping:
                _check_same_settings(run.settings, settings)
                if progress is not None and not run.ready.done():
                    with contextlib.suppress(SessionError):  # it has just failed
                        run.subscribe_progress(progress)
                run.add_waiter()
            return run, False
        _register_exit_and_fork_hooks()
        run = SessionRun(settings, began_s=began_s, on_end=_clear_current_session)
        if progress is not None:
            run.subscribe_progress(progress)
        run.start()
        _current_session.session_run = run  # _clear_current_session() waits for the lock, so this comes first
        return run, True


def shutdown_blocking() -> None:
    """shutdown() for code without an event loop."""
    run = _current_session.session_run
    if run is not None:
        run.stop()
        run.finished.result()
        run.join(timeout_s=SESSION_THREAD_JOIN_TIMEOUT_S)


def _clear_current_session(run: SessionRun) -> None:
    with _current_session.lock:
        if _current_session.session_run is run:
            _current_session.session_run = None


async def _wait_for_future(future: Future[_R]) -> _R:
    """Waits for the future on the caller's loop; cancelling the wait does not cancel the future."""
    inner = asyncio.wrap_future(future)
    # Retrieves the exception even if the wait was cancelled, so that asyncio does not warn about it.
    inner.add_done_callback(lambda done: done.cancelled() or done.exception())
    return await asyncio.shield(inner)


def _check_same_settings(old: Settings, new: Settings) -> None:
    secret = {field.name for field in dataclasses.fields(ClusterConfig) if field.metadata["secret"]}
    before = dataclasses.asdict(old.cluster) | {"state_dir": old.paths.state_dir}
    after = dataclasses.asdict(new.cluster) | {"state_dir": new.paths.state_dir}
    different = [
        f"{name} differs" if name in secret else f"{name} is {after[name]!r}, was {before[name]!r}"
        for name in before
        if before[name] != after[name]
    ]
    if different:
        raise AlreadyInitializedError(
            f"this process has a session with other arguments: {', '.join(different)}",
            hint="use that session, or call 'await genie.shutdown()' first",
        )


def _register_exit_and_fork_hooks() -> None:
    """Registers a hook that ends the session before the interpreter shuts down its threads."""
    if _current_session.has_exit_and_fork_hooks:
        return
    _current_session.has_exit_and_fork_hooks = True
    # atexit runs after thread pools are closed, which an ending session may still use. The other function is
    # private to Python and may be removed.
    register = getattr(threading, "_register_atexit", atexit.register)
    register(_end_session_at_exit)
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_abandon_session_after_fork)


def _end_session_at_exit() -> None:
    run = _current_session.session_run
    if run is not None:
        run.stop()
        run.join(timeout_s=run.end_timeout_s)


def _abandon_session_after_fork() -> None:
    """The child has a copy of the session but not its thread: it must not use it."""
    _current_session.lock = threading.Lock()
    if _current_session.session_run is not None:
        _current_session.runs_of_parent_process.append(
            _current_session.session_run
        )  # referenced, so that no destructor closes the parent's connections
        _current_session.session_run = None
