"""Every `pip install` hint in a message or on a page names an existing distribution and extra."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator

import pytest

from tests.house.repository_files import ROOT, list_pages, python_files, relative_path

_HINT = re.compile(
    r"pip install ((?:-\S+ )*)(?P<quote>['\"]?)(?P<name>[A-Za-z][\w.-]*)(?:\[(?P<extras>[\w,-]+)\])?"
)
_NAME = re.compile(r"[\w.-]+")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]


def known_distributions() -> set[str]:
    wanted = [*PROJECT["dependencies"], *(each for extra in EXTRAS.values() for each in extra)]
    return {match[0] for each in wanted if (match := _NAME.match(each))} | {PROJECT["name"]}


def find_wrong_hints(text: str) -> Iterator[str]:
    """Hints with a distribution that Genie does not use or an extra that does not exist."""
    for match in _HINT.finditer(text):
        extras = set((match["extras"] or "").split(",")) - {""}
        is_ours = match["name"] == PROJECT["name"]
        if match["name"] not in known_distributions() or (is_ours and not extras <= set(EXTRAS)):
            yield match[0]


def test_pip_install_hints_name_known_packages() -> None:
    files = [*python_files("genie", "examples", "benchmarks"), *list_pages()]
    texts = {relative_path(path): path.read_text("utf-8") for path in files}
    assert sum("pip install" in text for text in texts.values()) > 3
    assert {name: found for name, text in texts.items() if (found := list(find_wrong_hints(text)))} == {}


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("pip install 'genie-gpu[ray]'", []),
        ("pip install nanobind", []),
        ("pip install --upgrade 'torch>=2.11'", []),
        ("pip install 'genie[ray]'", ["pip install 'genie[ray]"]),
        ("pip install 'genie-gpu[rays]'", ["pip install 'genie-gpu[rays]"]),
    ],
)
def test_unknown_package_in_a_hint_is_detected(text: str, wrong: list[str]) -> None:
    assert list(find_wrong_hints(text)) == wrong
