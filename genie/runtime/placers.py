"""Placers for the scheduler: the compiled ones where they are to be had, and plain ones otherwise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from genie.errors import NativeBuildError
from genie.runtime import native
from genie.scheduler.placement.plain import PlainPlacer
from genie.scheduler.placement.protocol import Placer, TypicalShape

MakeSeeded: TypeAlias = Callable[[str, int, Sequence[TypicalShape]], Placer]
"""Of a policy, from a seed and the typical requests."""


_HOW = "a controller does that in the background, once, in half a minute or so"
_SLOW = "decisions for many nodes are slow"


def placer_factory(*, build: bool = True) -> tuple[MakeSeeded, str]:
    """Native placers, or plain ones where those cannot be built, or are not and `build` is False; and which
    of the two."""
    try:
        if not build and not native.Workshop.of_this_installation().is_built("genie_scheduler"):
            return _plain, "plain"
        library = native.load("genie_scheduler")
    except NativeBuildError:
        return _plain, "plain"

    def make(policy: str, seed: int, typical: Sequence[TypicalShape]) -> Placer:
        shapes = [shape.as_tuple() for shape in typical] if policy == "fgd" else []
        made: Placer = library.Placement(policy, seed=seed, typical=shapes)
        return made

    return make, "native"


def why_plain() -> str:
    """Why plain placers decide for now, what follows from that, and what it takes to change it; empty when
    native ones do."""
    try:
        if native.Workshop.of_this_installation().is_built("genie_scheduler"):
            return ""
    except NativeBuildError as error:
        return f"{error.message}; {_SLOW}"
    if native.find_compiler() is None:
        return f"the scheduler's library is not compiled, and {native.no_compiler()}; {_SLOW}"
    return f"the scheduler's library is not compiled yet; {_HOW}, and until then {_SLOW}"


def _plain(policy: str, seed: int, typical: Sequence[TypicalShape]) -> Placer:
    return PlainPlacer(policy, typical=typical)
