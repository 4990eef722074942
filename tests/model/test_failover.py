"""The timeouts follow from the bounds of a failover."""

from __future__ import annotations

import itertools

import pytest

from genie.config import AgentConfig, ControllerConfig
from genie.model.failover import (
    HELLO_READY_TIMEOUT_S,
    TOKEN_READ_TIMEOUT_S,
    FailoverBounds,
    attempt_timeout_s,
    campaign_interval_s,
    deadman_s,
    etcd_failover_bounds,
    heartbeat_timeout_s,
    lost_in_new_term_after_s,
    smallest_node_ttl_s,
)


def _default_bounds() -> FailoverBounds:
    config = ControllerConfig()
    return etcd_failover_bounds(
        node_ttl_s=config.node_ttl_s,
        leader_ttl_s=config.leader_ttl_s,
        etcd_election_timeout_s=config.etcd_election_timeout_s,
    )


def test_default_dead_man_time_covers_a_failover_with_an_election_of_etcd() -> None:
    assert _default_bounds().total_s <= deadman_s(ControllerConfig().node_ttl_s)


def test_default_node_is_lost_within_20_s() -> None:
    assert ControllerConfig().node_ttl_s <= 20.0


def test_default_node_is_lost_within_20_s_also_if_the_leader_is_lost_with_it() -> None:
    bounds = _default_bounds()
    assert bounds.takeover_s + lost_in_new_term_after_s(ControllerConfig().node_ttl_s, bounds) <= 20.0


@pytest.mark.parametrize("leader_ttl_s", [1.0, 3.0, 30.0])
@pytest.mark.parametrize("node_ttl_s", [1.0, 10.0, 19.5, 60.0])
def test_node_that_looks_for_a_new_leader_is_not_lost(node_ttl_s: float, leader_ttl_s: float) -> None:
    bounds = etcd_failover_bounds(
        node_ttl_s=node_ttl_s, leader_ttl_s=leader_ttl_s, etcd_election_timeout_s=1.0
    )
    lost_s = lost_in_new_term_after_s(node_ttl_s, bounds)
    assert min(node_ttl_s, bounds.heartbeat_s + bounds.discovery_s) <= lost_s <= node_ttl_s


def test_default_takeover_is_faster_without_an_election_of_etcd() -> None:
    bounds, config = _default_bounds(), ControllerConfig()
    assert bounds.takeover_s <= 8.0
    without_etcd_election_s = bounds.takeover_s - bounds.store_election_s - config.etcd_election_timeout_s
    assert without_etcd_election_s <= 5.0


@pytest.mark.parametrize("node_ttl_s", [10.0, 19.0, 60.0])
def test_controller_replies_to_hello_before_the_agent_gives_up(node_ttl_s: float) -> None:
    assert attempt_timeout_s(node_ttl_s) >= 2 * (HELLO_READY_TIMEOUT_S + TOKEN_READ_TIMEOUT_S)


def test_agent_looks_for_another_leader_before_there_is_one() -> None:
    timeout_s = heartbeat_timeout_s(
        node_ttl_s=ControllerConfig().node_ttl_s, configured_interval_s=AgentConfig().heartbeat_s
    )
    assert timeout_s <= ControllerConfig().leader_ttl_s


def test_bounds_are_described_by_name() -> None:
    assert _default_bounds().describe() == (
        "heartbeat 1 s + store election 2 s + leader lease 4.5 s + campaign 1.5 s + discovery 4.5 s"
    )


def test_smallest_time_to_live_is_sufficient_and_a_smaller_one_is_not() -> None:
    for leader_ttl_s, etcd_election_timeout_s in itertools.product((1.0, 3.0, 4.5, 30.0), (0.1, 1.0, 5.0)):
        settings = {"leader_ttl_s": leader_ttl_s, "etcd_election_timeout_s": etcd_election_timeout_s}
        smallest_s = smallest_node_ttl_s(**settings)
        for ttl_s, is_sufficient in ((smallest_s, True), (smallest_s + 100, True), (smallest_s - 0.2, False)):
            bounds = etcd_failover_bounds(node_ttl_s=ttl_s, **settings)
            assert (bounds.total_s <= deadman_s(ttl_s) + 1e-6) is is_sufficient, (settings, ttl_s)


def test_lease_of_etcd_has_whole_seconds_and_a_minimum() -> None:
    bounds = etcd_failover_bounds(node_ttl_s=30.0, leader_ttl_s=2.2, etcd_election_timeout_s=1.0)
    assert bounds.leader_lease_s == 3 + 1.0 + 0.5
    bounds = etcd_failover_bounds(node_ttl_s=30.0, leader_ttl_s=1.0, etcd_election_timeout_s=1.0)
    assert bounds.leader_lease_s == 2 + 1.0 + 0.5
    assert bounds.campaign_s == campaign_interval_s(1.0) + 1.0
