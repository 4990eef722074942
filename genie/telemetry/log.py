"""What Genie's own processes write to standard error: lines for people, or JSON for machines.

Modules log through logging.getLogger(__name__), with facts in `extra`. Only the logger "genie" is
set up here, never the root: in a user's program the user decides. Secrets are taken out of every
line, as a last line of defence; nobody should log them in the first place.

Not for: what a job prints (the agent keeps that), and events (cluster/events.py).
"""

from __future__ import annotations

import datetime
import json
import logging
import math
import re
import sys
from collections.abc import Mapping
from typing import TextIO

from genie.config import LogConfig

LOGGER = "genie"
HIDDEN = "***"
TEXT_CHARS_MAX = 8192
"""Of one message, field or traceback; the middle of a longer one is cut out."""
_LOOKED_AT_CHARS_MAX = 8 * TEXT_CHARS_MAX

# What a record has without anyone's `extra`.
_OWN_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}

_SECRET_NAME = re.compile(r"(?i)token|secret|password|passwd|ticket|authorization|api_?key|private_?key")
# Ids and hashes are named after what they belong to, and are meant to be read.
_HARMLESS_NAME = re.compile(r"(?i)(_id|_ids|_kind|_sha256|_file|_path|leader_token|fencing_token)$")

# Each starts at a fixed word and never runs past the next one: strangers give these texts, and looking
# through one must take time in proportion to its length.
_SECRET_TEXTS = (
    # A Genie token: kind and id stay readable, secret and pin do not.
    (
        re.compile(r"\bgenie\.(owner|user|join|node)\.([a-z0-9]+)\.[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]*)?"),
        r"genie.\1.\2.***",
    ),
    (re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.S), HIDDEN),
    (re.compile(r"(?i)\b(authorization\s*:\s*\w+|bearer)\s+[^\s,;\"']+"), r"\1 ***"),
    (
        re.compile(
            r"(?i)\b(password|passwd|secret|ticket|api[_-]?key)(\"?\s*[=:]\s*)(\"[^\"]*\"|'[^']*'|[^\s,;&)]+)"
        ),
        r"\1\2***",
    ),
    # user:password@host in an address
    (re.compile(r"(://[^\s:/@]*):[^\s/@]+@"), r"\1:***@"),
)


def configure(config: LogConfig, *, stream: TextIO | None = None) -> None:
    """Writes Genie's log to `stream` (standard error) from now on. Called again, it replaces itself."""
    handler = _Handler(stream)
    handler.setFormatter(JsonFormatter() if config.format == "json" else TextFormatter())
    reset()
    logger = logging.getLogger(LOGGER)
    logger.addHandler(handler)
    logger.setLevel(config.level)


def reset() -> None:
    """Undoes configure(): Genie is silent again, unless the program around it listens."""
    logger = logging.getLogger(LOGGER)
    for handler in list(logger.handlers):
        if isinstance(handler, _Handler):
            logger.removeHandler(handler)
            handler.close()
    logger.setLevel(logging.NOTSET)


def redacted(text: str) -> str:
    """`text` without what looks like a token, a private key or a password, as valid Unicode, and cut."""
    unseen = max(0, len(text) - _LOOKED_AT_CHARS_MAX)
    text = text[:_LOOKED_AT_CHARS_MAX]
    text = text.encode("utf-8", "backslashreplace").decode()  # file names can hold half characters
    for pattern, instead in _SECRET_TEXTS:
        text = pattern.sub(instead, text)
    return _shortened(text, unseen)


def _shortened(text: str, unseen: int) -> str:
    """Cut only after the secrets are out: half of one might not look like one any more."""
    if not unseen and len(text) <= TEXT_CHARS_MAX:
        return text
    # The end of a traceback says most. Where the end was not looked at, half a secret may stand last.
    tail = "" if unseen else text[-TEXT_CHARS_MAX // 2 :]
    head = text[: TEXT_CHARS_MAX - len(tail)]
    return f"{head}[{len(text) + unseen - len(head) - len(tail)} characters cut]{tail}"


class TextFormatter(logging.Formatter):
    """`TIME LEVEL LOGGER MESSAGE key=value ...`, and a traceback on lines of its own below."""

    def format(self, record: logging.LogRecord) -> str:
        fields = "".join(f" {key}={_one_line(value)}" for key, value in _extra(record).items())
        message = _one_line(redacted(record.getMessage()))
        line = f"{_time(record)} {record.levelname:<7} {record.name} {message}{fields}"
        trace = _trace(self, record)
        return f"{line}\n{trace}" if trace else line


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, message, then the extra fields, then the traceback."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": _time(record),
            "level": record.levelname,
            "logger": record.name,
            "message": redacted(record.getMessage()),
        }
        for key, value in _extra(record).items():
            line[f"extra_{key}" if key in line or key == "traceback" else key] = value
        trace = _trace(self, record)
        if trace:
            line["traceback"] = trace
        # ASCII only: some readers take U+2028 and its kind for the end of a line.
        return json.dumps(line)


class _Handler(logging.StreamHandler[TextIO]):
    """A type of our own, so that reset() takes away nobody else's handler."""

    def __init__(self, given: TextIO | None) -> None:
        logging.Handler.__init__(self)  # not StreamHandler's, which sets the stream once and for all
        self._given = given

    @property
    def stream(self) -> TextIO:  # type: ignore[override]  # looked up for each record
        """Standard error as it is now, unless one was given: a program may replace it at any time."""
        return self._given or sys.stderr


def _time(record: logging.LogRecord) -> str:
    at = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
    return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _extra(record: logging.LogRecord) -> dict[str, object]:
    return {key: _safe(key, value) for key, value in vars(record).items() if key not in _OWN_FIELDS}


def _safe(name: str, value: object) -> object:
    """The value without secrets; numbers and the like as they are, what has no JSON form as text."""
    if _SECRET_NAME.search(name) and not _HARMLESS_NAME.search(name):
        return HIDDEN
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # JSON has no word for it
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, Mapping):
        return {str(key): _safe(str(key), item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_safe(name, item) for item in value]
    return redacted(str(value))


def _trace(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    parts = [formatter.formatException(record.exc_info)] if record.exc_info else []
    if record.stack_info:
        parts.append(formatter.formatStack(record.stack_info))
    return redacted("\n".join(parts))


def _one_line(value: object) -> str:
    """Line ends and control characters written out: one record is one line, whoever gave the text."""
    text = str(value)
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
