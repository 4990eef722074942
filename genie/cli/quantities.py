"""Quantities as people write and read them: sizes and durations. Bytes and seconds inside.

Pure. A text that is not understood is a UsageError that names the option it came from.
"""

from __future__ import annotations

import re

from genie.errors import UsageError

_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(?:([KMGTP])(iB|B|)|B?)", re.IGNORECASE)
_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(s|m|h|d|)")
_STEPS = {letter: power for power, letter in enumerate("KMGTP", start=1)}
_SECONDS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_SIZE_BYTES_MAX = 1 << 60
_SECONDS_MAX = 10 * 365 * 86400.0


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


def parse_duration(text: str, *, what: str) -> float:
    """Seconds, more than none."""
    match = _DURATION.fullmatch(text.strip())
    seconds = float(match[1]) * _SECONDS[match[2]] if match else 0.0
    if not 0 < seconds <= _SECONDS_MAX:
        raise UsageError(
            f"{what} {_quoted(text)} is not a duration", hint="write 90s, 15m, 1h or 7d, at most ten years"
        )
    return seconds


def size_text(size_bytes: int) -> str:
    size = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            return f"{size:.0f} {unit}" if unit == "B" or size >= 100 else f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError("the loop ends at TiB")


def duration_text(seconds: float) -> str:
    """Short and rounded down: 12 s, 3 min, 2 h, 5 d."""
    seconds = max(seconds, 0.0)
    for limit_s, unit_s, unit in ((120.0, 1.0, "s"), (7200.0, 60.0, "min"), (172800.0, 3600.0, "h")):
        if seconds < limit_s:
            return f"{int(seconds / unit_s)} {unit}"
    return f"{int(seconds / 86400)} d"


def _quoted(text: str) -> str:
    return repr(text if len(text) <= 80 else text[:77] + "...")
