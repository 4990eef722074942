"""The log: formats, loggers and redaction."""

from __future__ import annotations

import io
import json
import logging
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from genie.config import LogConfig
from genie.model.tenant import TokenKind
from genie.telemetry import log
from genie.tenancy.access import Token

ROOT = Path(__file__).parents[2]
SECRET = "s" * 43
TOKEN = str(Token(TokenKind.OWNER, "abcd1234", SECRET, "p" * 43))


@pytest.fixture(autouse=True)
def _reset_log() -> Iterator[None]:
    yield
    log.reset()


def configured_logger(
    *, form: str = "text", level: str = "INFO", name: str = "genie.part"
) -> tuple[io.StringIO, logging.Logger]:
    stream = io.StringIO()
    log.configure(LogConfig(format=form, level=level), stream=stream)
    return stream, logging.getLogger(name)


def parse_single_json_line(stream: io.StringIO) -> dict[str, object]:
    (line,) = stream.getvalue().splitlines()
    found = json.loads(line)
    assert isinstance(found, dict)
    return found


def test_text_line_has_time_level_logger_message_and_fields() -> None:
    stream, logger = configured_logger()
    logger.warning("job %s ended", "j1", extra={"exit_code": 3, "node": "n1"})
    assert re.fullmatch(
        r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z WARNING genie\.part job j1 ended exit_code=3 node=n1\n",
        stream.getvalue(),
    )


def test_json_line_has_the_same_in_typed_fields() -> None:
    stream, logger = configured_logger(form="json")
    fields = {"exit_code": 3, "ratio": 0.5, "ok": True, "tags": ["a"], "none": None}
    logger.info("job %s ended", "j1", extra=fields)
    line = parse_single_json_line(stream)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", str(line.pop("time")))
    assert line == {
        "level": "INFO",
        "logger": "genie.part",
        "message": "job j1 ended",
        **fields,
    }


def test_value_without_a_json_form_is_written_as_text() -> None:
    stream, logger = configured_logger(form="json")
    logger.info("x", extra={"path": Path("/a/b"), "deep": {"inner": {1: Path("/c")}}, "odd": float("nan")})
    assert (parse_single_json_line(stream)["path"], parse_single_json_line(stream)["odd"]) == ("/a/b", "nan")
    assert parse_single_json_line(stream)["deep"] == {"inner": {"1": "/c"}}


def test_extra_field_does_not_replace_a_standard_field() -> None:
    stream, logger = configured_logger(form="json")
    logger.info("x", extra={"level": "mine", "time": 1})
    line = parse_single_json_line(stream)
    assert (line["level"], line["extra_level"], line["extra_time"]) == ("INFO", "mine", 1)


@pytest.mark.parametrize("form", ["text", "json"])
def test_traceback_is_written_with_the_record(form: str) -> None:
    stream, logger = configured_logger(form=form)
    try:
        raise KeyError("lost")
    except KeyError:
        logger.exception("it failed")
    text = str(parse_single_json_line(stream)["traceback"]) if form == "json" else stream.getvalue()
    assert "Traceback (most recent call last)" in text
    assert "KeyError: 'lost'" in text


@pytest.mark.parametrize(("level", "lines"), [("DEBUG", 3), ("INFO", 2), ("ERROR", 0)])
def test_records_below_the_configured_level_are_not_written(level: str, lines: int) -> None:
    stream, logger = configured_logger(level=level)
    logger.debug("a")
    logger.info("b")
    logger.warning("c")
    assert len(stream.getvalue().splitlines()) == lines


def test_only_loggers_of_genie_are_configured() -> None:
    root_before = (logging.root.level, list(logging.root.handlers))
    stream, _ = configured_logger(level="DEBUG")
    logging.getLogger("other.library").warning("not ours")
    assert stream.getvalue() == ""
    assert (logging.root.level, logging.root.handlers) == root_before


def test_handlers_of_the_program_still_get_records_of_genie(caplog: pytest.LogCaptureFixture) -> None:
    _, logger = configured_logger()
    logger.info("seen by both")
    assert "seen by both" in caplog.text


def test_second_configure_replaces_the_first() -> None:
    first, _ = configured_logger()
    second, logger = configured_logger()
    logger.info("once")
    assert first.getvalue() == ""
    assert second.getvalue().count("once") == 1


def test_reset_keeps_handlers_of_the_program() -> None:
    theirs = logging.NullHandler()
    logger = logging.getLogger("genie")
    logger.addHandler(theirs)
    try:
        configured_logger()
        log.reset()
        assert theirs in logger.handlers
        assert not [handler for handler in logger.handlers if isinstance(handler, log._GenieHandler)]
    finally:
        logger.removeHandler(theirs)


def test_default_stream_is_the_current_standard_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log.configure(LogConfig())
    later = io.StringIO()
    monkeypatch.setattr(sys, "stderr", later)
    logging.getLogger("genie.part").info("hello")
    assert "hello" in later.getvalue()


def test_record_that_cannot_be_formatted_does_not_raise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logging, "raiseExceptions", False)
    stream, logger = configured_logger()
    logger.info("too few %s %s", "one")  # noqa: PLE1206 - the fault is the point
    logger.info("next")
    assert "next" in stream.getvalue()


def test_closed_stream_does_not_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging, "raiseExceptions", False)
    stream, logger = configured_logger()
    stream.close()
    logger.info("not written")


# --- Untrusted text -------------------------------------------------------------------------------


ANY_TEXT = st.text(st.characters(exclude_categories=()))


@given(ANY_TEXT, ANY_TEXT)
def test_one_record_is_one_line_for_any_text(message: str, value: str) -> None:
    for formatter in (log.TextFormatter(), log.JsonFormatter()):
        record = logging.makeLogRecord({"name": "genie", "levelname": "INFO", "msg": message, "field": value})
        assert len(formatter.format(record).splitlines()) == 1


def test_control_characters_are_escaped() -> None:
    stream, logger = configured_logger()
    logger.info("a\nINFO genie forged\x1b[2J", extra={"field": "b\rc"})
    assert "a\\nINFO genie forged\\x1b[2J field=b\\rc\n" in stream.getvalue()


# --- Secrets --------------------------------------------------------------------------------------

SECRET_LINES = [
    f"client shows {TOKEN}",
    f"token={TOKEN}",
    f"Authorization: Bearer {SECRET}",
    f"bearer {SECRET}",
    f"password={SECRET}",
    f'{{"password": "{SECRET}"}}',
    f"secret: '{SECRET} with spaces {SECRET}'",
    f"ticket={SECRET}&next=1",
    f"api_key={SECRET}",
    f"etcds://root:{SECRET}@10.0.0.1:2379",
    f"https://{SECRET}@10.0.0.1/simple",
    f"https://{SECRET}:@10.0.0.1/simple",
    f"-----BEGIN PRIVATE KEY-----\n{SECRET}\n-----END PRIVATE KEY-----",
    f"-----BEGIN EC PRIVATE KEY-----\n{SECRET}\ncut off",
]


@pytest.mark.parametrize("form", ["text", "json"])
@pytest.mark.parametrize("line", SECRET_LINES)
def test_secrets_in_message_fields_and_traceback_are_redacted(form: str, line: str) -> None:
    stream, logger = configured_logger(form=form)
    try:
        raise ValueError(line)
    except ValueError:
        logger.exception("saw %s", line, extra={"text": line, "deep": {"list": [line]}})
    assert stream.getvalue()
    assert SECRET not in stream.getvalue()


@pytest.mark.parametrize(
    "name", ["token", "secret", "password", "ticket", "api_key", "authorization", "node_token"]
)
def test_field_with_a_secret_name_is_redacted(name: str) -> None:
    stream, logger = configured_logger(form="json")
    logger.info("x", extra={name: "plain", "inside": {name: 123}})
    assert (parse_single_json_line(stream)[name], parse_single_json_line(stream)["inside"]) == (
        "***",
        {name: "***"},
    )


def test_harmless_fields_are_not_redacted() -> None:
    stream, logger = configured_logger(form="json")
    fields = {"token_id": "abcd1234", "leader_token": 7, "secret_sha256": "beef"}
    logger.info("checked %s", TOKEN, extra=fields)
    line = parse_single_json_line(stream)
    assert line["message"] == "checked genie.owner.abcd1234.***"
    assert {name: line[name] for name in fields} == fields
    assert log.redact("genie.owner is a kind, genie.cluster.events.EventBus a class") == (
        "genie.owner is a kind, genie.cluster.events.EventBus a class"
    )
    assert log.redact("https://ann:pass@host/a@b http://host/@c") == "https://ann:***@host/a@b http://host/@c"


# --- As a library ---------------------------------------------------------------------------------


def test_import_of_genie_writes_no_log() -> None:
    code = "import logging, genie; logging.getLogger('genie.part').warning('unasked')"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")


# --- long texts -------------------------------------------------------------------------------


def test_long_text_is_cut_in_the_middle_with_a_note() -> None:
    text = "start" + "x" * 20_000 + "end"
    cut = log.redact(text)
    assert len(cut) < log.TEXT_CHARS_MAX + 50
    assert cut.startswith("start")
    assert cut.endswith("end")
    assert f"[{len(text) - log.TEXT_CHARS_MAX} characters cut]" in cut


@pytest.mark.parametrize("length", [1, 10_000, 70_000, 500_000])
def test_secret_anywhere_in_a_long_text_is_redacted(length: int) -> None:
    for secret in (TOKEN, f"https://ann:{SECRET}@host"):
        assert SECRET not in log.redact("x" * length + " " + secret + " " + "y" * length)
        for at in (log.TEXT_CHARS_MAX, log.TEXT_CHARS_MAX // 2):
            assert SECRET[:9] not in log.redact("x" * (at - 30) + " " + secret + "y" * length)


@pytest.mark.parametrize(
    "piece", ["a", "://", "a://", "://a", "://a:", "bearer ", "secret=", "-----BEGIN ", "genie.owner.", " "]
)
def test_redaction_takes_linear_time(piece: str) -> None:
    """Scans the longest text many times; quadratic time would take minutes."""
    for _ in range(5):
        log.redact(piece * (70_000 // len(piece)))


# --- in a user's program ------------------------------------------------------------------------


def unconfigured_logger() -> logging.Logger:
    """As in a program without logging configuration; the conftest of all tests restores it.

    Not a fixture: pytest adds its own handlers for the call of the test.
    """
    logging.getLogger().handlers[:] = []
    return logging.getLogger("genie")


def test_session_configures_the_log_if_the_program_has_none() -> None:
    logger = unconfigured_logger()
    log.configure_session(LogConfig(), requested=False)
    assert logger.level == logging.INFO
    log.configure_session(LogConfig(level="DEBUG"), requested=False)
    assert logger.level == logging.DEBUG, "a second session replaces what the first has set up"


@pytest.mark.parametrize("requested", [False, True])
@pytest.mark.parametrize("own", ["root handler", "handler", "level"])
def test_logging_of_the_program_is_kept_unless_a_level_was_requested(own: str, requested: bool) -> None:
    logger = unconfigured_logger()
    handler = logging.StreamHandler(io.StringIO())
    if own == "root handler":
        logging.getLogger().addHandler(handler)
    elif own == "handler":
        logger.addHandler(handler)
    else:
        logger.setLevel(logging.ERROR)
    before = logger.level
    log.configure_session(LogConfig(), requested=requested)
    assert logger.level == (logging.INFO if requested else before)


@pytest.mark.parametrize("name", ["", "genie"], ids=["root", "genie"])
def test_program_that_configures_logging_later_gets_each_record_once(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    unconfigured_logger()
    ours, theirs = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stderr", ours)
    log.configure_session(LogConfig(), requested=False)
    part = logging.getLogger("genie.part")
    part.info("first")
    handler = logging.StreamHandler(theirs)
    logging.getLogger(name).addHandler(handler)
    part.warning("second")
    assert ours.getvalue().endswith("genie.part first\n")
    assert theirs.getvalue() == "second\n"
    logging.getLogger(name).removeHandler(handler)
    part.info("third")
    assert ours.getvalue().endswith("genie.part third\n")


@pytest.mark.parametrize(
    ("name", "level", "seen"),
    [
        ("", logging.WARNING, ["warning"]),
        ("", logging.INFO, ["info", "warning"]),
        ("genie", logging.INFO, ["info", "warning"]),
        ("genie", logging.ERROR, []),
        ("genie.part", logging.INFO, ["info", "warning"]),
    ],
)
def test_level_that_the_program_sets_later_applies_immediately(
    name: str, level: int, seen: list[str]
) -> None:
    unconfigured_logger()
    log.configure_session(LogConfig(), requested=False)
    theirs = io.StringIO()
    logging.basicConfig(stream=theirs, format="%(levelname)s %(message)s")
    part = logging.getLogger("genie.part")
    before = part.level
    logging.getLogger(name).setLevel(level)
    try:
        part.info("info")
        part.warning("warning")
    finally:
        part.setLevel(before)
    assert [line.split()[1] for line in theirs.getvalue().splitlines()] == seen


def test_requested_level_is_kept_if_the_program_configures_logging_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    unconfigured_logger()
    ours = io.StringIO()
    monkeypatch.setattr(sys, "stderr", ours)
    log.configure_session(LogConfig(), requested=True)
    logging.getLogger().addHandler(logging.NullHandler())
    logging.getLogger("genie.part").info("still here")
    assert "still here" in ours.getvalue()
