"""312 seeds of the short scenario: faults, lying gossip and a hostile tenant harm no innocent tenant.

REGRESSION_SEEDS have failed before.
"""

from __future__ import annotations

import pytest

from tests.sim.run import try_seed
from tests.sim.scenario import SCENARIO_KINDS
from tests.sim.seeds import seed_parameters

SEEDS_OF_KIND = 24
_CHUNK = 8
REGRESSION_SEEDS = (
    ("hostile", 31002),  # two tokens of one tenant used all connections of users
    ("store", 42929),  # registrations waited for a store that hung after the end of a term
    ("mixed", 31029),  # a power loss after a node had joined again
)


@pytest.mark.parametrize("first", seed_parameters([0], long=range(_CHUNK, SEEDS_OF_KIND, _CHUNK)))
@pytest.mark.parametrize("kind", SCENARIO_KINDS)
def test_faults_and_hostile_tenants_harm_no_innocent_tenant(kind: str, first: int) -> None:
    results = [try_seed(seed, kind) for seed in range(first, first + _CHUNK)]
    failed = [result.describe() for result in results if result.violations]
    assert not failed, "\n".join(failed)


@pytest.mark.parametrize(("kind", "seed"), REGRESSION_SEEDS)
def test_seeds_that_have_failed_pass(kind: str, seed: int) -> None:
    result = try_seed(seed, kind)
    assert not result.violations, result.describe()
