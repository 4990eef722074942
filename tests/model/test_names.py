"""Names, ids and addresses: what is allowed and what is said otherwise."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from genie.errors import NameInvalidError, UsageError
from genie.model.names import (
    checked_env_key,
    checked_label,
    checked_labels,
    checked_name,
    checked_node_id,
    node_id_from,
    parse_address,
)


@pytest.mark.parametrize("name", ["a", "train-1", "A.b_c", "x" * 63, "0"])
def test_plain_names_are_allowed(name: str) -> None:
    assert checked_name(name, what="job name") == name


@pytest.mark.parametrize(
    "name", ["", "-a", "a-", ".hidden", "a b", "a/b", "../up", "naïve", "a\n", "x" * 64, "a\0b"]
)
def test_odd_names_are_refused_with_the_rule(name: str) -> None:
    with pytest.raises(NameInvalidError, match=r"job name .* is not allowed") as caught:
        checked_name(name, what="job name")
    assert "letters, digits" in caught.value.hint
    assert caught.value.exit_code == 2


def test_a_long_name_is_not_repeated_in_full() -> None:
    with pytest.raises(NameInvalidError) as caught:
        checked_name("y" * 10_000, what="job name")
    assert len(str(caught.value)) < 400


def test_a_node_id_becomes_part_of_a_host_name() -> None:
    assert checked_node_id("gpu-box-2") == "gpu-box-2"
    for bad in ("Gpu", "a.b", "a_b", "-a", ""):
        with pytest.raises(NameInvalidError):
            checked_node_id(bad)


@given(text=st.text(max_size=100))
def test_any_host_name_has_a_nearest_node_id(text: str) -> None:
    checked_node_id(node_id_from(text))


def test_environment_keys_are_what_shells_allow() -> None:
    assert checked_env_key("PATH_2") == "PATH_2"
    for bad in ("2PATH", "A=B", "A B", "", "A" * 129):
        with pytest.raises(NameInvalidError):
            checked_env_key(bad)


@pytest.mark.parametrize("label", ["a", "site/zone", "-._/", "x" * 63])
def test_labels_and_racks_may_hold_slashes(label: str) -> None:
    assert checked_label(label, what="rack") == label
    assert checked_labels({label: label}) == {label: label}


@pytest.mark.parametrize("label", ["", "a b", "a=b", "a,b", "x" * 64, "a\n", "na\u00efve"])
def test_a_label_that_cannot_be_is_refused_by_name(label: str) -> None:
    for labels, named in (({label: "v"}, "the name of label"), ({"k": label}, "the value of label k")):
        with pytest.raises(NameInvalidError, match=named):
            checked_labels(labels)


def test_there_are_sixty_four_labels_at_most() -> None:
    assert len(checked_labels({f"k{number}": "v" for number in range(64)})) == 64
    with pytest.raises(UsageError, match="there are 65"):
        checked_labels({f"k{number}": "v" for number in range(65)})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("box", ("box", None)),
        ("box:5555", ("box", 5555)),
        ("10.0.0.1:1", ("10.0.0.1", 1)),
        ("[::1]:80", ("::1", 80)),
        ("[fe80::1%eth0]", ("fe80::1%eth0", None)),
        ("::1", ("::1", None)),
    ],
)
def test_addresses_are_read(text: str, expected: tuple[str, int | None]) -> None:
    assert parse_address(text) == expected


@pytest.mark.parametrize("text", ["", "a b", "http://box", "box:", "box:0", "box:70000", "[::1", "a:b"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="the address"):
        parse_address(text)
