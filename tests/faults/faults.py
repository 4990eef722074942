"""The faults. Each is an async context manager: entering it injects the fault, leaving it heals the cluster.

It yields an `Injection`: when it happened, and what it may affect. Healing starts what does not start by
itself, as the service manager of a machine would.
"""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field

from tests.faults.machines import FaultCluster, Machine
from tests.faults.store_history import fetch_member_statuses, find_etcd_problem
from tests.faults.workload import Workload

LOSS_PERCENT = 10
CLOCK_STEP_S = 3600
BURST_SUBMISSIONS = 40
ETCD_LEADER_TIMEOUT_S = 30.0
_POLL_S = 0.25
_STORM_ROUNDS = 3
_STORM_INTERVAL_S = 2.0
_BURST_LEAD_S = 0.2
_CLOCK_HOLD_S = 6.0


@dataclass
class FaultTargets:
    """What a fault works on, as it is just before the fault."""

    cluster: FaultCluster
    workload: Workload
    leader: Machine
    etcd_leader: Machine
    rng: random.Random
    wait_settled: Callable[[], Awaitable[None]]
    """Waits until every node is healthy and every server names the same leader."""


@dataclass(frozen=True, kw_only=True)
class Injection:
    """`at_s`: of time.monotonic, when the fault was complete. `silent` servers are those through which no
    submission is measured; if all are, the time counts from the end of the fault. The etcd members of
    `without_etcd` servers do not respond. Jobs on `ended` machines may end, restartable ones also on
    `isolated` machines. `lost`: the node that becomes lost."""

    at_s: float = field(default_factory=time.monotonic)
    silent: Sequence[Machine] = ()
    without_etcd: Sequence[Machine] = ()
    ended: Sequence[Machine] = ()
    isolated: Sequence[Machine] = ()
    lost: Machine | None = None


Inject = Callable[[FaultTargets], AbstractAsyncContextManager[Injection]]


@dataclass(frozen=True)
class Fault:
    """`hold_s`: the least time between injecting and healing."""

    name: str
    inject: Inject
    hold_s: float


async def wait_etcd_leader(cluster: FaultCluster) -> Machine:
    """The server with the leader of etcd; waits until there is one. Raises RuntimeError after
    ETCD_LEADER_TIMEOUT_S."""
    deadline_s = time.monotonic() + ETCD_LEADER_TIMEOUT_S
    while True:
        statuses = await fetch_member_statuses(cluster.servers)
        leaders = [each.info.name for each in statuses if each.is_leader]
        if len(leaders) == 1:
            return next(server for server in cluster.servers if server.name == leaders[0])
        if time.monotonic() > deadline_s:
            found = find_etcd_problem(statuses, members=len(cluster.servers))
            raise RuntimeError(f"etcd has no leader after {ETCD_LEADER_TIMEOUT_S:g} s: {found}")
        await asyncio.sleep(_POLL_S)


# --- killed and suspended processes -------------------------------------------------------------


@asynccontextmanager
async def kill_leading_controller(targets: FaultTargets) -> AsyncIterator[Injection]:
    targets.leader.send_signal("controller", signal.SIGKILL)
    yield Injection(silent=[targets.leader])


@asynccontextmanager
async def kill_etcd_leader(targets: FaultTargets) -> AsyncIterator[Injection]:
    targets.etcd_leader.send_signal("etcd", signal.SIGKILL)
    yield Injection(without_etcd=[targets.etcd_leader])


@asynccontextmanager
async def kill_agent(targets: FaultTargets) -> AsyncIterator[Injection]:
    node = targets.rng.choice(targets.cluster.machines)
    node.send_signal("agent", signal.SIGKILL)
    yield Injection()


@asynccontextmanager
async def kill_services_of_leading_server(targets: FaultTargets) -> AsyncIterator[Injection]:
    targets.leader.kill_service_processes()
    silent = [targets.leader]
    yield Injection(silent=silent, without_etcd=silent, isolated=silent)
    targets.leader.restart()


@asynccontextmanager
async def suspend_leading_controller(targets: FaultTargets) -> AsyncIterator[Injection]:
    targets.leader.send_signal("controller", signal.SIGSTOP)
    try:
        yield Injection(silent=[targets.leader])
    finally:
        targets.leader.send_signal("controller", signal.SIGCONT)


@asynccontextmanager
async def suspend_etcd_leader(targets: FaultTargets) -> AsyncIterator[Injection]:
    targets.etcd_leader.send_signal("etcd", signal.SIGSTOP)
    try:
        yield Injection(silent=[targets.etcd_leader], without_etcd=[targets.etcd_leader])
    finally:
        targets.etcd_leader.send_signal("etcd", signal.SIGCONT)


# --- the network --------------------------------------------------------------------------------


@asynccontextmanager
async def cut_etcd_leader_towards_peers(targets: FaultTargets) -> AsyncIterator[Injection]:
    """It receives from the other members, but what it sends to them is lost."""
    network, cut = targets.cluster.network, targets.etcd_leader
    for server in targets.cluster.servers:
        if server is not cut:
            network.drop_packets(source=cut.name, target=server.name, etcd_peers_only=True)
    yield Injection(silent=[cut], without_etcd=[cut])
    network.heal()


@asynccontextmanager
async def cut_leader_towards_agents(targets: FaultTargets) -> AsyncIterator[Injection]:
    """The leader receives the heartbeats of the nodes, but they receive nothing from it."""
    network, nodes = targets.cluster.network, targets.cluster.nodes
    for node in nodes:
        network.drop_packets(source=targets.leader.name, target=node.name)
    yield Injection(isolated=nodes)
    network.heal()


@asynccontextmanager
async def isolate_leading_server(targets: FaultTargets) -> AsyncIterator[Injection]:
    targets.cluster.network.unplug(targets.leader.name)
    silent = [targets.leader]
    yield Injection(silent=silent, without_etcd=silent, isolated=silent)
    targets.cluster.network.heal()


@asynccontextmanager
async def isolate_node(targets: FaultTargets) -> AsyncIterator[Injection]:
    node = targets.rng.choice(targets.cluster.nodes)
    targets.cluster.network.unplug(node.name)
    yield Injection(isolated=[node], lost=node)
    targets.cluster.network.heal()


@asynccontextmanager
async def lose_packets(targets: FaultTargets) -> AsyncIterator[Injection]:
    network = targets.cluster.network
    for machine in targets.cluster.machines:
        network.drop_packets_at_random(machine.name, percent=LOSS_PERCENT)
    yield Injection(isolated=targets.cluster.machines)
    network.heal()


# --- whole machines -----------------------------------------------------------------------------


@asynccontextmanager
async def power_off_leading_server(targets: FaultTargets) -> AsyncIterator[Injection]:
    """The link goes first, so that nothing that the dying processes send arrives."""
    leader = targets.leader
    targets.cluster.network.unplug(leader.name)
    leader.kill_everything()
    yield Injection(silent=[leader], without_etcd=[leader], ended=[leader], lost=leader)
    targets.cluster.network.heal()
    leader.restart()


@asynccontextmanager
async def kill_two_of_three_servers(targets: FaultTargets) -> AsyncIterator[Injection]:
    other = next(server for server in targets.cluster.servers if server is not targets.leader)
    killed = [targets.leader, other]
    for server in killed:
        server.kill_service_processes()
    yield Injection(silent=targets.cluster.servers, isolated=killed)
    for server in killed:
        server.restart()


@asynccontextmanager
async def fill_disk_of_leading_server(targets: FaultTargets) -> AsyncIterator[Injection]:
    await asyncio.to_thread(targets.leader.fill_disk)
    try:
        yield Injection(silent=[targets.leader], without_etcd=[targets.leader])
    finally:
        targets.leader.free_disk()


# --- clocks -------------------------------------------------------------------------------------


@asynccontextmanager
async def step_clock_of_leading_server(targets: FaultTargets) -> AsyncIterator[Injection]:
    async with _stepped_clock(targets.leader) as injection:
        yield injection


@asynccontextmanager
async def step_clock_of_node(targets: FaultTargets) -> AsyncIterator[Injection]:
    async with _stepped_clock(targets.rng.choice(targets.cluster.nodes)) as injection:
        yield injection


@asynccontextmanager
async def _stepped_clock(machine: Machine) -> AsyncIterator[Injection]:
    """Controller and agent of the machine: an hour forward, then an hour back."""
    machine.step_clock(CLOCK_STEP_S)
    yield Injection()
    machine.step_clock(-CLOCK_STEP_S)
    await asyncio.sleep(_CLOCK_HOLD_S)
    machine.step_clock(0)


# --- many processes at once ---------------------------------------------------------------------


@asynccontextmanager
async def restart_all_controllers(targets: FaultTargets) -> AsyncIterator[Injection]:
    await _kill_repeatedly(targets.cluster.servers, "controller")
    yield Injection()


@asynccontextmanager
async def restart_all_agents(targets: FaultTargets) -> AsyncIterator[Injection]:
    await _kill_repeatedly(targets.cluster.machines, "agent")
    yield Injection()


async def _kill_repeatedly(machines: Sequence[Machine], process_name: str) -> None:
    for number in range(_STORM_ROUNDS):
        if number:
            await asyncio.sleep(_STORM_INTERVAL_S)
        for machine in machines:
            machine.send_signal(process_name, signal.SIGKILL)


@asynccontextmanager
async def restart_everything(targets: FaultTargets) -> AsyncIterator[Injection]:
    machines = targets.cluster.machines
    for machine in machines:
        machine.kill_everything()
    yield Injection(silent=targets.cluster.servers, ended=machines)
    for machine in machines:
        machine.restart()


@asynccontextmanager
async def change_leader_during_burst(targets: FaultTargets) -> AsyncIterator[Injection]:
    async with asyncio.TaskGroup() as group:
        group.create_task(targets.workload.submit_burst(BURST_SUBMISSIONS))
        await asyncio.sleep(_BURST_LEAD_S)
        targets.leader.send_signal("controller", signal.SIGKILL)
        yield Injection(silent=[targets.leader])


FAULTS = (
    Fault("leading-controller-killed", kill_leading_controller, hold_s=2.0),
    Fault("etcd-leader-killed", kill_etcd_leader, hold_s=2.0),
    Fault("agent-killed", kill_agent, hold_s=2.0),
    Fault("leading-server-killed", kill_services_of_leading_server, hold_s=6.0),
    Fault("leading-controller-suspended", suspend_leading_controller, hold_s=5.0),
    Fault("etcd-leader-suspended", suspend_etcd_leader, hold_s=6.0),
    Fault("etcd-leader-cut-towards-peers", cut_etcd_leader_towards_peers, hold_s=6.0),
    Fault("leader-cut-towards-agents", cut_leader_towards_agents, hold_s=18.0),
    Fault("leading-server-isolated", isolate_leading_server, hold_s=6.0),
    Fault("node-isolated", isolate_node, hold_s=24.0),
    Fault("leading-server-powered-off", power_off_leading_server, hold_s=8.0),
    Fault("two-of-three-servers-killed", kill_two_of_three_servers, hold_s=8.0),
    Fault("disk-of-leader-full", fill_disk_of_leading_server, hold_s=10.0),
    Fault("clock-of-leader-stepped", step_clock_of_leading_server, hold_s=_CLOCK_HOLD_S),
    Fault("clock-of-node-stepped", step_clock_of_node, hold_s=_CLOCK_HOLD_S),
    Fault("controllers-restarted", restart_all_controllers, hold_s=1.0),
    Fault("agents-restarted", restart_all_agents, hold_s=1.0),
    Fault("everything-restarted", restart_everything, hold_s=1.0),
    Fault("packets-lost", lose_packets, hold_s=12.0),
    Fault("leader-changed-in-burst", change_leader_during_burst, hold_s=2.0),
)
