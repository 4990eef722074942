"""Files that must be whole and private, and the lock around them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from genie.errors import StoreFullError, UsageError
from genie.runtime import files
from genie.runtime.tasks import first_error

HOLD = """
import sys
from pathlib import Path
from genie.runtime.files import FileLock
lock = FileLock.try_take(Path(sys.argv[1]))
print("held" if lock else "refused", flush=True)
sys.stdin.read()
"""


def test_every_directory_that_had_to_be_made_is_private(tmp_path: Path) -> None:
    made = files.make_private_directory(tmp_path / "a" / "b" / "c")
    assert [path.stat().st_mode & 0o777 for path in (made, made.parent, made.parent.parent)] == [0o700] * 3


def test_a_directory_that_cannot_be_made_names_the_setting(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UsageError, match="GENIE_STATE_DIR"):
        files.make_private_directory(tmp_path / "file" / "below")


def test_a_file_is_replaced_whole_and_readable_by_its_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_bytes(b"old")
    path.chmod(0o644)
    files.write_private(path, b"new")
    assert path.read_bytes() == b"new"
    assert path.stat().st_mode & 0o777 == 0o600
    assert [one.name for one in tmp_path.iterdir()] == ["token"]


def test_a_write_that_fails_leaves_the_old_file_and_nothing_beside_it(
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


def test_one_process_at_a_time_has_the_lock_and_a_dead_one_never_keeps_it(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        assert files.FileLock.try_take(path) is None
        assert files.lock_holder(path) == str(holder.pid)
        holder.kill()
    lock = files.FileLock.try_take(path)
    assert lock is not None
    lock.release()
    lock.release()
    again = files.FileLock.try_take(path)
    assert again is not None
    again.release()


def test_the_first_error_of_nested_groups_is_found() -> None:
    inner = ValueError("inner")
    group = ExceptionGroup("outer", [ExceptionGroup("middle", [inner, KeyError("x")]), TypeError("y")])
    assert first_error(group) is inner
