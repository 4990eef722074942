"""The file of a backup: what is written is read again, and damage is detected."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from genie.controller.backups.backup_file import BackupHeader, BackupReader, BackupWriter, encode_rows
from genie.controller.store import KeyValue
from genie.errors import BackupError, StoreVersionError

ROWS = [("a", b""), ("b/ü", b"\0" * 70_000), ("c", b"3")]


def _header(**fields: object) -> BackupHeader:
    given = {"cluster_id": "c1", "generation": 2, "revision": 7, "created_at": 1.5, "genie_version": "0.1"}
    return BackupHeader(**{**given, **fields})  # type: ignore[arg-type]


def _write(path: Path, rows: list[tuple[str, bytes]] = ROWS, **fields: object) -> BackupHeader:
    writer = BackupWriter(path)
    for key, value in rows:
        writer.write(encode_rows([KeyValue(key, value, 1, 1)]))
    return writer.finish(_header(**fields), row_count=len(rows))


def test_rows_and_header_are_read_again(tmp_path: Path) -> None:
    written = _write(tmp_path / "backup")
    reader = BackupReader(tmp_path / "backup")
    reader.verify()
    assert list(reader.rows()) == ROWS
    assert reader.header == written
    assert (written.cluster_id, written.revision, written.row_count) == ("c1", 7, 3)


def test_file_is_private_and_has_its_name_only_when_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "backup"
    writer = BackupWriter(path)
    writer.write(encode_rows([KeyValue("a", b"1", 1, 1)]))
    assert not path.exists()
    writer.finish(_header(), row_count=1)
    writer.abort()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_an_aborted_backup_keeps_the_previous_one(tmp_path: Path) -> None:
    before = _write(tmp_path / "backup")
    writer = BackupWriter(tmp_path / "backup")
    writer.write(b"half a row")
    writer.abort()
    assert BackupReader(tmp_path / "backup").header == before
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("is_link", [False, True])
def test_an_existing_temporary_file_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_link: bool
) -> None:
    monkeypatch.setattr("secrets.token_hex", lambda _size: "guessed")
    planted, victim = tmp_path / ".backup.guessed.new", tmp_path / "victim"
    victim.write_text("precious")
    if is_link:
        planted.symlink_to(victim)
    else:
        planted.hardlink_to(victim)
    with pytest.raises(BackupError, match="could not write the backup"):
        BackupWriter(tmp_path / "backup")
    assert victim.read_text() == "precious"


def test_another_file_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "thesis"
    path.write_text("years of work")
    with pytest.raises(BackupError, match="is not a backup"):
        BackupWriter(path)
    assert path.read_text() == "years of work"


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(BackupError, match="the directory does not exist") as caught:
        BackupWriter(tmp_path / "missing" / "backup")
    assert "mkdir -p" in caught.value.hint


@pytest.mark.parametrize("position", [0, 20, 60, 1030, 1100, -1])
def test_a_changed_byte_is_detected(tmp_path: Path, position: int) -> None:
    path = tmp_path / "backup"
    _write(path)
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)
    with pytest.raises(BackupError):
        BackupReader(path).verify()


@pytest.mark.parametrize("size_bytes", [0, 5, 500, 1024, 1030, 2000])
def test_a_truncated_file_is_detected(tmp_path: Path, size_bytes: int) -> None:
    path = tmp_path / "backup"
    _write(path)
    path.write_bytes(path.read_bytes()[:size_bytes])
    with pytest.raises(BackupError):
        BackupReader(path).verify()


def test_a_newer_format_is_rejected(tmp_path: Path) -> None:
    _write(tmp_path / "backup", format_version=99)
    with pytest.raises(StoreVersionError, match="format 99"):
        BackupReader(tmp_path / "backup")


def test_a_file_of_another_kind_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "backup").write_bytes(b"x" * 5000)
    with pytest.raises(BackupError, match="is not a backup"):
        BackupReader(tmp_path / "backup")
