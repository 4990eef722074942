"""Policies by name: the built-in orders, and those that users wrote in Python, behind a fence.

A user's policy is any object with `within` and `among` of order.Order. It may have two things more:
`allowed(request, node)`, a filter, says why a kind of jobs may not go on a node, or "" (filters.py: what it
is given, and when); `cost(running, now)` is what it costs to send a running job away: the lowest go first.

The fence: when a call raises, answers something of a wrong type, or takes longer than its budget, the policy
is out of use from then on, a built-in one takes over, and `fault` says what happened with which job. What is
decided is safe whatever a policy answers: it orders, rules out and weighs, and nothing else.
A call that does not return is ended by the guard, where there is one: it raises TooLongError in the middle of
it. Not fenced: a call that takes all memory or ends the process, and code that changes Genie's own objects on
purpose. Whoever lets others write policies runs them in a process that may be ended.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeAlias, TypeVar

from genie.errors import UsageError
from genie.scheduler.order import FairShare, Fifo, Key, Order, Priority, Scales
from genie.scheduler.request import NodeFacts, Request
from genie.scheduler.victims import Running, lost_work

Clock: TypeAlias = Callable[[], float]
"""Seconds that only grow."""

Factory: TypeAlias = Callable[[], Order]

Guard: TypeAlias = AbstractContextManager[object]
"""Around each call. Entered again and again."""

POLICIES_MAX = 64
KEY_MAX = 16
"""Numbers in a key."""
_TEXT_MAX = 200
_WHAT_IT_HAS = "it needs within(request) and among(request, scales); genie/scheduler/policies.py says more"

BUILT_IN: Mapping[str, Factory] = MappingProxyType({"fair": FairShare, "fifo": Fifo, "priority": Priority})

_Answer = TypeVar("_Answer")
_NO_GUARD: Guard = nullcontext()


class TooLongError(BaseException):
    """Raised by a guard in a call that does not return. No Exception: a policy's own handlers do not hold
    it."""


class Policies:
    """What policies there are."""

    def __init__(self) -> None:
        self._factories: dict[str, Factory] = dict(BUILT_IN)

    @property
    def names(self) -> list[str]:
        return sorted(self._factories)

    def register(self, name: str, factory: Factory) -> None:
        """A policy of a user; `factory` makes it, as a class does. UsageError when the name is taken."""
        if not name or name in self._factories:
            raise UsageError(f"there is a policy '{name}' already" if name else "a policy needs a name")
        if len(self._factories) >= POLICIES_MAX:
            raise UsageError(f"there are {POLICIES_MAX} policies already")
        self._factories[name] = factory

    def make(self, name: str, *, budget_s: float, clock: Clock, guard: Guard = _NO_GUARD) -> Order:
        """A new one, which a Scheduler takes through Rules.under(). UsageError when there is none, or it
        cannot be made."""
        if name not in self._factories:
            raise UsageError(f"there is no policy '{name}'", hint=f"there are {', '.join(self.names)}")
        if name in BUILT_IN:
            return self._factories[name]()
        try:
            made = self._factories[name]()
        except (Exception, SystemExit) as error:
            raise UsageError(f"the policy '{name}' cannot be made: {_told(error)}") from error
        return Fenced(made, budget_s=budget_s, clock=clock, name=name, guard=guard)


class Fenced:
    """A user's policy as an Order that can be relied on. `error` is what it raised, if it did."""

    def __init__(
        self,
        policy: Order,
        *,
        budget_s: float,
        clock: Clock,
        name: str = "",
        instead: Order | None = None,
        guard: Guard = _NO_GUARD,
    ) -> None:
        self.name = name or type(policy).__name__
        for method in ("within", "among"):
            if not callable(getattr(policy, method, None)):
                raise UsageError(f"the policy '{self.name}' has no method {method}", hint=_WHAT_IT_HAS)
        self._policy: Any = policy  # its other methods are looked for, and every answer is checked
        self._instead = instead or FairShare()
        self._budget_s = budget_s
        self._clock = clock
        self._guard = guard
        self.fault = ""
        self.error: BaseException | None = None

    @property
    def filters(self) -> bool:
        return callable(getattr(self._policy, "allowed", None))

    def within(self, request: Request) -> Key:
        return self._ask(
            "within",
            f"job {request.job_id}",
            lambda: self._policy.within(request),
            check=_key,
            instead=lambda: self._instead.within(request),
        )

    def among(self, request: Request, scales: Scales) -> Key:
        return self._ask(
            "among",
            f"job {request.job_id}",
            lambda: self._policy.among(request, scales),
            check=_key,
            instead=lambda: self._instead.among(request, scales),
        )

    def allowed(self, request: Request, node: NodeFacts) -> str:
        """As filters.Filter. Where the policy has no filter, all may go everywhere."""
        if not self.filters:
            return ""
        return self._ask(
            "allowed",
            f"jobs of {request.tenant} on node {node.node_id}",
            lambda: self._policy.allowed(request, node),
            check=_reason,
            instead=lambda: "",
        )

    def cost(self, running: Running, now: float) -> Key:
        """As victims.Cost."""
        if not callable(getattr(self._policy, "cost", None)):
            return lost_work(running, now)
        return self._ask(
            "cost",
            f"job {running.request.job_id}",
            lambda: self._policy.cost(running, now),
            check=_number,
            instead=lambda: lost_work(running, now),
        )

    def _ask(
        self,
        method: str,
        what: str,
        call: Callable[[], object],
        *,
        check: Callable[[object], _Answer | _Wrong],
        instead: Callable[[], _Answer],
    ) -> _Answer:
        if self.fault:
            return instead()
        started = self._clock()
        try:
            with self._guard:
                answer = check(call())
        except TooLongError:
            return self._out_of_use(f"{method}() for {what} did not return", instead)
        except (Exception, SystemExit) as error:
            self.error = error
            return self._out_of_use(f"{method}() for {what} raised {_told(error)}", instead)
        took_s = self._clock() - started
        if isinstance(answer, _Wrong):
            return self._out_of_use(f"{method}() for {what} answered {answer.what}", instead)
        if took_s > self._budget_s:
            slow = f"{method}() for {what} took {took_s:.3g} s, and may take {self._budget_s:.3g} s"
            return self._out_of_use(slow, instead)
        return answer

    def _out_of_use(self, what: str, instead: Callable[[], _Answer]) -> _Answer:
        taken_over = type(self._instead).__name__
        self.fault = f"the policy '{self.name}' is out of use, and {taken_over} decides: {what}"
        return instead()


@dataclass(frozen=True)
class _Wrong:
    """What came back instead of an answer."""

    what: str


def _key(answer: object) -> Key | _Wrong:
    if not isinstance(answer, tuple):
        return _Wrong(f"a {type(answer).__name__}, and not a tuple of numbers")
    if len(answer) > KEY_MAX:
        return _Wrong(f"a tuple of {len(answer)}, and {KEY_MAX} are allowed")
    numbers = [_plain(each) for each in answer]
    wrong = [each for each in numbers if isinstance(each, _Wrong)]
    return wrong[0] if wrong else tuple(each for each in numbers if not isinstance(each, _Wrong))


def _number(answer: object) -> Key | _Wrong:
    return _key((answer,))


def _plain(each: object) -> float | _Wrong:
    """Numbers of others' types may compare as they like: they are made plain ones."""
    if not isinstance(each, int | float):
        return _Wrong(f"a {type(each).__name__} where a number belongs")
    if not math.isfinite(each):
        return _Wrong("a number that is not finite")
    return int(each) if isinstance(each, int) else float(each)


def _reason(answer: object) -> str | _Wrong:
    return (
        str(answer)[:_TEXT_MAX]
        if isinstance(answer, str)
        else _Wrong(f"a {type(answer).__name__}, and not a text")
    )


def _told(error: BaseException) -> str:
    """In words; an error of a user's own may fail at that, too."""
    try:
        return f"{type(error).__name__}: {error}"[:_TEXT_MAX]
    except Exception:
        return type(error).__name__
