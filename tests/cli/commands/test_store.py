"""store backup, without a running controller; tests/integration/test_store_backup.py has one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path

import msgspec

from genie.controller.backups.backup_file import BackupReader
from genie.controller.ledger import ClusterRecord
from genie.controller.store import Put
from genie.controller.store.sqlite import SqliteStore

CLUSTER = msgspec.json.encode(ClusterRecord(cluster_id="c0ffee", ca_pin="-"))


def write_store(path: Path, rows: Mapping[str, bytes]) -> None:
    async def write() -> None:
        store = await SqliteStore.open(path)
        await store.commit([], [Put(key, value) for key, value in rows.items()])
        await store.close()

    asyncio.run(write())


def test_backup_reads_the_store_of_a_stopped_controller(genie, state_dir, tmp_path) -> None:
    write_store(state_dir / "controller" / "store.sqlite3", {"cluster": CLUSTER, "job/j-1": b"1"})
    ran = genie("store", "backup", str(tmp_path / "backup"))
    assert ran.code == 0, ran.err
    assert "2 rows" in ran.out and "c0ffee" in ran.out
    assert "reading the store directly" in ran.err
    assert dict(BackupReader(tmp_path / "backup").rows()) == {"cluster": CLUSTER, "job/j-1": b"1"}


def test_backup_reads_the_store_of_the_option(genie, tmp_path) -> None:
    write_store(tmp_path / "own.sqlite3", {"cluster": CLUSTER})
    ran = genie(
        "store", "backup", str(tmp_path / "backup"), "--store", f"sqlite:{tmp_path}/own.sqlite3", "--json"
    )
    assert ran.code == 0, ran.err
    assert json.loads(ran.out)["header"]["cluster_id"] == "c0ffee"


def test_backup_without_a_cluster_is_an_error(genie, state_dir, tmp_path) -> None:
    ran = genie("store", "backup", str(tmp_path / "backup"))
    assert ran.code != 0
    assert "genie up" in ran.err or "--address" in ran.err
    ran = genie("store", "backup", str(tmp_path / "backup"), "--store", "sqlite")
    assert ran.code != 0
    assert "there is no store at" in ran.err
    assert not (state_dir / "controller").exists()
    assert not (tmp_path / "backup").exists()
