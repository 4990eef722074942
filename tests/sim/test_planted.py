"""The simulation detects planted defects: a seed passes, and fails when a safeguard is removed."""

from __future__ import annotations

import pytest

from tests.sim.defects import DEFECTS, find_violations


@pytest.mark.parametrize("name", DEFECTS)
def test_simulation_detects_a_planted_defect(name: str) -> None:
    defect = DEFECTS[name]
    for seed in defect.seeds:
        clean = find_violations(defect, seed, planted=False)
        assert clean == [], f"seed {seed} fails without the defect"
    found: list[str] = []
    for seed in defect.seeds:
        found += find_violations(defect, seed, planted=True)
        if any(defect.violation_text in violation for violation in found):
            return
    pytest.fail(f"no seed of {defect.seeds} detects it: {found}")
