"""The connection to whichever controller leads: found, kept, found again. Not for: what is said over it.

Every round asks the known controllers in turn. What they answer is also evidence: when each of
them says that it does not lead, nobody can be giving this node's holdings away (lease.py).
"""

from __future__ import annotations

import enum
import logging
import random
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TypeVar

from genie.errors import (
    ConnectionLostError,
    FencedError,
    GenieError,
    NothingListensError,
    NotLeaderError,
)
from genie.model.messages import AGENT_REQUESTS, Message, Request
from genie.model.names import parse_endpoint
from genie.runtime import rpc
from genie.runtime.clock import Clock
from genie.runtime.credentials import Access, greet
from genie.runtime.network import Network

_log = logging.getLogger(__name__)
_Reply = TypeVar("_Reply", bound=Message)

BACKOFF_S_MIN = 0.05
CONTROLLERS_MAX = 16
PROGRAM = "agent"


class _Verdict(enum.Enum):
    ATTENDED = enum.auto()
    NOT_LEADING = enum.auto()
    SILENT = enum.auto()
    """No answer, or one that says nothing about who leads."""


class Link:
    """`access` may be replaced at any time (a renewed certificate); it counts from the next connection on."""

    def __init__(
        self, access: Access, *, network: Network, clock: Clock, rng: random.Random, handler: rpc.Handler
    ) -> None:
        self.access = access
        self.endpoints: tuple[tuple[str, int], ...] = ((access.host, access.port),)
        """Every controller that is known; the one that led last comes first."""
        self.timeout_s = 5.0
        """For connecting and for the greeting."""
        self.backoff_s_max = 1.0
        self._network = network
        self._clock = clock
        self._rng = rng
        self._handler = handler
        self._peer: rpc.Peer | None = None
        self.was_taken = False
        """Whether a controller has ever registered this node: from then on no refusal is final."""

    @property
    def is_up(self) -> bool:
        return self._peer is not None and not self._peer.is_closed

    async def call(self, request: Request[_Reply], *, timeout_s: float) -> _Reply:
        """Asks the leader over the present connection; ConnectionLostError when there is none."""
        if self._peer is None:
            raise ConnectionLostError("there is no connection to the controller at the moment")
        return await self._peer.call(request, timeout_s=timeout_s)

    async def run(
        self, attend: Callable[[rpc.Peer], Awaitable[None]], nobody_leads: Callable[[float], None]
    ) -> None:
        """For ever. `attend` gets a greeted connection to a leader and returns when that no longer leads.

        Raises what makes no sense to try again: FencedError at any time, and a refusal (token,
        certificate, version) as long as no controller has ever taken us.
        """
        delay_s = BACKOFF_S_MIN
        while True:
            began_s = self._clock.monotonic_s()
            verdicts = await self._round(attend)
            if _Verdict.ATTENDED in verdicts:
                if self._clock.monotonic_s() - began_s > self.backoff_s_max:
                    delay_s = BACKOFF_S_MIN
            elif _Verdict.SILENT not in verdicts:
                nobody_leads(began_s)
            await self._clock.sleep(delay_s * self._rng.uniform(0.5, 1.0))
            delay_s = min(delay_s * 2, self.backoff_s_max)

    async def _round(self, attend: Callable[[rpc.Peer], Awaitable[None]]) -> list[_Verdict]:
        verdicts: list[_Verdict] = []
        for endpoint in self.endpoints:
            verdicts.append(await self._try(endpoint, attend))
            if verdicts[-1] is _Verdict.ATTENDED:
                break
        return verdicts

    def _learn(self, controllers: tuple[str, ...]) -> None:
        """A controller that does not lead may know of the one that does. Nothing is ever unlearnt here."""
        told = (parse_endpoint(text) for text in controllers[:CONTROLLERS_MAX])
        self.endpoints = tuple(dict.fromkeys((*self.endpoints, *told)))[:CONTROLLERS_MAX]

    async def _try(
        self, endpoint: tuple[str, int], attend: Callable[[rpc.Peer], Awaitable[None]]
    ) -> _Verdict:
        host, port = endpoint
        attended = False
        try:
            async with greet(
                self._network,
                replace(self.access, host=host, port=port),
                timeout_s=self.timeout_s,
                program=PROGRAM,
                requests=AGENT_REQUESTS,
                handler=self._handler,
            ) as (peer, welcome):
                self._learn(welcome.controllers)
                if not welcome.leading:
                    return _Verdict.NOT_LEADING
                self._peer = peer
                self.endpoints = (endpoint, *(one for one in self.endpoints if one != endpoint))
                attended = True
                await attend(peer)
        except (NotLeaderError, NothingListensError) as error:
            _log.debug("%s:%d: %s", host, port, error)
            return _Verdict.ATTENDED if attended else _Verdict.NOT_LEADING
        except FencedError:
            raise
        except GenieError as error:
            if not error.retryable and not self.was_taken:
                raise
            _log.warning("controller %s:%d: %s", host, port, error)
            return _Verdict.ATTENDED if attended else _Verdict.SILENT
        finally:
            self._peer = None
        return _Verdict.ATTENDED
