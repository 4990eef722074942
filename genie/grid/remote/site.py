"""Where a node keeps what it knows of a tree that was sent to it: <remote_root>/.grid/sync/TREE.

`state` has the records of what we put there, `objects-*` what has arrived and is not in its place yet,
`journal` a change that was begun and must be finished, `lock` who is at it. Nothing is flushed to the
disk: after a power cut, sizes and times tell what is missing, and it is sent again.

Runs on nodes, so: standard library only, Python 3.8. Not for: the changes themselves (sync.py).
"""

from __future__ import annotations

import errno
import os
import re
import struct
import time

from genie.grid.remote import tree
from genie.grid.remote.contents import BLOCKS_BYTES_MIN
from genie.grid.remote.core import OpError
from genie.grid.remote.own_folder import NAME, own_folder

STATE_HEAD = struct.Struct("<8sq32s32s")  # magic, when it was looked at, digest of the plain records, rules
STATE_MAGIC = b"GGTREE2\n"
"""With the number of the format."""
_MAGIC_BEFORE = b"GGTREE1\n"
"""Large files were called by their SHA-256 as well."""
_TREE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
_KEY = re.compile(r"[0-9a-f]{16,64}")
_LOCK_STEP_S = 0.02
_ENGINES: dict[str, tree.Plain] = {}


class State:
    """What we put into a tree, as it was when we last looked."""

    def __init__(self, records: bytes = b"", *, taken_ns: int = 0, digest: bytes = b"") -> None:
        self.records, self.taken_ns, self.digest = records, taken_ns, digest


class Site:
    """One tree on this node. Use it as a context; it holds descriptors."""

    def __init__(self, args: dict[str, str], *, create: bool) -> None:
        """Raises FileNotFoundError where nothing was ever sent, unless it is to be created."""
        if not _TREE.fullmatch(args["tree"]):
            raise OpError("usage", "a tree cannot be named " + repr(args["tree"]))
        path = os.path.expanduser(args["root"])
        if create:
            os.makedirs(path, exist_ok=True)
        self._fds: list[int] = []
        self._is_locked = False
        try:
            self.root = self._kept(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
            own = self._own(path, create=create)
            self.shared = self._folder(own, "sync", create=create)
            self.folder = self._folder(self.shared, args["tree"], create=create)
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):
                held = {NAME: path, "sync": own_folder(path), args["tree"]: own_folder(path, "sync")}
                _name_whole(error, held.get(str(error.filename), ""))
            raise
        self.path = own_folder(path, "sync")
        self._where = os.path.join(self.path, args["tree"])
        self.engine = engine(self.path, args.get("key", ""))

    def __enter__(self) -> Site:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        while self._fds:
            os.close(self._fds.pop())

    def objects(self) -> int:
        """The folder for what arrives. What an earlier boot left there may be half-written, and goes."""
        name = "objects-" + _boot()
        for other in os.listdir(self.folder):
            if other.startswith("objects-") and other != name:
                self._remove_objects(other)
        return self._folder(self.folder, name, create=True)

    def _remove_objects(self, name: str) -> None:
        try:
            self.empty(self._folder(self.folder, name, create=False))
            os.rmdir(name, dir_fd=self.folder)
        except OSError as error:  # no folder, or something in it that is not ours: it is in nobody's way
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR, errno.ELOOP):
                raise

    def empty(self, folder: int) -> None:
        """Of files. A folder that someone else has made there stays."""
        for name in os.listdir(folder):
            try:
                os.unlink(name, dir_fd=folder)
            except (IsADirectoryError, PermissionError):  # which of them, depends on the system
                pass

    def state(self) -> State:
        """An empty one where there is none, or where what is there cannot be read any more."""
        data = self.read("state")
        if data is None:
            data = self.read("state.old")
        if data is None or len(data) < STATE_HEAD.size:
            return State()
        magic, taken_ns, digest, _ = STATE_HEAD.unpack_from(data)
        records = data[STATE_HEAD.size :]
        try:
            if magic not in (STATE_MAGIC, _MAGIC_BEFORE) or digest != digest_of(self.engine, records):
                return State()
            if magic == _MAGIC_BEFORE:
                records = _without_large(records)
                digest = digest_of(self.engine, records)
        except OSError:
            return State()
        return State(records, taken_ns=taken_ns, digest=digest)

    def write_state(self, records: bytes, *, taken_ns: int, digest: bytes, name: str = "state") -> None:
        data = STATE_HEAD.pack(STATE_MAGIC, taken_ns, digest, bytes(32)) + records
        self.write(name + ".whole", data)
        # Not over the old one: file systems then wait for the disk. In between, the old one counts.
        try:
            os.rename(name, name + ".old", src_dir_fd=self.folder, dst_dir_fd=self.folder)
        except FileNotFoundError:
            pass
        os.rename(name + ".whole", name, src_dir_fd=self.folder, dst_dir_fd=self.folder)

    def read(self, name: str) -> bytes | None:
        try:
            fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self.folder)
        except FileNotFoundError:
            return None
        with os.fdopen(fd, "rb") as file:
            return file.read()

    def write(self, name: str, data: bytes) -> None:
        """Whole or not at all."""
        made = name + ".part"
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(made, flags, 0o600, dir_fd=self.folder)
        try:
            tree.write_all(fd, data)
        except OSError:
            os.unlink(made, dir_fd=self.folder)
            raise
        finally:
            os.close(fd)
        os.rename(made, name, src_dir_fd=self.folder, dst_dir_fd=self.folder)

    def free_bytes(self) -> int:
        found = os.fstatvfs(self.folder)
        return found.f_bavail * found.f_frsize

    def remove(self, name: str) -> None:
        try:
            os.unlink(name, dir_fd=self.folder)
        except FileNotFoundError:
            pass

    def lock(self, *, wait_s: float) -> None:
        """Held until this is closed. Raises OpError ('busy') when another sync has it all that time."""
        import fcntl

        if self._is_locked:
            return
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            fd = self._kept(os.open("lock", flags, 0o600, dir_fd=self.folder))
        except OSError as error:
            _name_whole(error, self._where)
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
                raise OpError("busy", "another sync of this tree is under way")
            time.sleep(_LOCK_STEP_S)

    def _own(self, root: str, *, create: bool) -> int:
        path = own_folder(root)
        if not os.path.islink(path):
            return self._folder(self.root, NAME, create=create)
        own = self._kept(os.open(os.path.realpath(path), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
        if os.fstat(own).st_dev != os.fstat(self.root).st_dev:
            raise OpError("link", path + " leads to another file system, from which nothing can be renamed")
        return own

    def _folder(self, parent: int, name: str, *, create: bool) -> int:
        if create:
            try:
                os.mkdir(name, 0o700, dir_fd=parent)
            except FileExistsError:
                pass
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        return self._kept(os.open(name, flags, dir_fd=parent))

    def _kept(self, fd: int) -> int:
        self._fds.append(fd)
        return fd


def _without_large(records: bytes) -> bytes:
    """What is in large files is not known: they are sent once again, and all else is as we left it."""
    known = bytearray(records)
    for one in tree.records_of(records):
        if one.kind == tree.FILE and one.size >= BLOCKS_BYTES_MIN:
            known[one.at + tree.HEAD.size - len(tree.NO_SHA) : one.at + tree.HEAD.size] = tree.NO_SHA
    return bytes(known)


def _name_whole(error: OSError, folder: str) -> None:
    """What is opened beside a descriptor has half a name, which tells nobody where to look."""
    if isinstance(error.filename, str):
        error.filename = os.path.join(folder, error.filename)


def digest_of(engine: tree.Plain, records: bytes) -> bytes:
    import hashlib

    return hashlib.sha256(engine.plain(records)).digest()


def library_path(folder: str, key: str) -> str:
    if not _KEY.fullmatch(key):
        raise OpError("usage", "this is no key of a library")
    return os.path.join(folder, "tree-" + key + ".so")


def engine(folder: str, key: str) -> tree.Plain:
    """The compiled one, once it is here."""
    if key not in _ENGINES:
        path = library_path(folder, key) if key else ""
        if not path or not os.path.exists(path):
            return tree.Plain()
        found = tree.engine_at(path)
        _ENGINES.clear()
        _ENGINES[key] = found
        return found
    return _ENGINES.get(key) or tree.Plain()


def _boot() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read(8)
    except OSError:
        return "0"
