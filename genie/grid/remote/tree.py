"""File trees as records: the format, and operations on many small files.

A record is RECORD_HEADER, path, link target, STAMP_STRUCT. Records are in walk order: a directory, then its
contents, names sorted by bytes. The stamp identifies an unchanged file, like git's index; both sides agree
on everything but stamps. `PlainEngine` is implemented in Python, `CompiledEngine` in native/grid/tree.cpp,
with equal results; `load_compiled_or_plain_engine()` returns the compiled one if it can be loaded. Symbolic
links are never followed: every directory is opened from its parent. contents.py computes digests.

Runs on nodes and on this machine: standard library only, Python 3.8. Does not decide what is sent.
"""

from __future__ import annotations

import errno
import os
import stat
import struct
import sys
from typing import Any, Callable, Iterator  # noqa: UP035 - Callable[...] at run time needs Python 3.9

from genie.grid.remote.contents import is_sparse

RECORD_HEADER = struct.Struct(
    "<BBHHHQq32s"
)  # kind, flags, mode, path bytes, link bytes, size, mtime_ns, digest
STAMP_STRUCT = struct.Struct("<Qqq")  # inode, mtime_ns, ctime_ns; all zero: not known
FRAME_HEADER = struct.Struct("<BBHIQq32s")  # kind, 0, mode, number, size, mtime_ns, digest; then `size` bytes
FOLDER, FILE, LINK, EXCLUDED, REMOVED = b"dflxr"
RESERVED_NAMES = (b".grid", b"grid_env")
"""Names at the top of a tree that the grid uses on nodes: neither sent nor changed."""
NO_RECORD_OFFSET = (1 << 64) - 1
TREE_DEPTH_MAX = 256
PATH_BYTES_MAX = 4095
SMALL_FILE_BYTES_MAX = 256 << 10
"""Larger files are sent in pieces."""
NO_SHA = bytes(32)
NO_STAMP = bytes(STAMP_STRUCT.size)
_SECOND_NS = 10**9
_CLOCK_TICK_NS = 20 * 10**6
_OPEN_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_OPEN_FILE_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC

IsExcluded = Callable[[bytes, bool], bool]
"""Returns whether a path is excluded; the flag is True for a directory."""


class TreeRecord:
    """One record, read from `data` at `at`."""

    __slots__ = (
        "at",
        "data",
        "end_offset",
        "flags",
        "kind",
        "link",
        "mode",
        "mtime_ns",
        "path",
        "sha",
        "size",
    )

    def __init__(self, data: bytes | bytearray, at: int = 0) -> None:
        self.data, self.at = data, at
        self.kind, self.flags, self.mode, path_bytes, link_bytes, self.size, self.mtime_ns, self.sha = (
            RECORD_HEADER.unpack_from(data, at)
        )
        path_at = at + RECORD_HEADER.size
        link_at = path_at + path_bytes
        self.path = bytes(data[path_at:link_at])
        self.link = bytes(data[link_at : link_at + link_bytes])
        self.end_offset = link_at + link_bytes + STAMP_STRUCT.size
        if self.end_offset > len(data):
            raise OSError(errno.EBADMSG, "truncated records")

    @property
    def without_stamp(self) -> bytes:
        """The record without its stamp, which both sides agree on."""
        return bytes(self.data[self.at : self.end_offset - STAMP_STRUCT.size])

    @property
    def stamp(self) -> bytes:
        return bytes(self.data[self.end_offset - STAMP_STRUCT.size : self.end_offset])

    @property
    def is_folder(self) -> bool:
        return bool(self.kind == FOLDER or (self.kind == EXCLUDED and self.flags != 0))


def pack_record(
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
    return (
        RECORD_HEADER.pack(kind, flags, mode, len(path), len(link), size, mtime_ns, sha) + path + link + stamp
    )


def iter_records(data: bytes) -> Iterator[TreeRecord]:
    """Iterate over records. Raises OSError (EBADMSG) if they are truncated."""
    at = 0
    while at < len(data):
        if len(data) - at < RECORD_HEADER.size:
            raise OSError(errno.EBADMSG, "truncated records")
        one = TreeRecord(data, at)
        yield one
        at = one.end_offset


def walk_order_key(path: bytes) -> bytes:
    """Sort key for walk order."""
    return path.replace(b"/", b"\0")


def pack_stamp(found: os.stat_result) -> bytes:
    return STAMP_STRUCT.pack(found.st_ino, found.st_mtime_ns, found.st_ctime_ns)


def is_too_recent_to_trust(stamp: bytes, taken_ns: int) -> bool:
    """True if the file was written so shortly before the scan that a later write may have the same times."""
    _, mtime_ns, ctime_ns = STAMP_STRUCT.unpack(stamp)
    whole = mtime_ns % _SECOND_NS == 0 and ctime_ns % _SECOND_NS == 0
    return bool(max(mtime_ns, ctime_ns) + (2 * _SECOND_NS if whole else _CLOCK_TICK_NS) >= taken_ns)


def record_with_empty_stamp(data: bytes | bytearray, at: int) -> bytes:
    """Return the record at this offset with an empty stamp, without parsing all of it."""
    end = at + RECORD_HEADER.size + int.from_bytes(data[at + 4 : at + 6], "little")
    return bytes(data[at : end + int.from_bytes(data[at + 6 : at + 8], "little")]) + NO_STAMP


def file_size_of_record(data: bytes | bytearray, at: int) -> int:
    return int.from_bytes(data[at + 8 : at + 16], "little")


def file_sha_of_record(data: bytes | bytearray, at: int) -> bytes:
    return bytes(data[at + 24 : at + 56])


def staged_file_name(sha: bytes, size: int) -> bytes:
    """Return the name of a staged file, with its size, by which incomplete ones are detected."""
    return b"%s.%x" % (sha.hex().encode(), size)


class WalkResult:
    """The result of a walk. `unhashed_offsets` has the offsets of records of files with unknown contents."""

    def __init__(
        self,
        records: bytes,
        unhashed_offsets: list[int],
        *,
        is_unchanged: bool,
        rules_changed: bool,
        skipped_count: int,
    ) -> None:
        self.records, self.unhashed_offsets = records, unhashed_offsets
        self.is_unchanged, self.rules_changed, self.skipped_count = is_unchanged, rules_changed, skipped_count


class OpenDirectories:
    """Opens the directory of a path, step by step from the root. Consecutive paths share open directories."""

    def __init__(self, root: int) -> None:
        self._open_path_and_fd_stack = [(b"", root)]

    def __enter__(self) -> OpenDirectories:
        return self

    def __exit__(self, *_: object) -> None:
        while len(self._open_path_and_fd_stack) > 1:
            os.close(self._open_path_and_fd_stack.pop()[1])

    def open_parent(self, path: bytes) -> tuple[int, bytes]:
        """Return the descriptor of the parent directory (owned by self) and the name. Raises OSError."""
        if len(path) > PATH_BYTES_MAX:
            raise _os_error_for_path(errno.ENAMETOOLONG, path)
        folder, _, name = path.rpartition(b"/")
        _check_path_component(name, path)
        while len(self._open_path_and_fd_stack) > 1 and not (folder + b"/").startswith(
            self._open_path_and_fd_stack[-1][0] + b"/"
        ):
            os.close(self._open_path_and_fd_stack.pop()[1])
        top = self._open_path_and_fd_stack[-1][0]
        if folder != top:
            for part in folder[len(top) + 1 if top else 0 :].split(b"/"):
                self._open_next_component(part, path)
        return self._open_path_and_fd_stack[-1][1], name

    def _open_next_component(self, name: bytes, path: bytes) -> None:
        _check_path_component(name, path)
        if len(self._open_path_and_fd_stack) >= TREE_DEPTH_MAX:
            raise _os_error_for_path(errno.ENAMETOOLONG, path)
        top, fd = self._open_path_and_fd_stack[-1]
        try:
            inner = os.open(name, _OPEN_FOLDER_FLAGS, dir_fd=fd)
        except OSError as error:
            raise _os_error_for_path(error.errno or 0, path) from None
        self._open_path_and_fd_stack.append((top + b"/" + name if top else name, inner))

    def try_lstat(self, path: bytes) -> os.stat_result | None:
        """Return the lstat of a path; None if it or a parent directory does not exist."""
        try:
            fd, name = self.open_parent(path)
            return os.stat(name, dir_fd=fd, follow_symlinks=False)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
                return None
            raise


def _check_path_component(name: bytes, path: bytes) -> None:
    if name in (b"", b".", b"..") or b"\0" in name:
        raise _os_error_for_path(errno.EINVAL, path)


def _os_error_for_path(number: int, path: bytes) -> OSError:
    return OSError(number, os.strerror(number), os.fsdecode(path))


class PlainEngine:
    """The engine in Python, for machines without a compiler."""

    name = "plain"

    def walk(
        self,
        root: str,
        old: bytes,
        *,
        taken_ns: int,
        reuse: bool,
        is_excluded: IsExcluded,
        follow: bool = False,
    ) -> WalkResult:
        """Return records of all files below `root`. `old` are those of a walk that started at `taken_ns`.

        Digests of unchanged files are reused, and with `reuse` also whether a path is excluded. Raises
        OSError with the path.
        """
        return _TreeWalk(
            root, old, taken_ns=taken_ns, reuse=reuse, is_excluded=is_excluded, follow=follow
        ).run()

    def read_small_files(
        self, root: int, records: bytes, places: list[int], *, first: int, room: int
    ) -> tuple[bytearray, list[int]]:
        """Return frames of small files, as many as fit, and per file 0, or 1 if it needs the slow path."""
        frames, states = bytearray(), []
        with OpenDirectories(root) as folders:
            for number, place in enumerate(places, first):
                one = TreeRecord(records, place)
                if one.size <= SMALL_FILE_BYTES_MAX and len(frames) + FRAME_HEADER.size + one.size > room:
                    break
                data = _read_small_file(folders, one) if one.size <= SMALL_FILE_BYTES_MAX else None
                states.append(int(data is None))
                if data is not None:
                    frames += FRAME_HEADER.pack(ord("F"), 0, one.mode, number, one.size, one.mtime_ns, NO_SHA)
                    frames += data
        return frames, states

    def stage_files(self, staging_fd: int, data: bytes | bytearray | memoryview) -> tuple[int, int]:
        """Write the complete frames at the beginning; returns the bytes consumed and the number of frames."""
        at = count = 0
        while len(data) - at >= FRAME_HEADER.size:
            kind, _, mode, _, size, mtime_ns, sha = FRAME_HEADER.unpack_from(data, at)
            begin = at + FRAME_HEADER.size
            if kind != ord("F") or size > len(data) - begin:
                break
            _stage_file(staging_fd, staged_file_name(sha, size), data[begin : begin + size], mode, mtime_ns)
            at, count = begin + size, count + 1
        return at, count

    def move_into_place(self, root: int, staging_fd: int, records: bytes) -> None:
        """Create directories and move staged files to the paths of their records. Raises OSError."""
        with OpenDirectories(root) as folders:
            for one in iter_records(records):
                move_entry_into_place(folders, staging_fd, one, staged_file_name(one.sha, one.size))

    def find_mismatch_offsets(self, root: int, records: bytes, *, taken_ns: int) -> list[int]:
        """Return the offsets of records that do not match the files."""
        with OpenDirectories(root) as folders:
            return [one.at for one in iter_records(records) if not _is_file_unchanged(folders, one, taken_ns)]

    def fill_in_stamps(self, root: int, records: bytes) -> bytes:
        """Return the records with missing stamps filled in from the files."""
        parts = []
        with OpenDirectories(root) as folders:
            for one in iter_records(records):
                stamp = one.stamp
                if one.kind != FOLDER and stamp[:8] == NO_STAMP[:8]:
                    found = folders.try_lstat(one.path)
                    stamp = NO_STAMP if found is None else pack_stamp(found)
                parts += [one.without_stamp, stamp]
        return b"".join(parts)

    def compare_records(self, old: bytes, now: bytes) -> list[tuple[int, int]]:
        """Return pairs of offsets of records that differ; NO_RECORD_OFFSET if one side has no record."""
        before = {one.path: one for one in iter_records(old) if one.kind != EXCLUDED}
        after = {one.path: one for one in iter_records(now) if one.kind != EXCLUDED}
        found = []
        for path in sorted(before.keys() | after.keys(), key=walk_order_key):
            a, b = before.get(path), after.get(path)
            if a is None or b is None or a.without_stamp != b.without_stamp:
                found.append(
                    (NO_RECORD_OFFSET if a is None else a.at, NO_RECORD_OFFSET if b is None else b.at)
                )
        return found

    def merge_records(self, old: bytes, changes: bytes) -> bytes:
        """Return `old` with the records of `changes` replaced or added; REMOVED removes a record."""
        merged = {one.path: bytes(one.data[one.at : one.end_offset]) for one in iter_records(old)}
        for one in iter_records(changes):
            if one.kind == REMOVED:
                merged.pop(one.path, None)
            else:
                merged[one.path] = bytes(one.data[one.at : one.end_offset])
        return b"".join(merged[path] for path in sorted(merged, key=walk_order_key))

    def strip_stamps_and_excluded(self, records: bytes) -> bytes:
        """Return the records without stamps and excluded paths, which both sides must agree on."""
        return b"".join(one.without_stamp for one in iter_records(records) if one.kind != EXCLUDED)


class _TreeWalk:
    def __init__(
        self, root: str, old: bytes, *, taken_ns: int, reuse: bool, is_excluded: IsExcluded, follow: bool
    ) -> None:
        self._root = os.fsencode(root)
        self._old_records_bytes = old
        self._old_record_by_path = {one.path: one for one in iter_records(old)}
        self._taken_ns, self._reuses_old, self._is_path_excluded, self._follows_links = (
            taken_ns,
            reuse,
            is_excluded,
            follow,
        )
        self._resolved_root = os.path.realpath(self._root)
        self._packed_records: list[bytes] = []
        self._packed_bytes = self._skipped_count = 0
        self._unhashed_offsets: list[int] = []
        self._gitignores_seen: set[bytes] = set()
        self._ignore_rules_changed = False

    def run(self) -> WalkResult:
        fd = os.open(self._root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._walk_folder(fd, b"", 0)
        for path, one in self._old_record_by_path.items():
            if path.rpartition(b"/")[2] == b".gitignore" and _was_gitignore(one):
                self._ignore_rules_changed |= path not in self._gitignores_seen
        records = b"".join(self._packed_records)
        return WalkResult(
            records,
            self._unhashed_offsets,
            is_unchanged=not self._unhashed_offsets and records == self._old_records_bytes,
            rules_changed=self._ignore_rules_changed,
            skipped_count=self._skipped_count,
        )

    def _walk_folder(self, fd: int, path: bytes, depth: int) -> None:
        try:
            names = sorted(map(os.fsencode, os.listdir(fd)))
            for name in names:
                if depth or name not in RESERVED_NAMES:
                    self._add_directory_entry(fd, name, path + b"/" + name if path else name, depth)
        finally:
            os.close(fd)

    def _add_directory_entry(self, fd: int, name: bytes, path: bytes, depth: int) -> None:
        if len(path) > PATH_BYTES_MAX or depth + 1 >= TREE_DEPTH_MAX:
            raise _os_error_for_path(errno.ENAMETOOLONG, path.rpartition(b"/")[0])
        try:
            found = os.stat(name, dir_fd=fd, follow_symlinks=False)
        except FileNotFoundError:
            return
        inside = self._stat_link_target(path) if self._follows_links and stat.S_ISLNK(found.st_mode) else None
        if inside is not None:
            found = inside
        is_folder, is_file = stat.S_ISDIR(found.st_mode), stat.S_ISREG(found.st_mode)
        if not is_folder and not is_file and not stat.S_ISLNK(found.st_mode):
            self._skipped_count += 1
            return
        old = self._old_record_by_path.get(path)
        is_rules = is_file and name == b".gitignore"
        if is_rules:
            self._gitignores_seen.add(path)
            self._ignore_rules_changed |= old is None or old.is_folder or old.stamp != pack_stamp(found)
        if self._is_entry_excluded(old, path, is_folder):
            stamp = pack_stamp(found) if is_rules else NO_STAMP
            self._append_record(pack_record(EXCLUDED, path, flags=int(is_folder), stamp=stamp))
        elif is_file:
            self._add_file_record(old, path, found)
        elif not is_folder:
            link = os.fsencode(os.readlink(name, dir_fd=fd))
            self._append_record(pack_record(LINK, path, mode=0o777, link=link, stamp=pack_stamp(found)))
        else:
            self._add_folder_and_contents(fd, name, path, found, depth, is_linked=inside is not None)

    def _stat_link_target(self, path: bytes) -> os.stat_result | None:
        """Return the stat of a link's target inside the tree; None if it is outside, missing or a cycle."""
        real = os.path.realpath(os.path.join(self._root, path))
        here = os.path.realpath(os.path.join(self._root, os.path.dirname(path)))
        if not real.startswith(self._resolved_root + b"/") or (here + b"/").startswith(real + b"/"):
            return None
        try:
            return os.stat(real, follow_symlinks=False)
        except OSError:
            return None

    def _is_entry_excluded(self, old: TreeRecord | None, path: bytes, is_folder: bool) -> bool:
        if self._reuses_old and old is not None and old.is_folder == is_folder:
            return bool(old.kind == EXCLUDED)
        return self._is_path_excluded(path, is_folder)

    def _add_file_record(self, old: TreeRecord | None, path: bytes, found: os.stat_result) -> None:
        stamp = pack_stamp(found)
        clean = old is not None and old.kind == FILE and old.size == found.st_size and old.stamp == stamp
        clean = clean and not is_too_recent_to_trust(stamp, self._taken_ns)
        if not clean:
            self._unhashed_offsets.append(self._packed_bytes)
        mode = stat.S_IMODE(found.st_mode)
        sha = old.sha if clean and old is not None else NO_SHA
        self._append_record(
            pack_record(
                FILE, path, mode=mode, size=found.st_size, mtime_ns=found.st_mtime_ns, sha=sha, stamp=stamp
            )
        )

    def _add_folder_and_contents(
        self, fd: int, name: bytes, path: bytes, found: os.stat_result, depth: int, *, is_linked: bool
    ) -> None:
        try:
            if is_linked:
                inner = os.open(os.path.realpath(os.path.join(self._root, path)), _OPEN_FOLDER_FLAGS)
            else:
                inner = os.open(name, _OPEN_FOLDER_FLAGS, dir_fd=fd)
        except FileNotFoundError:
            return
        except OSError as error:
            raise _os_error_for_path(error.errno or 0, path) from None
        self._append_record(pack_record(FOLDER, path, mode=stat.S_IMODE(found.st_mode)))
        self._walk_folder(inner, path, depth + 1)

    def _append_record(self, one: bytes) -> None:
        self._packed_records.append(one)
        self._packed_bytes += len(one)


def _was_gitignore(one: TreeRecord) -> bool:
    """True if a record named .gitignore was a file; an excluded one has a stamp in that case."""
    return one.kind == FILE or (one.kind == EXCLUDED and one.stamp[:8] != NO_STAMP[:8])


def _read_small_file(folders: OpenDirectories, one: TreeRecord) -> bytes | None:
    try:
        parent, name = folders.open_parent(one.path)
        fd = os.open(name, _OPEN_FILE_FLAGS, dir_fd=parent)
    except OSError:
        return None
    try:
        before = os.fstat(fd)
        if not file_matches_record(before, one) or is_sparse(before):
            return None
        data = bytearray()
        while len(data) < one.size:
            part = os.read(fd, one.size - len(data))
            if not part:
                return None
            data += part
        return bytes(data) if file_matches_record(os.fstat(fd), one) else None
    except OSError:
        return None
    finally:
        os.close(fd)


def file_matches_record(found: os.stat_result, one: TreeRecord) -> bool:
    return stat.S_ISREG(found.st_mode) and found.st_size == one.size and pack_stamp(found) == one.stamp


def _stage_file(
    staging_fd: int, name: bytes, data: bytes | bytearray | memoryview, mode: int, mtime_ns: int
) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        fd = os.open(name, flags, mode & 0o777, dir_fd=staging_fd)
    except FileExistsError:
        return
    try:
        write_all(fd, data)
        os.utime(fd, ns=(mtime_ns, mtime_ns))
    except OSError:
        os.unlink(name, dir_fd=staging_fd)
        raise
    finally:
        os.close(fd)


def write_all(fd: int, data: bytes | bytearray | memoryview) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def move_entry_into_place(
    folders: OpenDirectories, staging_fd: int, one: TreeRecord, staged_name: bytes
) -> None:
    """Create a directory or move a file; a file that is already in place is kept."""
    fd, name = folders.open_parent(one.path)
    try:
        if one.kind == FOLDER:
            _make_folder_if_missing(fd, name)
            return
        try:
            found = os.stat(staged_name, dir_fd=staging_fd, follow_symlinks=False)
        except FileNotFoundError:
            if not _is_already_in_place(folders.try_lstat(one.path), one):
                raise
            return
        if stat.S_IMODE(found.st_mode) != one.mode:
            os.chmod(staged_name, one.mode, dir_fd=staging_fd)
        if found.st_mtime_ns != one.mtime_ns:
            os.utime(staged_name, ns=(one.mtime_ns, one.mtime_ns), dir_fd=staging_fd, follow_symlinks=False)
        os.rename(staged_name, name, src_dir_fd=staging_fd, dst_dir_fd=fd)
    except OSError as error:
        raise _os_error_for_path(error.errno or 0, one.path) from None


def _make_folder_if_missing(fd: int, name: bytes) -> None:
    try:
        os.mkdir(name, 0o700, dir_fd=fd)
    except FileExistsError:
        if not stat.S_ISDIR(os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR)) from None


def _is_already_in_place(found: os.stat_result | None, one: TreeRecord) -> bool:
    if found is None or not stat.S_ISREG(found.st_mode):
        return False
    return (found.st_size, found.st_mtime_ns) == (one.size, one.mtime_ns)


def _is_file_unchanged(folders: OpenDirectories, one: TreeRecord, taken_ns: int) -> bool:
    found = folders.try_lstat(one.path)
    if found is None:
        return False
    if one.kind == FOLDER:
        return stat.S_ISDIR(found.st_mode) and stat.S_IMODE(found.st_mode) == one.mode
    kind = stat.S_IFREG if one.kind == FILE else stat.S_IFLNK
    if stat.S_IFMT(found.st_mode) != kind or pack_stamp(found) != one.stamp:
        return False
    if one.kind == LINK:
        return True
    right = found.st_size == one.size and stat.S_IMODE(found.st_mode) == one.mode
    return right and not is_too_recent_to_trust(one.stamp, taken_ns)


_ERROR_PATH_BUFFER_BYTES = 4104


class CompiledEngine(PlainEngine):
    """native/grid/tree.cpp through ctypes. Raises OSError if it cannot be loaded."""

    name = "compiled"

    def __init__(self, path: str) -> None:
        import ctypes

        if sys.byteorder != "little":
            raise OSError(errno.ENOEXEC, "big-endian machines are not supported")

        class Out(ctypes.Structure):
            _fields_ = (
                ("data", ctypes.c_void_p),
                ("size", ctypes.c_uint64),
                ("list", ctypes.POINTER(ctypes.c_uint64)),
                ("count", ctypes.c_uint64),
                ("skipped", ctypes.c_uint64),
                ("is_unchanged", ctypes.c_int32),
                ("rules_changed", ctypes.c_int32),
                ("error", ctypes.c_int32),
                ("where", ctypes.c_char * _ERROR_PATH_BUFFER_BYTES),
            )

        self._ctypes = ctypes
        self._output_struct_type = Out
        self._is_excluded_callback_type = ctypes.CFUNCTYPE(
            ctypes.c_int32, ctypes.POINTER(ctypes.c_char), ctypes.c_uint64, ctypes.c_int32
        )
        self._library = ctypes.CDLL(path)
        self._library.genie_free_output.restype = None

    def _call_library(self, function: str, *args: Any) -> tuple[Any, bytes, list[int]]:
        """Call a function; returns its output structure with copies of its data and list. Raises OSError."""
        out = self._output_struct_type()
        status = getattr(self._library, function)(*args, self._ctypes.byref(out))
        try:
            if status != 0:
                number = max(out.error, 0)
                raise OSError(number, os.strerror(number), os.fsdecode(out.where))
            data = self._ctypes.string_at(out.data, out.size) if out.data else b""
            return out, data, out.list[: out.count] if out.list else []
        finally:
            self._library.genie_free_output(self._ctypes.byref(out))

    def _to_u64(self, number: int) -> Any:
        return self._ctypes.c_uint64(number)

    def walk(
        self,
        root: str,
        old: bytes,
        *,
        taken_ns: int,
        reuse: bool,
        is_excluded: IsExcluded,
        follow: bool = False,
    ) -> WalkResult:
        if follow:
            return PlainEngine.walk(
                self, root, old, taken_ns=taken_ns, reuse=reuse, is_excluded=is_excluded, follow=True
            )
        failure: BaseException | None = None

        def call_is_excluded(path: Any, path_bytes: int, is_folder: int) -> int:
            nonlocal failure
            try:
                return int(is_excluded(path[:path_bytes], bool(is_folder)))
            except BaseException as error:  # raised again below: it cannot pass through C++
                failure = error
                return -1

        taken = self._ctypes.c_int64(taken_ns)
        callback = self._is_excluded_callback_type(call_is_excluded)
        try:
            out, records, unhashed_offsets = self._call_library(
                "genie_walk_tree", os.fsencode(root), old, self._to_u64(len(old)), taken, int(reuse), callback
            )
        except OSError:
            if failure is not None:
                raise failure from None
            raise
        return WalkResult(
            records,
            unhashed_offsets,
            is_unchanged=bool(out.is_unchanged),
            rules_changed=bool(out.rules_changed),
            skipped_count=int(out.skipped),
        )

    def read_small_files(
        self, root: int, records: bytes, places: list[int], *, first: int, room: int
    ) -> tuple[bytearray, list[int]]:
        count = len(places)
        frames = bytearray(room)
        held = (self._ctypes.c_char * room).from_buffer(frames)
        listed = (self._ctypes.c_uint64 * count)(*places)
        out, _, states = self._call_library(
            "genie_read_small_files",
            root,
            records,
            listed,
            self._to_u64(count),
            first,
            held,
            self._to_u64(room),
        )
        del held
        del frames[out.size :]
        return frames, states

    def stage_files(self, staging_fd: int, data: bytes | bytearray | memoryview) -> tuple[int, int]:
        passed: Any = data
        if isinstance(data, (bytearray, memoryview)):
            passed = (self._ctypes.c_char * len(data)).from_buffer(data)
        out = self._output_struct_type()
        if (
            self._library.genie_stage_files(
                staging_fd, passed, self._to_u64(len(data)), self._ctypes.byref(out)
            )
            != 0
        ):
            raise OSError(out.error, os.strerror(out.error), os.fsdecode(out.where))
        return int(out.size), int(out.count)

    def move_into_place(self, root: int, staging_fd: int, records: bytes) -> None:
        self._call_library("genie_place_entries", root, staging_fd, records, self._to_u64(len(records)))

    def find_mismatch_offsets(self, root: int, records: bytes, *, taken_ns: int) -> list[int]:
        taken = self._ctypes.c_int64(taken_ns)
        return self._call_library("genie_check_records", root, records, self._to_u64(len(records)), taken, 0)[
            2
        ]

    def fill_in_stamps(self, root: int, records: bytes) -> bytes:
        copy = self._ctypes.create_string_buffer(records, len(records))
        self._call_library(
            "genie_check_records", root, copy, self._to_u64(len(records)), self._ctypes.c_int64(0), 1
        )
        return copy.raw

    def compare_records(self, old: bytes, now: bytes) -> list[tuple[int, int]]:
        found = self._call_library(
            "genie_compare_records", old, self._to_u64(len(old)), now, self._to_u64(len(now))
        )[2]
        return list(zip(found[::2], found[1::2]))  # noqa: B905 - Python 3.10 has strict

    def merge_records(self, old: bytes, changes: bytes) -> bytes:
        return self._call_library(
            "genie_merge_records", old, self._to_u64(len(old)), changes, self._to_u64(len(changes))
        )[1]

    def strip_stamps_and_excluded(self, records: bytes) -> bytes:
        return self._call_library("genie_remove_stamps", records, self._to_u64(len(records)))[1]


def load_compiled_or_plain_engine(path: str | None) -> PlainEngine:
    """Return the compiled engine if it can be loaded, else the Python one."""
    if path is not None:
        try:
            return CompiledEngine(path)
        except (OSError, AttributeError, ImportError):
            pass
    return PlainEngine()
