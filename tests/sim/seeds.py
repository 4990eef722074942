"""Seeds of one test: a few in `make test`, the others among the long tests."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from _pytest.mark import ParameterSet


def seed_parameters(few: Iterable[int], *, long: Iterable[int]) -> list[int | ParameterSet]:
    mark = pytest.mark.long("one more seed of a test that has others in `make test`")
    return [*few, *(pytest.param(seed, marks=mark) for seed in long)]
