"""A fake agent: implements the protocol over a real connection and starts no processes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import msgspec

from genie.errors import GenieError
from genie.model.messages import (
    AGENT_REQUESTS,
    ConfirmLaunch,
    Done,
    ExitReport,
    Heartbeat,
    HeartbeatAck,
    Kill,
    Launch,
    Leave,
    LogChunk,
    Message,
    ReadLog,
    Register,
    Registered,
    RunningJob,
)
from genie.model.node import GPUInfo, NodeInfo, NodeRole, NodeStatus, Vendor
from genie.runtime.credentials import Access, connect_authenticated
from genie.runtime.network import Network
from genie.runtime.rpc import Peer

CALL_S = 10.0


def make_node_info(
    node_id: str,
    *,
    gpus: int = 1,
    vendor: Vendor = Vendor.NVIDIA,
    cpus: float = 8.0,
    memory_bytes: int = 16 * 1024**3,
    incarnation: int = 1,
) -> NodeInfo:
    return NodeInfo(
        node_id=node_id,
        hostname=node_id,
        role=NodeRole.WORKER,
        host="127.0.0.1",
        gpus=tuple(
            GPUInfo(gpu_id=index, name="Fake", vendor=vendor, memory_total_bytes=1 << 33)
            for index in range(gpus)
        ),
        cpus=cpus,
        memory_total_bytes=memory_bytes,
        status=NodeStatus.HEALTHY,
        incarnation=incarnation,
    )


class FakeAgent:
    """Puts accepted requests into `launches` and `kills`. If `refuse` is set, launches fail with it."""

    def __init__(self, info: NodeInfo) -> None:
        self.info = info
        self.peer: Peer | None = None
        self.launches: asyncio.Queue[Launch] = asyncio.Queue()
        self.kills: asyncio.Queue[Kill] = asyncio.Queue()
        self.running: dict[str, RunningJob] = {}
        self.elapsed_s = 0.001
        """Elapsed time that it reports for all running jobs."""
        self.exits: dict[str, ExitReport] = {}
        self.logs: dict[str, bytes] = {}
        """Log by job, or by job@epoch if it depends on the epoch."""
        self.refuse: GenieError | None = None
        self.hang: asyncio.Event | None = None

    @asynccontextmanager
    async def connected(self, network: Network, access: Access) -> AsyncIterator[FakeAgent]:
        async with AsyncExitStack() as stack:
            self.peer, _ = await stack.enter_async_context(
                connect_authenticated(
                    network,
                    access,
                    timeout_s=CALL_S,
                    program="fake agent",
                    requests=AGENT_REQUESTS,
                    handler=self._handle,
                )
            )
            yield self

    async def register(self, *exits: ExitReport) -> Registered:
        request = Register(node=self.info, exits=exits, running=tuple(self.running.values()))
        return await self._peer.call(request, timeout_s=CALL_S)

    async def leave(self) -> None:
        request = Leave(node_id=self.info.node_id, incarnation=self.info.incarnation)
        await self._peer.call(request, timeout_s=CALL_S)

    async def beat(self, **changes: object) -> HeartbeatAck:
        """Sends one heartbeat and drops the exit reports that the controller has settled."""
        request = Heartbeat(
            node_id=self.info.node_id,
            incarnation=self.info.incarnation,
            node=self.info,
            running=tuple(
                msgspec.structs.replace(job, elapsed_s=self.elapsed_s) for job in self.running.values()
            ),
            exits=tuple(self.exits.values()),
        )
        ack = await self._peer.call(msgspec.structs.replace(request, **changes), timeout_s=CALL_S)
        for order in ack.settled_exits:
            self.exits.pop(order.job_id, None)
        return ack

    async def next_launch(self) -> Launch:
        async with asyncio.timeout(CALL_S):
            return await self.launches.get()

    async def next_kill(self) -> Kill:
        async with asyncio.timeout(CALL_S):
            return await self.kills.get()

    async def confirm(self, launch: Launch, *, epoch: int | None = None, wait_s: float = 0.0) -> None:
        epoch = launch.placement.epoch if epoch is None else epoch
        request = ConfirmLaunch(
            job_id=launch.job_id, epoch=epoch, incarnation=launch.placement.incarnation, wait_s=wait_s
        )
        await self._peer.call(request, timeout_s=CALL_S)
        self.running[launch.job_id] = RunningJob(job_id=launch.job_id, epoch=epoch)

    async def start_next(self) -> Launch:
        launch = await self.next_launch()
        await self.confirm(launch)
        return launch

    def end(
        self,
        launch: Launch,
        exit_code: int | None = 0,
        *,
        reason: str = "",
        started: bool = True,
        is_caused_by_node: bool = False,
        needed_disk_bytes: int = 0,
    ) -> ExitReport:
        """Records the exit of the job; the next heartbeat reports it."""
        self.running.pop(launch.job_id, None)
        report = ExitReport(
            job_id=launch.job_id,
            epoch=launch.placement.epoch,
            exit_code=exit_code,
            reason=reason,
            ended_at=0.0,
            started=started,
            is_caused_by_node=is_caused_by_node,
            needed_disk_bytes=needed_disk_bytes,
        )
        self.exits[launch.job_id] = report
        return report

    def restarted(self) -> FakeAgent:
        """The agent of the same node after a restart: next incarnation, no jobs, no launches."""
        info = msgspec.structs.replace(self.info, incarnation=self.info.incarnation + 1)
        return FakeAgent(info)

    @property
    def _peer(self) -> Peer:
        assert self.peer is not None
        return self.peer

    async def _handle(self, peer: Peer, request: Message) -> Message:
        if self.hang is not None:
            await self.hang.wait()
        if isinstance(request, Launch):
            if self.refuse is not None:
                raise self.refuse
            await self.launches.put(request)
        elif isinstance(request, Kill):
            await self.kills.put(request)
        elif isinstance(request, ReadLog):
            return await self._read_log(request)
        return Done()

    async def _read_log(self, request: ReadLog) -> LogChunk:
        log = self.logs.get(f"{request.job_id}@{request.epoch}", self.logs.get(request.job_id, b""))
        data = log[request.offset :][: request.bytes_max]
        end = request.offset + len(data)
        return LogChunk(data=data, start_offset=request.offset, next_offset=end, eof=True)
