"""Clients and the executors that they hold open.

A client is known while it is heard from. What it holds is a session job in the ledger, pinned to
one accelerator; when the client ends or falls silent, that job is cancelled. After a restart of
the controller every client has the same time to be heard again. Tickets live in memory only:
the ledger has their hash. Not for: the tensors (device/).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from genie.controller.checks import check_endpoint
from genie.controller.jobs import Jobs, is_at
from genie.controller.ledger import Ledger
from genie.errors import DeviceUnavailableError, JobNotFoundError, NodeNotFoundError, UsageError
from genie.model.allocation import FULL_MILLI
from genie.model.job import Accelerator, Job, JobKind, JobSpec, JobState, Resources
from genie.model.messages import DeviceReply, Endpoint, OpenDevice
from genie.model.names import checked_node_id
from genie.model.node import GPUInfo, Vendor
from genie.model.tenant import Identity
from genie.runtime.clock import Clock
from genie.tenancy.access import encoded

SILENT_S = 60.0
CLIENTS_MAX = 10_000
CLIENTS_OF_TENANT_MAX = 1000
CPU_SHARE_MILLI = 100
NOTE_CHARS_MAX = 1000

_HELD = (JobState.QUEUED, JobState.PLACING, JobState.RUNNING)


@dataclass(slots=True)
class _Client:
    heard_s: float


class Sessions:
    def __init__(
        self, ledger: Ledger, jobs: Jobs, *, clock: Clock, random_bytes: Callable[[int], bytes]
    ) -> None:
        self._ledger = ledger
        self._jobs = jobs
        self._clock = clock
        self._random_bytes = random_bytes
        self._clients: dict[tuple[str, str], _Client] = {}
        self._tickets: dict[str, str] = {}
        self._endpoints: dict[str, tuple[int, Endpoint]] = {}
        self._notes: dict[str, str] = {}
        """What executors do that do not listen yet."""
        self._term_began_s = 0.0

    def begin_term(self, now_s: float) -> None:
        self._term_began_s = now_s

    def __len__(self) -> int:
        now_s = self._clock.monotonic_s()
        return sum(1 for client in self._clients.values() if now_s - client.heard_s < SILENT_S)

    def heard(self, identity: Identity, node_id: str) -> None:
        """This client is alive. Clients of two tenants may have the same name."""
        checked_node_id(node_id)
        client = self._clients.get((identity.tenant, node_id))
        if client is None:
            others = sum(1 for tenant, _ in self._clients if tenant == identity.tenant)
            if len(self._clients) >= CLIENTS_MAX or others >= CLIENTS_OF_TENANT_MAX:
                raise UsageError(f"{others} clients of tenant {identity.tenant} are here, the most allowed")
            client = self._clients[identity.tenant, node_id] = _Client(0.0)
        client.heard_s = self._clock.monotonic_s()

    async def open_device(
        self, request: OpenDevice, identity: Identity, *, check: Callable[[JobSpec], None]
    ) -> DeviceReply:
        """A session job for one accelerator; asked again, the same one. `check` refuses by raising."""
        self.heard(identity, request.session_node_id)
        again = self._jobs.requested(identity.tenant, request.request_id)
        if again is None:
            again = await self._submit(request, identity, check)
        if again.spec.kind is not JobKind.SESSION:
            raise UsageError(f"request id {request.request_id!r} was used for another kind of job")
        if again.job_id not in self._tickets and not again.state.is_final:
            raise DeviceUnavailableError(
                f"the ticket of {again.job_id} is gone with the controller's last life",
                hint="open the device again with a new request id",
            )
        return self.reply(again)

    def reply(self, job: Job) -> DeviceReply:
        endpoint = self._endpoint(job)
        shown = self._jobs.told_tenant(job)
        note = self._notes.get(job.job_id)
        if note and endpoint is None and job.state is JobState.RUNNING:
            shown = msgspec.structs.replace(shown, reason=note)
        return DeviceReply(job=shown, endpoint=endpoint, ticket=self._tickets.get(job.job_id, ""))

    async def wait_device(self, job_id: str, identity: Identity, *, wait_s: float) -> DeviceReply:
        """Returns when the executor listens, when the job is over, or when the time is."""
        job = self._find(job_id, identity)
        self.heard(identity, job.session)

        def on_its_way(job: Job) -> bool:
            return not job.state.is_final and self._endpoint(job) is None

        await self._jobs.wait_while(job_id, on_its_way, timeout_s=wait_s)
        self.heard(identity, job.session)
        return self.reply(self._find(job_id, identity))

    def ready(self, job: Job, epoch: int, endpoint: Endpoint) -> None:
        """The executor of this launch listens."""
        check_endpoint(endpoint)
        self._endpoints[job.job_id] = (epoch, endpoint)
        self._jobs.ring(job.job_id)

    def noted(self, job: Job, note: str) -> None:
        """What the executor of this launch does instead of listening; empty: nothing in particular."""
        if note:
            self._notes[job.job_id] = note[:NOTE_CHARS_MAX]
        else:
            self._notes.pop(job.job_id, None)

    async def end(self, identity: Identity, node_id: str) -> list[Job]:
        """What the client held, cancelled; what ran among it is still to be killed."""
        self._clients.pop((identity.tenant, node_id), None)
        mine = [job for job in self._held() if (job.session, job.tenant) == (node_id, identity.tenant)]
        return [await self._jobs.cancel(job.job_id, "its client has ended the session") for job in mine]

    async def drop_silent(self) -> list[Job]:
        """Cancels what silent clients hold, and returns it. Forgets what is over."""
        cancelled = []
        now_s = self._clock.monotonic_s()
        for job in self._held():
            client = self._clients.get((job.tenant, job.session))
            heard_s = max(client.heard_s if client else 0.0, self._term_began_s)
            if now_s - heard_s >= SILENT_S and not job.stop:
                reason = f"its client was silent for {SILENT_S:g} s"
                cancelled.append(await self._jobs.cancel(job.job_id, reason))
        for key in [key for key, client in self._clients.items() if now_s - client.heard_s >= SILENT_S]:
            del self._clients[key]
        # Asked anew: others may have come while the cancellations were written.
        alive = {job.job_id for job in self._held()}
        self._tickets = {key: ticket for key, ticket in self._tickets.items() if key in alive}
        self._endpoints = {key: item for key, item in self._endpoints.items() if key in alive}
        self._notes = {key: note for key, note in self._notes.items() if key in alive}
        return cancelled

    async def _submit(self, request: OpenDevice, identity: Identity, check: Callable[[JobSpec], None]) -> Job:
        gpu = self._accelerator(request.node_id, request.gpu_id)
        is_cpu = gpu.vendor is Vendor.CPU
        spec = JobSpec(
            name=f"session-{request.session_node_id}"[:63].rstrip("-"),
            command=(),
            kind=JobKind.SESSION,
            resources=Resources(
                gpus=1,
                gpu_milli=CPU_SHARE_MILLI if is_cpu else FULL_MILLI,
                accelerator=Accelerator.CPU if is_cpu else Accelerator.GPU,
            ),
            node_id=request.node_id,
            gpu_ids=(request.gpu_id,),
        )
        check(spec)
        ticket = encoded(self._random_bytes(32))
        job = await self._jobs.submit(
            spec,
            identity,
            request.request_id,
            session=request.session_node_id,
            ticket_sha256=hashlib.sha256(ticket.encode()).hexdigest(),
        )
        if job.ticket_sha256 == hashlib.sha256(ticket.encode()).hexdigest():
            self._tickets[job.job_id] = ticket
        return job

    def _accelerator(self, node_id: str, gpu_id: int) -> GPUInfo:
        record = self._ledger.nodes.get(node_id)
        if record is None:
            raise NodeNotFoundError(f"there is no node {node_id[:80]!r}", hint="'genie nodes' lists them")
        if record.left:
            raise DeviceUnavailableError(
                f"node {node_id} has left the cluster", hint="use another index, or start its agent again"
            )
        for gpu in record.info.gpus:
            if gpu.gpu_id == gpu_id:
                return gpu
        raise DeviceUnavailableError(
            f"node {node_id} has no accelerator {gpu_id}", hint="'genie nodes' lists what there is"
        )

    def _find(self, job_id: str, identity: Identity) -> Job:
        job = self._jobs.get(job_id)
        # Not even the owner: the answer carries the ticket, which is the tenant's own.
        if job is None or job.spec.kind is not JobKind.SESSION or job.tenant != identity.tenant:
            raise JobNotFoundError(f"there is no session {job_id[:80]!r}")
        return job

    def _endpoint(self, job: Job) -> Endpoint | None:
        found = self._endpoints.get(job.job_id)
        if found is None or job.placement is None or not is_at(job, 0, job.placement.node_id, found[0]):
            return None
        return found[1] if job.state is JobState.RUNNING else None

    def _held(self) -> list[Job]:
        return [job for job in self._jobs.in_states(*_HELD) if job.spec.kind is JobKind.SESSION]
