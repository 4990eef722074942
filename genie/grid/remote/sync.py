"""Ops that update a tree on a node: check its state, receive files, and move them into place.

Received files are staged next to the tree until all have arrived. Then a journal is written, and the change
is finished even after a crash, by the next request. So the visible tree only has complete files. Files that
were not created by a sync, or were changed since, are not deleted; symbolic links are never followed.

Runs on nodes: standard library only, Python 3.8. Does not decide what changes (genie/grid/sync).
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
import struct
import sys
import threading
import time
from typing import Any, NoReturn

from genie.grid.remote import contents, core, tree
from genie.grid.remote.core import OpError, register_op
from genie.grid.remote.own_folder import grid_folder_path
from genie.grid.remote.synced_tree import SyncedTree, TreeState, engine_library_path, records_digest
from genie.grid.remote.tree import FILE, FOLDER, LINK, REMOVED, OpenDirectories, TreeRecord

PLAN_PART_NAMES = ("gone", "folders", "added", "changed", "copies", "links", "metas")
"""The parts of a change, each a list of records, in the order in which they are applied."""
DELETE, FORGET, REPLACE = 0, 1, 2
"""Flags of a record in `gone`: delete if unchanged; keep the file; something else replaces it."""
PLAN_HEAD_SIZE_STRUCT = struct.Struct("<I")
PLAN_BYTES_MAX = 1 << 30
FRAME_PIECE_BYTES_MAX = 1 << 20
"""Size limit of a content frame, except for whole small files."""
REPLY_BLOB_BYTES_MAX = 8 << 20
_PATHS_REPORTED_MAX = 100
_DISK_FREE_BYTES_MIN = 64 << 20
_COMPILE_TIMEOUT_S = 120
_COMPILERS = ("c++", "g++", "clang++")
_COMPILER_FLAGS = (
    "-std=c++17",
    "-O2",
    "-fPIC",
    "-fvisibility=hidden",
    "-fno-exceptions",
    "-fno-rtti",
    "-shared",
)
_STAGED_FILE_NAME_PATTERN = re.compile(r"[0-9a-f]{64}\.[0-9a-f]{1,16}")
_PARTIAL_LIBRARY_NAME_PATTERN = re.compile(
    r"tree-[0-9a-f]+(\.so\.[0-9]+-[0-9]+\.part|-[0-9]+-[0-9]+\.cpp(\.part)?)"
)
_PARTIAL_LIBRARY_AGE_S_MAX = 3600.0
_PARTIAL_LIBRARIES_CHECKED_MAX = 100
_last_drift_by_tree: dict[str, bytes] = {}


@register_op("sync.check")
def check_tree_and_report_drift(args: Any, blob: bytes) -> Any:
    """Finish an interrupted change; return the digest of the state, and records that differ from it."""
    has_library = os.path.exists(engine_library_path(_sync_folder(args), args["key"]))
    answer = {"digest": "", "drift": 0, "objects": 0, "has_library": has_library, "machine": _machine_type()}
    try:
        site = SyncedTree(args, create=False)
    except FileNotFoundError:
        return answer
    with site:
        # A disconnected sync may still be writing; its files are complete when it releases the lock.
        site.lock(wait_s=args["wait_s"])
        finish_interrupted_change(site)
        _remove_stale_partial_libraries(site)
        state = site.read_state()
        drift = find_drift(site, state)
        _last_drift_by_tree.clear()  # for one tree at a time
        _last_drift_by_tree[args["tree"]] = drift
        answer.update(
            digest=state.digest.hex(),
            drift=len(drift),
            objects=len(_list_complete_staged_digests(site)),
            engine=site.engine.name,
        )
    return answer, drift[:REPLY_BLOB_BYTES_MAX]


@register_op("sync.drift", quick=True)
def read_more_drift(args: Any, blob: bytes) -> Any:
    """Return a further piece of the drift that the last check found."""
    return {}, _last_drift_by_tree.get(args["tree"], b"")[
        args["offset"] : args["offset"] + REPLY_BLOB_BYTES_MAX
    ]


@register_op("sync.records")
def read_state_records(args: Any, blob: bytes) -> Any:
    """Return a piece of the records of the state."""
    with SyncedTree(args, create=False) as site:
        state = site.read_state()
    piece = state.records[args["offset"] : args["offset"] + REPLY_BLOB_BYTES_MAX]
    return {"digest": state.digest.hex(), "size": len(state.records)}, piece


@register_op("sync.objects")
def list_staged_file_digests(args: Any, blob: bytes) -> Any:
    """Return the digests of staged files; incomplete ones are removed."""
    with SyncedTree(args, create=False) as site:
        site.lock(wait_s=args["wait_s"])
        return {}, b"".join(_list_complete_staged_digests(site))[: REPLY_BLOB_BYTES_MAX // 32 * 32]


@register_op("sync.apply")
def receive_and_apply_change(args: Any, blob: bytes) -> Any:
    """Receive and apply a small change in one request."""
    with SyncedTree(args, create=True) as site:
        site.lock(wait_s=args["wait_s"])
        receiver = ChangeReceiver(site)
        if receiver.stage_frames(blob) != len(blob) or not receiver.is_complete:
            raise OpError("the received change is incomplete", reason="protocol")
        return receiver.apply_received_change()


@register_op("sync.library")
def store_engine_library(args: Any, blob: bytes) -> Any:
    """Store the compiled library: the uploaded one if it works here, else compile it in the background."""
    with SyncedTree(args, create=True) as site:
        path = engine_library_path(site.sync_folder_path, args["key"])
        binary, source = blob[: args["binary"]], blob[args["binary"] :]
        if binary and args["machine"] == _machine_type() and _try_install_engine_library(path, binary):
            return {"how": "given"}
        source_path = f"{path[: -len('.so')]}-{os.getpid()}-{threading.get_ident()}.cpp"
        try:
            with open(source_path, "wb") as file:
                file.write(source)
        except OSError:
            _remove_if_exists(source_path)
            raise
    core.FORK_SERVER.spawn(__name__, "compile_engine_library", {"source": source_path, "path": path})
    return {"how": "compiling"}


def compile_engine_library(args: Any) -> None:
    """Compile the library, in a separate process. Without a compiler, the Python engine stays in use."""
    import shutil
    import subprocess

    compiler = next((found for name in _COMPILERS for found in [shutil.which(name)] if found), None)
    part = args["source"] + ".part"
    try:
        if compiler is not None:
            command = [compiler, *_COMPILER_FLAGS, "-o", part, args["source"]]
            done = subprocess.run(command, check=False, timeout=_COMPILE_TIMEOUT_S)
            if done.returncode == 0:
                os.rename(part, args["path"])
    finally:
        _remove_if_exists(part)
        _remove_if_exists(args["source"])


def receive_change_main(source: int = 0) -> NoReturn:
    """Separate program: reads a line of JSON and a change from standard input, writes one line of JSON."""
    os.umask(0)
    head = bytearray()
    while not head.endswith(b"\n"):
        head += os.read(source, 1) or sys.exit(1)
    try:
        args = json.loads(head.decode())
        with SyncedTree(args, create=True) as site:
            site.lock(wait_s=args["wait_s"])
            answer: Any = {"ok": _receive_change_from(ChangeReceiver(site), source)}
    except OpError as error:
        answer = {"error": {"reason": error.reason, "text": str(error)}}
    except OSError as error:
        reason, text = core.reason_and_text_of_os_error(error)
        answer = {"error": {"reason": reason, "text": text}}
    os.write(1, core.FIRST_REPLY_MAGIC + json.dumps(answer).encode() + b"\n")
    os._exit(0)


def _receive_change_from(receiver: ChangeReceiver, source: int) -> Any:
    buffer = memoryview(bytearray(4 * FRAME_PIECE_BYTES_MAX))
    end = 0
    while not receiver.is_complete:
        count = os.readv(source, [buffer[end:]])
        if not count:
            raise OpError("connection lost before all changes were received", reason="cut")
        end += count
        used = receiver.stage_frames(buffer[:end])
        if used:
            buffer[: end - used] = bytes(buffer[used:end])
            end -= used
    return receiver.apply_received_change()


class ChangeReceiver:
    """Stages the frames of a change: whole small files, pieces of large files, and the plan."""

    def __init__(self, site: SyncedTree) -> None:
        self._synced_tree = site
        self._staging_fd = site.open_staging_folder()
        self._plan = bytearray()
        self._fd_by_large_file: dict[int, int] = {}
        self.is_complete = False

    def stage_frames(self, data: Any) -> int:
        """Process the complete frames at the beginning; returns the number of bytes consumed."""
        try:
            return self._stage_complete_frames(data)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                # Free the space: staged files are useless if the rest does not fit.
                self._synced_tree.remove_all_files(self._staging_fd)
            raise

    def apply_received_change(self) -> Any:
        return apply_change(self._synced_tree, self._staging_fd, bytes(self._plan))

    def _stage_complete_frames(self, data: Any) -> int:
        at = 0
        view = memoryview(data)
        while not self.is_complete and len(view) - at >= tree.FRAME_HEADER.size:
            if view[at] == ord("F"):
                used, _ = self._synced_tree.engine.stage_files(
                    self._staging_fd, _bytes_for_engine(data, view, at)
                )
                at += used
                if not used:
                    break
                continue
            used = self._handle_frame_and_get_size(view, at)
            if not used:
                break
            at += used
        return at

    def _handle_frame_and_get_size(self, view: memoryview, at: int) -> int:
        """Process a frame that is not a whole small file; returns its size, 0 if it is incomplete."""
        kind, _, mode, number, size, mtime_ns, sha = tree.FRAME_HEADER.unpack_from(view, at)
        begin = at + tree.FRAME_HEADER.size
        if kind in b"DP":
            if size > FRAME_PIECE_BYTES_MAX:
                raise OpError(
                    f"received a piece of a file of {size} bytes: the limit is {FRAME_PIECE_BYTES_MAX}",
                    reason="protocol",
                )
            if len(view) - begin < size:
                return 0
            self._add_file_or_plan_piece(kind, number, view[begin : begin + size])
            return int(tree.FRAME_HEADER.size + size)
        if kind == ord("H"):
            os.lseek(self._get_or_open_large_file(number), size, os.SEEK_CUR)
        elif kind == ord("E"):
            self._finish_large_file(number, size, mode, mtime_ns, sha)
        elif kind == ord("A"):
            os.close(self._get_or_open_large_file(number))
            del self._fd_by_large_file[number]
            os.unlink(_partial_large_file_name(number), dir_fd=self._staging_fd)
        elif kind == ord("Z"):
            self.is_complete = True
        else:
            raise OpError(f"received a frame of unknown kind {chr(kind)!r}", reason="protocol")
        return tree.FRAME_HEADER.size

    def _add_file_or_plan_piece(self, kind: int, number: int, data: memoryview) -> None:
        if kind == ord("D"):
            tree.write_all(self._get_or_open_large_file(number), data)
        elif len(self._plan) + len(data) > PLAN_BYTES_MAX:
            raise OpError(f"the received sync plan is larger than {PLAN_BYTES_MAX} bytes", reason="protocol")
        else:
            self._plan += data

    def _get_or_open_large_file(self, number: int) -> int:
        if number not in self._fd_by_large_file:
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
            self._fd_by_large_file[number] = os.open(
                _partial_large_file_name(number), flags, 0o600, dir_fd=self._staging_fd
            )
        return self._fd_by_large_file[number]

    def _finish_large_file(self, number: int, size: int, mode: int, mtime_ns: int, sha: bytes) -> None:
        fd = self._get_or_open_large_file(number)
        del self._fd_by_large_file[number]
        os.ftruncate(fd, size)
        os.fchmod(fd, mode)
        os.utime(fd, ns=(mtime_ns, mtime_ns))
        os.close(fd)
        name = tree.staged_file_name(sha, size)
        os.rename(
            _partial_large_file_name(number), name, src_dir_fd=self._staging_fd, dst_dir_fd=self._staging_fd
        )


def _bytes_for_engine(data: Any, view: memoryview, at: int) -> Any:
    """Return data for the compiled engine, which accepts whole bytes objects and writable slices."""
    if view.readonly:
        return data if at == 0 else bytes(view[at:])
    return view[at:]


def _partial_large_file_name(number: int) -> bytes:
    return b"part-%d" % number


def apply_change(site: SyncedTree, staging_fd: int, plan: bytes) -> Any:
    """Validate a change, write the journal and apply it. Raises OpError before anything is visible."""
    state = site.read_state()
    head, parts = split_plan(plan)
    if head["base"] != state.digest.hex():
        raise OpError("another sync has changed the files on the node meanwhile", reason="moved")
    merged = merge_plan_into_records(site, state, parts)
    digest = records_digest(site.engine, merged)
    if digest.hex() != head["digest"]:
        raise OpError("the received records do not match their digest", reason="protocol")
    overwritten = check_conflicts_and_list_overwritten(site, parts)
    try:
        _copy_staged_files(staging_fd, parts["copies"])
        # Reserve the space for the state: after the journal is written, nothing should fail.
        if site.disk_free_bytes() < _DISK_FREE_BYTES_MIN + 4 * len(merged):
            site.write_state(merged, taken_ns=0, digest=digest, name="next")
        site.write_sync_file("journal", plan)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            site.remove_all_files(staging_fd)
            site.remove_sync_file("next")
        raise
    done = execute_plan(site, staging_fd, state, plan, merged=merged)
    done["overwritten"] = overwritten
    return done


def finish_interrupted_change(site: SyncedTree) -> None:
    """Finish a change whose journal was written but that was interrupted."""
    plan = site.read_sync_file("journal")
    if plan is None:
        return
    state = site.read_state()
    try:
        head, _ = split_plan(plan)
    except (OpError, ValueError, KeyError, struct.error):
        site.remove_sync_file("journal")  # damaged by a power cut: the check finds what is missing
        return
    if state.digest.hex() == head["base"]:
        execute_plan(site, site.open_staging_folder(), state, plan)
    site.remove_sync_file("journal")


def split_plan(plan: bytes) -> tuple[Any, dict[str, bytes]]:
    """Split a plan, which consists of the length of its head, the head as JSON and the parts."""
    (head_bytes,) = PLAN_HEAD_SIZE_STRUCT.unpack_from(plan)
    at = PLAN_HEAD_SIZE_STRUCT.size + head_bytes
    head = json.loads(plan[PLAN_HEAD_SIZE_STRUCT.size : at].decode())
    parts = {}
    for name in PLAN_PART_NAMES:
        parts[name] = plan[at : at + head[name]]
        at += head[name]
    if at != len(plan):
        raise OpError(
            "the sync plan is incomplete: its parts do not have the announced sizes", reason="protocol"
        )
    return head, parts


def join_plan(head: dict[str, Any], parts: dict[str, bytes]) -> bytes:
    """Build a plan; the inverse of `split_plan`."""
    text = json.dumps({**head, **{name: len(parts[name]) for name in PLAN_PART_NAMES}}).encode()
    return PLAN_HEAD_SIZE_STRUCT.pack(len(text)) + text + b"".join(parts[name] for name in PLAN_PART_NAMES)


def merge_plan_into_records(site: SyncedTree, state: TreeState, parts: dict[str, bytes]) -> bytes:
    merged = state.records
    for name in PLAN_PART_NAMES:
        if parts[name]:
            merged = site.engine.merge_records(merged, parts[name])
    return merged


def check_conflicts_and_list_overwritten(site: SyncedTree, parts: dict[str, bytes]) -> list[str]:
    """Return the names of unsynced files that will be replaced.

    Raises OpError ('conflict') if a directory would be replaced, or something else by a directory.
    """
    names = os.listdir(site.root_fd)
    if not any(os.fsencode(name) not in tree.RESERVED_NAMES for name in names):
        return []
    gone = {one.path: one.flags for one in tree.iter_records(parts["gone"])}
    overwritten: list[str] = []
    with OpenDirectories(site.root_fd) as folders:
        for name in ("folders", "added", "copies", "links"):
            for one in tree.iter_records(parts[name]):
                found = folders.try_lstat(one.path)
                if found is None or gone.get(one.path) == REPLACE:
                    if found is not None and stat.S_ISDIR(found.st_mode) and one.kind != FOLDER:
                        _check_folder_removable(folders, one.path, gone)
                elif stat.S_ISDIR(found.st_mode) != (one.kind == FOLDER):
                    raise _conflict_error(one.path, found)
                elif name == "added" and len(overwritten) < _PATHS_REPORTED_MAX:
                    overwritten.append(_printable_path(one.path))
    return overwritten


def _check_folder_removable(folders: OpenDirectories, path: bytes, gone: dict[bytes, int]) -> None:
    parent, name = folders.open_parent(path)
    fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
    try:
        inside = [path + b"/" + os.fsencode(each) for each in os.listdir(fd)]
    finally:
        os.close(fd)
    for each in inside:
        if gone.get(each) not in (DELETE, REPLACE):
            raise OpError(
                f"{_printable_path(path)} would become a file, but contains {_printable_path(each)}",
                reason="conflict",
            )
        found = folders.try_lstat(each)
        if found is not None and stat.S_ISDIR(found.st_mode):
            _check_folder_removable(folders, each, gone)


def _conflict_error(path: bytes, found: os.stat_result) -> OpError:
    kinds = {stat.S_IFDIR: "a directory", stat.S_IFLNK: "a link", stat.S_IFREG: "a file"}
    kind = kinds.get(stat.S_IFMT(found.st_mode), "a special file")
    return OpError(
        f"{_printable_path(path)} is {kind} on the node that was not created by a sync", reason="conflict"
    )


def _printable_path(path: bytes) -> str:
    return path.decode("utf-8", "backslashreplace")


def execute_plan(
    site: SyncedTree, staging_fd: int, state: TreeState, plan: bytes, *, merged: bytes | None = None
) -> Any:
    """Move everything into place. Idempotent: a repetition finishes an interrupted one."""
    head, parts = split_plan(plan)
    if merged is None:
        merged = merge_plan_into_records(site, state, parts)
    try:
        deleted, kept = _delete_unchanged_and_list_kept(site, state, parts["gone"])
        _move_files_into_place(site, staging_fd, parts)
        _create_symlinks(site, staging_fd, parts["links"])
        _set_modes_and_times(site, parts["metas"])
        _set_modes_and_times(site, parts["folders"])
    finally:
        # Also after an error: the next check finds what differs from the records.
        taken_ns = time.time_ns()
        stamped = site.engine.fill_in_stamps(site.root_fd, merged)
        site.remove_sync_file("next")
        site.write_state(stamped, taken_ns=taken_ns, digest=bytes.fromhex(head["digest"]))
        site.remove_sync_file("journal")
    site.remove_all_files(staging_fd)
    return {"deleted": deleted, "kept": kept}


def _delete_unchanged_and_list_kept(site: SyncedTree, state: TreeState, gone: bytes) -> tuple[int, list[str]]:
    """Delete unchanged files; returns the number of deleted files and the names of those kept."""
    if not gone:
        return 0, []
    flags = {one.path: one.flags for one in tree.iter_records(gone)}
    places = site.engine.compare_records(state.records, site.engine.merge_records(state.records, gone))
    deleted = 0
    with OpenDirectories(site.root_fd) as folders:
        changed = (path for path, flag in flags.items() if flag == FORGET)  # changed or missing on the node
        kept = [_printable_path(path) for path in changed if folders.try_lstat(path) is not None]
        for place, _ in reversed(places):
            one = TreeRecord(state.records, place)
            found = folders.try_lstat(one.path)
            if flags.get(one.path) == FORGET or found is None:
                continue
            parent, name = folders.open_parent(one.path)
            if stat.S_ISDIR(found.st_mode):
                deleted += _rmdir_and_count(parent, name)
            elif flags.get(one.path) == REPLACE or tree.pack_stamp(found) == one.stamp:
                os.unlink(name, dir_fd=parent)
                deleted += 1
            else:
                kept.append(_printable_path(one.path))
    return deleted, kept[:_PATHS_REPORTED_MAX]


def _rmdir_and_count(parent: int, name: bytes) -> int:
    try:
        os.rmdir(name, dir_fd=parent)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        return 0  # it contains unsynced files
    return 1


def _copy_staged_files(staging_fd: int, copies: bytes) -> None:
    """Copy files whose contents were sent once for several paths. Holes are preserved."""
    for number, one in enumerate(tree.iter_records(copies)):
        _copy_file(staging_fd, tree.staged_file_name(one.sha, one.size), staging_fd, b"copy-%d" % number)


def _copy_file(from_folder: int, name: bytes, to_folder: int, new: bytes) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    source = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=from_folder)
    try:
        target = os.open(new, flags, 0o600, dir_fd=to_folder)
        try:
            found = os.fstat(source)
            for is_data, offset, size in contents.list_extents(source, found):
                if is_data:
                    os.lseek(target, offset, os.SEEK_SET)
                    for data in contents.read_pieces(source, offset, size):
                        tree.write_all(target, data)
            os.ftruncate(target, found.st_size)
        finally:
            os.close(target)
    finally:
        os.close(source)


def _move_files_into_place(site: SyncedTree, staging_fd: int, parts: dict[str, bytes]) -> None:
    try:
        # Copies first: moving an object is the last step for its contents.
        site.engine.move_into_place(site.root_fd, staging_fd, parts["folders"])
        with OpenDirectories(site.root_fd) as folders:
            for number, one in enumerate(tree.iter_records(parts["copies"])):
                tree.move_entry_into_place(folders, staging_fd, one, b"copy-%d" % number)
        site.engine.move_into_place(site.root_fd, staging_fd, parts["added"])
        site.engine.move_into_place(site.root_fd, staging_fd, parts["changed"])
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        _move_across_file_systems(site, staging_fd, parts)


def _move_across_file_systems(site: SyncedTree, staging_fd: int, parts: dict[str, bytes]) -> None:
    """Copy files first if a part of the tree is on another file system."""
    with OpenDirectories(site.root_fd) as folders:
        for name in ("copies", "added", "changed"):
            for number, one in enumerate(tree.iter_records(parts[name])):
                source = b"copy-%d" % number if name == "copies" else tree.staged_file_name(one.sha, one.size)
                try:
                    tree.move_entry_into_place(folders, staging_fd, one, source)
                except OSError as error:
                    if error.errno != errno.EXDEV:
                        raise
                    parent, _ = folders.open_parent(one.path)
                    near = b".grid-part-%d" % os.getpid()
                    _copy_file(staging_fd, source, parent, near)
                    tree.move_entry_into_place(folders, parent, one, near)


def _create_symlinks(site: SyncedTree, staging_fd: int, links: bytes) -> None:
    with OpenDirectories(site.root_fd) as folders:
        for one in tree.iter_records(links):
            parent, name = folders.open_parent(one.path)
            try:
                os.unlink(b"link", dir_fd=staging_fd)
            except FileNotFoundError:
                pass
            os.symlink(one.link, b"link", dir_fd=staging_fd)
            try:
                os.rename(b"link", name, src_dir_fd=staging_fd, dst_dir_fd=parent)
            except OSError as error:
                if error.errno != errno.EXDEV:
                    raise
                near = b".grid-part-%d" % os.getpid()
                os.symlink(one.link, near, dir_fd=parent)
                os.rename(near, name, src_dir_fd=parent, dst_dir_fd=parent)


def _set_modes_and_times(site: SyncedTree, metas: bytes) -> None:
    """Set modes and times, the deepest first, because a directory's mode may deny access."""
    with OpenDirectories(site.root_fd) as folders:
        for one in reversed(list(tree.iter_records(metas))):
            parent, name = folders.open_parent(one.path)
            flags = getattr(os, "O_PATH", os.O_RDONLY) | os.O_NOFOLLOW | os.O_CLOEXEC
            fd = os.open(name, flags, dir_fd=parent)
            try:
                found = os.fstat(fd)
                if stat.S_ISLNK(found.st_mode):
                    continue  # created since the check; its target must not be changed
                if stat.S_IMODE(found.st_mode) != one.mode:
                    # fchmod() does not work on O_PATH descriptors, but their name in /proc does.
                    target: Any = f"/proc/self/fd/{fd}" if hasattr(os, "O_PATH") else fd
                    os.chmod(target, one.mode)
            finally:
                os.close(fd)
            if one.kind == FILE:
                times = (one.mtime_ns, one.mtime_ns)
                os.utime(name, ns=times, dir_fd=parent, follow_symlinks=False)


def find_drift(site: SyncedTree, state: TreeState) -> bytes:
    """Return current records of what differs from the state; if only times differ, update the state."""
    places = site.engine.find_mismatch_offsets(site.root_fd, state.records, taken_ns=state.taken_ns)
    if not places:
        return b""
    taken_ns = time.time_ns()
    drift, touched = [], []
    with OpenDirectories(site.root_fd) as folders:
        for place in places:
            one = TreeRecord(state.records, place)
            now = _record_of_current_file(folders, one)
            plain_bytes = len(now) - tree.STAMP_STRUCT.size
            if now[:plain_bytes] == one.without_stamp:
                touched.append(now)
            else:
                drift.append(now)
    if touched:
        merged = site.engine.merge_records(state.records, b"".join(touched))
        site.write_state(merged, taken_ns=taken_ns, digest=state.digest)
    return b"".join(drift)


def _record_of_current_file(folders: OpenDirectories, one: TreeRecord) -> bytes:
    found = folders.try_lstat(one.path)
    if found is None:
        return tree.pack_record(REMOVED, one.path)
    mode, stamp = stat.S_IMODE(found.st_mode), tree.pack_stamp(found)
    if stat.S_ISDIR(found.st_mode):
        return tree.pack_record(FOLDER, one.path, mode=mode)
    parent, name = folders.open_parent(one.path)
    if stat.S_ISLNK(found.st_mode):
        link = os.fsencode(os.readlink(name, dir_fd=parent))
        return tree.pack_record(LINK, one.path, mode=0o777, link=link, stamp=stamp)
    if not stat.S_ISREG(found.st_mode):
        return tree.pack_record(REMOVED, one.path)
    # A file of another size has other contents and need not be read.
    sha = tree.NO_SHA if found.st_size != one.size else _hash_file(parent, name)
    return tree.pack_record(
        FILE, one.path, mode=mode, size=found.st_size, mtime_ns=found.st_mtime_ns, sha=sha, stamp=stamp
    )


def _hash_file(parent: int, name: bytes) -> bytes:
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        fd = os.open(name, flags, dir_fd=parent)
    except OSError:
        return tree.NO_SHA  # just removed, or not readable
    try:
        return contents.compute_file_digest(fd)
    finally:
        os.close(fd)


def _list_complete_staged_digests(site: SyncedTree) -> list[bytes]:
    """Return the digests of complete staged files; incomplete ones are removed. Requires the lock."""
    staging_fd = site.open_staging_folder()
    found = []
    for name in os.listdir(staging_fd):
        if not _STAGED_FILE_NAME_PATTERN.fullmatch(name):
            continue
        sha, _, size = name.partition(".")
        status = os.stat(name, dir_fd=staging_fd, follow_symlinks=False)
        if stat.S_ISREG(status.st_mode) and status.st_size == int(size, 16):
            found.append(bytes.fromhex(sha))
        elif not stat.S_ISDIR(status.st_mode):
            os.unlink(name, dir_fd=staging_fd)
    return found


def _try_install_engine_library(path: str, binary: bytes) -> bool:
    """Store the library; False if it cannot be loaded on this node."""
    # A unique name: another process may be loading the library.
    part = f"{path}.{os.getpid()}-{threading.get_ident()}.part"
    try:
        with open(part, "wb") as file:
            file.write(binary)
        if not isinstance(tree.load_compiled_or_plain_engine(part), tree.CompiledEngine):
            return False
        os.rename(part, path)
        return True
    finally:
        _remove_if_exists(part)


def _remove_stale_partial_libraries(site: SyncedTree) -> None:
    """Remove leftovers of interrupted compilations, which take minutes at most."""
    found = [
        name for name in os.listdir(site.sync_folder_fd) if _PARTIAL_LIBRARY_NAME_PATTERN.fullmatch(name)
    ]
    for name in found[:_PARTIAL_LIBRARIES_CHECKED_MAX]:
        try:
            made = os.stat(name, dir_fd=site.sync_folder_fd, follow_symlinks=False).st_mtime
            if time.time() - made > _PARTIAL_LIBRARY_AGE_S_MAX:
                os.unlink(name, dir_fd=site.sync_folder_fd)
        except OSError:  # removed already, or of another user: harmless
            pass


def _remove_if_exists(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass


def _sync_folder(args: Any) -> str:
    return grid_folder_path(os.path.expanduser(args["root"]), "sync")


def _machine_type() -> str:
    return sys.platform + "-" + os.uname().machine
