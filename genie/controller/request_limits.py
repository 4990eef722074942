"""Limits on the requests of each token, so that no token delays the requests of others and of nodes.

Each request costs units of about 100 us of the controller's time; a token has a rate limit in units, and a
maximum number of requests in flight. Requests that return lists take turns: between two of them, the event
loop serves everything else, above all heartbeats. Those of the owner, and requests for the status, have turns
of their own and do not wait behind the lists of tenants. Requests of nodes are not limited. A token that
ignores rejections is disconnected.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import Enum, auto

from genie.errors import OverloadedError
from genie.model.limits import LIST_MAX
from genie.model.messages import (
    CancelJob,
    ExplainJob,
    GetQueue,
    GetStatus,
    ListJobs,
    ListMembers,
    ListNodes,
    ListQuotas,
    ListTokens,
    Message,
    OpenDevice,
    PutBlob,
    RevokeToken,
    SessionHeartbeat,
    SubmitJob,
)
from genie.model.messages.handshake import Hello
from genie.model.messages.locks import ListLocks
from genie.model.tenant import Identity, TokenKind
from genie.processes.clock import Clock
from genie.tenancy.rate_limits import RateLimit

REQUEST_UNITS_PER_S = 2000.0
REQUEST_BURST_UNITS = 8000.0
OWNER_RATE_LIMIT_FACTOR = 10.0
"""By which the rate limit of an owner token is higher."""
REQUESTS_IN_FLIGHT_MAX = 1024
REQUEST_BYTES_IN_FLIGHT_MAX = 32 * 1024 * 1024
"""Of all requests in flight of a token: they are in memory until they are handled."""
LIST_REQUESTS_IN_FLIGHT_MAX = 32
_TRACKED_TOKENS_MAX = 10_000
_OVERLOAD_RETRY_AFTER_S = 0.5
_REJECTION_COST_UNITS = 1.0

_REQUEST_COST_UNITS: dict[type[Message], float] = {
    Hello: 5.0,
    # A submission is limited by the queue; its rate is the rate of placements.
    SubmitJob: 0.1,
    CancelJob: 2.0,
    GetStatus: 10.0,
    ListMembers: 20.0,
    ListNodes: 20.0,
    ListTokens: 20.0,
    ListQuotas: 5.0,
    ListLocks: 20.0,
    ExplainJob: 20.0,
    OpenDevice: 2.0,
    PutBlob: 4.0,
    SessionHeartbeat: 2.0,
}
_UNITS_PER_LISTED_JOB = 0.1
# Their handlers do not wait. Requests about the queue take turns among themselves (requests/queue.py).
_REQUESTS_SERIALIZED_ACROSS_TOKENS: frozenset[type[Message]] = frozenset(
    (ListJobs, ListMembers, ListNodes, ListTokens, ListQuotas, ListLocks, GetStatus, SessionHeartbeat)
)
LIST_REQUESTS: frozenset[type[Message]] = _REQUESTS_SERIALIZED_ACROSS_TOKENS | {GetQueue, ExplainJob}
"""Requests whose replies are long or expensive."""
_REQUESTS_UNLIMITED_FOR_OWNERS: frozenset[type[Message]] = frozenset((Hello, CancelJob, RevokeToken))


@dataclass(slots=True, eq=False)
class TokenUsage:
    """The requests of one token, over all its connections."""

    token_id: str
    is_owner: bool
    rate_limit: RateLimit
    requests_in_flight: int = 0
    request_bytes_in_flight: int = 0
    list_requests_in_flight: int = 0


class _SerializationGroup(Enum):
    """Requests of one kind wait for each other only."""

    OWNER = auto()
    STATUS = auto()
    LIST = auto()


class RequestLimits:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._usage_by_token: OrderedDict[str, TokenUsage] = OrderedDict()
        self._lock_by_serialization_group = {turn: asyncio.Lock() for turn in _SerializationGroup}

    def get_token_usage(self, identity: Identity) -> TokenUsage | None:
        """The usage of this token; None for a node or controller, whose requests are not limited."""
        if identity.kind in (TokenKind.NODE, TokenKind.SERVER):
            return None
        found = self._usage_by_token.get(identity.token_id)
        if found is None:
            is_owner = identity.kind is TokenKind.OWNER
            factor = OWNER_RATE_LIMIT_FACTOR if is_owner else 1.0
            rate = RateLimit(
                units_per_s=REQUEST_UNITS_PER_S * factor,
                burst_units=REQUEST_BURST_UNITS * factor,
                now_s=self._clock.monotonic_s(),
            )
            found = self._usage_by_token[identity.token_id] = TokenUsage(identity.token_id, is_owner, rate)
            if len(self._usage_by_token) > _TRACKED_TOKENS_MAX:
                self._usage_by_token.popitem(last=False)
        self._usage_by_token.move_to_end(identity.token_id)
        return found

    def check_and_charge_request(self, usage: TokenUsage, request: Message, *, size_bytes: int = 0) -> None:
        """Raise OverloadedError if the token has sent too many requests. `size_bytes`: of this one."""
        kind = request.__class__
        if usage.is_owner and kind in _REQUESTS_UNLIMITED_FOR_OWNERS:
            return
        retry_s = usage.rate_limit.take_units_or_get_wait_s(
            _request_cost_units(request),
            now_s=self._clock.monotonic_s(),
            units_if_rejected=_REJECTION_COST_UNITS,
        )
        if retry_s:
            raise OverloadedError(
                f"the rate limit of token {usage.token_id} is exceeded",
                retry_after_s=round(retry_s + 0.01, 2),
            )
        if usage.requests_in_flight >= REQUESTS_IN_FLIGHT_MAX:
            raise OverloadedError(
                f"the limit of {REQUESTS_IN_FLIGHT_MAX} requests in flight of token {usage.token_id} is "
                "reached",
                retry_after_s=_OVERLOAD_RETRY_AFTER_S,
            )
        if (
            usage.requests_in_flight
            and usage.request_bytes_in_flight + size_bytes > REQUEST_BYTES_IN_FLIGHT_MAX
        ):
            raise OverloadedError(
                f"the limit of {REQUEST_BYTES_IN_FLIGHT_MAX} bytes of requests in flight of token "
                f"{usage.token_id} is reached",
                retry_after_s=_OVERLOAD_RETRY_AFTER_S,
            )
        if kind in LIST_REQUESTS and usage.list_requests_in_flight >= LIST_REQUESTS_IN_FLIGHT_MAX:
            raise OverloadedError(
                f"the limit of {LIST_REQUESTS_IN_FLIGHT_MAX} lists in flight of token {usage.token_id} is "
                "reached",
                retry_after_s=_OVERLOAD_RETRY_AFTER_S,
            )

    async def await_reply_counted_in_flight(
        self, usage: TokenUsage, reply: Awaitable[Message], *, size_bytes: int = 0
    ) -> Message:
        """Await the reply to a request that was charged, and count it as in flight until then."""
        usage.requests_in_flight += 1
        usage.request_bytes_in_flight += size_bytes
        try:
            return await reply
        finally:
            usage.requests_in_flight -= 1
            usage.request_bytes_in_flight -= size_bytes

    async def run_list_request(
        self, usage: TokenUsage, request: Message, handle: Callable[[], Awaitable[Message]]
    ) -> Message:
        """Handle one of LIST_REQUESTS, counted as in flight; some take turns."""
        return await self.await_list_counted_in_flight(usage, self.run_in_turn(usage, request, handle))

    async def await_list_counted_in_flight(self, usage: TokenUsage, reply: Awaitable[Message]) -> Message:
        usage.list_requests_in_flight += 1
        try:
            return await reply
        finally:
            usage.list_requests_in_flight -= 1

    async def run_in_turn(
        self, usage: TokenUsage, request: Message, handle: Callable[[], Awaitable[Message]]
    ) -> Message:
        """Handle a request; one that must take turns waits for its turn first."""
        if request.__class__ not in _REQUESTS_SERIALIZED_ACROSS_TOKENS:
            return await handle()
        async with self._lock_by_serialization_group[_serialization_group_of(usage, request)]:
            reply = await handle()
            await asyncio.sleep(0)
            return reply


def _serialization_group_of(usage: TokenUsage, request: Message) -> _SerializationGroup:
    if usage.is_owner:
        return _SerializationGroup.OWNER
    return _SerializationGroup.STATUS if isinstance(request, GetStatus) else _SerializationGroup.LIST


def _request_cost_units(request: Message) -> float:
    cost = _REQUEST_COST_UNITS.get(request.__class__)
    if cost is not None:
        return cost
    if isinstance(request, (ListJobs, GetQueue)):
        return 2.0 + _UNITS_PER_LISTED_JOB * min(request.limit, LIST_MAX)
    return 1.0
