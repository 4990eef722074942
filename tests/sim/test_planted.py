"""The simulation detects planted defects: a seed passes, and fails when a safeguard is removed."""

from __future__ import annotations

import functools

import pytest

from tests.sim.defects import DEFECTS, find_violations, run_seed_with_faults


@pytest.mark.parametrize("name", DEFECTS)
def test_simulation_detects_a_planted_defect(name: str) -> None:
    defect = DEFECTS[name]
    found: list[str] = []
    for seed in defect.seeds:
        clean = _find_violations_without_defect(seed, defect.kind, defect.faults)
        assert clean == [], f"seed {seed} fails without the defect"
        found += find_violations(defect, seed)
        if any(defect.violation_text in violation for violation in found):
            return
    pytest.fail(f"no seed of {defect.seeds} detects it: {found}")


@functools.cache
def _find_violations_without_defect(seed: int, kind: str, faults: tuple[str, ...]) -> list[str]:
    """Runs each seed once; several defects have the same."""
    return run_seed_with_faults(seed, kind, faults)
