"""A real controller on loopback in the process of the test, with clients and fake agents."""

from __future__ import annotations

import asyncio
import itertools
import shutil
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from genie.config import ControllerConfig
from genie.controller.controller import Controller
from genie.controller.store import Store
from genie.controller.store.sqlite import SqliteStore
from genie.model.job import Job, JobSpec, JobState, PlacementConstraints, Resources
from genie.model.messages import (
    CreateToken,
    GetJob,
    GetStatus,
    Launch,
    ListNodes,
    Message,
    Request,
    StatusReply,
    SubmitJob,
)
from genie.model.messages.handshake import Join
from genie.model.node import NodeInfo
from genie.model.tenant import TokenKind
from genie.processes.clock import Clock, SystemClock
from genie.runtime import rpc, tls
from genie.runtime.credentials import Access, connect_authenticated, make_pinned_client_tls
from genie.runtime.gossip.protocol import GossipSupport
from genie.runtime.network import TcpNetwork
from genie.tenancy.access import parse_token
from tests.fakes.agent import FakeAgent, make_node_info
from tests.fakes.clock import FakeClock
from tests.waiting import until

_Reply = TypeVar("_Reply", bound=Message)
_REQUESTS = itertools.count(1)
CALL_S = 10.0


class Client:
    """An authenticated client."""

    def __init__(self, peer: rpc.Peer) -> None:
        self.peer = peer

    async def ask(self, request: Request[_Reply]) -> _Reply:
        return await self.peer.call(request, timeout_s=CALL_S)

    async def submit(self, *command: str, request_id: str = "", name: str = "job", **wish: object) -> Job:
        spec = JobSpec(name=name, command=command or ("true",), resources=Resources(**wish))
        return await self.submit_spec(spec, request_id=request_id)

    async def submit_spec(self, spec: JobSpec, *, request_id: str = "") -> Job:
        request = SubmitJob(spec=spec, request_id=request_id or f"r{next(_REQUESTS)}")
        return (await self.ask(request)).job

    async def job(self, job_id: str) -> Job:
        return (await self.ask(GetJob(job_id=job_id))).job

    async def until_state(self, job_id: str, state: JobState) -> Job:
        async def reached() -> Job | None:
            job = await self.job(job_id)
            return job if job.state is state else None

        return await until(reached, what=f"{job_id} is {state}")

    async def status(self) -> StatusReply:
        return await self.ask(GetStatus())

    async def node(self, node_id: str) -> NodeInfo:
        nodes = (await self.ask(ListNodes())).nodes
        return next(view.info for view in nodes if view.info.node_id == node_id)

    async def held(self, node_id: str) -> list[str]:
        nodes = (await self.ask(ListNodes())).nodes
        node_holds = next(view.node_holds for view in nodes if view.info.node_id == node_id)
        return [hold.job_id for hold in node_holds.holds]


@dataclass
class RunningController:
    """A running controller. `restart` keeps the store and the state directory."""

    config: ControllerConfig
    state_dir: Path
    clock: Clock
    store: Store
    network: TcpNetwork = field(default_factory=TcpNetwork)
    name: str = "one"
    etcd_endpoints: tuple[str, ...] = ()
    gossip: GossipSupport = field(default_factory=GossipSupport)
    controller: Controller | None = None
    _task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self.controller = Controller(
            self.config,
            state_dir=self.state_dir,
            store=self.store,
            network=self.network,
            clock=self.clock,
            name=self.name,
            etcd_endpoints=lambda: self.etcd_endpoints,
            gossip=self.gossip,
        )
        self._task = asyncio.get_running_loop().create_task(self.controller.run())
        ready = asyncio.get_running_loop().create_task(self.controller.wait_ready())
        await asyncio.wait([ready, self._task], return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()
        if self._task.done():
            await self._task

    async def stop(self) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.wait([self._task])

    async def restart(self) -> None:
        """Restart on the same port."""
        port = self.port
        await self.stop()
        if isinstance(self.store, SqliteStore):
            path = self.store.path
            await self.store.close()
            self.store = await SqliteStore.open(path, clock=self.clock)
        self.config = replace(self.config, port=port)
        await self.start()

    @property
    def port(self) -> int:
        assert self.controller is not None
        return self.controller.port

    async def access(self, token: str = "") -> Access:
        parsed = parse_token(token or (self.state_dir / "owner.token").read_text())
        trusted = await make_pinned_client_tls(
            self.network, "127.0.0.1", self.port, pin=parsed.pin, state_dir=self.state_dir, timeout_s=CALL_S
        )
        return Access("127.0.0.1", self.port, parsed, trusted)

    @asynccontextmanager
    async def client(self, token: str = "") -> AsyncIterator[Client]:
        access = await self.access(token)
        async with connect_authenticated(self.network, access, timeout_s=CALL_S, program="test") as (peer, _):
            yield Client(peer)

    async def token(self, kind: TokenKind, *, tenant: str = "", ttl_s: float | None = None) -> str:
        async with self.client() as owner:
            return (await owner.ask(CreateToken(kind=kind, tenant=tenant, ttl_s=ttl_s))).token

    async def join(self, node_id: str) -> Access:
        """Join a node with a new join token and return its access."""
        token = await self.token(TokenKind.JOIN)
        access = await self.access(token)
        key_pem, csr_pem = tls.new_key_and_csr()
        async with rpc.dial(self.network, access.host, access.port, tls=access.tls, timeout_s=CALL_S) as peer:
            joined = await peer.call(
                Join(token=token, requested_node_id=node_id, csr_pem=csr_pem), timeout_s=CALL_S
            )
        own = await self.access(joined.token)
        if own.tls is None:
            return own
        folder = self.state_dir / "nodes" / joined.node_id
        folder.mkdir(parents=True)
        (folder / "node.pem").write_text(joined.certificate_pem)
        (folder / "node.key").write_bytes(key_pem)
        context = tls.client_context(joined.ca_pem, certificate=folder / "node.pem", key=folder / "node.key")
        return replace(own, tls=replace(own.tls, context=context))

    @asynccontextmanager
    async def agent(self, node_id: str = "n1", **facts: object) -> AsyncIterator[FakeAgent]:
        """A node that has joined, registered and sent a heartbeat."""
        access = await self.join(node_id)
        async with FakeAgent(make_node_info(node_id, **facts)).connected(self.network, access) as agent:  # type: ignore[arg-type]
            await agent.register()
            await agent.beat()
            yield agent


@asynccontextmanager
async def running_controller(
    folder: Path,
    *,
    clock: Clock | None = None,
    store: Store | None = None,
    name: str = "one",
    store_setting: str = "sqlite",
    etcd_endpoints: tuple[str, ...] = (),
    gossip: GossipSupport | None = None,
    **settings: object,
) -> AsyncIterator[RunningController]:
    """Run a controller, by default without TLS and on a free port. The leader lease outlasts simulated
    time; the time to live of a node is short."""
    clock = clock or SystemClock()
    given: dict[str, object] = {
        "port": 0,
        "tls": "off",
        "leader_ttl_s": 60.0,
        "node_ttl_s": 10.0,
        "store": store_setting,
        **settings,
    }
    state_dir = folder / "state"
    opened = store or await SqliteStore.open(state_dir / "controller" / "store.sqlite3", clock=clock)
    config = ControllerConfig(**given)  # type: ignore[arg-type]
    one = RunningController(
        config,
        state_dir,
        clock,
        opened,
        name=name,
        etcd_endpoints=etcd_endpoints,
        gossip=gossip or GossipSupport(),
    )
    try:
        await one.start()
        try:
            yield one
        finally:
            await one.stop()
    finally:
        await one.store.close()
        shutil.rmtree(state_dir / "nodes", ignore_errors=True)


async def advance_until_launch(clock: FakeClock, *agents: FakeAgent) -> Launch:
    """Advance the clock, with heartbeats, until the first of these agents gets a launch."""

    async def given() -> bool:
        await clock.advance(0.5)
        for agent in agents:
            await agent.beat()
        return not agents[0].launches.empty()

    await until(given, what="a launch")
    return await agents[0].next_launch()


def job_spec(name: str = "job", *, gpus: int = 1, node_id: str = "", **constraints: object) -> JobSpec:
    return JobSpec(
        name=name,
        command=("true",),
        resources=Resources(gpus=gpus),
        node_id=node_id,
        constraints=PlacementConstraints(**constraints),  # type: ignore[arg-type]
    )


async def connect_agent(
    one: RunningController, info: NodeInfo, stack: AsyncExitStack, *, kind: type[FakeAgent] = FakeAgent
) -> FakeAgent:
    """Join and register a node until `stack` is closed."""
    access = await one.join(info.node_id)
    agent = await stack.enter_async_context(kind(info).connected(one.network, access))
    await agent.register()
    await agent.beat()
    return agent
