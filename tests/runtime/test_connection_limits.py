"""Limits on connections: counts by address, replacement of strangers, and rates."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from genie.runtime.connection_limits import (
    CONNECTIONS_MAX,
    UNAUTHENTICATED_GRACE_S,
    ConnectionLimiter,
    ConnectionLimits,
    OpenConnection,
    address_rate_limit_key,
)

LIMITS = ConnectionLimits(
    connections_max=12,
    unauthenticated_max=6,
    unauthenticated_per_address_max=4,
    user_connections_max=6,
    owner_connections_reserved=1,
    handshakes_per_s=1.0,
    handshakes_burst=1e6,
)


def accept_connection(
    limiter: ConnectionLimiter, address: str, closed: list[str], now_s: float = 0.0
) -> object:
    return limiter.accept(address, now_s=now_s, close=lambda: closed.append(address))


@given(
    st.lists(st.tuples(st.sampled_from("abcd"), st.sampled_from(["open", "authenticate", "close"]))),
    st.sampled_from([0.0, UNAUTHENTICATED_GRACE_S]),
)
def test_counts_match_the_open_connections(steps: list[tuple[str, str]], step_s: float) -> None:
    limiter = ConnectionLimiter(LIMITS)
    now_s = 0.0
    opened: list[OpenConnection] = []
    replaced: list[str] = []
    for address, step in steps:
        now_s += step_s
        mine = [one for one in opened if one.address == address]
        if step == "open":
            found = limiter.accept(address, now_s=now_s, close=lambda: replaced.append("x"))
            if isinstance(found, OpenConnection):
                opened.append(found)
        elif mine and step == "authenticate":
            mine[0].set_authenticated()
        elif mine:
            mine[0].release()
            opened.remove(mine[0])
        assert limiter.open_count == len(opened) <= LIMITS.connections_max
        assert limiter.unauthenticated_count <= LIMITS.unauthenticated_max
    for one in opened:
        one.release()
    assert (limiter.open_count, limiter.unauthenticated_count, limiter._unauthenticated_by_address) == (
        0,
        0,
        {},
    )


def test_stranger_replaces_the_oldest_of_the_address_with_the_most() -> None:
    limiter, closed = ConnectionLimiter(LIMITS), list[str]()
    for address in "aaabbc":
        assert isinstance(accept_connection(limiter, address, closed), OpenConnection)
    assert accept_connection(limiter, "d", closed) == "the limit of 6 unauthenticated connections is reached"
    assert isinstance(accept_connection(limiter, "d", closed, now_s=UNAUTHENTICATED_GRACE_S), OpenConnection)
    assert closed == ["a"]
    assert limiter.unauthenticated_count == 6


def test_address_at_its_limit_is_rejected_and_others_are_not() -> None:
    limiter, closed = ConnectionLimiter(LIMITS), list[str]()
    kept = [accept_connection(limiter, "a", closed) for _ in range(4)]
    assert (
        accept_connection(limiter, "a", closed) == "the limit of unauthenticated connections of a is reached"
    )
    assert isinstance(accept_connection(limiter, "b", closed), OpenConnection)
    assert isinstance(kept[0], OpenConnection)
    kept[0].set_authenticated()
    assert isinstance(accept_connection(limiter, "a", closed), OpenConnection)
    assert isinstance(accept_connection(limiter, "a", closed, now_s=UNAUTHENTICATED_GRACE_S), OpenConnection)
    assert closed == ["a"], "the oldest one has had enough time"


def test_rate_is_limited_per_address() -> None:
    limiter, closed = ConnectionLimiter(replace(LIMITS, handshakes_burst=2.0)), list[str]()
    for _ in range(2):
        assert isinstance(accept_connection(limiter, "a", closed), OpenConnection)
    assert "new connections per second" in str(accept_connection(limiter, "a", closed))
    assert isinstance(accept_connection(limiter, "b", closed), OpenConnection)
    assert isinstance(accept_connection(limiter, "a", closed, now_s=1.0), OpenConnection)


def test_rejected_connections_do_not_use_up_the_rate() -> None:
    limiter, closed = ConnectionLimiter(replace(LIMITS, handshakes_burst=5.0)), list[str]()
    kept = [accept_connection(limiter, "a", closed) for _ in range(4)]
    for _ in range(10):
        assert (
            accept_connection(limiter, "a", closed)
            == "the limit of unauthenticated connections of a is reached"
        )
    assert isinstance(kept[0], OpenConnection)
    kept[0].set_authenticated()
    assert isinstance(accept_connection(limiter, "a", closed), OpenConnection)
    assert closed == []


def test_connection_above_the_rate_replaces_none() -> None:
    limiter, closed = ConnectionLimiter(replace(LIMITS, handshakes_burst=4.0)), list[str]()
    for _ in range(4):
        accept_connection(limiter, "a", closed)
    limiter._handshake_rates.get_limit("a", now_s=UNAUTHENTICATED_GRACE_S).take_units_or_get_wait_s(
        1.0, now_s=UNAUTHENTICATED_GRACE_S
    )
    assert "new connections per second" in str(
        accept_connection(limiter, "a", closed, now_s=UNAUTHENTICATED_GRACE_S)
    )

    assert closed == []
    assert limiter.unauthenticated_count == 4


@pytest.mark.parametrize("files", [64, 1024, 4096, 1 << 20])
def test_connection_limits_follow_from_the_open_file_limit(files: int) -> None:
    limits = ConnectionLimits.for_open_file_limit(files)
    assert 0 < limits.connections_max <= CONNECTIONS_MAX
    assert limits.user_connections_max < limits.authenticated_max < limits.connections_max
    assert 0 < limits.unauthenticated_per_address_max < limits.unauthenticated_max


@pytest.mark.parametrize(
    ("host", "key"),
    [
        ("10.0.0.7", "10.0.0.7"),
        ("::ffff:10.0.0.7", "10.0.0.7"),
        ("2001:db8:0:1:2:3:4:5", "2001:db8:0:1::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("unknown", "unknown"),
    ],
)
def test_addresses_of_one_ipv6_network_count_together(host: str, key: str) -> None:
    assert address_rate_limit_key(host) == key
