"""The base class of wire and storage types: immutable, and strict about unknown fields.

Fields with their default value are not encoded, because most fields of a job are never used. So defaults are
part of the storage and wire format: to change a default, add a field with another name. A field that was
renamed in code keeps its encoded name (`msgspec.field(name=...)`).
"""

from __future__ import annotations

import msgspec


class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Base of all values that are stored or sent."""
