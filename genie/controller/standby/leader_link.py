"""The connection of a standby to the leader, over which requests of clients are forwarded.

Opened at the first request and closed when another controller leads or no request was forwarded for a while,
or when the leader does not reply to a ping. An overdue reply alone does not close it, because other requests
share it. When another controller leads, an attempt to connect to the previous one ends at once.
Both sides authenticate by the certificates of controllers, so without TLS there is no connection.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable

from genie.controller.change_notifier import ChangeNotifier, wait_event
from genie.errors import DeadlineError, GenieError, NotLeaderError
from genie.model.messages import Ping
from genie.model.messages.handshake import ServerHello
from genie.model.names import parse_endpoint
from genie.processes.clock import Clock
from genie.processes.tasks import Offload
from genie.runtime import rpc
from genie.runtime.network import ClientTls, Network
from genie.version import __version__

_log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 1.5
"""How long a request waits for the connection."""
PING_TIMEOUT_S = 2.0
_BACKOFF_S_MIN = 0.2
_BACKOFF_S_MAX = 2.0
_IDLE_TIMEOUT_S = 60.0
_CONNECTION_KEY = "connection"


class LeaderLink:
    """`client_tls` blocks; None when TLS is off."""

    def __init__(
        self,
        *,
        name: str,
        network: Network,
        clock: Clock,
        offload: Offload,
        client_tls: Callable[[], ClientTls] | None,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self._controller_name = name
        self._network = network
        self._clock = clock
        self._offload = offload
        self._make_client_tls = client_tls
        self._jitter_rng = chance
        self._notifier = ChangeNotifier(clock)
        self._leader_address = ""
        self._peer: rpc.Peer | None = None
        self._connect_error: GenieError | None = None
        """Why the last attempt to connect failed."""
        self._last_used_s = 0.0
        self._connection_task: asyncio.Task[None] | None = None
        self._wake_event = asyncio.Event()
        self._attention_event = asyncio.Event()
        """Set when the connection must be checked: it is closed, or a reply is overdue."""

    @property
    def leader_address(self) -> str:
        """HOST:PORT of the leader; empty if none is known."""
        return self._leader_address

    @property
    def is_enabled(self) -> bool:
        return self._make_client_tls is not None

    def set_leader(self, address: str) -> None:
        """Forward to this controller from now on; empty if none leads, or this one. Requests in flight to
        another one fail."""
        if address == self._leader_address:
            return
        self._leader_address, self._connect_error = address, None
        if self._peer is not None:
            self._peer.close()
        if self._connection_task is not None:
            self._connection_task.cancel()  # it may wait for the previous leader
        self._wake_event.set()
        self._notifier.notify_all()

    def request_ping(self, peer: rpc.Peer) -> None:
        """Check whether the leader still responds on this connection; close it otherwise. Does not wait."""
        if peer is self._peer:
            self._attention_event.set()

    async def get_connection(self) -> rpc.Peer:
        """Return a connection to the leader, waiting up to CONNECT_TIMEOUT_S for it. Raise NotLeaderError if
        there is none, or if the last attempt to connect has failed."""
        self._last_used_s = self._clock.monotonic_s()
        self._wake_event.set()

        def is_pending() -> bool:
            return self.open_connection is None and self._connect_error is None and bool(self._leader_address)

        if self.is_enabled and is_pending():
            await self._notifier.wait_while(_CONNECTION_KEY, is_pending, timeout_s=CONNECT_TIMEOUT_S)
        peer = self.open_connection
        if peer is None:
            raise self._no_connection_error()
        return peer

    @property
    def open_connection(self) -> rpc.Peer | None:
        return self._peer if self._peer is not None and not self._peer.is_closed else None

    def _no_connection_error(self) -> NotLeaderError:
        if self.is_enabled and self._leader_address:
            why = self._connect_error.message if self._connect_error else "it does not respond"
            message = f"this controller does not lead, and cannot forward the request to the leader: {why}"
        else:
            message = "this controller does not lead"
        return NotLeaderError.naming_leader(message, leader=self._leader_address)

    async def run(self) -> None:
        """Keep a connection open while it is used, until cancelled."""
        if not self.is_enabled:
            return
        async with asyncio.TaskGroup() as group:
            while True:
                self._wake_event.clear()
                if self._is_wanted():
                    connect = self._connect_repeatedly(self._leader_address)
                    self._connection_task = group.create_task(connect, name="connection to the leader")
                    await asyncio.wait([self._connection_task])
                    self._connection_task = None
                else:
                    await self._wake_event.wait()

    async def _connect_repeatedly(self, address: str) -> None:
        """Connect to this leader, with backoff, until another one leads or the connection is not used for a
        while."""
        backoff_s = _BACKOFF_S_MIN
        while True:
            try:
                await self._run_connection(address)
                backoff_s = _BACKOFF_S_MIN
            except GenieError as error:
                self._record_failure(error, address)
            except Exception as error:  # a task boundary: forwarding must not end the controller
                _log.exception("the connection to the leader failed")
                self._record_failure(GenieError(f"internal error: {type(error).__name__}"), address)
            if address != self._leader_address or not self._is_wanted():
                return
            await self._clock.sleep(backoff_s * (0.5 + self._jitter_rng() / 2))
            backoff_s = min(2 * backoff_s, _BACKOFF_S_MAX)

    def _is_wanted(self) -> bool:
        is_idle = self._clock.monotonic_s() - self._last_used_s >= _IDLE_TIMEOUT_S
        return bool(self._leader_address) and not is_idle and self._last_used_s > 0

    def _record_failure(self, error: GenieError, address: str) -> None:
        if address != self._leader_address:
            return
        if self._connect_error is None:
            _log.info("cannot connect to the leader at %s: %s", address, error)
        self._connect_error = error
        self._notifier.notify_all()

    async def _run_connection(self, address: str) -> None:
        """Connect, and return when the connection is closed or idle."""
        assert self._make_client_tls is not None
        client_tls = await self._offload(self._make_client_tls)
        host, port = parse_endpoint(address)
        async with rpc.dial(self._network, host, port, tls=client_tls, timeout_s=CONNECT_TIMEOUT_S) as peer:
            hello = ServerHello(name=self._controller_name, version=__version__)
            await peer.call(hello, timeout_s=CONNECT_TIMEOUT_S)
            if address != self._leader_address:
                return
            self._peer, self._connect_error = peer, None
            self._notifier.notify_all()
            try:
                await self._wait_until_closed_or_idle(peer)
            finally:
                self._peer = None

    async def _wait_until_closed_or_idle(self, peer: rpc.Peer) -> None:
        self._attention_event.clear()
        peer.set_close_listener(self._attention_event.set)
        while not peer.is_closed and (not peer.is_idle or self._is_wanted()):
            await wait_event(self._attention_event, clock=self._clock, timeout_s=_IDLE_TIMEOUT_S / 2)
            if self._attention_event.is_set() and not peer.is_closed:
                await self._ping(peer)
                self._attention_event.clear()

    async def _ping(self, peer: rpc.Peer) -> None:
        try:
            await peer.call(Ping(), timeout_s=PING_TIMEOUT_S)
        except DeadlineError:
            # Requests fail at once until a new connection is open.
            self._connect_error = DeadlineError(f"{self._leader_address} does not respond")
            peer.close()
        except GenieError as error:  # a reply as well, of a leader of an older release
            _log.debug("the leader rejected a ping: %s", error)
