"""Injects seeded faults into a simulated cluster: partitions, pauses, crashes, power and store outages, slow
and full disks, clock steps.

`power_leader` takes the power from the machine of the leading controller, `power_leader_and_store` also from
the leader of the store: connections to it time out. These end no job, and neither does `hang_store`, an
outage of the store for all controllers. RECOVERY_FAULTS are in faults/.
`upgrade_node` and `upgrade_controller` restart a host with the other one of two releases.

Each fault ends by itself; after `inject_faults` the network is healed and everything runs. Owner actions
(removed accelerators, quotas) persist until `undo_owner_actions`. Faults that may end jobs are recorded in
`SimCluster.faults`. The actions of a hostile tenant are in hostile.py.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import TypeVar

from genie.agent.jobs import CONTACT_LOST_REASON
from genie.errors import GenieError
from genie.model.messages import EmptyNode, Message, RemoveQuota, Request, SetQuota, UndrainNode
from genie.model.tenant import QuotaRecord
from genie.sim.cluster import FaultWindow, SimCluster
from genie.sim.faults import hostile
from genie.sim.faults.node_removal import remove_isolated_node
from genie.sim.faults.outages import (
    CLUSTER_FAULTS,
    count_control_plane_fault,
    hanging_store,
    simulate_store_election,
)
from genie.sim.faults.restores import restore_beside_old_controller, restore_store

_log = logging.getLogger(__name__)
_Reply = TypeVar("_Reply", bound=Message)

_STORE_HANG_DURATION_FACTOR = 3.0
_LONG_OUTAGES = frozenset(("isolate_node", "hang_agent"))
"""They last longer than it takes to reclaim jobs."""
_CONTROLLER_STARTUP_TIME_S = 2.0
_DRAINED_NODE_PAUSE_S = 8.0
"""The node is suspect, and its jobs survive."""
_DRAIN_AFTER_CRASH_S = 25.0
QUOTA_TENANTS = ("red", "blue")
"""Tenants that get quotas."""
CONTROLLER_FAULTS = ("restart_controller",)
MIXED_FAULTS = (
    "cut_node",
    "pause_node",
    "crash_node",
    "power_node",
    "freeze_node",
    "drift",
    "restart_controller",
    "pause_controller",
    "lose_store",
)
NETWORK_FAULTS = ("cut_node", "cut_one_way", "reorder", "duplicate", "restart_controller")
OUTAGE_FAULTS = ("isolate_node", "hang_agent", "remove_node", "freeze_node", "restart_controller")
"""Outages of nodes that outlast the time until restartable jobs are reclaimed."""
DISK_FAULTS = ("slow_disk", "full_disk", "torn_write", "crash_node", "restart_controller")
TIME_FAULTS = (
    "clock_step",
    "step_controller",
    "drift",
    "pause_node",
    "freeze_node",
    "restart_controller",
)
STORE_FAULTS = (
    *("slow_store", "slow_load", "fail_back", "lose_store", "lose_reply", "restart_controller", "hang_store"),
)
LOCK_FAULTS = (
    *("restart_controller", "pause_controller", "step_controller", "lose_store", "lose_reply"),
    *("slow_store", "hang_store"),
)
POWER_FAULTS = ("power_leader", "power_leader_and_store", "hang_store", "power_node", "crash_node", "drain")
SKEW_FAULTS = ("upgrade_node", "upgrade_controller", "restart_controller", "cut_node", "lose_store")
RECOVERY_FAULTS = {
    **CLUSTER_FAULTS,
    "restore": restore_store,
    "restore_beside_old_controller": restore_beside_old_controller,
}
DRAIN_FAULTS = (
    *("drain", "drain", "drain_paused_node", "pause_node", "crash_node"),
    *("restart_controller", "fail_back", "lose_store", "lose_reply"),
)
FAULTS_ENDING_JOBS_ON_NODE = frozenset(
    (
        *("power_node", "torn_write"),
        *("change_gpus", "change_gpus_on_restart", "remove_node"),
    )
)
"""Faults that may end the jobs of their node."""
AGENT_CRASHES = frozenset(("crash_node", "upgrade_node"))
"""Only the dead-man timer ends a job, if the agent does not return in time."""
FAULTS_ENDING_RESTARTABLE_JOBS_ON_NODE = frozenset(
    (
        *("cut_node", "cut_one_way", "isolate_node", "hang_agent"),
        *("pause_node", "freeze_node", "drift", "drain_paused_node"),
        *AGENT_CRASHES,
    )
)
"""Outages of a node: restartable jobs end at the dead-man time, all others go on."""
FAULTS_ENDING_ALL_RESTARTABLE_JOBS = frozenset(("pause_controller",))
OWNER_ACTIONS = ("drain", "change_gpus", "change_gpus_on_restart", "quota")
"""Actions of an owner that invalidate existing placements."""
MIXED_FAULTS_AND_OWNER_ACTIONS = (*MIXED_FAULTS, "lose_reply", *OWNER_ACTIONS)


async def inject_faults(
    cluster: SimCluster,
    *,
    duration_s: float,
    mean_interval_s: float,
    kinds: tuple[str, ...],
    fault_duration_s_max: float = 25.0,
) -> None:
    """Inject random faults of these kinds for `duration_s`, then heal the network and restart all hosts."""
    world = cluster.world
    end_s = world.now_s + duration_s
    async with asyncio.TaskGroup() as faults:
        while world.now_s < end_s:
            await asyncio.sleep(world.random.expovariate(1 / mean_interval_s))
            kind = world.random.choice(kinds)
            node = world.random.choice(cluster.node_hosts)
            controller = world.random.choice(cluster.controller_hosts)
            lasts_s = world.random.uniform(0.2, fault_duration_s_max)
            _log.info(
                "t=%.2f s: fault %s (node %s, controller %s) for %.1f s",
                world.now_s,
                kind,
                node,
                controller,
                lasts_s,
            )
            _record_fault_window(cluster, kind, node, lasts_s)
            faults.create_task(_inject_and_end_fault(cluster, kind, node, controller, lasts_s))
    world.heal_links_and_clocks()
    for host in (*cluster.controller_hosts, *cluster.node_hosts):
        cluster.restart(host)


def _record_fault_window(cluster: SimCluster, kind: str, node: str, duration_s: float) -> None:
    ends_any_job = kind in FAULTS_ENDING_JOBS_ON_NODE
    hosts = {node} if ends_any_job or kind in FAULTS_ENDING_RESTARTABLE_JOBS_ON_NODE else set()
    if kind in FAULTS_ENDING_ALL_RESTARTABLE_JOBS:
        hosts = set(cluster.node_hosts)
    now_s = cluster.world.now_s
    # The rate of a clock is changed until another fault changes it again.
    end_s = float("inf") if kind == "drift" else now_s + duration_s + _extra_duration_s(cluster, kind)
    cluster.faults.append(
        FaultWindow(
            kind,
            frozenset(hosts),
            now_s,
            end_s,
            ends_only_restartable_jobs=not ends_any_job,
            termination_reason=CONTACT_LOST_REASON if kind in AGENT_CRASHES else "",
        )
    )


def _extra_duration_s(cluster: SimCluster, kind: str) -> float:
    """How long a fault lasts in addition, because it must outlast the time until jobs are reclaimed."""
    reclaim_s = cluster.config.node_ttl_s + cluster.config.node_reclaim_grace_s
    if kind == "remove_node":
        return 2 * reclaim_s
    return reclaim_s if kind in _LONG_OUTAGES else 0.0


async def undo_owner_actions(cluster: SimCluster) -> None:
    """Restore all accelerators, undrain all nodes and remove all quotas."""
    for host in cluster.node_hosts:
        cluster.set_gpus(host, range(cluster.gpus_per_node))
        await _send_request_ignoring_errors(cluster, UndrainNode(node_id=cluster.node_id(host)))
    for tenant in QUOTA_TENANTS:
        await _send_request_ignoring_errors(cluster, RemoveQuota(tenant=tenant))


async def _send_request_ignoring_errors(cluster: SimCluster, request: Request[_Reply]) -> None:
    """Send a request and ignore errors: it may have been applied already, with the reply lost."""
    with suppress(GenieError):
        await cluster.send_request(request)


async def _inject_and_end_fault(
    cluster: SimCluster, kind: str, node: str, controller: str, duration_s: float
) -> None:
    world = cluster.world
    match kind:
        case _ if kind in hostile.HOSTILE_ACTIONS:
            await hostile.HOSTILE_ACTIONS[kind](cluster, node, duration_s)
        case _ if kind in RECOVERY_FAULTS:
            await RECOVERY_FAULTS[kind](cluster, kind, duration_s)
        case "cut_node" | "cut_one_way":
            ends = (node, controller) if world.random.random() < 0.5 else (controller, node)
            world.cut_link(*ends, both_directions=kind == "cut_node")
            await asyncio.sleep(duration_s)
            world.heal_link(*ends, both_directions=kind == "cut_node")
        case "isolate_node" | "remove_node" | "hang_agent" | "freeze_node":
            await _inject_outage_of_node(cluster, kind, node, duration_s + _extra_duration_s(cluster, kind))
        case "reorder" | "duplicate":
            await _inject_frame_fault(cluster, kind, duration_s)
        case "slow_disk" | "full_disk" | "torn_write":
            await _inject_disk_fault(cluster, kind, node, duration_s)
        case "clock_step" | "step_controller":
            host = node if kind == "clock_step" else controller
            world.step_wall_clock(
                host, world.random.choice((-1, 1)) * world.random.choice((60.0, 3600.0, 86400.0))
            )
        case "slow_store" | "slow_load":
            await _slow_store_of_controller(cluster, kind, controller, duration_s)
        case "fail_back":
            await _force_leader_failback(cluster)
        case "pause_node" | "pause_controller":
            world.pause_host(node if kind == "pause_node" else controller, duration_s)
            await asyncio.sleep(duration_s)
        case "drift":
            world.set_clock_rate(node, world.random.choice((0.9, 1.0, 1.1)))
        case "lose_store":
            cluster.set_store_available(controller, available=False)
            await asyncio.sleep(duration_s)
            if cluster.is_up(controller):
                cluster.set_store_available(controller, available=True)
        case "hang_store":
            await _hang_store(cluster, duration_s)
        case "power_leader" | "power_leader_and_store":
            await _power_off_leader(cluster, duration_s, with_store=kind == "power_leader_and_store")
        case "lose_reply":
            cluster.lose_next_commit_reply(controller)
        case "drain" | "drain_paused_node":
            await _drain_node(cluster, node, duration_s, while_paused=kind == "drain_paused_node")
        case "quota":
            gpus = world.random.choice((0.0, 1.0, 2.5, 4.0, None))
            quota = QuotaRecord(tenant=world.random.choice(QUOTA_TENANTS), gpus=gpus, weight=duration_s)
            await _send_request_ignoring_errors(cluster, SetQuota(quota=quota))
        case "change_gpus" | "change_gpus_on_restart":
            await _change_gpus_of_node(cluster, node, duration_s, on_restart=kind == "change_gpus_on_restart")
        case "crash_node" | "power_node" | "upgrade_node":
            await _crash_and_restart(cluster, kind, node, duration_s)
        case "restart_controller" | "upgrade_controller":
            await _crash_and_restart(cluster, kind, controller, duration_s)


async def _drain_node(cluster: SimCluster, node: str, duration_s: float, *, while_paused: bool) -> None:
    if while_paused:
        await _drain_paused_node(cluster, node, duration_s)
    else:
        await _start_drain(cluster, node)
        await asyncio.sleep(duration_s)
        await _end_drain(cluster, node)


async def _drain_paused_node(cluster: SimCluster, node: str, duration_s: float) -> None:
    """Drain a node that sends no heartbeats, and crash the leader before the node continues: the next leader
    must move the jobs."""
    cluster.world.pause_host(node, _DRAINED_NODE_PAUSE_S)
    await asyncio.sleep(_DRAINED_NODE_PAUSE_S - 1.0)
    await _start_drain(cluster, node)
    leader = next((host for host in cluster.controller_hosts if cluster.is_leader(host)), None)
    if leader is not None:
        cluster.crash(leader)
    await asyncio.sleep(duration_s)
    if leader is not None:
        cluster.restart(leader)
    await asyncio.sleep(max(_DRAIN_AFTER_CRASH_S - duration_s, 0.0))
    await _end_drain(cluster, node)


async def _start_drain(cluster: SimCluster, node: str) -> None:
    cluster.drain_count_by_host[node] += 1
    await _send_request_ignoring_errors(cluster, EmptyNode(node_id=cluster.node_id(node)))


async def _end_drain(cluster: SimCluster, node: str) -> None:
    """Undrain a node, unless another fault drains it, too."""
    cluster.drain_count_by_host[node] -= 1
    if not cluster.drain_count_by_host[node]:
        await _send_request_ignoring_errors(cluster, UndrainNode(node_id=cluster.node_id(node)))


async def _crash_and_restart(cluster: SimCluster, kind: str, host: str, duration_s: float) -> None:
    """Crash a host and restart it; an upgrade restarts it with the other one of two releases."""
    cluster.crash(host, power_off=kind == "power_node")
    if kind in ("upgrade_node", "upgrade_controller"):
        cluster.world.hosts_of_next_release ^= {host}
    await asyncio.sleep(duration_s)
    cluster.restart(host)


async def _inject_outage_of_node(cluster: SimCluster, kind: str, node: str, duration_s: float) -> None:
    match kind:
        case "isolate_node":
            await _isolate_node(cluster, node, duration_s)
        case "remove_node":
            await remove_isolated_node(cluster, node)
        case "hang_agent":
            cluster.world.pause_host(node, duration_s)
            await asyncio.sleep(duration_s)
        case "freeze_node":
            cluster.world.freeze_host(node, duration_s)
            await asyncio.sleep(duration_s)


async def _change_gpus_of_node(
    cluster: SimCluster, node: str, duration_s: float, *, on_restart: bool
) -> None:
    random = cluster.world.random
    left = random.sample(range(cluster.gpus_per_node), random.randint(0, cluster.gpus_per_node))
    if on_restart:
        cluster.crash(node, power_off=True)
        await asyncio.sleep(min(duration_s, 8.0))
    cluster.set_gpus(node, left)
    cluster.restart(node)


async def _hang_store(cluster: SimCluster, duration_s: float) -> None:
    """Longer than the dead-man time in most cases."""
    if not cluster.is_control_plane_healthy:
        return
    with count_control_plane_fault(cluster):
        with hanging_store(cluster.store):
            await asyncio.sleep(_STORE_HANG_DURATION_FACTOR * duration_s)
        await asyncio.sleep(cluster.failover_bounds.total_s)


async def _power_off_leader(cluster: SimCluster, duration_s: float, *, with_store: bool) -> None:
    """Power off the machine of the leader, unless there is another fault of the control plane: an agent
    cannot distinguish two failed controllers from its own isolation. Another controller must lead in time."""
    leader = next((host for host in cluster.controller_hosts if cluster.is_leader(host)), None)
    if leader is None or not cluster.is_control_plane_healthy:
        return
    with count_control_plane_fault(cluster):
        cluster.crash(leader, power_off=True)
        bounds = cluster.failover_bounds
        takeover_s = bounds.campaign_s + cluster.config.leader_ttl_s
        if with_store:
            takeover_s = bounds.takeover_s
            await simulate_store_election(cluster)
            takeover_s -= bounds.store_election_s
        await asyncio.sleep(takeover_s)
        if cluster.leader is None:
            cluster.machines.report_violation(f"no controller leads {takeover_s:g} s after a power outage")
        await asyncio.sleep(bounds.discovery_s + duration_s)
        cluster.restart(leader)
        await asyncio.sleep(_CONTROLLER_STARTUP_TIME_S)


async def _isolate_node(cluster: SimCluster, node: str, duration_s: float) -> None:
    """Cut a node from all controllers."""
    for controller in cluster.controller_hosts:
        cluster.world.cut_link(node, controller)
    await asyncio.sleep(duration_s)
    for controller in cluster.controller_hosts:
        cluster.world.heal_link(node, controller)


async def _inject_frame_fault(cluster: SimCluster, kind: str, duration_s: float) -> None:
    world = cluster.world
    if kind == "reorder":
        world.reordered_frame_share = 0.2
    else:
        world.duplicated_frame_share = 0.1
    await asyncio.sleep(duration_s)
    world.reordered_frame_share, world.duplicated_frame_share = (
        (0.0, world.duplicated_frame_share) if kind == "reorder" else (world.reordered_frame_share, 0.0)
    )


async def _inject_disk_fault(cluster: SimCluster, kind: str, node: str, duration_s: float) -> None:
    """`torn_write`: the power fails while the disk is slow, so that writes are incomplete."""
    disk = cluster.machines.disk_by_host[node]
    if kind == "full_disk":
        fault = object()
        disk.fill_causes.add(fault)
        await asyncio.sleep(duration_s)
        disk.fill_causes.discard(fault)
        return
    disk.access_delay_s = cluster.world.random.uniform(0.1, 6.0)
    await asyncio.sleep(duration_s)
    disk.access_delay_s = 0.0
    if kind == "torn_write":
        cluster.crash(node, power_off=True)
        await asyncio.sleep(1.0)
        cluster.restart(node)


async def _slow_store_of_controller(
    cluster: SimCluster, kind: str, controller: str, duration_s: float
) -> None:
    if kind == "slow_load":
        await cluster.crash_and_restart(controller)
        store = cluster.store_of(controller)
        store.set_response_delay(0.0, range_delay_s=2.0)
        duration_s *= 4
    else:
        store = cluster.store_of(controller)
        store.set_response_delay(0.1)
    await asyncio.sleep(duration_s)
    store.set_response_delay(0.0)


async def _force_leader_failback(cluster: SimCluster) -> None:
    """Let another controller lead for a while, then crash it: the first one leads again and loads slowly,
    without a restart in between."""
    first, *others = sorted(cluster.controller_hosts, key=lambda host: not cluster.is_leader(host))
    cluster.set_store_available(first, available=False)
    await asyncio.sleep(9.0)
    for host in others:
        cluster.crash(host)
    store = cluster.store_of(first)
    if cluster.is_up(first):
        store.set_response_delay(0.0, range_delay_s=1.0)
        store.set_available(True)
    await asyncio.sleep(8.0)
    store.set_response_delay(0.0)
    for host in others:
        cluster.restart(host)
