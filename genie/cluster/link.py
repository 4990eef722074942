"""The connection to the controller, kept open: when it is lost it is made again, and calls wait for it.

A call that may be sent twice is sent again after a loss, within its own deadline; one that may not
fails and says so. Not for: what is said over it (client.py, heartbeats.py), or finding the cluster
(runtime/credentials.py).
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

from genie.errors import ConnectionLostError, DeadlineError, GenieError, NotLeaderError
from genie.model.messages import Message, Request, Welcome
from genie.runtime import rpc
from genie.runtime.credentials import Access, greet
from genie.runtime.network import Network

_log = logging.getLogger(__name__)
_Reply = TypeVar("_Reply", bound=Message)

BACKOFF_S_MIN = 0.1
BACKOFF_S_MAX = 5.0
_ELECTION_STEP_S = 0.1
_CONNECT_S_MAX = 10.0

OnChange = Callable[[bool, str], None]
"""Told that the connection was lost (False) or restored (True), with the reason."""


class Link:
    """One process's connection to its controller. Made by `open_link`; lives on one event loop."""

    def __init__(
        self,
        access: Access,
        *,
        network: Network,
        program: str,
        on_change: OnChange,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self.access = access
        self.reconnects = 0
        self.reopened = asyncio.Event()
        """Set at each reconnection; whoever waits for it clears it."""
        self._network = network
        self._program = program
        self._on_change = on_change
        self._chance = chance
        self._peer: rpc.Peer | None = None
        self._open = asyncio.Event()
        self._trouble: GenieError | None = None
        self._first: asyncio.Future[Welcome] = asyncio.get_running_loop().create_future()

    @property
    def where(self) -> str:
        return f"{self.access.host}:{self.access.port}"

    @property
    def is_open(self) -> bool:
        return self._peer is not None and not self._peer.is_closed

    async def wait_first(self) -> Welcome:
        """What the controller said to the first Hello, or why there was none."""
        return await asyncio.shield(self._first)

    async def call(self, request: Request[_Reply], *, timeout_s: float, again: bool = True) -> _Reply:
        """The controller's answer. `again` says that the request does no harm when it arrives twice."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while True:
            peer = await self._wait_peer(deadline)
            try:
                return await peer.call(request, timeout_s=max(deadline - loop.time(), 0.001))
            except ConnectionLostError as error:
                if not again:
                    raise ConnectionLostError(
                        f"the connection was lost while {self.where} had {type(request).__name__} in hand",
                        hint="it may or may not have been done; look before you try again",
                    ) from error
                if peer is self._peer:
                    self._open.clear()
            except NotLeaderError:
                # Right after a start or a failover nobody leads yet.
                if loop.time() + _ELECTION_STEP_S >= deadline:
                    raise
                await asyncio.sleep(_ELECTION_STEP_S)

    def drop(self) -> None:
        """Gives up a connection that no longer answers; a new one is made."""
        if self._peer is not None:
            self._peer.close()

    async def keep(self, *, first_timeout_s: float) -> None:
        """Connects, and again whenever the connection is lost. Ends with the first failure to connect at
        all, or when cancelled."""
        try:
            await self._hold(first_timeout_s)
        except GenieError as error:
            if not self._first.done():
                self._first.set_exception(error)
                self._first.exception()
                return
            self._trouble = error
        wait_s = BACKOFF_S_MIN
        while True:
            await asyncio.sleep(wait_s * (0.5 + self._chance() / 2))
            before = self.reconnects
            try:
                await self._hold(_CONNECT_S_MAX)
            except GenieError as error:
                _log.debug("no connection to %s: %s", self.where, error)
                self._trouble = error
            wait_s = BACKOFF_S_MIN if self.reconnects > before else min(wait_s * 2, BACKOFF_S_MAX)

    async def _hold(self, timeout_s: float) -> None:
        """One connection, from its greeting to its end."""
        async with greet(self._network, self.access, timeout_s=timeout_s, program=self._program) as found:
            self._peer, welcome = found
            self._begin(welcome)
            try:
                await self._peer.wait_closed()
            finally:
                self._open.clear()
        self._trouble = ConnectionLostError(f"the connection to {self.where} was lost")
        self._on_change(False, str(self._trouble))

    def _begin(self, welcome: Welcome) -> None:
        self._open.set()
        if not self._first.done():
            self._first.set_result(welcome)
            return
        self.reconnects += 1
        self.reopened.set()
        self._on_change(True, f"connected to {self.where} again")

    async def _wait_peer(self, deadline: float) -> rpc.Peer:
        try:
            async with asyncio.timeout_at(deadline):
                while not self.is_open:
                    self._open.clear()
                    await self._open.wait()
        except TimeoutError:
            if self._trouble is not None:
                raise self._trouble from None
            raise DeadlineError(f"no connection to {self.where} in time") from None
        assert self._peer is not None
        return self._peer


@asynccontextmanager
async def open_link(
    access: Access,
    *,
    network: Network,
    program: str,
    timeout_s: float,
    on_change: OnChange = lambda _connected, _reason: None,
) -> AsyncIterator[Link]:
    """A link whose first connection stands, kept for the length of the block."""
    link = Link(access, network=network, program=program, on_change=on_change)
    failure: BaseException | None = None
    async with asyncio.TaskGroup() as group:
        keeper = group.create_task(link.keep(first_timeout_s=timeout_s))
        try:
            await link.wait_first()
            yield link
        except (Exception, asyncio.CancelledError) as error:
            # Raised again below: inside the group it would come out wrapped in an ExceptionGroup.
            failure = error
        finally:
            keeper.cancel()
    if failure is not None:
        raise failure
