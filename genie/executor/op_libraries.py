"""Loads the op libraries that the administrator of the node allows, and lists their ops.

A library runs with the rights of the executor, and its ops check their arguments as far as their authors
decided: the administrator is responsible for it. Does not decide which ops of torch are allowed (session.py).
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping

from genie.config.op_libraries import is_shared_object
from genie.errors import ConfigError

_SETTING = "agent.executor_op_libraries"


def load_op_libraries(libraries: Mapping[str, str]) -> frozenset[str]:
    """Return the names of the ops, with their namespace and without overload.

    `libraries`: the path of a shared object or the name of a Python module for each namespace. ConfigError if
    one cannot be loaded, defines no op in its namespace, or if the namespace belongs to torch.
    """
    allowed: set[str] = set()
    if not libraries:
        return frozenset()
    namespaces_of_torch = {name.partition("::")[0] for name in _op_names()}
    for namespace, library in libraries.items():
        if namespace in namespaces_of_torch:
            raise ConfigError(
                f"{_SETTING}: the namespace {namespace!r} belongs to torch",
                hint="name the namespace that the library defines",
            )
        _load(namespace, library)
        names = {name for name in _op_names() if name.startswith(f"{namespace}::")}
        if not names:
            raise ConfigError(f"{_SETTING}: {library} defines no op in the namespace {namespace!r}")
        allowed |= names
    return frozenset(allowed)


def _op_names() -> set[str]:
    import torch

    return {name.partition(".")[0] for name in torch._C._dispatch_get_all_op_names()}


def _load(namespace: str, library: str) -> None:
    import torch

    try:
        if is_shared_object(library):
            torch.ops.load_library(library)  # type: ignore[no-untyped-call]
        else:
            importlib.import_module(library)
    except (ImportError, OSError) as error:
        raise ConfigError(
            f"{_SETTING}: could not load {library} for the namespace {namespace!r}: {error}",
            hint="install it on the node for the Python and torch of the agent, or remove the setting",
        ) from error
