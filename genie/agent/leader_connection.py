"""Finds the leading controller and keeps a connection to it.

Each round tries the known controllers at the same time, so that one that does not respond does not delay the
others. If every one of them replies that it does not lead, no controller can be reclaiming this node's jobs,
which extends its lease (heartbeats.py).
"""

from __future__ import annotations

import asyncio
import enum
import logging
import random
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import replace
from typing import TypeVar

from genie.errors import (
    ConnectionLostError,
    FencedError,
    GenieError,
    NodeRemovedError,
    NothingListensError,
    NotLeaderError,
    OutdatedLeaderError,
)
from genie.model.messages import AGENT_REQUESTS, Message, Request
from genie.model.names import address_text, is_loopback, parse_endpoint
from genie.processes.clock import Clock
from genie.processes.tasks import unwrapped_task_group
from genie.runtime import rpc
from genie.runtime.credentials import Access, connect_authenticated
from genie.runtime.network import ClientTls, Network

_log = logging.getLogger(__name__)
_Reply = TypeVar("_Reply", bound=Message)

RECONNECT_BACKOFF_S_MIN = 0.05
CONTROLLERS_MAX = 16
PROGRAM_NAME_IN_HELLO = "agent"


class _ConnectAttemptOutcome(enum.Enum):
    SERVED = enum.auto()
    NOT_LEADING = enum.auto()
    UNKNOWN = enum.auto()
    """No reply, or one that does not show whether it leads."""


class LeaderConnection:
    """Reconnects with backoff; after the loss of an established connection, within `backoff_s_max` at random.
    `apply_registration_reply` and `replace_access` apply from the next connection."""

    def __init__(
        self,
        access: Access,
        *,
        network: Network,
        clock: Clock,
        rng: random.Random,
        handler: rpc.Handler,
        timeout_s: float = 5.0,
        backoff_s_max: float = 1.0,
    ) -> None:
        self.access = access
        self.endpoints: tuple[tuple[str, int], ...] = tuple(
            dict.fromkeys([(access.host, access.port), *access.other_servers])
        )[:CONTROLLERS_MAX]
        """All known controllers, the last leader first."""
        self._network = network
        self._clock = clock
        self._rng = rng
        self._handler = handler
        self._peer: rpc.Peer | None = None
        self._connect_timeout_s = timeout_s
        self._reconnect_backoff_s_max = backoff_s_max
        self._rejection_reason_by_endpoint: dict[tuple[str, int], str] = {}
        """Why controllers that claim to lead were rejected."""
        self.controllers_known_by_gossip: tuple[tuple[str, int], ...] = ()
        """Also tried, but unverified."""
        self._has_registered_once = False
        """From then on every error except FencedError and NodeRemovedError is retried."""

    @property
    def is_connected(self) -> bool:
        return self._peer is not None and not self._peer.is_closed

    def apply_registration_reply(
        self, endpoints: tuple[tuple[str, int], ...], *, timeout_s: float, backoff_s_max: float
    ) -> None:
        """Applies what the leader returned. `timeout_s` is for connecting and the handshake."""
        self._rejection_reason_by_endpoint.pop(self.endpoints[0], None)
        self.endpoints = endpoints
        self._connect_timeout_s = timeout_s
        self._reconnect_backoff_s_max = backoff_s_max
        self._has_registered_once = True

    def set_controllers_known_by_gossip(self, addresses: Iterable[str]) -> None:
        """Also tries these controllers. Whether they respond decides nothing else, because any member of
        gossip can invent addresses: only the announced controllers extend the lease (rule b)."""
        found = dict.fromkeys(map(parse_endpoint, addresses))
        has_tls = self.access.tls is not None
        usable = [endpoint for endpoint in found if has_tls or is_loopback(endpoint[0])]
        self.controllers_known_by_gossip = tuple(usable[:CONTROLLERS_MAX])

    def replace_access(self, access: Access) -> None:
        """Uses a renewed certificate."""
        self.access = access

    async def call_leader(self, request: Request[_Reply], *, timeout_s: float) -> _Reply:
        """Sends a request to the leader. Raises ConnectionLostError if there is no connection."""
        if self._peer is None:
            raise ConnectionLostError("no connection to the controller")
        return await self._peer.call(request, timeout_s=timeout_s)

    async def call_unauthenticated(
        self, request: Request[_Reply], *, tls: ClientTls, timeout_s: float
    ) -> _Reply:
        """Sends a request that is allowed before Hello to the first known controller that can be reached."""
        for host, port in self.endpoints[:-1]:
            try:
                return await self._call_endpoint(host, port, request, tls=tls, timeout_s=timeout_s)
            except GenieError as error:
                _log.info("could not send a request to controller %s: %s", address_text(host, port), error)
        return await self._call_endpoint(*self.endpoints[-1], request, tls=tls, timeout_s=timeout_s)

    async def _call_endpoint(
        self, host: str, port: int, request: Request[_Reply], *, tls: ClientTls, timeout_s: float
    ) -> _Reply:
        async with rpc.dial(self._network, host, port, tls=tls, timeout_s=timeout_s) as peer:
            return await peer.call(request, timeout_s=timeout_s)

    async def keep_connected_to_leader(
        self, serve: Callable[[rpc.Peer], Awaitable[None]], on_no_leader: Callable[[float], None]
    ) -> None:
        """Runs until cancelled. `serve` gets a connection to a leader and returns when it no longer leads.

        Raises FencedError, NodeRemovedError unless another controller leads, and until the first registration
        every error that is not retryable (token, certificate, version).
        """
        delay_s = RECONNECT_BACKOFF_S_MIN
        while True:
            began_s = self._clock.monotonic_s()
            outcomes = await self._try_all_controllers(serve)
            if _ConnectAttemptOutcome.SERVED in outcomes:
                if self._clock.monotonic_s() - began_s > self._reconnect_backoff_s_max:
                    # All agents have lost the leader at the same time, and must not return at the same time.
                    await self._clock.sleep(self._rng.uniform(0.0, self._reconnect_backoff_s_max))
                    delay_s = self._reconnect_backoff_s_max / 2
                    continue
            elif _ConnectAttemptOutcome.UNKNOWN not in outcomes:
                on_no_leader(began_s)
            await self._clock.sleep(delay_s * self._rng.uniform(0.5, 1.0))
            delay_s = min(delay_s * 2, self._reconnect_backoff_s_max)

    async def _try_all_controllers(
        self, serve: Callable[[rpc.Peer], Awaitable[None]]
    ) -> list[_ConnectAttemptOutcome]:
        """Tries all known controllers, those that were rejected as outdated only if no other one leads: they
        would claim to lead every time."""
        rejected = [one for one in self.endpoints if one in self._rejection_reason_by_endpoint]
        others = [one for one in self.endpoints if one not in self._rejection_reason_by_endpoint]
        outcomes = await self._try_controllers_concurrently(others, serve, with_gossip=True)
        if rejected and _ConnectAttemptOutcome.SERVED not in outcomes:
            outcomes += await self._try_controllers_concurrently(rejected, serve)
        return outcomes

    async def _try_controllers_concurrently(
        self,
        endpoints: Sequence[tuple[str, int]],
        serve: Callable[[rpc.Peer], Awaitable[None]],
        *,
        with_gossip: bool = False,
    ) -> list[_ConnectAttemptOutcome]:
        """Tries these controllers at the same time, and serves the first one that leads. Raises an error
        that is final, if no other one leads. `with_gossip`: also tries those that only gossip knows, of which
        only a leader has an outcome."""
        attempts: list[asyncio.Task[_ConnectAttemptOutcome | GenieError]] = []
        claimed: list[asyncio.Task[_ConnectAttemptOutcome | GenieError]] = []

        def claim() -> bool:
            """Whether the calling attempt is the first one that found a leader. Ends the other attempts."""
            if self._peer is not None:
                return False
            for attempt in attempts:
                if attempt is asyncio.current_task():
                    claimed.append(attempt)
                else:
                    attempt.cancel()
            return True

        async with unwrapped_task_group() as group:
            attempts += [
                group.create_task(self._try_controller(endpoint, serve, claim)) for endpoint in endpoints
            ]
            unannounced = [
                group.create_task(self._try_controller(endpoint, serve, claim))
                for endpoint in (self.controllers_known_by_gossip if with_gossip else ())
                if endpoint not in self.endpoints
            ]
            attempts += unannounced
        # The error of a controller that leads is raised rather than that of another one.
        attempts.sort(key=lambda attempt: attempt not in claimed)
        results = [
            result
            for attempt in attempts
            if not attempt.cancelled()
            if (result := attempt.result()) is _ConnectAttemptOutcome.SERVED or attempt not in unannounced
        ]
        outcomes = [result for result in results if isinstance(result, _ConnectAttemptOutcome)]
        final = [result for result in results if isinstance(result, GenieError)]
        if final and _ConnectAttemptOutcome.SERVED not in outcomes:
            raise final[0]
        return outcomes

    def _add_controllers(self, controllers: tuple[str, ...]) -> None:
        """Adds the controllers that a controller knows of. Removes none."""
        found = (parse_endpoint(text) for text in controllers[:CONTROLLERS_MAX])
        self.endpoints = tuple(dict.fromkeys((*self.endpoints, *found)))[:CONTROLLERS_MAX]

    def _record_outdated_leader(self, endpoint: tuple[str, int], error: OutdatedLeaderError) -> None:
        """Logs each reason once."""
        if self._rejection_reason_by_endpoint.get(endpoint) == str(error):
            return
        if len(self._rejection_reason_by_endpoint) >= CONTROLLERS_MAX:
            self._rejection_reason_by_endpoint.clear()
        self._rejection_reason_by_endpoint[endpoint] = str(error)
        _log.warning("controller %s is not accepted: %s", address_text(*endpoint), error)

    async def _try_controller(
        self,
        endpoint: tuple[str, int],
        serve: Callable[[rpc.Peer], Awaitable[None]],
        claim: Callable[[], bool],
    ) -> _ConnectAttemptOutcome | GenieError:
        """Serves the controller if it leads and `claim` allows it. Returns an error that is final."""
        host, port = endpoint
        served = False
        try:
            async with connect_authenticated(
                self._network,
                replace(self.access, host=host, port=port),
                timeout_s=self._connect_timeout_s,
                program=PROGRAM_NAME_IN_HELLO,
                requests=AGENT_REQUESTS,
                handler=self._handler,
            ) as (peer, welcome):
                self._add_controllers(welcome.controllers)
                if not welcome.leading:
                    return _ConnectAttemptOutcome.NOT_LEADING
                if not claim():
                    return _ConnectAttemptOutcome.UNKNOWN
                served = True
                await self._serve_claimed_leader(endpoint, peer, serve)
        except OutdatedLeaderError as error:
            self._record_outdated_leader(endpoint, error)
            return _ConnectAttemptOutcome.UNKNOWN
        except (NotLeaderError, NothingListensError) as error:
            _log.debug("no leader at %s: %s", address_text(host, port), error)
            return _ConnectAttemptOutcome.SERVED if served else _ConnectAttemptOutcome.NOT_LEADING
        except FencedError:
            raise
        except NodeRemovedError as error:
            return error
        except GenieError as error:
            if not error.retryable and not self._has_registered_once:
                return error
            _log.warning("connection to controller %s failed: %s", address_text(host, port), error)
            return _ConnectAttemptOutcome.SERVED if served else _ConnectAttemptOutcome.UNKNOWN
        return _ConnectAttemptOutcome.SERVED

    async def _serve_claimed_leader(
        self, endpoint: tuple[str, int], peer: rpc.Peer, serve: Callable[[rpc.Peer], Awaitable[None]]
    ) -> None:
        self._peer = peer
        self.endpoints = (endpoint, *(one for one in self.endpoints if one != endpoint))
        try:
            await serve(peer)
        finally:
            self._peer = None
