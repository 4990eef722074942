"""Seeded faults on a simulated cluster: cut links, stopped and killed actors, lost power, a lost store.

Every fault ends by itself; `rampage` leaves the world healed and everyone running. Which kinds
are allowed is an argument, so that a test can ask what a milder world guarantees. What an owner
does stays as it is until `restore`: accelerators are gone, and tenants have quotas.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress

from genie.errors import GenieError
from genie.model.messages import Done, DrainNode, RemoveQuota, Request, SetQuota, UndrainNode
from genie.model.tenant import QuotaRecord
from genie.sim.cluster import SimCluster

_log = logging.getLogger(__name__)

TENANTS = ("red", "blue")
"""Those that get quotas."""
CONTROLLER_FAULTS = ("restart_controller",)
ALL_FAULTS = (
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
OWNER_DEEDS = ("drain", "other_gpus", "other_gpus_at_start", "quota")
"""What an owner does to a cluster that is in use: no faults, and yet what was planned holds no longer."""
EVERYTHING = (*ALL_FAULTS, "lose_answer", *OWNER_DEEDS)


async def rampage(cluster: SimCluster, *, seconds: float, every_s: float, kinds: tuple[str, ...]) -> None:
    """Faults for that long, then peace."""
    world = cluster.world
    end_s = world.now_s + seconds
    async with asyncio.TaskGroup() as faults:
        while world.now_s < end_s:
            await asyncio.sleep(world.random.expovariate(1 / every_s))
            kind = world.random.choice(kinds)
            node = world.random.choice(cluster.node_hosts)
            controller = world.random.choice(cluster.controller_hosts)
            lasts_s = world.random.uniform(0.2, 25.0)
            _log.info("%.2f fault %s %s %s for %.1f s", world.now_s, kind, node, controller, lasts_s)
            faults.create_task(_commit(cluster, kind, node, controller, lasts_s))
    world.heal_all()
    for host in (*cluster.controller_hosts, *cluster.node_hosts):
        cluster.restart(host)


async def restore(cluster: SimCluster) -> None:
    """Every node has all its accelerators and is open, and nobody has a quota."""
    for host in cluster.node_hosts:
        cluster.set_gpus(host, range(cluster.gpus))
        await _forgiving(cluster, UndrainNode(node_id=cluster.node_id(host)))
    for tenant in TENANTS:
        await _forgiving(cluster, RemoveQuota(tenant=tenant))


async def _forgiving(cluster: SimCluster, request: Request[Done]) -> None:
    """What was asked for may be so already: an answer may have been lost."""
    with suppress(GenieError):
        await cluster.ask(request)


async def _commit(cluster: SimCluster, kind: str, node: str, controller: str, lasts_s: float) -> None:
    world = cluster.world
    match kind:
        case "cut_node":
            world.cut(node, controller)
            await asyncio.sleep(lasts_s)
            world.heal(node, controller)
        case "pause_node":
            world.pause(node, lasts_s)
            await asyncio.sleep(lasts_s)
        case "pause_controller":
            world.pause(controller, lasts_s)
            await asyncio.sleep(lasts_s)
        case "drift":
            world.set_rate(node, world.random.choice((0.9, 1.0, 1.1)))
        case "freeze_node":
            world.freeze(node, lasts_s)
            await asyncio.sleep(lasts_s)
        case "lose_store":
            cluster.set_store(controller, available=False)
            await asyncio.sleep(lasts_s)
            if cluster.is_up(controller):
                cluster.set_store(controller, available=True)
        case "lose_answer":
            cluster.lose_answer(controller)
        case "drain":
            await _forgiving(cluster, DrainNode(node_id=cluster.node_id(node)))
            await asyncio.sleep(lasts_s)
            await _forgiving(cluster, UndrainNode(node_id=cluster.node_id(node)))
        case "quota":
            gpus = world.random.choice((0.0, 1.0, 2.5, 4.0, None))
            quota = QuotaRecord(tenant=world.random.choice(TENANTS), gpus=gpus, weight=lasts_s)
            await _forgiving(cluster, SetQuota(quota=quota))
        case "other_gpus" | "other_gpus_at_start":
            left = world.random.sample(range(cluster.gpus), world.random.randint(0, cluster.gpus))
            if kind == "other_gpus_at_start":
                cluster.crash(node, power=True)
                await asyncio.sleep(min(lasts_s, 8.0))
            cluster.set_gpus(node, left)
            cluster.restart(node)
        case "crash_node" | "power_node" | "restart_controller":
            host = controller if kind == "restart_controller" else node
            cluster.crash(host, power=kind == "power_node")
            await asyncio.sleep(lasts_s)
            cluster.restart(host)
