"""Trees of files as records: the format, and what is done with many small files at once.

A record is HEAD, path, link target, STAMP. Records are in the order of a walk: a folder, then what is in
it, names by their bytes. The stamp says what a clean file still looks like, as git's index does; two sides
agree on everything but stamps. `Plain` does the work in Python, `Compiled` in native/grid/tree.cpp, with
the same results; `engine_at()` gives the better one that there is. Links are never followed: every folder
is opened from its parent. Digests of contents are made in contents.py, whichever it is.

Runs on nodes and on this machine, so: standard library only, Python 3.8. Not for: deciding what is sent.
"""

from __future__ import annotations

import errno
import os
import stat
import struct
import sys
from typing import Any, Callable, Iterator  # noqa: UP035 - Callable[...] at run time needs Python 3.9

from genie.grid.remote.contents import is_sparse

HEAD = struct.Struct("<BBHHHQq32s")  # kind, flags, mode, path bytes, link bytes, size, mtime_ns, digest
STAMP = struct.Struct("<Qqq")  # inode, mtime_ns, ctime_ns; all zero: not known
FRAME = struct.Struct("<BBHIQq32s")  # kind, 0, mode, number, size, mtime_ns, digest; then `size` bytes
FOLDER, FILE, LINK, LEFT_OUT, REMOVED = b"dflxr"
RESERVED = (b".grid", b"grid_env")
"""Names at the top of a tree that are the grid's own on nodes: neither sent nor touched."""
NONE = (1 << 64) - 1
DEPTH_MAX = 256
PATH_BYTES_MAX = 4095
SMALL_BYTES_MAX = 256 << 10
"""Larger files are sent in pieces."""
NO_SHA = bytes(32)
NO_STAMP = bytes(STAMP.size)
_SECOND = 10**9
_TICK_NS = 20 * 10**6
_OPEN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_OPEN_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC

Decide = Callable[[bytes, bool], bool]
"""Whether a path, which may be a folder, is left out."""


class Record:
    """One record, read from `data` at `at`."""

    __slots__ = ("at", "data", "end", "flags", "kind", "link", "mode", "mtime_ns", "path", "sha", "size")

    def __init__(self, data: bytes | bytearray, at: int = 0) -> None:
        self.data, self.at = data, at
        self.kind, self.flags, self.mode, path_bytes, link_bytes, self.size, self.mtime_ns, self.sha = (
            HEAD.unpack_from(data, at)
        )
        path_at = at + HEAD.size
        link_at = path_at + path_bytes
        self.path = bytes(data[path_at:link_at])
        self.link = bytes(data[link_at : link_at + link_bytes])
        self.end = link_at + link_bytes + STAMP.size
        if self.end > len(data):
            raise OSError(errno.EBADMSG, "records that end too soon")

    @property
    def plain(self) -> bytes:
        """Without the stamp: what both sides agree on."""
        return bytes(self.data[self.at : self.end - STAMP.size])

    @property
    def stamp(self) -> bytes:
        return bytes(self.data[self.end - STAMP.size : self.end])

    @property
    def is_folder(self) -> bool:
        return bool(self.kind == FOLDER or (self.kind == LEFT_OUT and self.flags != 0))


def record(
    kind: int,
    path: bytes,
    *,
    mode: int = 0,
    flags: int = 0,
    size: int = 0,
    mtime_ns: int = 0,
    sha: bytes = NO_SHA,
    link: bytes = b"",
    stamp: bytes = NO_STAMP,
) -> bytes:
    return HEAD.pack(kind, flags, mode, len(path), len(link), size, mtime_ns, sha) + path + link + stamp


def records_of(data: bytes) -> Iterator[Record]:
    """Raises OSError (EBADMSG) for what is no list of records."""
    at = 0
    while at < len(data):
        if len(data) - at < HEAD.size:
            raise OSError(errno.EBADMSG, "records that end too soon")
        one = Record(data, at)
        yield one
        at = one.end


def order(path: bytes) -> bytes:
    """Sorting by this is the order of a walk."""
    return path.replace(b"/", b"\0")


def stamp_of(found: os.stat_result) -> bytes:
    return STAMP.pack(found.st_ino, found.st_mtime_ns, found.st_ctime_ns)


def is_racy(stamp: bytes, taken_ns: int) -> bool:
    """Written so shortly before it was looked at that a later write may have left the same times."""
    _, mtime_ns, ctime_ns = STAMP.unpack(stamp)
    whole = mtime_ns % _SECOND == 0 and ctime_ns % _SECOND == 0
    return bool(max(mtime_ns, ctime_ns) + (2 * _SECOND if whole else _TICK_NS) >= taken_ns)


def unstamped(data: bytes | bytearray, at: int) -> bytes:
    """The record at this place with no stamp: quicker than reading all of it."""
    end = at + HEAD.size + int.from_bytes(data[at + 4 : at + 6], "little")
    return bytes(data[at : end + int.from_bytes(data[at + 6 : at + 8], "little")]) + NO_STAMP


def size_at(data: bytes | bytearray, at: int) -> int:
    return int.from_bytes(data[at + 8 : at + 16], "little")


def sha_at(data: bytes | bytearray, at: int) -> bytes:
    return bytes(data[at + 24 : at + 56])


def object_name(sha: bytes, size: int) -> bytes:
    """With its size: an object that is shorter was never finished."""
    return b"%s.%x" % (sha.hex().encode(), size)


class Walked:
    """What a walk found. `dirty` has the places of files whose contents are not known."""

    def __init__(
        self, records: bytes, dirty: list[int], *, is_same: bool, rules_changed: bool, skipped: int
    ) -> None:
        self.records, self.dirty = records, dirty
        self.is_same, self.rules_changed, self.skipped = is_same, rules_changed, skipped


class Folders:
    """The folder of a path, opened step by step from the root. Neighbours in a walk share the steps."""

    def __init__(self, root: int) -> None:
        self._steps = [(b"", root)]

    def __enter__(self) -> Folders:
        return self

    def __exit__(self, *_: object) -> None:
        while len(self._steps) > 1:
            os.close(self._steps.pop()[1])

    def holder(self, path: bytes) -> tuple[int, bytes]:
        """The descriptor of the folder that holds it (ours to close), and its last name. Raises OSError."""
        if len(path) > PATH_BYTES_MAX:
            raise _os_error(errno.ENAMETOOLONG, path)
        folder, _, name = path.rpartition(b"/")
        _check_name(name, path)
        while len(self._steps) > 1 and not (folder + b"/").startswith(self._steps[-1][0] + b"/"):
            os.close(self._steps.pop()[1])
        top = self._steps[-1][0]
        if folder != top:
            for part in folder[len(top) + 1 if top else 0 :].split(b"/"):
                self._step(part, path)
        return self._steps[-1][1], name

    def _step(self, name: bytes, path: bytes) -> None:
        _check_name(name, path)
        if len(self._steps) >= DEPTH_MAX:
            raise _os_error(errno.ENAMETOOLONG, path)
        top, fd = self._steps[-1]
        try:
            inner = os.open(name, _OPEN_FOLDER, dir_fd=fd)
        except OSError as error:
            raise _os_error(error.errno or 0, path) from None
        self._steps.append((top + b"/" + name if top else name, inner))

    def look(self, path: bytes) -> os.stat_result | None:
        """None where nothing is, or where a link or a file stands in the way."""
        try:
            fd, name = self.holder(path)
            return os.stat(name, dir_fd=fd, follow_symlinks=False)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
                return None
            raise


def _check_name(name: bytes, path: bytes) -> None:
    if name in (b"", b".", b"..") or b"\0" in name:
        raise _os_error(errno.EINVAL, path)


def _os_error(number: int, path: bytes) -> OSError:
    return OSError(number, os.strerror(number), os.fsdecode(path))


class Plain:
    """Everything in Python, for where there is no compiler."""

    name = "plain"

    def walk(
        self, root: str, old: bytes, *, taken_ns: int, reuse: bool, decide: Decide, follow: bool = False
    ) -> Walked:
        """Records of all that is in `root`. `old` are those of an earlier walk, begun at `taken_ns`.

        Their contents are taken over where nothing says otherwise, and with `reuse` also what is left out.
        Raises OSError with the path.
        """
        return _Walk(root, old, taken_ns=taken_ns, reuse=reuse, decide=decide, follow=follow).run()

    def read(
        self, root: int, records: bytes, places: list[int], *, first: int, room: int
    ) -> tuple[bytearray, list[int]]:
        """Frames of small files, as many as fit, and for each file 0, or 1 if it needs the slow path."""
        frames, states = bytearray(), []
        with Folders(root) as folders:
            for number, place in enumerate(places, first):
                one = Record(records, place)
                if one.size <= SMALL_BYTES_MAX and len(frames) + FRAME.size + one.size > room:
                    break
                data = _read_small(folders, one) if one.size <= SMALL_BYTES_MAX else None
                states.append(int(data is None))
                if data is not None:
                    frames += FRAME.pack(ord("F"), 0, one.mode, number, one.size, one.mtime_ns, NO_SHA)
                    frames += data
        return frames, states

    def stage(self, objects: int, data: bytes | bytearray | memoryview) -> tuple[int, int]:
        """Writes the whole frames at the beginning: how far it came, and how many there were."""
        at = count = 0
        while len(data) - at >= FRAME.size:
            kind, _, mode, _, size, mtime_ns, sha = FRAME.unpack_from(data, at)
            begin = at + FRAME.size
            if kind != ord("F") or size > len(data) - begin:
                break
            _stage_one(objects, object_name(sha, size), data[begin : begin + size], mode, mtime_ns)
            at, count = begin + size, count + 1
        return at, count

    def place(self, root: int, objects: int, records: bytes) -> None:
        """Makes folders and moves objects to where their records say. Raises OSError with the path."""
        with Folders(root) as folders:
            for one in records_of(records):
                place_one(folders, objects, one, object_name(one.sha, one.size))

    def check(self, root: int, records: bytes, *, taken_ns: int) -> list[int]:
        """The places of records that do not match what is there."""
        with Folders(root) as folders:
            return [one.at for one in records_of(records) if not _is_untouched(folders, one, taken_ns)]

    def stamped(self, root: int, records: bytes) -> bytes:
        """The records, where those without a stamp have the one of what is there now."""
        parts = []
        with Folders(root) as folders:
            for one in records_of(records):
                stamp = one.stamp
                if one.kind != FOLDER and stamp[:8] == NO_STAMP[:8]:
                    found = folders.look(one.path)
                    stamp = NO_STAMP if found is None else stamp_of(found)
                parts += [one.plain, stamp]
        return b"".join(parts)

    def compare(self, old: bytes, now: bytes) -> list[tuple[int, int]]:
        """Places of records that differ, NONE where one side has none."""
        before = {one.path: one for one in records_of(old) if one.kind != LEFT_OUT}
        after = {one.path: one for one in records_of(now) if one.kind != LEFT_OUT}
        found = []
        for path in sorted(before.keys() | after.keys(), key=order):
            a, b = before.get(path), after.get(path)
            if a is None or b is None or a.plain != b.plain:
                found.append((NONE if a is None else a.at, NONE if b is None else b.at))
        return found

    def merge(self, old: bytes, changes: bytes) -> bytes:
        """The records of `old` with those of `changes` in their place; REMOVED takes one away."""
        merged = {one.path: bytes(one.data[one.at : one.end]) for one in records_of(old)}
        for one in records_of(changes):
            if one.kind == REMOVED:
                merged.pop(one.path, None)
            else:
                merged[one.path] = bytes(one.data[one.at : one.end])
        return b"".join(merged[path] for path in sorted(merged, key=order))

    def plain(self, records: bytes) -> bytes:
        """Without stamps and without what is left out: what both sides must agree on."""
        return b"".join(one.plain for one in records_of(records) if one.kind != LEFT_OUT)


class _Walk:
    def __init__(
        self, root: str, old: bytes, *, taken_ns: int, reuse: bool, decide: Decide, follow: bool
    ) -> None:
        self._root = os.fsencode(root)
        self._old_bytes = old
        self._old = {one.path: one for one in records_of(old)}
        self._taken_ns, self._reuse, self._decide, self._follow = taken_ns, reuse, decide, follow
        self._real = os.path.realpath(self._root)
        self._parts: list[bytes] = []
        self._size = self._skipped = 0
        self._dirty: list[int] = []
        self._rules_seen: set[bytes] = set()
        self._rules_changed = False

    def run(self) -> Walked:
        fd = os.open(self._root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._folder(fd, b"", 0)
        for path, one in self._old.items():
            if path.rpartition(b"/")[2] == b".gitignore" and _had_rules(one):
                self._rules_changed |= path not in self._rules_seen
        records = b"".join(self._parts)
        return Walked(
            records,
            self._dirty,
            is_same=not self._dirty and records == self._old_bytes,
            rules_changed=self._rules_changed,
            skipped=self._skipped,
        )

    def _folder(self, fd: int, path: bytes, depth: int) -> None:
        try:
            names = sorted(map(os.fsencode, os.listdir(fd)))
            for name in names:
                if depth or name not in RESERVED:
                    self._entry(fd, name, path + b"/" + name if path else name, depth)
        finally:
            os.close(fd)

    def _entry(self, fd: int, name: bytes, path: bytes, depth: int) -> None:
        if len(path) > PATH_BYTES_MAX or depth + 1 >= DEPTH_MAX:
            raise _os_error(errno.ENAMETOOLONG, path.rpartition(b"/")[0])
        try:
            found = os.stat(name, dir_fd=fd, follow_symlinks=False)
        except FileNotFoundError:
            return
        inside = self._followed(path) if self._follow and stat.S_ISLNK(found.st_mode) else None
        if inside is not None:
            found = inside
        is_folder, is_file = stat.S_ISDIR(found.st_mode), stat.S_ISREG(found.st_mode)
        if not is_folder and not is_file and not stat.S_ISLNK(found.st_mode):
            self._skipped += 1
            return
        old = self._old.get(path)
        is_rules = is_file and name == b".gitignore"
        if is_rules:
            self._rules_seen.add(path)
            self._rules_changed |= old is None or old.is_folder or old.stamp != stamp_of(found)
        if self._is_left_out(old, path, is_folder):
            stamp = stamp_of(found) if is_rules else NO_STAMP
            self._add(record(LEFT_OUT, path, flags=int(is_folder), stamp=stamp))
        elif is_file:
            self._add_file(old, path, found)
        elif not is_folder:
            link = os.fsencode(os.readlink(name, dir_fd=fd))
            self._add(record(LINK, path, mode=0o777, link=link, stamp=stamp_of(found)))
        else:
            self._add_folder(fd, name, path, found, depth, is_linked=inside is not None)

    def _followed(self, path: bytes) -> os.stat_result | None:
        """What a link within the tree points to; None for one that leads out, nowhere or in a circle."""
        real = os.path.realpath(os.path.join(self._root, path))
        here = os.path.realpath(os.path.join(self._root, os.path.dirname(path)))
        if not real.startswith(self._real + b"/") or (here + b"/").startswith(real + b"/"):
            return None
        try:
            return os.stat(real, follow_symlinks=False)
        except OSError:
            return None

    def _is_left_out(self, old: Record | None, path: bytes, is_folder: bool) -> bool:
        if self._reuse and old is not None and old.is_folder == is_folder:
            return bool(old.kind == LEFT_OUT)
        return self._decide(path, is_folder)

    def _add_file(self, old: Record | None, path: bytes, found: os.stat_result) -> None:
        stamp = stamp_of(found)
        clean = old is not None and old.kind == FILE and old.size == found.st_size and old.stamp == stamp
        clean = clean and not is_racy(stamp, self._taken_ns)
        if not clean:
            self._dirty.append(self._size)
        mode = stat.S_IMODE(found.st_mode)
        sha = old.sha if clean and old is not None else NO_SHA
        self._add(
            record(
                FILE, path, mode=mode, size=found.st_size, mtime_ns=found.st_mtime_ns, sha=sha, stamp=stamp
            )
        )

    def _add_folder(
        self, fd: int, name: bytes, path: bytes, found: os.stat_result, depth: int, *, is_linked: bool
    ) -> None:
        try:
            if is_linked:
                inner = os.open(os.path.realpath(os.path.join(self._root, path)), _OPEN_FOLDER)
            else:
                inner = os.open(name, _OPEN_FOLDER, dir_fd=fd)
        except FileNotFoundError:
            return
        except OSError as error:
            raise _os_error(error.errno or 0, path) from None
        self._add(record(FOLDER, path, mode=stat.S_IMODE(found.st_mode)))
        self._folder(inner, path, depth + 1)

    def _add(self, one: bytes) -> None:
        self._parts.append(one)
        self._size += len(one)


def _had_rules(one: Record) -> bool:
    """Of a record that is named like one: whether it was a file. One that is left out has a stamp then."""
    return one.kind == FILE or (one.kind == LEFT_OUT and one.stamp[:8] != NO_STAMP[:8])


def _read_small(folders: Folders, one: Record) -> bytes | None:
    try:
        holder, name = folders.holder(one.path)
        fd = os.open(name, _OPEN_FILE, dir_fd=holder)
    except OSError:
        return None
    try:
        before = os.fstat(fd)
        if not is_as_recorded(before, one) or is_sparse(before):
            return None
        data = bytearray()
        while len(data) < one.size:
            part = os.read(fd, one.size - len(data))
            if not part:
                return None
            data += part
        return bytes(data) if is_as_recorded(os.fstat(fd), one) else None
    except OSError:
        return None
    finally:
        os.close(fd)


def is_as_recorded(found: os.stat_result, one: Record) -> bool:
    return stat.S_ISREG(found.st_mode) and found.st_size == one.size and stamp_of(found) == one.stamp


def _stage_one(
    objects: int, name: bytes, data: bytes | bytearray | memoryview, mode: int, mtime_ns: int
) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        fd = os.open(name, flags, mode & 0o777, dir_fd=objects)
    except FileExistsError:
        return
    try:
        write_all(fd, data)
        os.utime(fd, ns=(mtime_ns, mtime_ns))
    except OSError:
        os.unlink(name, dir_fd=objects)
        raise
    finally:
        os.close(fd)


def write_all(fd: int, data: bytes | bytearray | memoryview) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def place_one(folders: Folders, objects: int, one: Record, name_of_object: bytes) -> None:
    """A folder is made, a file is moved; one that is in its place already is left there."""
    fd, name = folders.holder(one.path)
    try:
        if one.kind == FOLDER:
            _place_folder(fd, name)
            return
        try:
            found = os.stat(name_of_object, dir_fd=objects, follow_symlinks=False)
        except FileNotFoundError:
            if not _is_placed(folders.look(one.path), one):
                raise
            return
        if stat.S_IMODE(found.st_mode) != one.mode:
            os.chmod(name_of_object, one.mode, dir_fd=objects)
        if found.st_mtime_ns != one.mtime_ns:
            os.utime(name_of_object, ns=(one.mtime_ns, one.mtime_ns), dir_fd=objects, follow_symlinks=False)
        os.rename(name_of_object, name, src_dir_fd=objects, dst_dir_fd=fd)
    except OSError as error:
        raise _os_error(error.errno or 0, one.path) from None


def _place_folder(fd: int, name: bytes) -> None:
    try:
        os.mkdir(name, 0o700, dir_fd=fd)
    except FileExistsError:
        if not stat.S_ISDIR(os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR)) from None


def _is_placed(found: os.stat_result | None, one: Record) -> bool:
    if found is None or not stat.S_ISREG(found.st_mode):
        return False
    return (found.st_size, found.st_mtime_ns) == (one.size, one.mtime_ns)


def _is_untouched(folders: Folders, one: Record, taken_ns: int) -> bool:
    found = folders.look(one.path)
    if found is None:
        return False
    if one.kind == FOLDER:
        return stat.S_ISDIR(found.st_mode) and stat.S_IMODE(found.st_mode) == one.mode
    kind = stat.S_IFREG if one.kind == FILE else stat.S_IFLNK
    if stat.S_IFMT(found.st_mode) != kind or stamp_of(found) != one.stamp:
        return False
    if one.kind == LINK:
        return True
    right = found.st_size == one.size and stat.S_IMODE(found.st_mode) == one.mode
    return right and not is_racy(one.stamp, taken_ns)


_WHERE_BYTES = 4104


class Compiled(Plain):
    """native/grid/tree.cpp through ctypes. Raises OSError where the file cannot be loaded."""

    name = "compiled"

    def __init__(self, path: str) -> None:
        import ctypes

        if sys.byteorder != "little":
            raise OSError(errno.ENOEXEC, "records are little-endian")

        class Out(ctypes.Structure):
            _fields_ = (
                ("data", ctypes.c_void_p),
                ("size", ctypes.c_uint64),
                ("list", ctypes.POINTER(ctypes.c_uint64)),
                ("count", ctypes.c_uint64),
                ("skipped", ctypes.c_uint64),
                ("is_same", ctypes.c_int32),
                ("rules_changed", ctypes.c_int32),
                ("error", ctypes.c_int32),
                ("where", ctypes.c_char * _WHERE_BYTES),
            )

        self._ctypes = ctypes
        self._out = Out
        self._decide = ctypes.CFUNCTYPE(
            ctypes.c_int32, ctypes.POINTER(ctypes.c_char), ctypes.c_uint64, ctypes.c_int32
        )
        self._library = ctypes.CDLL(path)
        self._library.genie_free.restype = None

    def _call(self, function: str, *args: Any) -> tuple[Any, bytes, list[int]]:
        """Gives what was filled in, with copies of its data and its list. Raises OSError."""
        out = self._out()
        status = getattr(self._library, function)(*args, self._ctypes.byref(out))
        try:
            if status != 0:
                number = max(out.error, 0)
                raise OSError(number, os.strerror(number), os.fsdecode(out.where))
            data = self._ctypes.string_at(out.data, out.size) if out.data else b""
            return out, data, out.list[: out.count] if out.list else []
        finally:
            self._library.genie_free(self._ctypes.byref(out))

    def _u64(self, number: int) -> Any:
        return self._ctypes.c_uint64(number)

    def walk(
        self, root: str, old: bytes, *, taken_ns: int, reuse: bool, decide: Decide, follow: bool = False
    ) -> Walked:
        if follow:
            return Plain.walk(self, root, old, taken_ns=taken_ns, reuse=reuse, decide=decide, follow=True)
        failure: BaseException | None = None

        def asked(path: Any, path_bytes: int, is_folder: int) -> int:
            nonlocal failure
            try:
                return int(decide(path[:path_bytes], bool(is_folder)))
            except BaseException as error:  # it is raised again below; C++ cannot carry it
                failure = error
                return -1

        taken = self._ctypes.c_int64(taken_ns)
        callback = self._decide(asked)
        try:
            out, records, dirty = self._call(
                "genie_walk", os.fsencode(root), old, self._u64(len(old)), taken, int(reuse), callback
            )
        except OSError:
            if failure is not None:
                raise failure from None
            raise
        return Walked(
            records,
            dirty,
            is_same=bool(out.is_same),
            rules_changed=bool(out.rules_changed),
            skipped=int(out.skipped),
        )

    def read(
        self, root: int, records: bytes, places: list[int], *, first: int, room: int
    ) -> tuple[bytearray, list[int]]:
        count = len(places)
        frames = bytearray(room)
        held = (self._ctypes.c_char * room).from_buffer(frames)
        listed = (self._ctypes.c_uint64 * count)(*places)
        out, _, states = self._call(
            "genie_read", root, records, listed, self._u64(count), first, held, self._u64(room)
        )
        del held
        del frames[out.size :]
        return frames, states

    def stage(self, objects: int, data: bytes | bytearray | memoryview) -> tuple[int, int]:
        passed: Any = data
        if isinstance(data, (bytearray, memoryview)):
            passed = (self._ctypes.c_char * len(data)).from_buffer(data)
        out = self._out()
        if self._library.genie_stage(objects, passed, self._u64(len(data)), self._ctypes.byref(out)) != 0:
            raise OSError(out.error, os.strerror(out.error), os.fsdecode(out.where))
        return int(out.size), int(out.count)

    def place(self, root: int, objects: int, records: bytes) -> None:
        self._call("genie_place", root, objects, records, self._u64(len(records)))

    def check(self, root: int, records: bytes, *, taken_ns: int) -> list[int]:
        taken = self._ctypes.c_int64(taken_ns)
        return self._call("genie_check", root, records, self._u64(len(records)), taken, 0)[2]

    def stamped(self, root: int, records: bytes) -> bytes:
        copy = self._ctypes.create_string_buffer(records, len(records))
        self._call("genie_check", root, copy, self._u64(len(records)), self._ctypes.c_int64(0), 1)
        return copy.raw

    def compare(self, old: bytes, now: bytes) -> list[tuple[int, int]]:
        found = self._call("genie_compare", old, self._u64(len(old)), now, self._u64(len(now)))[2]
        return list(zip(found[::2], found[1::2]))  # noqa: B905 - Python 3.10 has strict

    def merge(self, old: bytes, changes: bytes) -> bytes:
        return self._call("genie_merge", old, self._u64(len(old)), changes, self._u64(len(changes)))[1]

    def plain(self, records: bytes) -> bytes:
        return self._call("genie_plain", records, self._u64(len(records)))[1]


def engine_at(path: str | None) -> Plain:
    """The compiled one where it can be loaded."""
    if path is not None:
        try:
            return Compiled(path)
        except (OSError, AttributeError, ImportError):
            pass
    return Plain()
