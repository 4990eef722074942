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


def _plain(policy: str, seed: int, typical: Sequence[TypicalShape]) -> Placer:
    return PlainPlacer(policy, typical=typical)
