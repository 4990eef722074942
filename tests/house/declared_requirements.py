"""Finds the test files that require root or an optional program.

Reads the sources: a test has the requirements that its fixtures, and the functions and classes of tests/ that
it uses, declare with `require_...` of tests/needs.py. `python -m tests.house.declared_requirements` prints
the files that .ci/bare.py runs: those files, and the fastest other file of each folder; with `--long`, only
those in which every test is long.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import CodeType
from typing import NamedTuple

from tests.durations import read_durations
from tests.house.repository_files import ROOT, list_functions, parse_file, python_files, relative_path

# Debian packages that `make test` itself requires.
_BASE_PACKAGES = {"bash", "coreutils", "dash", "g++", "gcc", "make"}
_ALWAYS = {"require_root", "require_namespaces", "require_cgroup"}
_ALL_LONG = re.compile(r"^pytestmark = pytest\.mark\.long\(", re.MULTILINE)
_IMPORT = re.compile(r"^ *from (tests[\w.]*) import (\([^)]*\)|.*)$", re.MULTILINE)


class TopLevelDefinition(NamedTuple):
    """A module-level function or class."""

    path: Path
    name: str


def list_files_with_requirements() -> list[Path]:
    """Test files that require root or an optional program."""
    requiring = {unit.path for unit in _find_definitions_with_requirements()}
    return [path for path in _list_test_files() if path in requiring]


def files_for_bare_run() -> list[Path]:
    """The files with requirements, and the fastest other file of each folder."""
    requiring = list_files_with_requirements()
    others = [
        path for path in _list_test_files() if path not in requiring and "mark.long" not in path.read_text()
    ]
    seconds = read_durations()
    fastest: dict[Path, Path] = {}
    for path in sorted(others, key=lambda path: (seconds.get(relative_path(path), 0), path.stat().st_size)):
        fastest.setdefault(path.parent, path)
    return sorted({*requiring, *fastest.values()})


def long_files_for_bare_run() -> list[Path]:
    """The files with requirements in which every test is long."""
    return [path for path in list_files_with_requirements() if _ALL_LONG.search(path.read_text("utf-8"))]


def _list_test_files() -> list[Path]:
    return [path for path in python_files("tests") if path.name.startswith("test_")]


@cache
def _find_definitions_with_requirements() -> frozenset[TopLevelDefinition]:
    """Definitions that declare a requirement, and those that use them, transitively."""
    files = python_files("tests")
    users: dict[TopLevelDefinition, list[TopLevelDefinition]] = {}
    for path in files:
        imported = _list_imported_definitions(path)
        folders = [folder for folder in path.parents if folder.is_relative_to(ROOT / "tests")]
        for name, used in _list_definitions(path):
            for each in used:
                fixtures = [_find_fixture(folder / "conftest.py", each) for folder in folders]
                for unit in (imported.get(each, TopLevelDefinition(path, each)), *fixtures):
                    users.setdefault(unit, []).append(TopLevelDefinition(path, name))
    todo = [
        TopLevelDefinition(path, name)
        for path in files
        for name in _list_definitions_declaring_requirements(path)
    ]
    requiring: set[TopLevelDefinition] = set()
    while todo:
        unit = todo.pop()
        if unit not in requiring:
            requiring.add(unit)
            todo += users.get(unit, ())
    return frozenset(requiring)


def _find_fixture(conftest: Path, name: str) -> TopLevelDefinition:
    """The fixture of this name, which the file may import from another one."""
    return (_list_imported_definitions(conftest) if conftest.is_file() else {}).get(
        name, TopLevelDefinition(conftest, name)
    )


def _list_definitions(path: Path) -> Iterator[tuple[str, set[str]]]:
    """Definitions with the names that they use. Uses compiled code: walking syntax trees takes seconds."""
    for constant in compile(path.read_text("utf-8"), str(path), "exec").co_consts:
        if isinstance(constant, CodeType):
            yield constant.co_name, _list_used_names(constant)


def _list_used_names(code: CodeType) -> set[str]:
    """Globals, attributes and parameters (possible fixtures), including those of nested functions."""
    found = {*code.co_names, *code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]}
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            found |= _list_used_names(constant)
    return found


@cache
def _list_imported_definitions(path: Path) -> dict[str, TopLevelDefinition]:
    """Names that the file imports from tests/, with their definitions; of a module, all definitions."""
    found: dict[str, TopLevelDefinition] = {}
    for module, names in _IMPORT.findall(path.read_text("utf-8")):
        folder = ROOT.joinpath(*module.split("."))
        for name in re.findall(r"\w+", names):
            inner = (folder / name).with_suffix(".py")
            if inner.is_file():
                found |= {unit: TopLevelDefinition(inner, unit) for unit, _ in _list_definitions(inner)}
            else:
                found[name] = TopLevelDefinition(folder.with_suffix(".py"), name)
    return found


def _list_definitions_declaring_requirements(path: Path) -> Iterator[str]:
    if "require_" in path.read_text("utf-8") and path != ROOT / "tests" / "needs.py":
        for name, function in list_functions(parse_file(path)):
            if any(isinstance(node, ast.Call) and _is_requirement(node) for node in ast.walk(function)):
                yield name.partition(".")[0]


def _is_requirement(call: ast.Call) -> bool:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if name in _ALWAYS:
        return True
    packages = [keyword.value for keyword in call.keywords if keyword.arg == "package"]
    plain = any(isinstance(value, ast.Constant) and value.value in _BASE_PACKAGES for value in packages)
    return name == "require_program" and not plain


if __name__ == "__main__":
    files = long_files_for_bare_run() if sys.argv[1:] == ["--long"] else files_for_bare_run()
    print(*map(relative_path, files), sep="\n")
