"""A connection to the controller that reconnects when it is lost; calls wait for the reconnection.

Within its timeout, an idempotent call is sent again after a reconnection and while the controller's store is
unavailable; other calls fail. A call that exceeds a limit on requests (OverloadedError) is sent again after
the time that the error states. Does not find the cluster (credentials.py).
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

from genie.errors import (
    ConnectionLostError,
    DeadlineError,
    GenieError,
    NotLeaderError,
    OverloadedError,
    StoreUnavailableError,
)
from genie.model.messages import Message, Request, Welcome
from genie.model.names import address_text
from genie.processes.tasks import unwrapped_task_group
from genie.runtime import rpc
from genie.runtime.control_plane import ControlDataIntegration
from genie.runtime.credentials import Access, connect_authenticated
from genie.runtime.network import Network

_log = logging.getLogger(__name__)
_Reply = TypeVar("_Reply", bound=Message)

BACKOFF_S_MIN = 0.1
BACKOFF_S_MAX = 2.0
"""Several attempts fit into the time after which the controller cancels the session of a client that was
disconnected."""
_ELECTION_RETRY_INTERVAL_S = 0.1
_STORE_RETRY_INTERVAL_S = 1.0
_CONNECT_TIMEOUT_S_MAX = 10.0

ConnectionChangeCallback = Callable[[bool, str], None]
"""Called when the connection was lost (False) or restored (True), with the reason."""


class ControllerConnection(ControlDataIntegration):
    """The connection of one process to its controller. Bound to one event loop."""

    def __init__(
        self,
        access: Access,
        *,
        network: Network,
        program: str,
        on_change: ConnectionChangeCallback,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self.access = access
        self.reconnects = 0
        self.reconnected_event = asyncio.Event()
        """Set at each reconnection; the waiter clears it."""
        self._network = network
        self._program = program
        self._on_change = on_change
        self._random = chance
        self._peer: rpc.Peer | None = None
        self._is_connected = asyncio.Event()
        self._last_error: GenieError | None = None
        self._first_welcome: asyncio.Future[Welcome] = asyncio.get_running_loop().create_future()

    @property
    def where(self) -> str:
        return address_text(self.access.host, self.access.port)

    @property
    def is_open(self) -> bool:
        return self._peer is not None and not self._peer.is_closed

    async def wait_for_first_connection(self) -> Welcome:
        """Returns the reply to the first Hello, or raises the error of the first attempt to connect."""
        return await asyncio.shield(self._first_welcome)

    async def call(self, request: Request[_Reply], *, timeout_s: float, idempotent: bool = True) -> _Reply:
        """Returns the reply of the controller. `idempotent`: the request may be sent twice."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while True:
            peer = await self._wait_for_peer(deadline)
            try:
                return await peer.call(request, timeout_s=max(deadline - loop.time(), 0.001))
            except ConnectionLostError as error:
                if not idempotent:
                    raise ConnectionLostError(
                        f"lost the connection to {self.where} before the reply to {type(request).__name__}",
                        hint="the request may have been executed; check before you retry",
                    ) from error
                if peer is self._peer:
                    self._is_connected.clear()
            except NotLeaderError:
                # Right after a start or a failover there is no leader yet.
                if loop.time() + _ELECTION_RETRY_INTERVAL_S >= deadline:
                    raise
                await asyncio.sleep(_ELECTION_RETRY_INTERVAL_S)
            except StoreUnavailableError:
                # A write may have been applied: only an idempotent call may be sent again.
                if not idempotent or loop.time() + _STORE_RETRY_INTERVAL_S >= deadline:
                    raise
                await asyncio.sleep(_STORE_RETRY_INTERVAL_S)
            except OverloadedError as error:
                wait_s = error.retry_after_s * (1 + self._random() / 2)
                if loop.time() + wait_s >= deadline:
                    raise
                await asyncio.sleep(wait_s)

    def disconnect(self) -> None:
        """Closes a connection that does not respond; run() opens a new one."""
        if self._peer is not None:
            self._peer.close()

    async def run(self, *, first_timeout_s: float) -> None:
        """Connects, and reconnects with backoff until cancelled. Returns if the first attempt fails."""
        try:
            await self._run_connection(first_timeout_s)
        except GenieError as error:
            if not self._first_welcome.done():
                self._first_welcome.set_exception(error)
                self._first_welcome.exception()
                return
            self._last_error = error
        wait_s = BACKOFF_S_MIN
        while True:
            await asyncio.sleep(wait_s * (0.5 + self._random() / 2))
            before = self.reconnects
            try:
                await self._run_connection(_CONNECT_TIMEOUT_S_MAX)
            except GenieError as error:
                _log.debug("could not connect to %s: %s", self.where, error)
                self._last_error = error
            wait_s = BACKOFF_S_MIN if self.reconnects > before else min(wait_s * 2, BACKOFF_S_MAX)

    async def _run_connection(self, timeout_s: float) -> None:
        """Opens one connection and waits until it is closed."""
        async with connect_authenticated(
            self._network, self.access, timeout_s=timeout_s, program=self._program
        ) as found:
            self._peer, welcome = found
            self._on_connected(welcome)
            try:
                await self._peer.wait_closed()
            finally:
                self._is_connected.clear()
        self._last_error = ConnectionLostError(f"the connection to {self.where} was lost")
        self._on_change(False, str(self._last_error))

    def _on_connected(self, welcome: Welcome) -> None:
        self._is_connected.set()
        if not self._first_welcome.done():
            self._first_welcome.set_result(welcome)
            return
        self.reconnects += 1
        self.reconnected_event.set()
        self._on_change(True, f"reconnected to {self.where}")

    async def _wait_for_peer(self, deadline: float) -> rpc.Peer:
        try:
            async with asyncio.timeout_at(deadline):
                while not self.is_open:
                    self._is_connected.clear()
                    await self._is_connected.wait()
        except TimeoutError:
            if self._last_error is not None:
                raise self._last_error from None
            raise DeadlineError(f"timed out waiting for a connection to {self.where}") from None
        assert self._peer is not None
        return self._peer


@asynccontextmanager
async def open_controller_connection(
    access: Access,
    *,
    network: Network,
    program: str,
    timeout_s: float,
    on_change: ConnectionChangeCallback = lambda _connected, _reason: None,
) -> AsyncIterator[ControllerConnection]:
    """A context with an open connection, which reconnects until the context ends."""
    connection = ControllerConnection(access, network=network, program=program, on_change=on_change)
    async with unwrapped_task_group() as group:
        task = group.create_task(connection.run(first_timeout_s=timeout_s))
        try:
            await connection.wait_for_first_connection()
            yield connection
        finally:
            task.cancel()
