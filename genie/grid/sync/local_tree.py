"""The folder that is sent: its records, kept up to date with a cache of what files looked like.

As git does with its index: a file whose size, times and inode are as they were is not read again, unless
it was written so shortly before the last look that this proves nothing. The cache is under the state
directory, one file for each folder that was ever sent; losing it costs reading everything once.

Not for: what a node has, or what is sent to it.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import time
from dataclasses import dataclass
from pathlib import Path

from genie.errors import NativeBuildError, SyncError, UsageError
from genie.grid.grid_file import SyncKeys
from genie.grid.remote import tree
from genie.grid.remote.site import STATE_HEAD, STATE_MAGIC
from genie.grid.remote.tree import NO_SHA, Record
from genie.grid.sync.excludes import Excludes, rules_digest
from genie.runtime import native

_log = logging.getLogger(__name__)
_INDEXES_KEPT = 64
_SHA_AT = tree.HEAD.size - len(NO_SHA)


@dataclass
class Snapshot:
    """The tree as one walk saw it. `records` change in place while contents become known."""

    root: Path
    records: bytearray
    dirty: list[int]
    """Places of files whose contents are not known yet."""
    taken_ns: int
    rules: bytes
    old_records: bytes
    old_digest: str
    """Of the walk before: what nodes are likely to have."""
    skipped: int
    is_same: bool
    digest: str = ""
    """Known when nothing is dirty."""

    @property
    def files(self) -> list[int]:
        return [one.at for one in tree.records_of(bytes(self.records)) if one.kind == tree.FILE]

    def set_sha(self, place: int, sha: bytes) -> None:
        if self.digest and tree.sha_at(self.records, place) != sha:
            self._forget_digest()
        self.records[place + _SHA_AT : place + tree.HEAD.size] = sha

    def _forget_digest(self) -> None:
        self.digest, self.is_same = "", False

    def restat(self, place: int, found: os.stat_result) -> None:
        """The file is not as the walk saw it: from here on it is as it was when it was read."""
        one = Record(self.records, place)
        self._forget_digest()
        head = tree.HEAD.pack(
            tree.FILE,
            0,
            found.st_mode & 0o7777,
            len(one.path),
            0,
            found.st_size,
            found.st_mtime_ns,
            NO_SHA,
        )
        self.records[place : place + tree.HEAD.size] = head
        self.records[one.end - tree.STAMP.size : one.end] = tree.stamp_of(found)


class LocalTree:
    """One folder. Blocking: call it from a thread."""

    def __init__(self, root: Path, keys: SyncKeys, *, cache: Path, engine: tree.Plain) -> None:
        self.root = root
        self.engine = engine
        self._keys = keys
        name = hashlib.sha256(os.fsencode(root)).hexdigest()[:32]
        self._index = cache / f"{name}.index"

    def scan(self) -> Snapshot:
        """Walks it. Raises SyncError that names what could not be read."""
        rules = rules_digest(self._keys.exclude_patterns, follow=self._keys.follow_symlinks)
        old, old_taken_ns, old_digest, old_rules = self._read_index()
        reuse = old_rules == rules
        taken_ns = time.time_ns()
        walked = self._walk(old, taken_ns=old_taken_ns, reuse=reuse)
        if reuse and walked.rules_changed:
            # A .gitignore is not what it was: every path is asked for again.
            taken_ns = time.time_ns()
            walked = self._walk(old, taken_ns=old_taken_ns, reuse=False)
        return Snapshot(
            root=self.root,
            records=bytearray(walked.records),
            dirty=walked.dirty,
            taken_ns=taken_ns,
            rules=rules,
            old_records=old,
            old_digest=old_digest,
            skipped=walked.skipped,
            is_same=walked.is_same and bool(old_digest),
            digest=old_digest if walked.is_same else "",
        )

    def settle(self, snapshot: Snapshot) -> None:
        """All contents are known: the digest is made."""
        if not snapshot.digest:
            records = bytes(snapshot.records)
            snapshot.digest = hashlib.sha256(self.engine.plain(records)).hexdigest()
            snapshot.dirty = []

    def save(self, snapshot: Snapshot) -> None:
        """Writes the cache, if anything is new."""
        if snapshot.is_same or not snapshot.digest:
            return
        snapshot.is_same = True
        digest = bytes.fromhex(snapshot.digest)
        head = STATE_HEAD.pack(STATE_MAGIC, snapshot.taken_ns, digest, snapshot.rules)
        try:
            self._write_index(head + bytes(snapshot.records))
        except OSError as error:
            _log.warning("the cache of a sync cannot be written", extra={"why": error.strerror})

    def _walk(self, old: bytes, *, taken_ns: int, reuse: bool) -> tree.Walked:
        excludes = Excludes(self.root, self._keys.exclude_patterns)
        try:
            return self.engine.walk(
                str(self.root),
                old,
                taken_ns=taken_ns,
                reuse=reuse,
                decide=excludes.is_left_out,
                follow=self._keys.follow_symlinks,
            )
        except OSError as error:
            where = self.root / (error.filename or "")
            raise SyncError(
                f"{where} cannot be read: {error.strerror}",
                hint="leave it out with sync.exclude_patterns or a .gitignore, or make it readable",
            ) from None

    def _read_index(self) -> tuple[bytes, int, str, bytes]:
        try:
            data = self._index.read_bytes()
        except OSError:
            return b"", 0, "", b""
        if len(data) < STATE_HEAD.size:
            return b"", 0, "", b""
        magic, taken_ns, digest, rules = STATE_HEAD.unpack_from(data)
        records = data[STATE_HEAD.size :]
        try:
            whole = magic == STATE_MAGIC and hashlib.sha256(self.engine.plain(records)).digest() == digest
        except OSError:
            whole = False
        return (records, taken_ns, digest.hex(), rules) if whole else (b"", 0, "", b"")

    def _write_index(self, data: bytes) -> None:
        self._index.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        part = self._index.with_suffix(f".{os.getpid()}.part")
        part.write_bytes(data)
        # Not over the old one: file systems then wait for the disk, and a lost cache costs little.
        self._index.unlink(missing_ok=True)
        part.replace(self._index)
        kept = sorted(self._index.parent.glob("*.index"), key=lambda path: path.stat().st_mtime, reverse=True)
        for path in kept[_INDEXES_KEPT:]:
            path.unlink(missing_ok=True)


def local_root(folder: Path) -> Path:
    """The folder with all links in its own path resolved. Raises UsageError for what is no folder."""
    try:
        root = folder.expanduser().resolve(strict=True)
    except OSError as error:
        raise UsageError(f"{folder} cannot be sent: {error.strerror}") from None
    if not root.is_dir():
        raise UsageError(f"{folder} is not a folder", hint="name the folder of the project")
    if root.parent == root:
        raise UsageError("the whole machine cannot be sent", hint="name the folder of the project")
    return root


@functools.cache
def local_engine() -> tree.Plain:
    """The compiled one, made now if need be; plain Python on a machine without a compiler."""
    with contextlib.suppress(OSError):
        try:
            return tree.Compiled(str(native.Workshop.of_this_installation().build("genie_tree")))
        except NativeBuildError as error:
            _log.info("trees are read in Python", extra={"why": error.message})
    return tree.Plain()


@functools.cache
def library() -> tuple[str, bytes, bytes]:
    """What nodes are offered: a key, the library as it is compiled here (b'' if it is not), its source."""
    workshop = native.Workshop.of_this_installation()
    source = (workshop.sources / "grid" / "tree.cpp").read_bytes()
    key = hashlib.sha256(source).hexdigest()[:32]
    try:
        return key, workshop.build("genie_tree").read_bytes(), source
    except NativeBuildError:
        return key, b"", source
