"""Quantities as people write and read them: numbers, sizes, durations, pairs. Bytes and seconds inside.

Pure. A text that is not understood is a UsageError that names the option it came from.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import datetime

from genie.errors import UsageError

_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(?:([KMGTP])(iB|B|)|B?)", re.IGNORECASE)
_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(s|m|h|d|)")
_WHOLE = re.compile(r"[+-]?[0-9]{1,18}")
_AMOUNT = re.compile(r"[+-]?[0-9]{1,18}(?:\.[0-9]{1,18})?|\.[0-9]{1,18}")
_STEPS = {letter: power for power, letter in enumerate("KMGTP", start=1)}
_SECONDS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_UNITS = (("d", 86400.0), ("h", 3600.0), ("min", 60.0))
_NEAR = 0.025
_SIZE_BYTES_MAX = 1 << 60
_SECONDS_MAX = 10 * 365 * 86400.0


def parse_whole(text: str, *, what: str, low: int, high: int) -> int:
    """A whole number from `low` to `high`."""
    number = int(text) if _WHOLE.fullmatch(text.strip()) else None
    if number is None or not low <= number <= high:
        raise UsageError(
            f"{what} {_quoted(text)} is not {'allowed' if number is not None else 'a whole number'}",
            hint=f"give a whole number from {low} to {high}",
        )
    return number


def parse_amount(text: str, *, what: str, low: float = 0.0, high: float) -> float:
    """A number from `low` to `high`, whole or not."""
    number = float(text) if _AMOUNT.fullmatch(text.strip()) else None
    if number is None or not low <= number <= high:
        raise UsageError(
            f"{what} {_quoted(text)} is not {'allowed' if number is not None else 'a number'}",
            hint=f"give a number from {low:g} to {high:.0f}",
        )
    return number


def parse_size(text: str, *, what: str) -> int:
    """Bytes. `4G` and `4GiB` count in 1024s, `4GB` in 1000s, a plain number is bytes."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise UsageError(
            f"{what} {_quoted(text)} is not a size", hint="write 512MiB, 4G, 1.5GiB or plain bytes"
        )
    number, letter, unit = match.groups()
    base = 1000 if (unit or "").upper() == "B" else 1024
    size = float(number) * base ** _STEPS.get((letter or "").upper(), 0)
    if size > _SIZE_BYTES_MAX:
        raise UsageError(f"{what} {_quoted(text)} is more than any machine has", hint="write a smaller size")
    return int(size)


def parse_duration(text: str, *, what: str, none_too: bool = False, high_s: float = _SECONDS_MAX) -> float:
    """Seconds, more than none; or none, where that is allowed, too."""
    seconds = _duration_s(text)
    if seconds is None or not (0 < seconds <= high_s or (none_too and seconds == 0)):
        most = "ten years" if high_s == _SECONDS_MAX else duration_text(high_s)
        why = "is not a duration" if seconds is None else "is not allowed"
        raise UsageError(f"{what} {_quoted(text)} {why}", hint=f"write 90s, 15m or 1h, at most {most}")
    return seconds


def parse_moment(text: str, *, what: str, now: float) -> float:
    """Seconds since the epoch of a time to come: a duration from now, or date and time by the local clock."""
    seconds = _duration_s(text)
    moment = _iso_moment(text) if seconds is None else now + seconds
    if moment is None or not now < moment <= now + _SECONDS_MAX:
        why = "is not a time" if moment is None else "is over already"
        if moment is not None and moment > now:
            why = "is too far away"
        raise UsageError(
            f"{what} {_quoted(text)} {why}", hint="write 2h or 2030-01-31T18:00, within the next ten years"
        )
    return moment


def parse_pairs(texts: Sequence[str] | None, *, what: str) -> dict[str, str]:
    """What an option that may be repeated says with KEY=VALUE; of one key the last. Neither is checked."""
    found = {}
    for text in texts or ():
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise UsageError(f"{what} {_quoted(text)} is not KEY=VALUE", hint=f"write {what} KEY=VALUE")
        found[key] = value
    return found


def size_text(size_bytes: int) -> str:
    size = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            return f"{size:.0f} {unit}" if unit == "B" or size >= 100 else f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError("the loop ends at TiB")


def duration_text(seconds: float) -> str:
    """Short, and rounded to the nearest: 12 s, 3 min, 1 h, 30 d.

    A unit is taken from two of it on, and for one where that is nearly exact: 95 s stay 95 s.
    """
    seconds = max(seconds, 0.0)
    for unit, unit_s in _UNITS:
        units = seconds / unit_s
        if units >= 2 - _NEAR or abs(units - 1) <= _NEAR:
            return f"{units:.0f} {unit}"
    return f"{seconds:.0f} s"


def count_text(count: int, word: str) -> str:
    """`1 node`, `4 nodes`."""
    return f"{count} {word}{'' if count == 1 else 's'}"


def _duration_s(text: str) -> float | None:
    match = _DURATION.fullmatch(text.strip())
    return float(match[1]) * _SECONDS[match[2]] if match else None


def _iso_moment(text: str) -> float | None:
    try:
        return datetime.fromisoformat(text.strip()).timestamp()
    except (ValueError, OverflowError, OSError):
        return None


def _quoted(text: str) -> str:
    return repr(text if len(text) <= 80 else text[:77] + "...")
