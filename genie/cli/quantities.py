"""Parses and formats numbers, sizes, durations, KEY=VALUE pairs and labels. Bytes and seconds internally.

Pure. Invalid text raises a UsageError that names the option.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import datetime

from genie.config.labels import validate_labels
from genie.errors import UsageError
from genie.model.limits import MEMORY_BYTES_MAX, TIME_LIMIT_S_MAX

_SIZE_PATTERN = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(?:([KMGTP])(iB|B|)|B?)", re.IGNORECASE)
_DURATION_PATTERN = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(s|m|h|d|)")
_INTEGER_PATTERN = re.compile(r"[+-]?[0-9]{1,18}")
_NUMBER_PATTERN = re.compile(r"[+-]?[0-9]{1,18}(?:\.[0-9]{1,18})?|\.[0-9]{1,18}")
_SIZE_POWER_BY_LETTER = {letter: power for power, letter in enumerate("KMGTP", start=1)}
_SECONDS_BY_DURATION_SUFFIX = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION_DISPLAY_UNITS = (("d", 86400.0), ("h", 3600.0), ("min", 60.0))
_ROUNDING_TOLERANCE_UNITS = 0.025


def parse_integer(text: str, *, what: str, low: int, high: int) -> int:
    """Parse an integer from `low` to `high`."""
    number = int(text) if _INTEGER_PATTERN.fullmatch(text.strip()) else None
    if number is None or not low <= number <= high:
        problem = "is not an integer" if number is None else "is out of range"
        raise UsageError(
            f"{what} {_quote_shortened(text)} {problem}",
            hint=f"give an integer from {low} to {high}",
        )
    return number


def parse_number(text: str, *, what: str, low: float = 0.0, high: float) -> float:
    """Parse a number from `low` to `high`."""
    number = float(text) if _NUMBER_PATTERN.fullmatch(text.strip()) else None
    if number is None or not low <= number <= high:
        raise UsageError(
            f"{what} {_quote_shortened(text)} is {'out of range' if number is not None else 'not a number'}",
            hint=f"give a number from {low:g} to {high:.0f}",
        )
    return number


def parse_size(text: str, *, what: str) -> int:
    """Parse a size in bytes. `4G` and `4GiB` are binary, `4GB` is decimal, a plain number is bytes."""
    match = _SIZE_PATTERN.fullmatch(text.strip())
    if match is None:
        raise UsageError(
            f"{what} {_quote_shortened(text)} is not a size", hint="write 512MiB, 4G, 1.5GiB or plain bytes"
        )
    number, letter, unit = match.groups()
    base = 1000 if (unit or "").upper() == "B" else 1024
    size = float(number) * base ** _SIZE_POWER_BY_LETTER.get((letter or "").upper(), 0)
    if size > MEMORY_BYTES_MAX:
        raise UsageError(f"{what} {_quote_shortened(text)} is too large", hint="give a smaller size")
    return int(size)


def parse_duration(
    text: str,
    *,
    what: str,
    zero_allowed: bool = False,
    low_s: float = 0.0,
    high_s: float = TIME_LIMIT_S_MAX,
) -> float:
    """Parse a duration in seconds from `low_s` to `high_s`, more than 0 unless `zero_allowed`."""
    seconds = _try_parse_duration_s(text)
    if seconds is None or not low_s <= seconds <= high_s or (seconds == 0 and not zero_allowed):
        most = "ten years" if high_s == TIME_LIMIT_S_MAX else format_duration(high_s)
        least = f"from {format_duration(low_s)}" if low_s else "from 0" if zero_allowed else "above 0"
        why = "is not a duration" if seconds is None else "is out of range"
        raise UsageError(
            f"{what} {_quote_shortened(text)} {why}",
            hint=f"write 90s, 15m, 2h, 7d or plain seconds, {least} to {most}",
        )
    return seconds


def parse_future_time(text: str, *, what: str, now: float) -> float:
    """Parse a future time, as seconds since the epoch: a duration from now, or a local date and time."""
    seconds = _try_parse_duration_s(text)
    moment = _try_parse_iso_time(text) if seconds is None else now + seconds
    if moment is None or not now < moment <= now + TIME_LIMIT_S_MAX:
        why = "is not a time" if moment is None else "is in the past"
        if moment is not None and moment > now:
            why = "is too far in the future"
        raise UsageError(
            f"{what} {_quote_shortened(text)} {why}",
            hint="write 2h or 2030-01-31T18:00, within the next ten years",
        )
    return moment


def parse_pairs(texts: Sequence[str] | None, *, what: str) -> dict[str, str]:
    """Parse KEY=VALUE texts of a repeatable option. The last value of a key wins; nothing is validated."""
    return dict(_parse_pair(text, what=what) for text in texts or ())


def parse_labels(texts: Sequence[str] | None) -> dict[str, str]:
    """Parse and validate the KEY=VALUE texts of --label. Only equal labels may be repeated."""
    found: dict[str, str] = {}
    for text in texts or ():
        key, value = _parse_pair(text, what="--label")
        if found.setdefault(key, value) != value:
            raise UsageError(
                f"--label {key}={found[key]} and --label {key}={value} contradict each other",
                hint="remove one of them: a label has one value per node",
            )
    validate_labels(found, what="--label")
    return found


def format_size(size_bytes: int) -> str:
    size = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            return f"{size:.0f} {unit}" if unit == "B" or size >= 100 else f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError("the loop ends at TiB")


def format_duration(seconds: float) -> str:
    """Format a duration in one rounded unit: 12 s, 3 min, 1 h, 30 d.

    A unit is used from two of it, or for nearly exactly one: 95 s stays 95 s.
    """
    seconds = max(seconds, 0.0)
    for unit, unit_s in _DURATION_DISPLAY_UNITS:
        units = seconds / unit_s
        if units >= 2 - _ROUNDING_TOLERANCE_UNITS or abs(units - 1) <= _ROUNDING_TOLERANCE_UNITS:
            return f"{units:.0f} {unit}"
    return f"{seconds:.0f} s"


def format_count(count: int, word: str) -> str:
    """`1 node`, `4 nodes`."""
    return f"{count} {word}{'' if count == 1 else 's'}"


def _parse_pair(text: str, *, what: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise UsageError(f"{what} {_quote_shortened(text)} is not KEY=VALUE", hint=f"write {what} KEY=VALUE")
    return key, value


def _try_parse_duration_s(text: str) -> float | None:
    match = _DURATION_PATTERN.fullmatch(text.strip())
    return float(match[1]) * _SECONDS_BY_DURATION_SUFFIX[match[2]] if match else None


def _try_parse_iso_time(text: str) -> float | None:
    try:
        return datetime.fromisoformat(text.strip()).timestamp()
    except (ValueError, OverflowError, OSError):
        return None


def _quote_shortened(text: str) -> str:
    return repr(text if len(text) <= 80 else text[:77] + "...")
