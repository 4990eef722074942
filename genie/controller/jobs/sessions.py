"""Sessions: clients, their leases, and the executors that run for them.

Each open device is a session job in the ledger, fixed to one accelerator. It is cancelled when the client
ends the session, all of its connections have been closed for `session_grace_s`, or its lease expires: three
of the heartbeat intervals that it announced, within LEASE_S_MIN and LEASE_S_MAX. A client reconnects at once,
so closed connections mean that its process has ended; a broken network closes none. After the start of a term
every client has LEASE_S_MAX to reach the new leader. Tickets are kept in memory only; the ledger has their
hash.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from genie.controller.checks import check_endpoint
from genie.controller.jobs.catalog import JobCatalog
from genie.controller.jobs.lifecycle import JobLifecycle
from genie.controller.jobs.outcomes import is_current_placement
from genie.controller.jobs.submission import JobSubmission
from genie.controller.ledger import Ledger
from genie.errors import DeviceUnavailableError, JobNotFoundError, NodeNotFoundError, UsageError
from genie.model.allocation import FULL_MILLI
from genie.model.job import Accelerator, Job, JobKind, JobSpec, JobState, Resources, StopReason
from genie.model.limits import NAME_CHARS_MAX
from genie.model.messages import SESSION_INTERVAL_S_MAX, DeviceReply, Endpoint, OpenDevice
from genie.model.names import validate_node_id
from genie.model.node import GPUInfo, Vendor
from genie.model.tenant import Identity
from genie.processes.clock import Clock
from genie.processes.tasks import run_all_concurrently
from genie.runtime.rpc import Peer
from genie.tenancy.access import encode_base64url

LEASE_HEARTBEAT_INTERVALS = 3
LEASE_S_MIN = 60.0
LEASE_S_MAX = LEASE_HEARTBEAT_INTERVALS * SESSION_INTERVAL_S_MAX
TRACKED_CONNECTIONS_PER_CLIENT_MAX = 4
CLIENTS_MAX = 10_000
CLIENTS_PER_TENANT_MAX = 1000
CPU_SESSION_FRACTION_MILLI = 100
EXECUTOR_STATUS_CHARS_MAX = 1000


@dataclass(slots=True)
class _Client:
    lease_renewed_s: float
    lease_s: float = LEASE_S_MIN
    peers: list[Peer] = field(default_factory=list)
    """The latest connections that sent a heartbeat."""
    disconnected_since_s: float | None = None
    """Since when all of them are closed."""

    def add_peer(self, peer: Peer) -> None:
        if peer not in self.peers:
            self.peers = [*self.peers, peer][-TRACKED_CONNECTIONS_PER_CLIENT_MAX:]
        self.disconnected_since_s = None

    def has_disconnected(self, now_s: float, *, grace_s: float) -> bool:
        """Whether the process of the client has ended, or cannot reach the controller."""
        if not self.peers or not all(peer.is_closed for peer in self.peers):
            return False
        if self.disconnected_since_s is None:
            self.disconnected_since_s = now_s
        return now_s - self.disconnected_since_s >= grace_s

    def is_lease_expired(self, now_s: float) -> bool:
        return now_s - self.lease_renewed_s >= self.lease_s


def lease_duration_s(interval_s: float) -> float:
    """Lease of a client that announces this heartbeat interval. Pure."""
    return min(max(LEASE_HEARTBEAT_INTERVALS * interval_s, LEASE_S_MIN), LEASE_S_MAX)


class Sessions:
    def __init__(
        self,
        ledger: Ledger,
        jobs: JobCatalog,
        submission: JobSubmission,
        lifecycle: JobLifecycle,
        *,
        clock: Clock,
        random_bytes: Callable[[int], bytes],
        reconnect_grace_s: float,
    ) -> None:
        """`reconnect_grace_s`: time that a disconnected client has to return."""
        self._ledger = ledger
        self._jobs = jobs
        self._submission = submission
        self._lifecycle = lifecycle
        self._clock = clock
        self._random_bytes = random_bytes
        self._reconnect_grace_s = reconnect_grace_s
        self._clients: dict[tuple[str, str], _Client] = {}
        self._ticket_by_job: dict[str, str] = {}
        self._endpoint_by_job: dict[str, tuple[int, Endpoint]] = {}
        self._executor_status_by_job: dict[str, str] = {}
        """By session job: what its executor does before it listens."""
        self._term_began_s = 0.0

    def begin_term(self, now_s: float) -> None:
        """Grant every client LEASE_S_MAX from now. What was known from an earlier term does not count: since
        then, the clients have been in contact with other leaders."""
        self._term_began_s = now_s
        self._clients.clear()

    def count_clients(self) -> int:
        """Number of clients with a valid lease."""
        now_s = self._clock.monotonic_s()
        return sum(1 for client in self._clients.values() if not client.is_lease_expired(now_s))

    def renew_lease(
        self,
        identity: Identity,
        client_node_id: str,
        *,
        interval_s: float | None = None,
        peer: Peer | None = None,
    ) -> None:
        """Renew the lease of a client. `interval_s` is the heartbeat interval that it announces, `peer` the
        connection of a heartbeat. Clients of different tenants may have the same name."""
        validate_node_id(client_node_id)
        client = self._clients.get((identity.tenant, client_node_id))
        if client is None:
            count = sum(1 for tenant, _ in self._clients if tenant == identity.tenant)
            if len(self._clients) >= CLIENTS_MAX or count >= CLIENTS_PER_TENANT_MAX:
                raise UsageError(
                    f"tenant {identity.tenant} has {count} clients; a tenant can have "
                    f"{CLIENTS_PER_TENANT_MAX}, and all tenants together {CLIENTS_MAX}",
                    hint="end some sessions first",
                )
            client = self._clients[identity.tenant, client_node_id] = _Client(0.0)
        client.lease_renewed_s = self._clock.monotonic_s()
        if interval_s is not None:
            client.lease_s = lease_duration_s(interval_s)
        if peer is not None:
            client.add_peer(peer)

    async def open_device(
        self, request: OpenDevice, identity: Identity, *, check_allowed: Callable[[JobSpec], None]
    ) -> DeviceReply:
        """Create a session job for one accelerator, or return the one of this request ID. `check_allowed`
        raises if the job is not allowed."""
        self.renew_lease(identity, request.session_node_id)
        job = self._submission.find_by_request_id(identity.tenant, request.request_id)
        if job is None:
            job = await self._submit_session_job(request, identity, check_allowed)
        if job.spec.kind is not JobKind.SESSION:
            raise UsageError(f"request ID {request.request_id!r} was used for another kind of job")
        if job.job_id not in self._ticket_by_job and not job.state.is_final:
            raise DeviceUnavailableError(
                f"the ticket of {job.job_id} was lost in a restart of the controller",
                hint="open the device again with a new request ID",
            )
        return self.make_device_reply(job)

    def make_device_reply(self, job: Job) -> DeviceReply:
        endpoint = self._current_endpoint(job)
        visible = self._jobs.visible_to_tenant(job)
        status = self._executor_status_by_job.get(job.job_id)
        if status and endpoint is None and job.state is JobState.RUNNING:
            visible = msgspec.structs.replace(visible, reason=status)
        return DeviceReply(job=visible, endpoint=endpoint, ticket=self._ticket_by_job.get(job.job_id, ""))

    async def wait_device(self, job_id: str, identity: Identity, *, wait_s: float) -> DeviceReply:
        """Wait until the executor listens, the job ends, or the timeout expires."""
        job = self._find_session_job(job_id, identity)
        self.renew_lease(identity, job.session)

        def is_starting(job: Job) -> bool:
            return not job.state.is_final and self._current_endpoint(job) is None

        await self._jobs.wait_while(job_id, is_starting, timeout_s=wait_s)
        self.renew_lease(identity, job.session)
        return self.make_device_reply(self._find_session_job(job_id, identity))

    def set_endpoint(self, job: Job, epoch: int, endpoint: Endpoint) -> None:
        """Record that the executor of this placement listens."""
        check_endpoint(endpoint)
        self._endpoint_by_job[job.job_id] = (epoch, endpoint)
        self._jobs.notify_waiters(job.job_id)

    def set_executor_status(self, job: Job, status: str) -> None:
        """Record what the executor does before it listens; empty to clear."""
        if status:
            self._executor_status_by_job[job.job_id] = status[:EXECUTOR_STATUS_CHARS_MAX]
        else:
            self._executor_status_by_job.pop(job.job_id, None)

    async def close_jobs_of_client(self, identity: Identity, client_node_id: str) -> list[Job]:
        """End the session jobs of a client that closes its session, and return them; the caller kills those
        that run."""
        self._clients.pop((identity.tenant, client_node_id), None)
        own = self._jobs.session_jobs_of_client(identity.tenant, client_node_id)
        return await run_all_concurrently(
            self._lifecycle.cancel(job.job_id, "the client closed the session", stop=StopReason.CLOSED)
            for job in own
        )

    async def cancel_expired(self) -> list[Job]:
        """Cancel the session jobs of clients that are gone or whose lease has expired; return them. Delete
        the tickets and endpoints of ended jobs."""
        now_s = self._clock.monotonic_s()
        expired = {
            job.job_id: self._why_expired(job, now_s) for job in self._jobs.session_jobs() if not job.stop
        }
        cancelled: list[Job] = []
        # Together: scheduling waits for them, and a client may have thousands of sessions.
        await run_all_concurrently(
            self._try_cancel(job_id, why, cancelled) for job_id, why in expired.items() if why
        )
        for key in [key for key, client in self._clients.items() if client.is_lease_expired(now_s)]:
            del self._clients[key]
        # Listed again: others may have been submitted while the cancellations were written.
        unfinished = {job.job_id for job in self._jobs.session_jobs()}
        self._ticket_by_job = {
            key: ticket for key, ticket in self._ticket_by_job.items() if key in unfinished
        }
        self._endpoint_by_job = {
            key: item for key, item in self._endpoint_by_job.items() if key in unfinished
        }
        self._executor_status_by_job = {
            key: status for key, status in self._executor_status_by_job.items() if key in unfinished
        }
        return cancelled

    def _why_expired(self, job: Job, now_s: float) -> str:
        """Why the client of this session has lost it; empty if it has not."""
        client = self._clients.get((job.tenant, job.session)) or _Client(0.0, LEASE_S_MAX)
        if client.has_disconnected(now_s, grace_s=self._reconnect_grace_s):
            return f"the client disconnected and did not return within {self._reconnect_grace_s:g} s"
        if now_s - max(client.lease_renewed_s, self._term_began_s) >= client.lease_s:
            return f"the client sent no heartbeat for {client.lease_s:g} s"
        return ""

    async def _try_cancel(self, job_id: str, reason: str, cancelled: list[Job]) -> None:
        with self._ledger.quarantine.quarantine_row_on_error(self._ledger.jobs.prefix + job_id):
            cancelled.append(await self._lifecycle.cancel(job_id, reason))

    async def _submit_session_job(
        self, request: OpenDevice, identity: Identity, check_allowed: Callable[[JobSpec], None]
    ) -> Job:
        gpu = self._find_accelerator(request.node_id, request.gpu_id)
        is_cpu = gpu.vendor is Vendor.CPU
        spec = JobSpec(
            name=f"session-{request.session_node_id}"[:NAME_CHARS_MAX].rstrip("-"),
            command=(),
            kind=JobKind.SESSION,
            resources=Resources(
                gpus=1,
                gpu_milli=CPU_SESSION_FRACTION_MILLI if is_cpu else FULL_MILLI,
                accelerator=Accelerator.CPU if is_cpu else Accelerator.GPU,
            ),
            node_id=request.node_id,
            gpu_ids=(request.gpu_id,),
        )
        check_allowed(spec)
        ticket = encode_base64url(self._random_bytes(32))
        job = await self._submission.submit(
            spec,
            identity,
            request.request_id,
            session_node_id=request.session_node_id,
            ticket_sha256=hashlib.sha256(ticket.encode()).hexdigest(),
        )
        if job.ticket_sha256 == hashlib.sha256(ticket.encode()).hexdigest():
            self._ticket_by_job[job.job_id] = ticket
        return job

    def _find_accelerator(self, node_id: str, gpu_id: int) -> GPUInfo:
        record = self._ledger.nodes.get(node_id)
        if record is None:
            raise NodeNotFoundError(f"there is no node {node_id[:80]!r}", hint="'genie nodes' lists them")
        if record.has_left:
            raise DeviceUnavailableError(
                f"node {node_id} has left the cluster", hint="use another index, or restart its agent"
            )
        for gpu in record.info.gpus:
            if gpu.gpu_id == gpu_id:
                return gpu
        raise DeviceUnavailableError(
            f"node {node_id} has no accelerator {gpu_id}", hint="'genie nodes' lists the accelerators"
        )

    def _find_session_job(self, job_id: str, identity: Identity) -> Job:
        job = self._jobs.get(job_id)
        # Not even the owner may: the reply contains the ticket of the tenant.
        if job is None or job.spec.kind is not JobKind.SESSION or job.tenant != identity.tenant:
            raise JobNotFoundError(f"there is no session {job_id[:80]!r}")
        return job

    def _current_endpoint(self, job: Job) -> Endpoint | None:
        found = self._endpoint_by_job.get(job.job_id)
        if (
            found is None
            or job.placement is None
            or not is_current_placement(job, 0, job.placement.node_id, found[0])
        ):
            return None
        return found[1] if job.state is JobState.RUNNING else None
