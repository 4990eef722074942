"""The error tree: what is drawn is what exists, and codes are stable names that travel."""

from __future__ import annotations

import pickle
import re

import pytest

from genie import errors
from genie.errors import GenieError, all_errors, from_code

_ROW = re.compile(r"^(?P<indent>(?:│   |    )*)(?:[├└]── )?(?P<name>[A-Z]\w+)(?:\s{1,}(?P<words>\S.*))?$")


def drawn() -> dict[str, str]:
    """Each class of the picture with its parent's name; the root's parent is ''."""
    picture = (errors.__doc__ or "").split("\n\n")[1]
    path: list[str] = []
    parents: dict[str, str] = {}
    for line in picture.splitlines():
        row = _ROW.match(line)
        assert row, f"not a row of the tree: {line!r}"
        depth = 0 if "── " not in line else len(row["indent"]) // 4 + 1
        assert depth == 0 or row["words"], f"{row['name']} has no words beside it"
        del path[depth:]
        parents[row["name"]] = path[-1] if path else ""
        path.append(row["name"])
    return parents


def test_the_drawn_tree_is_the_tree() -> None:
    real = {cls.__name__: "" if cls is GenieError else cls.__bases__[0].__name__ for cls in all_errors()}
    assert drawn() == real


def test_every_error_lives_in_one_file() -> None:
    assert {cls.__module__ for cls in all_errors()} == {"genie.errors"}


def test_codes_are_unique() -> None:
    codes = [cls.code for cls in all_errors()]
    assert len(codes) == len(set(codes))


@pytest.mark.parametrize("cls", [cls for cls in all_errors() if cls is not GenieError])
def test_a_code_is_one_word_below_its_parents(cls: type[GenieError]) -> None:
    parent = cls.__bases__[0]
    prefix = "" if parent is GenieError else f"{parent.code}."
    assert cls.code.startswith(prefix)
    assert re.fullmatch(r"[a-z_]+", cls.code.removeprefix(prefix))


@pytest.mark.parametrize("cls", all_errors())
def test_an_error_survives_travelling_as_code_and_text(cls: type[GenieError]) -> None:
    sent = cls("could not do it", hint="try that")
    received = from_code(sent.code, sent.message, hint=sent.hint)
    assert (type(received), str(received)) == (cls, str(sent))
    assert (received.retryable, received.exit_code) == (sent.retryable, sent.exit_code)


@pytest.mark.parametrize("cls", all_errors())
def test_an_error_survives_the_process_pools_of_user_code(cls: type[GenieError]) -> None:
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
def test_a_code_of_a_newer_version_becomes_its_nearest_known_ancestor(code: str, name: str) -> None:
    assert type(from_code(code, "words")).__name__ == name


@pytest.mark.parametrize("cls", all_errors())
def test_exit_codes_are_the_documented_ones(cls: type[GenieError]) -> None:
    assert cls.exit_code in {1, 2, 255}
