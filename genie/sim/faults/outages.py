"""Outages of whole parts of a simulated cluster: power loss of any machines, cut links between any two, and
restarts of everything at once. Restores of the store are in restores.py.

An etcd member runs on each controller's machine: without a majority of them the store does not respond, and
with the machine of its leader it first needs an election. Jobs may end on machines that have a fault, and
restartable ones when their dead-man timer expires because no server answers: see `control_plane_fault`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from genie.agent.jobs import CONTACT_LOST_REASON
from genie.sim.cluster import CLIENT_HOST, STORE_HOST, FaultWindow, SimCluster
from genie.sim.store import MemoryStore

_CONTROLLER_STARTUP_TIME_S = 2.0
_LONG_OUTAGE_DURATION_FACTOR = 3.0
"""Then some outages are longer than the time after which the jobs of a node are reclaimed."""
_SERVER_LOST_FOR_GOOD_PROBABILITY = 0.2
_ONE_WAY_PROBABILITY = 0.75
_STORM_RESTARTS_PER_HOST_MAX = 5
_STORM_RESTART_INTERVAL_S_MAX = 4.0


@contextmanager
def count_control_plane_fault(cluster: SimCluster) -> Iterator[None]:
    cluster.control_plane_fault_count += 1
    try:
        yield
    finally:
        cluster.control_plane_fault_count -= 1


@contextmanager
def hanging_store(store: MemoryStore) -> Iterator[None]:
    store.set_hanging(True)
    try:
        yield
    finally:
        store.set_hanging(False)


async def simulate_store_election(cluster: SimCluster) -> None:
    """The store does not respond until it has a leader, which extends all leases."""
    election_timeout_s = cluster.config.etcd_election_timeout_s
    election_s = cluster.world.random.uniform(1.0, 2.0) * election_timeout_s
    store = cluster.store
    store.extend_leases(by_s=election_s + election_timeout_s)
    with hanging_store(store):
        await asyncio.sleep(election_s)


@contextmanager
def record_fault_window(cluster: SimCluster, window: FaultWindow) -> Iterator[None]:
    """Record a fault, and its end when it is over."""
    cluster.faults.append(window)
    try:
        yield
    finally:
        cluster.faults[cluster.faults.index(window)] = replace(window, end_s=cluster.world.now_s)


@contextmanager
def fault_of_nodes(
    cluster: SimCluster, kind: str, hosts: Collection[str], *, ends_only_restartable_jobs: bool = False
) -> Iterator[None]:
    """Record a fault that may end the jobs of these nodes, or only restartable ones, until it is over."""
    now_s = cluster.world.now_s
    window = FaultWindow(kind, frozenset(hosts), now_s, float("inf"), ends_only_restartable_jobs)
    with record_fault_window(cluster, window):
        yield


@contextmanager
def agent_crashes(cluster: SimCluster, kind: str, hosts: Collection[str]) -> Iterator[None]:
    """Record crashes of the agents of these nodes, until they have returned. Only dead-man timers end jobs,
    and only if an agent does not return in time."""
    window = FaultWindow(
        kind,
        frozenset(hosts),
        cluster.world.now_s,
        float("inf"),
        ends_only_restartable_jobs=True,
        termination_reason=CONTACT_LOST_REASON,
    )
    with record_fault_window(cluster, window):
        yield


@contextmanager
def control_plane_fault(cluster: SimCluster, kind: str, *, is_silent: bool) -> Iterator[None]:
    """Record a fault of controllers or of the store, until it is over. `is_silent`: for longer than a
    failover takes there may be neither a leader nor replies from all controllers, which an agent cannot
    distinguish from its own isolation. Two faults at the same time may have that effect, too. Then the
    dead-man timers of restartable jobs may expire; all other jobs continue."""
    may_end_jobs = is_silent or cluster.control_plane_fault_count > 0
    window = FaultWindow(
        kind,
        frozenset(cluster.node_hosts if may_end_jobs else ()),
        cluster.world.now_s,
        float("inf"),
        ends_only_restartable_jobs=True,
        termination_reason=CONTACT_LOST_REASON,
    )
    with count_control_plane_fault(cluster), record_fault_window(cluster, window):
        yield


def has_silent_server(cluster: SimCluster) -> bool:
    """Whether connections to a controller's machine time out."""
    return any(map(cluster.world.is_without_power, cluster.controller_hosts))


# -- power ------------------------------------------------------------------------------------------


async def _power_off_machines(cluster: SimCluster, kind: str, duration_s: float) -> None:
    """Power off one or more machines of any kind at once. They return one after another."""
    hosts = [*cluster.controller_hosts, *cluster.node_hosts]
    random = cluster.world.random
    await _power_off(cluster, kind, random.sample(hosts, random.randint(1, len(hosts))), duration_s)


async def _power_off_servers(cluster: SimCluster, kind: str, duration_s: float) -> None:
    """Power off one or two servers, leader or standby. One of them may be lost for good."""
    random, running = cluster.world.random, list(filter(cluster.is_up, cluster.controller_hosts))
    hosts = random.sample(running, min(random.randint(1, 2), len(running)))
    if hosts and not cluster.hosts_kept_down and random.random() < _SERVER_LOST_FOR_GOOD_PROBABILITY:
        cluster.hosts_kept_down.add(hosts[0])
    await _power_off(cluster, kind, hosts, duration_s)


async def _power_off(cluster: SimCluster, kind: str, hosts: Sequence[str], duration_s: float) -> None:
    servers = [host for host in hosts if host in cluster.controller_hosts]
    nodes = [host for host in hosts if host in cluster.node_hosts]
    off_servers = {*servers, *filter(cluster.world.is_without_power, cluster.controller_hosts)}
    has_store_majority = 2 * len(off_servers) < len(cluster.controller_hosts)
    with fault_of_nodes(cluster, kind, nodes):
        if not servers:
            await _power_off_and_on(cluster, hosts, duration_s)
            return
        with control_plane_fault(cluster, kind, is_silent=not has_store_majority):
            if has_store_majority:
                async with asyncio.TaskGroup() as group:
                    group.create_task(_power_off_and_on(cluster, hosts, duration_s))
                    if cluster.world.random.random() < 0.5:
                        group.create_task(simulate_store_election(cluster))
            else:
                with hanging_store(cluster.store):
                    await _power_off_and_on(cluster, hosts, duration_s)
                await simulate_store_election(cluster)
            await asyncio.sleep(cluster.failover_bounds.total_s)


async def _power_off_and_on(cluster: SimCluster, hosts: Sequence[str], duration_s: float) -> None:
    for host in hosts:
        cluster.crash(host, power_off=True)
    async with asyncio.TaskGroup() as group:
        for host in hosts:
            off_s = cluster.world.random.uniform(0.1, _LONG_OUTAGE_DURATION_FACTOR * duration_s)
            group.create_task(_restart_later(cluster, host, off_s))


async def _restart_later(cluster: SimCluster, host: str, delay_s: float) -> None:
    await asyncio.sleep(delay_s)
    cluster.restart(host)


# -- links ------------------------------------------------------------------------------------------


async def _cut_any_link(cluster: SimCluster, kind: str, duration_s: float) -> None:
    """Cut the link between a controller and anything that it has connections with, usually one way."""
    random = cluster.world.random
    controller = random.choice(cluster.controller_hosts)
    others = [*cluster.controller_hosts, *cluster.node_hosts, STORE_HOST, STORE_HOST, CLIENT_HOST]
    other = random.choice([host for host in others if host != controller])
    ends = (controller, other) if random.random() < 0.5 else (other, controller)
    is_one_way = random.random() < _ONE_WAY_PROBABILITY
    nodes = [other] if other in cluster.node_hosts else []
    with fault_of_nodes(cluster, kind, nodes, ends_only_restartable_jobs=True):
        if other == STORE_HOST:
            with control_plane_fault(cluster, kind, is_silent=has_silent_server(cluster)):
                duration_s *= _LONG_OUTAGE_DURATION_FACTOR
                await _cut_and_heal(cluster, ends, duration_s, is_one_way=is_one_way)
                await asyncio.sleep(cluster.failover_bounds.total_s)
        else:
            await _cut_and_heal(cluster, ends, duration_s, is_one_way=is_one_way)


async def _cut_and_heal(
    cluster: SimCluster, ends: tuple[str, str], duration_s: float, *, is_one_way: bool
) -> None:
    cluster.world.cut_link(*ends, both_directions=not is_one_way)
    await asyncio.sleep(duration_s)
    cluster.world.heal_link(*ends, both_directions=not is_one_way)


# -- restarts ---------------------------------------------------------------------------------------


async def _restart_servers(cluster: SimCluster, kind: str, duration_s: float) -> None:
    """Restart all controllers and the store at once."""
    with control_plane_fault(cluster, kind, is_silent=has_silent_server(cluster)):
        await _crash_all_with_store(cluster, cluster.controller_hosts, duration_s)


async def _restart_agents(cluster: SimCluster, kind: str, duration_s: float) -> None:
    """Restart all agents at once."""
    with agent_crashes(cluster, kind, cluster.node_hosts):
        await _crash_and_restart_all(cluster, cluster.node_hosts, duration_s)


async def _restart_everything(cluster: SimCluster, kind: str, duration_s: float) -> None:
    """Restart all controllers, all agents and the store at once; in half of the cases all lose power."""
    hosts, power_off = [*cluster.controller_hosts, *cluster.node_hosts], cluster.world.random.random() < 0.5
    with (
        fault_of_nodes(cluster, kind, cluster.node_hosts, ends_only_restartable_jobs=not power_off),
        control_plane_fault(cluster, kind, is_silent=True),
    ):
        await _crash_all_with_store(cluster, hosts, duration_s, power_off=power_off)


async def _crash_all_with_store(
    cluster: SimCluster, hosts: Sequence[str], duration_s: float, *, power_off: bool = False
) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(_crash_and_restart_all(cluster, hosts, duration_s, power_off=power_off))
        with hanging_store(cluster.store):
            await asyncio.sleep(cluster.world.random.uniform(0.1, duration_s))
    await asyncio.sleep(cluster.failover_bounds.total_s)


async def _crash_and_restart_all(
    cluster: SimCluster, hosts: Sequence[str], duration_s: float, *, power_off: bool = False
) -> None:
    for host in hosts:
        cluster.crash(host, power_off=power_off)
    async with asyncio.TaskGroup() as group:
        for host in hosts:
            group.create_task(_restart_later(cluster, host, cluster.world.random.uniform(0.1, duration_s)))


async def _restart_repeatedly(cluster: SimCluster, kind: str, duration_s: float) -> None:
    """Let controllers, agents or both crash again and again; their supervisors restart them."""
    random = cluster.world.random
    servers, nodes = cluster.controller_hosts, cluster.node_hosts
    hosts = random.choice((servers, nodes, [*servers, *nodes]))
    crashing_nodes = [host for host in hosts if host in nodes]
    with agent_crashes(cluster, kind, crashing_nodes):
        if hosts == nodes:
            await _crash_each_repeatedly(cluster, hosts)
            return
        with control_plane_fault(cluster, kind, is_silent=has_silent_server(cluster)):
            await _crash_each_repeatedly(cluster, hosts)
            await asyncio.sleep(_CONTROLLER_STARTUP_TIME_S)


async def _crash_each_repeatedly(cluster: SimCluster, hosts: Sequence[str]) -> None:
    async with asyncio.TaskGroup() as group:
        for host in hosts:
            group.create_task(_crash_repeatedly(cluster, host))


async def _crash_repeatedly(cluster: SimCluster, host: str) -> None:
    random = cluster.world.random
    for _ in range(random.randint(1, _STORM_RESTARTS_PER_HOST_MAX)):
        await asyncio.sleep(random.uniform(0.0, _STORM_RESTART_INTERVAL_S_MAX))
        await cluster.crash_and_restart(host)


CLUSTER_FAULTS: dict[str, Callable[[SimCluster, str, float], Awaitable[None]]] = {
    "power_machines": _power_off_machines,
    "power_servers": _power_off_servers,
    "cut_any_link": _cut_any_link,
    "restart_servers": _restart_servers,
    "restart_agents": _restart_agents,
    "restart_everything": _restart_everything,
    "restart_repeatedly": _restart_repeatedly,
}
"""Each gets the cluster, its own name and a duration."""
