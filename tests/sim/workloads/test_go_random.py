"""The generator reproduces known outputs of Go's math/rand."""

from __future__ import annotations

import pytest

from genie.sim.workloads.go_random import GoRandom


def test_random_below_matches_go() -> None:
    draws = GoRandom(1)
    assert [draws.random_below(100) for _ in range(10)] == [81, 87, 47, 59, 81, 18, 25, 40, 56, 0]
    draws = GoRandom(1)
    assert [draws.random_below(2**31 - 1) for _ in range(2)] == [1298498081, 2019727887]


def test_random_below_a_power_of_two_uses_the_low_bits() -> None:
    draws, same = GoRandom(7), GoRandom(7)
    assert [draws.random_below(2**30) % 8 for _ in range(20)] == [same.random_below(8) for _ in range(20)]


def test_shuffle_and_permutation_match_go() -> None:
    assert GoRandom(42).shuffled_copy("abcdefgh") == list("fhegbdac")
    assert GoRandom(42).permutation(8) == [7, 5, 3, 4, 2, 1, 6, 0]


def test_skipping_outputs_equals_drawing_them() -> None:
    draws, skipped = GoRandom(5), GoRandom(5)
    drawn = [draws.random_below(1000) for _ in range(700)]
    skipped.skip_outputs(690)
    assert [skipped.random_below(1000) for _ in range(10)] == drawn[690:]


@pytest.mark.parametrize("count", [0, 1, 2, 50])
def test_shuffle_and_permutation_keep_all_items(count: int) -> None:
    items = list(range(count))
    assert sorted(GoRandom(3).shuffled_copy(items)) == sorted(GoRandom(3).permutation(count)) == items
    assert items == list(range(count))


def test_random_numbers_depend_on_the_seed_modulo_2_31_minus_1() -> None:
    streams = [
        [draws.random_below(10**6) for _ in range(5)] for draws in (GoRandom(0), GoRandom(1), GoRandom(2**31))
    ]
    assert streams[0] != streams[1] == streams[2]
    assert GoRandom(0)._next_63_bits() == 8717895732742165505
