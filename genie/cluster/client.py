"""The client of the controller's API: jobs, logs, nodes, tokens, quotas. Used by the command line and tools.

    async with open_client(settings) as client:
        job = await client.submit(spec, workdir=Path("."))

Every call has a timeout and, if it is idempotent, is retried after a lost connection. Errors are those of the
controller. Sessions with a torch device are opened by init.py.
"""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from genie.cluster.locking.lock_lease import LeaseClock, LockLease
from genie.config import Settings, WorkdirConfig
from genie.errors import DeadlineError, OverloadedError, UnreachableError, WorkdirError
from genie.model.job import FINAL_STATES, Job, JobSpec, JobState, Workdir
from genie.model.limits import LIST_MAX
from genie.model.messages import (
    CHUNK_BYTES_MAX,
    WAIT_S_MAX,
    BackupChunk,
    BackupOpened,
    BlobStatus,
    CancelJob,
    CloseBackup,
    CreateToken,
    DrainNode,
    DrainStarted,
    EmptyNode,
    ExplainJob,
    ExplainReply,
    GetJob,
    GetQueue,
    GetStatus,
    ListJobs,
    ListMembers,
    ListQuotas,
    ListTokens,
    LogChunk,
    MembersReply,
    NodeView,
    OpenBackup,
    PutBlob,
    QueueReply,
    QuotasReply,
    ReadBackup,
    ReadLog,
    RemoveNode,
    RemoveQuota,
    RevokeToken,
    SetQuota,
    StatBlob,
    StatusReply,
    SubmitJob,
    TokenCreated,
    UndrainNode,
)
from genie.model.messages.locks import BreakLock, ListLocks, LockBroken, LocksReply
from genie.model.tenant import QuotaRecord, TokenKind, TokenRecord
from genie.runtime.controller_connection import ControllerConnection, fetch_nodes
from genie.runtime.network import Network, TcpNetwork
from genie.supervisor.connection import open_connection

if TYPE_CHECKING:
    from genie.processes.workdir import PackedWorkdir

CONNECT_TIMEOUT_S = 10.0
CALL_TIMEOUT_S = 20.0
_LONG_POLL_S = 10.0
"""Duration of one long poll; short, to detect a dead connection."""
_UPLOAD_CHUNK_EXTRA_TIMEOUT_S = 5.0
LOG_RETRY_TIMEOUT_S = 30.0
"""How long follow_log() retries while the node is unreachable."""
_LOG_RETRY_INTERVAL_S = 0.2
"""On average."""
_UPLOAD_ATTEMPTS_MAX = 5

UploadProgressCallback = Callable[[str, int, int], None]
"""Receives the current step, and how much of it is done of the total (bytes or files)."""


@asynccontextmanager
async def open_client(
    settings: Settings,
    *,
    network: Network | None = None,
    timeout_s: float = CONNECT_TIMEOUT_S,
    program: str = "genie",
) -> AsyncIterator[ClusterClient]:
    """Opens a client of the cluster of the settings for the block."""
    async with open_connection(
        settings, network=network or TcpNetwork(), timeout_s=timeout_s, program=program
    ) as connection:
        yield ClusterClient(connection, workdir_limits=settings.workdir)


class ClusterClient:
    """Created by `open_client`; use it on one event loop. A job ID may also be a unique job name."""

    def __init__(self, connection: ControllerConnection, *, workdir_limits: WorkdirConfig) -> None:
        self._connection = connection
        self._workdir_limits = workdir_limits

    @property
    def where(self) -> str:
        """host:port of the controller."""
        return self._connection.where

    @property
    def reply_age_s(self) -> float:
        """The highest age of a reply so far; above 0 if a standby has answered without its leader."""
        return self._connection.oldest_reply_age_s

    @property
    def is_owner(self) -> bool:
        """Whether the token is an owner token, which sees the jobs of all tenants."""
        return self._connection.access.token.kind is TokenKind.OWNER

    # --- jobs ---------------------------------------------------------------------------------

    async def submit(
        self, spec: JobSpec, *, workdir: Path | None = None, progress: UploadProgressCallback | None = None
    ) -> Job:
        """Uploads the working directory and queues the job. Idempotent: retries never queue it twice."""
        progress = progress or _ignore_progress
        if workdir is not None:
            uploaded = await self._upload_workdir(workdir, progress)
            spec = msgspec.structs.replace(spec, workdir=uploaded)
        request = SubmitJob(spec=spec, request_id=secrets.token_hex(16))
        try:
            return (await self._connection.call(request, timeout_s=CALL_TIMEOUT_S)).job
        except WorkdirError:
            if workdir is None:
                raise
        # The upload went to a controller that was lost before it could copy it to the others.
        spec = msgspec.structs.replace(spec, workdir=await self._upload_workdir(workdir, progress))
        request = msgspec.structs.replace(request, spec=spec)
        return (await self._connection.call(request, timeout_s=CALL_TIMEOUT_S)).job

    async def get_job(self, job_id: str) -> Job:
        return (await self._connection.call(GetJob(job_id=job_id), timeout_s=CALL_TIMEOUT_S)).job

    async def list_jobs(
        self,
        *,
        states: tuple[JobState, ...] = (),
        limit: int = 100,
        before_sequence: int | None = None,
    ) -> tuple[list[Job], bool]:
        """Returns jobs, newest first, and whether there are older ones. Empty `states` means all states."""
        request = ListJobs(states=states, limit=min(limit, LIST_MAX), before_sequence=before_sequence)
        reply = await self._connection.call(request, timeout_s=CALL_TIMEOUT_S)
        return list(reply.jobs), reply.more

    async def cancel(self, job_id: str) -> Job:
        """Requests cancellation and returns the job, which may still be running."""
        return (await self._connection.call(CancelJob(job_id=job_id), timeout_s=CALL_TIMEOUT_S)).job

    async def queue(self, *, limit: int = 100) -> QueueReply:
        """Queued jobs in scheduling order."""
        return await self._connection.call(GetQueue(limit=min(limit, LIST_MAX)), timeout_s=CALL_TIMEOUT_S)

    async def explain(self, job_id: str) -> ExplainReply:
        """The pending reasons of a job, or how it was placed."""
        return await self._connection.call(ExplainJob(job_id=job_id), timeout_s=CALL_TIMEOUT_S)

    async def wait_job(
        self,
        job_id: str,
        *,
        timeout_s: float | None = None,
        on_change: Callable[[Job], None] | None = None,
    ) -> Job:
        """Waits until the job has ended. Calls `on_change` with each state, the current one first."""
        try:
            async with asyncio.timeout(timeout_s):
                return await self._wait_until_job_ended(job_id, on_change)
        except TimeoutError:
            raise DeadlineError(f"job {job_id} has not ended within {timeout_s:g} s") from None

    async def _wait_until_job_ended(self, job_id: str, on_change: Callable[[Job], None] | None) -> Job:
        job = await self.get_job(job_id)
        while True:
            if on_change is not None:
                on_change(job)
            if job.state in FINAL_STATES:
                return job
            seen = job.state
            while job.state is seen:
                request = GetJob(job_id=job.job_id, while_state=seen, wait_s=_LONG_POLL_S)
                with suppress(OverloadedError):  # too many waits are open: the state has not changed
                    job = (await self._connection.call(request, timeout_s=_LONG_POLL_S + CALL_TIMEOUT_S)).job

    # --- logs ---------------------------------------------------------------------------------

    async def read_log(
        self,
        job_id: str,
        *,
        offset: int = 0,
        bytes_max: int = CHUNK_BYTES_MAX,
        wait_s: float = 0.0,
        run: int = 0,
    ) -> LogChunk:
        """Returns the next chunk of a job's output; waits up to `wait_s` for new output. `run` selects a run
        of a job that was queued again; 0 is the last."""
        wait_s = min(wait_s, WAIT_S_MAX)
        bytes_max = min(bytes_max, CHUNK_BYTES_MAX)
        request = ReadLog(job_id=job_id, offset=offset, bytes_max=bytes_max, wait_s=wait_s, run_number=run)
        return await self._connection.call(request, timeout_s=wait_s + CALL_TIMEOUT_S)

    async def follow_log(
        self, job_id: str, *, offset: int = 0, follow: bool = True, run: int = 0
    ) -> AsyncIterator[bytes]:
        """Yields the output from `offset`: up to now or, with `follow`, until the job has ended, including
        later runs. With `run`, only of that run.

        Resumes after a lost connection, and retries for LOG_RETRY_TIMEOUT_S while the node is unreachable.
        Yields a note in place of output that rotation has removed.
        """
        loop = asyncio.get_running_loop()
        last_reply_s, requested_run = loop.time(), run
        while True:
            try:
                chunk = await self.read_log(
                    job_id, offset=offset, wait_s=_LONG_POLL_S if follow else 0.0, run=requested_run
                )
            except OverloadedError:  # too many waits are open: there is no new output
                if not follow:
                    raise
                last_reply_s = loop.time()
                continue
            except (DeadlineError, UnreachableError) as error:
                if not follow or loop.time() - last_reply_s > LOG_RETRY_TIMEOUT_S:
                    raise
                if isinstance(error, DeadlineError):
                    # The connection may be dead; the offset makes a retry safe.
                    self._connection.disconnect()
                await asyncio.sleep(_LOG_RETRY_INTERVAL_S * (0.5 + random.random()))  # noqa: S311 - jitter
                continue
            last_reply_s, requested_run = loop.time(), chunk.run_number or requested_run
            if chunk.start_offset > offset:
                yield f"[genie: {chunk.start_offset - offset} bytes of output were dropped]\n".encode()
            if chunk.data:
                yield chunk.data
            offset = chunk.next_offset
            if not follow and not chunk.data:
                return
            if chunk.eof and (run or not chunk.run_number):
                return
            if chunk.eof:  # it was preempted and may run again
                requested_run, offset = chunk.run_number + 1, 0

    # --- the cluster --------------------------------------------------------------------------

    async def nodes(self) -> tuple[NodeView, ...]:
        """All nodes, by ID."""
        return await fetch_nodes(self._connection, timeout_s=CALL_TIMEOUT_S)

    async def status(self) -> StatusReply:
        return await self._connection.call(GetStatus(), timeout_s=CALL_TIMEOUT_S)

    async def list_tokens(self) -> tuple[TokenRecord, ...]:
        """All tokens, newest first."""
        reply = await self._connection.call(ListTokens(), timeout_s=CALL_TIMEOUT_S)
        tokens = list(reply.tokens)
        while reply.more and reply.tokens:
            request = ListTokens(after_token_id=tokens[-1].token_id)
            reply = await self._connection.call(request, timeout_s=CALL_TIMEOUT_S)
            tokens += reply.tokens
        return tuple(sorted(tokens, key=lambda token: (-token.created_at, token.token_id)))

    async def create_token(
        self, kind: TokenKind, *, tenant: str = "", name: str = "", ttl_s: float | None = None
    ) -> TokenCreated:
        """Returns the token; it is stored nowhere else. Not retried: a lost reply is an error."""
        request = CreateToken(kind=kind, tenant=tenant, name=name, ttl_s=ttl_s)
        return await self._connection.call(request, timeout_s=CALL_TIMEOUT_S, idempotent=False)

    async def forget_node(self, node_id: str) -> None:
        """Removes a disconnected node from the cluster."""
        await self._connection.call(RemoveNode(node_id=node_id), timeout_s=CALL_TIMEOUT_S)

    async def drain_node(self, node_id: str, *, reason: str = "") -> None:
        """Stops placing jobs on the node; running jobs continue."""
        await self._connection.call(DrainNode(node_id=node_id, reason=reason), timeout_s=CALL_TIMEOUT_S)

    async def empty_node(self, node_id: str, *, reason: str = "") -> DrainStarted:
        """Stops placing jobs on the node and moves its restartable jobs to other nodes. Returns the jobs that
        move and those that stay until they end."""
        request = EmptyNode(node_id=node_id, reason=reason)
        return await self._connection.call(request, timeout_s=CALL_TIMEOUT_S)

    async def members(self) -> MembersReply:
        """Servers and nodes as gossip reports them to the server in use, which need not lead."""
        return await self._connection.call(ListMembers(), timeout_s=CALL_TIMEOUT_S)

    async def undrain_node(self, node_id: str) -> None:
        await self._connection.call(UndrainNode(node_id=node_id), timeout_s=CALL_TIMEOUT_S)

    async def revoke_token(self, token_id: str) -> None:
        await self._connection.call(RevokeToken(token_id=token_id), timeout_s=CALL_TIMEOUT_S)

    async def quotas(self) -> QuotasReply:
        """Quotas and current use of all tenants; for a user token, of its own tenant."""
        return await self._connection.call(ListQuotas(), timeout_s=CALL_TIMEOUT_S)

    async def set_quota(self, quota: QuotaRecord) -> None:
        """Replaces the quota of the tenant."""
        await self._connection.call(SetQuota(quota=quota), timeout_s=CALL_TIMEOUT_S)

    async def remove_quota(self, tenant: str) -> None:
        """Removes the quota of the tenant. Not retried: a second request would fail."""
        await self._connection.call(RemoveQuota(tenant=tenant), timeout_s=CALL_TIMEOUT_S, idempotent=False)

    async def list_locks(self) -> LocksReply:
        """The held locks of all tenants; for a user token, of its own tenant."""
        return await self._connection.call(ListLocks(), timeout_s=CALL_TIMEOUT_S)

    async def break_lock(self, tenant: str, name: str) -> LockBroken:
        """Releases a lock whoever holds it. Not retried: a second request would affect the next holder."""
        request = BreakLock(tenant=tenant, name=name)
        return await self._connection.call(request, timeout_s=CALL_TIMEOUT_S, idempotent=False)

    def make_lock_lease(
        self,
        name: str,
        *,
        ttl_s: float,
        holder: str,
        on_lost: Callable[[str], None] = lambda _reason: None,
    ) -> LockLease:
        """An acquisition of a lock; the caller runs `keep_until_ended` after it was acquired."""
        return LockLease(
            name, ttl_s=ttl_s, holder=holder, sender=self._connection, clock=LeaseClock(), on_lost=on_lost
        )

    async def open_backup(self) -> BackupOpened:
        """Begins a backup of the store; one at a time. End it with `close_backup`."""
        return await self._connection.call(OpenBackup(), timeout_s=CALL_TIMEOUT_S, idempotent=False)

    async def read_backup(self, backup_id: str, *, offset: int) -> BackupChunk:
        request = ReadBackup(backup_id=backup_id, offset=offset)
        return await self._connection.call(request, timeout_s=CALL_TIMEOUT_S)

    async def close_backup(self, backup_id: str) -> None:
        await self._connection.call(CloseBackup(backup_id=backup_id), timeout_s=CALL_TIMEOUT_S)

    # --- working directories ------------------------------------------------------------------

    async def _upload_workdir(self, directory: Path, progress: UploadProgressCallback) -> Workdir:
        from genie.processes.workdir import pack  # imported here: most clients upload none

        packed = await asyncio.to_thread(
            pack,
            directory,
            bytes_max=self._workdir_limits.bytes_max,
            files_max=self._workdir_limits.files_max,
            progress=lambda done, total: progress("packing", done, total),
        )
        try:
            await self._upload_blob(packed, progress)
        finally:
            packed.file.close()
        return Workdir(digest=packed.digest, size_bytes=packed.size_bytes)

    async def _upload_blob(self, packed: PackedWorkdir, progress: UploadProgressCallback) -> None:
        """Uploads the bytes that the controller does not have yet; resumes after a lost connection."""
        status = await self._fetch_blob_status(packed.digest)
        for _ in range(_UPLOAD_ATTEMPTS_MAX):
            while not status.complete:
                progress("sending", status.received_bytes, packed.size_bytes)
                before = status.received_bytes
                status = await self._upload_chunk(packed, before)
                if not status.complete and status.received_bytes <= before:
                    break
            if status.complete:
                progress("sending", packed.size_bytes, packed.size_bytes)
                return
            status = await self._fetch_blob_status(packed.digest)
        raise WorkdirError(
            f"could not upload the working directory to {self.where}: stopped at {status.received_bytes} of "
            f"{packed.size_bytes} bytes",
            hint="see the log of the controller; its disk may be full",
        )

    async def _fetch_blob_status(self, digest: str) -> BlobStatus:
        return await self._connection.call(StatBlob(digest=digest), timeout_s=CALL_TIMEOUT_S)

    async def _upload_chunk(self, packed: PackedWorkdir, offset: int) -> BlobStatus:
        data = await asyncio.to_thread(_read_chunk_of_packed_workdir, packed, offset)
        last = offset + len(data) >= packed.size_bytes
        request = PutBlob(digest=packed.digest, offset=offset, data=data, is_last=last)
        return await self._connection.call(request, timeout_s=CALL_TIMEOUT_S + _UPLOAD_CHUNK_EXTRA_TIMEOUT_S)


def _read_chunk_of_packed_workdir(packed: PackedWorkdir, offset: int) -> bytes:
    packed.file.seek(offset)
    return packed.file.read(CHUNK_BYTES_MAX)


def _ignore_progress(_what: str, _done: int, _total: int) -> None:
    """The default progress callback."""
