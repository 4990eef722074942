"""What every value of the model is: it does not change, and names what it does not know.

A field that has its default is left out where a value is written: jobs have many, and most are never
used. So a default is part of the format of stores and messages: another one needs a field of another name.
Not for: what people read (cli/output.py spells every field out).
"""

from __future__ import annotations

import msgspec


class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Base of the values that are stored and sent."""
