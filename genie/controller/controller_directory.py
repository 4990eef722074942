"""The directory of a controller on its machine: its lock, its name, and the machine it belongs to. Also the
files by which commands on this machine find the cluster.

With the embedded store, a copy of the directory is a second cluster with the same nodes and tokens: both
would lead for good. So the machine and the directory are recorded in it, and a controller does not start in a
copy. With etcd the election detects a second controller of the same name (election.py).
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from genie.errors import DuplicateControllerError, LeadershipError, StoreFullError
from genie.processes import files
from genie.processes.process_table import boot_id
from genie.runtime.credentials import LocalCluster, store_trusted_ca

_log = logging.getLogger(__name__)

_LOCK_FILE = "controller.lock"
_NAME_FILE = "name"
_LOCATION_FILE = "location.json"
_MACHINE_ID_FILE = Path("/etc/machine-id")
_HASH_CHARS = 16


@contextmanager
def lock_controller_directory(directory: Path) -> Iterator[None]:
    """Hold the lock of the directory: two controllers must not share a name, a CA and a store."""
    lock = files.FileLock.try_acquire(directory / _LOCK_FILE)
    if lock is None:
        raise LeadershipError(
            f"another controller is using {directory}",
            hint="stop it with 'genie down --keep-jobs', or set GENIE_STATE_DIR to another directory",
        )
    try:
        yield
    finally:
        lock.release()


def read_or_create_controller_name(directory: Path) -> str:
    """Return the name of the controller of this directory; created at the first start."""
    path = directory / _NAME_FILE
    if not path.exists():
        files.write_private(path, os.urandom(8).hex().encode())
    return path.read_text("utf-8").strip()


@dataclass(frozen=True, slots=True)
class DirectoryLocation:
    """Where a directory is. A copy has another inode and another path, or is on another machine."""

    machine: str
    """Hash of the machine ID; empty if there is none, as in many containers."""
    inode: int
    path: str

    @classmethod
    def of_directory(cls, directory: Path, *, machine_id_file: Path = _MACHINE_ID_FILE) -> DirectoryLocation:
        return cls(_read_machine_id_hash(machine_id_file), directory.stat().st_ino, str(directory.resolve()))

    def is_same_place(self, other: DirectoryLocation) -> bool:
        """A renamed directory keeps its inode. Some file systems change inodes, but then the path is kept."""
        if self.machine and other.machine and self.machine != other.machine:
            return False
        return self.inode == other.inode or self.path == other.path


def check_directory_not_copied(directory: Path, *, machine_id_file: Path = _MACHINE_ID_FILE) -> None:
    """Raise DuplicateControllerError if this directory is a copy of that of another controller."""
    found = DirectoryLocation.of_directory(directory, machine_id_file=machine_id_file)
    recorded = _read_recorded_location(directory)
    if recorded is not None and not recorded.is_same_place(found):
        where = "on another machine" if recorded.path == found.path else f"in {recorded.path}"
        raise DuplicateControllerError(
            f"{directory} is a copy: its controller was last started {where}, and both would lead",
            hint="if the directory was moved and the other one is never started again, run 'genie store "
            "adopt'; to return to an earlier state, use 'genie store restore'; in a container, mount a file "
            "that stays the same as /etc/machine-id",
        )
    if recorded != found:
        record_directory_location(directory, machine_id_file=machine_id_file)


def record_directory_location(directory: Path, *, machine_id_file: Path = _MACHINE_ID_FILE) -> None:
    """Record that the controller of this directory belongs here."""
    found = DirectoryLocation.of_directory(directory, machine_id_file=machine_id_file)
    files.write_private(directory / _LOCATION_FILE, msgspec.json.encode(found))


def controller_instance_id(directory: Path) -> str:
    """Return a text that differs between copies of a directory, and between boots, but not between restarts
    of the controller."""
    status = directory.stat()
    parts = (_read_machine_id_hash(_MACHINE_ID_FILE), boot_id(), str(status.st_dev), str(status.st_ino))
    return _hash_text(" ".join(parts))


def _read_recorded_location(directory: Path) -> DirectoryLocation | None:
    """Return the recorded location; None at the first start."""
    try:
        return msgspec.json.decode((directory / _LOCATION_FILE).read_bytes(), type=DirectoryLocation)
    except FileNotFoundError:
        return None
    except msgspec.DecodeError:
        return None  # written by another version, or damaged: as at the first start


def _read_machine_id_hash(path: Path) -> str:
    # Hashed: the machine ID is confidential, see machine-id(5).
    try:
        text = files.read_small_file(path).strip()
    except (OSError, UnicodeDecodeError):
        return ""
    return _hash_text(f"genie {text}") if text and text != "uninitialized" else ""


def _hash_text(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:_HASH_CHARS]


class LocalAccessFiles:
    """The files by which commands on this machine find the cluster: its address and its CA. Written once. A
    failure affects only these commands."""

    def __init__(self, state_dir: Path) -> None:
        self._state_dir = state_dir
        self._are_written = False
        self.alarm = ""
        """Why they could not be written; empty if they were."""

    def try_write(self, cluster: LocalCluster, *, trusted_ca: str) -> None:
        """`trusted_ca` is empty without TLS."""
        if self._are_written:
            return
        try:
            if trusted_ca:
                store_trusted_ca(trusted_ca, state_dir=self._state_dir)
            cluster.write(self._state_dir)
        except StoreFullError as error:
            if not self.alarm:
                _log.error("commands on this machine may not find the cluster: %s", error)
            self.alarm = f"commands on this machine may not find the cluster: {error.message}"
        else:
            self.alarm, self._are_written = "", True
