"""Fields and enum values that a peer or a stored row of a newer release has and this release does not.

Decoders are strict. After one of them has failed, `find_unknown_parts` distinguishes a value of a newer
release from a damaged one, and names what is new. A reply only informs, so that `build_without_unknown_parts`
may build it from the rest; an unknown value of an enum is then kept as text. Pure.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Mapping
from typing import TypeVar

import msgspec
from msgspec import inspect

_Struct = TypeVar("_Struct", bound=msgspec.Struct)

PARTS_NAMED_MAX = 8
_TEXT_CHARS_MAX = 60
_SCALARS: dict[type[inspect.Type], tuple[type, ...]] = {
    inspect.BoolType: (bool,),
    inspect.IntType: (int,),
    inspect.FloatType: (float, int),
    inspect.StrType: (str,),
    inspect.BytesType: (bytes,),
    inspect.NoneType: (type(None),),
}


def find_unknown_parts(kind: type[msgspec.Struct], value: object) -> list[str]:
    """What `value`, decoded without a type, has and `kind` does not, such as "spec.gang_id" or
    "state = 'paused'"; the first PARTS_NAMED_MAX. Empty if `value` does not fit for another reason."""
    return _read_parts(kind, value)[1]


def build_without_unknown_parts(kind: type[_Struct], value: object) -> _Struct | None:
    """A `kind` from `value`, decoded without a type; None if it does not fit."""
    found, _ = _read_parts(kind, value)
    return found if isinstance(found, kind) else None


def make_unknown_member(kind: type[enum.StrEnum], value: str) -> enum.StrEnum:
    """A member of `kind` for a value that this release does not know. It is equal to its text."""
    member = str.__new__(kind, value)
    member._name_ = member._value_ = value
    member.__init__(value)  # type: ignore[misc]  # sets the attributes of a member, as enum does
    return member


def _read_parts(kind: type[msgspec.Struct], value: object) -> tuple[object, list[str]]:
    unknown: list[str] = []
    try:
        return _read(_type_info(kind), value, "", unknown), unknown
    except (_MismatchError, RecursionError):
        return None, []


class _MismatchError(Exception):
    """The value does not fit, also without its unknown parts."""


@functools.cache
def _type_info(kind: type) -> inspect.Type:
    return inspect.type_info(kind)


def _read(node: inspect.Type, value: object, path: str, unknown: list[str]) -> object:
    match node:
        case inspect.Metadata():
            return _read(node.type, value, path, unknown)
        case inspect.StructType():
            return _read_struct(node, value, path, unknown)
        case inspect.UnionType():
            return _read_union(node, value, path, unknown)
        case inspect.EnumType():
            return _read_enum(node, value, path, unknown)
        case inspect.VarTupleType():
            return tuple(_read(node.item_type, item, f"{path}[{at}]", unknown) for at, item in _items(value))
        case inspect.TupleType():
            items = _items(value)
            if len(items) != len(node.item_types):
                raise _MismatchError
            return tuple(
                _read(kind, item, f"{path}[{at}]", unknown)
                for kind, (at, item) in zip(node.item_types, items, strict=True)
            )
        case inspect.DictType():
            if not isinstance(value, Mapping):
                raise _MismatchError
            return {
                _read(node.key_type, key, path, unknown): _read(
                    node.value_type, item, f"{path}[{_shorten(key)}]", unknown
                )
                for key, item in value.items()
            }
    return _read_scalar(node, value)


def _items(value: object) -> list[tuple[int, object]]:
    if not isinstance(value, list):
        raise _MismatchError
    return list(enumerate(value))


def _read_struct(node: inspect.StructType, value: object, path: str, unknown: list[str]) -> object:
    if not isinstance(value, Mapping) or (node.tag_field and value.get(node.tag_field) != node.tag):
        raise _MismatchError
    fields: dict[str, object] = {}
    for field in node.fields:
        if field.encode_name in value:
            inner_path = f"{path}.{field.encode_name}" if path else field.encode_name
            fields[field.name] = _read(field.type, value[field.encode_name], inner_path, unknown)
        elif field.required:
            raise _MismatchError
    if node.forbid_unknown_fields:
        known = {field.encode_name for field in node.fields} | {node.tag_field}
        for name in value.keys() - known:
            _note(unknown, f"{path}.{_shorten(name)}" if path else _shorten(name))
    return node.cls(**fields)


def _read_enum(node: inspect.EnumType, value: object, path: str, unknown: list[str]) -> object:
    if not isinstance(value, str) or not issubclass(node.cls, enum.StrEnum):
        raise _MismatchError
    try:
        return node.cls(value)
    except ValueError:
        _note(unknown, f"{path} = '{_shorten(value)}'")
        return make_unknown_member(node.cls, value)


def _read_union(node: inspect.UnionType, value: object, path: str, unknown: list[str]) -> object:
    for kind in node.types:
        before = len(unknown)
        try:
            return _read(kind, value, path, unknown)
        except _MismatchError:
            del unknown[before:]
    raise _MismatchError


def _read_scalar(node: inspect.Type, value: object) -> object:
    if isinstance(node, inspect.AnyType):
        return value
    allowed = _SCALARS.get(type(node))
    if allowed is None or not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed):
        raise _MismatchError
    return float(value) if isinstance(node, inspect.FloatType) and isinstance(value, int) else value


def _note(unknown: list[str], part: str) -> None:
    if len(unknown) < PARTS_NAMED_MAX:
        unknown.append(part)


def _shorten(text: object) -> str:
    """Names come from the peer: one printable line."""
    return "".join(char if char.isprintable() else "?" for char in str(text)[:_TEXT_CHARS_MAX])
