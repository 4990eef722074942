"""A planted defect, and the seeds that detect it (defects.py, adoption_defects.py, failover_defects.py)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

PlantDefect = Callable[[pytest.MonkeyPatch], None]


@dataclass(frozen=True)
class Defect:
    """A defect, and seeds that pass without it. With it, the violations of one of them contain
    `violation_text`: they are tried in turn until one does. There are several where few seeds detect it, so
    that not every change of the code requires new ones."""

    plant: PlantDefect
    kind: str
    faults: tuple[str, ...]
    seeds: tuple[int, ...]
    violation_text: str
