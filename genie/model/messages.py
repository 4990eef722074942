"""What controller, agents and clients say to each other. One struct per request, one per reply.

Each request names its reply type: `class Hello(Request[Welcome])`. They are decoded as one tagged union per
server (`CONTROLLER_REQUESTS`, `AGENT_REQUESTS`), so that nothing but these shapes ever comes
off the wire. Long waits are bounded polls (`wait_s`). Not for: framing (runtime/wire.py).
"""

from __future__ import annotations

import functools
import typing
from typing import Generic, TypeVar

from genie.model.allocation import NodeLedger
from genie.model.job import Job, JobSpec, JobState, Placement, Resources, Wishes
from genie.model.node import NodeInfo
from genie.model.record import Record
from genie.model.tenant import QuotaRecord, TokenKind, TokenRecord

CHUNK_BYTES_MAX = 512 * 1024
WAIT_S_MAX = 30.0
LIST_MAX = 1000


class Message(Record, frozen=True, kw_only=True, tag=True):
    """Base of every request and reply."""


_Reply = TypeVar("_Reply", bound=Message)


class Request(Message, Generic[_Reply], frozen=True, kw_only=True):
    """A message that is answered by one of type `_Reply`, or by an error."""


class Done(Message, frozen=True, kw_only=True):
    """The answer that has nothing to add."""


# --- Getting in -----------------------------------------------------------------------------


class Welcome(Message, frozen=True, kw_only=True):
    cluster_id: str
    version: str
    tenant: str
    kind: TokenKind
    leading: bool
    controllers: tuple[str, ...] = ()
    """host:port of every controller that this one knows of, itself included."""


class Hello(Request[Welcome], frozen=True, kw_only=True):
    """First on every connection. The token says who; what the peer says of itself is for logs only."""

    token: str
    version: str
    program: str = ""


class TrustAnchor(Message, frozen=True, kw_only=True):
    """The cluster's CA. Safe to take from anyone: the asker compares its fingerprint with the token's pin."""

    ca_pem: str


class FetchTrust(Request[TrustAnchor], frozen=True, kw_only=True):
    """Allowed before Hello."""


class Joined(Message, frozen=True, kw_only=True):
    """A node's identity, given by the server. `certificate_pem` is empty where TLS is off."""

    node_id: str
    token: str
    certificate_pem: str
    ca_pem: str


class Join(Request[Joined], frozen=True, kw_only=True):
    """Allowed before Hello: it carries a single-use token of its own."""

    token: str
    node_id_wish: str
    csr_pem: str
    exact: bool = False
    """Refuse when that id is taken, instead of choosing one like it."""


class Certificate(Message, frozen=True, kw_only=True):
    certificate_pem: str


class RenewCertificate(Request[Certificate], frozen=True, kw_only=True):
    csr_pem: str


class SignExecutor(Request[Certificate], frozen=True, kw_only=True):
    """An agent asks for the certificate of an executor that it is about to start."""

    job_id: str
    epoch: int
    csr_pem: str


# --- Agents -----------------------------------------------------------------------------------


class Endpoint(Record, frozen=True, kw_only=True):
    """Where an executor listens. `server_name` is what its certificate must carry."""

    host: str
    port: int
    server_name: str


class RunningJob(Record, frozen=True, kw_only=True):
    """`note`: what an executor does that does not listen yet, where that takes long."""

    job_id: str
    epoch: int
    endpoint: Endpoint | None = None
    note: str = ""


class ExitReport(Record, frozen=True, kw_only=True):
    """How a job ended. `exit_code` is None when it never started or was ended by Genie itself."""

    job_id: str
    epoch: int
    exit_code: int | None
    reason: str
    ended_at: float
    started: bool = True
    by_node: bool = False
    """The node did not let it start, for a reason of its own: it has not failed."""


class Registered(Message, frozen=True, kw_only=True):
    """`leader_token` fences: an agent refuses orders with a lower one than it has ever seen."""

    leader_token: int
    ttl_s: float
    controllers: tuple[str, ...]
    """host:port of every controller, this one included."""


class Register(Request[Registered], frozen=True, kw_only=True):
    """A new incarnation of a node: whatever an earlier one ran is gone (the agent saw to that)."""

    node: NodeInfo
    exits: tuple[ExitReport, ...] = ()


class Leave(Request[Done], frozen=True, kw_only=True):
    """An agent that stops in good order takes its node out. Refused while the node holds anything."""

    node_id: str
    incarnation: int


class JobOrder(Record, frozen=True, kw_only=True):
    """`grace_s`: as in Kill."""

    job_id: str
    epoch: int
    reason: str = ""
    grace_s: float | None = None


class HeartbeatAck(Message, frozen=True, kw_only=True):
    """`kill`: running here but not in the ledger. `settled`: exits that are durable and can be forgotten."""

    leading: bool
    leader_token: int
    kill: tuple[JobOrder, ...] = ()
    settled: tuple[JobOrder, ...] = ()


class Heartbeat(Request[HeartbeatAck], frozen=True, kw_only=True):
    node_id: str
    incarnation: int
    node: NodeInfo
    running: tuple[RunningJob, ...] = ()
    exits: tuple[ExitReport, ...] = ()


class ConfirmLaunch(Request[Done], frozen=True, kw_only=True):
    """Asked by the agent right before it starts a process: placing becomes running, or the launch is void."""

    job_id: str
    epoch: int
    incarnation: int


class ExecutorReady(Request[Done], frozen=True, kw_only=True):
    job_id: str
    epoch: int
    endpoint: Endpoint


class Launch(Request[Done], frozen=True, kw_only=True):
    """Controller to agent. Answered when accepted; the start itself follows ConfirmLaunch."""

    job_id: str
    tenant: str
    spec: JobSpec
    placement: Placement
    leader_token: int
    ticket_sha256: str = ""
    """Sessions only: hash of the ticket that the client will show to the executor."""
    rank: int = 0
    hosts: tuple[str, ...] = ()
    """Where the workers of the job are, by rank."""


class Kill(Request[Done], frozen=True, kw_only=True):
    """Controller to agent. Answered when the order is taken; the end comes as an ExitReport. `grace_s` lies
    between SIGTERM and SIGKILL; None for what the agent is set to. Of two orders the shorter counts."""

    job_id: str
    epoch: int
    leader_token: int
    reason: str
    grace_s: float | None = None


# --- Jobs -------------------------------------------------------------------------------------


class JobReply(Message, frozen=True, kw_only=True):
    job: Job


class SubmitJob(Request[JobReply], frozen=True, kw_only=True):
    """`request_id` makes it safe to send twice: the second answer is the first job."""

    spec: JobSpec
    request_id: str


class GetJob(Request[JobReply], frozen=True, kw_only=True):
    """Waits up to `wait_s` while the job is in state `while_state`; an id or a unique name will do."""

    job_id: str
    while_state: JobState | None = None
    wait_s: float = 0.0


class JobsReply(Message, frozen=True, kw_only=True):
    """Newest first. `more` when older ones were left out."""

    jobs: tuple[Job, ...]
    more: bool


class ListJobs(Request[JobsReply], frozen=True, kw_only=True):
    states: tuple[JobState, ...] = ()
    before_sequence: int | None = None
    limit: int = 100


class CancelJob(Request[JobReply], frozen=True, kw_only=True):
    job_id: str


class QueuedJob(Record, frozen=True, kw_only=True):
    """A job that waits. `position` counts all who wait, those of other tenants too; the first is 1."""

    position: int
    job_id: str
    name: str
    tenant: str
    resources: Resources
    wishes: Wishes
    submitted_at: float
    reason: str
    starts_at: float | None = None
    """When it would start if nothing changed; None when nobody can say."""


class QueueReply(Message, frozen=True, kw_only=True):
    """In the order in which they are considered. `more` when later ones were left out."""

    jobs: tuple[QueuedJob, ...]
    waiting: int
    """All who wait, of every tenant."""
    more: bool = False


class GetQueue(Request[QueueReply], frozen=True, kw_only=True):
    limit: int = 100


class NodesRuledOut(Record, frozen=True, kw_only=True):
    """Nodes that will not do, and what is in the way there. Of many only the first are named."""

    reason: str
    count: int
    nodes: tuple[str, ...]
    ever: bool
    """They would not do either, were they all free."""


class ExplainReply(Message, frozen=True, kw_only=True):
    """What is behind `ahead` is told of a job that waits only."""

    job: Job
    """`reason` says what it waits for, `history` how it came to where it is."""
    ahead: int | None = None
    """So many jobs come before it; None when it does not wait, or nobody has looked at it yet."""
    starts_at: float | None = None
    """When it would start if nobody came and all ran as long as they may; None when nobody can say."""
    starts_why: str = ""
    """What that rests on beside time limits, or why nobody can say; empty for nothing."""
    ruled_out: tuple[NodesRuledOut, ...] = ()
    ruled_out_more: int = 0
    """So many nodes are ruled out for further reasons."""


class ExplainJob(Request[ExplainReply], frozen=True, kw_only=True):
    job_id: str


class LogChunk(Message, frozen=True, kw_only=True):
    """`next_offset` is where to go on; `start` > the offset asked for when rotation has eaten a part.
    `eof` when that run of the job has ended and nothing follows in its log."""

    data: bytes
    start: int
    next_offset: int
    eof: bool
    run: int = 0
    """Which it is of; 0 when the job has not run, or not so often."""
    runs: tuple[int, ...] = ()
    """Those that have a log, the oldest first."""


class ReadLog(Request[LogChunk], frozen=True, kw_only=True):
    """Standard output and error in one stream, as they were written. Served by controller and agent alike."""

    job_id: str
    offset: int = 0
    bytes_max: int = CHUNK_BYTES_MAX
    wait_s: float = 0.0
    run: int = 0
    """Of a job that ran several times, which; 0 for the last. One more than there were: the next."""
    epoch: int = 0
    """For agents, which know runs by this; 0 for the last."""


class BlobStatus(Message, frozen=True, kw_only=True):
    """`received_bytes` says where to go on sending."""

    complete: bool
    received_bytes: int


class StatBlob(Request[BlobStatus], frozen=True, kw_only=True):
    digest: str


class PutBlob(Request[BlobStatus], frozen=True, kw_only=True):
    """Chunks in order; the one with `last` seals it, after the digest has been checked."""

    digest: str
    offset: int
    data: bytes
    last: bool


class BlobChunk(Message, frozen=True, kw_only=True):
    data: bytes
    size_bytes: int


class GetBlob(Request[BlobChunk], frozen=True, kw_only=True):
    digest: str
    offset: int


# --- Cluster ----------------------------------------------------------------------------------


class NodeView(Record, frozen=True, kw_only=True):
    info: NodeInfo
    ledger: NodeLedger
    drained: str = ""
    """Why nothing new is placed there, by the owner's word; empty when it is."""


class NodesReply(Message, frozen=True, kw_only=True):
    """In order of their ids. `more` when the next ones did not fit into one frame."""

    nodes: tuple[NodeView, ...]
    more: bool = False


class ListNodes(Request[NodesReply], frozen=True, kw_only=True):
    """Nodes whose id comes after `after`."""

    after: str = ""


class RemoveNode(Request[Done], frozen=True, kw_only=True):
    """Takes a node out for good: its token and its certificate open nothing any more."""

    node_id: str


class DrainNode(Request[Done], frozen=True, kw_only=True):
    """Nothing new is placed on the node from now on; what runs there goes on."""

    node_id: str
    reason: str = ""


class UndrainNode(Request[Done], frozen=True, kw_only=True):
    node_id: str


class StatusReply(Message, frozen=True, kw_only=True):
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
    """By which it is decided who comes next."""
    policy_fault: str = ""
    """Why that one is out of use, and which decides instead; empty while it is well."""


class GetStatus(Request[StatusReply], frozen=True, kw_only=True):
    """Takes nothing."""


class TokensReply(Message, frozen=True, kw_only=True):
    tokens: tuple[TokenRecord, ...]


class ListTokens(Request[TokensReply], frozen=True, kw_only=True):
    """Takes nothing."""


class TokenCreated(Message, frozen=True, kw_only=True):
    """The only time that the secret is shown."""

    token: str
    record: TokenRecord


class CreateToken(Request[TokenCreated], frozen=True, kw_only=True):
    kind: TokenKind
    tenant: str = ""
    name: str = ""
    ttl_s: float | None = None


class RevokeToken(Request[Done], frozen=True, kw_only=True):
    token_id: str


class QuotaView(Record, frozen=True, kw_only=True):
    """`quota` without bounds where none was set."""

    quota: QuotaRecord
    held_gpus: float


class QuotasReply(Message, frozen=True, kw_only=True):
    """In order of the tenants' names. `more` when the last ones did not fit into one frame."""

    quotas: tuple[QuotaView, ...]
    more: bool = False


class ListQuotas(Request[QuotasReply], frozen=True, kw_only=True):
    """A user sees its own tenant's; the owner those of all that have one or hold anything."""


class SetQuota(Request[Done], frozen=True, kw_only=True):
    """In place of the one that the tenant had."""

    quota: QuotaRecord


class RemoveQuota(Request[Done], frozen=True, kw_only=True):
    tenant: str


# --- Client sessions and the device -----------------------------------------------------------


class SessionHeartbeat(Request[NodesReply], frozen=True, kw_only=True):
    """A client is alive; the answer tells it who else is."""

    node: NodeInfo


class SessionEnd(Request[Done], frozen=True, kw_only=True):
    """Everything that this client holds is given back now."""

    node_id: str


class DeviceReply(Message, frozen=True, kw_only=True):
    """`endpoint` is None while the executor is on its way; `job` says how far it is and why it waits."""

    job: Job
    endpoint: Endpoint | None
    ticket: str = ""


class OpenDevice(Request[DeviceReply], frozen=True, kw_only=True):
    """An executor on one accelerator for this client. `request_id` makes it safe to send twice."""

    session_node_id: str
    node_id: str
    gpu_id: int
    request_id: str


class WaitDevice(Request[DeviceReply], frozen=True, kw_only=True):
    job_id: str
    wait_s: float = 0.0


def reply_type(request: type[Request[_Reply]]) -> type[_Reply]:
    """The type that answers this type of request."""
    return typing.cast("type[_Reply]", _reply_type(request))


@functools.cache
def _reply_type(request: type[Message]) -> type[Message]:
    (answer,) = typing.get_args(request.__orig_bases__[0])  # type: ignore[attr-defined]
    return typing.cast("type[Message]", answer)


BEFORE_HELLO = (Hello, FetchTrust, Join)
FOR_NODES = (
    Register,
    Heartbeat,
    Leave,
    ConfirmLaunch,
    ExecutorReady,
    RenewCertificate,
    SignExecutor,
    GetBlob,
)
FOR_USERS = (
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
    GetStatus,
    ListQuotas,
    SessionHeartbeat,
    SessionEnd,
    OpenDevice,
    WaitDevice,
)
FOR_OWNERS = (
    ListTokens,
    CreateToken,
    RevokeToken,
    RemoveNode,
    DrainNode,
    UndrainNode,
    SetQuota,
    RemoveQuota,
)

CONTROLLER_REQUESTS = (*BEFORE_HELLO, *FOR_NODES, *FOR_USERS, *FOR_OWNERS)
AGENT_REQUESTS = (Launch, Kill, ReadLog)
