"""The compiled module of native/scheduler, typed by genie_scheduler.pyi.

Importing this is cheap: the library is compiled and loaded when one of its names is first used, and so is the
module that compiles it.
"""

from __future__ import annotations


def __getattr__(name: str) -> object:
    if name.startswith("__"):  # introspection must not start a compiler
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from genie.native import libraries

    value = globals()[name] = getattr(libraries.load("genie_scheduler"), name)
    return value
