"""Limits on the requests of each token, so that no token delays the requests of others and of nodes.

Each request costs units of about 100 us of the controller's time; a token has a rate limit in units, and a
maximum number of requests in flight. Requests that return lists take turns: between two of them, the event
loop serves everything else, above all heartbeats. Requests of nodes are not limited. A token that ignores
rejections is disconnected.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from genie.errors import OverloadedError
from genie.model.limits import LIST_MAX
from genie.model.messages import (
    CancelJob,
    ExplainJob,
    GetQueue,
    GetStatus,
    Hello,
    ListJobs,
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
from genie.model.tenant import Identity, TokenKind
from genie.processes.clock import Clock
from genie.tenancy.rate_limits import RateLimit

UNITS_PER_S = 2000.0
BURST = 8000.0
OWNER_FACTOR = 10.0
"""By which the rate limit of an owner token is higher."""
IN_FLIGHT_MAX = 1024
IN_FLIGHT_BYTES_MAX = 32 * 1024 * 1024
"""Of all requests in flight of a token: they are in memory until they are handled."""
LISTS_IN_FLIGHT_MAX = 32
_TOKENS_MAX = 10_000
_RETRY_AFTER_S = 0.5
_REJECTION_COST = 1.0

_COSTS: dict[type[Message], float] = {
    Hello: 5.0,
    # A submission is limited by the queue; its rate is the rate of placements.
    SubmitJob: 0.1,
    CancelJob: 2.0,
    GetStatus: 10.0,
    ListNodes: 20.0,
    ListTokens: 20.0,
    ListQuotas: 5.0,
    ExplainJob: 20.0,
    OpenDevice: 2.0,
    PutBlob: 4.0,
    SessionHeartbeat: 2.0,
}
_UNITS_PER_JOB = 0.1
# Their handlers do not wait. Requests about the queue take turns among themselves (requests/queue.py).
_TAKES_TURNS: frozenset[type[Message]] = frozenset(
    (ListJobs, ListNodes, ListTokens, ListQuotas, GetStatus, SessionHeartbeat)
)
LISTS: frozenset[type[Message]] = _TAKES_TURNS | {GetQueue, ExplainJob}
"""Requests whose replies are long or expensive."""
_ALWAYS_FOR_OWNERS: frozenset[type[Message]] = frozenset((Hello, CancelJob, RevokeToken))


@dataclass(slots=True, eq=False)
class TokenUsage:
    """The requests of one token, over all its connections."""

    token_id: str
    is_owner: bool
    rate: RateLimit
    in_flight: int = 0
    in_flight_bytes: int = 0
    lists_in_flight: int = 0


class RequestLimits:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._usages: OrderedDict[str, TokenUsage] = OrderedDict()
        self._turn = asyncio.Lock()

    def usage(self, identity: Identity) -> TokenUsage | None:
        """The usage of this token; None for a node, whose requests are not limited."""
        if identity.kind is TokenKind.NODE:
            return None
        found = self._usages.get(identity.token_id)
        if found is None:
            is_owner = identity.kind is TokenKind.OWNER
            factor = OWNER_FACTOR if is_owner else 1.0
            rate = RateLimit(
                units_per_s=UNITS_PER_S * factor, burst_units=BURST * factor, now_s=self._clock.monotonic_s()
            )
            found = self._usages[identity.token_id] = TokenUsage(identity.token_id, is_owner, rate)
            if len(self._usages) > _TOKENS_MAX:
                self._usages.popitem(last=False)
        self._usages.move_to_end(identity.token_id)
        return found

    def charge(self, usage: TokenUsage, request: Message, *, size_bytes: int = 0) -> None:
        """Raise OverloadedError if the token has sent too many requests. `size_bytes`: of this one."""
        kind = request.__class__
        if usage.is_owner and kind in _ALWAYS_FOR_OWNERS:
            return
        retry_s = usage.rate.try_take_units(
            _cost(request), now_s=self._clock.monotonic_s(), rejected_units=_REJECTION_COST
        )
        if retry_s:
            raise OverloadedError(
                f"the rate limit of token {usage.token_id} is exceeded",
                retry_after_s=round(retry_s + 0.01, 2),
            )
        if usage.in_flight >= IN_FLIGHT_MAX:
            raise OverloadedError(
                f"the limit of {IN_FLIGHT_MAX} requests in flight of token {usage.token_id} is reached",
                retry_after_s=_RETRY_AFTER_S,
            )
        if usage.in_flight and usage.in_flight_bytes + size_bytes > IN_FLIGHT_BYTES_MAX:
            raise OverloadedError(
                f"the limit of {IN_FLIGHT_BYTES_MAX} bytes of requests in flight of token {usage.token_id} "
                "is reached",
                retry_after_s=_RETRY_AFTER_S,
            )
        if kind in LISTS and usage.lists_in_flight >= LISTS_IN_FLIGHT_MAX:
            raise OverloadedError(
                f"the limit of {LISTS_IN_FLIGHT_MAX} lists in flight of token {usage.token_id} is reached",
                retry_after_s=_RETRY_AFTER_S,
            )

    async def run(self, usage: TokenUsage, handled: Awaitable[Message], *, size_bytes: int = 0) -> Message:
        """Await the reply to a request that was charged, and count it as in flight until then."""
        usage.in_flight += 1
        usage.in_flight_bytes += size_bytes
        try:
            return await handled
        finally:
            usage.in_flight -= 1
            usage.in_flight_bytes -= size_bytes

    async def run_list(
        self, usage: TokenUsage, request: Message, handle: Callable[[], Awaitable[Message]]
    ) -> Message:
        """Handle one of LISTS; some take turns."""
        usage.lists_in_flight += 1
        try:
            if request.__class__ not in _TAKES_TURNS:
                return await handle()
            async with self._turn:
                reply = await handle()
                await asyncio.sleep(0)
                return reply
        finally:
            usage.lists_in_flight -= 1


def _cost(request: Message) -> float:
    cost = _COSTS.get(request.__class__)
    if cost is not None:
        return cost
    if isinstance(request, (ListJobs, GetQueue)):
        return 2.0 + _UNITS_PER_JOB * min(max(request.limit, 1), LIST_MAX)
    return 1.0
