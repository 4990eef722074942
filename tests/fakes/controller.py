"""The fake controller of tests for agents, sessions and clients: real network, real messages.

It records requests in lists, answers as its attributes say, and sends orders to agents on request.
tests/controller/test_fake_controller.py compares its answers with those of the real one. ThreadedController
runs it on a thread of its own for tests that block.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import secrets
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Self

import genie
from genie.errors import GenieError, ProtocolError, TokenMissingError, TokenRefusedError
from genie.model.allocation import NodeHolds
from genie.model.job import Job, JobKind, JobSpec, JobState, Placement, Resources, Workdir
from genie.model.messages import (
    CHUNK_BYTES_MAX,
    CONTROLLER_REQUESTS,
    UNAUTHENTICATED_REQUESTS,
    BlobChunk,
    CancelJob,
    ConfirmLaunch,
    DeviceReply,
    Done,
    Endpoint,
    ExecutorReady,
    ExitReport,
    GetBlob,
    GetStatus,
    Heartbeat,
    HeartbeatAck,
    JobOrder,
    JobReply,
    Kill,
    Launch,
    ListNodes,
    LogChunk,
    Message,
    NodesReply,
    NodeView,
    OpenDevice,
    ReadLog,
    Register,
    Registered,
    SessionEnd,
    SessionHeartbeat,
    StatusReply,
    WaitDevice,
)
from genie.model.messages.handshake import (
    Certificate,
    FetchTrust,
    Hello,
    Join,
    Joined,
    RenewCertificate,
    SignExecutor,
    TrustAnchor,
    Welcome,
)
from genie.model.node import NodeInfo
from genie.model.tenant import DEFAULT_TENANT, TokenKind
from genie.processes import files
from genie.runtime import rpc, tls, wire
from genie.runtime.credentials import OWNER_TOKEN_FILE, LocalCluster
from genie.runtime.network import Channel, TcpNetwork
from genie.tenancy.access import NO_PIN, Token, new_token, parse_token
from tests.waiting import TIMEOUT_S, until

HOST = "127.0.0.1"
CLUSTER_ID = "c1"
OWNER_TOKEN = new_token(TokenKind.OWNER, token_id="owner1", secret=b"\x01" * 32, pin=NO_PIN)


def make_session_job(job_id: str, state: JobState, *, reason: str = "") -> Job:
    return Job(
        job_id=job_id,
        tenant=DEFAULT_TENANT,
        owner=OWNER_TOKEN.token_id,
        spec=JobSpec(name="session", command=(), kind=JobKind.SESSION),
        state=state,
        reason=reason,
        submitted_at=1.0,
        sequence=1,
    )


def _make_running_session_reply() -> DeviceReply:
    return DeviceReply(
        job=make_session_job("j-1", JobState.RUNNING),
        endpoint=Endpoint(host=HOST, port=1, server_name="j-1.executor.genie.internal"),
        ticket="the-ticket",
    )


@dataclass
class FakeController:
    """Attributes may be changed at any time. `directory` is for the CA, which TLS and joining need."""

    directory: Path | None = None
    use_tls: bool = False
    ttl_s: float = 10.0
    leading: bool = True
    leader: str = ""
    """HOST:PORT of the leader, when this controller is a standby."""
    generation: int | None = None
    only_token: Token | None = None
    """If set, Hello with another token is rejected."""
    silent: bool = False
    """Sends no replies, like a controller behind a broken link."""
    answers_hello: bool = True
    leader_token: int = 5
    confirm_error: GenieError | None = None
    join_error: GenieError | None = None
    register_error: GenieError | None = None
    certificate_days: float = 1.0
    settle: bool = True
    kill: list[JobOrder] = field(default_factory=list)
    blobs: dict[str, bytes] = field(default_factory=dict)
    held_blobs: dict[str, asyncio.Event] = field(default_factory=dict)
    """By digest: blobs that are not served before the event is set."""
    more_controllers: tuple[str, ...] = ()
    version: str = genie.__version__
    """In the reply to Hello."""
    refusals: dict[type[Message], GenieError] = field(default_factory=dict)
    """Errors to reply with, by type of request."""
    nodes: tuple[NodeInfo, ...] = ()
    nodes_per_reply: int = 1000
    device: DeviceReply = field(default_factory=_make_running_session_reply)

    asked: list[Message] = field(default_factory=list)
    """All requests."""
    hellos: list[Hello] = field(default_factory=list)
    joins: list[Join] = field(default_factory=list)
    registers: list[Register] = field(default_factory=list)
    heartbeats: list[Heartbeat] = field(default_factory=list)
    confirms: list[ConfirmLaunch] = field(default_factory=list)
    ready: list[ExecutorReady] = field(default_factory=list)
    certificates: list[str] = field(default_factory=list)
    """Names in the client certificates of registered nodes."""
    exits: dict[str, ExitReport] = field(default_factory=dict)
    port: int = 0
    _peer: rpc.Peer | None = None
    _authenticated: set[rpc.Peer] = field(default_factory=set)
    _listening: threading.Event = field(default_factory=threading.Event)
    _epochs: int = 0

    def __post_init__(self) -> None:
        if self.directory is None:
            return
        self.write_certificate(now=time.time())

    def write_certificate(self, *, now: float) -> None:
        """Write its own certificate, valid for a day from `now`; used by the next `serve`."""
        assert self.directory is not None
        key, csr = tls.new_key_and_csr()
        files.write_private(self.directory / "controller.key", key)
        certificate = self.authority.issue(csr, name=tls.CONTROLLER_NAME, days=1, now=now)
        files.write_private(self.directory / "controller.pem", certificate.encode())

    @cached_property
    def authority(self) -> tls.CertificateAuthority:
        assert self.directory is not None, "the CA needs a directory"
        return tls.CertificateAuthority.load_or_create(self.directory, now=time.time())

    # --- serving ---------------------------------------------------------------------------

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[FakeController]:
        """Serve for the length of the block; the second time on the same port."""
        async with asyncio.TaskGroup() as group:
            task = group.create_task(self.serve())
            await until(self._listening.is_set, what="the fake controller listens")
            try:
                yield self
            finally:
                task.cancel()

    async def serve(self) -> None:
        """Serve until cancelled."""
        context = None
        if self.use_tls:
            assert self.directory is not None
            context = tls.server_context(
                self.directory / "controller.pem",
                self.directory / "controller.key",
                ca_pem=self.authority.ca_pem,
            )
        try:
            await TcpNetwork().serve(
                HOST, self.port, self._serve_connection, tls=context, on_listening=self._set_listening
            )
        finally:
            self._listening.clear()

    def _set_listening(self, port: int) -> None:
        self.port = port
        self._listening.set()

    async def _serve_connection(self, channel: Channel) -> None:
        async def handle(peer: rpc.Peer, request: Message) -> Message:
            return await self._handle(peer, request)  # looked up for each request: tests replace it

        peer = rpc.Peer(channel, requests=CONTROLLER_REQUESTS, handler=handle)
        try:
            await peer.run()
        finally:
            self._authenticated.discard(peer)

    # --- requests --------------------------------------------------------------------------

    async def _handle(self, peer: rpc.Peer, request: Message) -> Message:
        if self.silent:
            await asyncio.get_running_loop().create_future()
        self.asked.append(request)
        if isinstance(request, GetBlob) and request.digest in self.held_blobs:
            await self.held_blobs[request.digest].wait()
        if type(request) in self.refusals:
            raise self.refusals[type(request)]
        if isinstance(request, Hello):
            return await self._answer_hello(peer, request)
        if type(request) not in UNAUTHENTICATED_REQUESTS and peer not in self._authenticated:
            raise TokenMissingError("this connection is not authenticated", hint="send Hello first")
        if reply := self._answer_client(request):
            return reply
        return self._answer_agent(peer, request)

    async def _answer_hello(self, peer: rpc.Peer, request: Hello) -> Welcome:
        self.hellos.append(request)
        if peer in self._authenticated:
            raise ProtocolError("this connection has already sent Hello")
        if not self.answers_hello:
            await asyncio.get_running_loop().create_future()
        token = parse_token(request.token)
        if self.only_token is not None and str(token) != str(self.only_token):
            raise TokenRefusedError(
                f"token {token.token_id} is unknown here or its secret is wrong", hint="create another"
            )
        self._authenticated.add(peer)
        peer.channel.set_frame_limit(wire.FRAME_BYTES_MAX)
        return Welcome(
            cluster_id=CLUSTER_ID,
            version=self.version,
            tenant=DEFAULT_TENANT,
            kind=token.kind,
            leading=self.leading and not self.leader,
            controllers=(self.address, *self.more_controllers),
            generation=self.generation,
        )

    def _answer_client(self, request: Message) -> Message | None:
        match request:
            case SessionHeartbeat() | ListNodes():
                after = request.after_node_id if isinstance(request, ListNodes) else ""
                views = tuple(
                    NodeView(info=info, node_holds=NodeHolds(node_id=info.node_id))
                    for info in self.nodes
                    if info.node_id > after
                )
                page = views[: self.nodes_per_reply]
                leading = self.leading or isinstance(request, ListNodes)
                return NodesReply(nodes=page, more=len(page) < len(views), leading=leading)
            case OpenDevice() | WaitDevice():
                return self.device
            case CancelJob():
                return JobReply(job=self.device.job)
            case GetStatus():
                return self._make_status_reply()
            case SessionEnd():
                return Done()
        return None

    def _make_status_reply(self) -> StatusReply:
        return StatusReply(
            cluster_id=CLUSTER_ID,
            version=genie.__version__,
            leading=self.leading and not self.leader,
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

    def _answer_agent(self, peer: rpc.Peer, request: Message) -> Message:
        match request:
            case FetchTrust():
                return TrustAnchor(ca_pem=self.authority.ca_pem if self.directory is not None else "")
            case Join():
                return self._answer_join(request)
            case Register():
                return self._answer_register(peer, request)
            case Heartbeat():
                return self._answer_heartbeat(request)
            case ConfirmLaunch():
                self.confirms.append(request)
                if self.confirm_error is not None:
                    raise self.confirm_error
                return Done()
            case ExecutorReady():
                self.ready.append(request)
                return Done()
            case GetBlob():
                data = self.blobs[request.digest]
                part = data[request.offset : request.offset + CHUNK_BYTES_MAX]
                return BlobChunk(data=part, size_bytes=len(data))
            case SignExecutor():
                return self._issue_certificate(request.csr_pem, tls.executor_certificate_name(request.job_id))
            case RenewCertificate():
                return self._issue_certificate(request.csr_pem, peer.channel.certificate_name)
        raise ProtocolError(f"the fake controller does not answer {type(request).__name__}")

    def _answer_join(self, request: Join) -> Joined:
        self.joins.append(request)
        if self.join_error is not None:
            raise self.join_error
        parse_token(request.token)
        signed = (
            self._issue_certificate(request.csr_pem, tls.node_certificate_name(request.requested_node_id))
            if self.use_tls
            else None
        )
        return Joined(
            node_id=request.requested_node_id,
            token=str(self.token(TokenKind.NODE)),
            certificate_pem=signed.certificate_pem if signed else "",
            ca_pem=self.authority.ca_pem if self.use_tls else "",
        )

    def _answer_register(self, peer: rpc.Peer, request: Register) -> Registered:
        if self.register_error is not None:
            raise self.register_error
        self.registers.append(request)
        self.certificates.append(peer.channel.certificate_name)
        self.exits |= {report.job_id: report for report in request.exits}
        self._peer = peer
        return Registered(
            leader_token=self.leader_token,
            ttl_s=self.ttl_s,
            controllers=(self.address, *self.more_controllers),
        )

    def _answer_heartbeat(self, request: Heartbeat) -> HeartbeatAck:
        self.heartbeats.append(request)
        self.exits |= {report.job_id: report for report in request.exits}
        settled = (
            [JobOrder(job_id=one.job_id, epoch=one.epoch) for one in request.exits] if self.settle else []
        )
        return HeartbeatAck(
            leading=self.leading,
            leader_token=self.leader_token,
            jobs_to_kill=tuple(self.kill),
            settled_exits=tuple(settled),
        )

    def _issue_certificate(self, csr_pem: str, name: str) -> Certificate:
        pem = self.authority.issue(csr_pem, name=name, days=self.certificate_days, now=time.time())
        return Certificate(certificate_pem=pem)

    # --- for tests -------------------------------------------------------------------------

    @property
    def address(self) -> str:
        return f"{HOST}:{self.port}"

    def token(self, kind: TokenKind) -> Token:
        pin = self.authority.fingerprint if self.use_tls else NO_PIN
        return new_token(kind, token_id=secrets.token_hex(4), secret=secrets.token_bytes(32), pin=pin)

    def count(self, kind: type[Message]) -> int:
        """Number of requests of this type so far."""
        return sum(isinstance(request, kind) for request in list(self.asked))

    def announce(self, state_dir: Path) -> None:
        """Write what a real controller leaves in the state directory, so that clients find this one."""
        files.write_private(state_dir / OWNER_TOKEN_FILE, str(OWNER_TOKEN).encode())
        LocalCluster(host=HOST, port=self.port, cluster_id=CLUSTER_ID).write(state_dir)

    def keep_blob(self, data: bytes) -> Workdir:
        digest = hashlib.sha256(data).hexdigest()
        self.blobs[digest] = data
        return Workdir(digest=digest, size_bytes=len(data))

    async def peer(self) -> rpc.Peer:
        """Return the connection of the node that registered last, after a heartbeat on it."""
        await until(lambda: self._peer is not None and not self._peer.is_closed, what="an agent registers")
        count = len(self.heartbeats)
        await until(lambda: len(self.heartbeats) > count, what="a heartbeat")
        assert self._peer is not None
        return self._peer

    def launch_of(self, job_id: str, *command: str, epoch: int | None = None, **given: object) -> Launch:
        """Create a launch for the node that registered last; `given` overrides its fields."""
        self._epochs += 1
        node = self.registers[-1].node
        spec = JobSpec(
            name=job_id,
            command=command,
            kind=given.pop("kind", JobKind.COMMAND),  # type: ignore[arg-type]
            resources=Resources(),
            env=given.pop("env", {}),  # type: ignore[arg-type]
            workdir=given.pop("workdir", None),  # type: ignore[arg-type]
        )
        placement = Placement(
            node_id=str(given.pop("node_id", node.node_id)),
            incarnation=int(str(given.pop("incarnation", node.incarnation))),
            gpu_ids=given.pop("gpu_ids", ()),  # type: ignore[arg-type]
            epoch=self._epochs if epoch is None else epoch,
        )
        leader_token = int(str(given.pop("leader_token", self.leader_token)))
        return Launch(
            job_id=job_id,
            tenant="default",
            spec=spec,
            placement=placement,
            leader_token=leader_token,
            ticket_sha256=str(given.pop("ticket_sha256", "")),
            has_deadman_timer=bool(given.pop("has_deadman_timer", True)),
        )

    async def launch(self, job_id: str, *command: str, **given: object) -> Launch:
        peer = await self.peer()
        order = self.launch_of(job_id, *command, **given)  # type: ignore[arg-type]
        await peer.call(order, timeout_s=20)
        return order

    async def order_kill(self, launch: Launch, *, reason: str = "cancelled by its owner") -> None:
        order = Kill(
            job_id=launch.job_id, epoch=launch.placement.epoch, leader_token=self.leader_token, reason=reason
        )
        await (await self.peer()).call(order, timeout_s=20)

    async def log(
        self,
        job_id: str,
        *,
        offset: int = 0,
        wait_s: float = 0.0,
        bytes_max: int = 1 << 19,
        epoch: int = 0,
    ) -> LogChunk:
        request = ReadLog(job_id=job_id, offset=offset, wait_s=wait_s, bytes_max=bytes_max, epoch=epoch)
        return await (await self.peer()).call(request, timeout_s=wait_s + 20)

    async def whole_log(self, job_id: str) -> str:
        """Read the log until the job ends."""
        data, offset = b"", 0
        while True:
            chunk = await self.log(job_id, offset=offset, wait_s=5)
            data, offset = data + chunk.data, chunk.next_offset
            if chunk.eof:
                return data.decode()

    async def end_of(self, job_id: str, *, timeout_s: float = TIMEOUT_S) -> ExitReport:
        await until(lambda: job_id in self.exits, timeout_s=timeout_s, what=f"the end of {job_id}")
        return self.exits[job_id]


class ThreadedController(FakeController):
    """A fake controller on a thread of its own; it can be stopped and started again on the same port."""

    _thread: threading.Thread | None = None
    _cancel: Callable[[], object] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *ignored: object) -> None:
        self.stop()

    def start(self) -> None:
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="fake-controller")
        self._thread.start()
        assert self._listening.wait(TIMEOUT_S)

    def stop(self) -> None:
        """Close every connection and stop listening."""
        if self._thread is not None:
            assert self._cancel is not None
            self._cancel()
            self._thread.join(TIMEOUT_S)
            self._thread = None

    async def _run(self) -> None:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        self._cancel = lambda: loop.call_soon_threadsafe(task.cancel)
        with contextlib.suppress(asyncio.CancelledError):
            await self.serve()
