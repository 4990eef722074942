"""A controller of genie/controller in the simulator, with nodes that cost as little as possible.

Network, clocks and store are those of genie/sim. A node joins, registers, sends a heartbeat per second,
confirms launches and reports their exit in its next heartbeat. It is not the agent of genie/agent: that of
the simulator polls its processes, which would hide the cost of the controller.
"""

from __future__ import annotations

import asyncio
import itertools
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
from placement_roles import make_node_info

from genie.config import ControllerConfig
from genie.controller.controller import Controller
from genie.errors import FencedError
from genie.model.job import JobSpec, Resources
from genie.model.messages import (
    AGENT_REQUESTS,
    ConfirmLaunch,
    CreateToken,
    Done,
    ExitReport,
    Heartbeat,
    Launch,
    Message,
    Register,
    RunningJob,
    SubmitJob,
)
from genie.model.messages.handshake import Join
from genie.model.node import NodeInfo
from genie.model.tenant import TokenKind
from genie.runtime import rpc, tls
from genie.runtime.credentials import Access, connect_authenticated, read_owner_token
from genie.runtime.rpc import Peer
from genie.sim.loop import SimulatedLoop
from genie.sim.store import MemoryStore
from genie.sim.world import SimClock, SimNetwork, World
from genie.tenancy.access import parse_token

CONTROLLER, OWNER = "127.0.1.1", "127.0.9.9"
PORT = 5555
HEARTBEAT_S = 1.0
LATENCY_S = 0.0001
CALL_S = 60.0


class SimulatedNodes:
    """One controller and its nodes on an event loop of their own, which only runs during a measurement."""

    def __init__(self, nodes: int, *, gpus: int, directory: Path) -> None:
        self.nodes = nodes
        self._gpus = gpus
        self._directory = directory
        self._runner = asyncio.Runner(loop_factory=SimulatedLoop)
        self._heartbeats = 0
        self._registered = 0
        self._numbers = itertools.count()
        self._stop: asyncio.Event | None = None
        self._ready: asyncio.Event | None = None
        self._owner: Peer | None = None

    @classmethod
    @contextmanager
    def started(cls, nodes: int, *, gpus: int) -> Iterator[SimulatedNodes]:
        """Yields a cluster whose nodes have all registered."""
        with tempfile.TemporaryDirectory(prefix="genie-sim-") as name:
            cluster = cls(nodes, gpus=gpus, directory=Path(name))
            with cluster._runner as runner:
                runner.run(cluster._start())
                try:
                    yield cluster
                finally:
                    runner.run(cluster._end())

    def measure_heartbeats_us(self, count: int) -> float:
        """CPU time of this process per heartbeat, over about `count` heartbeats."""
        before, began_s = self._heartbeats, time.process_time()
        self._runner.run(asyncio.sleep(count / self.nodes * HEARTBEAT_S))
        return (time.process_time() - began_s) / (self._heartbeats - before) * 1e6

    def measure_submits_us(self, count: int, *, heartbeat_us: float) -> float:
        """CPU time per job, from its submission to its end, without that of the heartbeats meanwhile."""
        before, began_s = self._heartbeats, time.process_time()
        self._runner.run(self._submit(count))
        cpu_us = (time.process_time() - began_s) * 1e6
        return (cpu_us - (self._heartbeats - before) * heartbeat_us) / count

    async def _submit(self, count: int) -> None:
        assert self._owner is not None
        spec = JobSpec(name="bench", command=("true",), resources=Resources(gpus=1))
        requests = [SubmitJob(spec=spec, request_id=f"bench-{next(self._numbers)}") for _ in range(count)]
        for reply in await self._owner.call_each(requests, timeout_s=CALL_S):
            if isinstance(reply, Exception):
                raise reply
        await asyncio.sleep(2 * HEARTBEAT_S)  # until the nodes have reported the exits

    # --- controller and nodes -------------------------------------------------------------------

    async def _start(self) -> None:
        self._stop, self._ready = asyncio.Event(), asyncio.Event()
        # Held by the runner's loop, which only runs during the calls of this class.
        self._running = asyncio.ensure_future(self._run())
        waiting = asyncio.ensure_future(self._ready.wait())
        await asyncio.wait([self._running, waiting], return_when=asyncio.FIRST_COMPLETED)
        if self._running.done():
            waiting.cancel()
            self._running.result()

    async def _end(self) -> None:
        assert self._stop is not None
        self._stop.set()
        await self._running

    async def _run(self) -> None:
        assert self._stop is not None
        world = World(self.nodes)
        world.mean_frame_delay_s = LATENCY_S
        store = await MemoryStore.open(clock=SimClock(world, "store"))
        controller = Controller(
            ControllerConfig(bind=CONTROLLER, port=PORT, tls="off"),
            state_dir=self._directory,
            store=store,
            network=SimNetwork(world, CONTROLLER),
            clock=SimClock(world, CONTROLLER),
            name="bench",
        )
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(controller.run())]
            await controller.wait_ready()
            owner = read_owner_token(self._directory)
            assert owner is not None
            access = Access(host=CONTROLLER, port=PORT, token=owner, tls=None)
            network = SimNetwork(world, OWNER)
            async with connect_authenticated(network, access, timeout_s=CALL_S, program="bench") as (peer, _):
                self._owner = peer
                for number in range(self.nodes):
                    node = _Node(make_node_info(f"node-{number:04d}", self._gpus), world, self._count)
                    # One after another: the number of unused join tokens is limited.
                    await node.join(
                        (await peer.call(CreateToken(kind=TokenKind.JOIN), timeout_s=CALL_S)).token
                    )
                    tasks.append(group.create_task(node.run(phase_s=number / self.nodes, group=group)))
                await self._stop.wait()
            for task in tasks:
                task.cancel()
        await store.close()

    def _count(self, message: Message) -> None:
        assert self._ready is not None
        if isinstance(message, Register):
            self._registered += 1
            if self._registered == self.nodes:
                self._ready.set()
        else:
            self._heartbeats += 1


class _Node:
    """`count` is called with every message that the controller has acknowledged."""

    def __init__(self, info: NodeInfo, world: World, count: Callable[[Message], None]) -> None:
        self._info = info
        self._count = count
        self._network = SimNetwork(world, f"127.0.2.{info.node_id}")
        self._running: dict[str, RunningJob] = {}
        self._group: asyncio.TaskGroup | None = None
        self._beats = 0
        self._access: Access | None = None

    async def join(self, token: str) -> None:
        _, csr_pem = tls.new_key_and_csr()
        request = Join(
            token=token, requested_node_id=self._info.node_id, csr_pem=csr_pem, must_get_requested_id=True
        )
        async with rpc.dial(self._network, CONTROLLER, PORT, tls=None, timeout_s=CALL_S) as peer:
            joined = await peer.call(request, timeout_s=CALL_S)
        self._access = Access(host=CONTROLLER, port=PORT, token=parse_token(joined.token), tls=None)

    async def run(self, *, phase_s: float, group: asyncio.TaskGroup) -> None:
        """After `join`."""
        assert self._access is not None
        self._group = group
        async with connect_authenticated(
            self._network,
            self._access,
            timeout_s=CALL_S,
            program="bench",
            requests=AGENT_REQUESTS,
            handler=self._handle,
        ) as (peer, _):
            register = Register(node=self._info)
            await peer.call(register, timeout_s=CALL_S)
            self._count(register)
            await asyncio.sleep(phase_s * HEARTBEAT_S)
            while True:
                await self._send_heartbeat(peer)
                await asyncio.sleep(HEARTBEAT_S)

    async def _handle(self, peer: Peer, request: Message) -> Message:
        if isinstance(request, Launch):
            assert self._group is not None
            self._group.create_task(self._confirm(peer, request.job_id, request.placement.epoch))
        return Done()

    async def _confirm(self, peer: Peer, job_id: str, epoch: int) -> None:
        confirmation = ConfirmLaunch(job_id=job_id, epoch=epoch, incarnation=self._info.incarnation)
        with suppress(FencedError):  # the launch was revoked
            await peer.call(confirmation, timeout_s=CALL_S)
            self._running[job_id] = RunningJob(job_id=job_id, epoch=epoch)

    async def _send_heartbeat(self, peer: Peer) -> None:
        self._beats += 1
        ended, self._running = tuple(self._running.values()), {}
        heartbeat = Heartbeat(
            node_id=self._info.node_id,
            incarnation=self._info.incarnation,
            # A real node reports another memory usage each time.
            node=msgspec.structs.replace(self._info, memory_used_bytes=self._beats),
            exits=tuple(
                ExitReport(job_id=job.job_id, epoch=job.epoch, exit_code=0, reason="", ended_at=0.0)
                for job in ended
            ),
        )
        await peer.call(heartbeat, timeout_s=CALL_S)
        self._count(heartbeat)
