"""Parsing and formatting of sizes, durations and addresses."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from genie.cli.quantities import (
    format_duration,
    format_size,
    parse_duration,
    parse_future_time,
    parse_integer,
    parse_labels,
    parse_number,
    parse_pairs,
    parse_size,
)
from genie.errors import UsageError
from genie.model.names import address_text, parse_address


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("0", 0),
        ("4096", 4096),
        ("512MiB", 512 * 1024**2),
        ("4G", 4 * 1024**3),
        ("4g", 4 * 1024**3),
        ("1.5GiB", 3 * 1024**3 // 2),
        ("2GB", 2 * 10**9),
        ("1 TiB", 1024**4),
        ("10B", 10),
    ],
)
def test_size_is_parsed(text: str, size_bytes: int) -> None:
    assert parse_size(text, what="--memory") == size_bytes


@pytest.mark.parametrize("text", ["", "-1", "4X", "GiB", "1e9", "4 G i B", "nan", "inf", "9999999PiB", "٤"])
def test_invalid_size_names_the_option(text: str) -> None:
    with pytest.raises(UsageError, match="--memory"):
        parse_size(text, what="--memory")


@given(st.integers(0, 1 << 60))
def test_size_without_unit_is_in_bytes(size_bytes: int) -> None:
    assert abs(parse_size(str(size_bytes), what="x") - size_bytes) <= size_bytes // 2**50


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90), ("90s", 90), ("15m", 900), ("1.5h", 5400), ("7d", 604800)]
)
def test_duration_is_parsed(text: str, seconds: float) -> None:
    assert parse_duration(text, what="--ttl") == seconds


@pytest.mark.parametrize("text", ["", "0", "-5", "1w", "h", "99999d"])
def test_invalid_duration_names_the_option(text: str) -> None:
    with pytest.raises(UsageError, match="--ttl"):
        parse_duration(text, what="--ttl")


def test_duration_may_be_zero_if_allowed_and_has_a_maximum() -> None:
    assert parse_duration("0s", what="--grace", zero_allowed=True) == 0
    assert parse_duration("1d", what="--grace", high_s=86400.0) == 86400
    with pytest.raises(UsageError, match="--grace") as caught:
        parse_duration("25h", what="--grace", zero_allowed=True, high_s=86400.0)
    assert caught.value.hint.endswith("from 0 to 1 d")


def test_number_outside_its_range_is_rejected() -> None:
    assert parse_number("0.01", what="--gpu-share", low=0.01, high=1) == 0.01
    with pytest.raises(UsageError, match="--gpu-share") as caught:
        parse_number("0.009", what="--gpu-share", low=0.01, high=1)
    assert caught.value.hint == "give a number from 0.01 to 1"


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        ("90s", 1_000_090.0),
        ("2h", 1_007_200.0),
        ("1970-01-13T00:00:00Z", 12 * 86400.0),
        ("1970-01-13 01:00+01:00", 12 * 86400.0),
    ],
)
def test_deadline_may_be_a_duration_or_a_time(text: str, moment: float) -> None:
    assert parse_future_time(text, what="--deadline", now=1_000_000.0) == moment


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("soon", "is not a time"),
        ("", "is not a time"),
        ("2030-13-01", "is not a time"),
        ("0", "is in the past"),
        ("1970-01-12T00:00:00Z", "is in the past"),
        ("0001-01-01T00:00:00Z", "is in the past"),
        ("2100-01-01", "is too far in the future"),
        ("9999d", "is too far in the future"),
    ],
)
def test_invalid_deadline_error_has_the_reason(text: str, why: str) -> None:
    with pytest.raises(UsageError, match=why) as caught:
        parse_future_time(text, what="--deadline", now=1_000_000.0)
    assert "--deadline" in caught.value.message


@given(st.sampled_from(["box", "10.0.0.5", "::1"]), st.integers(1, 65535))
def test_formatted_address_is_parsed_to_the_same_address(host: str, port: int) -> None:
    assert parse_address(address_text(host, port), what="x") == (host, port)


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (200 * 1024**2, "200 MiB"), (5 * 1024**5, "5120 TiB")],
)
def test_size_is_formatted_in_the_nearest_unit(size_bytes: int, text: str) -> None:
    assert format_size(size_bytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-3, "0 s"),
        (59.6, "1 min"),
        (95, "95 s"),
        (119.9, "2 min"),
        (200, "3 min"),
        (3599.7, "1 h"),
        (5400, "90 min"),
        (7200, "2 h"),
        (86399, "1 d"),
        (7 * 86400 - 2, "7 d"),
        (30 * 86400 - 1, "30 d"),
    ],
)
def test_duration_is_formatted_rounded(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def test_too_long_duration_names_the_maximum() -> None:
    with pytest.raises(UsageError) as raised:
        parse_duration("2d", what="--grace", high_s=86400.0)
    assert (
        str(raised.value)
        == "--grace '2d' is out of range (write 90s, 15m, 2h, 7d or plain seconds, above 0 to 1 d)"
    )


def test_pairs_are_split_at_the_first_equals_sign_and_the_last_value_wins() -> None:
    assert parse_pairs(["a=1", "b=x=y", "a="], what="--env") == {"a": "", "b": "x=y"}
    assert parse_pairs(None, what="--env") == {}


def test_equal_labels_may_be_repeated() -> None:
    assert parse_labels(["a=1", "b=x/y", "a=1"]) == {"a": "1", "b": "x/y"}
    assert parse_labels(None) == {}


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["a=1", "a=2"], "--label a=1 and --label a=2 contradict each other"),
        (["zone"], "--label 'zone' is not KEY=VALUE"),
        (["a=b=c"], "the value of --label a 'b=c' is not allowed"),
        ([f"k{number}=v" for number in range(65)], "--label: 65 labels are too many"),
    ],
)
def test_invalid_labels_are_rejected(texts: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        parse_labels(texts)


@pytest.mark.parametrize("text", ["zone", "", "=a"])
def test_invalid_key_value_pair_has_a_hint(text: str) -> None:
    with pytest.raises(UsageError, match="write --label KEY=VALUE"):
        parse_pairs([text], what="--label")


@pytest.mark.parametrize("text", ["١٢", "1_0", "൧", "1\x00"])
def test_only_ascii_digits_are_numbers(text: str) -> None:
    for parse in (
        lambda: parse_integer(text, what="--n", low=0, high=99),
        lambda: parse_number(text, what="--n", high=99),
        lambda: parse_size(text, what="--n"),
        lambda: parse_duration(text, what="--n"),
    ):
        with pytest.raises(UsageError, match=r"^--n ") as caught:
            parse()
        assert caught.value.hint
