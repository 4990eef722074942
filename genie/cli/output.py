"""Prints results to standard output and messages, progress and errors to standard error.

`--json` prints one JSON document with the field names of genie/model. Tables are plain text unless the
output is a terminal; NO_COLOR is honoured (by rich). Errors have the form `genie: message` and
`hint: what to do`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from genie.errors import GenieError

if TYPE_CHECKING:
    from msgspec import Struct
    from rich.console import OverflowMethod

_COLUMN_GAP_CHARS = 2
_LAST_COLUMN_CHARS_MIN = 24
_COLUMN_CHARS_MIN = 6
_TERMINAL_UPDATE_INTERVAL_S = 1.0
# Replaces arguments of genie.init() in library messages by command-line options.
_OPTION_NAME_REPLACEMENTS = (
    (r"master_addr is not given", "no address given"),
    (r"pass master_addr,", "give --address HOST[:PORT],"),
    (r"use master_addr=", "use --address "),
    (r"(?<![\w.])ttl_s = ", "--ttl in seconds: "),
)


def write_json(value: object) -> None:
    """Write one JSON document to standard output. Structs become objects with the same field names."""
    import msgspec

    write_line(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


def struct_to_json(struct: Struct, *, without: Sequence[str] = ()) -> dict[str, Any]:
    """Return the fields of a struct for --json, except its wire tag and `without`."""
    fields = [name for name in struct.__struct_fields__ if name not in without]
    return {name: _to_builtins_with_defaults(getattr(struct, name)) for name in fields}


def _to_builtins_with_defaults(value: object) -> object:
    """Convert structs recursively, including default values, which the wire encoding omits."""
    import msgspec

    if isinstance(value, msgspec.Struct):
        return struct_to_json(value)
    if isinstance(value, dict):
        return {key: _to_builtins_with_defaults(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_to_builtins_with_defaults(each) for each in value]
    return value


def write_line(text: str) -> None:
    """Write a line of a result to standard output."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def write_bytes(data: bytes) -> None:
    """Write output of a job unchanged to standard output."""
    sys.stdout.flush()
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


def print_message(text: str) -> None:
    """Print progress or an explanation to standard error. Write errors are ignored."""
    _write_stderr(f"{text}\n")


class ProgressPrinter:
    """Prints lines of progress to standard error. A line that begins with "waiting for" may be repeated: on a
    terminal it is replaced about once per second, with the time since the first one; elsewhere only changes
    are printed."""

    def __init__(self) -> None:
        self._waiting_line = ""
        self._waiting_since_s = 0.0
        self._next_update_at_s = 0.0
        self._rows_on_terminal = 0

    def __call__(self, line: str) -> None:
        if not line.startswith("waiting for "):
            self._waiting_line, self._rows_on_terminal = "", 0
            print_message(line)
            return
        is_first, is_changed = not self._waiting_line, line != self._waiting_line
        now_s, self._waiting_line = time.monotonic(), line
        if is_first:
            self._waiting_since_s = self._next_update_at_s = now_s
        if not sys.stderr.isatty():
            if is_changed:
                print_message(line)
        elif is_changed or now_s >= self._next_update_at_s:
            self._next_update_at_s = now_s + _TERMINAL_UPDATE_INTERVAL_S
            self._replace_on_terminal(to_one_line(f"{line} ({now_s - self._waiting_since_s:.0f} s)"))

    def _replace_on_terminal(self, text: str) -> None:
        to_first_row = f"\x1b[{self._rows_on_terminal}A\x1b[J" if self._rows_on_terminal else ""
        self._rows_on_terminal = -(-len(text) // max(shutil.get_terminal_size().columns, 1))
        _write_stderr(f"{to_first_row}{text}\n")


def _write_stderr(text: str) -> None:
    with contextlib.suppress(OSError):
        sys.stderr.write(text)
        sys.stderr.flush()


def discard_unwritable_stderr() -> None:
    """Discard unwritable messages: flushing them at exit would change the exit code."""
    try:
        sys.stderr.flush()
    except OSError:
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


def print_message_lines(text: str) -> None:
    """Print untrusted text to standard error, line by line and without control characters."""
    for line in text.splitlines():
        print_message(to_one_line(line))


def strip_node_prefix(text: str, node: str) -> str:
    """Return the text without the prefix `node NAME: `."""
    return text.removeprefix(f"node {node}: ")


def write_table(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    droppable: Sequence[str] = (),
    omitted: Sequence[str] = (),
) -> None:
    """Write a table without the columns in `omitted`. Without a terminal, each row is one line.

    On a terminal the last column is wrapped. If the table is still too wide, the columns in `droppable` are
    omitted too, in that order, and then the widest ones are truncated.
    """
    shown = [index for index, column in enumerate(columns) if column not in omitted]
    columns, rows = [columns[index] for index in shown], [[row[index] for index in shown] for row in rows]
    cells = [[to_one_line(cell) for cell in row] for row in rows]
    lines = [[column.upper() for column in columns], *cells]
    width = terminal_width()
    if width is not None:
        _write_terminal_table(lines, droppable=[columns.index(name) for name in droppable], width=width)
        return
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        padded = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        sys.stdout.write("  ".join(padded).rstrip() + "\n")
    sys.stdout.flush()


def terminal_width() -> int | None:
    """Return the width of the terminal, or None if standard output is none."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def write_fields(facts: Sequence[tuple[str, str]]) -> None:
    """Write names and values in two aligned columns."""
    width = max(len(name) for name, _ in facts)
    sys.stdout.write("".join(f"{name:<{width}}  {to_one_line(value)}\n" for name, value in facts))
    sys.stdout.flush()


class ProgressLine:
    """Progress on standard error: a line that is updated on a terminal, else one line per step."""

    def __init__(self) -> None:
        self._is_terminal = sys.stderr.isatty()
        self._last_step = ""

    def __call__(self, what: str, done: int, total: int) -> None:
        if self._is_terminal:
            percent = 100 * done // total if total else 100
            _write_stderr(f"\r\x1b[K{what} {percent}%")
        elif what != self._last_step:
            print_message(f"{what} ...")
        self._last_step = what

    def close(self) -> None:
        if self._is_terminal and self._last_step:
            _write_stderr("\r\x1b[K")


def show_error(error: BaseException, *, debug: bool) -> None:
    from genie.telemetry.log import redact

    if debug:
        print_message(redact("".join(traceback.format_exception(error))).rstrip())
    if isinstance(error, GenieError):
        first, *more = _use_option_names(redact(error.message)).splitlines() or [""]
        print_message("\n  ".join(["genie: " + to_one_line(first), *map(to_one_line, more)]))
        if error.hint:
            print_message(f"hint: {to_one_line(_use_option_names(redact(error.hint)))}")
    elif isinstance(error, OSError) and error.errno == errno.ENOSPC:
        print_message(f"genie: could not write the output: {error.strerror}")
    else:
        print_message(f"genie: internal error: {type(error).__name__}: {to_one_line(redact(str(error)))}")
        print_message("hint: run the command again with --debug and report the output")


def replace_closed_streams() -> None:
    """Replace standard output and error by /dev/null if the caller closed them."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115 - open until exit


def to_one_line(text: str) -> str:
    """Replace control characters and line breaks by spaces."""
    return "".join(char if char.isprintable() else " " for char in text).strip()


def _use_option_names(text: str) -> str:
    for library, command in _OPTION_NAME_REPLACEMENTS:
        text = re.sub(library, command, text)
    return text


def _write_terminal_table(lines: list[list[str]], *, droppable: Sequence[int], width: int) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    kept, widths = _columns_and_widths_that_fit(lines, droppable=droppable, width=width)
    table = Table(box=None, pad_edge=False, padding=(0, _COLUMN_GAP_CHARS, 0, 0))
    for column, column_width in zip(kept, widths, strict=True):
        last = column == kept[-1]
        overflow: OverflowMethod = "fold" if last else "ellipsis"
        table.add_column(lines[0][column], width=column_width, no_wrap=not last, overflow=overflow)
    for line in lines[1:]:
        table.add_row(*(Text(line[column]) for column in kept))
    Console(width=width).print(table)


def _columns_and_widths_that_fit(
    lines: list[list[str]], *, droppable: Sequence[int], width: int
) -> tuple[list[int], list[int]]:
    """Return the indices and the widths of the columns to show."""
    from rich.cells import cell_len

    widths = [max(map(cell_len, column)) for column in zip(*lines, strict=True)]
    last = len(widths) - 1
    kept = list(range(len(widths)))
    widths[last], last_width = min(widths[last], _LAST_COLUMN_CHARS_MIN), widths[last]

    def spare_width() -> int:
        return width - sum(widths[column] for column in kept) - _COLUMN_GAP_CHARS * (len(kept) - 1)

    for column in droppable:
        if spare_width() < 0:
            kept.remove(column)
    while (
        spare_width() < 0
        and (widest := max(kept[:-1], key=lambda column: widths[column], default=None)) is not None
    ):
        if widths[widest] <= _COLUMN_CHARS_MIN:
            break
        widths[widest] -= 1
    widths[last] = min(last_width, widths[last] + max(spare_width(), 0))
    return kept, [widths[column] for column in kept]
