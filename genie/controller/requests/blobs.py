"""Requests about blobs: clients upload working directories, agents download them, controllers copy them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from genie.controller.blobs.replication import BLOB_FETCH_WAIT_S_MAX, BlobFetchOutcome, BlobReplication
from genie.controller.blobs.storage import BlobStorage, blob_name
from genie.controller.connection import Connection, Handlers
from genie.controller.election import Election
from genie.errors import PermissionError_, StoreUnavailableError, WorkdirError
from genie.model.messages import (
    BlobChunk,
    BlobStatus,
    GetBlob,
    GetReplica,
    PutBlob,
    PutReplica,
    StatBlob,
    StatReplica,
)
from genie.model.names import validate_name
from genie.processes.tasks import Offload


class BlobRequests:
    """`is_needed(name)` returns whether an unfinished job needs a blob; `find_tenant(node_id, digest)` the
    tenant whose job on that node needs the blob, or None."""

    def __init__(
        self,
        blobs: BlobStorage,
        replication: BlobReplication,
        election: Election,
        *,
        offload: Offload,
        is_needed: Callable[[str], bool],
        find_tenant: Callable[[str, str], str | None],
    ) -> None:
        self._blobs = blobs
        self._replication = replication
        self._election = election
        self._offload = offload
        self._is_blob_needed = is_needed
        self._find_blob_tenant = find_tenant

    def handlers(self) -> Handlers:
        return {
            StatBlob: self.stat_blob,
            PutBlob: self.put_blob,
            GetBlob: self.get_blob,
            StatReplica: self.stat_replica,
            PutReplica: self.put_replica,
            GetReplica: self.get_replica,
        }

    async def stat_blob(self, connection: Connection, request: StatBlob) -> BlobStatus:
        stat = partial(self._blobs.get_status, request.digest, tenant=connection.identity.tenant)
        return await self._offload(stat)

    async def put_blob(self, connection: Connection, request: PutBlob) -> BlobStatus:
        self._election.require_fencing_token()
        put = partial(
            self._blobs.append_chunk,
            request.digest,
            tenant=connection.identity.tenant,
            offset=request.offset,
            data=request.data,
            is_last=request.is_last,
            is_needed=self._is_blob_needed,
        )
        status = await self._offload(put)
        if status.complete:
            self._replication.request_copy_or_fetch(blob_name(request.digest, connection.identity.tenant))
        return status

    async def get_blob(self, connection: Connection, request: GetBlob) -> BlobChunk:
        """For agents: only blobs of jobs that are placed on their node."""
        node_id = connection.identity.name
        tenant = self._find_blob_tenant(node_id, request.digest)
        if tenant is None:
            raise PermissionError_(f"permission denied: no job on node {node_id} needs {request.digest[:12]}")
        read = partial(self._blobs.read_chunk, request.digest, request.offset, tenant=tenant)
        try:
            return await self._offload(read)
        except WorkdirError:
            await self._fetch_missing(request.digest, tenant)
            return await self._offload(read)

    async def _fetch_missing(self, digest: str, tenant: str) -> None:
        """Fetch a blob that was uploaded to an earlier leader. Raises StoreUnavailableError, which the agent
        retries, while another controller may still have it."""
        outcome = await self._replication.fetch_from_other_controllers(
            blob_name(digest, tenant), timeout_s=BLOB_FETCH_WAIT_S_MAX
        )
        if outcome is BlobFetchOutcome.SEARCHING:
            raise StoreUnavailableError(
                f"the working directory {digest[:12]} is not on this controller yet",
                hint="it is copied from another controller; try again in a moment",
            )

    # -- from other controllers -------------------------------------------------------------

    async def stat_replica(self, connection: Connection, request: StatReplica) -> BlobStatus:
        tenant = validate_name(request.tenant, what="tenant")
        return await self._offload(partial(self._blobs.get_status, request.digest, tenant=tenant))

    async def put_replica(self, connection: Connection, request: PutReplica) -> BlobStatus:
        put = partial(
            self._blobs.append_chunk,
            request.digest,
            tenant=validate_name(request.tenant, what="tenant"),
            offset=request.offset,
            data=request.data,
            is_last=request.is_last,
            is_needed=self._is_blob_needed,
        )
        return await self._offload(put)

    async def get_replica(self, connection: Connection, request: GetReplica) -> BlobChunk:
        tenant = validate_name(request.tenant, what="tenant")
        read = partial(self._blobs.read_chunk, request.digest, request.offset, tenant=tenant)
        return await self._offload(read)
