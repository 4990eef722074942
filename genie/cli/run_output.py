"""Where the output of runs goes: untouched for one node, line by line with its name for several.

Not for: following runs (grid/runner.py).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import BinaryIO

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


class Collected:
    """The beginning of both streams, for --json."""

    def __init__(self) -> None:
        self._streams = {"out": bytearray(), "err": bytearray()}
        self.truncated = False

    def __call__(self, stream: str, data: bytes) -> None:
        kept = self._streams[stream]
        room = COLLECTED_BYTES_MAX - len(kept)
        self.truncated = self.truncated or len(data) > room
        kept += data[: max(0, room)]

    def as_object(self) -> dict[str, object]:
        out, err = (bytes(self._streams[name]).decode(errors="replace") for name in ("out", "err"))
        return {"stdout": out, "stderr": err, "truncated": self.truncated}
