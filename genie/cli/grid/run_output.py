"""Writes the output of runs: unchanged for one node, as lines prefixed with the node name for several."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, BinaryIO

if TYPE_CHECKING:
    from genie.grid.runs.run import OutputCollector

PREFIXED_LINE_BYTES_MAX = 1 << 16
COLLECTED_OUTPUT_BYTES_MAX = 1 << 20

StreamWriter = Callable[[str, bytes], None]
"""Takes a stream, 'out' or 'err', and the data to write."""


def write_to_own_stream(stream: str, data: bytes) -> None:
    """Write bytes to our standard output or error."""
    text = sys.stdout if stream == "out" else sys.stderr
    text.flush()
    file: BinaryIO = text.buffer
    file.write(data)
    file.flush()


class PrefixedLineWriter:
    """Writes complete lines prefixed with the node name. Lines over PREFIXED_LINE_BYTES_MAX are split."""

    def __init__(self, name: str, write: StreamWriter) -> None:
        self._prefix = name.encode() + b": "
        self._write_to_stream = write
        self._partial_line_by_stream = {"out": b"", "err": b""}

    def __call__(self, stream: str, data: bytes) -> None:
        text = self._partial_line_by_stream[stream] + data
        end = text.rfind(b"\n") + 1
        if not end and len(text) >= PREFIXED_LINE_BYTES_MAX:
            self._partial_line_by_stream[stream] = b""
            self._write_to_stream(stream, self._prefix + text + b"\n")
            return
        self._partial_line_by_stream[stream] = text[end:]
        if end:
            lines = text[:end].split(b"\n")[:-1]
            self._write_to_stream(stream, b"".join(b"%s%s\n" % (self._prefix, line) for line in lines))

    def close(self) -> None:
        """Write the incomplete last lines, with a line break."""
        for stream, text in self._partial_line_by_stream.items():
            if text:
                self._write_to_stream(stream, self._prefix + text + b"\n")
        self._partial_line_by_stream = {"out": b"", "err": b""}


def output_to_json(kept: OutputCollector | None) -> dict[str, object]:
    """Return the output for --json; None means no output."""
    if kept is None:
        return {"stdout": "", "stderr": "", "truncated": False}
    return {"stdout": kept.text("out"), "stderr": kept.text("err"), "truncated": kept.truncated}
