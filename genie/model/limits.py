"""Limits on the fields of jobs, nodes and quotas, and the checks of plain values against them. Pure.

The controller enforces them and the command line uses the same constants. Imports only errors, because
every command loads it at startup. Rules for names are in names.py.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from genie.errors import UsageError

NAME_CHARS_MAX = 63
"""Of names of jobs, tokens and tenants, and of node IDs."""
COMMAND_ARGUMENTS_MAX = 1024
ENV_ENTRIES_MAX = 256
TEXT_BYTES_MAX = 128 * 1024
"""Total size of a command, of the environment, or of the labels of a job."""
SPEC_BYTES_MAX = 256 * 1024
"""Of a job's specification as stored. Its row must also have space for placements and history."""
REASON_BYTES_MAX = 1024
"""Of one reason in the history of a job, as stored."""
TEXT_CHARS_MAX = 1024
"""Of one GPU model, host name or similar text."""
GPUS_MAX = 1024
"""Accelerators of one worker, and of one node."""
CPUS_MAX = 1_000_000
MEMORY_BYTES_MAX = 1 << 60
WORKERS_MAX = 1024
GPUS_OF_JOB_MAX = 32 * 1024
"""Accelerators of all workers of a job: their IDs are stored in its row."""
JOB_LIST_ENTRIES_MAX = 64
"""Entries in each list of a job: GPU models, names of other jobs. Labels: config/labels.py."""
CAPABILITY_MAX = 99
"""Each part of the minimum compute capability."""
PRIORITY_MAX = 1000
GRACE_S_MAX = 86400.0
TIME_LIMIT_S_MAX = 10 * 365 * 86400.0
UNIX_TIME_S_MAX = 1e12
"""Largest timestamp, in seconds since 1970."""
WEIGHT_MIN, WEIGHT_MAX = 0.01, 1000.0
QUOTA_GPUS_MAX = 1_000_000.0
INTERVAL_S_MAX = 86400.0
LIST_MAX = 1000
"""Entries in one reply of a list of jobs."""
TEMPERATURE_C_MAX = 85.0
"""A GPU above this temperature is overheated."""
_DIGEST = re.compile(r"[0-9a-f]{64}")


def check_range(value: int, what: str, low: int, high: int) -> None:
    """Raise UsageError unless low <= value <= high."""
    if not low <= value <= high:
        raise UsageError(f"{what} = {value} is not allowed", hint=f"allowed: {low} to {high}")


def check_number(value: float, what: str, low: float, high: float) -> None:
    """Raise UsageError unless low <= value <= high; NaN is rejected too."""
    if not low <= value <= high:
        raise UsageError(f"{what} = {value} is not allowed", hint=f"allowed: {low:g} to {high:g}")


def check_text(text: str, *, what: str) -> str:
    """Return `text`; raise UsageError if it is too long or contains a NUL character."""
    if len(text) > TEXT_CHARS_MAX or "\0" in text:
        raise UsageError(f"{what} has a NUL or more than {TEXT_CHARS_MAX} characters")
    return text


def check_texts(texts: Sequence[str], what: str) -> None:
    """Raise UsageError if the texts together exceed TEXT_BYTES_MAX, or one is not valid UTF-8 or has a
    NUL."""
    try:
        size_bytes = sum(len(text.encode()) for text in texts)
    except UnicodeEncodeError:
        raise UsageError(f"{what} is not valid UTF-8") from None
    if size_bytes > TEXT_BYTES_MAX:
        raise UsageError(
            f"{what} has {size_bytes} bytes; the maximum is {TEXT_BYTES_MAX}",
            hint="send files as a working directory",
        )
    if any("\0" in text for text in texts):
        raise UsageError(f"{what} contains a NUL byte")


def check_command(command: Sequence[str]) -> None:
    if not command or not command[0]:
        raise UsageError("the command is empty", hint="name a program to run")
    if len(command) > COMMAND_ARGUMENTS_MAX:
        raise UsageError(f"the command has {len(command)} arguments; the maximum is {COMMAND_ARGUMENTS_MAX}")
    check_texts(command, "the command")


def check_time_limit(limit_s: float | None) -> None:
    if limit_s is not None and not 0 < limit_s <= TIME_LIMIT_S_MAX:
        raise UsageError(
            f"time_limit_s = {limit_s} is not allowed", hint=f"allowed: above 0 to {TIME_LIMIT_S_MAX:g}"
        )


def check_digest(digest: str) -> str:
    """Return `digest`; raise UsageError unless it is a SHA-256 in hexadecimal."""
    if not _DIGEST.fullmatch(digest):
        raise UsageError("a digest is 64 lower-case hexadecimal digits", hint="send the SHA-256 of the bytes")
    return digest
