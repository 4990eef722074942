"""The compiled module of native/scheduler, typed by genie_scheduler.pyi.

Importing this is cheap: the library is compiled and loaded when one of its names is first used.
"""

from __future__ import annotations

from genie.native import libraries


def __getattr__(name: str) -> object:
    if name.startswith("__"):  # introspection must not start a compiler
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(libraries.load("genie_scheduler"), name)
    return value
