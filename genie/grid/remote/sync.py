"""Ops that bring a tree up to date: what is here, what arrives, and putting it into place.

What arrives is kept beside the tree until all of it is here; then a journal is written, and from there on
the change is finished, if need be by the next one who asks. So the visible tree has whole files only. What
was not put there by an earlier sync, or was changed since, is not deleted; no link is ever followed.

Runs on nodes, so: standard library only, Python 3.8. Not for: deciding what changes (genie/grid/sync).
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
from genie.grid.remote.core import OpError, op
from genie.grid.remote.own_folder import own_folder
from genie.grid.remote.site import Site, State, digest_of, library_path
from genie.grid.remote.tree import FILE, FOLDER, LINK, REMOVED, Folders, Record

PARTS = ("gone", "folders", "added", "changed", "copies", "links", "metas")
"""What a change is made of, each a list of records; `gone` first, then in the order of putting them there."""
DELETE, FORGET, REPLACE = 0, 1, 2
"""Flags of a record in `gone`: delete if untouched; leave it there; something else takes its place."""
PLAN_HEAD = struct.Struct("<I")
PLAN_BYTES_MAX = 1 << 30
PIECE_BYTES_MAX = 1 << 20
"""Of a frame with contents, except whole small files."""
ANSWER_BYTES = 8 << 20
_NAMES_SHOWN = 100
_SPARE_BYTES = 64 << 20
_COMPILE_S = 120
_COMPILERS = ("c++", "g++", "clang++")
_FLAGS = ("-std=c++17", "-O2", "-fPIC", "-fvisibility=hidden", "-fno-exceptions", "-fno-rtti", "-shared")
_OBJECT = re.compile(r"[0-9a-f]{64}\.[0-9a-f]{1,16}")
_LIBRARY_PART = re.compile(r"tree-[0-9a-f]+(\.so\.[0-9]+-[0-9]+\.part|-[0-9]+-[0-9]+\.cpp(\.part)?)")
_PART_AGE_S_MAX = 3600.0
_PARTS_LOOKED_AT_MAX = 100
_drift: dict[str, bytes] = {}


@op("sync.check")
def check(args: Any, blob: bytes) -> Any:
    """What we put here, as its digest, and records of what is otherwise now. Finishes what was begun."""
    has_library = os.path.exists(library_path(_sync_folder(args), args["key"]))
    answer = {"digest": "", "drift": 0, "objects": 0, "has_library": has_library, "machine": _machine()}
    try:
        site = Site(args, create=False)
    except FileNotFoundError:
        return answer
    with site:
        # One whose connection broke may still be at it: what has arrived is whole when it lets go.
        site.lock(wait_s=args["wait_s"])
        finish(site)
        _clear_library_parts(site)
        state = site.state()
        drift = look_closer(site, state)
        _drift.clear()  # for one tree at a time
        _drift[args["tree"]] = drift
        answer.update(
            digest=state.digest.hex(), drift=len(drift), objects=len(_staged(site)), engine=site.engine.name
        )
    return answer, drift[:ANSWER_BYTES]


@op("sync.drift", quick=True)
def more_drift(args: Any, blob: bytes) -> Any:
    """A further piece of what the last check found."""
    return {}, _drift.get(args["tree"], b"")[args["offset"] : args["offset"] + ANSWER_BYTES]


@op("sync.records")
def records(args: Any, blob: bytes) -> Any:
    """A piece of the records of what we put here."""
    with Site(args, create=False) as site:
        state = site.state()
    piece = state.records[args["offset"] : args["offset"] + ANSWER_BYTES]
    return {"digest": state.digest.hex(), "size": len(state.records)}, piece


@op("sync.objects")
def objects(args: Any, blob: bytes) -> Any:
    """The digests of what has arrived and is not in its place yet. What is half-written goes."""
    with Site(args, create=False) as site:
        site.lock(wait_s=args["wait_s"])
        return {}, b"".join(_staged(site))[: ANSWER_BYTES // 32 * 32]


@op("sync.apply")
def apply(args: Any, blob: bytes) -> Any:
    """A whole small change in one request."""
    with Site(args, create=True) as site:
        site.lock(wait_s=args["wait_s"])
        intake = Intake(site)
        if intake.take(blob) != len(blob) or not intake.is_complete:
            raise OpError("protocol", "a change that ends too soon")
        return intake.finish()


@op("sync.library")
def library(args: Any, blob: bytes) -> Any:
    """Keeps the compiled library: the one that was sent if it fits, else it is compiled here, later."""
    with Site(args, create=True) as site:
        path = library_path(site.path, args["key"])
        binary, source = blob[: args["binary"]], blob[args["binary"] :]
        if binary and args["machine"] == _machine() and _is_good_library(path, binary):
            return {"how": "given"}
        source_path = f"{path[: -len('.so')]}-{os.getpid()}-{threading.get_ident()}.cpp"
        try:
            with open(source_path, "wb") as file:
                file.write(source)
        except OSError:
            _remove(source_path)
            raise
    core.SPAWNER.spawn(__name__, "compile_library", {"source": source_path, "path": path})
    return {"how": "compiling"}


def compile_library(args: Any) -> None:
    """In a process of its own. Without a compiler nothing happens, and Python does the work."""
    import shutil
    import subprocess

    compiler = next((found for name in _COMPILERS for found in [shutil.which(name)] if found), None)
    part = args["source"] + ".part"
    try:
        if compiler is not None:
            command = [compiler, *_FLAGS, "-o", part, args["source"]]
            done = subprocess.run(command, check=False, timeout=_COMPILE_S)
            if done.returncode == 0:
                os.rename(part, args["path"])
    finally:
        _remove(part)
        _remove(args["source"])


def receive_main(source: int = 0) -> NoReturn:
    """A program of its own: a line of JSON, then a change, on standard input; one line of JSON comes back."""
    os.umask(0)
    head = bytearray()
    while not head.endswith(b"\n"):
        head += os.read(source, 1) or sys.exit(1)
    try:
        args = json.loads(head.decode())
        with Site(args, create=True) as site:
            site.lock(wait_s=args["wait_s"])
            answer: Any = {"ok": _receive(Intake(site), source)}
    except OpError as error:
        answer = {"error": {"reason": error.reason, "text": str(error)}}
    except OSError as error:
        reason = core._REASONS.get(error.errno or 0, "os")
        where = ": " + str(error.filename) if error.filename else ""
        answer = {"error": {"reason": reason, "text": (error.strerror or str(error)) + where}}
    os.write(1, core.MAGIC + json.dumps(answer).encode() + b"\n")
    os._exit(0)


def _receive(intake: Intake, source: int) -> Any:
    held = memoryview(bytearray(4 * PIECE_BYTES_MAX))
    end = 0
    while not intake.is_complete:
        count = os.readv(source, [held[end:]])
        if not count:
            raise OpError("cut", "the connection broke")
        end += count
        used = intake.take(held[:end])
        if used:
            held[: end - used] = bytes(held[used:end])
            end -= used
    return intake.finish()


class Intake:
    """Takes frames: whole small files, pieces of large ones, and the plan."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._objects = site.objects()
        self._plan = bytearray()
        self._large: dict[int, int] = {}
        self.is_complete = False

    def take(self, data: Any) -> int:
        """Deals with the whole frames at the beginning, and gives the number of bytes that these are."""
        try:
            return self._take(data)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                # The space is given back: what has arrived is of no use while nothing else fits.
                self._site.empty(self._objects)
            raise

    def finish(self) -> Any:
        return change(self._site, self._objects, bytes(self._plan))

    def _take(self, data: Any) -> int:
        at = 0
        view = memoryview(data)
        while not self.is_complete and len(view) - at >= tree.FRAME.size:
            if view[at] == ord("F"):
                used, _ = self._site.engine.stage(self._objects, _stageable(data, view, at))
                at += used
                if not used:
                    break
                continue
            used = self._other(view, at)
            if not used:
                break
            at += used
        return at

    def _other(self, view: memoryview, at: int) -> int:
        kind, _, mode, number, size, mtime_ns, sha = tree.FRAME.unpack_from(view, at)
        begin = at + tree.FRAME.size
        if kind in b"DP":
            if size > PIECE_BYTES_MAX:
                raise OpError("protocol", f"a piece of {size} bytes")
            if len(view) - begin < size:
                return 0
            self._piece(kind, number, view[begin : begin + size])
            return int(tree.FRAME.size + size)
        if kind == ord("H"):
            os.lseek(self._large_file(number), size, os.SEEK_CUR)
        elif kind == ord("E"):
            self._end(number, size, mode, mtime_ns, sha)
        elif kind == ord("A"):
            os.close(self._large_file(number))
            del self._large[number]
            os.unlink(_part(number), dir_fd=self._objects)
        elif kind == ord("Z"):
            self.is_complete = True
        else:
            raise OpError("protocol", f"an unknown frame {chr(kind)!r}")
        return tree.FRAME.size

    def _piece(self, kind: int, number: int, data: memoryview) -> None:
        if kind == ord("D"):
            tree.write_all(self._large_file(number), data)
        elif len(self._plan) + len(data) > PLAN_BYTES_MAX:
            raise OpError("protocol", "a plan that is too large")
        else:
            self._plan += data

    def _large_file(self, number: int) -> int:
        if number not in self._large:
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
            self._large[number] = os.open(_part(number), flags, 0o600, dir_fd=self._objects)
        return self._large[number]

    def _end(self, number: int, size: int, mode: int, mtime_ns: int, sha: bytes) -> None:
        fd = self._large_file(number)
        del self._large[number]
        os.ftruncate(fd, size)
        os.fchmod(fd, mode)
        os.utime(fd, ns=(mtime_ns, mtime_ns))
        os.close(fd)
        name = tree.object_name(sha, size)
        os.rename(_part(number), name, src_dir_fd=self._objects, dst_dir_fd=self._objects)


def _stageable(data: Any, view: memoryview, at: int) -> Any:
    """The compiled engine takes bytes whole, and slices of what can be written to."""
    if view.readonly:
        return data if at == 0 else bytes(view[at:])
    return view[at:]


def _part(number: int) -> bytes:
    return b"part-%d" % number


def change(site: Site, objects: int, plan: bytes) -> Any:
    """Checks that it can be done, writes the journal, does it. Raises OpError before anything is visible."""
    state = site.state()
    head, parts = split(plan)
    if head["base"] != state.digest.hex():
        raise OpError("moved", "another sync has changed this tree in the meantime")
    merged = merged_records(site, state, parts)
    digest = digest_of(site.engine, merged)
    if digest.hex() != head["digest"]:
        raise OpError("protocol", "the records that arrived are not those that were sent")
    overwritten = find_conflicts(site, parts)
    try:
        _copy_objects(objects, parts["copies"])
        # Takes the space for the state now: once the journal is written, nothing should fail.
        if site.free_bytes() < _SPARE_BYTES + 4 * len(merged):
            site.write_state(merged, taken_ns=0, digest=digest, name="next")
        site.write("journal", plan)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            site.empty(objects)
            site.remove("next")
        raise
    done = carry_out(site, objects, state, plan, merged=merged)
    done["overwritten"] = overwritten
    return done


def finish(site: Site) -> None:
    """A change whose journal was written, and that did not come to its end."""
    plan = site.read("journal")
    if plan is None:
        return
    state = site.state()
    try:
        head, _ = split(plan)
    except (OpError, ValueError, KeyError, struct.error):
        site.remove("journal")  # a power cut: the check tells what is missing
        return
    if state.digest.hex() == head["base"]:
        carry_out(site, site.objects(), state, plan)
    site.remove("journal")


def split(plan: bytes) -> tuple[Any, dict[str, bytes]]:
    """A plan: the length of its head, the head as JSON, the parts."""
    (head_bytes,) = PLAN_HEAD.unpack_from(plan)
    at = PLAN_HEAD.size + head_bytes
    head = json.loads(plan[PLAN_HEAD.size : at].decode())
    parts = {}
    for name in PARTS:
        parts[name] = plan[at : at + head[name]]
        at += head[name]
    if at != len(plan):
        raise OpError("protocol", "a plan that ends too soon")
    return head, parts


def join(head: dict[str, Any], parts: dict[str, bytes]) -> bytes:
    """The other way round."""
    text = json.dumps({**head, **{name: len(parts[name]) for name in PARTS}}).encode()
    return PLAN_HEAD.pack(len(text)) + text + b"".join(parts[name] for name in PARTS)


def merged_records(site: Site, state: State, parts: dict[str, bytes]) -> bytes:
    merged = state.records
    for name in PARTS:
        if parts[name]:
            merged = site.engine.merge(merged, parts[name])
    return merged


def find_conflicts(site: Site, parts: dict[str, bytes]) -> list[str]:
    """Names of files that are not ours and that will be replaced.

    Raises OpError ('conflict') where a folder would have to give way, or something else to a folder.
    """
    names = os.listdir(site.root)
    if not any(os.fsencode(name) not in tree.RESERVED for name in names):
        return []
    gone = {one.path: one.flags for one in tree.records_of(parts["gone"])}
    overwritten: list[str] = []
    with Folders(site.root) as folders:
        for name in ("folders", "added", "copies", "links"):
            for one in tree.records_of(parts[name]):
                found = folders.look(one.path)
                if found is None or gone.get(one.path) == REPLACE:
                    if found is not None and stat.S_ISDIR(found.st_mode) and one.kind != FOLDER:
                        _check_folder_goes(folders, one.path, gone)
                elif stat.S_ISDIR(found.st_mode) != (one.kind == FOLDER):
                    raise _conflict(one.path, found)
                elif name == "added" and len(overwritten) < _NAMES_SHOWN:
                    overwritten.append(_shown(one.path))
    return overwritten


def _check_folder_goes(folders: Folders, path: bytes, gone: dict[bytes, int]) -> None:
    holder, name = folders.holder(path)
    fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=holder)
    try:
        inside = [path + b"/" + os.fsencode(each) for each in os.listdir(fd)]
    finally:
        os.close(fd)
    for each in inside:
        if gone.get(each) not in (DELETE, REPLACE):
            raise OpError("conflict", f"{_shown(path)} is to become a file, and has {_shown(each)} in it")
        found = folders.look(each)
        if found is not None and stat.S_ISDIR(found.st_mode):
            _check_folder_goes(folders, each, gone)


def _conflict(path: bytes, found: os.stat_result) -> OpError:
    kinds = {stat.S_IFDIR: "a folder", stat.S_IFLNK: "a link", stat.S_IFREG: "a file"}
    kind = kinds.get(stat.S_IFMT(found.st_mode), "neither file nor folder")
    return OpError("conflict", f"{_shown(path)} is {kind} here that no sync put there")


def _shown(path: bytes) -> str:
    return path.decode("utf-8", "backslashreplace")


def carry_out(site: Site, objects: int, state: State, plan: bytes, *, merged: bytes | None = None) -> Any:
    """Puts everything into place. Doing it a second time finishes what the first time left undone."""
    head, parts = split(plan)
    if merged is None:
        merged = merged_records(site, state, parts)
    try:
        deleted, kept = _delete(site, state, parts["gone"])
        _place(site, objects, parts)
        _make_links(site, objects, parts["links"])
        _set_metas(site, parts["metas"])
        _set_metas(site, parts["folders"])
    finally:
        # Whatever went wrong, the next check sees what is not as recorded.
        taken_ns = time.time_ns()
        stamped = site.engine.stamped(site.root, merged)
        site.remove("next")
        site.write_state(stamped, taken_ns=taken_ns, digest=bytes.fromhex(head["digest"]))
        site.remove("journal")
    site.empty(objects)
    return {"deleted": deleted, "kept": kept}


def _delete(site: Site, state: State, gone: bytes) -> tuple[int, list[str]]:
    """Deletes what is as we put it there; gives the names of what stays."""
    if not gone:
        return 0, []
    flags = {one.path: one.flags for one in tree.records_of(gone)}
    places = site.engine.compare(state.records, site.engine.merge(state.records, gone))
    deleted = 0
    with Folders(site.root) as folders:
        changed = (path for path, flag in flags.items() if flag == FORGET)  # or gone there, too
        kept = [_shown(path) for path in changed if folders.look(path) is not None]
        for place, _ in reversed(places):
            one = Record(state.records, place)
            found = folders.look(one.path)
            if flags.get(one.path) == FORGET or found is None:
                continue
            holder, name = folders.holder(one.path)
            if stat.S_ISDIR(found.st_mode):
                deleted += _try_rmdir(holder, name)
            elif flags.get(one.path) == REPLACE or tree.stamp_of(found) == one.stamp:
                os.unlink(name, dir_fd=holder)
                deleted += 1
            else:
                kept.append(_shown(one.path))
    return deleted, kept[:_NAMES_SHOWN]


def _try_rmdir(holder: int, name: bytes) -> int:
    try:
        os.rmdir(name, dir_fd=holder)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        return 0  # something that is not ours is in it
    return 1


def _copy_objects(objects: int, copies: bytes) -> None:
    """Files with the same contents arrive once. Holes stay holes."""
    for number, one in enumerate(tree.records_of(copies)):
        _copy(objects, tree.object_name(one.sha, one.size), objects, b"copy-%d" % number)


def _copy(from_folder: int, name: bytes, to_folder: int, new: bytes) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    source = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=from_folder)
    try:
        target = os.open(new, flags, 0o600, dir_fd=to_folder)
        try:
            found = os.fstat(source)
            for is_data, offset, size in contents.extents(source, found):
                if is_data:
                    os.lseek(target, offset, os.SEEK_SET)
                    for data in contents.pieces(source, offset, size):
                        tree.write_all(target, data)
            os.ftruncate(target, found.st_size)
        finally:
            os.close(target)
    finally:
        os.close(source)


def _place(site: Site, objects: int, parts: dict[str, bytes]) -> None:
    try:
        # Copies first: when an object is gone, all that it is for is done.
        site.engine.place(site.root, objects, parts["folders"])
        with Folders(site.root) as folders:
            for number, one in enumerate(tree.records_of(parts["copies"])):
                tree.place_one(folders, objects, one, b"copy-%d" % number)
        site.engine.place(site.root, objects, parts["added"])
        site.engine.place(site.root, objects, parts["changed"])
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        _place_across(site, objects, parts)


def _place_across(site: Site, objects: int, parts: dict[str, bytes]) -> None:
    """Where a part of the tree is another file system, a copy is made there first."""
    with Folders(site.root) as folders:
        for name in ("copies", "added", "changed"):
            for number, one in enumerate(tree.records_of(parts[name])):
                source = b"copy-%d" % number if name == "copies" else tree.object_name(one.sha, one.size)
                try:
                    tree.place_one(folders, objects, one, source)
                except OSError as error:
                    if error.errno != errno.EXDEV:
                        raise
                    holder, _ = folders.holder(one.path)
                    near = b".grid-part-%d" % os.getpid()
                    _copy(objects, source, holder, near)
                    tree.place_one(folders, holder, one, near)


def _make_links(site: Site, objects: int, links: bytes) -> None:
    with Folders(site.root) as folders:
        for one in tree.records_of(links):
            holder, name = folders.holder(one.path)
            try:
                os.unlink(b"link", dir_fd=objects)
            except FileNotFoundError:
                pass
            os.symlink(one.link, b"link", dir_fd=objects)
            try:
                os.rename(b"link", name, src_dir_fd=objects, dst_dir_fd=holder)
            except OSError as error:
                if error.errno != errno.EXDEV:
                    raise
                near = b".grid-part-%d" % os.getpid()
                os.symlink(one.link, near, dir_fd=holder)
                os.rename(near, name, src_dir_fd=holder, dst_dir_fd=holder)


def _set_metas(site: Site, metas: bytes) -> None:
    """Modes and times of what is there; the deepest first, since a folder may be closed by its mode."""
    with Folders(site.root) as folders:
        for one in reversed(list(tree.records_of(metas))):
            holder, name = folders.holder(one.path)
            flags = getattr(os, "O_PATH", os.O_RDONLY) | os.O_NOFOLLOW | os.O_CLOEXEC
            fd = os.open(name, flags, dir_fd=holder)
            try:
                found = os.fstat(fd)
                if stat.S_ISLNK(found.st_mode):
                    continue  # planted since the check; its target is not ours
                if stat.S_IMODE(found.st_mode) != one.mode:
                    # A descriptor without rights to read takes no fchmod(), but has a name that leads to it.
                    target: Any = f"/proc/self/fd/{fd}" if hasattr(os, "O_PATH") else fd
                    os.chmod(target, one.mode)
            finally:
                os.close(fd)
            if one.kind == FILE:
                times = (one.mtime_ns, one.mtime_ns)
                os.utime(name, ns=times, dir_fd=holder, follow_symlinks=False)


def look_closer(site: Site, state: State) -> bytes:
    """Records of what is not as we left it, as it is now; where only times differ, the state learns that."""
    places = site.engine.check(site.root, state.records, taken_ns=state.taken_ns)
    if not places:
        return b""
    taken_ns = time.time_ns()
    drift, healed = [], []
    with Folders(site.root) as folders:
        for place in places:
            one = Record(state.records, place)
            now = _as_it_is(folders, one)
            plain_bytes = len(now) - tree.STAMP.size
            if now[:plain_bytes] == one.plain:
                healed.append(now)
            else:
                drift.append(now)
    if healed:
        merged = site.engine.merge(state.records, b"".join(healed))
        site.write_state(merged, taken_ns=taken_ns, digest=state.digest)
    return b"".join(drift)


def _as_it_is(folders: Folders, one: Record) -> bytes:
    found = folders.look(one.path)
    if found is None:
        return tree.record(REMOVED, one.path)
    mode, stamp = stat.S_IMODE(found.st_mode), tree.stamp_of(found)
    if stat.S_ISDIR(found.st_mode):
        return tree.record(FOLDER, one.path, mode=mode)
    holder, name = folders.holder(one.path)
    if stat.S_ISLNK(found.st_mode):
        link = os.fsencode(os.readlink(name, dir_fd=holder))
        return tree.record(LINK, one.path, mode=0o777, link=link, stamp=stamp)
    if not stat.S_ISREG(found.st_mode):
        return tree.record(REMOVED, one.path)
    # One of another size has other contents: no need to read them.
    sha = tree.NO_SHA if found.st_size != one.size else _sha_of(holder, name)
    return tree.record(
        FILE, one.path, mode=mode, size=found.st_size, mtime_ns=found.st_mtime_ns, sha=sha, stamp=stamp
    )


def _sha_of(holder: int, name: bytes) -> bytes:
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        fd = os.open(name, flags, dir_fd=holder)
    except OSError:
        return tree.NO_SHA  # it was taken away just now, or its mode was
    try:
        return contents.digest_of_file(fd)
    finally:
        os.close(fd)


def _staged(site: Site) -> list[bytes]:
    """What has arrived whole; what has not is removed. Only with the lock."""
    objects = site.objects()
    found = []
    for name in os.listdir(objects):
        if not _OBJECT.fullmatch(name):
            continue
        sha, _, size = name.partition(".")
        status = os.stat(name, dir_fd=objects, follow_symlinks=False)
        if stat.S_ISREG(status.st_mode) and status.st_size == int(size, 16):
            found.append(bytes.fromhex(sha))
        elif not stat.S_ISDIR(status.st_mode):
            os.unlink(name, dir_fd=objects)
    return found


def _is_good_library(path: str, binary: bytes) -> bool:
    # A name of its own: someone else may be loading theirs, and must not see it change.
    part = f"{path}.{os.getpid()}-{threading.get_ident()}.part"
    try:
        with open(part, "wb") as file:
            file.write(binary)
        if not isinstance(tree.engine_at(part), tree.Compiled):
            return False
        os.rename(part, path)
        return True
    finally:
        _remove(part)


def _clear_library_parts(site: Site) -> None:
    """What was left by those who were ended while they made a library, which takes minutes at most."""
    found = [name for name in os.listdir(site.shared) if _LIBRARY_PART.fullmatch(name)]
    for name in found[:_PARTS_LOOKED_AT_MAX]:
        try:
            made = os.stat(name, dir_fd=site.shared, follow_symlinks=False).st_mtime
            if time.time() - made > _PART_AGE_S_MAX:
                os.unlink(name, dir_fd=site.shared)
        except OSError:  # gone already, or not ours to remove: it is in nobody's way
            pass


def _remove(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass


def _sync_folder(args: Any) -> str:
    return own_folder(os.path.expanduser(args["root"]), "sync")


def _machine() -> str:
    return sys.platform + "-" + os.uname().machine
