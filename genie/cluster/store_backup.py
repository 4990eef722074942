"""The source of a backup of the store of a running controller, read through the controller's API."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from genie.cluster.client import ClusterClient
from genie.controller.backups.backup import EncodedRows
from genie.errors import GenieError
from genie.model.messages import BackupOpened


class ControllerBackupSource:
    """A `BackupSource`. Created by `open_controller_backup_source`."""

    def __init__(self, client: ClusterClient, opened: BackupOpened) -> None:
        self.cluster_id = opened.cluster_id
        self.generation = opened.generation
        self.revision = opened.revision
        self._client = client
        self._backup_id = opened.backup_id
        self._next_offset = 0

    async def read_chunk(self) -> EncodedRows:
        chunk = await self._client.read_backup(self._backup_id, offset=self._next_offset)
        self._next_offset += len(chunk.data)
        return EncodedRows(chunk.data, chunk.row_count)


@asynccontextmanager
async def open_controller_backup_source(client: ClusterClient) -> AsyncIterator[ControllerBackupSource]:
    """Raises OverloadedError if another backup is running."""
    opened = await client.open_backup()
    try:
        yield ControllerBackupSource(client, opened)
    finally:
        with suppress(GenieError):  # the controller closes it when it has been idle
            await client.close_backup(opened.backup_id)
