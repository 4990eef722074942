"""Where the output of runs goes: untouched for one node, line by line with its name for several.

Not for: following runs (grid/runner.py).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, BinaryIO

if TYPE_CHECKING:
    from genie.grid.run import Collected

LINE_BYTES_MAX = 1 << 16
COLLECTED_BYTES_MAX = 1 << 20

Write = Callable[[str, bytes], None]
"""Takes 'out' or 'err', and what is to be written there."""


def write_stream(stream: str, data: bytes) -> None:
    """To our own standard output or error, as bytes."""
    text = sys.stdout if stream == "out" else sys.stderr
    text.flush()
    file: BinaryIO = text.buffer
    file.write(data)
    file.flush()


class PrefixedLines:
    """Whole lines with the node's name in front. A line that grows too long is written in pieces."""

    def __init__(self, name: str, write: Write) -> None:
        self._prefix = name.encode() + b": "
        self._write = write
        self._partial = {"out": b"", "err": b""}

    def __call__(self, stream: str, data: bytes) -> None:
        text = self._partial[stream] + data
        end = text.rfind(b"\n") + 1
        if not end and len(text) >= LINE_BYTES_MAX:
            self._partial[stream] = b""
            self._write(stream, self._prefix + text + b"\n")
            return
        self._partial[stream] = text[end:]
        if end:
            lines = text[:end].split(b"\n")[:-1]
            self._write(stream, b"".join(b"%s%s\n" % (self._prefix, line) for line in lines))

    def close(self) -> None:
        """Writes what has no end of line, with one."""
        for stream, text in self._partial.items():
            if text:
                self._write(stream, self._prefix + text + b"\n")
        self._partial = {"out": b"", "err": b""}


def collected_object(kept: Collected | None) -> dict[str, object]:
    """For --json; None is a run that wrote nothing."""
    if kept is None:
        return {"stdout": "", "stderr": "", "truncated": False}
    return {"stdout": kept.text("out"), "stderr": kept.text("err"), "truncated": kept.truncated}
