"""Takes a backup of the store while controllers run: all rows at one revision, written to one file.

`write_backup` reads from a `BackupSource`: `open_store_backup_source` for a store that this process has
open, and cluster/store_backup.py for the store of a running controller (requests/backups.py). The file format
is in backup_file.py; restoring is in restore.py.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from genie.controller.backups.backup_file import BackupHeader, BackupWriter, encode_rows
from genie.controller.ledger import read_cluster_record
from genie.controller.rows import ClusterRecord
from genie.controller.store import Snapshot, SnapshotStore, Store
from genie.errors import BackupError, CompactedError
from genie.processes.clock import Clock
from genie.processes.tasks import Offload
from genie.version import __version__

_BACKUP_ATTEMPTS_MAX = 3
_STORE_READ_TIMEOUT_S = 30.0

BackupProgress = Callable[[int, int], None]
"""Receives the rows and the bytes so far."""


@dataclass(frozen=True, slots=True)
class EncodedRows:
    """Encoded rows, and the number of rows in all chunks so far. `data` is empty at the end."""

    data: bytes
    row_count: int


class BackupSource(Protocol):
    """The rows of a store at `revision`."""

    cluster_id: str
    generation: int
    revision: int

    async def read_chunk(self) -> EncodedRows: ...


class StoreBackupSource:
    """Reads a snapshot of an open store."""

    def __init__(self, snapshot: Snapshot, cluster: ClusterRecord) -> None:
        self.cluster_id = cluster.cluster_id
        self.generation = cluster.generation
        self.revision = snapshot.revision
        self._snapshot = snapshot
        self._row_count = 0

    async def read_chunk(self) -> EncodedRows:
        page = await self._snapshot.read_page()
        self._row_count += len(page)
        return EncodedRows(encode_rows(page), self._row_count)


@asynccontextmanager
async def open_store_backup_source(store: Store) -> AsyncIterator[StoreBackupSource]:
    """Raises BackupError if the store has no cluster."""
    assert isinstance(store, SnapshotStore), "every engine has snapshots"
    cluster = await read_cluster_record(store, timeout_s=_STORE_READ_TIMEOUT_S)
    if cluster is None:
        raise BackupError(
            "there is nothing to back up: the store contains no cluster",
            hint="check the store URL and GENIE_STATE_DIR",
        )
    async with store.snapshot(timeout_s=_STORE_READ_TIMEOUT_S) as snapshot:
        yield StoreBackupSource(snapshot, cluster)


async def write_backup(
    open_source: Callable[[], AbstractAsyncContextManager[BackupSource]],
    path: Path,
    *,
    clock: Clock,
    offload: Offload,
    progress: BackupProgress,
) -> BackupHeader:
    """Write all rows of one revision to a new file and return its header. If the store compacts that revision
    meanwhile, start over with a new one."""
    for _ in range(_BACKUP_ATTEMPTS_MAX):
        writer = await offload(partial(BackupWriter, path))
        try:
            async with open_source() as source:
                return await _write_backup_rows(
                    source, writer, clock=clock, offload=offload, progress=progress
                )
        except CompactedError:
            continue
        finally:
            await offload(writer.abort)
    raise BackupError(
        "could not read the store at one revision: its history is compacted too often",
        hint="try again when the cluster is less busy or the store has more free space",
    )


async def _write_backup_rows(
    source: BackupSource, writer: BackupWriter, *, clock: Clock, offload: Offload, progress: BackupProgress
) -> BackupHeader:
    header = BackupHeader(
        cluster_id=source.cluster_id,
        generation=source.generation,
        revision=source.revision,
        created_at=clock.wall_s(),
        genie_version=__version__,
    )
    size_bytes = 0
    while (chunk := await source.read_chunk()).data:
        await offload(partial(writer.write, chunk.data))
        size_bytes += len(chunk.data)
        progress(chunk.row_count, size_bytes)
    return await offload(partial(writer.finish, header, row_count=chunk.row_count))
