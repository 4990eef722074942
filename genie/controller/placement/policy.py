"""The scheduling policy of the configuration: a built-in one, or a custom class MODULE:CLASS.

The simulator uses the same names. Custom policies are sandboxed in scheduler/policies.py.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

from genie.config import ControllerConfig
from genie.controller.placement.signal_timeout import SignalTimeout
from genie.errors import ConfigError, UsageError
from genie.processes.clock import Clock
from genie.scheduler.order import QueuePolicy
from genie.scheduler.policies import BUILT_IN_POLICIES, PolicyRegistry, PolicyTimeoutError

POLICY_CALL_TIMEOUT_S = 1.0
"""Timeout of one call of a custom policy."""


def make_configured_policy(config: ControllerConfig, *, clock: Clock) -> QueuePolicy:
    """Create the configured policy; ConfigError if it is unknown or cannot be created."""
    try:
        return create_policy_by_name(config.policy, budget_s=config.policy_budget_s, clock=clock.monotonic_s)
    except UsageError as error:
        raise ConfigError(f"controller.policy: {error.message}", hint=error.hint) from error


def create_policy_by_name(name: str, *, budget_s: float, clock: Callable[[], float]) -> QueuePolicy:
    """Create a policy by name; UsageError if it is unknown or cannot be created. One call may take `budget_s`
    seconds of `clock`."""
    if name in BUILT_IN_POLICIES:
        return BUILT_IN_POLICIES[name]()
    policies = PolicyRegistry()
    policies.register(name, _import_policy(name))
    return policies.create(
        name, budget_s=budget_s, clock=clock, guard=SignalTimeout(POLICY_CALL_TIMEOUT_S, PolicyTimeoutError)
    )


def _import_policy(name: str) -> type:
    module_name, _, class_name = name.partition(":")
    hint = f"use one of {', '.join(sorted(BUILT_IN_POLICIES))}, or MODULE:CLASS"
    if not module_name or not class_name:
        raise UsageError(f"there is no policy {name!r}", hint=hint)
    try:
        found = getattr(importlib.import_module(module_name), class_name)
    except (Exception, SystemExit) as error:  # a user's module may raise anything
        raise UsageError(f"{name} cannot be imported: {type(error).__name__}: {error}", hint=hint) from error
    if not isinstance(found, type):
        raise UsageError(f"{name} is not a class", hint=hint)
    return found
