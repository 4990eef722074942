"""A controller for sessions, over the real wire, on a thread of its own: it can vanish and come back.

It knows nodes and session jobs as lists that a test fills in. Not for: proving anything about
controllers (tests/controller and tests/integration do that).
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from pathlib import Path

from genie.errors import GenieError, TokenRefusedError
from genie.model.allocation import NodeLedger
from genie.model.job import Job, JobKind, JobSpec, JobState
from genie.model.messages import (
    CONTROLLER_REQUESTS,
    CancelJob,
    DeviceReply,
    Done,
    Endpoint,
    GetStatus,
    Hello,
    JobReply,
    ListNodes,
    Message,
    NodesReply,
    NodeView,
    OpenDevice,
    SessionEnd,
    SessionHeartbeat,
    StatusReply,
    WaitDevice,
    Welcome,
)
from genie.model.node import GPUInfo, NodeInfo, NodeRole, NodeStatus, Vendor
from genie.model.tenant import DEFAULT_TENANT, TokenKind
from genie.runtime import rpc, wire
from genie.runtime.credentials import OWNER_TOKEN_FILE, LocalCluster
from genie.runtime.files import write_private
from genie.runtime.network import Channel, TcpNetwork
from genie.tenancy.access import NO_PIN, new_token

TOKEN = new_token(TokenKind.OWNER, token_id="owner1", secret=b"\x01" * 32, pin=NO_PIN)


def gpu(gpu_id: int = 0, *, vendor: Vendor = Vendor.CPU, name: str = "Test CPU") -> GPUInfo:
    return GPUInfo(gpu_id=gpu_id, name=name, vendor=vendor, memory_total_bytes=1 << 30)


def node(
    node_id: str,
    *gpus: GPUInfo,
    status: NodeStatus = NodeStatus.HEALTHY,
    last_heartbeat: float = 1.0,
) -> NodeInfo:
    return NodeInfo(
        node_id=node_id,
        hostname=f"host-of-{node_id}",
        role=NodeRole.WORKER,
        host="127.0.0.1",
        gpus=gpus,
        status=status,
        last_heartbeat=last_heartbeat,
    )


def session_job(job_id: str, state: JobState, *, reason: str = "") -> Job:
    return Job(
        job_id=job_id,
        tenant=DEFAULT_TENANT,
        owner=TOKEN.token_id,
        spec=JobSpec(name="session", command=(), kind=JobKind.SESSION),
        state=state,
        reason=reason,
        submitted_at=1.0,
        sequence=1,
    )


class SmallController:
    """Started with `start()`, ended with `stop()`; the port stays the same in between."""

    def __init__(self) -> None:
        self.port = 0
        self.nodes: tuple[NodeInfo, ...] = (node("n1", gpu()),)
        self.device = DeviceReply(
            job=session_job("j-1", JobState.RUNNING),
            endpoint=Endpoint(host="127.0.0.1", port=1, server_name="j-1.executor.genie.internal"),
            ticket="the-ticket",
        )
        self.asked: list[Message] = []
        self.refusals: dict[type[Message], GenieError] = {}
        """What is answered instead, by kind of request."""
        self.answers_hello = True
        self.leader = ""
        """host:port of another controller, where this one only stands by."""
        self._thread: threading.Thread | None = None
        self._stop: Callable[[], object] = lambda: None
        self._listening = threading.Event()

    def __enter__(self) -> SmallController:
        self.start()
        return self

    def __exit__(self, *ignored: object) -> None:
        self.stop()

    def start(self) -> None:
        self._listening.clear()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name="small-controller")
        self._thread.start()
        assert self._listening.wait(10)

    def stop(self) -> None:
        """Every connection is cut, and nothing listens any more."""
        if self._thread is not None:
            self._stop()
            self._thread.join(10)
            self._thread = None

    def announce(self, state_dir: Path) -> None:
        """What a real controller leaves behind, so that sessions find it by themselves."""
        write_private(state_dir / OWNER_TOKEN_FILE, str(TOKEN).encode())
        LocalCluster(host="127.0.0.1", port=self.port, cluster_id="c1").write(state_dir)

    def count(self, kind: type[Message]) -> int:
        return sum(isinstance(request, kind) for request in list(self.asked))

    async def _serve(self) -> None:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        self._stop = lambda: loop.call_soon_threadsafe(task.cancel)
        with contextlib.suppress(asyncio.CancelledError):
            await TcpNetwork().serve(
                "127.0.0.1", self.port, self._accept, tls=None, on_listening=self._is_listening
            )

    def _is_listening(self, port: int) -> None:
        self.port = port
        self._listening.set()

    async def _accept(self, channel: Channel) -> None:
        await rpc.Peer(channel, requests=CONTROLLER_REQUESTS, handler=self._handle).run()

    async def _handle(self, peer: rpc.Peer, request: Message) -> Message:
        self.asked.append(request)
        if type(request) in self.refusals:
            raise self.refusals[type(request)]
        if isinstance(request, Hello):
            return await self._greet(peer, request)
        if isinstance(request, SessionHeartbeat | ListNodes):
            views = (NodeView(info=info, ledger=NodeLedger(node_id=info.node_id)) for info in self.nodes)
            return NodesReply(nodes=tuple(views))
        if isinstance(request, OpenDevice | WaitDevice):
            return self.device
        if isinstance(request, CancelJob):
            return JobReply(job=self.device.job)
        if isinstance(request, GetStatus):
            return self._status()
        assert isinstance(request, SessionEnd), request
        return Done()

    def _status(self) -> StatusReply:
        return StatusReply(
            cluster_id="c1",
            version="0.0",
            leading=not self.leader,
            leader=self.leader,
            store="sqlite",
            store_ok=True,
            started_at=1.0,
            nodes={},
            jobs={},
            gpus_total=0,
            gpus_free=0,
            clients=0,
        )

    async def _greet(self, peer: rpc.Peer, hello: Hello) -> Welcome:
        if not self.answers_hello:
            await asyncio.get_running_loop().create_future()
        if hello.token != str(TOKEN):
            raise TokenRefusedError("token is unknown here or its secret is wrong", hint="make another")
        peer.channel.cap_bytes = wire.FRAME_BYTES_MAX
        return Welcome(
            cluster_id="c1", version="0.0", tenant=DEFAULT_TENANT, kind=TokenKind.OWNER, leading=True
        )
