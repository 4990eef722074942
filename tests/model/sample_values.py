"""Values of wire and storage types for recordings: every field is set, and not to its default."""

from __future__ import annotations

import enum
import zlib
from typing import TypeVar

import msgspec
from msgspec import inspect

_Struct = TypeVar("_Struct", bound=msgspec.Struct)


def make_sample(kind: type[_Struct]) -> _Struct:
    found = _sample(inspect.type_info(kind), kind.__name__)
    assert isinstance(found, kind)
    return found


def _sample(node: inspect.Type, path: str) -> object:
    match node:
        case inspect.Metadata():
            return _sample(node.type, path)
        case inspect.StructType():
            return node.cls(
                **{field.name: _sample_field(field, f"{path}.{field.name}") for field in node.fields}
            )
        case inspect.UnionType():
            return _sample(next(each for each in node.types if not isinstance(each, inspect.NoneType)), path)
        case inspect.EnumType():
            return _last_member(node.cls)
        case inspect.VarTupleType():
            return (_sample(node.item_type, f"{path}[0]"),)
        case inspect.TupleType():
            return tuple(_sample(each, f"{path}[{number}]") for number, each in enumerate(node.item_types))
        case inspect.DictType():
            return {_sample(node.key_type, f"{path}.key"): _sample(node.value_type, f"{path}.value")}
    return _sample_scalar(node, path)


def _sample_field(field: inspect.Field, path: str) -> object:
    found = _sample(field.type, path)
    if found == field.default:
        if isinstance(found, bool):
            return not found
        assert isinstance(found, enum.StrEnum), f"{path}: the sample is its default"
        return next(each for each in type(found) if each != found)
    return found


def _sample_scalar(node: inspect.Type, path: str) -> object:
    number = zlib.crc32(path.encode()) % 1000 + 2
    match node:
        case inspect.BoolType():
            return True
        case inspect.IntType():
            return number if node.le is None else min(number, node.le)
        case inspect.FloatType():
            return number + 0.5
        case inspect.StrType():
            return path.rpartition(".")[2] + "-é"
        case inspect.BytesType():
            return path.encode() + bytes(range(8))
    raise AssertionError(f"{path}: no sample for {node}")


def _last_member(kind: type[enum.Enum]) -> enum.Enum:
    return list(kind)[-1]
