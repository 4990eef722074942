"""Rules for the options of all commands."""

from __future__ import annotations

from tests.house.reader_sample import walk_commands
from tests.house.test_docs import list_commands_by_name

_NUMERIC_TYPES = ("IntParamType", "FloatParamType", "IntRange", "FloatRange")


def test_numbers_are_parsed_by_quantities_py() -> None:
    """The option parser accepts underscores and the digits of other scripts, and names no range."""
    for name, command in walk_commands(list_commands_by_name()):
        for parameter in command.params:
            is_number = type(parameter.type).__name__ in _NUMERIC_TYPES
            assert not is_number or parameter.count, f"{name} {parameter.opts}"
