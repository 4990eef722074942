"""Output of several runs in one stream."""

from __future__ import annotations

import random

import pytest

from genie.cli.grid.run_output import (
    COLLECTED_OUTPUT_BYTES_MAX,
    PREFIXED_LINE_BYTES_MAX,
    PrefixedLineWriter,
    output_to_json,
)
from genie.grid.runs.run import OutputCollector


@pytest.mark.parametrize("seed", range(5))
def test_lines_are_reassembled_from_chunks(seed: int) -> None:
    chance = random.Random(seed)
    text = b"one\n\ntwo\r\nthree \xff\x00\nfour\rfive\nlast"
    written: list[bytes] = []
    lines = PrefixedLineWriter("gpu1", lambda stream, data: written.append(data))
    rest = text
    while rest:
        size = chance.randint(1, 6)
        lines("out", rest[:size])
        rest = rest[size:]
    lines.close()
    assert b"".join(written) == b"".join(b"gpu1: " + line + b"\n" for line in text.split(b"\n"))


def test_overlong_line_is_split() -> None:
    written: list[bytes] = []
    lines = PrefixedLineWriter("n", lambda stream, data: written.append(data))
    for _ in range(PREFIXED_LINE_BYTES_MAX // 1000 + 1):
        lines("err", b"x" * 1000)
    assert len(written) == 1
    assert len(written[0]) >= PREFIXED_LINE_BYTES_MAX


def test_collected_output_is_truncated_at_its_limit() -> None:
    kept = OutputCollector(bytes_max=COLLECTED_OUTPUT_BYTES_MAX)
    kept("out", b"x" * COLLECTED_OUTPUT_BYTES_MAX)
    assert output_to_json(kept)["truncated"] is False
    kept("out", b"y")
    document = output_to_json(kept)
    assert document["truncated"] is True
    assert document["stdout"] == "x" * COLLECTED_OUTPUT_BYTES_MAX
