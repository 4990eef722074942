"""The policy that a controller was told to decide by: a built-in one, or a class of the user's own."""

from __future__ import annotations

import importlib

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
    name, policies = config.policy, Policies()
    try:
        if name not in BUILT_IN:
            policies.register(name, _imported(name))
        return policies.make(
            name,
            budget_s=config.policy_budget_s,
            clock=clock.monotonic_s,
            guard=Alarm(HANGS_S, TooLongError),
        )
    except UsageError as error:
        raise ConfigError(f"controller.policy: {error.message}", hint=error.hint) from error


def _imported(name: str) -> type:
    module_name, _, class_name = name.partition(":")
    hint = f"one of {', '.join(sorted(BUILT_IN))}, or MODULE:CLASS of your own"
    if not module_name or not class_name:
        raise UsageError(f"there is no policy {name!r}", hint=hint)
    try:
        found = getattr(importlib.import_module(module_name), class_name)
    except Exception as error:  # a user's module may raise anything
        raise UsageError(f"{name} cannot be imported: {type(error).__name__}: {error}", hint=hint) from error
    if not isinstance(found, type):
        raise UsageError(f"{name} is not a class", hint=hint)
    return found
