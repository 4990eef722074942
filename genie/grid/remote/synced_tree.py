"""The sync state of one tree on a node: <remote_root>/.grid/sync/TREE.

`state` contains the records of the synced files, `objects-*` received files that are not in place yet,
`journal` a change that was started and must be finished, `lock` the lock. Nothing is fsynced: after a power
cut, sizes and times show what is missing, and it is sent again.

Runs on nodes: standard library only, Python 3.8. Does not apply changes (sync.py).
"""

from __future__ import annotations

import errno
import os
import re
import struct
import time

from genie.grid.remote import tree
from genie.grid.remote.contents import BLOCK_DIGEST_FILE_BYTES_MIN
from genie.grid.remote.core import OpError
from genie.grid.remote.own_folder import GRID_FOLDER_NAME, grid_folder_path

STATE_FILE_HEADER = struct.Struct(
    "<8sq32s32s"
)  # magic, time of the last scan, digest of the plain records, rules
STATE_FILE_MAGIC = b"GGTREE2\n"
"""Includes the format version."""
_STATE_FILE_MAGIC_V1 = b"GGTREE1\n"
"""In this version, large files were also identified by their SHA-256."""
_TREE_NAME_PATTERN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
_ENGINE_LIBRARY_KEY_PATTERN = re.compile(r"[0-9a-f]{16,64}")
_LOCK_RETRY_INTERVAL_S = 0.02
_ENGINE_BY_LIBRARY_KEY: dict[str, tree.PlainEngine] = {}


class TreeState:
    """Records of the synced files as of the last scan at `taken_ns`."""

    def __init__(self, records: bytes = b"", *, taken_ns: int = 0, digest: bytes = b"") -> None:
        self.records, self.taken_ns, self.digest = records, taken_ns, digest


class SyncedTree:
    """One tree on this node. A context manager that owns file descriptors."""

    def __init__(self, args: dict[str, str], *, create: bool) -> None:
        """Raises FileNotFoundError if the tree was never synced, unless `create`."""
        if not _TREE_NAME_PATTERN.fullmatch(args["tree"]):
            raise OpError("invalid tree name " + repr(args["tree"]), reason="usage")
        path = os.path.expanduser(args["root"])
        if create:
            os.makedirs(path, exist_ok=True)
        self._open_fds: list[int] = []
        self._is_locked = False
        try:
            self.root_fd = self._track_fd(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
            own = self._open_grid_folder(path, create=create)
            self.sync_folder_fd = self._open_folder(own, "sync", create=create)
            self.tree_folder_fd = self._open_folder(self.sync_folder_fd, args["tree"], create=create)
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):
                parents = {
                    GRID_FOLDER_NAME: path,
                    "sync": grid_folder_path(path),
                    args["tree"]: grid_folder_path(path, "sync"),
                }
                _make_error_path_absolute(error, parents.get(str(error.filename), ""))
            raise
        self.sync_folder_path = grid_folder_path(path, "sync")
        self._tree_folder_path = os.path.join(self.sync_folder_path, args["tree"])
        self.engine = load_engine_by_key(self.sync_folder_path, args.get("key", ""))

    def __enter__(self) -> SyncedTree:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        while self._open_fds:
            os.close(self._open_fds.pop())

    def open_staging_folder(self) -> int:
        """Open the directory of received files; remove those of an earlier boot, which may be incomplete."""
        name = "objects-" + _read_boot_id()
        for other in os.listdir(self.tree_folder_fd):
            if other.startswith("objects-") and other != name:
                self._remove_staging_folder(other)
        return self._open_folder(self.tree_folder_fd, name, create=True)

    def _remove_staging_folder(self, name: str) -> None:
        try:
            self.remove_all_files(self._open_folder(self.tree_folder_fd, name, create=False))
            os.rmdir(name, dir_fd=self.tree_folder_fd)
        except OSError as error:  # not a directory, or it contains other files: ignored
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR, errno.ELOOP):
                raise

    def remove_all_files(self, folder: int) -> None:
        """Remove all files from a directory; subdirectories made by others stay."""
        for name in os.listdir(folder):
            try:
                os.unlink(name, dir_fd=folder)
            except (IsADirectoryError, PermissionError):  # depends on the system
                pass

    def read_state(self) -> TreeState:
        """Return the stored state; an empty one if it is missing or unreadable."""
        data = self.read_sync_file("state")
        if data is None:
            data = self.read_sync_file("state.old")
        if data is None or len(data) < STATE_FILE_HEADER.size:
            return TreeState()
        magic, taken_ns, digest, _ = STATE_FILE_HEADER.unpack_from(data)
        records = data[STATE_FILE_HEADER.size :]
        try:
            if magic not in (STATE_FILE_MAGIC, _STATE_FILE_MAGIC_V1) or digest != records_digest(
                self.engine, records
            ):
                return TreeState()
            if magic == _STATE_FILE_MAGIC_V1:
                records = _clear_digests_of_large_files(records)
                digest = records_digest(self.engine, records)
        except OSError:
            return TreeState()
        return TreeState(records, taken_ns=taken_ns, digest=digest)

    def write_state(self, records: bytes, *, taken_ns: int, digest: bytes, name: str = "state") -> None:
        data = STATE_FILE_HEADER.pack(STATE_FILE_MAGIC, taken_ns, digest, bytes(32)) + records
        self.write_sync_file(name + ".whole", data)
        # Replacing a file makes file systems flush, so the old state is renamed first; it is the fallback.
        try:
            os.rename(name, name + ".old", src_dir_fd=self.tree_folder_fd, dst_dir_fd=self.tree_folder_fd)
        except FileNotFoundError:
            pass
        os.rename(name + ".whole", name, src_dir_fd=self.tree_folder_fd, dst_dir_fd=self.tree_folder_fd)

    def read_sync_file(self, name: str) -> bytes | None:
        try:
            fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self.tree_folder_fd)
        except FileNotFoundError:
            return None
        with os.fdopen(fd, "rb") as file:
            return file.read()

    def write_sync_file(self, name: str, data: bytes) -> None:
        """Write a file atomically."""
        part = name + ".part"
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(part, flags, 0o600, dir_fd=self.tree_folder_fd)
        try:
            tree.write_all(fd, data)
        except OSError:
            os.unlink(part, dir_fd=self.tree_folder_fd)
            raise
        finally:
            os.close(fd)
        os.rename(part, name, src_dir_fd=self.tree_folder_fd, dst_dir_fd=self.tree_folder_fd)

    def disk_free_bytes(self) -> int:
        found = os.fstatvfs(self.tree_folder_fd)
        return found.f_bavail * found.f_frsize

    def remove_sync_file(self, name: str) -> None:
        try:
            os.unlink(name, dir_fd=self.tree_folder_fd)
        except FileNotFoundError:
            pass

    def lock(self, *, wait_s: float) -> None:
        """Acquire the lock until `close`. Raises OpError ('busy') after `wait_s`."""
        import fcntl

        if self._is_locked:
            return
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            fd = self._track_fd(os.open("lock", flags, 0o600, dir_fd=self.tree_folder_fd))
        except OSError as error:
            _make_error_path_absolute(error, self._tree_folder_path)
            raise
        deadline = time.monotonic() + wait_s
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._is_locked = True
                return
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.EACCES):
                    raise
            if time.monotonic() >= deadline:
                raise OpError("another sync of this tree is in progress", reason="busy")
            time.sleep(_LOCK_RETRY_INTERVAL_S)

    def _open_grid_folder(self, root: str, *, create: bool) -> int:
        path = grid_folder_path(root)
        if not os.path.islink(path):
            return self._open_folder(self.root_fd, GRID_FOLDER_NAME, create=create)
        own = self._track_fd(os.open(os.path.realpath(path), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
        if os.fstat(own).st_dev != os.fstat(self.root_fd).st_dev:
            raise OpError(path + " must be on the same file system as remote_root", reason="link")
        return own

    def _open_folder(self, parent: int, name: str, *, create: bool) -> int:
        if create:
            try:
                os.mkdir(name, 0o700, dir_fd=parent)
            except FileExistsError:
                pass
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        return self._track_fd(os.open(name, flags, dir_fd=parent))

    def _track_fd(self, fd: int) -> int:
        self._open_fds.append(fd)
        return fd


def _clear_digests_of_large_files(records: bytes) -> bytes:
    """Clear the digests of large files, which are then sent again."""
    known = bytearray(records)
    for one in tree.iter_records(records):
        if one.kind == tree.FILE and one.size >= BLOCK_DIGEST_FILE_BYTES_MIN:
            known[one.at + tree.RECORD_HEADER.size - len(tree.NO_SHA) : one.at + tree.RECORD_HEADER.size] = (
                tree.NO_SHA
            )
    return bytes(known)


def _make_error_path_absolute(error: OSError, folder: str) -> None:
    """Make the file name of an error absolute; it is relative to a directory descriptor."""
    if isinstance(error.filename, str):
        error.filename = os.path.join(folder, error.filename)


def records_digest(engine: tree.PlainEngine, records: bytes) -> bytes:
    import hashlib

    return hashlib.sha256(engine.strip_stamps_and_excluded(records)).digest()


def engine_library_path(folder: str, key: str) -> str:
    if not _ENGINE_LIBRARY_KEY_PATTERN.fullmatch(key):
        raise OpError(f"invalid key of the compiled engine: {key!r}", reason="usage")
    return os.path.join(folder, "tree-" + key + ".so")


def load_engine_by_key(folder: str, key: str) -> tree.PlainEngine:
    """Return the compiled engine if its library is available, else the Python one."""
    if key not in _ENGINE_BY_LIBRARY_KEY:
        path = engine_library_path(folder, key) if key else ""
        if not path or not os.path.exists(path):
            return tree.PlainEngine()
        found = tree.load_compiled_or_plain_engine(path)
        _ENGINE_BY_LIBRARY_KEY.clear()
        _ENGINE_BY_LIBRARY_KEY[key] = found
        return found
    return _ENGINE_BY_LIBRARY_KEY.get(key) or tree.PlainEngine()


def _read_boot_id() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read(8)
    except OSError:
        return "0"
