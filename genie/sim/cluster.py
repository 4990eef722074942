"""A cluster on simulated time: the real controllers and agents with a simulated network, clock and store.

Addresses are in 127.0.0.0/8: only loopback is allowed without TLS. The seed determines the run. For placement
studies see events.py and replay.py.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import msgspec

from genie.agent.agent import Agent
from genie.agent.disk import DiskAccess
from genie.agent.identity import read_identity
from genie.agent.joining import join_cluster
from genie.config import AgentConfig, ControllerConfig
from genie.controller.controller import Controller
from genie.controller.store import Delete, Put
from genie.errors import GenieError, NodeRemovedError
from genie.hardware.host import HostFacts
from genie.model.failover import FailoverBounds, etcd_failover_bounds
from genie.model.job import Job, JobSpec, PlacementConstraints, Resources
from genie.model.messages import (
    CreateToken,
    ListJobs,
    ListNodes,
    Message,
    NodeView,
    RemoveNode,
    Request,
    SubmitJob,
)
from genie.model.node import GPUInfo, Vendor
from genie.model.tenant import TokenKind
from genie.runtime.connection_limits import ConnectionLimits
from genie.runtime.credentials import OWNER_TOKEN_FILE, Access, connect_authenticated
from genie.runtime.gossip.protocol import GossipSupport
from genie.sim.disk import SimDisk
from genie.sim.gossip import GossipMedium, SimGossip
from genie.sim.processes import DURATION_ENV_VARIABLE, GPU_MILLI_ENV_VARIABLE, SimLauncher, SimMachines
from genie.sim.store import VALUE_BYTES_TOTAL_MAX, MemoryStore, StoreLink
from genie.sim.world import SimClock, SimNetwork, World
from genie.supervisor.child import restart_backoff_s
from genie.tenancy.access import parse_token

_Reply = TypeVar("_Reply", bound=Message)

CONTROLLER_PORT = 5555
CONTROLLER_CONFIG = ControllerConfig(port=CONTROLLER_PORT, tls="off")
SERVER_GOSSIP_PORT, NODE_GOSSIP_PORT = 5556, 5557
CLIENT_HOST = "127.0.9.9"
"""Address of the owner and, unless another is given, of the tenants."""
STORE_HOST = "store"
"""End of the links between the controllers and the store."""
_CLIENT_CALL_TIMEOUT_S = 5.0
_JOIN_RETRY_INTERVAL_S = 0.5

_log = logging.getLogger(__name__)


class _SimInventory:
    """An inventory that reports the GPUs returned by `ids` at each reading."""

    def __init__(self, get_gpu_ids: Callable[[], Collection[int]]) -> None:
        self._get_gpu_ids = get_gpu_ids

    async def read_async(self, held: Collection[int] = ()) -> tuple[GPUInfo, ...]:
        return tuple(
            GPUInfo(gpu_id=gpu_id, name="simulated", vendor=Vendor.CPU, memory_total_bytes=1 << 30)
            for gpu_id in sorted(self._get_gpu_ids())
        )


@dataclass
class _RunningProgram:
    """One run of a controller or agent, from its start to its crash."""

    task: asyncio.Task[None]
    launcher: SimLauncher | None = None
    controller: Controller | None = None


@dataclass(frozen=True)
class FaultWindow:
    """A fault and its time. `hosts`: those on which it may end jobs, or only restartable ones; for
    `termination_reason` only, if that is set."""

    kind: str
    hosts: frozenset[str]
    start_s: float
    end_s: float
    ends_only_restartable_jobs: bool = False
    termination_reason: str = ""


@dataclass
class SimCluster:
    """Start it inside a TaskGroup; `stop` ends all controllers and agents. `connection_limits`: those of
    controllers on connections before authentication. `config`: of all controllers, apart from their
    addresses. `gossip_medium`: connects their gossip; None: there is none."""

    seed: int
    directory: Path
    group: asyncio.TaskGroup
    node_count: int = 3
    gpus_per_node: int = 2
    controller_count: int = 1
    store_bytes_max: int = VALUE_BYTES_TOTAL_MAX
    connection_limits: ConnectionLimits | None = None
    config: ControllerConfig = CONTROLLER_CONFIG
    gossip_medium: GossipMedium | None = None
    world: World = field(init=False)
    machines: SimMachines = field(init=False)
    _memory: MemoryStore = field(init=False)

    def __post_init__(self) -> None:
        self.world = World(self.seed)
        self.machines = SimMachines(self.world)
        self._actors: dict[str, _RunningProgram] = {}
        self._stores: dict[str, MemoryStore] = {}
        self._stopping: dict[str, list[asyncio.Task[None]]] = {}
        self._power_offs: Counter[str] = Counter()
        self._crashes: dict[str, list[float]] = {}
        """Times by host."""
        self.faults: list[FaultWindow] = []
        """Faults that may end jobs, so far."""
        self.control_plane_fault_count = 0
        """Current faults of the kind that must not overlap: of the power of a controller, or of the store."""
        self.hosts_kept_down: set[str] = set()
        """Hosts that `restart` does not start: they are lost for good, or the store is being restored."""
        self.outdated_controller_hosts: set[str] = set()
        """Hosts whose controller uses the store from before a restore."""
        self.has_restored_store = False
        self.restore_listeners: list[Callable[[Sequence[Put | Delete], float], None]] = []
        """Called with the writes to a restored store, and the wall time at which its backup began."""
        self.hosts_being_removed: set[str] = set()
        """Nodes that the owner removes and that then join again."""
        self.drain_count_by_host: Counter[str] = Counter()
        """Number of current faults that drain each node."""
        self._requests = 0
        self._tokens: dict[str, str] = {}
        """User tokens by tenant."""
        self._owner_token = ""
        self._gpu_ids = {host: tuple(range(self.gpus_per_node)) for host in self.node_hosts}

    @property
    def controller_hosts(self) -> list[str]:
        return [f"127.0.1.{index + 1}" for index in range(self.controller_count)]

    @property
    def node_hosts(self) -> list[str]:
        return [f"127.0.2.{index + 1}" for index in range(self.node_count)]

    def node_id(self, host: str) -> str:
        return host.replace(".", "-")

    def node_dir(self, host: str) -> Path:
        return self.directory / host / "agents" / self.node_id(host)

    def is_up(self, host: str) -> bool:
        return host in self._actors

    @property
    def is_control_plane_healthy(self) -> bool:
        return not self.control_plane_fault_count and all(map(self.is_up, self.controller_hosts))

    @property
    def failover_bounds(self) -> FailoverBounds:
        return etcd_failover_bounds(
            node_ttl_s=self.config.node_ttl_s,
            leader_ttl_s=self.config.leader_ttl_s,
            etcd_election_timeout_s=self.config.etcd_election_timeout_s,
        )

    def is_leader(self, host: str) -> bool:
        """Return whether this controller considers itself the leader, and its store is not outdated."""
        actor = self._actors.get(host)
        return (
            host not in self.outdated_controller_hosts
            and actor is not None
            and actor.controller is not None
            and actor.controller.is_leading
        )

    def controller_able_to_lead(self, host: str) -> Controller | None:
        """Return the controller on this host unless it is down or paused, or its store is unavailable."""
        actor = self._actors.get(host)
        is_able = self._stores[host].is_available and not self.world.is_paused(host)
        is_able = is_able and host not in self.outdated_controller_hosts
        return actor.controller if actor is not None and is_able else None

    @property
    def leader(self) -> Controller | None:
        """Return a controller that considers itself the leader, or None."""
        leader = next(filter(self.is_leader, self.controller_hosts), None)
        return None if leader is None else self._actors[leader].controller

    @property
    def store(self) -> MemoryStore:
        """The shared store, independent of simulated store outages."""
        return self._memory

    async def open_empty_store(self) -> MemoryStore:
        """Open another store. `replace_store` lets the controllers use it."""
        return await MemoryStore.open(clock=SimClock(self.world, STORE_HOST), bytes_max=self.store_bytes_max)

    def replace_store(self, store: MemoryStore) -> None:
        """Let controllers that start from now on use this store, and move the commit listeners to it."""
        self._memory.move_commit_listeners_to(store)
        self._memory = store

    async def start(self) -> None:
        self._memory = await self.open_empty_store()
        self._actors["machines"] = _RunningProgram(self.group.create_task(self.machines.end_due_processes()))
        for host in self.controller_hosts:
            self.start_controller(host)
        await self._wait_for_leader()
        for host in self.node_hosts:
            await self._join_node(host)
            self.start_agent(host)

    async def wait_for_nodes(self) -> None:
        """Wait until all nodes have registered."""
        while len(await self.fetch_node_views()) < self.node_count:
            await asyncio.sleep(0.1)

    async def stop(self) -> None:
        for host in list(self._actors):
            self.crash(host)
        await asyncio.sleep(2.0)
        for store in self._stores.values():
            await store.close()
        await self._memory.close()

    # --- actors -----------------------------------------------------------------------------

    def start_controller(self, host: str, store: MemoryStore | None = None) -> None:
        """`store`: another one than that of the cluster."""
        world = self.world
        link = StoreLink(
            are_requests_cut=lambda: world.is_link_cut(host, STORE_HOST),
            are_replies_cut=lambda: world.is_link_cut(STORE_HOST, host),
        )
        self._stores[host] = (store or self._memory).connect(link)

        async def run_actor() -> None:
            await self._wait_stopped(host)
            controller = Controller(
                replace(self.config, bind=host),
                state_dir=self.directory / host,
                store=self._stores[host],
                network=SimNetwork(self.world, host, self.connection_limits),
                clock=SimClock(self.world, host),
                name=host,
                random_bytes=self.world.random.randbytes,
                gossip=self._make_gossip_support(host, SERVER_GOSSIP_PORT),
                gossip_port=SERVER_GOSSIP_PORT,
            )
            actor.controller = controller
            await controller.run()

        actor = self._actors[host] = _RunningProgram(self.group.create_task(run_actor()))

    def start_agent(self, host: str) -> None:
        launcher = SimLauncher(self.world, self.machines, host)

        async def run_actor() -> None:
            await self._wait_stopped(host)
            node_dir = self.node_dir(host)
            disk = self._disk_of(host)
            agent = Agent(
                AgentConfig(),
                node_dir=node_dir,
                access=read_identity(node_dir),
                network=SimNetwork(self.world, host),
                clock=SimClock(self.world, host),
                rng=random.Random(self.world.random.random()),
                inventory=_SimInventory(lambda: self._gpu_ids[host]),
                launcher=launcher,
                disk=DiskAccess(
                    run_journal_call=disk, run_job_file_call=disk, measure_space=disk.measure_space
                ),
                facts=lambda: HostFacts(
                    cpus=8.0, memory_total_bytes=1 << 34, memory_used_bytes=0, hostname=host
                ),
                boot_id=f"boot-{self._power_offs[host]}",
                gossip=self._make_gossip_support(host, NODE_GOSSIP_PORT),
            )
            try:
                await agent.run()
            except NodeRemovedError as error:  # its supervisor would start it again, with the same result
                _log.info("t=%.2f s: the agent on %s has ended: %s", self.world.now_s, host, error)

        self._actors[host] = _RunningProgram(self.group.create_task(run_actor()), launcher)

    def _disk_of(self, host: str) -> SimDisk:
        return self.machines.disk_by_host.setdefault(host, SimDisk(self.world, host, self.node_dir(host)))

    def _make_gossip_support(self, host: str, port: int) -> GossipSupport:
        medium = self.gossip_medium
        if medium is None:
            return GossipSupport()
        return GossipSupport(
            lambda identity, _last_port: SimGossip(
                medium, identity, host=host, port=port, clock=SimClock(self.world, host)
            ),
            "",
        )

    def crash(self, host: str, *, power_off: bool = False) -> None:
        """Kill the actor (SIGKILL), or power off its machine with `power_off`."""
        actor = self._actors.pop(host, None)
        if actor is None:
            return
        if actor.launcher is not None:
            actor.launcher.is_agent_dead = True
        if power_off:
            self._power_offs[host] += 1
            self.machines.power_off(host)
            self.world.set_power(host, is_on=False)
        if host in self._stores:
            # A killed process writes nothing; cancelling its task would write a resignation.
            self._stores[host].set_available(False)
        self.world.disconnect_host(host, silent=power_off)
        if self.gossip_medium is not None:
            self.gossip_medium.crash_members_of_host(host)
        actor.task.cancel()
        self._stopping.setdefault(host, []).append(actor.task)

    async def _wait_stopped(self, host: str) -> None:
        """Wait until the cancelled tasks of the previous actor on this host have ended."""
        if stopping := [task for task in self._stopping.get(host, ()) if not task.done()]:
            await asyncio.wait(stopping)

    def restart(self, host: str) -> None:
        """Start an actor that is down, unless it is kept down."""
        if host in self.hosts_kept_down:
            return
        self.world.set_power(host, is_on=True)
        if host not in self._actors:
            (self.start_controller if host in self.controller_hosts else self.start_agent)(host)

    async def crash_and_restart(self, host: str) -> None:
        """Kill an actor and wait until its supervisor has started it again."""
        if host not in self._actors:
            return
        self.crash(host)
        crashes = self._crashes.setdefault(host, [])
        crashes.append(self.world.now_s)
        await asyncio.sleep(restart_backoff_s(crashes, now=self.world.now_s))
        self.restart(host)

    async def rejoin_node(self, host: str) -> None:
        """Let a node join again that was removed from the cluster."""
        while True:
            try:
                await self._join_node(host)
                break
            except GenieError:
                with suppress(GenieError):  # the reply to an earlier attempt may have been lost
                    await self.send_request(RemoveNode(node_id=self.node_id(host)))
                await asyncio.sleep(_JOIN_RETRY_INTERVAL_S)
        was_up = self.is_up(host)
        self.crash(host)
        if was_up:
            self.restart(host)

    def set_gpus(self, host: str, gpu_ids: Collection[int]) -> None:
        """Change the GPUs that the agent finds from its next reading on."""
        self._gpu_ids[host] = tuple(gpu_ids)

    def lose_next_commit_reply(self, host: str) -> None:
        """Let the next commit of this controller succeed, but lose the reply."""
        self._stores[host].lose_next_commit_reply()

    def store_of(self, host: str) -> MemoryStore:
        """The store as this controller reaches it, until it restarts."""
        return self._stores[host]

    def set_store_available(self, host: str, *, available: bool) -> None:
        self._stores[host].set_available(available)

    # --- client ---------------------------------------------------------------------------

    async def submit(self, *, gpus: int, seconds: float, preemptible: bool = False) -> str:
        """Submit a job and return its ID."""
        spec = JobSpec(
            name="sim",
            command=("simulated",),
            resources=Resources(gpus=gpus),
            constraints=PlacementConstraints(preemptible=preemptible),
        )
        return await self.submit_spec(spec, seconds=seconds)

    async def submit_spec(self, spec: JobSpec, *, seconds: float, tenant: str = "") -> str:
        """Submit with retries, which the request ID makes idempotent. Default: the owner's tenant."""
        self._requests += 1
        env = {DURATION_ENV_VARIABLE: str(seconds), GPU_MILLI_ENV_VARIABLE: str(spec.resources.gpu_milli)}
        spec = msgspec.structs.replace(spec, name=f"{spec.name}-{self._requests}", env={**spec.env, **env})
        request = SubmitJob(spec=spec, request_id=f"request-{self.seed}-{self._requests}")
        token = await self.get_user_token(tenant) if tenant else ""
        return (await self.send_request(request, token=token)).job.job_id

    async def get_user_token(self, tenant: str) -> str:
        """Return the user token of a tenant."""
        if tenant not in self._tokens:
            created = await self.send_request(CreateToken(kind=TokenKind.USER, tenant=tenant))
            self._tokens[tenant] = created.token
        return self._tokens[tenant]

    @property
    def has_user_tokens(self) -> bool:
        """Whether a user token has been created."""
        return bool(self._tokens)

    async def fetch_jobs(self) -> dict[str, Job]:
        answer = await self.send_request(ListJobs(limit=1000))
        return {job.job_id: job for job in answer.jobs}

    async def fetch_node_views(self) -> tuple[NodeView, ...]:
        return (await self.send_request(ListNodes())).nodes

    async def send_request(self, request: Request[_Reply], *, token: str = "") -> _Reply:
        """Send a request to the leader, with retries; as the owner unless `token` is given."""
        while True:
            for host in self.controller_hosts:
                if host in self.outdated_controller_hosts:
                    continue
                access = self.make_access(host, token)
                try:
                    async with connect_authenticated(
                        self._client_network, access, timeout_s=_CLIENT_CALL_TIMEOUT_S, program="sim"
                    ) as (peer, now):
                        if now.leading:
                            return await peer.call(request, timeout_s=_CLIENT_CALL_TIMEOUT_S)
                except GenieError as error:
                    if not error.retryable:
                        raise
            await asyncio.sleep(0.5)

    @property
    def _client_network(self) -> SimNetwork:
        return SimNetwork(self.world, CLIENT_HOST)

    def make_access(self, host: str, token: str = "") -> Access:
        """How to connect to a controller; as the owner unless `token` is given."""
        if not self._owner_token:
            paths = [self.directory / each / OWNER_TOKEN_FILE for each in self.controller_hosts]
            self._owner_token = next(path for path in paths if path.exists()).read_text("utf-8")
        text = token or self._owner_token
        return Access(host=host, port=CONTROLLER_PORT, token=parse_token(text), tls=None)

    async def _wait_for_leader(self) -> None:
        paths = [self.directory / host / OWNER_TOKEN_FILE for host in self.controller_hosts]
        while not any(path.exists() for path in paths):
            await asyncio.sleep(0.1)

    async def _join_node(self, host: str) -> None:
        created = await self.send_request(CreateToken(kind=TokenKind.JOIN))
        hosts = sorted(self.controller_hosts, key=lambda each: not self.is_leader(each))
        leader = next((each for each in hosts if self.is_up(each)), hosts[0])
        await join_cluster(
            leader,
            CONTROLLER_PORT,
            created.token,
            state_dir=self.directory / host,
            requested_node_id=self.node_id(host),
            is_node_id_fixed=True,
            network=SimNetwork(self.world, host),
            offload=self._disk_of(host),
            clock=SimClock(self.world, host),
        )
