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
    """Changes to apply. Offsets are into the local records; `deletion_records` are records to send."""

    folder_offsets: list[int] = field(default_factory=list)
    added_offsets: list[int] = field(default_factory=list)
    changed_offsets: list[int] = field(default_factory=list)
    link_offsets: list[int] = field(default_factory=list)
    meta_offsets: list[int] = field(default_factory=list)
    deletion_records: list[bytes] = field(default_factory=list)
    restored_count: int = 0

    @property
    def content_offsets(self) -> list[int]:
        """Offsets of the files whose contents the node needs."""
        return sorted(self.added_offsets + self.changed_offsets)

    def __bool__(self) -> bool:
        return bool(
            self.folder_offsets
            or self.added_offsets
            or self.changed_offsets
            or self.link_offsets
            or self.meta_offsets
            or self.deletion_records
        )


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
            _new_entry_offsets_of_kind(found, ours[new_at]).append(new_at)
            continue
        old = TreeRecord(actual, old_at) if old_at != NO_RECORD_OFFSET else None
        if new_at == NO_RECORD_OFFSET:
            assert old is not None
            flags = FORGET if old.path in drifted else DELETE
            found.deletion_records.append(tree.pack_record(REMOVED, old.path, flags=flags))
            continue
        new = TreeRecord(ours, new_at)
        seen_paths.add(new.path)
        found.restored_count += new.path in drifted
        _add_change(found, old, new, checksums=checksums)
    if drift:
        _add_records_already_equal(found, engine, theirs=theirs, ours=ours, paths=drifted.keys() - seen_paths)
    removed = [path for path in removed if path not in seen_paths]
    if removed:
        found.deletion_records += [tree.pack_record(REMOVED, path, flags=FORGET) for path in removed]
        found.deletion_records.sort(key=lambda one: tree.walk_order_key(TreeRecord(one).path))
    return found


def _add_records_already_equal(
    found: TreeDelta, engine: tree.PlainEngine, *, theirs: bytes, ours: bytes, paths: Set[bytes]
) -> None:
    """Adds paths that were changed on the node to what they are here: only the node's record is updated."""
    for _, new_at in engine.compare_records(theirs, ours):
        if new_at != NO_RECORD_OFFSET:
            new = TreeRecord(ours, new_at)
            if new.path in paths:
                (
                    found.meta_offsets if new.kind == FILE else _new_entry_offsets_of_kind(found, new.kind)
                ).append(new_at)


def _add_change(found: TreeDelta, old: TreeRecord | None, new: TreeRecord, *, checksums: bool) -> None:
    if old is not None and (old.kind == FOLDER) != (new.kind == FOLDER):
        found.deletion_records.append(tree.pack_record(REMOVED, new.path, flags=REPLACE))
        old = None
    if new.kind != FILE or old is None:
        _new_entry_offsets_of_kind(found, new.kind).append(new.at)
    elif _needs_transfer(old, new, checksums=checksums):
        found.changed_offsets.append(new.at)
    else:
        found.meta_offsets.append(new.at)


def _new_entry_offsets_of_kind(found: TreeDelta, kind: int) -> list[int]:
    """Returns the list for new entries of this kind."""
    if kind == FOLDER:
        return found.folder_offsets
    return found.added_offsets if kind == FILE else found.link_offsets


def _needs_transfer(old: TreeRecord, new: TreeRecord, *, checksums: bool) -> bool:
    if old.kind != FILE or old.sha != new.sha or old.size != new.size:
        return True
    return not checksums and old.mtime_ns != new.mtime_ns


def encode_plan(delta: TreeDelta, ours: bytes, *, base: str, digest: str) -> bytes:
    """Encodes the plan for the node, after all hashes are known. Duplicate files are copied on the node."""
    seen: set[bytes] = set()
    parts: dict[str, list[bytes]] = {"added": [], "changed": [], "copies": []}
    for name, offsets in (("added", delta.added_offsets), ("changed", delta.changed_offsets)):
        for offset in offsets:
            sha = tree.file_sha_of_record(ours, offset)
            parts["copies" if sha in seen else name].append(tree.record_with_empty_stamp(ours, offset))
            seen.add(sha)
    parts["copies"].sort(key=lambda one: tree.walk_order_key(TreeRecord(one).path))
    for name, offsets in (
        ("folders", delta.folder_offsets),
        ("links", delta.link_offsets),
        ("metas", delta.meta_offsets),
    ):
        parts[name] = [tree.record_with_empty_stamp(ours, offset) for offset in offsets]
    parts["gone"] = delta.deletion_records
    head: dict[str, Any] = {"base": base, "digest": digest}
    return join_plan(head, {name: b"".join(records) for name, records in parts.items()})


def paths_at_offsets(ours: bytes, offsets: list[int]) -> list[bytes]:
    return [TreeRecord(ours, offset).path for offset in offsets]


def split_deleted_and_kept_paths(delta: TreeDelta, *, drift: bytes) -> tuple[list[bytes], list[bytes]]:
    """Returns the paths that the node will delete, and those it keeps because they were modified there."""
    removed = {one.path for one in tree.iter_records(drift) if one.kind == REMOVED}
    gone = [TreeRecord(one) for one in delta.deletion_records]
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
