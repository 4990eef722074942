"""A controller that does what a test tells it to, over the real network and the real wire.

It keeps what agents said in lists, answers by its knobs, and gives orders when asked. Not for: testing
the controller itself; tests/controller has the real one.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import genie
from genie.errors import GenieError, ProtocolError
from genie.model.job import JobKind, JobSpec, Placement, Resources, Workdir
from genie.model.messages import (
    CHUNK_BYTES_MAX,
    CONTROLLER_REQUESTS,
    BlobChunk,
    Certificate,
    ConfirmLaunch,
    Done,
    ExecutorReady,
    ExitReport,
    FetchTrust,
    GetBlob,
    Heartbeat,
    HeartbeatAck,
    Hello,
    JobOrder,
    Join,
    Joined,
    Kill,
    Launch,
    LogChunk,
    Message,
    ReadLog,
    Register,
    Registered,
    RenewCertificate,
    SignExecutor,
    TrustAnchor,
    Welcome,
)
from genie.model.tenant import TokenKind
from genie.runtime import files, rpc, tls, wire
from genie.runtime.network import Channel, TcpNetwork
from genie.tenancy.access import NO_PIN, Token, new_token, parse_token
from tests.waiting import until

HOST = "127.0.0.1"


@dataclass
class FakeController:
    """Knobs may be turned at any time."""

    directory: Path
    use_tls: bool = False
    ttl_s: float = 10.0
    leading: bool = True
    silent: bool = False
    """Answers nothing, like a controller behind a cut link."""
    leader_token: int = 5
    confirm_error: GenieError | None = None
    join_error: GenieError | None = None
    register_error: GenieError | None = None
    certificate_days: float = 1.0
    settle: bool = True
    kill: list[JobOrder] = field(default_factory=list)
    blobs: dict[str, bytes] = field(default_factory=dict)
    more_controllers: tuple[str, ...] = ()

    hellos: list[Hello] = field(default_factory=list)
    joins: list[Join] = field(default_factory=list)
    registers: list[Register] = field(default_factory=list)
    heartbeats: list[Heartbeat] = field(default_factory=list)
    confirms: list[ConfirmLaunch] = field(default_factory=list)
    ready: list[ExecutorReady] = field(default_factory=list)
    certificates: list[str] = field(default_factory=list)
    """Names in the client certificates that nodes have shown."""
    exits: dict[str, ExitReport] = field(default_factory=dict)
    port: int = 0
    _peer: rpc.Peer | None = None
    _serving: asyncio.Event = field(default_factory=asyncio.Event)
    _epochs: int = 0

    def __post_init__(self) -> None:
        self.authority = tls.CertificateAuthority.load_or_create(self.directory, now=time.time())
        key, csr = tls.new_key_and_csr()
        files.write_private(self.directory / "controller.key", key)
        certificate = self.authority.issue(csr, name=tls.CONTROLLER_NAME, days=1, now=time.time())
        files.write_private(self.directory / "controller.pem", certificate.encode())

    # --- running it -------------------------------------------------------------------------

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[FakeController]:
        """For the length of the block; a second time it takes the same port."""
        async with asyncio.TaskGroup() as group:
            task = group.create_task(self._serve())
            await self._serving.wait()
            try:
                yield self
            finally:
                self._serving.clear()
                task.cancel()

    async def _serve(self) -> None:
        context = (
            tls.server_context(
                self.directory / "controller.pem",
                self.directory / "controller.key",
                ca_pem=self.authority.ca_pem,
            )
            if self.use_tls
            else None
        )
        await TcpNetwork().serve(HOST, self.port, self._accept, tls=context, on_listening=self._listens)

    def _listens(self, port: int) -> None:
        self.port = port
        self._serving.set()

    async def _accept(self, channel: Channel) -> None:
        channel.cap_bytes = wire.FRAME_BYTES_MAX
        await rpc.Peer(channel, requests=CONTROLLER_REQUESTS, handler=self._handle).run()

    # --- what agents ask --------------------------------------------------------------------

    async def _handle(self, peer: rpc.Peer, request: Message) -> Message:
        if self.silent:
            await asyncio.get_running_loop().create_future()
        match request:
            case Hello():
                self.hellos.append(request)
                return Welcome(
                    cluster_id="fake",
                    version=genie.__version__,
                    tenant="default",
                    kind=TokenKind.NODE,
                    leading=self.leading,
                )
            case FetchTrust():
                return TrustAnchor(ca_pem=self.authority.ca_pem)
            case Join():
                return self._join(request)
            case Register():
                return self._register(peer, request)
            case Heartbeat():
                return self._heartbeat(request)
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
                return self._issue(request.csr_pem, tls.executor_name(request.job_id))
            case RenewCertificate():
                return self._issue(request.csr_pem, peer.channel.certificate_name)
        raise ProtocolError(f"the fake does not answer {type(request).__name__}")

    def _join(self, request: Join) -> Joined:
        self.joins.append(request)
        if self.join_error is not None:
            raise self.join_error
        parse_token(request.token)
        signed = self._issue(request.csr_pem, tls.node_name(request.node_id_wish)) if self.use_tls else None
        return Joined(
            node_id=request.node_id_wish,
            token=str(self.token(TokenKind.NODE)),
            certificate_pem=signed.certificate_pem if signed else "",
            ca_pem=self.authority.ca_pem if self.use_tls else "",
        )

    def _register(self, peer: rpc.Peer, request: Register) -> Registered:
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

    def _heartbeat(self, request: Heartbeat) -> HeartbeatAck:
        self.heartbeats.append(request)
        self.exits |= {report.job_id: report for report in request.exits}
        settled = (
            [JobOrder(job_id=one.job_id, epoch=one.epoch) for one in request.exits] if self.settle else []
        )
        return HeartbeatAck(
            leading=self.leading,
            leader_token=self.leader_token,
            kill=tuple(self.kill),
            settled=tuple(settled),
        )

    def _issue(self, csr_pem: str, name: str) -> Certificate:
        pem = self.authority.issue(csr_pem, name=name, days=self.certificate_days, now=time.time())
        return Certificate(certificate_pem=pem)

    # --- what a test asks -------------------------------------------------------------------

    @property
    def address(self) -> str:
        return f"{HOST}:{self.port}"

    def token(self, kind: TokenKind) -> Token:
        pin = self.authority.fingerprint if self.use_tls else NO_PIN
        return new_token(kind, token_id=secrets.token_hex(4), secret=secrets.token_bytes(32), pin=pin)

    def keep_blob(self, data: bytes) -> Workdir:
        digest = hashlib.sha256(data).hexdigest()
        self.blobs[digest] = data
        return Workdir(digest=digest, size_bytes=len(data))

    async def peer(self) -> rpc.Peer:
        """The connection of the node that registered last, after its first heartbeat on it."""
        await until(lambda: self._peer is not None and not self._peer.is_closed, what="an agent registers")
        heard = len(self.heartbeats)
        await until(lambda: len(self.heartbeats) > heard, what="a heartbeat")
        assert self._peer is not None
        return self._peer

    def launch_of(self, job_id: str, *command: str, epoch: int | None = None, **given: object) -> Launch:
        """An order for the node as it registered last; every part can be given otherwise."""
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
        )

    async def launch(self, job_id: str, *command: str, **given: object) -> Launch:
        peer = await self.peer()
        order = self.launch_of(job_id, *command, **given)  # type: ignore[arg-type]
        await peer.call(order, timeout_s=5)
        return order

    async def order_kill(self, launch: Launch, *, reason: str = "cancelled by its owner") -> None:
        order = Kill(
            job_id=launch.job_id, epoch=launch.placement.epoch, leader_token=self.leader_token, reason=reason
        )
        await (await self.peer()).call(order, timeout_s=5)

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
        return await (await self.peer()).call(request, timeout_s=wait_s + 5)

    async def whole_log(self, job_id: str) -> str:
        """Until the end of the job."""
        data, offset = b"", 0
        while True:
            chunk = await self.log(job_id, offset=offset, wait_s=5)
            data, offset = data + chunk.data, chunk.next_offset
            if chunk.eof:
                return data.decode()

    async def end_of(self, job_id: str, *, timeout_s: float = 10.0) -> ExitReport:
        await until(lambda: job_id in self.exits, timeout_s=timeout_s, what=f"the end of {job_id}")
        return self.exits[job_id]
