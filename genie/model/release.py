"""Releases of Genie and versions of its protocols, and which of them work together. Pure.

Peers work together if their releases have the same major version and minor versions at most one apart
(docs/decisions/0029-version-skew.md), and if they speak a common version of the protocol. Each side announces
the versions that it speaks, without waiting for the other, and both use the highest common one.

A field that a release adds to a stored record is marked with `since`: it is written only once every server
has that release.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
from msgspec import inspect

from genie.errors import VersionError
from genie.version import __version__

MINOR_VERSIONS_APART_MAX = 1
_SINCE = "since"
_RELEASE_PATTERN = re.compile(r"(\d{1,6})\.(\d{1,6})(?:[.\-+a-z].*)?")


class Release(NamedTuple):
    """The part of a version that decides about compatibility."""

    major: int
    minor: int

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}"

    def works_with(self, other: Release) -> bool:
        return self.major == other.major and abs(self.minor - other.minor) <= MINOR_VERSIONS_APART_MAX


def parse_release(version: str) -> Release:
    """Such as 0.1 of "0.1.3". Raises VersionError."""
    found = _RELEASE_PATTERN.fullmatch(version)
    if found is None:
        raise VersionError(f"{version[:40]!r} is not a version of Genie", hint="expected MAJOR.MINOR.PATCH")
    return Release(int(found[1]), int(found[2]))


OWN_RELEASE = parse_release(__version__)


def check_releases_work_together(*, peer_version: str, peer: str, this_side: str) -> None:
    """Raises VersionError unless a peer of this version works with this release."""
    try:
        other = parse_release(peer_version)
    except VersionError as error:
        raise VersionError(
            f"{peer} does not say which release of Genie it runs: {error.message}",
            hint=f"install Genie {OWN_RELEASE} there",
        ) from None
    if not OWN_RELEASE.works_with(other):
        raise VersionError(
            f"{peer} runs Genie {peer_version[:40]}, {this_side} runs {__version__}: these releases do not "
            "work together",
            hint=_how_to_upgrade(other, peer=peer, this_side=this_side),
        )


def _how_to_upgrade(other: Release, *, peer: str, this_side: str) -> str:
    older = peer if other < OWN_RELEASE else this_side
    if other.major != OWN_RELEASE.major:
        return f"install the same release of Genie on both sides: {older} is older"
    return (
        f"upgrade {older} first, one minor version at a time: the servers one after another, then the "
        "agents, then the clients"
    )


# --- protocols ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ProtocolVersions:
    """All versions from `lowest` to `highest`."""

    lowest: int
    highest: int

    @classmethod
    def from_counts(cls, *, highest: int, earlier_count: int) -> ProtocolVersions:
        return cls(lowest=max(highest - earlier_count, 0), highest=highest)

    @property
    def earlier_count(self) -> int:
        return self.highest - self.lowest

    def __str__(self) -> str:
        return str(self.highest) if self.lowest == self.highest else f"{self.lowest} to {self.highest}"


def choose_common_version(
    own: ProtocolVersions, theirs: ProtocolVersions, *, protocol: str, peer: str
) -> int:
    """The highest version that both sides speak. Raises VersionError if there is none."""
    chosen = min(own.highest, theirs.highest)
    if chosen >= own.lowest and chosen >= theirs.lowest:
        return chosen
    is_newer = theirs.lowest > own.highest
    raise VersionError(
        f"{peer} speaks version {theirs} of the {protocol}, this side (Genie {__version__}) speaks {own}",
        hint=f"{peer} runs {'a newer' if is_newer else 'an older'} release of Genie: upgrade "
        f"{'this side' if is_newer else peer} first; releases at most one minor version apart work together",
    )


# --- fields of later releases -------------------------------------------------------------------


def since(release: str) -> msgspec.Meta:
    """Marks a field as added by a release: `deadline_at: Annotated[float | None, since("0.2")] = None`."""
    parse_release(release)
    return msgspec.Meta(extra={_SINCE: release})


def fields_newer_than(release: Release, value: msgspec.Struct) -> list[str]:
    """Paths of the fields of `value` that are set and that `release` does not have."""
    return list(_newer_fields(release, value, ""))


@functools.cache
def has_fields_with_since(kind: type) -> bool:
    """Whether a type or a type in its fields has a field that is marked with `since`."""
    return _has_marked_field(inspect.type_info(kind), set())


def _has_marked_field(node: object, seen: set[object]) -> bool:
    if isinstance(node, inspect.Metadata):
        return _SINCE in (node.extra or {}) or _has_marked_field(node.type, seen)
    if isinstance(node, inspect.StructType):
        if node.cls in seen:
            return False
        seen.add(node.cls)
        return any(_has_marked_field(field.type, seen) for field in node.fields)
    parts = [getattr(node, name, None) for name in ("item_type", "key_type", "value_type")]
    return any(
        _has_marked_field(part, seen)
        for part in (*parts, *getattr(node, "types", ()), *getattr(node, "item_types", ()))
        if part is not None
    )


def _newer_fields(release: Release, value: object, path: str) -> Iterator[str]:
    if isinstance(value, msgspec.Struct):
        for field in _struct_fields(type(value)):
            inner = getattr(value, field.name)
            inner_path = f"{path}.{field.encode_name}" if path else field.encode_name
            mark = field.type.extra if isinstance(field.type, inspect.Metadata) else None
            if (
                mark
                and _SINCE in mark
                and parse_release(mark[_SINCE]) > release
                and inner != _default_value(field)
            ):
                yield inner_path
            else:
                yield from _newer_fields(release, inner, inner_path)
    elif isinstance(value, (tuple, list)):
        for number, item in enumerate(value):
            yield from _newer_fields(release, item, f"{path}[{number}]")
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _newer_fields(release, item, f"{path}[{key!r}]")


@functools.cache
def _struct_fields(kind: type) -> tuple[inspect.Field, ...]:
    found = inspect.type_info(kind)
    assert isinstance(found, inspect.StructType)
    return found.fields


def _default_value(field: inspect.Field) -> object:
    if field.default_factory is not msgspec.NODEFAULT:
        return field.default_factory()
    return field.default
