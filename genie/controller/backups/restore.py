"""Restores a backup into an empty store, and raises the generation of the cluster.

Nodes remember the highest fencing token that they have seen. Its high part is the generation, so that they
accept the restored controller, whose store starts with low revisions, and reject the one it replaces. Epochs
start at a number of their own in each generation: a placement after the restore is never mistaken for one
that the backup does not contain.

The record of the cluster is written last. A restore that failed leaves a mark, with which no controller leads
and which allows another restore into the same store.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice

import msgspec

from genie.controller.backups.backup import BackupProgress
from genie.controller.backups.backup_file import BackupHeader, BackupReader, BackupRow
from genie.controller.election import CONTROLLER_KEY_PREFIX, LEADER_KEY, LeaderRecord
from genie.controller.ledger import (
    CLUSTER_KEY,
    COUNTER_KEY_PREFIX,
    EPOCH_COUNTER,
    RESTORE_MARK_KEY,
    read_cluster_record,
)
from genie.controller.nodes.releases import SERVER_RELEASE_KEY_PREFIX
from genie.controller.rows import ClusterRecord, Counter
from genie.controller.store import Compare, Delete, Put, Store
from genie.errors import BackupError, StoreNotEmptyError, StoreUnavailableError, VersionError
from genie.model.fencing import GENERATION_MAX
from genie.model.release import OWN_RELEASE, parse_release
from genie.model.tenant import TokenKind
from genie.processes.tasks import Offload
from genie.version import __version__

_EPOCH_COUNTER_KEY = COUNTER_KEY_PREFIX + EPOCH_COUNTER
_KEYS_WRITTEN_LAST = (CLUSTER_KEY, _EPOCH_COUNTER_KEY)
_EPOCHS_PER_GENERATION = 1 << 24
_GENERATION_ZERO_TIME_S = 1_767_225_600
"""2026-01-01, from which the minutes are counted that make generations unique."""
_TOKEN_KEY_PREFIX = "token/"
_JOIN_TOKEN_KINDS = (TokenKind.JOIN, TokenKind.SERVER_JOIN)
_RESTORE_BATCH_ROWS_MAX = 100
_RESTORE_BATCH_BYTES_MAX = 256 * 1024
_VERIFY_PAGE_ROWS = 500
_STORE_CALL_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class RestoreResult:
    header: BackupHeader
    cluster: ClusterRecord
    row_count: int
    dropped_token_count: int
    """Unused tokens that would have admitted a machine; they are not restored."""


def next_generation(before: int, *, now_s: float) -> int:
    """Return a generation above `before`. Minutes are counted as well: the same backup may be restored twice,
    and the second restore must not repeat the generation of the first."""
    minutes = int((now_s - _GENERATION_ZERO_TIME_S) // 60)
    return min(max(before + 1, minutes), GENERATION_MAX)


async def restore_backup(
    reader: BackupReader,
    store: Store,
    *,
    store_name: str,
    generation: int,
    offload: Offload,
    progress: BackupProgress,
    verify_progress: BackupProgress = lambda _rows, _bytes: None,
) -> RestoreResult:
    """Verify the backup, write its rows and read them back. Raises BackupError, StoreNotEmptyError and other
    StoreErrors.

    `generation` must be higher than that of the backup.
    """
    await offload(reader.verify)
    _check_release_of_backup(reader.header)
    if not reader.header.generation < generation <= GENERATION_MAX:
        raise BackupError(
            f"generation {generation} is not above that of the backup, {reader.header.generation}",
            hint=f"use one up to {GENERATION_MAX}",
        )
    await _prepare_empty_store(store, store_name=store_name)
    rows = _RowsToRestore(reader.rows())
    while batch := await offload(partial(rows.next_batch)):
        await store.commit([], [Put(key, value) for key, value in batch], timeout_s=_STORE_CALL_TIMEOUT_S)
        progress(rows.row_count, rows.size_bytes)
    cluster = _raise_generation(rows.written_last, generation)
    await _verify_stored_rows(store, rows, store_name=store_name, progress=verify_progress)
    await _write_cluster_record_last(store, cluster, rows.written_last, store_name=store_name)
    return RestoreResult(
        reader.header, cluster, rows.row_count + len(_KEYS_WRITTEN_LAST), rows.dropped_token_count
    )


async def find_completed_restore(
    reader: BackupReader, store: Store, *, offload: Offload
) -> RestoreResult | None:
    """The restore of this backup into the store, if nothing has changed the store since; else None. Raises
    BackupError and StoreErrors."""
    cluster = await read_cluster_record(store, timeout_s=_STORE_CALL_TIMEOUT_S)
    if cluster is None or cluster.generation <= reader.header.generation:
        return None
    await offload(reader.verify)
    rows = _RowsToRestore(reader.rows())
    while await offload(partial(rows.next_batch)):
        pass
    _raise_generation(rows.written_last, cluster.generation)
    for key, value in rows.written_last.items():
        stored = await store.get(key, timeout_s=_STORE_CALL_TIMEOUT_S)
        if stored is None or stored.value != value:
            return None
    if await _digest_stored_rows(store, progress=lambda _rows, _bytes: None) != rows.digest():
        return None
    return RestoreResult(
        reader.header, cluster, rows.row_count + len(_KEYS_WRITTEN_LAST), rows.dropped_token_count
    )


def read_cluster_of_backup(reader: BackupReader) -> ClusterRecord:
    """Read the record of the cluster from a backup. Blocks. Raises BackupError if there is none."""
    for key, value in reader.rows():
        if key == CLUSTER_KEY:
            try:
                return msgspec.json.decode(value, type=ClusterRecord)
            except msgspec.DecodeError as error:
                raise _no_cluster_in_backup_error(str(error)) from error
    raise _no_cluster_in_backup_error("it is missing")


async def adopt_store(
    store: Store, *, store_name: str, now_s: float, used_generation: int = 0
) -> ClusterRecord | None:
    """Raise the generation of a store that was moved here above its own and `used_generation`, so that nodes
    reject a controller that still runs with a copy of it. Return the record of the cluster; None if the store
    has none."""
    await check_store_unused(store, store_name=store_name)
    if await read_cluster_record(store, timeout_s=_STORE_CALL_TIMEOUT_S) is None:
        return None
    found = {key: await store.get(key, timeout_s=_STORE_CALL_TIMEOUT_S) for key in _KEYS_WRITTEN_LAST}
    rows = {key: item.value for key, item in found.items() if item is not None}
    before = msgspec.json.decode(rows[CLUSTER_KEY], type=ClusterRecord)
    generation = next_generation(max(before.generation, used_generation), now_s=now_s)
    cluster = _raise_generation(rows, generation)
    await store.commit(
        [Compare(LEADER_KEY, 0)],
        [Put(key, value) for key, value in rows.items()],
        timeout_s=_STORE_CALL_TIMEOUT_S,
    )
    return cluster


async def check_store_unused(store: Store, *, store_name: str) -> None:
    """Raise StoreNotEmptyError if a controller leads with this store."""
    leader = await store.get(LEADER_KEY, timeout_s=_STORE_CALL_TIMEOUT_S)
    if leader is not None:
        record = msgspec.json.decode(leader.value, type=LeaderRecord)
        raise StoreNotEmptyError(
            f"the controller at {record.address} is using the store {store_name}",
            hint="stop it with 'genie down --keep-jobs' on its machine; the lease of a killed one expires "
            "within seconds",
        )


async def check_store_empty(store: Store, *, store_name: str) -> None:
    """Raise StoreNotEmptyError unless the store is empty or has the mark of a restore that has failed."""
    await check_store_unused(store, store_name=store_name)
    mark = await store.get(RESTORE_MARK_KEY, timeout_s=_STORE_CALL_TIMEOUT_S)
    if mark is not None and await store.get(CLUSTER_KEY, timeout_s=_STORE_CALL_TIMEOUT_S) is None:
        return
    found = await store.range("", limit=1, timeout_s=_STORE_CALL_TIMEOUT_S)
    if found.items:
        raise StoreNotEmptyError(
            f"the store {store_name} is not empty: it has the key {found.items[0].key!r}",
            hint="use an empty store: move the file away (sqlite), or add ?namespace=/NAME/ (etcd)",
        )


def _check_release_of_backup(header: BackupHeader) -> None:
    """Raise BackupError for a backup of a later release than the next minor one: its rows may mean something
    else. Those of the next one that this release cannot read stay in the store unchanged."""
    try:
        release = parse_release(header.genie_version)
    except VersionError:
        return  # of a development version
    if release > OWN_RELEASE and not release.works_with(OWN_RELEASE):
        raise BackupError(
            f"the backup was made with Genie {header.genie_version}, this is {__version__}",
            hint=f"install Genie {release} or a release one minor version apart",
        )


class _RowsToRestore:
    """The rows of a backup as they are restored, with a digest to compare them with the store."""

    def __init__(self, rows: Iterator[BackupRow]) -> None:
        self.written_last: dict[str, bytes] = {}
        self.row_count = 0
        self.size_bytes = 0
        self.dropped_token_count = 0
        self._digest = hashlib.sha256()
        self._rows = (row for row in rows if self._record_if_written_last_and_check_is_restored(row))

    def next_batch(self) -> list[BackupRow]:
        """The next rows that fit into a transaction; empty at the end. Blocks."""
        batch: list[BackupRow] = []
        batch_bytes = 0
        for row in islice(self._rows, _RESTORE_BATCH_ROWS_MAX):
            batch.append(row)
            batch_bytes += len(row[1])
            update_digest_with_row(self._digest, row)
            if batch_bytes >= _RESTORE_BATCH_BYTES_MAX:
                break
        self.row_count += len(batch)
        self.size_bytes += batch_bytes
        return batch

    def digest(self) -> bytes:
        return self._digest.digest()

    def _record_if_written_last_and_check_is_restored(self, row: BackupRow) -> bool:
        key, value = row
        if key in _KEYS_WRITTEN_LAST:
            self.written_last[key] = value
            return False
        if _is_unused_join_token(key, value):
            self.dropped_token_count += 1
            return False
        # Controllers register again when they start; agents must not look for the previous ones.
        is_of_servers = key.startswith((CONTROLLER_KEY_PREFIX, SERVER_RELEASE_KEY_PREFIX))
        return not is_of_servers and key not in (LEADER_KEY, RESTORE_MARK_KEY)


def _is_unused_join_token(key: str, value: bytes) -> bool:
    """Whether this is the row of a token that admits a machine once. It may have been used after the backup,
    or revoked, so it is not restored. Readable, too, if a newer release wrote it."""
    if not key.startswith(_TOKEN_KEY_PREFIX):
        return False
    try:
        record = msgspec.json.decode(value)
    except msgspec.DecodeError:
        return False
    return (
        isinstance(record, dict) and record.get("kind") in _JOIN_TOKEN_KINDS and record.get("used_at") is None
    )


def update_digest_with_row(digest: hashlib._Hash, row: BackupRow) -> None:
    key, value = row[0].encode(), row[1]
    digest.update(b"%d %d " % (len(key), len(value)) + key)
    digest.update(value)


async def _prepare_empty_store(store: Store, *, store_name: str) -> None:
    """Mark the store; remove the rows of a restore that has failed."""
    await check_store_empty(store, store_name=store_name)
    if await store.get(RESTORE_MARK_KEY, timeout_s=_STORE_CALL_TIMEOUT_S) is not None:
        await _delete_rows_of_failed_restore(store)
        return
    await store.commit(
        [Compare(RESTORE_MARK_KEY, 0)], [Put(RESTORE_MARK_KEY, b"")], timeout_s=_STORE_CALL_TIMEOUT_S
    )


async def _delete_rows_of_failed_restore(store: Store) -> None:
    """Delete all rows except the mark."""
    after = ""
    while True:
        page = await store.range(
            "", start_after=after, limit=_RESTORE_BATCH_ROWS_MAX, timeout_s=_STORE_CALL_TIMEOUT_S
        )
        keys = [item.key for item in page.items if item.key != RESTORE_MARK_KEY]
        await store.commit([], [Delete(key) for key in keys], timeout_s=_STORE_CALL_TIMEOUT_S)
        if not page.more:
            return
        after = page.items[-1].key


def _raise_generation(written_last: dict[str, bytes], generation: int) -> ClusterRecord:
    """Replace the rows of the cluster and of the epochs by those of the new generation."""
    try:
        cluster = msgspec.json.decode(written_last[CLUSTER_KEY], type=ClusterRecord)
        epochs = msgspec.json.decode(written_last.get(_EPOCH_COUNTER_KEY, b'{"value":0}'), type=Counter)
    except (KeyError, msgspec.DecodeError) as error:
        raise _no_cluster_in_backup_error(str(error)) from error
    cluster = msgspec.structs.replace(cluster, generation=generation)
    epochs = Counter(value=max(epochs.value + 1, generation * _EPOCHS_PER_GENERATION))
    written_last[CLUSTER_KEY], written_last[_EPOCH_COUNTER_KEY] = map(msgspec.json.encode, (cluster, epochs))
    return cluster


def _no_cluster_in_backup_error(reason: str) -> BackupError:
    return BackupError(
        f"the backup has no readable record of its cluster: {reason}", hint="use another backup"
    )


async def _verify_stored_rows(
    store: Store, rows: _RowsToRestore, *, store_name: str, progress: BackupProgress
) -> None:
    """Read all rows back and compare them with those of the backup."""
    if await _digest_stored_rows(store, progress=progress) != rows.digest():
        raise BackupError(
            f"the rows of the store {store_name} differ from those of the backup",
            hint="is a controller or another restore using it? stop it and restore again",
        )


async def _digest_stored_rows(store: Store, *, progress: BackupProgress) -> bytes:
    """The digest of all rows except those that are written last."""
    digest, after, more = hashlib.sha256(), "", True
    row_count = size_bytes = 0
    while more:
        page = await store.range(
            "", start_after=after, limit=_VERIFY_PAGE_ROWS, timeout_s=_STORE_CALL_TIMEOUT_S
        )
        for item in page.items:
            if item.key not in (RESTORE_MARK_KEY, *_KEYS_WRITTEN_LAST):
                update_digest_with_row(digest, (item.key, item.value))
                row_count, size_bytes = row_count + 1, size_bytes + len(item.value)
            after = item.key
        more = page.more
        progress(row_count, size_bytes)
    return digest.digest()


async def _write_cluster_record_last(
    store: Store, cluster: ClusterRecord, rows: dict[str, bytes], *, store_name: str
) -> None:
    done = await store.commit(
        [Compare(LEADER_KEY, 0), Compare(CLUSTER_KEY, 0)],
        [*(Put(key, value) for key, value in rows.items()), Delete(RESTORE_MARK_KEY)],
        timeout_s=_STORE_CALL_TIMEOUT_S,
    )
    if not done.succeeded:
        raise StoreUnavailableError(
            f"could not complete the restore of cluster {cluster.cluster_id}: a controller uses the store "
            f"{store_name}",
            hint="stop it and restore again",
        )
