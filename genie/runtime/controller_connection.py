"""A connection to the leading controller that reconnects when it is lost; calls wait for the reconnection.

The reply to Hello lists all controllers of the cluster: a lost connection is replaced by one to the next of
them, and a request that a standby rejects is sent to the leader. Requests that standbys answer, such as the
status, do not leave the server. Within its timeout, an idempotent call is sent again after a reconnection and
while the store of the controller is unavailable; other calls only if they certainly were not carried out. A
call that exceeds a limit on requests (OverloadedError) is sent again after the time that the error states.
Does not find the cluster (credentials.py).
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from typing import TypeVar

from genie.errors import (
    ConnectionLostError,
    DeadlineError,
    GenieError,
    NotLeaderError,
    OverloadedError,
    ReplyLostError,
    StoreUnavailableError,
)
from genie.model.messages import AgedReply, ListNodes, Message, NodesReply, NodeView, Request
from genie.model.messages.handshake import Welcome
from genie.model.names import address_text
from genie.processes.tasks import unwrapped_task_group
from genie.runtime import rpc
from genie.runtime.control_plane import ControlDataIntegration
from genie.runtime.credentials import Access, connect_authenticated
from genie.runtime.known_servers import Address, ServerList
from genie.runtime.network import Network

_log = logging.getLogger(__name__)
_Reply = TypeVar("_Reply", bound=Message)

BACKOFF_S_MIN = 0.1
BACKOFF_S_MAX = 2.0
"""Several attempts fit into the time after which the controller cancels the session of a client that was
disconnected."""
RECONNECT_SPREAD_S = 1.0
"""The first attempt after the loss of a connection is within this time, at random: all clients of a
controller lose their connections at the same time."""
_ELECTION_RETRY_INTERVAL_S_MIN = 0.1
_ELECTION_RETRY_INTERVAL_S_MAX = 0.25
"""On average, a client finds a new leader half of this later than it could."""
_STORE_RETRY_INTERVAL_S = 1.0
_CONNECT_TIMEOUT_S_MAX = 10.0
_CONNECT_TIMEOUT_PER_SERVER_S_MAX = 3.0
"""With several servers: one that does not respond must not delay the others."""
_LEADER_SEARCH_INTERVAL_S = 2.0
"""How often each server is asked whether it leads, on average."""
_NAMED_LEADER_SEARCH_INTERVAL_S = 0.5
"""The same for the one that another server names as the leader."""

_LEADER_QUERY_TIMEOUT_S = 1.5
"""How long one server is asked whether it leads. Standbys name a leader that has stopped until its lease
ends: waiting for it must not delay the question to the next server."""
_LEADER_QUERY_STAGGER_S = 0.25
"""How long a server may take to answer that question before the next one is asked at the same time."""
_REPLY_OVERDUE_AFTER_S = 3.0
"""How long a reply may be overdue before another server is asked whether it leads."""
_REPLY_OVERDUE_INTERVAL_S = 1.0
"""How often it is then asked again; _LEADER_SEARCH_INTERVAL_S applies to each server."""

ConnectionChangeCallback = Callable[[bool, str], None]
"""Called when the connection was lost (False) or restored (True), with the reason."""


class ControllerConnection(ControlDataIntegration):
    """The connection of one process to its cluster. Bound to one event loop."""

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
        """With the address of the server in use, or that was used last."""
        self.oldest_reply_age_s = 0.0
        """The highest age of a reply so far: above 0 if a standby has answered without its leader."""
        self.reconnects = 0
        self.reconnected_event = asyncio.Event()
        """Set at each reconnection; the waiter clears it."""
        self._servers = ServerList(
            (access.host, access.port), access.other_servers, has_tls=access.tls is not None
        )
        self._network = network
        self._program = program
        self._on_connection_change = on_change
        self._jitter_rng = chance
        self._peer: rpc.Peer | None = None
        self._is_connected = asyncio.Event()
        self._is_moving_to_leader = False
        self._is_searching_leader = False
        self._is_leader_search_requested = asyncio.Event()
        self._leader_to_ask_first = ""
        self._calls_needing_leader: set[object] = set()
        """Calls that the server in use has rejected because it does not lead, or whose reply is overdue."""
        self._last_error: GenieError | None = None
        self._welcome_of_first_connection: asyncio.Future[Welcome] = (
            asyncio.get_running_loop().create_future()
        )

    @property
    def where(self) -> str:
        """HOST:PORT of the server in use, or that was used last."""
        return address_text(self.access.host, self.access.port)

    @property
    def announced_servers(self) -> tuple[Address, ...]:
        """All controllers of the cluster, as they announced."""
        return self._servers.announced

    @property
    def is_open(self) -> bool:
        return self._peer is not None and not self._peer.is_closed

    async def wait_for_first_connection(self) -> Welcome:
        """Returns the reply to the first Hello, or raises the error of the first attempt to connect."""
        return await asyncio.shield(self._welcome_of_first_connection)

    async def call(self, request: Request[_Reply], *, timeout_s: float, idempotent: bool = True) -> _Reply:
        """Returns the reply of the controller. `idempotent`: the request may be sent twice."""
        call = object()
        try:
            return await self._call_until_replied(request, call, timeout_s=timeout_s, idempotent=idempotent)
        finally:
            self._calls_needing_leader.discard(call)

    async def _call_until_replied(
        self, request: Request[_Reply], call: object, *, timeout_s: float, idempotent: bool
    ) -> _Reply:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        election_retry_s = _ELECTION_RETRY_INTERVAL_S_MIN
        while True:
            peer = await self._wait_for_peer(deadline)
            if not idempotent:  # leaving this server would make the outcome unknown
                self._calls_needing_leader.discard(call)
            try:
                with self._search_leader_if_reply_overdue(request, call):
                    reply = await peer.call(request, timeout_s=max(deadline - loop.time(), 0.001))
                    self._record_age(reply)
                    return reply
            except ConnectionLostError as error:
                if not idempotent:
                    raise ConnectionLostError(
                        f"lost the connection to {self.where} before the reply to {type(request).__name__}",
                        hint="the request may have been executed; check before you retry",
                    ) from error
                if not peer.is_closed:  # the server has lost another one, such as that to an agent
                    await asyncio.sleep(_ELECTION_RETRY_INTERVAL_S_MAX * (0.5 + self._jitter_rng()))
                elif peer is self._peer:
                    self._is_connected.clear()
            except NotLeaderError as error:
                # Right after a start or a failover there is no leader yet.
                interval_s = max(election_retry_s, error.retry_after_s) * (0.5 + self._jitter_rng())
                self._request_leader_search(call, leader=error.leader)
                await self._wait_before_retry(error, peer, deadline, interval_s=interval_s)
                election_retry_s = min(2 * election_retry_s, _ELECTION_RETRY_INTERVAL_S_MAX)
            except (StoreUnavailableError, ReplyLostError) as error:
                # A write may have been applied: only an idempotent call may be sent again.
                if not idempotent:
                    raise
                if isinstance(error, StoreUnavailableError):
                    self._request_leader_search(call)
                interval_s = (error.retry_after_s or _STORE_RETRY_INTERVAL_S) * (1 + self._jitter_rng() / 2)
                await self._wait_before_retry(error, peer, deadline, interval_s=interval_s)
            except OverloadedError as error:
                wait_s = error.retry_after_s * (1 + self._jitter_rng() / 2)
                if loop.time() + wait_s >= deadline:
                    raise
                await asyncio.sleep(wait_s)

    def _record_age(self, reply: Message) -> None:
        if isinstance(reply, AgedReply):
            self.oldest_reply_age_s = max(self.oldest_reply_age_s, reply.age_s)

    def disconnect(self) -> None:
        """Closes a connection that does not respond; run() opens a new one."""
        if self._peer is not None:
            self._peer.close()

    async def move_to_leader(self, *, timeout_s: float) -> bool:
        """Moves to another server if one says that it leads; False if none does. Keeps the current connection
        until another is known to be better."""
        return await self._move_to_leader("", timeout_s=timeout_s, is_needed=lambda: True)

    async def _move_to_leader(self, leader: str, *, timeout_s: float, is_needed: Callable[[], bool]) -> bool:
        """`leader`: HOST:PORT of the server to ask first."""
        if self._is_searching_leader or self._is_moving_to_leader:
            return False
        now_s, jitter = asyncio.get_running_loop().time(), 0.5 + self._jitter_rng()
        self._is_searching_leader = True
        try:
            candidates = self._servers.list_leader_candidates(
                leader,
                failed_before_s=now_s - _LEADER_SEARCH_INTERVAL_S * jitter,
                named_failed_before_s=now_s - _NAMED_LEADER_SEARCH_INTERVAL_S * jitter,
            )
            found = await self._find_leading_server(candidates, timeout_s=timeout_s)
            if found is None or not is_needed():
                return False
            self._servers.try_server_first_next(found)
            self._is_moving_to_leader = True
            self.disconnect()
            return True
        finally:
            self._is_searching_leader = False

    async def run(self, *, first_timeout_s: float) -> None:
        """Connects, reconnects with backoff, and moves to another server that leads, until cancelled. Returns
        if the first attempt fails."""
        async with unwrapped_task_group() as group:
            search = group.create_task(self._search_leader_on_request())
            try:
                await self._keep_connected(first_timeout_s)
            finally:
                search.cancel()

    async def _keep_connected(self, first_timeout_s: float) -> None:
        try:
            await self._run_connection_to_any(first_timeout_s)
        except GenieError as error:
            if not self._welcome_of_first_connection.done():
                self._welcome_of_first_connection.set_exception(error)
                self._welcome_of_first_connection.exception()
                return
            self._last_error = error
        backoff_s, wait_s = BACKOFF_S_MIN, RECONNECT_SPREAD_S * self._jitter_rng()
        while True:
            if not self._is_moving_to_leader:
                await asyncio.sleep(wait_s)
            before = self.reconnects
            try:
                await self._run_connection_to_any(_CONNECT_TIMEOUT_S_MAX)
            except GenieError as error:
                _log.debug("could not connect: %s", error)
                self._last_error = error
            if self.reconnects > before:
                backoff_s, wait_s = BACKOFF_S_MIN, RECONNECT_SPREAD_S * self._jitter_rng()
            else:
                backoff_s = min(backoff_s * 2, BACKOFF_S_MAX)
                wait_s = backoff_s * (0.5 + self._jitter_rng() / 2)

    async def _find_leading_server(
        self, candidates: Sequence[Address], *, timeout_s: float
    ) -> Address | None:
        """The first of these servers that says that it leads. One that does not respond delays the question
        to the next one only by _LEADER_QUERY_STAGGER_S. Ends early if the connection is replaced."""
        loop, peer = asyncio.get_running_loop(), self._peer
        deadline, waiting = loop.time() + timeout_s, list(candidates)
        queries: dict[asyncio.Task[bool], Address] = {}
        leading: Address | None = None
        async with unwrapped_task_group() as group:
            while leading is None and (waiting or queries) and peer is self._peer:
                if waiting:
                    wait_s = min(max(deadline - loop.time(), 0.001), _LEADER_QUERY_TIMEOUT_S)
                    query = self._try_fetch_is_leading(waiting[0], timeout_s=wait_s)
                    queries[group.create_task(query)] = waiting.pop(0)
                stagger_s = _LEADER_QUERY_STAGGER_S if waiting else None
                await asyncio.wait(queries, timeout=stagger_s, return_when=asyncio.FIRST_COMPLETED)
                replied = [(task, queries.pop(task)) for task in list(queries) if task.done()]
                leading = next((server for task, server in replied if task.result()), None)
            for task in queries:
                task.cancel()
        return leading if peer is self._peer else None

    def _request_leader_search(self, call: object, *, leader: str = "") -> None:
        """Looks for a leader in the background: a server that does not respond must not delay a retry at the
        current one. `leader`: as in `_move_to_leader`."""
        self._calls_needing_leader.add(call)
        self._leader_to_ask_first = leader or self._leader_to_ask_first
        self._is_leader_search_requested.set()

    async def _search_leader_on_request(self) -> None:
        """Moves to a leader that is found while a call still needs one."""
        while True:
            await self._is_leader_search_requested.wait()
            self._is_leader_search_requested.clear()
            leader, self._leader_to_ask_first = self._leader_to_ask_first, ""
            await self._move_to_leader(
                leader,
                timeout_s=_CONNECT_TIMEOUT_S_MAX,
                is_needed=lambda: bool(self._calls_needing_leader),
            )

    async def _run_connection_to_any(self, timeout_s: float) -> None:
        """Connects to the first server that can be reached, and returns when the connection is closed.
        `timeout_s` is for connecting. Raises if no server can be reached, and when the configured server
        rejects the first connection for good."""
        loop = asyncio.get_running_loop()
        deadline, order = loop.time() + timeout_s, self._servers.list_in_connect_order()
        for number, server in enumerate(order):
            wait_s = (deadline - loop.time()) / (len(order) - number)
            if len(order) > 1:
                wait_s = min(wait_s, _CONNECT_TIMEOUT_PER_SERVER_S_MAX)
            try:
                await self._run_connection(server, timeout_s=max(wait_s, 0.001))
                return
            except GenieError as error:
                self._servers.record_failure(server, error, now_s=loop.time())
                self._is_moving_to_leader = False
                is_final = not error.retryable and not self._welcome_of_first_connection.done()
                if number == len(order) - 1 or (is_final and server == self._servers.given):
                    raise (
                        error if is_final else self._servers.error_naming_all_failed_servers(error)
                    ) from error

    async def _run_connection(self, server: Address, *, timeout_s: float) -> None:
        """Opens one connection and waits until it is closed."""
        access = replace(self.access, host=server[0], port=server[1])
        async with connect_authenticated(
            self._network, access, timeout_s=timeout_s, program=self._program
        ) as found:
            self._peer, welcome = found
            self.access = replace(access, generation=max(access.generation, welcome.generation or 0))
            self._on_connected(server, welcome)
            try:
                await self._peer.wait_closed()
            finally:
                self._is_connected.clear()
        self._last_error = ConnectionLostError(f"the connection to {self.where} was lost")
        reason = str(self._last_error)
        if self._is_moving_to_leader:
            reason = f"leaving {self.where} for the leader of the cluster"
        else:
            now_s = asyncio.get_running_loop().time()
            self._servers.record_failure(server, self._last_error, now_s=now_s)
        self._on_connection_change(False, reason)

    def _on_connected(self, server: Address, welcome: Welcome) -> None:
        self._servers.add_announced(welcome.controllers)
        self._servers.record_connected(server)
        self._is_moving_to_leader = False
        self._is_connected.set()
        if not self._welcome_of_first_connection.done():
            self._welcome_of_first_connection.set_result(welcome)
            return
        self.reconnects += 1
        self.reconnected_event.set()
        self._on_connection_change(True, f"reconnected to {self.where}")

    @contextmanager
    def _search_leader_if_reply_overdue(self, request: Message, call: object) -> Iterator[None]:
        """While the block waits for a reply: once it is overdue, such as after a power failure of the server,
        looks for a leader every _REPLY_OVERDUE_INTERVAL_S."""
        if len(self._servers) == 1:
            yield
            return
        loop = asyncio.get_running_loop()
        timers: list[asyncio.TimerHandle] = []

        def look() -> None:
            self._request_leader_search(call)
            timers[:] = [loop.call_later(_REPLY_OVERDUE_INTERVAL_S, look)]

        long_poll_s = float(getattr(request, "wait_s", 0.0))
        timers.append(loop.call_later(long_poll_s + _REPLY_OVERDUE_AFTER_S, look))
        try:
            yield
        finally:
            timers[0].cancel()

    async def _wait_before_retry(
        self, error: GenieError, peer: rpc.Peer, deadline: float, *, interval_s: float
    ) -> None:
        """Waits `interval_s`, or until the connection is left for the leader. At the deadline raises `error`
        with the other failures."""
        loop = asyncio.get_running_loop()
        until = loop.time() + interval_s
        with suppress(TimeoutError):
            async with asyncio.timeout_at(min(until, deadline)):
                await peer.wait_closed()
            return
        if until >= deadline:
            self._servers.record_failure(self._servers.current, error, now_s=loop.time())
            raise self._servers.error_naming_all_failed_servers(error) from error

    async def _try_fetch_is_leading(self, server: Address, *, timeout_s: float) -> bool:
        access = replace(self.access, host=server[0], port=server[1])
        loop = asyncio.get_running_loop()
        try:
            async with connect_authenticated(
                self._network, access, timeout_s=timeout_s, program=self._program
            ) as (_, welcome):
                self._servers.add_announced(welcome.controllers)
                if welcome.leading:
                    return True
                error: GenieError = NotLeaderError("it does not lead")
        except GenieError as failure:
            error = failure
        self._servers.record_failure(server, error, now_s=loop.time())
        return False

    async def _wait_for_peer(self, deadline: float) -> rpc.Peer:
        try:
            async with asyncio.timeout_at(deadline):
                while not self.is_open:
                    self._is_connected.clear()
                    await self._is_connected.wait()
        except TimeoutError:
            if self._last_error is not None:
                raise self._servers.error_naming_all_failed_servers(self._last_error) from None
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


async def fetch_nodes(
    connection: ControllerConnection, first: NodesReply | None = None, *, timeout_s: float
) -> tuple[NodeView, ...]:
    """Returns all nodes, by ID: those of a large cluster do not fit into one reply. `first`: the first page,
    if the caller has it. `timeout_s`: of each page."""
    reply = first or await connection.call(ListNodes(), timeout_s=timeout_s)
    views = list(reply.nodes)
    while reply.more and reply.nodes:
        reply = await connection.call(ListNodes(after_node_id=views[-1].info.node_id), timeout_s=timeout_s)
        views += reply.nodes
    return tuple(views)
