"""What people and their programs ask: jobs, directories, nodes, status, tokens, devices.

A user sees its own tenant's jobs, and of others only how many there are and how much they hold; the
owner sees all. Answers stay under the frame cap. Not for: deciding anything; each request is one
call of the part that does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import msgspec

import genie
from genie.controller.agents import Agents
from genie.controller.blobs import Blobs
from genie.controller.checks import check_job, check_node, checked_wait_s
from genie.controller.connection import Connection, Handlers
from genie.controller.election import Election, StoreHealth
from genie.controller.jobs import Jobs, sees
from genie.controller.ledger import Ledger
from genie.controller.planning import KINDS_WAITING_MAX, Planner
from genie.controller.sessions import Sessions
from genie.controller.tokens import Tokens
from genie.controller.views import NodeState, Views
from genie.errors import JobRefusedError, NotLeaderError, PermissionError_, WorkdirError
from genie.model.allocation import Hold, NodeLedger
from genie.model.job import Job, JobSpec, JobState
from genie.model.messages import (
    LIST_MAX,
    BlobChunk,
    BlobStatus,
    CancelJob,
    CreateToken,
    DeviceReply,
    Done,
    GetBlob,
    GetJob,
    GetStatus,
    JobReply,
    JobsReply,
    ListJobs,
    ListNodes,
    ListTokens,
    NodesReply,
    NodeView,
    OpenDevice,
    PutBlob,
    RevokeToken,
    SessionEnd,
    SessionHeartbeat,
    StatBlob,
    StatusReply,
    SubmitJob,
    TokenCreated,
    TokensReply,
    WaitDevice,
)
from genie.model.node import NodeStatus
from genie.model.tenant import Identity, TokenKind
from genie.runtime.clock import Clock
from genie.runtime.tasks import Offload
from genie.runtime.wire import FRAME_BYTES_MAX

_REPLY_BYTES_MAX = FRAME_BYTES_MAX - 64 * 1024
_DECISION_WAIT_S = 0.25
_Item = TypeVar("_Item", bound=msgspec.Struct)


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The parts that answers are made of."""

    ledger: Ledger
    jobs: Jobs
    agents: Agents
    sessions: Sessions
    tokens: Tokens
    blobs: Blobs
    views: Views
    planner: Planner
    election: Election
    health: StoreHealth
    clock: Clock
    offload: Offload
    store_name: str
    policy_name: str
    started_at: float

    def present(self) -> list[NodeState]:
        """The nodes that people are shown: those that left in good order are not among them."""
        nodes = self.views.current().values()
        return [node for node in nodes if not self.ledger.nodes[node.node_id].left]

    def held_on(self, node_id: str) -> NodeLedger:
        return self.ledger.holds.get(node_id) or NodeLedger(node_id=node_id)

    def check_readable(self) -> None:
        """NotLeaderError where the memory is another controller's to answer from."""
        if not self.ledger.is_loaded:
            self.election.require_token()
            raise NotLeaderError("this controller is about to lead", hint="try again in a moment")


class Users:
    def __init__(self, cluster: Cluster, *, hang_up: Callable[[str], None]) -> None:
        self._cluster = cluster
        self._hang_up = hang_up

    def handlers(self) -> Handlers:
        return {
            SubmitJob: self.submit_job,
            GetJob: self.get_job,
            ListJobs: self.list_jobs,
            CancelJob: self.cancel_job,
            StatBlob: self.stat_blob,
            PutBlob: self.put_blob,
            GetBlob: self.get_blob,
            ListNodes: self.list_nodes,
            GetStatus: self.get_status,
            SessionHeartbeat: self.session_heartbeat,
            SessionEnd: self.session_end,
            OpenDevice: self.open_device,
            WaitDevice: self.wait_device,
            ListTokens: self.list_tokens,
            CreateToken: self.create_token,
            RevokeToken: self.revoke_token,
        }

    # -- jobs ---------------------------------------------------------------------------------

    async def submit_job(self, connection: Connection, request: SubmitJob) -> JobReply:
        """Durable when answered, and with what it waits for if it has to."""
        jobs, identity = self._cluster.jobs, connection.identity
        if request.spec != connection.checked:
            check_job(request.spec)
            connection.checked = request.spec
        spec = connection.checked  # the same object for all that are alike
        self._cluster.election.require_token()
        if jobs.requested(identity.tenant, request.request_id) is None:
            await self._check_can_run(spec, identity)
        job = await jobs.submit(spec, identity, request.request_id)

        def undecided(job: Job) -> bool:
            return job.state is JobState.QUEUED and jobs.shown(job) is job

        if undecided(job):
            await jobs.wait_while(job.job_id, undecided, timeout_s=_DECISION_WAIT_S)
        return JobReply(job=jobs.told(jobs.get(job.job_id) or job, identity))

    async def _check_can_run(self, spec: JobSpec, identity: Identity) -> None:
        reason = self._cluster.planner.why_never(spec)
        if reason:
            raise JobRefusedError(
                f"job {spec.name!r} can never run here: {reason}",
                hint="ask for less, or see what there is with 'genie nodes'",
            )
        self._check_quota(spec, identity)
        if not self._cluster.planner.has_room(spec, identity.tenant):
            raise JobRefusedError(
                f"{KINDS_WAITING_MAX} different kinds of jobs wait already",
                hint="ask for the same as other jobs do, or try again later",
            )
        if spec.workdir is None:
            return
        status = await self._cluster.offload(
            partial(self._cluster.blobs.stat, spec.workdir.digest, tenant=identity.tenant)
        )
        if not status.complete or status.received_bytes != spec.workdir.size_bytes:
            raise WorkdirError(
                f"the directory {spec.workdir.digest[:12]} of job {spec.name!r} is not here",
                hint="send it first",
            )

    def _check_quota(self, spec: JobSpec, identity: Identity) -> None:
        if reason := self._cluster.planner.why_over_quota(spec, identity.tenant):
            raise JobRefusedError(
                f"job {spec.name!r} can never start under the present quota: {reason}",
                hint="ask for less, submit it with --preemptible where that may borrow, or ask the cluster's "
                "owner for more ('genie quota' shows yours)",
            )

    async def get_job(self, connection: Connection, request: GetJob) -> JobReply:
        self._cluster.check_readable()
        jobs = self._cluster.jobs
        job = jobs.find(request.job_id, connection.identity)
        if request.while_state is not None:
            await jobs.wait_while(
                job.job_id,
                lambda now: now.state is request.while_state,
                timeout_s=checked_wait_s(request.wait_s),
            )
        return JobReply(job=jobs.told(jobs.find(job.job_id, connection.identity), connection.identity))

    async def list_jobs(self, connection: Connection, request: ListJobs) -> JobsReply:
        self._cluster.check_readable()
        limit = min(max(request.limit, 1), LIST_MAX)
        jobs = self._cluster.jobs
        identity = connection.identity
        newest = jobs.newest_first(request.states, request.before_sequence)
        seen = [job for job in newest if sees(identity, job)]
        found = [jobs.told(job, identity) for job in seen[: limit + 1]]
        fitting, more = first_fitting(found[:limit])
        return JobsReply(jobs=fitting, more=more or len(found) > limit)

    async def cancel_job(self, connection: Connection, request: CancelJob) -> JobReply:
        self._cluster.election.require_token()
        job = self._cluster.jobs.find(request.job_id, connection.identity)
        reason = f"asked for with token {connection.identity.token_id}"
        was_placed = bool(job.placements) and not job.state.is_final
        after = await self._cluster.jobs.cancel(job.job_id, reason)
        if was_placed:
            self._cluster.agents.kill(after)
        return JobReply(job=self._cluster.jobs.told(after, connection.identity))

    # -- directories that are sent along ------------------------------------------------------

    async def stat_blob(self, connection: Connection, request: StatBlob) -> BlobStatus:
        stat = partial(self._cluster.blobs.stat, request.digest, tenant=connection.identity.tenant)
        return await self._cluster.offload(stat)

    async def put_blob(self, connection: Connection, request: PutBlob) -> BlobStatus:
        self._cluster.election.require_token()
        put = partial(
            self._cluster.blobs.put,
            request.digest,
            tenant=connection.identity.tenant,
            offset=request.offset,
            data=request.data,
            last=request.last,
            needed=self._cluster.jobs.needed_blobs(),
        )
        return await self._cluster.offload(put)

    async def get_blob(self, connection: Connection, request: GetBlob) -> BlobChunk:
        """For a node: only what a job that it holds needs."""
        node_id = connection.identity.name
        tenant = self._cluster.agents.preparing(node_id, request.digest)
        if tenant is None:
            raise PermissionError_(f"no job on node {node_id} needs {request.digest[:12]}")
        read = partial(self._cluster.blobs.read, request.digest, request.offset, tenant=tenant)
        return await self._cluster.offload(read)

    # -- the cluster --------------------------------------------------------------------------

    async def list_nodes(self, connection: Connection, request: ListNodes) -> NodesReply:
        self._cluster.check_readable()
        return self._nodes(connection.identity, after=request.after)

    async def get_status(self, connection: Connection, request: GetStatus) -> StatusReply:
        cluster = self._cluster
        nodes = cluster.present()
        up = [node for node in nodes if node.info.status is not NodeStatus.DISCONNECTED]
        record = cluster.ledger.cluster.get("")
        return StatusReply(
            cluster_id=record.cluster_id if record else "",
            version=genie.__version__,
            leading=cluster.election.is_leading,
            leader=cluster.election.leader.address if cluster.election.leader else "",
            store=cluster.store_name,
            store_ok=cluster.health.ok,
            started_at=cluster.started_at,
            nodes=_counted(str(node.info.status) for node in nodes),
            jobs={state: count for state, count in cluster.jobs.counts().items() if count},
            gpus_total=sum(len(node.info.gpus) for node in up),
            gpus_free=sum(_free_gpus(node, cluster.held_on(node.node_id)) for node in up if not node.closed),
            clients=len(cluster.sessions),
            policy=cluster.policy_name,
            policy_fault=_fault(cluster.planner.fault, connection.identity),
        )

    # -- devices ------------------------------------------------------------------------------

    async def session_heartbeat(self, connection: Connection, request: SessionHeartbeat) -> NodesReply:
        check_node(request.node)
        self._cluster.sessions.heard(connection.identity, request.node.node_id)
        self._cluster.check_readable()
        return self._nodes(connection.identity, after="")

    async def session_end(self, connection: Connection, request: SessionEnd) -> Done:
        ended = await self._cluster.sessions.end(connection.identity, request.node_id)
        for job in ended:
            self._cluster.agents.kill(job)
        return Done()

    async def open_device(self, connection: Connection, request: OpenDevice) -> DeviceReply:
        self._cluster.election.require_token()
        check = partial(self._check_quota, identity=connection.identity)
        return await self._cluster.sessions.open_device(request, connection.identity, check=check)

    async def wait_device(self, connection: Connection, request: WaitDevice) -> DeviceReply:
        self._cluster.check_readable()
        wait_s = checked_wait_s(request.wait_s)
        return await self._cluster.sessions.wait_device(request.job_id, connection.identity, wait_s=wait_s)

    # -- tokens -------------------------------------------------------------------------------

    async def list_tokens(self, connection: Connection, request: ListTokens) -> TokensReply:
        self._cluster.check_readable()
        return TokensReply(tokens=self._cluster.tokens.listed())

    async def create_token(self, connection: Connection, request: CreateToken) -> TokenCreated:
        token, record = await self._cluster.tokens.create(
            request.kind, tenant=request.tenant, name=request.name, ttl_s=request.ttl_s
        )
        return TokenCreated(token=str(token), record=msgspec.structs.replace(record, secret_sha256=""))

    async def revoke_token(self, connection: Connection, request: RevokeToken) -> Done:
        await self._cluster.tokens.revoke(request.token_id)
        self._hang_up(request.token_id)
        return Done()

    # -- parts --------------------------------------------------------------------------------

    def _drained(self, node_id: str) -> str:
        record = self._cluster.ledger.nodes.get(node_id)
        return record.drained if record is not None else ""

    def _nodes(self, identity: Identity, *, after: str) -> NodesReply:
        nodes = sorted(self._cluster.present(), key=lambda node: node.node_id)
        views = [
            NodeView(
                info=node.info,
                ledger=_masked(self._cluster.held_on(node.node_id), identity),
                drained=self._drained(node.node_id),
            )
            for node in nodes
            if node.node_id > after
        ]
        fitting, more = first_fitting(views)
        return NodesReply(nodes=fitting, more=more)


def first_fitting(items: list[_Item]) -> tuple[tuple[_Item, ...], bool]:
    """As many as one frame takes, and whether some were left out."""
    size_bytes = 0
    for count, item in enumerate(items):
        size_bytes += len(msgspec.msgpack.encode(item))
        if size_bytes > _REPLY_BYTES_MAX:
            return tuple(items[: max(count, 1)]), True
    return tuple(items), False


def _masked(ledger: NodeLedger, identity: Identity) -> NodeLedger:
    """A user sees how much others hold, not who and what."""
    if identity.kind is TokenKind.OWNER:
        return ledger
    holds = [hold if hold.tenant == identity.tenant else _anonymous(hold) for hold in ledger.holds]
    return msgspec.structs.replace(ledger, holds=tuple(holds))


def _anonymous(hold: Hold) -> Hold:
    return msgspec.structs.replace(hold, job_id="", tenant="", epoch=0)


def _fault(fault: str, identity: Identity) -> str:
    """A user hears that there is one; what it says may be of others' jobs."""
    return fault if identity.kind is TokenKind.OWNER else fault and "the policy is out of use"


def _counted(words: Iterable[str]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for word in words:
        counts[word] = counts.get(word, 0) + 1
    return counts


def _free_gpus(node: NodeState, held: NodeLedger) -> int:
    return sum(1 for gpu in node.info.gpus if gpu.available and held.gpu_used_milli(gpu.gpu_id) == 0)
