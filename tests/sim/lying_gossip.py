"""Gossip of a compromised member: false states of all members, and controllers that do not exist.

None of it may end a job or free an accelerator. The lies continue for as long as the scenario runs.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

from genie.model.member import Member, MemberRole, MemberState
from genie.model.names import address_text
from genie.sim.cluster import CONTROLLER_PORT, NODE_GOSSIP_PORT, SERVER_GOSSIP_PORT, SimCluster
from genie.sim.gossip import GossipMedium
from genie.version import __version__

LIE_INTERVAL_S_MAX = 1.0
_SILENT_HOST = "127.0.77.7"
"""No machine has this address: connections to it time out."""


async def report_lies_periodically(cluster: SimCluster, medium: GossipMedium) -> None:
    """Let all members believe lies until cancelled."""
    cluster.world.set_power(_SILENT_HOST, is_on=False)
    rng = random.Random(cluster.seed)
    lies: tuple[Callable[[random.Random, SimCluster], list[Member]], ...] = (
        _every_node_is_dead,
        _every_member_is_alive,
        _one_member_has_a_random_state,
        _unknown_controllers_are_alive,
    )
    while True:
        for report in rng.choice(lies)(rng, cluster):
            medium.report_to_all(report)
        await asyncio.sleep(rng.uniform(0.05, LIE_INTERVAL_S_MAX))


def _every_node_is_dead(rng: random.Random, cluster: SimCluster) -> list[Member]:
    state = rng.choice((MemberState.DEAD, MemberState.SUSPECT))
    return [_describe_node(cluster, host, state) for host in cluster.node_hosts]


def _every_member_is_alive(rng: random.Random, cluster: SimCluster) -> list[Member]:
    return [
        *(_describe_node(cluster, host, MemberState.ALIVE) for host in cluster.node_hosts),
        *(_describe_server(host, host, MemberState.ALIVE) for host in cluster.controller_hosts),
    ]


def _one_member_has_a_random_state(rng: random.Random, cluster: SimCluster) -> list[Member]:
    state = rng.choice(list(MemberState))
    host = rng.choice([*cluster.node_hosts, *cluster.controller_hosts])
    if host in cluster.node_hosts:
        return [_describe_node(cluster, host, state)]
    return [_describe_server(host, host, state)]


def _unknown_controllers_are_alive(rng: random.Random, cluster: SimCluster) -> list[Member]:
    """Nothing responds at the first address, and a node, which refuses connections, at the second."""
    return [
        _describe_server("ghost", _SILENT_HOST, MemberState.ALIVE),
        _describe_server("impostor", rng.choice(cluster.node_hosts), MemberState.ALIVE),
    ]


def _describe_node(cluster: SimCluster, host: str, state: MemberState) -> Member:
    return Member(
        name=cluster.node_id(host),
        role=MemberRole.NODE,
        address=address_text(host, NODE_GOSSIP_PORT),
        state=state,
        since=0.0,
        release=__version__,
    )


def _describe_server(name: str, host: str, state: MemberState) -> Member:
    return Member(
        name=name,
        role=MemberRole.SERVER,
        address=address_text(host, SERVER_GOSSIP_PORT),
        state=state,
        since=0.0,
        release=__version__,
        controller_address=address_text(host, CONTROLLER_PORT),
    )
