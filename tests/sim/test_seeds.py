"""312 seeds of the short scenario: faults, lying gossip and a hostile tenant harm no innocent tenant."""

from __future__ import annotations

import pytest

from tests.sim.run import try_seed
from tests.sim.scenario import SCENARIO_KINDS
from tests.sim.seeds import seed_parameters

SEEDS_OF_KIND = 24
_CHUNK = 8


@pytest.mark.parametrize("first", seed_parameters([0], long=range(_CHUNK, SEEDS_OF_KIND, _CHUNK)))
@pytest.mark.parametrize("kind", SCENARIO_KINDS)
def test_faults_and_hostile_tenants_harm_no_innocent_tenant(kind: str, first: int) -> None:
    results = [try_seed(seed, kind) for seed in range(first, first + _CHUNK)]
    failed = [result.describe() for result in results if result.violations]
    assert not failed, "\n".join(failed)
