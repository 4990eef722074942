"""Requests of the owner to back up the store of this controller, one backup at a time.

The embedded store can only be read by the process that has it open. Nothing is written here: the client
writes the file (controller/backups/backup.py).
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

from genie.controller.backups.backup import StoreBackupSource, open_store_backup_source
from genie.controller.connection import Connection, Handlers
from genie.controller.ledger import Ledger
from genie.controller.store import Store
from genie.errors import BackupError, OverloadedError
from genie.model.messages import (
    CHUNK_BYTES_MAX,
    BackupChunk,
    BackupOpened,
    CloseBackup,
    Done,
    OpenBackup,
    ReadBackup,
)
from genie.processes.clock import Clock

_log = logging.getLogger(__name__)

_BUSY_RETRY_AFTER_S = 5.0
IDLE_TIMEOUT_S = 60.0
"""An open snapshot of the embedded store costs space and time for each write, so it must not stay open."""


@dataclass(slots=True)
class _OpenBackup:
    backup_id: str
    source: StoreBackupSource
    stack: AsyncExitStack
    last_used_s: float
    buffer: bytearray = field(default_factory=bytearray)
    row_count: int = 0
    next_offset: int = 0
    last_chunk: BackupChunk | None = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class BackupRequests:
    def __init__(self, store: Store, ledger: Ledger, *, clock: Clock) -> None:
        self._store = store
        self._ledger = ledger
        self._clock = clock
        self._open: _OpenBackup | None = None
        self._open_lock = asyncio.Lock()

    def handlers(self) -> Handlers:
        return {OpenBackup: self.open_backup, ReadBackup: self.read_backup, CloseBackup: self.close_backup}

    async def open_backup(self, connection: Connection, request: OpenBackup) -> BackupOpened:
        self._ledger.check_leading_and_up_to_date()
        async with self._open_lock:
            return await self._open_backup()

    async def _open_backup(self) -> BackupOpened:
        await self.close_if_idle()
        if self._open is not None:
            raise OverloadedError("another backup of the store is running", retry_after_s=_BUSY_RETRY_AFTER_S)
        async with AsyncExitStack() as stack:
            source = await stack.enter_async_context(open_store_backup_source(self._store))
            opened = _OpenBackup(secrets.token_hex(8), source, stack.pop_all(), self._clock.monotonic_s())
        self._open = opened
        return BackupOpened(
            backup_id=opened.backup_id,
            cluster_id=source.cluster_id,
            generation=source.generation,
            revision=source.revision,
        )

    async def read_backup(self, connection: Connection, request: ReadBackup) -> BackupChunk:
        found = self._require_open(request.backup_id)
        async with found.lock:
            found.last_used_s = self._clock.monotonic_s()
            last = found.last_chunk
            if last is not None and request.offset == found.next_offset - len(last.data) != found.next_offset:
                return last
            if request.offset != found.next_offset:
                raise BackupError(
                    f"backup {request.backup_id[:32]} continues at byte {found.next_offset}, not at "
                    f"{request.offset}",
                    hint="begin a new backup",
                )
            chunk = await self._read_next_chunk(found)
            found.last_chunk, found.next_offset = chunk, found.next_offset + len(chunk.data)
            found.last_used_s = self._clock.monotonic_s()
            return chunk

    async def close_backup(self, connection: Connection, request: CloseBackup) -> Done:
        if self._open is not None and self._open.backup_id == request.backup_id:
            await self.close()
        return Done()

    async def close_if_idle(self) -> None:
        """Close a backup whose client is gone."""
        if self._open is None or self._clock.monotonic_s() < self._open.last_used_s + IDLE_TIMEOUT_S:
            return
        _log.warning("closed a backup of the store that was not read for %g s", IDLE_TIMEOUT_S)
        await self.close()

    async def close(self) -> None:
        """Close the open backup, if any. Raises StoreError."""
        found, self._open = self._open, None
        if found is not None:
            await found.stack.aclose()

    def _require_open(self, backup_id: str) -> _OpenBackup:
        if self._open is None or self._open.backup_id != backup_id:
            raise BackupError(
                f"backup {backup_id[:32]} is not open: it was closed, or another controller leads by now",
                hint="begin a new backup",
            )
        return self._open

    async def _read_next_chunk(self, found: _OpenBackup) -> BackupChunk:
        while len(found.buffer) < CHUNK_BYTES_MAX and (rows := await found.source.read_chunk()).data:
            found.buffer += rows.data
            found.row_count = rows.row_count
        data = bytes(found.buffer[:CHUNK_BYTES_MAX])
        del found.buffer[:CHUNK_BYTES_MAX]
        return BackupChunk(data=data, row_count=found.row_count)
