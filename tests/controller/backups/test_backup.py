"""Backups of a store: through a running controller and directly, while it is written to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec
import pytest

from genie import config
from genie.cluster.client import ClusterClient, open_client
from genie.cluster.store_backup import open_controller_backup_source
from genie.controller.backups.backup import (
    EncodedRows,
    StoreBackupSource,
    open_store_backup_source,
    write_backup,
)
from genie.controller.backups.backup_file import BackupHeader, BackupReader
from genie.controller.election import LEADER_KEY
from genie.controller.requests.backups import IDLE_TIMEOUT_S
from genie.controller.rows import ClusterRecord
from genie.controller.store import Put
from genie.controller.store.sqlite import SqliteStore
from genie.errors import BackupError, CompactedError, OverloadedError, PermissionError_
from genie.model.messages import CloseBackup, OpenBackup, ReadBackup
from genie.model.tenant import TokenKind
from genie.processes.clock import SystemClock
from genie.processes.tasks import run_inline
from genie.runtime.credentials import LocalCluster
from genie.sim.store import MemoryStore
from genie.supervisor.local_cluster import make_owner_access
from tests.controller.running_controller import RunningController, running_controller
from tests.fakes.clock import FakeClock

_write_backup = partial(write_backup, clock=SystemClock(), offload=run_inline, progress=lambda _r, _b: None)


@asynccontextmanager
async def _cluster_client(one: RunningController) -> AsyncIterator[ClusterClient]:
    settings = config.load({"paths.state_dir": one.state_dir})
    local = LocalCluster.read(one.state_dir)
    assert local is not None
    async with open_client(replace(settings, cluster=make_owner_access(one.state_dir, local))) as client:
        yield client


def _list_names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


def _read_rows(path: Path) -> dict[str, bytes]:
    reader = BackupReader(path)
    reader.verify()
    return dict(reader.rows())


async def test_backup_of_a_running_controller_contains_its_jobs(tmp_path: Path) -> None:
    async with running_controller(tmp_path) as one:
        async with one.client() as owner:
            job = await owner.submit("sleep", "1")
            status = await owner.status()
        async with _cluster_client(one) as client:
            header = await _write_backup(lambda: open_controller_backup_source(client), tmp_path / "backup")
    rows = _read_rows(tmp_path / "backup")
    assert f"job/{job.job_id}" in rows
    assert header.cluster_id == status.cluster_id
    assert header.row_count == len(rows)
    assert LEADER_KEY not in rows


async def test_backup_is_consistent_while_rows_change_together(tmp_path: Path) -> None:
    """Two rows that always change in one transaction have the same value in the backup."""
    store = await SqliteStore.open(tmp_path / "store.sqlite3")
    cluster = msgspec.json.encode(ClusterRecord(cluster_id="c", ca_pin="-"))
    await store.commit([], [Put("cluster", cluster)])
    for start in range(0, 3000, 100):
        await store.commit([], [Put(f"m/{start + number:05}", b"x" * 2000) for number in range(100)])

    async def change_forever() -> None:
        for number in range(1_000_000):
            value = str(number).encode()
            await store.commit([], [Put("a", value), Put("m/01500", value), Put("z", value)])

    async with asyncio.TaskGroup() as group:
        changing = group.create_task(change_forever())
        for number in range(5):
            await _write_backup(lambda: open_store_backup_source(store), tmp_path / f"backup{number}")
        changing.cancel()
    await store.close()
    values = []
    for number in range(5):
        rows = _read_rows(tmp_path / f"backup{number}")
        assert rows.get("a") == rows.get("z")
        values.append(int(rows.get("a", b"0")))
    assert values == sorted(values) and values[-1] > values[0]


async def test_large_rows_pass_through_the_api_in_chunks(tmp_path: Path) -> None:
    async with running_controller(tmp_path) as one:
        large = {f"large/{number}": bytes([number]) * (1024 * 1024) for number in range(4)}
        for key, value in large.items():
            await one.store.commit([], [Put(key, value)])
        async with _cluster_client(one) as client:
            await _write_backup(lambda: open_controller_backup_source(client), tmp_path / "backup")
    rows = _read_rows(tmp_path / "backup")
    assert {key: rows[key] for key in large} == large


async def test_only_the_owner_may_back_up(tmp_path: Path) -> None:
    async with running_controller(tmp_path) as one, one.client(await one.token(TokenKind.USER)) as user:
        with pytest.raises(PermissionError_, match="cannot open backups"):
            await user.ask(OpenBackup())


async def test_a_second_backup_is_rejected_until_the_first_is_closed_or_abandoned(tmp_path: Path) -> None:
    clock = FakeClock()
    async with running_controller(tmp_path, clock=clock) as one, one.client() as owner:
        first = await owner.ask(OpenBackup())
        with pytest.raises(OverloadedError, match="another backup"):
            await owner.ask(OpenBackup())
        await owner.ask(CloseBackup(backup_id=first.backup_id))
        await owner.ask(OpenBackup())
        await clock.advance(IDLE_TIMEOUT_S - 5)
        await clock.advance(10)
        await owner.ask(OpenBackup())


async def test_a_chunk_can_be_requested_again_but_none_can_be_skipped(tmp_path: Path) -> None:
    async with running_controller(tmp_path) as one, one.client() as owner:
        opened = await owner.ask(OpenBackup())
        first = await owner.ask(ReadBackup(backup_id=opened.backup_id, offset=0))
        again = await owner.ask(ReadBackup(backup_id=opened.backup_id, offset=0))
        assert first == again and first.data
        with pytest.raises(BackupError, match="continues at byte"):
            await owner.ask(ReadBackup(backup_id=opened.backup_id, offset=1))
        end = await owner.ask(ReadBackup(backup_id=opened.backup_id, offset=len(first.data)))
        assert end.data == b""
        with pytest.raises(BackupError, match="is not open"):
            await owner.ask(ReadBackup(backup_id="other", offset=0))


async def test_an_empty_store_is_not_backed_up(tmp_path: Path) -> None:
    store = await MemoryStore.open(clock=SystemClock())
    with pytest.raises(BackupError, match="contains no cluster"):
        await _write_backup(lambda: open_store_backup_source(store), tmp_path / "backup")
    await store.close()
    assert _list_names(tmp_path) == []


async def test_backup_starts_over_when_its_revision_is_compacted(tmp_path: Path) -> None:
    opened_count = 0

    class CompactedSource(StoreBackupSource):
        async def read_chunk(self) -> EncodedRows:
            chunk = await super().read_chunk()
            if opened_count == 1:
                raise CompactedError("gone")
            return chunk

    @asynccontextmanager
    async def open_source() -> AsyncIterator[CompactedSource]:
        nonlocal opened_count
        opened_count += 1
        async with store.snapshot() as snapshot:
            yield CompactedSource(snapshot, ClusterRecord(cluster_id="c", ca_pin="-"))

    store = await MemoryStore.open(clock=SystemClock())
    await store.commit([], [Put("row", b"1")])
    header: BackupHeader = await _write_backup(open_source, tmp_path / "backup")
    await store.close()
    assert (opened_count, header.row_count) == (2, 1)
    assert _read_rows(tmp_path / "backup") == {"row": b"1"}
