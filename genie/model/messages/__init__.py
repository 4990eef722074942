"""The messages between controller, agents and clients: one struct per request and reply.

Each request has its reply type: `class Hello(Request[Welcome])`. Requests are decoded as one tagged union per
server (`CONTROLLER_REQUESTS`, `AGENT_REQUESTS`); anything else is rejected. Long waits are bounded polls
(`wait_s`). The messages that begin a connection are in handshake.py, those about locks in locks.py. They are
framed by runtime/wire.py.
"""

from __future__ import annotations

import functools
import typing
from typing import TypeVar

import msgspec

from genie.model.allocation import NodeHolds
from genie.model.job import Job, JobSpec, JobState, Placement, PlacementConstraints, Resources
from genie.model.member import Member
from genie.model.messages.base import Done as Done
from genie.model.messages.base import Message as Message
from genie.model.messages.base import Report as Report
from genie.model.messages.base import Request as Request
from genie.model.messages.handshake import (
    FetchTrust,
    Hello,
    Join,
    JoinServer,
    RecoverCertificate,
    RenewCertificate,
    ServerHello,
    SignExecutor,
)
from genie.model.messages.locks import AcquireLock, BreakLock, ListLocks, ReleaseLock, RenewLock
from genie.model.messages.numbers import CHUNK_BYTES_MAX as CHUNK_BYTES_MAX
from genie.model.messages.numbers import LOG_OFFSET_MAX as LOG_OFFSET_MAX
from genie.model.messages.numbers import (
    AcceleratorNumber,
    ChunkBytes,
    Counter,
    GraceS,
    IntervalS,
    ListLimit,
    Offset,
    TokenTtlS,
    WaitS,
    WorkerRank,
)
from genie.model.node import NodeInfo
from genie.model.record import Facts, Record
from genie.model.tenant import QuotaRecord, TokenKind, TokenRecord

WAIT_S_MAX = 30.0


_Reply = TypeVar("_Reply", bound=Message)


class AgedReply(Message, frozen=True, kw_only=True):
    """Base of the replies that a standby can give from its copy of the ledger."""

    age_s: float = 0.0
    """The reply may lack changes of this many seconds; 0 from the leader."""


# --- Agents -----------------------------------------------------------------------------------


class Endpoint(Facts, frozen=True, kw_only=True):
    """The address of an executor. `server_name` is the name in its certificate."""

    host: str
    port: int
    server_name: str


class RunningJob(Facts, frozen=True, kw_only=True):
    """`status_note`: progress of an executor that does not listen yet, or processes that cannot be killed."""

    job_id: str
    epoch: int
    endpoint: Endpoint | None = None
    status_note: str = msgspec.field(default="", name="note")
    elapsed_s: float = 0.0
    """Time since the start of the process, by the monotonic clock of the node."""


class ExitReport(Facts, frozen=True, kw_only=True):
    """How a job ended. `exit_code` is None if it never started or was stopped by Genie."""

    job_id: str
    epoch: int
    exit_code: int | None
    reason: str
    ended_at: float
    started: bool = True
    is_caused_by_node: bool = msgspec.field(default=False, name="by_node")
    """The node, not the job, is the cause: it is shutting down, or its disk is full."""
    needed_disk_bytes: int = msgspec.field(default=0, name="needed_bytes")
    """Free disk space that its working directory needs, if the node has less; otherwise 0."""


class Registered(Message, frozen=True, kw_only=True):
    """`leader_token` is the fencing token: an agent rejects requests with a lower one than it has seen."""

    leader_token: int
    ttl_s: float
    controllers: tuple[str, ...]
    """host:port of all controllers, this one included."""


class Register(Report[Registered], frozen=True, kw_only=True):
    """An agent registers its node. It has ended all processes of earlier incarnations that `running` does not
    contain."""

    node: NodeInfo
    exits: tuple[ExitReport, ...] = ()
    running: tuple[RunningJob, ...] = ()


class Leave(Request[Done], frozen=True, kw_only=True):
    """Sent by an agent that shuts down, to remove its node. Rejected while the node has allocations."""

    node_id: str
    incarnation: Counter


class GossipSettings(Message, frozen=True, kw_only=True):
    """How to take part in gossip. `keys`: base64; the first one encrypts, all of them decrypt."""

    is_enabled: bool = False
    keys: tuple[str, ...] = ()
    seeds: tuple[str, ...] = ()
    """HOST:PORT of the gossip of the servers."""

    def __repr__(self) -> str:
        return f"GossipSettings({self.is_enabled}, {len(self.keys)} keys, seeds={self.seeds})"


class GetGossipSettings(Request[GossipSettings], frozen=True, kw_only=True):
    """Answered by every server, also by one that does not lead."""


class JobOrder(Record, frozen=True, kw_only=True):
    """`grace_s`: as in Kill."""

    job_id: str
    epoch: int
    reason: str = ""
    grace_s: float | None = None


class HeartbeatAck(Message, frozen=True, kw_only=True):
    """`jobs_to_kill` run but are not in the ledger. `settled_exits`: stored exits that can be deleted."""

    leading: bool
    leader_token: int
    jobs_to_kill: tuple[JobOrder, ...] = msgspec.field(default=(), name="kill")
    settled_exits: tuple[JobOrder, ...] = msgspec.field(default=(), name="settled")


class Heartbeat(Report[HeartbeatAck], frozen=True, kw_only=True):
    node_id: str
    incarnation: Counter
    node: NodeInfo
    running: tuple[RunningJob, ...] = ()
    exits: tuple[ExitReport, ...] = ()


class ConfirmLaunch(Request[Done], frozen=True, kw_only=True):
    """Sent by the agent right before it starts a process: the job becomes running, or the launch is void.

    Waits up to `wait_s` for the other workers of the job.
    """

    job_id: str
    epoch: Counter
    incarnation: Counter
    wait_s: WaitS = 0.0


class ExecutorReady(Request[Done], frozen=True, kw_only=True):
    job_id: str
    epoch: Counter
    endpoint: Endpoint


class Launch(Request[Done], frozen=True, kw_only=True):
    """Controller to agent. The reply means accepted; the process starts after ConfirmLaunch."""

    job_id: str
    tenant: str
    spec: JobSpec
    placement: Placement
    leader_token: Counter
    ticket_sha256: str = ""
    """Sessions only: hash of the ticket of the client."""
    rank: WorkerRank = 0
    hosts: tuple[str, ...] = ()
    """Addresses of the workers of the job, by rank."""
    has_deadman_timer: bool = msgspec.field(default=True, name="deadman")
    """Whether the worker ends at the dead-man time. An agent that does not know the field rejects a launch in
    which it is False (VersionError), and the job is placed again; a controller that never sends False
    reclaims the resources then."""


class Kill(Request[Done], frozen=True, kw_only=True):
    """Controller to agent. The reply means accepted; the exit follows as an ExitReport.

    `grace_s` is the grace period between SIGTERM and SIGKILL; None for the setting of the agent. Of two
    requests the shorter grace period applies.
    """

    job_id: str
    epoch: Counter
    leader_token: Counter
    reason: str
    grace_s: GraceS | None = None


# --- Jobs -------------------------------------------------------------------------------------


class JobReply(AgedReply, frozen=True, kw_only=True):
    job: Job


class SubmitJob(Request[JobReply], frozen=True, kw_only=True):
    """`request_id` is an idempotency key: the same key gives the same job."""

    spec: JobSpec
    request_id: str


class GetJob(Request[JobReply], frozen=True, kw_only=True):
    """Waits up to `wait_s` while the job is in state `while_state`. `job_id` may be a unique name."""

    job_id: str
    while_state: JobState | None = None
    wait_s: WaitS = 0.0


class JobsReply(AgedReply, frozen=True, kw_only=True):
    """Newest first. `more`: there are older ones."""

    jobs: tuple[Job, ...]
    more: bool


class ListJobs(Request[JobsReply], frozen=True, kw_only=True):
    states: tuple[JobState, ...] = ()
    before_sequence: Counter | None = None
    limit: ListLimit = 100


class CancelJob(Request[JobReply], frozen=True, kw_only=True):
    job_id: str


class QueuedJob(Record, frozen=True, kw_only=True):
    """A queued job. `position` counts the jobs of all tenants, from 1."""

    position: int
    job_id: str
    name: str
    tenant: str
    resources: Resources
    constraints: PlacementConstraints = msgspec.field(name="wishes")
    submitted_at: float
    reason: str
    starts_at: float | None = None
    """Estimated start time if nothing changes; None if unknown."""


class QueueReply(AgedReply, frozen=True, kw_only=True):
    """In scheduling order. `more`: there are later ones."""

    jobs: tuple[QueuedJob, ...]
    waiting: int
    """Number of queued jobs of all tenants."""
    more: bool = False


class GetQueue(Request[QueueReply], frozen=True, kw_only=True):
    limit: ListLimit = 100


class NodesRuledOut(Record, frozen=True, kw_only=True):
    """Blocked nodes with the same reason. `nodes` has only the first ones."""

    reason: str
    count: int
    nodes: tuple[str, ...]
    is_permanent: bool = msgspec.field(name="ever")
    """Blocked permanently: also if the nodes were idle."""


class ExplainReply(AgedReply, frozen=True, kw_only=True):
    """The fields from `ahead` on are only set for a queued job."""

    job: Job
    """`reason` is its pending reason, `history` its transitions."""
    ahead: int | None = None
    """Number of jobs before it in the queue; None if it is not queued or was not considered yet."""
    starts_at: float | None = None
    """Estimated start time if no job arrives and all run until their time limit; None if unknown."""
    starts_why: str = ""
    """Further assumptions of the estimate, or why there is none; may be empty."""
    ruled_out: tuple[NodesRuledOut, ...] = ()
    ruled_out_more: int = 0
    """Number of nodes that are blocked for other reasons."""


class ExplainJob(Request[ExplainReply], frozen=True, kw_only=True):
    job_id: str


class LogChunk(Message, frozen=True, kw_only=True):
    """`next_offset` is the offset of the next request. `start` is higher than the requested offset if the log
    was rotated. `eof`: the run has ended and its log is complete."""

    data: bytes
    start_offset: int = msgspec.field(name="start")
    next_offset: int
    eof: bool
    run_number: int = msgspec.field(default=0, name="run")
    """Number of the run; 0 if there is no such run yet."""
    run_numbers: tuple[int, ...] = msgspec.field(default=(), name="runs")
    """The runs that have a log, oldest first."""


class ReadLog(Request[LogChunk], frozen=True, kw_only=True):
    """Standard output and error in one stream. Served by controllers and agents."""

    job_id: str
    offset: Offset = 0
    bytes_max: ChunkBytes = CHUNK_BYTES_MAX
    wait_s: WaitS = 0.0
    run_number: Counter = msgspec.field(default=0, name="run")
    """Number of the run; 0 for the last. One more than the last: the next run."""
    epoch: Counter = 0
    """Identifies the run for agents; 0 for the last."""


class BlobStatus(Message, frozen=True, kw_only=True):
    """`received_bytes` is the offset of the next chunk."""

    complete: bool
    received_bytes: int


class StatBlob(Request[BlobStatus], frozen=True, kw_only=True):
    digest: str


class PutBlob(Request[BlobStatus], frozen=True, kw_only=True):
    """Chunks in order; `last` completes the blob, after its digest was verified."""

    digest: str
    offset: Offset
    data: bytes
    is_last: bool = msgspec.field(name="last")


class BlobChunk(Message, frozen=True, kw_only=True):
    data: bytes
    size_bytes: int


class GetBlob(Request[BlobChunk], frozen=True, kw_only=True):
    digest: str
    offset: Offset


class StatReplica(Request[BlobStatus], frozen=True, kw_only=True):
    """Between controllers, as StatBlob for any tenant."""

    digest: str
    tenant: str


class PutReplica(Request[BlobStatus], frozen=True, kw_only=True):
    """Between controllers, as PutBlob for any tenant."""

    digest: str
    tenant: str
    offset: Offset
    data: bytes
    is_last: bool


class GetReplica(Request[BlobChunk], frozen=True, kw_only=True):
    """Between controllers, as GetBlob for any tenant."""

    digest: str
    tenant: str
    offset: Offset


class ForwardedReply(Message, frozen=True, kw_only=True):
    """The encoded reply, or the encoded error of the request."""

    reply: bytes = b""
    error: bytes = b""


class ForwardedRequest(Request[ForwardedReply], frozen=True, kw_only=True):
    """Between controllers: a standby sends an encoded request of a client to the leader. The client has
    authenticated to the standby with this token; tenant and permissions are those of the leader's record."""

    token_id: str
    request: bytes


class Ping(Request[Done], frozen=True, kw_only=True):
    """Between controllers: replied to at once, whether the controller leads or not."""


# --- Cluster ----------------------------------------------------------------------------------


class NodeView(Record, frozen=True, kw_only=True):
    info: NodeInfo
    node_holds: NodeHolds = msgspec.field(name="ledger")
    drained: str = ""
    """Why the node is drained; empty if it is not."""


class NodesReply(AgedReply, frozen=True, kw_only=True):
    """Ordered by ID. `more`: further nodes did not fit into one frame."""

    nodes: tuple[NodeView, ...]
    more: bool = False
    leading: bool = True
    """Of a heartbeat: False if it renewed no lease, because another controller may lead."""


class ListNodes(Request[NodesReply], frozen=True, kw_only=True):
    """Nodes with IDs after `after`."""

    after_node_id: str = msgspec.field(default="", name="after")


class MembersReply(Message, frozen=True, kw_only=True):
    """The servers and nodes as gossip reports them to one server. `more`: further ones did not fit into one
    frame."""

    members: tuple[Member, ...] = ()
    more: bool = False
    observer: str = ""
    """Name of the member that reports them."""
    observed_at: float = 0.0
    off_reason: str = ""
    """Why there is no gossip; empty if there is."""


class ListMembers(Request[MembersReply], frozen=True, kw_only=True):
    """Answered by every server, also by one that does not lead or has no store."""


class RemoveNode(Request[Done], frozen=True, kw_only=True):
    """Removes a node permanently; its token and its certificate become invalid."""

    node_id: str


class DrainNode(Request[Done], frozen=True, kw_only=True):
    """Stops placing jobs on the node; running jobs continue."""

    node_id: str
    reason: str = ""


class DrainStarted(Message, frozen=True, kw_only=True):
    """The jobs on the node when its drain began."""

    moving_job_ids: tuple[str, ...] = ()
    """They are stopped and queued again."""
    staying_job_ids: tuple[str, ...] = ()
    """They run until they end."""
    grace_s_max: float = 0.0
    """The longest grace period of the moving jobs."""


class EmptyNode(Request[DrainStarted], frozen=True, kw_only=True):
    """Stops placing jobs on the node, and moves its restartable jobs to other nodes."""

    node_id: str
    reason: str = ""


class UndrainNode(Request[Done], frozen=True, kw_only=True):
    """Resumes placing jobs on the node; jobs that have not been stopped are not moved."""

    node_id: str


class QuarantinedRow(Record, frozen=True, kw_only=True):
    """A record that could not be read or written, and that the controller therefore ignores."""

    key: str
    """Its key in the store."""
    reason: str
    at: float


class StatusReply(AgedReply, frozen=True, kw_only=True):
    cluster_id: str
    version: str
    leading: bool
    leader: str
    store: str
    store_ok: bool
    started_at: float
    nodes: dict[str, int]
    """Count by status."""
    jobs: dict[str, int]
    """Count by state."""
    gpus_total: int
    gpus_free: int
    clients: int
    policy: str = ""
    """Name of the queue policy."""
    policy_fault: str = ""
    """Why the policy was disabled, and its replacement; empty while it works."""
    alarms: tuple[str, ...] = ()
    """What needs attention: low space in the store, failing maintenance, a low file limit."""
    quarantined: tuple[QuarantinedRow, ...] = ()
    """The first ones; only for the owner."""
    quarantined_count: int = 0
    store_used_bytes: int = 0
    """0 if unknown."""
    store_bytes_max: int = 0
    store_members: tuple[str, ...] = ()
    """Owner only: endpoints of the etcd cluster that Genie manages."""
    store_reason: str = ""
    """Why the store does not respond; only for the owner."""
    has_cluster_data: bool = False
    """From a standby: whether it could ask the leader or has a copy of the ledger. Otherwise it does not know
    the nodes, jobs, accelerators and clients."""


class GetStatus(Request[StatusReply], frozen=True, kw_only=True):
    """No arguments."""


class TokensReply(AgedReply, frozen=True, kw_only=True):
    """Ordered by ID. `more`: further tokens did not fit into one frame."""

    tokens: tuple[TokenRecord, ...]
    more: bool = False


class ListTokens(Request[TokensReply], frozen=True, kw_only=True):
    """Tokens with IDs after `after`."""

    after_token_id: str = msgspec.field(default="", name="after")


class TokenCreated(Message, frozen=True, kw_only=True):
    """The only reply that contains the secret."""

    token: str
    record: TokenRecord


class CreateToken(Request[TokenCreated], frozen=True, kw_only=True):
    kind: TokenKind
    tenant: str = ""
    name: str = ""
    ttl_s: TokenTtlS | None = None


class RevokeToken(Request[Done], frozen=True, kw_only=True):
    token_id: str


class BackupOpened(Message, frozen=True, kw_only=True):
    """`revision` is that of the store; the backup contains the rows of that revision."""

    backup_id: str
    cluster_id: str
    generation: int
    revision: int


class OpenBackup(Request[BackupOpened], frozen=True, kw_only=True):
    """Begins a backup of the store. It ends with CloseBackup, or when it is not read for a while."""


class BackupChunk(Message, frozen=True, kw_only=True):
    """The next bytes of the encoded rows; empty at the end. `row_count`: rows in all chunks so far."""

    data: bytes
    row_count: int


class ReadBackup(Request[BackupChunk], frozen=True, kw_only=True):
    """`offset` is the number of bytes received so far; the last chunk can be requested again."""

    backup_id: str
    offset: Offset


class CloseBackup(Request[Done], frozen=True, kw_only=True):
    backup_id: str


class QuotaView(Record, frozen=True, kw_only=True):
    """`quota` is unlimited if none was set."""

    quota: QuotaRecord
    held_gpus: float


class QuotasReply(AgedReply, frozen=True, kw_only=True):
    """Ordered by tenant. `more`: further quotas did not fit into one frame."""

    quotas: tuple[QuotaView, ...]
    more: bool = False


class ListQuotas(Request[QuotasReply], frozen=True, kw_only=True):
    """A user gets that of its tenant; the owner all tenants with a quota or with allocations."""


class SetQuota(Request[Done], frozen=True, kw_only=True):
    """Replaces the quota of the tenant."""

    quota: QuotaRecord


class RemoveQuota(Request[Done], frozen=True, kw_only=True):
    tenant: str


# --- Client sessions and the device -----------------------------------------------------------


SESSION_INTERVAL_S_MAX = 60.0
"""Maximum interval between the heartbeats of a client with open devices."""


class SessionHeartbeat(Report[NodesReply], frozen=True, kw_only=True):
    """Heartbeat of a client; the reply lists the nodes."""

    node: NodeInfo
    interval_s: IntervalS = 0.0
    """Announced interval until the next heartbeat; 0: not announced."""


class SessionEnd(Request[Done], frozen=True, kw_only=True):
    """Releases all resources of this client."""

    node_id: str


class DeviceReply(Message, frozen=True, kw_only=True):
    """`endpoint` is None until the executor is ready; `job` has its state and pending reason."""

    job: Job
    endpoint: Endpoint | None
    ticket: str = ""


class OpenDevice(Request[DeviceReply], frozen=True, kw_only=True):
    """Starts an executor on one accelerator for this client. `request_id` is an idempotency key."""

    session_node_id: str
    node_id: str
    gpu_id: AcceleratorNumber
    request_id: str


class WaitDevice(Request[DeviceReply], frozen=True, kw_only=True):
    job_id: str
    wait_s: WaitS = 0.0


def reply_type(request: type[Request[_Reply]]) -> type[_Reply]:
    """The reply type of a request type."""
    return typing.cast("type[_Reply]", _reply_type(request))


@functools.cache
def _reply_type(request: type[Message]) -> type[Message]:
    (answer,) = typing.get_args(request.__orig_bases__[0])  # type: ignore[attr-defined]
    return typing.cast("type[Message]", answer)


UNAUTHENTICATED_REQUESTS = (Hello, ServerHello, FetchTrust, Join, JoinServer, RecoverCertificate)
SERVER_REQUESTS = (StatReplica, PutReplica, GetReplica, ForwardedRequest, Ping)
NODE_REQUESTS = (
    Register,
    Heartbeat,
    Leave,
    ConfirmLaunch,
    ExecutorReady,
    RenewCertificate,
    SignExecutor,
    GetBlob,
    GetGossipSettings,
)
USER_REQUESTS = (
    SubmitJob,
    GetJob,
    ListJobs,
    CancelJob,
    GetQueue,
    ExplainJob,
    ReadLog,
    StatBlob,
    PutBlob,
    ListNodes,
    ListMembers,
    GetStatus,
    ListQuotas,
    SessionHeartbeat,
    SessionEnd,
    OpenDevice,
    WaitDevice,
    AcquireLock,
    RenewLock,
    ReleaseLock,
    ListLocks,
)
OWNER_REQUESTS = (
    ListTokens,
    CreateToken,
    RevokeToken,
    RemoveNode,
    DrainNode,
    EmptyNode,
    UndrainNode,
    SetQuota,
    RemoveQuota,
    OpenBackup,
    ReadBackup,
    CloseBackup,
    BreakLock,
)

NOT_FORWARDED_REQUESTS = (
    # Bound to the connection of the client, or large: the client moves to the leader.
    SessionHeartbeat,
    SessionEnd,
    OpenDevice,
    WaitDevice,
    StatBlob,
    PutBlob,
    OpenBackup,
    ReadBackup,
    CloseBackup,
    AcquireLock,
    RenewLock,
    ReleaseLock,
    # Each controller answers it with what gossip reports to it.
    ListMembers,
)
FORWARDED_REQUESTS = tuple(
    kind for kind in (*USER_REQUESTS, *OWNER_REQUESTS) if kind not in NOT_FORWARDED_REQUESTS
)
"""Requests of clients that a standby forwards to the leader."""
COPY_REQUESTS = (GetJob, ListJobs, GetQueue, ExplainJob, ListNodes, ListQuotas, ListTokens)
"""Requests that a standby answers from its copy of the ledger while no leader responds."""

CONTROLLER_REQUESTS = (
    *UNAUTHENTICATED_REQUESTS,
    *SERVER_REQUESTS,
    *NODE_REQUESTS,
    *USER_REQUESTS,
    *OWNER_REQUESTS,
)
AGENT_REQUESTS = (Launch, Kill, ReadLog)
