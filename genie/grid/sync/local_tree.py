"""Scans the local folder, with an index of file metadata like git's.

A file whose size, times and inode are unchanged is not read again, unless it was written too shortly before
the last scan to be sure. The index is in the state directory, one file per synced folder; without it, all
files are read once.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import time
from dataclasses import dataclass
from pathlib import Path

from genie.errors import NativeBuildError, SyncError, UsageError
from genie.grid.grid_file import SyncSettings
from genie.grid.remote import tree
from genie.grid.remote.synced_tree import STATE_FILE_HEADER, STATE_FILE_MAGIC
from genie.grid.remote.tree import NO_SHA, TreeRecord
from genie.grid.sync.excludes import ExclusionRules, compute_rules_digest
from genie.native import libraries
from genie.processes.project_folder import why_folder_must_not_be_sent

_log = logging.getLogger(__name__)
_INDEX_FILES_KEPT = 64
_SYNC_FOLDER_HINT = "change to the directory of the project, or pass its path"
_SHA_OFFSET_IN_RECORD = tree.RECORD_HEADER.size - len(NO_SHA)


@dataclass
class TreeSnapshot:
    """The tree as of one scan. `records` are updated in place as files are hashed."""

    root: Path
    records: bytearray
    unhashed_offsets: list[int]
    """Offsets of the files that are not hashed yet."""
    taken_ns: int
    rules_digest: bytes
    old_records: bytes
    old_digest: str
    """Digest of the previous scan: nodes are likely to have that state."""
    skipped_count: int
    is_unchanged: bool
    digest: str = ""
    """Set when all files are hashed."""

    @property
    def file_offsets(self) -> list[int]:
        return [one.at for one in tree.iter_records(bytes(self.records)) if one.kind == tree.FILE]

    def set_file_sha(self, offset: int, sha: bytes) -> None:
        if self.digest and tree.file_sha_of_record(self.records, offset) != sha:
            self._clear_digest()
        self.records[offset + _SHA_OFFSET_IN_RECORD : offset + tree.RECORD_HEADER.size] = sha

    def _clear_digest(self) -> None:
        self.digest, self.is_unchanged = "", False

    def update_record(self, offset: int, found: os.stat_result) -> None:
        """Updates the record of a file that has changed since the scan."""
        one = TreeRecord(self.records, offset)
        self._clear_digest()
        head = tree.RECORD_HEADER.pack(
            tree.FILE,
            0,
            found.st_mode & 0o7777,
            len(one.path),
            0,
            found.st_size,
            found.st_mtime_ns,
            NO_SHA,
        )
        self.records[offset : offset + tree.RECORD_HEADER.size] = head
        self.records[one.end_offset - tree.STAMP_STRUCT.size : one.end_offset] = tree.pack_stamp(found)


class LocalTree:
    """One local folder. Blocking: call it from a thread."""

    def __init__(self, root: Path, keys: SyncSettings, *, cache: Path, engine: tree.PlainEngine) -> None:
        self.root = root
        self.engine = engine
        self._settings = keys
        name = hashlib.sha256(os.fsencode(root)).hexdigest()[:32]
        self._index_path = cache / f"{name}.index"

    def scan(self) -> TreeSnapshot:
        """Scans the folder. Raises SyncError that names an unreadable path."""
        rules = compute_rules_digest(self._settings.exclude_patterns, follow=self._settings.follow_symlinks)
        old, old_taken_ns, old_digest, old_rules = self._read_index()
        reuse = old_rules == rules
        taken_ns = time.time_ns()
        walked = self._walk_tree(old, taken_ns=old_taken_ns, reuse=reuse)
        if reuse and walked.rules_changed:
            # A .gitignore has changed: decide again for every path.
            taken_ns = time.time_ns()
            walked = self._walk_tree(old, taken_ns=old_taken_ns, reuse=False)
        return TreeSnapshot(
            root=self.root,
            records=bytearray(walked.records),
            unhashed_offsets=walked.unhashed_offsets,
            taken_ns=taken_ns,
            rules_digest=rules,
            old_records=old,
            old_digest=old_digest,
            skipped_count=walked.skipped_count,
            is_unchanged=walked.is_unchanged and bool(old_digest),
            digest=old_digest if walked.is_unchanged else "",
        )

    def set_snapshot_digest(self, snapshot: TreeSnapshot) -> None:
        """Computes the digest; all files are hashed."""
        if not snapshot.digest:
            records = bytes(snapshot.records)
            snapshot.digest = hashlib.sha256(self.engine.strip_stamps_and_excluded(records)).hexdigest()
            snapshot.unhashed_offsets = []

    def write_index_if_changed(self, snapshot: TreeSnapshot) -> None:
        """Writes the index if it has changed."""
        if snapshot.is_unchanged or not snapshot.digest:
            return
        snapshot.is_unchanged = True
        digest = bytes.fromhex(snapshot.digest)
        head = STATE_FILE_HEADER.pack(STATE_FILE_MAGIC, snapshot.taken_ns, digest, snapshot.rules_digest)
        try:
            self._write_index(head + bytes(snapshot.records))
        except OSError as error:
            _log.warning("could not write the index of a synced folder", extra={"why": error.strerror})

    def _walk_tree(self, old: bytes, *, taken_ns: int, reuse: bool) -> tree.WalkResult:
        excludes = ExclusionRules(self.root, self._settings.exclude_patterns)
        try:
            return self.engine.walk(
                str(self.root),
                old,
                taken_ns=taken_ns,
                reuse=reuse,
                is_excluded=excludes.is_excluded,
                follow=self._settings.follow_symlinks,
            )
        except OSError as error:
            where = self.root / (error.filename or "")
            raise SyncError(
                f"could not read {where}: {error.strerror}",
                hint="make it readable, or exclude it with sync.exclude_patterns or a .gitignore",
            ) from None

    def _read_index(self) -> tuple[bytes, int, str, bytes]:
        try:
            data = self._index_path.read_bytes()
        except OSError:
            return b"", 0, "", b""
        if len(data) < STATE_FILE_HEADER.size:
            return b"", 0, "", b""
        magic, taken_ns, digest, rules = STATE_FILE_HEADER.unpack_from(data)
        records = data[STATE_FILE_HEADER.size :]
        try:
            whole = (
                magic == STATE_FILE_MAGIC
                and hashlib.sha256(self.engine.strip_stamps_and_excluded(records)).digest() == digest
            )
        except OSError:
            whole = False
        return (records, taken_ns, digest.hex(), rules) if whole else (b"", 0, "", b"")

    def _write_index(self, data: bytes) -> None:
        self._index_path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        part = self._index_path.with_suffix(f".{os.getpid()}.part")
        part.write_bytes(data)
        # Not over the old one: some file systems flush on such a rename, and a lost index costs little.
        self._index_path.unlink(missing_ok=True)
        part.replace(self._index_path)
        kept = sorted(
            self._index_path.parent.glob("*.index"), key=lambda path: path.stat().st_mtime, reverse=True
        )
        for path in kept[_INDEX_FILES_KEPT:]:
            path.unlink(missing_ok=True)


def resolve_local_root(folder: Path) -> Path:
    """Resolves links in the path of the folder. Raises UsageError if it is not a folder, and for the home
    directory and its parents: they are only sent by mistake, and may take hours."""
    try:
        root = folder.expanduser().resolve(strict=True)
    except (OSError, RuntimeError, ValueError) as error:  # no such user; a loop of links; a null character
        why = getattr(error, "strerror", None) or error
        raise UsageError(f"could not send {str(folder)!r}: {why}", hint=_SYNC_FOLDER_HINT) from None
    why = why_folder_must_not_be_sent(root) if root.is_dir() else "it is not a folder"
    if why:
        raise UsageError(f"could not send {root}: {why}", hint=_SYNC_FOLDER_HINT)
    return root


@functools.cache
def load_local_engine() -> tree.PlainEngine:
    """Returns the compiled engine, building it if needed; the Python one if there is no compiler."""
    try:
        return tree.CompiledEngine(str(libraries.BuildCache.of_this_installation().build("genie_tree")))
    except (NativeBuildError, OSError, AttributeError) as error:  # AttributeError: a function is missing
        _log.info("using the Python engine to scan trees", extra={"why": str(error)})
    return tree.PlainEngine()


@functools.cache
def read_engine_library() -> tuple[str, bytes, bytes]:
    """Returns the library for nodes: its key, the local binary (b'' if not compiled), and its source."""
    build_cache = libraries.BuildCache.of_this_installation()
    source = (build_cache.source_folder / "grid" / "tree.cpp").read_bytes()
    key = hashlib.sha256(source).hexdigest()[:32]
    try:
        return key, build_cache.build("genie_tree").read_bytes(), source
    except NativeBuildError:
        return key, b"", source
