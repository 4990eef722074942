"""Validation of names, IDs and addresses."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from genie.errors import NameInvalidError, UsageError
from genie.model.names import (
    is_loopback,
    node_id_from,
    parse_address,
    validate_env_key,
    validate_name,
    validate_node_id,
)


@pytest.mark.parametrize("name", ["a", "train-1", "A.b_c", "x" * 63, "0"])
def test_plain_names_are_allowed(name: str) -> None:
    assert validate_name(name, what="job name") == name


@pytest.mark.parametrize(
    "name", ["", "-a", "a-", ".hidden", "a b", "a/b", "../up", "naïve", "a\n", "x" * 64, "a\0b"]
)
def test_error_for_an_invalid_name_states_the_rule(name: str) -> None:
    with pytest.raises(NameInvalidError, match=r"job name .* is not allowed") as caught:
        validate_name(name, what="job name")
    assert "letters, digits" in caught.value.hint
    assert caught.value.exit_code == 2


def test_long_name_is_shortened_in_the_error() -> None:
    with pytest.raises(NameInvalidError) as caught:
        validate_name("y" * 10_000, what="job name")
    assert len(str(caught.value)) < 400


def test_node_id_is_valid_in_a_host_name() -> None:
    assert validate_node_id("gpu-box-2") == "gpu-box-2"
    for bad in ("Gpu", "a.b", "a_b", "-a", ""):
        with pytest.raises(NameInvalidError):
            validate_node_id(bad)


@given(text=st.text(max_size=100))
def test_any_host_name_gives_a_valid_node_id(text: str) -> None:
    validate_node_id(node_id_from(text))


def test_environment_keys_follow_the_rule_of_shells() -> None:
    assert validate_env_key("PATH_2") == "PATH_2"
    for bad in ("2PATH", "A=B", "A B", "", "A" * 129):
        with pytest.raises(NameInvalidError):
            validate_env_key(bad)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("box", ("box", None)),
        ("box:5555", ("box", 5555)),
        ("10.0.0.1:1", ("10.0.0.1", 1)),
        ("[::1]:80", ("::1", 80)),
        ("[fe80::1%eth0]", ("fe80::1%eth0", None)),
        ("::1", ("::1", None)),
        ("genie.node.eu1.example.com", ("genie.node.eu1.example.com", None)),
    ],
)
def test_addresses_are_parsed(text: str, expected: tuple[str, int | None]) -> None:
    assert parse_address(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            "a b",
            "http://box",
            "box:",
            "box:0",
            "box:70000",
            "[::1",
            "a:b",
            "me@box",
            "box/path",
            "a" * 254,
        ),
        *("fe80::1%\x1b[31m", "fe80::1%eth0\n", "::1%\0", "[fe80::1%a b]"),
    ],
)
def test_invalid_address_is_rejected(text: str) -> None:
    with pytest.raises(UsageError, match="the address"):
        parse_address(text)


SECRET = "Ab0_-" * 8 + "xyz"


@pytest.mark.parametrize("form", ["{}", "{}:5555", "{}\n", "https://{}/", "me@{}", "{}" + "a" * 254])
@pytest.mark.parametrize(
    "token",
    [
        f"genie.user.abcd.{SECRET}.-",
        f"genie.owner.abcd.{SECRET}",
        f"GENIE.JOIN.ABCD.{SECRET.upper()}",
        f"genie.server-join.ab.{SECRET}.-",
    ],
)
def test_token_as_address_is_rejected_and_not_repeated(form: str, token: str) -> None:
    with pytest.raises(UsageError, match="master_addr: this is a token, not an address") as caught:
        parse_address(form.format(token), what="master_addr")
    assert SECRET[:8].lower() not in str(caught.value).lower()


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
        ("localhost.example.org", False),
        ("", False),
    ],
)
def test_is_loopback_accepts_only_loopback_addresses(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected
