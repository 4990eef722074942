"""The error hierarchy: its diagram, its codes, and serialization."""

from __future__ import annotations

import pickle
import re

import pytest

from genie import errors
from genie.errors import (
    GenieError,
    all_errors,
    error_from_code,
)

_ROW = re.compile(r"^(?P<indent>(?:│   |    )*)(?:[├└]── )?(?P<name>[A-Z]\w+)(?:\s{1,}(?P<words>\S.*))?$")


def parse_error_diagram() -> dict[str, str]:
    """Classes of the diagram with the name of their parent; '' for the root."""
    rows = (errors.__doc__ or "").split("\n\n")[1]
    path: list[str] = []
    parents: dict[str, str] = {}
    for line in rows.splitlines():
        row = _ROW.match(line)
        assert row, f"not a row of the diagram: {line!r}"
        depth = 0 if "── " not in line else len(row["indent"]) // 4 + 1
        assert depth == 0 or row["words"], f"{row['name']} has no description"
        del path[depth:]
        parents[row["name"]] = path[-1] if path else ""
        path.append(row["name"])
    return parents


def test_error_diagram_matches_the_classes() -> None:
    real = {cls.__name__: "" if cls is GenieError else cls.__bases__[0].__name__ for cls in all_errors()}
    assert parse_error_diagram() == real


def test_all_errors_are_in_one_module() -> None:
    assert {cls.__module__ for cls in all_errors()} == {"genie.errors"}


def test_error_codes_are_unique() -> None:
    codes = [cls.code for cls in all_errors()]
    assert len(codes) == len(set(codes))


@pytest.mark.parametrize("cls", [cls for cls in all_errors() if cls is not GenieError])
def test_code_extends_the_code_of_the_parent(cls: type[GenieError]) -> None:
    parent = cls.__bases__[0]
    prefix = "" if parent is GenieError else f"{parent.code}."
    assert cls.code.startswith(prefix)
    assert re.fullmatch(r"[a-z_]+", cls.code.removeprefix(prefix))


@pytest.mark.parametrize("cls", all_errors())
def test_error_is_restored_from_code_and_message(cls: type[GenieError]) -> None:
    sent = cls("could not do it", hint="try that")
    received = error_from_code(sent.code, sent.message, hint=sent.hint)
    assert (type(received), str(received)) == (cls, str(sent))
    assert (received.retryable, received.exit_code) == (sent.retryable, sent.exit_code)


@pytest.mark.parametrize("cls", all_errors())
def test_error_can_be_pickled(cls: type[GenieError]) -> None:
    copy = pickle.loads(pickle.dumps(cls("could not do it", hint="try that")))
    assert (type(copy), copy.message, copy.hint) == (cls, "could not do it", "try that")


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ("store.full.quota", "StoreFullError"),
        ("store.newer", "StoreError"),
        ("newer.kind", "GenieError"),
        ("", "GenieError"),
    ],
)
def test_unknown_code_maps_to_its_nearest_known_ancestor(code: str, name: str) -> None:
    assert type(error_from_code(code, "words")).__name__ == name


@pytest.mark.parametrize("cls", all_errors())
def test_exit_codes_are_the_documented_ones(cls: type[GenieError]) -> None:
    assert cls.exit_code in {1, 2, 75, 124, 255}


def test_retry_time_survives_serialization() -> None:
    sent = errors.OverloadedError("256 requests are running", retry_after_s=2.5)
    copied = pickle.loads(pickle.dumps(sent))
    received = error_from_code(sent.code, sent.message, hint=sent.hint, retry_after_s=sent.retry_after_s)
    for error in (copied, received):
        assert (type(error), error.retry_after_s) == (errors.OverloadedError, 2.5)
    assert str(sent) == "256 requests are running (try again in 2.5 s)"
