"""Restoring a backup: only into an empty store, complete, and in a higher generation."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import msgspec
import pytest

from genie.controller.backups.backup import open_store_backup_source, write_backup
from genie.controller.backups.backup_file import BackupReader
from genie.controller.backups.restore import RestoreResult, next_generation, restore_backup
from genie.controller.ledger import read_cluster_record
from genie.controller.rows import ClusterRecord, Counter
from genie.controller.store import Put, Store, TxnResult
from genie.errors import BackupError, StoreNotEmptyError, StoreUnavailableError
from genie.model.fencing import GENERATION_MAX
from genie.model.release import OWN_RELEASE
from genie.model.tenant import TokenKind, TokenRecord
from genie.processes.clock import SystemClock
from genie.processes.tasks import run_inline
from genie.sim.store import MemoryStore
from tests.controller.running_controller import running_controller

CLUSTER = msgspec.json.encode(ClusterRecord(cluster_id="c", ca_pin="-"))
ROWS = {f"job/{number:04}": b"x" * number for number in range(700)} | {"token/t": b"1"}
_2026_S, _MINUTE_S = 1_767_225_600, 60


@asynccontextmanager
async def _open_memory(rows: Mapping[str, bytes] = {}) -> AsyncIterator[MemoryStore]:
    store = await MemoryStore.open(clock=SystemClock())
    keys = sorted(rows)
    for start in range(0, len(keys), 100):
        await store.commit([], [Put(key, rows[key]) for key in keys[start : start + 100]])
    try:
        yield store
    finally:
        await store.close()


async def _back_up(path: Path, rows: Mapping[str, bytes]) -> BackupReader:
    async with _open_memory({"cluster": CLUSTER, **rows}) as store:
        await write_backup(
            partial(open_store_backup_source, store),
            path,
            clock=SystemClock(),
            offload=run_inline,
            progress=lambda _rows, _bytes: None,
        )
    return BackupReader(path)


async def _restore(reader: BackupReader, store: Store, *, generation: int = 5) -> RestoreResult:
    return await restore_backup(
        reader,
        store,
        store_name="target",
        generation=generation,
        offload=run_inline,
        progress=lambda _rows, _bytes: None,
    )


async def _read_all(store: Store) -> dict[str, bytes]:
    page = await store.range("", limit=10_000)
    assert not page.more
    return {item.key: item.value for item in page.items}


@pytest.mark.parametrize(("minor_versions", "is_restored"), [(-3, True), (1, True), (2, False)])
async def test_backup_of_a_release_that_is_too_new_is_not_restored(
    tmp_path: Path, minor_versions: int, is_restored: bool
) -> None:
    reader = await _back_up(tmp_path / "backup", ROWS)
    version = f"{OWN_RELEASE.major}.{max(OWN_RELEASE.minor + minor_versions, 0)}.4"
    reader.header = msgspec.structs.replace(reader.header, genie_version=version)
    async with _open_memory() as store:
        if is_restored:
            await _restore(reader, store)
            return
        with pytest.raises(BackupError, match=f"was made with Genie {version}, this is"):
            await _restore(reader, store)
        assert await _read_all(store) == {}


async def test_all_rows_are_restored_except_the_addresses_of_controllers(tmp_path: Path) -> None:
    of_servers = {"controller/one": b"10.0.0.1:5555", "release/one": b"{}"}
    reader = await _back_up(tmp_path / "backup", {**ROWS, **of_servers})
    async with _open_memory() as store:
        restored = await _restore(reader, store)
        found = await _read_all(store)
    cluster, epochs = found.pop("cluster"), found.pop("counter/epoch")
    assert found == ROWS
    assert restored.row_count == len(ROWS) + 2
    assert msgspec.json.decode(cluster, type=ClusterRecord) == restored.cluster
    assert restored.cluster == ClusterRecord(cluster_id="c", ca_pin="-", generation=5)
    assert msgspec.json.decode(epochs, type=Counter).value == 5 << 24


async def test_unused_tokens_that_admit_a_machine_are_not_restored(tmp_path: Path) -> None:
    def row(kind: TokenKind, used_at: float | None = None) -> bytes:
        record = TokenRecord(token_id="t", kind=kind, secret_sha256="s", created_at=1.0, used_at=used_at)
        return msgspec.json.encode(record)

    kept = {
        "token/user": row(TokenKind.USER),
        "token/node": row(TokenKind.NODE),
        "token/used": row(TokenKind.JOIN, used_at=2.0),
        "token/unreadable": b"{",
    }
    newer = b'{"kind":"server-join","added_by_a_newer_release":1}'
    dropped = {"token/j": row(TokenKind.JOIN), "token/s": row(TokenKind.SERVER_JOIN), "token/n": newer}
    reader = await _back_up(tmp_path / "backup", {**kept, **dropped})
    async with _open_memory() as store:
        restored = await _restore(reader, store)
        found = await _read_all(store)
    assert {key: value for key, value in found.items() if key.startswith("token/")} == kept
    assert restored.dropped_token_count == len(dropped)


async def test_epochs_of_two_generations_never_overlap(tmp_path: Path) -> None:
    reader = await _back_up(tmp_path / "backup", {"counter/epoch": b'{"value":1000000000}'})
    async with _open_memory() as store:
        await _restore(reader, store, generation=1)
        assert (await _read_all(store))["counter/epoch"] == b'{"value":1000000001}'


async def test_a_store_with_data_is_refused_by_name(tmp_path: Path) -> None:
    reader = await _back_up(tmp_path / "backup", ROWS)
    async with _open_memory({"job/j-1": b"1"}) as store:
        with pytest.raises(StoreNotEmptyError, match="target is not empty: it has the key 'job/j-1'"):
            await _restore(reader, store)
        assert await _read_all(store) == {"job/j-1": b"1"}


async def test_a_store_with_a_leader_is_refused(tmp_path: Path) -> None:
    reader = await _back_up(tmp_path / "backup", ROWS)
    async with running_controller(tmp_path) as one:
        assert one.controller is not None
        with pytest.raises(StoreNotEmptyError, match=f"the controller at {one.controller.address}"):
            await _restore(reader, one.store)


async def test_a_damaged_backup_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "backup"
    await _back_up(path, ROWS)
    _truncate(path)
    async with _open_memory() as store:
        with pytest.raises(BackupError, match="damaged"):
            await _restore(BackupReader(path), store)
        assert await _read_all(store) == {}


@pytest.mark.parametrize("generation", [0, GENERATION_MAX + 1])
async def test_the_generation_must_be_higher(tmp_path: Path, generation: int) -> None:
    reader = await _back_up(tmp_path / "backup", ROWS)
    async with _open_memory() as store:
        with pytest.raises(BackupError, match=f"generation {generation} is not above"):
            await _restore(reader, store, generation=generation)


class _FailingStore(MemoryStore):
    commits_left = 3

    async def commit(self, *args: object, **named: object) -> TxnResult:
        self.commits_left -= 1
        if self.commits_left < 0:
            raise StoreUnavailableError("lost")
        return await super().commit(*args, **named)  # type: ignore[arg-type]


async def test_no_controller_leads_with_half_a_backup_and_the_restore_can_be_repeated(tmp_path: Path) -> None:
    reader = await _back_up(tmp_path / "backup", ROWS)
    store = await _FailingStore.open(clock=SystemClock())
    with pytest.raises(StoreUnavailableError):
        await _restore(reader, store)
    store.commits_left = 1_000_000
    async with running_controller(tmp_path, store=store.connect()) as one:
        assert one.controller is not None
        assert not one.controller.is_leading
        with pytest.raises(StoreUnavailableError, match="its restore has failed"):
            await read_cluster_record(store)
    await _restore(reader, store)
    found = await _read_all(store)
    await store.close()
    assert {key: found[key] for key in ROWS} == ROWS
    assert "restoring" not in found


async def test_rows_of_another_writer_are_detected(tmp_path: Path) -> None:
    reader = await _back_up(tmp_path / "backup", ROWS)

    class OtherWriter(MemoryStore):
        async def commit(self, *args: object, **named: object) -> TxnResult:
            await super().commit([], [Put("foreign", b"1")])
            return await super().commit(*args, **named)  # type: ignore[arg-type]

    store = await OtherWriter.open(clock=SystemClock())
    with pytest.raises(BackupError, match="differ from those of the backup"):
        await _restore(reader, store)
    assert (await store.get("cluster")) is None
    await store.close()


def test_generations_rise_with_each_restore_also_of_the_same_backup() -> None:
    assert next_generation(0, now_s=0) == 1
    assert next_generation(0, now_s=_2026_S + 10 * _MINUTE_S) == 10
    assert next_generation(10, now_s=_2026_S + 10 * _MINUTE_S) == 11
    assert next_generation(0, now_s=_2026_S + 11 * _MINUTE_S) == 11


async def test_a_leader_of_a_restored_store_uses_the_generation_and_can_write(tmp_path: Path) -> None:
    reader = await _back_up(tmp_path / "backup", {})
    async with _open_memory() as store:
        await _restore(reader, store, generation=3)
        async with running_controller(tmp_path, store=store.connect()) as one, one.agent() as agent:
            assert (await agent.beat()).leader_token >> 40 == 3
            async with one.client() as owner:
                job = await owner.submit(gpus=1)
                launch = await agent.next_launch()
            assert launch.job_id == job.job_id
            assert launch.leader_token >> 40 == 3
            assert launch.placement.epoch > 3 << 24


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])
