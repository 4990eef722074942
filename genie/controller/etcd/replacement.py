"""Replaces the store of this machine by an etcd member whose data is complete. Files only; no process.

    STATE/etcd/data.new           data of the new member, while it is being filled
    STATE/etcd/replacement.json   exists once that data is complete: the new member, and what it replaces
    STATE/etcd/data.replaced-T    data of the previous member, if there was one

Until `commit_replacement` has written the record, the previous store is in use and unchanged. From then on
the new one is, even if the process is killed before it has renamed the files: `finish_replacement` does the
rest, and every command that starts or opens a store calls it first. Nothing of the previous store is deleted.

supervisor/etcd_replacement.py starts the new member and calls this.
"""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from genie.controller.etcd.local_member import LocalMember, etcd_data_directory, etcd_member_directory
from genie.errors import ConfigError
from genie.processes import files

_RECORD_FILE = "replacement.json"
_SQLITE_SUFFIXES = ("-wal", "-shm", "")
"""The main file last: the store exists until it is renamed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replacement:
    """The new member, and the file of the embedded store that it replaces (empty if there is none).
    `suffix` is appended to the names of what is replaced."""

    member: LocalMember
    sqlite_file: str
    suffix: str

    @classmethod
    def create(cls, member: LocalMember, *, sqlite_file: Path | None) -> Replacement:
        return cls(member=member, sqlite_file=str(sqlite_file or ""), suffix=_make_suffix())


def new_data_directory(state_dir: Path) -> Path:
    """Where the data of the new member is until it replaces the store."""
    data = etcd_data_directory(state_dir)
    return data.with_name(f"{data.name}.new")


def remove_unfinished_data(state_dir: Path) -> None:
    """Remove the data of an attempt that was not committed. No etcd may use it any more."""
    shutil.rmtree(new_data_directory(state_dir), ignore_errors=True)
    if LocalMember.read(state_dir) is None and not etcd_data_directory(state_dir).exists():
        shutil.rmtree(etcd_member_directory(state_dir), ignore_errors=True)


def is_replacement_committed(state_dir: Path) -> bool:
    """Whether a replacement was committed but is not finished."""
    return _record_path(state_dir).exists()


def commit_replacement(state_dir: Path, replacement: Replacement) -> None:
    """From now on the new member is the store of this machine. Call `finish_replacement` next."""
    files.sync_directory(new_data_directory(state_dir))
    body = {
        "member": replacement.member.to_json(),
        "sqlite_file": replacement.sqlite_file,
        "suffix": replacement.suffix,
    }
    files.write_private(_record_path(state_dir), json.dumps(body).encode())


def finish_replacement(state_dir: Path) -> list[Path]:
    """Rename the files of a committed replacement; return the names under which the previous store is kept.
    Does nothing if there is none. The caller makes sure that nothing uses the store."""
    replacement = _read_replacement(state_dir)
    if replacement is None:
        return []
    new, data = new_data_directory(state_dir), etcd_data_directory(state_dir)
    kept_data = data.with_name(data.name + replacement.suffix)
    if new.exists():
        if data.exists():
            data.rename(kept_data)
        new.rename(data)
    files.sync_directory(data.parent)
    replacement.member.write(state_dir)
    kept = [kept_data] if kept_data.exists() else []
    if replacement.sqlite_file:
        kept.append(_rename_sqlite_file(Path(replacement.sqlite_file), replacement.suffix))
    _record_path(state_dir).unlink()
    files.sync_directory(data.parent)
    return kept


def retire_member(state_dir: Path) -> Path | None:
    """Rename the directory of this machine's etcd member, which another store has replaced. Return its new
    name; None if there is no member."""
    directory = etcd_member_directory(state_dir)
    if LocalMember.read(state_dir) is None:
        return None
    kept = directory.with_name(directory.name + _make_suffix())
    directory.rename(kept)
    files.sync_directory(state_dir)
    return kept


def _make_suffix() -> str:
    """With milliseconds: a restore can be repeated within a second."""
    seconds, milliseconds = divmod(time.time_ns() // 1_000_000, 1000)
    return f".replaced-{time.strftime('%Y%m%d-%H%M%S', time.localtime(seconds))}-{milliseconds:03}"


def _rename_sqlite_file(path: Path, suffix: str) -> Path:
    kept = path.with_name(path.name + suffix)
    for ending in _SQLITE_SUFFIXES:
        file = path.with_name(path.name + ending)
        if file.exists():
            file.rename(kept.with_name(kept.name + ending))
    files.sync_directory(path.parent)
    return kept


def _read_replacement(state_dir: Path) -> Replacement | None:
    path = _record_path(state_dir)
    try:
        body = json.loads(files.read_small_file(path))
        return Replacement(
            member=LocalMember.from_json(body["member"]),
            sqlite_file=str(body["sqlite_file"]),
            suffix=str(body["suffix"]),
        )
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(
            f"the record of a replaced store, {path}, cannot be read: {error}",
            hint="remove that file and restore a backup again: 'genie store restore FILE'",
        ) from error


def _record_path(state_dir: Path) -> Path:
    return etcd_member_directory(state_dir) / _RECORD_FILE
