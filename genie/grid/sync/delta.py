"""What has to happen on a node so that it has our tree: a pure comparison of records.

Our side wins for what we manage, also where someone changed it on the node; what a sync did not put there
stays, except where a file of ours goes. What we no longer have is deleted if it is as we put it there.

Not for: reading files, or talking to nodes.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field
from typing import Any

from genie.grid.remote import tree
from genie.grid.remote.sync import DELETE, FORGET, REPLACE, join
from genie.grid.remote.tree import FILE, FOLDER, NONE, REMOVED, Record


@dataclass
class Delta:
    """Places are those of our records. `gone` are records for the node."""

    folders: list[int] = field(default_factory=list)
    added: list[int] = field(default_factory=list)
    changed: list[int] = field(default_factory=list)
    links: list[int] = field(default_factory=list)
    metas: list[int] = field(default_factory=list)
    gone: list[bytes] = field(default_factory=list)
    restored: int = 0

    @property
    def contents(self) -> list[int]:
        """The places of files whose contents the node needs."""
        return sorted(self.added + self.changed)

    def __bool__(self) -> bool:
        return bool(self.folders or self.added or self.changed or self.links or self.metas or self.gone)


def delta_of(
    engine: tree.Plain, *, theirs: bytes, drift: bytes, ours: bytes, checksums: bool = True
) -> Delta:
    """`theirs` is what we put there, `drift` what is otherwise there by now, `ours` what it shall be."""
    found = Delta()
    drifted = {one.path: one for one in tree.records_of(drift)}
    lost = [path for path, one in drifted.items() if one.kind == REMOVED]
    actual = engine.merge(theirs, drift) if drift else theirs
    kept: set[bytes] = set()
    for old_at, new_at in engine.compare(actual, ours):
        if old_at == NONE and not drift:
            _places_of(found, ours[new_at]).append(new_at)
            continue
        old = Record(actual, old_at) if old_at != NONE else None
        if new_at == NONE:
            assert old is not None
            flags = FORGET if old.path in drifted else DELETE
            found.gone.append(tree.record(REMOVED, old.path, flags=flags))
            continue
        new = Record(ours, new_at)
        kept.add(new.path)
        found.restored += new.path in drifted
        _add(found, old, new, checksums=checksums)
    if drift:
        _record_equals(found, engine, theirs=theirs, ours=ours, paths=drifted.keys() - kept)
    lost = [path for path in lost if path not in kept]
    if lost:
        found.gone += [tree.record(REMOVED, path, flags=FORGET) for path in lost]
        found.gone.sort(key=lambda one: tree.order(Record(one).path))
    return found


def _record_equals(
    found: Delta, engine: tree.Plain, *, theirs: bytes, ours: bytes, paths: Set[bytes]
) -> None:
    """What was changed there to what we have now: nothing is sent, but it has to be noted there."""
    for _, new_at in engine.compare(theirs, ours):
        if new_at != NONE:
            new = Record(ours, new_at)
            if new.path in paths:
                (found.metas if new.kind == FILE else _places_of(found, new.kind)).append(new_at)


def _add(found: Delta, old: Record | None, new: Record, *, checksums: bool) -> None:
    if old is not None and (old.kind == FOLDER) != (new.kind == FOLDER):
        found.gone.append(tree.record(REMOVED, new.path, flags=REPLACE))
        old = None
    if new.kind != FILE or old is None:
        _places_of(found, new.kind).append(new.at)
    elif _differs(old, new, checksums=checksums):
        found.changed.append(new.at)
    else:
        found.metas.append(new.at)


def _places_of(found: Delta, kind: int) -> list[int]:
    """Where something goes that was not there."""
    if kind == FOLDER:
        return found.folders
    return found.added if kind == FILE else found.links


def _differs(old: Record, new: Record, *, checksums: bool) -> bool:
    if old.kind != FILE or old.sha != new.sha or old.size != new.size:
        return True
    return not checksums and old.mtime_ns != new.mtime_ns


def plan_of(delta: Delta, ours: bytes, *, base: str, digest: str) -> bytes:
    """What the node gets, once all contents are known. Files with the same contents are copied there."""
    seen: set[bytes] = set()
    parts: dict[str, list[bytes]] = {"added": [], "changed": [], "copies": []}
    for name, places in (("added", delta.added), ("changed", delta.changed)):
        for place in places:
            sha = tree.sha_at(ours, place)
            parts["copies" if sha in seen else name].append(tree.unstamped(ours, place))
            seen.add(sha)
    parts["copies"].sort(key=lambda one: tree.order(Record(one).path))
    for name, places in (("folders", delta.folders), ("links", delta.links), ("metas", delta.metas)):
        parts[name] = [tree.unstamped(ours, place) for place in places]
    parts["gone"] = delta.gone
    head: dict[str, Any] = {"base": base, "digest": digest}
    return join(head, {name: b"".join(records) for name, records in parts.items()})


def paths_of(ours: bytes, places: list[int]) -> list[bytes]:
    return [Record(ours, place).path for place in places]


def gone_of(delta: Delta, *, drift: bytes) -> tuple[list[bytes], list[bytes]]:
    """What the node will delete, and what it keeps because it was changed there."""
    lost = {one.path for one in tree.records_of(drift) if one.kind == REMOVED}
    gone = [Record(one) for one in delta.gone]
    kept = [one.path for one in gone if one.flags == FORGET and one.path not in lost]
    return [one.path for one in gone if one.flags != FORGET], kept


def bytes_of(ours: bytes, places: list[int], *, without: Set[bytes] = frozenset()) -> int:
    """How much is to be sent, leaving out contents that are there already."""
    if not without:
        return sum(tree.size_at(ours, place) for place in places)
    return sum(tree.size_at(ours, place) for place in places if tree.sha_at(ours, place) not in without)
