"""store backup and restore, without a running controller; tests/integration/test_store_backup.py has one."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest

from genie.controller.backups.backup_file import BackupReader
from genie.controller.controller_directory import check_directory_not_copied
from genie.controller.election import CONTROLLER_KEY_PREFIX
from genie.controller.etcd.local_member import LocalMember
from genie.controller.etcd.replacement import Replacement, commit_replacement, new_data_directory
from genie.controller.ledger import COUNTER_KEY_PREFIX, EPOCH_COUNTER
from genie.controller.rows import ClusterRecord
from genie.controller.store import Put
from genie.controller.store.sqlite import SqliteStore
from genie.errors import DuplicateControllerError

CLUSTER = msgspec.json.encode(ClusterRecord(cluster_id="c0ffee", ca_pin="-"))
MEMBER = LocalMember(
    name="a", host="127.0.0.1", client_port=2379, peer_port=2380, bind="127.0.0.1", controller_port=5555
)


def write_store(path: Path, rows: Mapping[str, bytes]) -> None:
    async def open_and_write() -> None:
        store = await SqliteStore.open(path)
        await store.commit([], [Put(key, value) for key, value in rows.items()])
        await store.close()

    asyncio.run(open_and_write())


def read_store(path: Path) -> dict[str, bytes]:
    async def open_and_read() -> dict[str, bytes]:
        store = await SqliteStore.open(path)
        page = await store.range("")
        await store.close()
        return {item.key: item.value for item in page.items}

    return asyncio.run(open_and_read())


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


@pytest.fixture
def backup_file(genie, tmp_path) -> Path:
    write_store(tmp_path / "old.sqlite3", {"cluster": CLUSTER, "job/j-1": b"1"})
    ran = genie("store", "backup", str(tmp_path / "backup"), "--store", f"sqlite:{tmp_path}/old.sqlite3")
    assert ran.code == 0, ran.err
    return tmp_path / "backup"


def test_restore_fills_the_store_of_this_machine_and_prints_the_next_command(
    genie, state_dir, backup_file
) -> None:
    ran = genie("store", "restore", str(backup_file))
    assert ran.code == 0, ran.err
    assert "cluster c0ffee" in ran.out
    assert "next: genie up --detach\n" in ran.err
    rows = read_store(state_dir / "controller" / "store.sqlite3")
    assert rows["job/j-1"] == b"1"
    assert msgspec.json.decode(rows["cluster"], type=ClusterRecord).generation > 0


def test_restore_of_a_cluster_without_tls_into_managed_etcd_is_refused(genie, state_dir, backup_file) -> None:
    MEMBER.write(state_dir)
    ran = genie("store", "restore", str(backup_file))
    assert ran.code == 2
    assert "--tls off" in ran.err
    assert LocalMember.read(state_dir) == MEMBER
    assert not (state_dir / "controller" / "store.sqlite3").exists()


def test_restore_that_was_killed_before_the_member_was_retired_can_be_repeated(
    genie, state_dir, backup_file
) -> None:
    MEMBER.write(state_dir)
    restore = ("store", "restore", str(backup_file), "--store", "sqlite", "--json")
    ran = genie(*restore)
    assert ran.code == 0, ran.err
    first = json.loads(ran.out)
    (kept,) = first["kept"]
    Path(kept).rename(state_dir / "etcd")
    before = read_store(state_dir / "controller" / "store.sqlite3")
    ran = genie(*restore, "--generation", str(first["generation"] + 1))
    assert "is not empty" in ran.err
    ran = genie(*restore)
    assert ran.code == 0, ran.err
    again = json.loads(ran.out)
    assert (again["generation"], again["rows"]) == (first["generation"], first["rows"])
    assert read_store(state_dir / "controller" / "store.sqlite3") == before
    assert LocalMember.read(state_dir) is None
    MEMBER.write(state_dir)
    write_store(state_dir / "controller" / "store.sqlite3", {"job/j-2": b"2"})
    assert "is not empty" in genie(*restore).err, "a controller has changed the store"


def test_restore_uses_the_given_store_and_generation(genie, backup_file, tmp_path) -> None:
    url = f"sqlite:{tmp_path}/new.sqlite3"
    ran = genie("store", "restore", str(backup_file), "--store", url, "--generation", "7", "--json")
    assert ran.code == 0, ran.err
    assert json.loads(ran.out)["generation"] == 7
    ran = genie("store", "restore", str(backup_file), "--store", url)
    assert ran.code != 0
    assert "new.sqlite3 is not empty" in ran.err


def test_restore_of_the_same_backup_on_the_same_machine_raises_the_generation_again(
    genie, state_dir, backup_file
) -> None:
    store, generations = state_dir / "controller" / "store.sqlite3", []
    for _ in range(2):
        ran = genie("store", "restore", str(backup_file), "--json")
        assert ran.code == 0, ran.err
        generations.append(json.loads(ran.out)["generation"])
        store.unlink()
    assert generations[1] > generations[0]
    ran = genie("store", "restore", str(backup_file), "--generation", str(generations[1]))
    assert ran.code != 0
    assert f"is not above {generations[1]}, that of an earlier restore on this machine" in ran.err


def test_address_of_a_member_is_refused_for_other_stores(genie, backup_file) -> None:
    ran = genie("store", "restore", str(backup_file), "--bind", "127.0.0.1")
    assert ran.code == 2
    assert "--bind and --port are for etcd members" in ran.err


def test_restore_names_the_missing_certificate_authority(genie, state_dir, tmp_path) -> None:
    record = msgspec.json.encode(ClusterRecord(cluster_id="c0ffee", ca_pin="p" * 43))
    write_store(tmp_path / "old.sqlite3", {"cluster": record})
    genie("store", "backup", str(tmp_path / "backup"), "--store", f"sqlite:{tmp_path}/old.sqlite3")
    ran = genie("store", "restore", str(tmp_path / "backup"))
    assert ran.code == 0, ran.err
    assert (
        f"first copy controller/ca.pem and controller/ca.key of the previous controller to {state_dir}"
        in ran.err
    )


def test_restore_of_a_missing_or_other_file_is_an_error(genie, state_dir, tmp_path) -> None:
    ran = genie("store", "restore", str(tmp_path / "missing"))
    assert ran.code != 0
    assert "could not read the backup" in ran.err
    (tmp_path / "other").write_text("other")
    ran = genie("store", "restore", str(tmp_path / "other"))
    assert ran.code != 0
    assert "is not a backup of a store" in ran.err
    assert not (state_dir / "controller").exists()


def test_migrate_copies_the_store_and_keeps_a_backup(genie, state_dir, tmp_path) -> None:
    write_store(state_dir / "controller" / "store.sqlite3", {"cluster": CLUSTER, "job/j-1": b"1"})
    ran = genie("store", "migrate", "--to", f"sqlite:{tmp_path}/new.sqlite3")
    assert ran.code == 0, ran.err
    assert f"next: genie up --detach --store sqlite:{tmp_path}/new.sqlite3" in ran.err
    assert read_store(tmp_path / "new.sqlite3")["job/j-1"] == b"1"
    (backup,) = (state_dir / "controller").glob("migration-*.backup")
    assert str(backup) in ran.err
    assert dict(BackupReader(backup).rows())["job/j-1"] == b"1"


def test_rows_of_previous_servers_are_reported_as_not_copied(genie, state_dir, tmp_path) -> None:
    counter = COUNTER_KEY_PREFIX + EPOCH_COUNTER
    address = f"{CONTROLLER_KEY_PREFIX}box"
    rows = {"cluster": CLUSTER, counter: b'{"value":1}', "job/j-1": b"1", address: b"10.0.0.1:5555"}
    write_store(state_dir / "controller" / "store.sqlite3", rows)
    ran = genie("store", "migrate", "--to", f"sqlite:{tmp_path}/new.sqlite3")
    assert ran.code == 0, ran.err
    assert "copied 3 rows" in ran.out
    assert "not copied: 1 row about the previous servers, which register again" in ran.err


def test_migrate_names_an_invalid_store_before_its_address(genie, state_dir) -> None:
    ran = genie("store", "migrate", "--to", "etcdd", "--bind", "10.0.0.1")
    assert ran.code == 2
    assert "invalid store URL 'etcdd'" in ran.err and "--bind" not in ran.err


def test_migrate_refuses_a_store_with_data_and_the_store_itself(genie, state_dir, tmp_path) -> None:
    write_store(state_dir / "controller" / "store.sqlite3", {"cluster": CLUSTER})
    write_store(tmp_path / "other.sqlite3", {"job/j-1": b"1"})
    ran = genie("store", "migrate", "--to", f"sqlite:{tmp_path}/other.sqlite3")
    assert ran.code != 0
    assert "other.sqlite3 is not empty" in ran.err
    ran = genie("store", "migrate", "--to", "sqlite")
    assert ran.code != 0
    assert "is both source and target of the migration" in ran.err
    assert not list((state_dir / "controller").glob("migration-*"))


def test_migrate_without_a_store_is_an_error(genie, state_dir, tmp_path) -> None:
    ran = genie("store", "migrate", "--to", f"sqlite:{tmp_path}/new.sqlite3")
    assert ran.code != 0
    assert "there is no store at" in ran.err
    assert not (tmp_path / "new.sqlite3").exists()


def test_adopt_accepts_a_copied_directory_and_raises_the_generation(genie, state_dir, tmp_path) -> None:
    original = tmp_path / "original"
    write_store(original / "store.sqlite3", {"cluster": CLUSTER})
    check_directory_not_copied(original)
    shutil.copytree(original, state_dir / "controller")
    with pytest.raises(DuplicateControllerError):
        check_directory_not_copied(state_dir / "controller")
    ran = genie("store", "adopt")
    assert ran.code == 0, ran.err
    check_directory_not_copied(state_dir / "controller")
    rows = read_store(state_dir / "controller" / "store.sqlite3")
    assert msgspec.json.decode(rows["cluster"], type=ClusterRecord).generation > 0


def test_adopt_finishes_an_interrupted_replacement_and_leaves_the_previous_store_unchanged(
    genie, state_dir
) -> None:
    sqlite_file = state_dir / "controller" / "store.sqlite3"
    write_store(sqlite_file, {"cluster": CLUSTER})
    new_data_directory(state_dir).mkdir(parents=True)
    replacement = Replacement.create(MEMBER, sqlite_file=sqlite_file)
    commit_replacement(state_dir, replacement)
    ran = genie("store", "adopt")
    assert ran.code == 2
    assert "which cannot be adopted" in ran.err
    assert LocalMember.read(state_dir) == MEMBER
    kept = sqlite_file.with_name(sqlite_file.name + replacement.suffix)
    assert read_store(kept) == {"cluster": CLUSTER}


def test_adopt_without_a_store_is_an_error(genie) -> None:
    ran = genie("store", "adopt")
    assert ran.code != 0
    assert "there is no store at" in ran.err


@pytest.mark.parametrize(
    ("argv", "shown"),
    [
        (("backup", ""), "FILE '' is empty"),
        (("backup", "/"), "FILE '/' is a directory"),
        (("backup", "x" * 5000), "FILE 'xxx"),
        (("restore", "a\x07\x1b[31m"), "FILE 'a\\x07\\x1b[31m' is too long or has control characters"),
        (("restore", "b", "--generation", "16777216"), "give an integer from 1 to 16777215"),
        (("restore", "b", "--generation", "1_0"), "--generation '1_0' is not an integer"),
        (("migrate", "--to", ""), "--to '' is empty"),
        (("backup", "b", "--store", "x" * 5000), "invalid store URL 'xxx"),
    ],
)
def test_invalid_arguments_are_named_with_what_is_allowed(genie, argv, shown) -> None:
    ran = genie("store", *argv)
    assert ran.code == 2
    assert shown in ran.err and "hint: " in ran.err
    assert len(ran.err) < 400 and "\x1b" not in ran.err
