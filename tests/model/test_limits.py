"""The limits on job fields: checks of plain values."""

from __future__ import annotations

import math

import pytest

from genie.errors import UsageError
from genie.model import limits
from genie.model.names import validate_name, validate_node_id


@pytest.mark.parametrize("value", [0.5, math.nan, math.inf])
def test_number_outside_its_range_is_rejected(value: float) -> None:
    limits.check_number(1.0, "cpus", 1.0, 2.0)
    with pytest.raises(UsageError, match=r"cpus = .* is not allowed") as caught:
        limits.check_number(value, "cpus", 1.0, 2.0)
    assert caught.value.hint == "allowed: 1 to 2"


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ((), "is empty"),
        (("",), "is empty"),
        (("x",) * (limits.COMMAND_ARGUMENTS_MAX + 1), "arguments; the maximum is"),
        (("x" * (limits.TEXT_BYTES_MAX + 1),), "bytes; the maximum is"),
        (("a\0b",), "NUL"),
        (("\udcff",), "UTF-8"),
    ],
)
def test_invalid_command_is_rejected(command: tuple[str, ...], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        limits.check_command(command)


def test_longest_names_have_the_maximum_length() -> None:
    longest = "x" * limits.NAME_CHARS_MAX
    assert validate_name(longest, what="job name") == validate_node_id(longest) == longest
    for check in (lambda name: validate_name(name, what="job name"), validate_node_id):
        with pytest.raises(UsageError):
            check(longest + "x")
