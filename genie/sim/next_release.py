"""Frames as a host of the next minor release might send them: with another version and with unknown parts.

Replies, reports and the facts in them get a field that this release does not know; requests that must be
understood stay as they are, as those of a release that uses none of its new features.
"""

from __future__ import annotations

from typing import Any

import msgspec

from genie.model.messages import CONTROLLER_REQUESTS, Report
from genie.model.release import OWN_RELEASE
from genie.runtime import wire

NEXT_VERSION = f"{OWN_RELEASE.major}.{OWN_RELEASE.minor + 1}.0"
_ADDED_FIELD = "added_in_next_release"
_REPORTS = frozenset(kind.__name__ for kind in CONTROLLER_REQUESTS if issubclass(kind, Report))
_VERSIONED = frozenset(("Hello", "Welcome", "ServerHello"))
_RECORDS_IN_MESSAGES = ("node", "job", "running", "exits", "nodes", "jobs", "kill", "settled")
"""Fields with records or lists of records. In a StatusReply, `nodes` and `jobs` are counts instead."""


def change_frame_to_next_release(frame: bytes) -> bytes:
    """The frame as a host of the next release sends it."""
    length, kind, call_id = wire.unpack_header(frame, frame_bytes_max=wire.FRAME_BYTES_MAX, peer="this host")
    if kind is wire.FrameKind.ERROR:
        return frame
    fields: dict[str, Any] = msgspec.msgpack.decode(frame[wire.HEADER_BYTES :])
    name = fields["type"]
    if kind is wire.FrameKind.REQUEST and name not in _REPORTS:
        return frame
    if name in _VERSIONED and "version" in fields:
        fields["version"] = NEXT_VERSION
    if name != "StatusReply":
        for field in _RECORDS_IN_MESSAGES:
            _add_field_to_records(fields.get(field))
    fields[_ADDED_FIELD] = length
    return wire.pack_frame(kind, call_id, msgspec.msgpack.encode(fields))


def _add_field_to_records(value: object) -> None:
    if isinstance(value, dict):
        value[_ADDED_FIELD] = "next"
    elif isinstance(value, list):
        for item in value:
            _add_field_to_records(item)
