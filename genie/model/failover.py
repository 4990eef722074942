"""The bounds of a failover, and the timeouts that follow from them. Pure.

When the machine of the leader vanishes, an agent finds the next leader within `FailoverBounds.total_s`. The
dead-man time of its jobs, LEASE_TTL_SHARE of the node's time to live, must be at least that. The bounds
determine the timeouts, never the other way round (docs/decisions/0024-failover-bounds.md).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

LEASE_TTL_SHARE = 0.7
"""The dead-man time as a fraction of the node's time to live; the rest is for ending the processes."""
HELLO_READY_TIMEOUT_S = 0.25
"""How long the reply to Hello waits until a controller that starts knows whether it leads."""
TOKEN_READ_TIMEOUT_S = 0.5
"""How long the reply to Hello waits for the store, which a controller that does not lead must ask."""
TABLE_LOAD_S = 1.0
"""Allowance for a candidate to acquire the leader key and to read the tables."""
REGISTRATION_S = 0.5
"""Allowance for an agent to register with the new leader and to send its first heartbeat."""
ETCD_LEASE_CHECK_S = 0.5
"""How often etcd looks for expired leases."""
_ATTEMPT_S_MIN, _ATTEMPT_S_MAX = 0.2, 1.5
_BACKOFF_S_MIN, _BACKOFF_S_MAX = 0.05, 1.0
_HEARTBEAT_TIMEOUT_S_MAX = 2.0
_HEARTBEAT_INTERVAL_S_MAX = 1.0
_CAMPAIGN_INTERVAL_S_MAX = 0.5
_TTL_STEPS_PER_S = 10


@dataclass(frozen=True, kw_only=True)
class FailoverBounds:
    """The maximum durations of the steps after the last heartbeat that the leader acknowledged."""

    heartbeat_s: float
    """Until the leader vanishes: just before the next heartbeat."""
    store_election_s: float
    """Until etcd has a leader again, if its leader was on the same machine."""
    leader_lease_s: float
    """Until the leader key expires. A new leader of etcd first extends every lease to its full lifetime and
    an election timeout."""
    campaign_s: float
    """Until a candidate finds the key expired, acquires it and has read the tables."""
    discovery_s: float
    """Until the agent has registered: an attempt that began too early, a backoff, and another attempt. All
    controllers are tried at the same time, so the number of those that do not respond does not matter."""

    @property
    def total_s(self) -> float:
        return self.heartbeat_s + self.takeover_s + self.discovery_s

    @property
    def takeover_s(self) -> float:
        """From the failure until another controller accepts requests."""
        return self.store_election_s + self.leader_lease_s + self.campaign_s

    def describe(self) -> str:
        return " + ".join(
            f"{each.name.removesuffix('_s').replace('_', ' ')} {getattr(self, each.name):g} s"
            for each in fields(self)
        )


def etcd_failover_bounds(
    *, node_ttl_s: float, leader_ttl_s: float, etcd_election_timeout_s: float
) -> FailoverBounds:
    """The bounds with etcd, whose leader may be on the machine that vanishes. `etcd_election_timeout_s` is
    its --election-timeout; etcd waits up to twice as long before it elects a leader."""
    # etcd counts whole seconds, and raises short lifetimes to one and a half election timeouts.
    lease_s = math.ceil(max(leader_ttl_s, 1.5 * etcd_election_timeout_s))
    return FailoverBounds(
        heartbeat_s=heartbeat_interval_s_max(node_ttl_s),
        store_election_s=2 * etcd_election_timeout_s,
        leader_lease_s=lease_s + etcd_election_timeout_s + ETCD_LEASE_CHECK_S,
        campaign_s=campaign_interval_s(leader_ttl_s) + TABLE_LOAD_S,
        discovery_s=2 * attempt_timeout_s(node_ttl_s) + backoff_s_max(node_ttl_s) + REGISTRATION_S,
    )


def lost_in_new_term_after_s(node_ttl_s: float, bounds: FailoverBounds) -> float:
    """How long after the beginning of a term a node that has not registered in it is lost. Before that it was
    already without a leader for up to `bounds.takeover_s`; agents find a new leader within `discovery_s`."""
    shortest_s = bounds.heartbeat_s + bounds.discovery_s
    return min(max(node_ttl_s - bounds.takeover_s, shortest_s), node_ttl_s)


def deadman_s(node_ttl_s: float) -> float:
    """How long jobs run without contact to a leader."""
    return LEASE_TTL_SHARE * node_ttl_s


def smallest_node_ttl_s(*, leader_ttl_s: float, etcd_election_timeout_s: float) -> float:
    """The smallest time to live whose dead-man time covers a failover, rounded up to 0.1 s."""
    ttl_s = 0.0
    while True:  # converges: the bounds grow more slowly with the time to live than the dead-man time
        needed_s = etcd_failover_bounds(
            node_ttl_s=ttl_s, leader_ttl_s=leader_ttl_s, etcd_election_timeout_s=etcd_election_timeout_s
        ).total_s
        next_ttl_s = math.ceil(_TTL_STEPS_PER_S * needed_s / LEASE_TTL_SHARE - 1e-6) / _TTL_STEPS_PER_S
        if next_ttl_s <= ttl_s:
            return ttl_s
        ttl_s = next_ttl_s


def attempt_timeout_s(node_ttl_s: float) -> float:
    """How long an agent waits for a controller: to connect, and for the reply to Hello."""
    return min(max(0.15 * node_ttl_s, _ATTEMPT_S_MIN), _ATTEMPT_S_MAX)


def backoff_s_max(node_ttl_s: float) -> float:
    """The longest pause of an agent between two rounds of attempts."""
    return min(max(0.1 * node_ttl_s, _BACKOFF_S_MIN), _BACKOFF_S_MAX)


def heartbeat_interval_s_max(node_ttl_s: float) -> float:
    """The longest interval between heartbeats; caps the setting of the agent."""
    return min(0.2 * node_ttl_s, max(0.05 * node_ttl_s, _HEARTBEAT_INTERVAL_S_MAX))


def heartbeat_timeout_s(*, node_ttl_s: float, configured_interval_s: float) -> float:
    """How long an agent waits for the reply to a heartbeat. Shorter than a takeover, so that agents look for
    the next leader before there is one."""
    interval_s = min(configured_interval_s, heartbeat_interval_s_max(node_ttl_s))
    wanted_s = max(0.2 * node_ttl_s, 2 * configured_interval_s)
    return max(min(wanted_s, _HEARTBEAT_TIMEOUT_S_MAX), 2 * interval_s)


def campaign_interval_s(leader_ttl_s: float) -> float:
    """How often a controller that does not lead tries to."""
    return min(_CAMPAIGN_INTERVAL_S_MAX, leader_ttl_s / 6)
