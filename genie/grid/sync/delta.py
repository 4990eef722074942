"""Computes the changes that make a node's tree equal to the local one: a pure comparison of records.

The local side wins for synced files, even if they were modified on the node. Files that no sync put there
stay, unless a local file has the same path. Files deleted here are deleted on the node if unmodified there.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field
from typing import Any

from genie.grid.remote import tree
from genie.grid.remote.sync import DELETE, FORGET, REPLACE, join_plan
from genie.grid.remote.tree import FILE, FOLDER, NO_RECORD_OFFSET, REMOVED, TreeRecord


@dataclass
class TreeDelta:
    """Changes to apply. Lists of int are offsets into the local records; `deletions` are records to send."""

    folders: list[int] = field(default_factory=list)
    added: list[int] = field(default_factory=list)
    changed: list[int] = field(default_factory=list)
    links: list[int] = field(default_factory=list)
    metas: list[int] = field(default_factory=list)
    deletions: list[bytes] = field(default_factory=list)
    restored: int = 0

    @property
    def content_offsets(self) -> list[int]:
        """Offsets of the files whose contents the node needs."""
        return sorted(self.added + self.changed)

    def __bool__(self) -> bool:
        return bool(self.folders or self.added or self.changed or self.links or self.metas or self.deletions)


def compute_delta(
    engine: tree.PlainEngine, *, theirs: bytes, drift: bytes, ours: bytes, checksums: bool = True
) -> TreeDelta:
    """Compares: `theirs` is the last synced state, `drift` the changes on the node, `ours` the target."""
    found = TreeDelta()
    drifted = {one.path: one for one in tree.iter_records(drift)}
    removed = [path for path, one in drifted.items() if one.kind == REMOVED]
    actual = engine.merge_records(theirs, drift) if drift else theirs
    seen_paths: set[bytes] = set()
    for old_at, new_at in engine.compare_records(actual, ours):
        if old_at == NO_RECORD_OFFSET and not drift:
            _offsets_for_kind(found, ours[new_at]).append(new_at)
            continue
        old = TreeRecord(actual, old_at) if old_at != NO_RECORD_OFFSET else None
        if new_at == NO_RECORD_OFFSET:
            assert old is not None
            flags = FORGET if old.path in drifted else DELETE
            found.deletions.append(tree.pack_record(REMOVED, old.path, flags=flags))
            continue
        new = TreeRecord(ours, new_at)
        seen_paths.add(new.path)
        found.restored += new.path in drifted
        _add_record(found, old, new, checksums=checksums)
    if drift:
        _add_equal_records(found, engine, theirs=theirs, ours=ours, paths=drifted.keys() - seen_paths)
    removed = [path for path in removed if path not in seen_paths]
    if removed:
        found.deletions += [tree.pack_record(REMOVED, path, flags=FORGET) for path in removed]
        found.deletions.sort(key=lambda one: tree.walk_order_key(TreeRecord(one).path))
    return found


def _add_equal_records(
    found: TreeDelta, engine: tree.PlainEngine, *, theirs: bytes, ours: bytes, paths: Set[bytes]
) -> None:
    """Adds paths that were changed on the node to what they are here: only the node's record is updated."""
    for _, new_at in engine.compare_records(theirs, ours):
        if new_at != NO_RECORD_OFFSET:
            new = TreeRecord(ours, new_at)
            if new.path in paths:
                (found.metas if new.kind == FILE else _offsets_for_kind(found, new.kind)).append(new_at)


def _add_record(found: TreeDelta, old: TreeRecord | None, new: TreeRecord, *, checksums: bool) -> None:
    if old is not None and (old.kind == FOLDER) != (new.kind == FOLDER):
        found.deletions.append(tree.pack_record(REMOVED, new.path, flags=REPLACE))
        old = None
    if new.kind != FILE or old is None:
        _offsets_for_kind(found, new.kind).append(new.at)
    elif _needs_transfer(old, new, checksums=checksums):
        found.changed.append(new.at)
    else:
        found.metas.append(new.at)


def _offsets_for_kind(found: TreeDelta, kind: int) -> list[int]:
    """Returns the list for new entries of this kind."""
    if kind == FOLDER:
        return found.folders
    return found.added if kind == FILE else found.links


def _needs_transfer(old: TreeRecord, new: TreeRecord, *, checksums: bool) -> bool:
    if old.kind != FILE or old.sha != new.sha or old.size != new.size:
        return True
    return not checksums and old.mtime_ns != new.mtime_ns


def encode_plan(delta: TreeDelta, ours: bytes, *, base: str, digest: str) -> bytes:
    """Encodes the plan for the node, after all hashes are known. Duplicate files are copied on the node."""
    seen: set[bytes] = set()
    parts: dict[str, list[bytes]] = {"added": [], "changed": [], "copies": []}
    for name, offsets in (("added", delta.added), ("changed", delta.changed)):
        for offset in offsets:
            sha = tree.file_sha_of_record(ours, offset)
            parts["copies" if sha in seen else name].append(tree.record_with_empty_stamp(ours, offset))
            seen.add(sha)
    parts["copies"].sort(key=lambda one: tree.walk_order_key(TreeRecord(one).path))
    for name, offsets in (("folders", delta.folders), ("links", delta.links), ("metas", delta.metas)):
        parts[name] = [tree.record_with_empty_stamp(ours, offset) for offset in offsets]
    parts["gone"] = delta.deletions
    head: dict[str, Any] = {"base": base, "digest": digest}
    return join_plan(head, {name: b"".join(records) for name, records in parts.items()})


def list_paths(ours: bytes, offsets: list[int]) -> list[bytes]:
    return [TreeRecord(ours, offset).path for offset in offsets]


def split_deleted_and_kept_paths(delta: TreeDelta, *, drift: bytes) -> tuple[list[bytes], list[bytes]]:
    """Returns the paths that the node will delete, and those it keeps because they were modified there."""
    removed = {one.path for one in tree.iter_records(drift) if one.kind == REMOVED}
    gone = [TreeRecord(one) for one in delta.deletions]
    kept = [one.path for one in gone if one.flags == FORGET and one.path not in removed]
    return [one.path for one in gone if one.flags != FORGET], kept


def count_content_bytes(ours: bytes, offsets: list[int], *, without: Set[bytes] = frozenset()) -> int:
    """Returns the bytes to send, without contents whose hash is in `without`."""
    if not without:
        return sum(tree.file_size_of_record(ours, offset) for offset in offsets)
    return sum(
        tree.file_size_of_record(ours, offset)
        for offset in offsets
        if tree.file_sha_of_record(ours, offset) not in without
    )
