"""One session from its start to its end, on a thread of its own.

`ready` gets the state when all five phases are through, or the error when one failed and everything
that was opened before is closed again. Not for: what the phases do (phases.py), and there being only
one session (init.py).
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AsyncExitStack

from genie.cluster.events import EventBus, Handler
from genie.cluster.loop_thread import LoopThread
from genie.cluster.phases import Startup
from genie.cluster.state import ClusterState
from genie.config import Settings
from genie.errors import GenieError, SessionError
from genie.model.event import EventType

_log = logging.getLogger(__name__)

_CLOSE_S = 5.0
_CLOSE_HOSTING_S = 30.0
"""Beyond what the jobs of this machine are given to end."""


class SessionRun:
    """Everything here may be called from any thread."""

    def __init__(self, settings: Settings, *, began_s: float, on_end: Callable[[SessionRun], None]) -> None:
        self.settings = settings
        self.ready: Future[ClusterState] = Future()
        self.is_stopping = False
        self._began_s = began_s
        self._on_end = on_end
        self._thread = LoopThread(name="genie-session")
        self._events = EventBus()
        self._failure: BaseException | None = None
        self._stopping: asyncio.Event | None = None
        self._waiting = 1
        self._is_taken = False
        self._lock = threading.Lock()

    @property
    def finished(self) -> Future[None]:
        """Done when everything of the session is closed."""
        return self._thread.finished

    @property
    def is_ready(self) -> bool:
        return self.ready.done() and self.ready.exception() is None and not self.is_stopping

    @property
    def state(self) -> ClusterState:
        return self.ready.result(timeout=0)

    @property
    def close_s_max(self) -> float:
        """How long closing may take: a host has to wait for its jobs to end."""
        if self.settings.cluster.node_role == "client":
            return _CLOSE_S
        return _CLOSE_HOSTING_S + self.settings.agent.stop_grace_s

    def follow(self, progress: Handler) -> None:
        """Tells `progress` of the phases. UsageError when it cannot be called."""
        self._events.subscribe(EventType.INIT_PHASE, progress)

    def start(self) -> None:
        self.finished.add_done_callback(self._ended)
        self._thread.start(self._main)

    def stop(self) -> None:
        """Asks it to end, wherever it is. Returns at once."""
        self.is_stopping = True
        self._thread.call_soon(self._stop_now)

    def join(self, *, timeout_s: float) -> None:
        if not self._thread.join(timeout_s=timeout_s):
            _log.warning("the session did not end within %g s; it is left behind", timeout_s)

    # Several callers may wait for one start. When the last of them gives up, it is taken back.

    def join_waiters(self) -> None:
        with self._lock:
            self._waiting += 1

    def taken(self, state: ClusterState) -> ClusterState:
        self._is_taken = True
        return state

    def leave(self) -> bool:
        """A caller no longer waits. True when nobody has any use for the session: it is ending then."""
        with self._lock:
            self._waiting -= 1
            unwanted = self._waiting == 0 and not self._is_taken
        if unwanted or self.finished.done():
            self.stop()
            return True
        return False

    # --- on the session's own loop ------------------------------------------------------------

    async def _main(self) -> None:
        """The boundary of the session: an error that it ends with goes to whoever waits for it."""
        self._stopping = asyncio.Event()
        if self.is_stopping:
            return
        try:
            async with AsyncExitStack() as stack:
                startup = Startup(
                    self.settings, self._events, stack, submit=self._thread.submit, began_s=self._began_s
                )
                state = await startup.run()
                state.initialized = True
                stack.callback(_mark_ended, state)
                self.ready.set_result(state)
                await self._stopping.wait()
                self._events.publish(
                    EventType.SHUTDOWN, node_id=state.local_node.node_id, reason="the session ends"
                )
        except GenieError as error:
            self._failure = error
        except Exception as error:
            _log.exception("the session ended with an error that nobody expected")
            self._failure = error
        finally:
            self._events.close()

    def _stop_now(self) -> None:
        if self.ready.done() and self._stopping is not None:
            self._stopping.set()
        else:
            self._thread.cancel()

    def _ended(self, _finished: Future[None]) -> None:
        self.is_stopping = True
        self._on_end(self)
        if not self.ready.done():
            stopped = SessionError("the session was shut down while it started")
            self.ready.set_exception(self._failure or stopped)


def _mark_ended(state: ClusterState) -> None:
    state.initialized = False
    state.monitor_tasks = []
