"""Atomic private files and the file lock."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from genie.errors import StoreFullError, UsageError
from genie.processes import files

HOLD_LOCK_SCRIPT = """
import sys
from pathlib import Path
from genie.processes.files import FileLock
lock = FileLock.try_acquire(Path(sys.argv[1]))
print("held" if lock else "refused", flush=True)
sys.stdin.read()
"""


def test_created_directories_are_private(tmp_path: Path) -> None:
    made = files.make_private_directory(tmp_path / "a" / "b" / "c")
    assert [path.stat().st_mode & 0o777 for path in (made, made.parent, made.parent.parent)] == [0o700] * 3


def test_directory_error_names_the_setting(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UsageError, match="GENIE_STATE_DIR"):
        files.make_private_directory(tmp_path / "file" / "below")


def test_write_private_replaces_the_file_with_mode_0600(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_bytes(b"old")
    path.chmod(0o644)
    files.write_private(path, b"new")
    assert path.read_bytes() == b"new"
    assert path.stat().st_mode & 0o777 == 0o600
    assert [one.name for one in tmp_path.iterdir()] == ["token"]


def test_failed_write_keeps_the_old_file_and_no_temporary_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "token"
    files.write_private(path, b"old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StoreFullError, match="No space left"):
        files.write_private(path, b"new")
    assert path.read_bytes() == b"old"
    assert [one.name for one in tmp_path.iterdir()] == ["token"]


def test_lock_is_exclusive_and_released_when_its_process_dies(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with subprocess.Popen(
        [sys.executable, "-c", HOLD_LOCK_SCRIPT, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        assert files.FileLock.try_acquire(path) is None
        assert files.read_lock_holder_pid(path) == str(holder.pid)
        holder.kill()
    lock = files.FileLock.try_acquire(path)
    assert lock is not None
    lock.release()
    lock.release()
    again = files.FileLock.try_acquire(path)
    assert again is not None
    again.release()


def test_write_error_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(StoreFullError, match="cannot write"):
        files.write_private(tmp_path / ("a" * 250), b"secret")


def test_symlink_at_the_temporary_path_is_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (tmp_path / f".token.{os.getpid()}.new").symlink_to(victim)
    with pytest.raises(StoreFullError, match="cannot write"):
        files.write_private(tmp_path / "token", b"secret")
    assert victim.read_text() == "mine"
