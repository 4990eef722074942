"""Asking the cluster: jobs, logs, nodes, tokens, as plain calls. What the command line and tools use.

    async with open_client(settings) as client:
        job = await client.submit(spec, workdir=Path("."))

Every call has a deadline, and survives a lost connection where it is safe to ask twice. Errors are
the ones that the controller gave. Not for: a process's own session with a device (init.py).
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from genie.cluster.link import Link, open_link
from genie.config import Settings, WorkdirConfig
from genie.errors import DeadlineError, UnreachableError, WorkdirError
from genie.model.job import FINAL_STATES, Job, JobSpec, JobState, Workdir
from genie.model.messages import (
    CHUNK_BYTES_MAX,
    LIST_MAX,
    WAIT_S_MAX,
    BlobStatus,
    CancelJob,
    CreateToken,
    DrainNode,
    ExplainJob,
    ExplainReply,
    GetJob,
    GetQueue,
    GetStatus,
    ListJobs,
    ListNodes,
    ListQuotas,
    ListTokens,
    LogChunk,
    NodeView,
    PutBlob,
    QueueReply,
    QuotasReply,
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
from genie.model.tenant import QuotaRecord, TokenKind, TokenRecord
from genie.runtime.credentials import find_access
from genie.runtime.network import Network, TcpNetwork

if TYPE_CHECKING:
    from genie.runtime.workdir import PackedWorkdir

CONNECT_S = 10.0
CALL_S = 20.0
_POLL_S = 10.0
"""Length of one long poll: short enough that a dead connection is noticed."""
_SLACK_S = 5.0
LOG_PATIENCE_S = 30.0
"""How long a log is asked for again while its node cannot be reached."""
_AWAY_STEP_S = 0.2
_BLOB_TRIES = 5

Progress = Callable[[str, int, int], None]
"""What is going on, how much is done, and of how much; bytes or files."""


@asynccontextmanager
async def open_client(
    settings: Settings,
    *,
    network: Network | None = None,
    timeout_s: float = CONNECT_S,
    program: str = "genie",
) -> AsyncIterator[ClusterClient]:
    """A client of the cluster that the settings name, for the length of the block."""
    network = network or TcpNetwork()
    access = await find_access(
        settings.cluster, state_dir=settings.paths.state_dir, network=network, timeout_s=timeout_s
    )
    async with open_link(access, network=network, program=program, timeout_s=timeout_s) as link:
        yield ClusterClient(link, workdir_limits=settings.workdir)


class ClusterClient:
    """Made by `open_client`; lives on one event loop. Job ids may be unique names, too."""

    def __init__(self, link: Link, *, workdir_limits: WorkdirConfig) -> None:
        self._link = link
        self._limits = workdir_limits

    @property
    def where(self) -> str:
        """host:port of the controller."""
        return self._link.where

    @property
    def is_owner(self) -> bool:
        """Whether the token is an owner's, who sees what all tenants have."""
        return self._link.access.token.kind is TokenKind.OWNER

    # --- jobs ---------------------------------------------------------------------------------

    async def submit(
        self, spec: JobSpec, *, workdir: Path | None = None, progress: Progress | None = None
    ) -> Job:
        """Queues a job, after its directory has been sent. Never queues it twice, whatever gets lost."""
        progress = progress or _no_progress
        if workdir is not None:
            sent = await self._send_workdir(workdir, progress)
            spec = msgspec.structs.replace(spec, workdir=sent)
        request = SubmitJob(spec=spec, request_id=secrets.token_hex(16))
        return (await self._link.call(request, timeout_s=CALL_S)).job

    async def get_job(self, job_id: str) -> Job:
        return (await self._link.call(GetJob(job_id=job_id), timeout_s=CALL_S)).job

    async def list_jobs(
        self,
        *,
        states: tuple[JobState, ...] = (),
        limit: int = 100,
        before_sequence: int | None = None,
    ) -> tuple[list[Job], bool]:
        """Newest first, and whether older ones were left out. No `states` means all of them."""
        request = ListJobs(states=states, limit=min(limit, LIST_MAX), before_sequence=before_sequence)
        reply = await self._link.call(request, timeout_s=CALL_S)
        return list(reply.jobs), reply.more

    async def cancel(self, job_id: str) -> Job:
        """The job as it stands after the wish was written down; it may still be on its way out."""
        return (await self._link.call(CancelJob(job_id=job_id), timeout_s=CALL_S)).job

    async def queue(self, *, limit: int = 100) -> QueueReply:
        """Jobs that wait, in the order in which they are considered."""
        return await self._link.call(GetQueue(limit=min(limit, LIST_MAX)), timeout_s=CALL_S)

    async def explain(self, job_id: str) -> ExplainReply:
        """What a job waits for, or how it came to where it is."""
        return await self._link.call(ExplainJob(job_id=job_id), timeout_s=CALL_S)

    async def wait_job(
        self,
        job_id: str,
        *,
        timeout_s: float | None = None,
        on_change: Callable[[Job], None] | None = None,
    ) -> Job:
        """The job once it has ended. `on_change` sees each state on the way, the present one first."""
        try:
            async with asyncio.timeout(timeout_s):
                return await self._wait_final(job_id, on_change)
        except TimeoutError:
            raise DeadlineError(f"job {job_id} has not ended within {timeout_s:g} s") from None

    async def _wait_final(self, job_id: str, on_change: Callable[[Job], None] | None) -> Job:
        job = await self.get_job(job_id)
        while True:
            if on_change is not None:
                on_change(job)
            if job.state in FINAL_STATES:
                return job
            seen = job.state
            while job.state is seen:
                request = GetJob(job_id=job.job_id, while_state=seen, wait_s=_POLL_S)
                job = (await self._link.call(request, timeout_s=_POLL_S + CALL_S)).job

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
        """One piece of a job's output; waits up to `wait_s` while there is nothing new. `run` is for one that
        was queued again; 0 is the last."""
        wait_s = min(wait_s, WAIT_S_MAX)
        bytes_max = min(bytes_max, CHUNK_BYTES_MAX)
        request = ReadLog(job_id=job_id, offset=offset, bytes_max=bytes_max, wait_s=wait_s, run=run)
        return await self._link.call(request, timeout_s=wait_s + CALL_S)

    async def follow_log(
        self, job_id: str, *, offset: int = 0, follow: bool = True, run: int = 0
    ) -> AsyncIterator[bytes]:
        """The output from `offset` on: up to now, or with `follow` until the job has ended, over every run
        that follows. With `run`, only of that run.

        Goes on where it was after a lost connection, and waits a while for a node that is away: its
        agent may be on its way back. In place of what rotation has eaten it says how much that was.
        """
        loop = asyncio.get_running_loop()
        heard_s, asked = loop.time(), run
        while True:
            try:
                chunk = await self.read_log(
                    job_id, offset=offset, wait_s=_POLL_S if follow else 0.0, run=asked
                )
            except (DeadlineError, UnreachableError) as error:
                if not follow or loop.time() - heard_s > LOG_PATIENCE_S:
                    raise
                if isinstance(error, DeadlineError):
                    # The connection may be dead without having said so; the offset makes asking again safe.
                    self._link.drop()
                await asyncio.sleep(_AWAY_STEP_S)
                continue
            heard_s, asked = loop.time(), chunk.run or asked
            if chunk.start > offset:
                yield f"[genie: {chunk.start - offset} bytes of output were dropped]\n".encode()
            if chunk.data:
                yield chunk.data
            offset = chunk.next_offset
            if not follow and not chunk.data:
                return
            if chunk.eof and (run or not chunk.run):
                return
            if chunk.eof:  # it may run again, having been preempted
                asked, offset = chunk.run + 1, 0

    # --- the cluster --------------------------------------------------------------------------

    async def nodes(self) -> tuple[NodeView, ...]:
        return (await self._link.call(ListNodes(), timeout_s=CALL_S)).nodes

    async def status(self) -> StatusReply:
        return await self._link.call(GetStatus(), timeout_s=CALL_S)

    async def list_tokens(self) -> tuple[TokenRecord, ...]:
        return (await self._link.call(ListTokens(), timeout_s=CALL_S)).tokens

    async def create_token(
        self, kind: TokenKind, *, tenant: str = "", name: str = "", ttl_s: float | None = None
    ) -> TokenCreated:
        """The token's text is in the answer and nowhere else. Sent once: a lost answer is an error."""
        request = CreateToken(kind=kind, tenant=tenant, name=name, ttl_s=ttl_s)
        return await self._link.call(request, timeout_s=CALL_S, again=False)

    async def forget_node(self, node_id: str) -> None:
        """Takes a node that is gone out of the cluster for good."""
        await self._link.call(RemoveNode(node_id=node_id), timeout_s=CALL_S)

    async def drain_node(self, node_id: str, *, reason: str = "") -> None:
        """Nothing new is placed there from now on; what runs there goes on."""
        await self._link.call(DrainNode(node_id=node_id, reason=reason), timeout_s=CALL_S)

    async def undrain_node(self, node_id: str) -> None:
        await self._link.call(UndrainNode(node_id=node_id), timeout_s=CALL_S)

    async def revoke_token(self, token_id: str) -> None:
        await self._link.call(RevokeToken(token_id=token_id), timeout_s=CALL_S)

    async def quotas(self) -> QuotasReply:
        """What tenants may hold and hold now; for a user, its own tenant's."""
        return await self._link.call(ListQuotas(), timeout_s=CALL_S)

    async def set_quota(self, quota: QuotaRecord) -> None:
        """Takes the place of the one that the tenant had."""
        await self._link.call(SetQuota(quota=quota), timeout_s=CALL_S)

    async def remove_quota(self, tenant: str) -> None:
        """The tenant may hold anything from now on. Sent once: the second time there would be none."""
        await self._link.call(RemoveQuota(tenant=tenant), timeout_s=CALL_S, again=False)

    # --- directories --------------------------------------------------------------------------

    async def _send_workdir(self, directory: Path, progress: Progress) -> Workdir:
        from genie.runtime.workdir import pack  # late: most clients send none

        packed = await asyncio.to_thread(
            pack,
            directory,
            bytes_max=self._limits.bytes_max,
            files_max=self._limits.files_max,
            progress=lambda done, total: progress("packing", done, total),
        )
        try:
            await self._send_blob(packed, progress)
        finally:
            packed.file.close()
        return Workdir(digest=packed.digest, size_bytes=packed.size_bytes)

    async def _send_blob(self, packed: PackedWorkdir, progress: Progress) -> None:
        """Sends what the controller does not have yet. After a loss it goes on from where that one is."""
        status = await self._stat_blob(packed.digest)
        for _ in range(_BLOB_TRIES):
            while not status.complete:
                progress("sending", status.received_bytes, packed.size_bytes)
                before = status.received_bytes
                status = await self._put_chunk(packed, before)
                if not status.complete and status.received_bytes <= before:
                    break
            if status.complete:
                progress("sending", packed.size_bytes, packed.size_bytes)
                return
            status = await self._stat_blob(packed.digest)
        raise WorkdirError(
            f"{self.where} does not take the directory: it stays at {status.received_bytes} of "
            f"{packed.size_bytes} bytes",
            hint="look into the controller's log; its disk may be full",
        )

    async def _stat_blob(self, digest: str) -> BlobStatus:
        return await self._link.call(StatBlob(digest=digest), timeout_s=CALL_S)

    async def _put_chunk(self, packed: PackedWorkdir, offset: int) -> BlobStatus:
        data = await asyncio.to_thread(_read_at, packed, offset)
        last = offset + len(data) >= packed.size_bytes
        request = PutBlob(digest=packed.digest, offset=offset, data=data, last=last)
        return await self._link.call(request, timeout_s=CALL_S + _SLACK_S)


def _read_at(packed: PackedWorkdir, offset: int) -> bytes:
    packed.file.seek(offset)
    return packed.file.read(CHUNK_BYTES_MAX)


def _no_progress(_what: str, _done: int, _total: int) -> None:
    """For callers that want none."""
