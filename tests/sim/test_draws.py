"""The stream is the published one: what is known of it elsewhere comes out here too."""

from __future__ import annotations

import pytest

from genie.sim.draws import Draws


def test_small_numbers_are_those_of_the_published_generator() -> None:
    draws = Draws(1)
    assert [draws.below(100) for _ in range(10)] == [81, 87, 47, 59, 81, 18, 25, 40, 56, 0]
    draws = Draws(1)
    assert [draws.below(2**31 - 1) for _ in range(2)] == [1298498081, 2019727887]


def test_a_power_of_two_is_cut_off_and_not_divided_by() -> None:
    draws, same = Draws(7), Draws(7)
    assert [draws.below(2**30) % 8 for _ in range(20)] == [same.below(8) for _ in range(20)]


def test_shuffling_and_permuting_are_those_of_the_published_runs() -> None:
    assert Draws(42).shuffled("abcdefgh") == list("fhegbdac")
    assert Draws(42).permutation(8) == [7, 5, 3, 4, 2, 1, 6, 0]


def test_skipping_is_drawing_without_looking() -> None:
    draws, skipping = Draws(5), Draws(5)
    drawn = [draws.below(1000) for _ in range(700)]
    skipping.skip(690)
    assert [skipping.below(1000) for _ in range(10)] == drawn[690:]


@pytest.mark.parametrize("count", [0, 1, 2, 50])
def test_nothing_is_lost_and_nothing_is_doubled(count: int) -> None:
    items = list(range(count))
    assert sorted(Draws(3).shuffled(items)) == sorted(Draws(3).permutation(count)) == items
    assert items == list(range(count))


def test_seed_0_is_a_seed_and_another_seed_another_stream() -> None:
    streams = [[draws.below(10**6) for _ in range(5)] for draws in (Draws(0), Draws(1), Draws(2**31))]
    assert streams[0] != streams[1] == streams[2]
    assert Draws(0)._bits63() == 8717895732742165505
