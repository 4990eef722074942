"""Logs of Genie's processes: their two forms, whose loggers they touch, and what they never show."""

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
def _back_to_silence() -> Iterator[None]:
    yield
    log.reset()


def written(
    *, form: str = "text", level: str = "INFO", name: str = "genie.part"
) -> tuple[io.StringIO, logging.Logger]:
    stream = io.StringIO()
    log.configure(LogConfig(format=form, level=level), stream=stream)
    return stream, logging.getLogger(name)


def json_line(stream: io.StringIO) -> dict[str, object]:
    (line,) = stream.getvalue().splitlines()
    found = json.loads(line)
    assert isinstance(found, dict)
    return found


def test_a_text_line_has_time_level_logger_message_and_fields() -> None:
    stream, logger = written()
    logger.warning("job %s ended", "j1", extra={"exit_code": 3, "node": "n1"})
    assert re.fullmatch(
        r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z WARNING genie\.part job j1 ended exit_code=3 node=n1\n",
        stream.getvalue(),
    )


def test_a_json_line_has_the_same_in_named_fields_with_their_types() -> None:
    stream, logger = written(form="json")
    fields = {"exit_code": 3, "ratio": 0.5, "ok": True, "tags": ["a"], "none": None}
    logger.info("job %s ended", "j1", extra=fields)
    line = json_line(stream)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", str(line.pop("time")))
    assert line == {
        "level": "INFO",
        "logger": "genie.part",
        "message": "job j1 ended",
        **fields,
    }


def test_a_value_without_a_json_form_is_written_as_text() -> None:
    stream, logger = written(form="json")
    logger.info("x", extra={"path": Path("/a/b"), "deep": {"inner": {1: Path("/c")}}, "odd": float("nan")})
    assert (json_line(stream)["path"], json_line(stream)["odd"]) == ("/a/b", "nan")
    assert json_line(stream)["deep"] == {"inner": {"1": "/c"}}


def test_a_field_named_like_one_of_ours_does_not_replace_it() -> None:
    stream, logger = written(form="json")
    logger.info("x", extra={"level": "mine", "time": 1})
    line = json_line(stream)
    assert (line["level"], line["extra_level"], line["extra_time"]) == ("INFO", "mine", 1)


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_traceback_comes_with_the_record(form: str) -> None:
    stream, logger = written(form=form)
    try:
        raise KeyError("lost")
    except KeyError:
        logger.exception("it failed")
    text = str(json_line(stream)["traceback"]) if form == "json" else stream.getvalue()
    assert "Traceback (most recent call last)" in text
    assert "KeyError: 'lost'" in text


@pytest.mark.parametrize(("level", "lines"), [("DEBUG", 3), ("INFO", 2), ("ERROR", 0)])
def test_only_the_configured_level_and_above_is_written(level: str, lines: int) -> None:
    stream, logger = written(level=level)
    logger.debug("a")
    logger.info("b")
    logger.warning("c")
    assert len(stream.getvalue().splitlines()) == lines


def test_only_genies_loggers_are_touched() -> None:
    root_before = (logging.root.level, list(logging.root.handlers))
    stream, _ = written(level="DEBUG")
    logging.getLogger("other.library").warning("not ours")
    assert stream.getvalue() == ""
    assert (logging.root.level, logging.root.handlers) == root_before


def test_a_programs_own_handlers_still_get_genies_records(caplog: pytest.LogCaptureFixture) -> None:
    _, logger = written()
    logger.info("seen by both")
    assert "seen by both" in caplog.text


def test_configuring_again_replaces_and_does_not_double() -> None:
    first, _ = written()
    second, logger = written()
    logger.info("once")
    assert first.getvalue() == ""
    assert second.getvalue().count("once") == 1


def test_reset_leaves_handlers_that_others_have_put_there() -> None:
    theirs = logging.NullHandler()
    logger = logging.getLogger("genie")
    logger.addHandler(theirs)
    try:
        written()
        log.reset()
        assert theirs in logger.handlers
        assert not [handler for handler in logger.handlers if isinstance(handler, log._Handler)]
    finally:
        logger.removeHandler(theirs)


def test_without_a_stream_lines_go_to_what_standard_error_is_at_that_moment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log.configure(LogConfig())
    later = io.StringIO()
    monkeypatch.setattr(sys, "stderr", later)
    logging.getLogger("genie.part").info("hello")
    assert "hello" in later.getvalue()


def test_a_record_that_cannot_be_formatted_does_not_break_the_program(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logging, "raiseExceptions", False)
    stream, logger = written()
    logger.info("too few %s %s", "one")  # noqa: PLE1206 - the fault is the point
    logger.info("next")
    assert "next" in stream.getvalue()


def test_a_stream_that_is_closed_does_not_break_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging, "raiseExceptions", False)
    stream, logger = written()
    stream.close()
    logger.info("nobody reads this")


# --- Text from elsewhere --------------------------------------------------------------------------


ANY_TEXT = st.text(st.characters(exclude_categories=()))


@given(ANY_TEXT, ANY_TEXT)
def test_one_record_is_one_line_whatever_the_text(message: str, value: str) -> None:
    for formatter in (log.TextFormatter(), log.JsonFormatter()):
        record = logging.makeLogRecord({"name": "genie", "levelname": "INFO", "msg": message, "field": value})
        assert len(formatter.format(record).splitlines()) == 1


def test_control_characters_are_written_out() -> None:
    stream, logger = written()
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
    f"-----BEGIN PRIVATE KEY-----\n{SECRET}\n-----END PRIVATE KEY-----",
    f"-----BEGIN EC PRIVATE KEY-----\n{SECRET}\ncut off",
]


@pytest.mark.parametrize("form", ["text", "json"])
@pytest.mark.parametrize("line", SECRET_LINES)
def test_a_secret_in_the_message_in_a_field_or_in_a_traceback_is_not_written(form: str, line: str) -> None:
    stream, logger = written(form=form)
    try:
        raise ValueError(line)
    except ValueError:
        logger.exception("saw %s", line, extra={"text": line, "deep": {"list": [line]}})
    assert stream.getvalue()
    assert SECRET not in stream.getvalue()


@pytest.mark.parametrize(
    "name", ["token", "secret", "password", "ticket", "api_key", "authorization", "node_token"]
)
def test_a_field_named_like_a_secret_is_hidden_whatever_is_in_it(name: str) -> None:
    stream, logger = written(form="json")
    logger.info("x", extra={name: "plain", "inside": {name: 123}})
    assert (json_line(stream)[name], json_line(stream)["inside"]) == ("***", {name: "***"})


def test_what_is_meant_to_be_read_stays_readable() -> None:
    stream, logger = written(form="json")
    fields = {"token_id": "abcd1234", "leader_token": 7, "secret_sha256": "beef"}
    logger.info("checked %s", TOKEN, extra=fields)
    line = json_line(stream)
    assert line["message"] == "checked genie.owner.abcd1234.***"
    assert {name: line[name] for name in fields} == fields
    assert log.redacted("genie.owner is a kind, genie.cluster.events.EventBus a class") == (
        "genie.owner is a kind, genie.cluster.events.EventBus a class"
    )


# --- As a library ---------------------------------------------------------------------------------


def test_an_imported_genie_says_nothing_until_someone_listens() -> None:
    code = "import logging, genie; logging.getLogger('genie.part').warning('unasked')"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")


# --- long texts -------------------------------------------------------------------------------


def test_a_long_text_is_cut_in_the_middle_and_says_by_how_much() -> None:
    text = "start" + "x" * 20_000 + "end"
    cut = log.redacted(text)
    assert len(cut) < log.TEXT_CHARS_MAX + 50
    assert cut.startswith("start")
    assert cut.endswith("end")
    assert f"[{len(text) - log.TEXT_CHARS_MAX} characters cut]" in cut


@pytest.mark.parametrize("length", [1, 10_000, 70_000, 500_000])
def test_a_secret_at_any_place_of_a_long_text_is_not_shown(length: int) -> None:
    for secret in (TOKEN, f"https://ann:{SECRET}@host"):
        assert SECRET not in log.redacted("x" * length + " " + secret + " " + "y" * length)
        for at in (log.TEXT_CHARS_MAX, log.TEXT_CHARS_MAX // 2):
            assert SECRET[:9] not in log.redacted("x" * (at - 30) + " " + secret + "y" * length)


@pytest.mark.parametrize(
    "piece", ["a", "://", "a://", "bearer ", "secret=", "-----BEGIN ", "genie.owner.", " "]
)
def test_looking_for_secrets_takes_few_steps_whatever_the_text(piece: str) -> None:
    """The longest text that is looked at, as often as a busy log has lines; quadratic takes minutes."""
    for _ in range(5):
        log.redacted(piece * (70_000 // len(piece)))
