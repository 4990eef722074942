"""A whole cluster on simulated time: the real controllers and the real agents, and a seeded saboteur.

Addresses are in 127/8, because without TLS nothing else is allowed. One seed, one run. Not for:
speed or placement studies (that is the scheduler's simulator).
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import msgspec

from genie.agent.agent import Agent
from genie.agent.identity import read_identity
from genie.agent.joining import join
from genie.config import AgentConfig, ControllerConfig
from genie.controller.controller import Controller
from genie.errors import GenieError
from genie.hardware.host import HostFacts
from genie.model.job import Job, JobSpec, Resources
from genie.model.messages import CreateToken, ListJobs, ListNodes, Message, NodeView, Request, SubmitJob
from genie.model.node import GPUInfo, Vendor
from genie.model.tenant import TokenKind
from genie.runtime.credentials import OWNER_TOKEN_FILE, Access, greet
from genie.sim.processes import DURATION_VARIABLE, SHARE_VARIABLE, Machines, SimLauncher
from genie.sim.store import MemoryStore
from genie.sim.world import SimClock, SimNetwork, World
from genie.tenancy.access import parse_token

_Reply = TypeVar("_Reply", bound=Message)

PORT = 5555
_CLIENT = "127.0.9.9"
_CALL_S = 5.0


class _Accelerators:
    """Those with these ids, asked for anew each time."""

    def __init__(self, ids: Callable[[], Collection[int]]) -> None:
        self._ids = ids

    async def read_async(self, held: Collection[int] = ()) -> tuple[GPUInfo, ...]:
        return tuple(
            GPUInfo(gpu_id=gpu_id, name="simulated", vendor=Vendor.CPU, memory_total_bytes=1 << 30)
            for gpu_id in sorted(self._ids())
        )


@dataclass
class _Running:
    """One life of one actor."""

    task: asyncio.Task[None]
    launcher: SimLauncher | None = None
    controller: Controller | None = None


@dataclass
class SimCluster:
    """Start inside `async with asyncio.TaskGroup()`; `stop` ends every actor."""

    seed: int
    directory: Path
    group: asyncio.TaskGroup
    nodes: int = 3
    gpus: int = 2
    controllers: int = 1
    world: World = field(init=False)
    machines: Machines = field(init=False)

    def __post_init__(self) -> None:
        self.world = World(self.seed)
        self.machines = Machines(self.world)
        self._lives: dict[str, _Running] = {}
        self._stores: dict[str, MemoryStore] = {}
        self._dying: dict[str, list[asyncio.Task[None]]] = {}
        self._requests = 0
        self._tokens: dict[str, str] = {}
        """Of users, by tenant."""
        self._gpu_ids = {host: tuple(range(self.gpus)) for host in self.node_hosts}

    @property
    def controller_hosts(self) -> list[str]:
        return [f"127.0.1.{index + 1}" for index in range(self.controllers)]

    @property
    def node_hosts(self) -> list[str]:
        return [f"127.0.2.{index + 1}" for index in range(self.nodes)]

    def node_id(self, host: str) -> str:
        return host.replace(".", "-")

    def is_up(self, host: str) -> bool:
        return host in self._lives

    @property
    def leader(self) -> Controller | None:
        """One that believes that it leads."""
        lives = (self._lives[host] for host in self.controller_hosts if host in self._lives)
        several = (life.controller for life in lives)
        return next((one for one in several if one is not None and one.is_leading), None)

    @property
    def memory(self) -> MemoryStore:
        """The store as it is, whoever can reach it."""
        return self._memory

    async def start(self) -> None:
        self._memory = await MemoryStore.open(clock=SimClock(self.world, "store"))
        self._lives["machines"] = _Running(self.group.create_task(self.machines.run()))
        for host in self.controller_hosts:
            self.start_controller(host)
        await self._until_leading()
        for host in self.node_hosts:
            await self._join(host)
            self.start_agent(host)

    async def stop(self) -> None:
        for host in list(self._lives):
            self.crash(host)
        await asyncio.sleep(2.0)
        for store in self._stores.values():
            await store.close()
        await self._memory.close()

    # --- lives ------------------------------------------------------------------------------

    def start_controller(self, host: str) -> None:
        self._stores[host] = self._memory.connect()

        async def live() -> None:
            await self._gone(host)
            controller = Controller(
                ControllerConfig(bind=host, port=PORT, tls="off"),
                state_dir=self.directory / host,
                store=self._stores[host],
                network=SimNetwork(self.world, host),
                clock=SimClock(self.world, host),
                name=host,
                random_bytes=self.world.random.randbytes,
            )
            life.controller = controller
            await controller.run()

        life = self._lives[host] = _Running(self.group.create_task(live()))

    def start_agent(self, host: str) -> None:
        launcher = SimLauncher(self.world, self.machines, host)

        async def live() -> None:
            await self._gone(host)
            node_dir = next((self.directory / host / "agents").iterdir())
            agent = Agent(
                AgentConfig(),
                node_dir=node_dir,
                access=read_identity(node_dir),
                network=SimNetwork(self.world, host),
                clock=SimClock(self.world, host),
                rng=random.Random(self.world.random.random()),
                inventory=_Accelerators(lambda: self._gpu_ids[host]),
                launcher=launcher,
                facts=lambda: HostFacts(
                    cpus=8.0, memory_total_bytes=1 << 34, memory_used_bytes=0, hostname=host
                ),
            )
            await agent.run()

        self._lives[host] = _Running(self.group.create_task(live()), launcher)

    def crash(self, host: str, *, power: bool = False) -> None:
        """kill -9 of the actor, or of its whole machine with `power`."""
        life = self._lives.pop(host, None)
        if life is None:
            return
        if life.launcher is not None:
            life.launcher.dead = True
        if power:
            self.machines.lose_host(host)
        if host in self._stores:
            # The dead write nothing: not even the resignation that cancelling would bring about.
            self._stores[host].set_available(False)
        self.world.crash(host, silent=power)
        life.task.cancel()
        self._dying.setdefault(host, []).append(life.task)

    async def _gone(self, host: str) -> None:
        """A killed actor's tasks take a few turns of the loop to end; its next life starts after that."""
        if dying := [task for task in self._dying.get(host, ()) if not task.done()]:
            await asyncio.wait(dying)

    def restart(self, host: str) -> None:
        if host not in self._lives:
            (self.start_controller if host in self.controller_hosts else self.start_agent)(host)

    def set_gpus(self, host: str, gpu_ids: Collection[int]) -> None:
        """From its next look on, the node's agent finds these."""
        self._gpu_ids[host] = tuple(gpu_ids)

    def lose_answer(self, host: str) -> None:
        """This controller's next change happens, and it does not hear so."""
        self._stores[host].lose_next_answer()

    def set_store(self, host: str, *, available: bool) -> None:
        self._stores[host].set_available(available)

    # --- as a client ------------------------------------------------------------------------

    async def submit(self, *, gpus: int, seconds: float) -> str:
        """The job's id, once it is taken."""
        spec = JobSpec(name="sim", command=("simulated",), resources=Resources(gpus=gpus))
        return await self.submit_spec(spec, seconds=seconds)

    async def submit_spec(self, spec: JobSpec, *, seconds: float, tenant: str = "") -> str:
        """Asked as often as needed: the request id makes that safe. Of the owner's tenant unless told."""
        self._requests += 1
        env = {DURATION_VARIABLE: str(seconds), SHARE_VARIABLE: str(spec.resources.gpu_milli)}
        spec = msgspec.structs.replace(spec, name=f"{spec.name}-{self._requests}", env=env)
        request = SubmitJob(spec=spec, request_id=f"request-{self.seed}-{self._requests}")
        token = await self._token(tenant) if tenant else ""
        return (await self.ask(request, token=token)).job.job_id

    async def _token(self, tenant: str) -> str:
        if tenant not in self._tokens:
            created = await self.ask(CreateToken(kind=TokenKind.USER, tenant=tenant))
            self._tokens[tenant] = created.token
        return self._tokens[tenant]

    async def jobs(self) -> dict[str, Job]:
        answer = await self.ask(ListJobs(limit=1000))
        return {job.job_id: job for job in answer.jobs}

    async def node_views(self) -> tuple[NodeView, ...]:
        return (await self.ask(ListNodes())).nodes

    async def ask(self, request: Request[_Reply], *, token: str = "") -> _Reply:
        """Of whoever leads, until it is answered; as the owner unless there is a token."""
        while True:
            for host in self.controller_hosts:
                access = self._access(host, token)
                try:
                    async with greet(self._network, access, timeout_s=_CALL_S, program="sim") as (peer, now):
                        if now.leading:
                            return await peer.call(request, timeout_s=_CALL_S)
                except GenieError as error:
                    if not error.retryable:
                        raise
            await asyncio.sleep(0.5)

    @property
    def _network(self) -> SimNetwork:
        return SimNetwork(self.world, _CLIENT)

    def _access(self, host: str, token: str) -> Access:
        paths = [self.directory / each / OWNER_TOKEN_FILE for each in self.controller_hosts]
        text = token or next(path for path in paths if path.exists()).read_text("utf-8")
        return Access(host=host, port=PORT, token=parse_token(text), tls=None)

    async def _until_leading(self) -> None:
        paths = [self.directory / host / OWNER_TOKEN_FILE for host in self.controller_hosts]
        while not any(path.exists() for path in paths):
            await asyncio.sleep(0.1)

    async def _join(self, host: str) -> None:
        created = await self.ask(CreateToken(kind=TokenKind.JOIN))
        leader = next(each for each in self.controller_hosts if self.is_up(each))
        await join(
            leader,
            PORT,
            created.token,
            state_dir=self.directory / host,
            node_id_wish=self.node_id(host),
            network=SimNetwork(self.world, host),
        )
