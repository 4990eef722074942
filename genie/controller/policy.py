"""The policy that a controller was told to decide by: a built-in one, or a class of the user's own.

The simulator takes the same names. Not for: what a policy may do, and its fence (scheduler/policies.py)."""

from __future__ import annotations

import importlib
from collections.abc import Callable

from genie.config import ControllerConfig
from genie.errors import ConfigError, UsageError
from genie.runtime.alarm import Alarm
from genie.runtime.clock import Clock
from genie.scheduler.order import Order
from genie.scheduler.policies import BUILT_IN, Policies, TooLongError

HANGS_S = 1.0
"""After so long in one call it counts as hanging, and is interrupted."""


def make_policy(config: ControllerConfig, *, clock: Clock) -> Order:
    """ConfigError when there is none of that name, or it cannot be made."""
    try:
        return policy_named(config.policy, budget_s=config.policy_budget_s, clock=clock.monotonic_s)
    except UsageError as error:
        raise ConfigError(f"controller.policy: {error.message}", hint=error.hint) from error


def policy_named(name: str, *, budget_s: float, clock: Callable[[], float]) -> Order:
    """UsageError when there is none of that name, or it cannot be made. A call may take `budget_s` of
    what `clock` counts."""
    if name in BUILT_IN:
        return BUILT_IN[name]()
    policies = Policies()
    policies.register(name, _imported(name))
    return policies.make(name, budget_s=budget_s, clock=clock, guard=Alarm(HANGS_S, TooLongError))


def _imported(name: str) -> type:
    module_name, _, class_name = name.partition(":")
    hint = f"one of {', '.join(sorted(BUILT_IN))}, or MODULE:CLASS of your own"
    if not module_name or not class_name:
        raise UsageError(f"there is no policy {name!r}", hint=hint)
    try:
        found = getattr(importlib.import_module(module_name), class_name)
    except (Exception, SystemExit) as error:  # a user's module may raise anything
        raise UsageError(f"{name} cannot be imported: {type(error).__name__}: {error}", hint=hint) from error
    if not isinstance(found, type):
        raise UsageError(f"{name} is not a class", hint=hint)
    return found
