"""Policies by name: the built-in orders, and policies written by users in Python, which are isolated.

A user's policy is any object with the methods `within` and `among` of order.QueuePolicy. Two methods are
optional: `allowed(request, node)` is a filter that returns why jobs of a job class may not run on a node, or
"" (cluster/filters.py documents its arguments); `cost(running, now)` is the cost of preempting a running job:
the lowest is preempted first.

If a call raises, returns a wrong type, or exceeds its time budget, the policy is disabled, a built-in one
replaces it, and `disabled_reason` names the call and the job. Decisions are safe whatever a policy returns:
it only orders, filters and weighs. A call that does not return is ended by the guard, if there is one, which
raises PolicyTimeoutError inside it. Not isolated: a call that exhausts memory, ends the process, or modifies
Genie's own objects. Run policies that you do not trust in a separate process.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeAlias, TypeVar

from genie.errors import UsageError
from genie.scheduler.order import FairShare, Fifo, Key, OrderInputs, Priority, QueuePolicy
from genie.scheduler.preemption.victims import StartedJob, lost_work_cost
from genie.scheduler.request import JobRequest, NodeFacts

Clock: TypeAlias = Callable[[], float]
"""Monotonic seconds."""

PolicyFactory: TypeAlias = Callable[[], QueuePolicy]

CallGuard: TypeAlias = AbstractContextManager[object]
"""A reusable context manager around each call."""

POLICIES_MAX = 64
KEY_LENGTH_MAX = 16
"""Maximum length of a key."""
_ERROR_TEXT_CHARS_MAX = 200
_REQUIRED_METHODS_HINT = (
    "a policy needs within(request) and among(request, inputs); see genie/scheduler/policies.py"
)

BUILT_IN_POLICIES: Mapping[str, PolicyFactory] = MappingProxyType(
    {"fair": FairShare, "fifo": Fifo, "priority": Priority}
)

_Result = TypeVar("_Result")
_NO_GUARD: CallGuard = nullcontext()


class PolicyTimeoutError(BaseException):
    """Raised by a guard in a call that does not return. Not an Exception, so that a policy's handlers do not
    catch it."""


class PolicyRegistry:
    """The registry of policies."""

    def __init__(self) -> None:
        self._factories: dict[str, PolicyFactory] = dict(BUILT_IN_POLICIES)

    @property
    def names(self) -> list[str]:
        return sorted(self._factories)

    def register(self, name: str, factory: PolicyFactory) -> None:
        """Register a user's policy; `factory` is its class or a function. UsageError if the name exists."""
        if not name or name in self._factories:
            raise UsageError(f"policy '{name}' already exists" if name else "a policy needs a name")
        if len(self._factories) >= POLICIES_MAX:
            raise UsageError(f"cannot register policy '{name}': the maximum is {POLICIES_MAX} policies")
        self._factories[name] = factory

    def create(
        self, name: str, *, budget_s: float, clock: Clock, guard: CallGuard = _NO_GUARD
    ) -> QueuePolicy:
        """Create a policy for Rules.with_order(). UsageError if it is not registered or its factory fails."""
        if name not in self._factories:
            raise UsageError(f"unknown policy '{name}'", hint=f"known policies: {', '.join(self.names)}")
        if name in BUILT_IN_POLICIES:
            return self._factories[name]()
        try:
            policy = self._factories[name]()
        except (Exception, SystemExit) as error:
            raise UsageError(f"could not create policy '{name}': {_format_error(error)}") from error
        return IsolatedPolicy(policy, budget_s=budget_s, clock=clock, name=name, guard=guard)


class IsolatedPolicy:
    """A user's policy as a reliable QueuePolicy. `disabling_error` is the exception that disabled it."""

    def __init__(
        self,
        policy: QueuePolicy,
        *,
        budget_s: float,
        clock: Clock,
        name: str = "",
        fallback: QueuePolicy | None = None,
        guard: CallGuard = _NO_GUARD,
    ) -> None:
        self.name = name or type(policy).__name__
        for method in ("within", "among"):
            if not callable(getattr(policy, method, None)):
                raise UsageError(f"policy '{self.name}' has no method {method}", hint=_REQUIRED_METHODS_HINT)
        self._policy: Any = policy  # optional methods are looked up, and every result is checked
        self._fallback = fallback or FairShare()
        self._call_time_limit_s = budget_s
        self._clock = clock
        self._call_guard = guard
        self.disabled_reason = ""
        self.disabling_error: BaseException | None = None

    @property
    def has_node_filter(self) -> bool:
        return callable(getattr(self._policy, "allowed", None))

    def within(self, request: JobRequest) -> Key:
        return self._call_policy(
            "within",
            f"job {request.job_id}",
            lambda: self._policy.within(request),
            check=_parse_sort_key,
            fallback=lambda: self._fallback.within(request),
        )

    def among(self, request: JobRequest, inputs: OrderInputs) -> Key:
        return self._call_policy(
            "among",
            f"job {request.job_id}",
            lambda: self._policy.among(request, inputs),
            check=_parse_sort_key,
            fallback=lambda: self._fallback.among(request, inputs),
        )

    def allowed(self, request: JobRequest, node: NodeFacts) -> str:
        """As filters.NodeFilter. Without a filter, all nodes are allowed."""
        if not self.has_node_filter:
            return ""
        return self._call_policy(
            "allowed",
            f"jobs of {request.tenant} on node {node.node_id}",
            lambda: self._policy.allowed(request, node),
            check=_parse_exclusion_reason,
            fallback=lambda: "",
        )

    def cost(self, running: StartedJob, now: float) -> Key:
        """As victims.PreemptionCost."""
        if not callable(getattr(self._policy, "cost", None)):
            return lost_work_cost(running, now)
        return self._call_policy(
            "cost",
            f"job {running.request.job_id}",
            lambda: self._policy.cost(running, now),
            check=_parse_cost,
            fallback=lambda: lost_work_cost(running, now),
        )

    def _call_policy(
        self,
        method: str,
        subject: str,
        call: Callable[[], object],
        *,
        check: Callable[[object], _Result | _InvalidResult],
        fallback: Callable[[], _Result],
    ) -> _Result:
        if self.disabled_reason:
            return fallback()
        started = self._clock()
        try:
            with self._call_guard:
                result = check(call())
        except PolicyTimeoutError:
            return self._disable_and_use_fallback(f"{method}() for {subject} did not return", fallback)
        except (Exception, SystemExit) as error:
            self.disabling_error = error
            return self._disable_and_use_fallback(
                f"{method}() for {subject} raised {_format_error(error)}", fallback
            )
        took_s = self._clock() - started
        if isinstance(result, _InvalidResult):
            return self._disable_and_use_fallback(
                f"{method}() for {subject} returned {result.description}", fallback
            )
        if took_s > self._call_time_limit_s:
            slow = (
                f"{method}() for {subject} took {took_s:.3g} s; the limit is {self._call_time_limit_s:.3g} s"
            )
            return self._disable_and_use_fallback(slow, fallback)
        return result

    def _disable_and_use_fallback(self, reason: str, fallback: Callable[[], _Result]) -> _Result:
        replacement = type(self._fallback).__name__
        self.disabled_reason = f"policy '{self.name}' is disabled and replaced by {replacement}: {reason}"
        return fallback()


@dataclass(frozen=True)
class _InvalidResult:
    """Describes an invalid result."""

    description: str


def _parse_sort_key(result: object) -> Key | _InvalidResult:
    if not isinstance(result, tuple):
        return _InvalidResult(f"a {type(result).__name__} instead of a tuple of numbers")
    if len(result) > KEY_LENGTH_MAX:
        return _InvalidResult(f"a tuple of {len(result)} numbers; the maximum is {KEY_LENGTH_MAX}")
    numbers = [_to_plain_number(each) for each in result]
    invalid = [each for each in numbers if isinstance(each, _InvalidResult)]
    return invalid[0] if invalid else tuple(each for each in numbers if not isinstance(each, _InvalidResult))


def _parse_cost(result: object) -> Key | _InvalidResult:
    return _parse_sort_key((result,))


def _to_plain_number(value: object) -> float | _InvalidResult:
    """Convert subclasses of numbers, which may compare in any way, to plain numbers."""
    if not isinstance(value, int | float):
        return _InvalidResult(f"a {type(value).__name__} instead of a number")
    if not math.isfinite(value):
        return _InvalidResult("a number that is not finite")
    return int(value) if isinstance(value, int) else float(value)


def _parse_exclusion_reason(result: object) -> str | _InvalidResult:
    return (
        str(result)[:_ERROR_TEXT_CHARS_MAX]
        if isinstance(result, str)
        else _InvalidResult(f"a {type(result).__name__} instead of a string")
    )


def _format_error(error: BaseException) -> str:
    """A user's exception may raise when it is formatted."""
    try:
        return f"{type(error).__name__}: {error}"[:_ERROR_TEXT_CHARS_MAX]
    except Exception:
        return type(error).__name__
