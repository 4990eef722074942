"""What a command prints: results on standard output, everything else on standard error.

`--json` gives one JSON document with the field names of genie/model. Tables are plain text
where the output is not a terminal; NO_COLOR is honoured (rich does that). Errors read
`genie: message` and `hint: what to do`. Not for: deciding what to print.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from genie.errors import GenieError

if TYPE_CHECKING:
    from msgspec import Struct
    from rich.console import OverflowMethod

_GAP = 2
_LAST_MIN = 24
_SHORT_MIN = 6
# What the library says in the words of genie.init(), in those of the command line.
_WORDS = (
    ("master_addr is not given", "no address is given"),
    ("pass master_addr,", "give --address HOST[:PORT],"),
    ("ttl_s = ", "--ttl in seconds: "),
)


def write_json(value: object) -> None:
    """One document on standard output. Structs become objects with their own field names."""
    import msgspec

    write_line(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


def as_object(struct: Struct, *, without: Sequence[str] = ()) -> dict[str, Any]:
    """A struct as --json shows it: its fields, without the wire's tag and without those named."""
    fields = [name for name in struct.__struct_fields__ if name not in without]
    return {name: _spelled_out(getattr(struct, name)) for name in fields}


def _spelled_out(value: object) -> object:
    """With the fields that have their defaults, which stores and messages leave out."""
    import msgspec

    if isinstance(value, msgspec.Struct):
        return as_object(value)
    if isinstance(value, dict):
        return {key: _spelled_out(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_spelled_out(each) for each in value]
    return value


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
    """Progress or an explanation, on standard error. Where nobody can be told, the work goes on."""
    _to_stderr(f"{text}\n")


def _to_stderr(text: str) -> None:
    with contextlib.suppress(OSError):
        sys.stderr.write(text)
        sys.stderr.flush()


def leave_unsaid() -> None:
    """What could not be said would give the process another exit code when the interpreter ends."""
    try:
        sys.stderr.flush()
    except OSError:
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


def say_lines(text: str) -> None:
    """The same for text with words from elsewhere in it: its lines, and nothing that moves the cursor."""
    for line in text.splitlines():
        say(one_line(line))


def without_node(text: str, node: str) -> str:
    """An error's text for where the node's name stands already."""
    return text.removeprefix(f"node {node}: ")


def write_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, spare: Sequence[str] = ()) -> None:
    """Columns under headings. A pipe gets each row on one line.

    On a terminal the last column is wrapped between words. Where that is not enough, the columns in
    `spare` are left out, in that order, and then the widest ones are shortened.
    """
    cells = [[one_line(cell) for cell in row] for row in rows]
    lines = [[column.upper() for column in columns], *cells]
    width = terminal_width()
    if width is not None:
        _write_fitted(lines, spare=[columns.index(name) for name in spare], width=width)
        return
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        padded = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        sys.stdout.write("  ".join(padded).rstrip() + "\n")
    sys.stdout.flush()


def terminal_width() -> int | None:
    """None where standard output is not a terminal."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


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
            _to_stderr(f"\r\x1b[K{what} {percent}%")
        elif what != self._step:
            say(f"{what} ...")
        self._step = what

    def close(self) -> None:
        if self._moving and self._step:
            _to_stderr("\r\x1b[K")


def show_error(error: BaseException, *, debug: bool) -> None:
    from genie.telemetry.log import redacted

    if debug:
        say(redacted("".join(traceback.format_exception(error))).rstrip())
    if isinstance(error, GenieError):
        first, *more = _in_words(redacted(error.message)).splitlines() or [""]
        say("\n  ".join(["genie: " + one_line(first), *map(one_line, more)]))
        if error.hint:
            say(f"hint: {one_line(_in_words(redacted(error.hint)))}")
    elif isinstance(error, OSError) and error.errno == errno.ENOSPC:
        say(f"genie: the output could not be written: {error.strerror}")
    else:
        say(f"genie: internal error: {type(error).__name__}: {one_line(redacted(str(error)))}")
        say("hint: run it again with --debug and report what it prints")


def open_closed_streams() -> None:
    """A standard stream that the caller has closed takes everything and keeps nothing."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115 - for the whole run


def one_line(text: str) -> str:
    """Text from elsewhere, without characters that could move the cursor or forge a line."""
    return "".join(char if char.isprintable() else " " for char in text).strip()


def _in_words(text: str) -> str:
    for library, command in _WORDS:
        text = text.replace(library, command)
    return text


def _write_fitted(lines: list[list[str]], *, spare: Sequence[int], width: int) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    kept, widths = _fitted(lines, spare=spare, width=width)
    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0))
    for column, column_width in zip(kept, widths, strict=True):
        last = column == kept[-1]
        overflow: OverflowMethod = "fold" if last else "ellipsis"
        table.add_column(lines[0][column], width=column_width, no_wrap=not last, overflow=overflow)
    for line in lines[1:]:
        table.add_row(*(Text(line[column]) for column in kept))
    Console(width=width).print(table)


def _fitted(lines: list[list[str]], *, spare: Sequence[int], width: int) -> tuple[list[int], list[int]]:
    """Which columns are shown, and how wide each of them is."""
    from rich.cells import cell_len

    widths = [max(map(cell_len, column)) for column in zip(*lines, strict=True)]
    last = len(widths) - 1
    kept = list(range(len(widths)))
    widths[last], wish = min(widths[last], _LAST_MIN), widths[last]

    def room() -> int:
        return width - sum(widths[column] for column in kept) - _GAP * (len(kept) - 1)

    for column in spare:
        if room() < 0:
            kept.remove(column)
    while (
        room() < 0 and (widest := max(kept[:-1], key=lambda column: widths[column], default=None)) is not None
    ):
        if widths[widest] <= _SHORT_MIN:
            break
        widths[widest] -= 1
    widths[last] = min(wish, widths[last] + max(room(), 0))
    return kept, [widths[column] for column in kept]
