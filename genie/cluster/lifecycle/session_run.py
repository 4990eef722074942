"""Runs one session, from start to end, on its own thread.

`ready` completes with the state after all five phases, or with the error of a failed phase after cleanup.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AsyncExitStack

from genie.cluster.events import EventBus, EventHandler
from genie.cluster.lifecycle.init_phases import SessionStartup
from genie.cluster.lifecycle.loop_thread import LoopThread
from genie.cluster.state import ClusterState
from genie.config import Settings
from genie.errors import GenieError, SessionError
from genie.model.event import EventType

_log = logging.getLogger(__name__)

_CLIENT_SESSION_END_TIMEOUT_S = 5.0
_HOST_SESSION_END_TIMEOUT_S = 30.0
"""In addition to the grace period of the jobs of this machine."""


class SessionRun:
    """Thread-safe."""

    def __init__(self, settings: Settings, *, began_s: float, on_end: Callable[[SessionRun], None]) -> None:
        self.settings = settings
        self.ready: Future[ClusterState] = Future()
        self.is_stopping = False
        self._began_s = began_s
        self._on_end = on_end
        self._loop_thread = LoopThread(name="genie-session")
        self._events = EventBus()
        self._failure: BaseException | None = None
        self._stop_event: asyncio.Event | None = None
        self._waiter_count = 1
        self._is_returned_to_caller = False
        self._lock = threading.Lock()

    @property
    def finished(self) -> Future[None]:
        """Done when the session has ended."""
        return self._loop_thread.finished

    @property
    def is_ready(self) -> bool:
        return self.ready.done() and self.ready.exception() is None and not self.is_stopping

    @property
    def state(self) -> ClusterState:
        return self.ready.result(timeout=0)

    @property
    def end_timeout_s(self) -> float:
        """Timeout for the end of the session; a host also waits for its jobs."""
        if self.settings.cluster.node_role == "client":
            return _CLIENT_SESSION_END_TIMEOUT_S
        return _HOST_SESSION_END_TIMEOUT_S + self.settings.agent.stop_grace_s

    def subscribe_progress(self, progress: EventHandler) -> None:
        """Calls `progress` with the events of the phases. Raises UsageError if it is not callable."""
        self._events.subscribe(EventType.INIT_PHASE, progress)

    def start(self) -> None:
        self.finished.add_done_callback(self._on_thread_finished)
        self._loop_thread.start(self._run_session)

    def stop(self) -> None:
        """Requests the end of the session in any state. Does not block."""
        self.is_stopping = True
        self._loop_thread.call_soon(self._stop_or_cancel_startup)

    def join(self, *, timeout_s: float) -> None:
        if not self._loop_thread.join(timeout_s=timeout_s):
            _log.warning("the session did not end within %g s; abandoning it", timeout_s)

    # Several callers may wait for one start. When the last of them is cancelled, the session ends.

    def add_waiter(self) -> None:
        with self._lock:
            self._waiter_count += 1

    def mark_returned_to_caller(self, state: ClusterState) -> ClusterState:
        self._is_returned_to_caller = True
        return state

    def remove_waiter_and_end_if_unused(self) -> bool:
        """Removes a caller that no longer waits. Ends the session and returns True if it was the last one."""
        with self._lock:
            self._waiter_count -= 1
            is_unused = self._waiter_count == 0 and not self._is_returned_to_caller
        if is_unused or self.finished.done():
            self.stop()
            return True
        return False

    # --- on the event loop of the session -----------------------------------------------------

    async def _run_session(self) -> None:
        """Runs the session; its error is set on `ready`."""
        self._stop_event = asyncio.Event()
        if self.is_stopping:
            return
        try:
            async with AsyncExitStack() as stack:
                startup = SessionStartup(
                    self.settings, self._events, stack, submit=self._loop_thread.submit, began_s=self._began_s
                )
                state = await startup.run()
                state.initialized = True
                stack.callback(_mark_state_ended, state)
                self.ready.set_result(state)
                await self._stop_event.wait()
                self._events.publish(
                    EventType.SHUTDOWN, node_id=state.local_node.node_id, reason="the session is ending"
                )
        except GenieError as error:
            self._failure = error
        except Exception as error:
            _log.exception("the session failed with an unexpected error")
            self._failure = error
        finally:
            self._events.close()

    def _stop_or_cancel_startup(self) -> None:
        if self.ready.done() and self._stop_event is not None:
            self._stop_event.set()
        else:
            self._loop_thread.cancel_main_task()

    def _on_thread_finished(self, _finished: Future[None]) -> None:
        self.is_stopping = True
        self._on_end(self)
        if not self.ready.done():
            shut_down = SessionError("the session was shut down while it was starting")
            self.ready.set_exception(self._failure or shut_down)


def _mark_state_ended(state: ClusterState) -> None:
    state.initialized = False
    state.monitor_tasks = []
