"""What a command prints: results on standard output, everything else on standard error.

`--json` gives one JSON document with the field names of genie/model. Tables are plain text
where the output is not a terminal; NO_COLOR is honoured (rich does that). Errors read
`genie: message` and `hint: what to do`. Not for: deciding what to print.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from genie.errors import GenieError

if TYPE_CHECKING:
    from msgspec import Struct


def write_json(value: object) -> None:
    """One document on standard output. Structs become objects with their own field names."""
    import msgspec

    write_line(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


def as_object(struct: Struct, *, without: Sequence[str] = ()) -> dict[str, Any]:
    """A struct as --json shows it: its fields, without the wire's tag and without those named."""
    import msgspec

    built: dict[str, Any] = msgspec.to_builtins(struct)
    fields = set(struct.__struct_encode_fields__) - set(without)
    return {name: value for name, value in built.items() if name in fields}


def write_line(text: str) -> None:
    """A result, on standard output."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def write_bytes(data: bytes) -> None:
    """A job's own output, untouched."""
    sys.stdout.flush()
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


def say(text: str) -> None:
    """Progress or an explanation, on standard error."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def write_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Columns under headings. A terminal folds long cells; a pipe gets each row on one line."""
    cells = [[one_line(cell) for cell in row] for row in rows]
    heads = [column.upper() for column in columns]
    if sys.stdout.isatty():
        _write_folded(heads, cells)
        return
    widths = [max(len(row[index]) for row in [heads, *cells]) for index in range(len(heads))]
    for row in [heads, *cells]:
        padded = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        sys.stdout.write("  ".join(padded).rstrip() + "\n")
    sys.stdout.flush()


def write_facts(facts: Sequence[tuple[str, str]]) -> None:
    """Names and values, aligned."""
    width = max(len(name) for name, _ in facts)
    sys.stdout.write("".join(f"{name:<{width}}  {one_line(value)}\n" for name, value in facts))
    sys.stdout.flush()


class ProgressLine:
    """Progress of long work on standard error: one line that moves on a terminal, else one line per step."""

    def __init__(self) -> None:
        self._moving = sys.stderr.isatty()
        self._step = ""

    def __call__(self, what: str, done: int, total: int) -> None:
        if self._moving:
            percent = 100 * done // total if total else 100
            sys.stderr.write(f"\r\x1b[K{what} {percent}%")
            sys.stderr.flush()
        elif what != self._step:
            say(f"{what} ...")
        self._step = what

    def close(self) -> None:
        if self._moving and self._step:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


def show_error(error: BaseException, *, debug: bool) -> None:
    from genie.telemetry.log import redacted

    if debug:
        sys.stderr.write(redacted("".join(traceback.format_exception(error))))
    if isinstance(error, GenieError):
        first, *more = redacted(error.message).splitlines() or [""]
        say("\n  ".join(["genie: " + one_line(first), *map(one_line, more)]))
        if error.hint:
            say(f"hint: {one_line(redacted(error.hint))}")
    else:
        say(f"genie: internal error: {type(error).__name__}: {one_line(redacted(str(error)))}")
        say("hint: run it again with --debug and report what it prints")


def one_line(text: str) -> str:
    """Text from elsewhere, without characters that could move the cursor or forge a line."""
    return "".join(char if char.isprintable() else " " for char in text).strip()


def _write_folded(heads: list[str], cells: list[list[str]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for head in heads:
        table.add_column(head, overflow="fold")
    for row in cells:
        table.add_row(*map(Text, row))
    Console().print(table)
