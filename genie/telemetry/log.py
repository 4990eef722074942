"""The log of the processes of Genie on standard error: text or JSON.

Modules log through logging.getLogger(__name__), with fields in `extra`. Only the logger "genie" is
configured, never the root logger; a program that has configured logging keeps its configuration. Secrets are
redacted as a last line of defence; code must not log them. The output of jobs is kept by the agent.
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

ROOT_LOGGER_NAME = "genie"
REDACTED = "***"
TEXT_CHARS_MAX = 8192
"""Maximum length of a message, field or traceback; the middle of a longer one is removed."""
_SCANNED_CHARS_MAX = 8 * TEXT_CHARS_MAX

# The fields of a record without `extra`.
_STANDARD_RECORD_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}

_SECRET_FIELD_NAME = re.compile(
    r"(?i)token|secret|password|passwd|ticket|authorization|api_?key|private_?key"
)
# IDs, hashes and paths are not secret.
_HARMLESS_FIELD_NAME = re.compile(r"(?i)(_id|_ids|_kind|_sha256|_file|_path|leader_token|fencing_token)$")

# Each pattern starts at a fixed word and does not match beyond the next one, so that matching untrusted text
# takes linear time.
_SECRET_PATTERNS = (
    # Genie tokens: redacts secret and pin, keeps kind and ID.
    (
        re.compile(r"\bgenie\.(owner|user|join|node)\.([a-z0-9]+)\.[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]*)?"),
        r"genie.\1.\2.***",
    ),
    (
        re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.S),
        REDACTED,
    ),
    (re.compile(r"(?i)\b(authorization\s*:\s*\w+|bearer)\s+[^\s,;\"']+"), r"\1 ***"),
    (
        re.compile(
            r"(?i)\b(password|passwd|secret|ticket|api[_-]?key)(\"?\s*[=:]\s*)(\"[^\"]*\"|'[^']*'|[^\s,;&)]+)"
        ),
        r"\1\2***",
    ),
    # user:password@host in an address
    (re.compile(r"(://[^\s:/@]*):[^\s/@]+@"), r"\1:***@"),
    # user@host in an address: the user may be a token
    (re.compile(r"://[^\s:/@]+:?@"), "://***@"),
)


def configure(config: LogConfig, *, stream: TextIO | None = None) -> None:
    """Writes the log of Genie to `stream` (default: standard error). Replaces an earlier configuration."""
    _install_handler(config, _GenieHandler(stream))
    logging.getLogger(ROOT_LOGGER_NAME).setLevel(config.level)


def configure_session(config: LogConfig, *, requested: bool) -> None:
    """configure() for a session in a program of the user. `requested`: the user has set a level or a format.

    Otherwise a program that configures logging, also later, keeps its configuration: its handlers get the
    records of Genie at or above its level; if it configures logging later, none below `config.level`.
    """
    if requested:
        configure(config)
    elif not _program_has_logging():
        handler = _GenieHandler(None)
        handler.addFilter(_is_record_for_session)
        _install_handler(config, handler)
        logging.getLogger(ROOT_LOGGER_NAME).setLevel(
            _SessionLevel(logging.getLevelNamesMapping()[config.level])
        )


def _install_handler(config: LogConfig, handler: _GenieHandler) -> None:
    handler.setFormatter(JsonFormatter() if config.format == "json" else TextFormatter())
    reset()
    logging.getLogger(ROOT_LOGGER_NAME).addHandler(handler)


class _SessionLevel(int):
    """Distinguishes the level of a session from a level that the program sets."""


def _is_record_for_session(record: logging.LogRecord) -> bool:
    """A filter: Genie writes records only while the program has no handlers."""
    if not _program_has_handlers():
        return True
    if record.levelno < _program_level(record.name):
        # The record passed the level of the session. The handlers of the program run after this one, with
        # levels of 0 (NOTSET) and above, and a filter has no other means to stop the record.
        record.levelno = -1
    return False


def _program_level(name: str) -> int:
    """The effective level of a logger without the level of a session."""
    logger: logging.Logger | None = logging.getLogger(name)
    while logger is not None:
        if logger.level != logging.NOTSET and not isinstance(logger.level, _SessionLevel):
            return logger.level
        logger = logger.parent
    return logging.NOTSET


def _program_has_logging() -> bool:
    logger = logging.getLogger(ROOT_LOGGER_NAME)
    is_ours = any(isinstance(handler, _GenieHandler) for handler in logger.handlers)
    return _program_has_handlers() or (logger.level != logging.NOTSET and not is_ours)


def _program_has_handlers() -> bool:
    ours = (_GenieHandler, logging.NullHandler)
    own = logging.getLogger(ROOT_LOGGER_NAME).handlers
    return bool(logging.getLogger().handlers) or any(not isinstance(handler, ours) for handler in own)


def reset() -> None:
    """Undoes configure(): Genie writes no log, unless the program has handlers."""
    logger = logging.getLogger(ROOT_LOGGER_NAME)
    for handler in list(logger.handlers):
        if isinstance(handler, _GenieHandler):
            logger.removeHandler(handler)
            handler.close()
    logger.setLevel(logging.NOTSET)


def redact(text: str) -> str:
    """Returns `text` without tokens, private keys and passwords, as valid Unicode, shortened."""
    unscanned = max(0, len(text) - _SCANNED_CHARS_MAX)
    text = text[:_SCANNED_CHARS_MAX]
    text = text.encode("utf-8", "backslashreplace").decode()  # file names may contain surrogates
    for pattern, replacement in _SECRET_PATTERNS:
        text = pattern.sub(replacement, text)
    return _shorten_redacted(text, unscanned)


def _shorten_redacted(text: str, unscanned: int) -> str:
    """Shortens redacted text; before redaction, a secret that is cut might not be recognized."""
    if not unscanned and len(text) <= TEXT_CHARS_MAX:
        return text
    # The end of a traceback matters most. It is dropped if it was not scanned: it may contain part of a
    # secret.
    tail = "" if unscanned else text[-TEXT_CHARS_MAX // 2 :]
    head = text[: TEXT_CHARS_MAX - len(tail)]
    return f"{head}[{len(text) + unscanned - len(head) - len(tail)} characters cut]{tail}"


class TextFormatter(logging.Formatter):
    """`TIME LEVEL LOGGER MESSAGE key=value ...`, followed by the traceback on separate lines."""

    def format(self, record: logging.LogRecord) -> str:
        fields = "".join(
            f" {key}={_to_one_line(value)}" for key, value in _redacted_extra_fields(record).items()
        )
        message = _to_one_line(redact(record.getMessage()))
        line = f"{_format_time(record)} {record.levelname:<7} {record.name} {message}{fields}"
        trace = _format_traceback(self, record)
        return f"{line}\n{trace}" if trace else line


class JsonFormatter(logging.Formatter):
    """One JSON object per line: time, level, logger, message, extra fields, traceback."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": _format_time(record),
            "level": record.levelname,
            "logger": record.name,
            "message": redact(record.getMessage()),
        }
        for key, value in _redacted_extra_fields(record).items():
            line[f"extra_{key}" if key in line or key == "traceback" else key] = value
        trace = _format_traceback(self, record)
        if trace:
            line["traceback"] = trace
        # ASCII only: some readers treat U+2028 and others as the end of a line.
        return json.dumps(line)


class _GenieHandler(logging.StreamHandler[TextIO]):
    """A separate type, so that reset() does not remove handlers of the program."""

    def __init__(self, explicit_stream: TextIO | None) -> None:
        logging.Handler.__init__(self)  # not that of StreamHandler, which sets the stream
        self._explicit_stream = explicit_stream

    @property
    def stream(self) -> TextIO:  # type: ignore[override]  # looked up for each record
        """The explicit stream, or the current standard error, which a program may replace at any time."""
        return self._explicit_stream or sys.stderr


def _format_time(record: logging.LogRecord) -> str:
    at = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
    return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _redacted_extra_fields(record: logging.LogRecord) -> dict[str, object]:
    return {
        key: _redact_value(key, value)
        for key, value in vars(record).items()
        if key not in _STANDARD_RECORD_FIELDS
    }


def _redact_value(name: str, value: object) -> object:
    """The value without secrets; values without a JSON form become text."""
    if _SECRET_FIELD_NAME.search(name) and not _HARMLESS_FIELD_NAME.search(name):
        return REDACTED
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # JSON has no infinity and NaN
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, Mapping):
        return {str(key): _redact_value(str(key), item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_redact_value(name, item) for item in value]
    return redact(str(value))


def _format_traceback(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    parts = [formatter.formatException(record.exc_info)] if record.exc_info else []
    if record.stack_info:
        parts.append(formatter.formatStack(record.stack_info))
    return redact("\n".join(parts))


def _to_one_line(value: object) -> str:
    """Escapes line ends and control characters, so that one record is one line."""
    text = str(value)
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
