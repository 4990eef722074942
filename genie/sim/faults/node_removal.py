"""A fault of the simulation: the owner removes a node that is only isolated, and it joins again later.

Until it reaches a controller and is rejected, its jobs without a dead-man timer keep running; then they must
end.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from genie.errors import NodeError, NodeNotFoundError
from genie.model.messages import RemoveNode
from genie.sim.cluster import SimCluster

_ISOLATION_AFTER_REMOVAL_S_MAX = 5.0
_KILL_TIMEOUT_S = 8.0
"""For the node to reach a controller again, and to end its jobs with their grace period."""
_RETRY_INTERVAL_S = 0.5


async def remove_isolated_node(cluster: SimCluster, host: str) -> None:
    """Isolate a node, remove it as soon as the controller allows that, and let it join again."""
    if host in cluster.hosts_being_removed:
        return
    cluster.hosts_being_removed.add(host)
    await _isolate_and_remove(cluster, host)
    await _wait_until_jobs_have_ended(cluster, host)
    await cluster.rejoin_node(host)
    cluster.hosts_being_removed.discard(host)


async def _isolate_and_remove(cluster: SimCluster, host: str) -> None:
    world, node_id = cluster.world, cluster.node_id(host)
    for controller in cluster.controller_hosts:
        world.cut_link(host, controller)
    try:
        await _remove_node(cluster, node_id)
        await asyncio.sleep(world.random.uniform(0.0, _ISOLATION_AFTER_REMOVAL_S_MAX))
    finally:
        for controller in cluster.controller_hosts:
            world.heal_link(host, controller)


async def _remove_node(cluster: SimCluster, node_id: str) -> None:
    """Repeats the request until the controller allows it: first, jobs with a dead-man timer may still run."""
    with suppress(NodeNotFoundError):  # removed already; the reply was lost
        while True:
            try:
                await cluster.send_request(RemoveNode(node_id=node_id))
                return
            except NodeError as error:
                if isinstance(error, NodeNotFoundError):
                    raise
            await asyncio.sleep(_RETRY_INTERVAL_S)


async def _wait_until_jobs_have_ended(cluster: SimCluster, host: str) -> None:
    deadline_s = cluster.world.now_s + _KILL_TIMEOUT_S
    while processes := [
        one for one in cluster.machines.live_processes(host) if one.survives_sigkill_until_s is None
    ]:
        if not _can_reach_leader(cluster, host) or any(one.termination_reason for one in processes):
            deadline_s = cluster.world.now_s + _KILL_TIMEOUT_S
        if cluster.world.now_s > deadline_s:
            cluster.machines.report_violation(f"jobs of a removed node still run: {processes}")
            return
        await asyncio.sleep(_RETRY_INTERVAL_S)


def _can_reach_leader(cluster: SimCluster, host: str) -> bool:
    """Whether the agent of this host runs and no fault separates it from the leader."""
    world = cluster.world
    leader = next((each for each in cluster.controller_hosts if cluster.is_leader(each)), None)
    if leader is None or not cluster.is_up(host):
        return False
    is_any_cut = world.is_link_cut(host, leader) or world.is_link_cut(leader, host)
    return not is_any_cut and not world.is_paused(host) and not world.is_paused(leader)
