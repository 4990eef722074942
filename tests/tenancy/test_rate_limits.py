"""Rate limits: bursts, refill, debt, and the number of keys."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from genie.tenancy.rate_limits import RateLimit, RateLimits


def test_burst_is_allowed_and_refilled_with_time() -> None:
    limit = RateLimit(units_per_s=2.0, burst_units=4.0, now_s=0.0)
    assert [limit.take_units_or_get_wait_s(1.0, now_s=0.0) for _ in range(5)] == [0.0, 0.0, 0.0, 0.0, 0.5]
    assert limit.take_units_or_get_wait_s(1.0, now_s=0.5) == 0.0
    assert limit.take_units_or_get_wait_s(1.0, now_s=0.5) == 0.5


def test_rejections_that_are_charged_extend_the_wait_up_to_a_limit() -> None:
    limit = RateLimit(units_per_s=1.0, burst_units=2.0, now_s=0.0)
    assert limit.take_units_or_get_wait_s(2.0, now_s=0.0) == 0.0
    waits = [limit.take_units_or_get_wait_s(1.0, now_s=0.0, units_if_rejected=1.0) for _ in range(4)]
    assert waits == [2.0, 3.0, 3.0, 3.0]
    assert limit.is_debt_at_max
    assert limit.take_units_or_get_wait_s(1.0, now_s=3.0) == 0.0
    assert not limit.is_debt_at_max


@given(st.lists(st.tuples(st.floats(0.0, 2.0), st.floats(0.01, 3.0)), max_size=50))
def test_units_taken_never_exceed_the_burst_plus_the_average_rate(steps: list[tuple[float, float]]) -> None:
    limit = RateLimit(units_per_s=2.0, burst_units=3.0, now_s=0.0)
    now_s = taken = 0.0
    for pause_s, units in steps:
        now_s += pause_s
        retry_s = limit.take_units_or_get_wait_s(units, now_s=now_s)
        taken += 0.0 if retry_s else units
        assert taken <= 3.0 + 2.0 * now_s + 1e-6
        if retry_s:
            assert limit.take_units_or_get_wait_s(units, now_s=now_s + retry_s + 1e-9) == 0.0
            now_s += retry_s + 1e-9
            taken += units


def test_least_recently_used_keys_are_forgotten() -> None:
    limits = RateLimits(units_per_s=1.0, burst_units=1.0, keys_max=2)
    for key in ("a", "b", "a"):
        limits.get_limit(key, now_s=0.0).take_units_or_get_wait_s(1.0, now_s=0.0)
    limits.get_limit("c", now_s=0.0)
    assert limits.get_limit("a", now_s=0.0).take_units_or_get_wait_s(1.0, now_s=0.0) > 0
    assert limits.get_limit("b", now_s=0.0).take_units_or_get_wait_s(1.0, now_s=0.0) == 0.0
