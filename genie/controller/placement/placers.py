"""Placers for the scheduler: native ones if they are compiled, plain Python ones otherwise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from genie.errors import NativeBuildError
from genie.native import genie_scheduler, libraries
from genie.scheduler.placement.protocol import Placer, TypicalShape
from genie.scheduler.placement.python_placer import PythonPlacer

MakeSeededPlacer: TypeAlias = Callable[[str, int, Sequence[TypicalShape]], Placer]
"""Creates a placer from a policy name, a seed and the typical requests."""


_BACKGROUND_BUILD_TEXT = "the controller compiles it in the background, once, in about half a minute"
_SLOW_SCHEDULING_TEXT = "scheduling for many nodes is slow"
# Cached because is_built() reads all sources. A process has one build cache.
_build_caches_with_library: set[libraries.BuildCache] = set()


def placer_factory(*, build: bool = True) -> tuple[MakeSeededPlacer, str]:
    """Return a factory of placers and its kind: "native", or "plain" if the library cannot be built, or is
    not built yet and `build` is False."""
    try:
        if not build and not _is_library_built():
            return _make_plain_placer, "plain"
        libraries.load("genie_scheduler")
    except NativeBuildError:
        return _make_plain_placer, "plain"

    def make(policy: str, seed: int, typical: Sequence[TypicalShape]) -> Placer:
        shapes = [shape.as_tuple() for shape in typical] if policy == "fgd" else []
        return genie_scheduler.Placer(policy, seed=seed, typical=shapes)

    return make, "native"


def _is_library_built() -> bool:
    build_cache = libraries.BuildCache.of_this_installation()
    if build_cache not in _build_caches_with_library and build_cache.is_built("genie_scheduler"):
        _build_caches_with_library.add(build_cache)
    return build_cache in _build_caches_with_library


def why_scheduler_not_compiled() -> str:
    """Why plain placers are used, the consequence, and the remedy; empty when native ones are used."""
    try:
        if libraries.BuildCache.of_this_installation().is_built("genie_scheduler"):
            return ""
    except NativeBuildError as error:
        return f"{error.message}; {_SLOW_SCHEDULING_TEXT}"
    if libraries.find_compiler() is None:
        why = f"not compiled, and {libraries.missing_compiler_reason()}"
        return f"the scheduler's library is {why}; {_SLOW_SCHEDULING_TEXT}"
    return (
        f"the scheduler's library is not compiled yet; {_BACKGROUND_BUILD_TEXT}; "
        f"until then {_SLOW_SCHEDULING_TEXT}"
    )


def _make_plain_placer(policy: str, seed: int, typical_shapes: Sequence[TypicalShape]) -> Placer:
    return PythonPlacer(policy, typical=typical_shapes)
