"""The base classes of wire and storage types: immutable, with defined handling of unknown fields.

Fields with their default value are not encoded, because most fields of a job are never used. So defaults are
part of the storage and wire format: to change a default, add a field with another name. A field that was
renamed in code keeps its encoded name (`msgspec.field(name=...)`).

It also means that a newer peer sends a new field only where it is used, and that an older one, which rejects
it by name, rejects nothing else (docs/decisions/0029-version-skew.md).
"""

from __future__ import annotations

import enum

import msgspec


class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Base of all values that are stored or sent. Unknown fields are rejected: one could restrict what the
    known ones say."""


class Facts(Record, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """Base of records that only describe something. Unknown fields are ignored, and lost if the record is
    stored again: whoever describes it does so again after every change of leader."""


class FactEnum(enum.StrEnum):
    """Base of enums that only describe something. A value that this release does not know is kept as text."""

    @classmethod
    def _missing_(cls, value: object) -> FactEnum | None:
        if not isinstance(value, str) or not value.isprintable() or len(value) > FACT_CHARS_MAX:
            return None
        member = str.__new__(cls, value)
        member._name_ = member._value_ = value
        return member


FACT_CHARS_MAX = 40
