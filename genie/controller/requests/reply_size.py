"""Keeps list replies below the frame size limit."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

import msgspec

from genie.runtime.wire import FRAME_BYTES_MAX

_REPLY_BYTES_MAX = FRAME_BYTES_MAX - 64 * 1024
_Item = TypeVar("_Item", bound=msgspec.Struct)


def truncate_to_reply(items: Iterable[_Item]) -> tuple[tuple[_Item, ...], bool]:
    """Return the first items that fit into one frame, at least one, and whether some were dropped.

    Consumes no items beyond the first one that does not fit.
    """
    size_bytes = 0
    fitting: list[_Item] = []
    for item in items:
        size_bytes += len(msgspec.msgpack.encode(item))
        if fitting and size_bytes > _REPLY_BYTES_MAX:
            return tuple(fitting), True
        fitting.append(item)
    return tuple(fitting), False
