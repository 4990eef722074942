"""The locked requirements: those of `make run`, and the same versions and tools for `make test`."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.house.repository_files import ROOT, parse_file, python_files

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
EXTRAS: dict[str, list[str]] = PROJECT["project"]["optional-dependencies"]
OPTIONAL = ("etcd", "gossip", "ray", "torch")
"""Extras that genie imports if they are installed; torch has a separate file."""


@dataclass
class LockedPackage:
    version: str
    extras: set[str]
    hashes: set[str] = field(default_factory=set)


def read_locked_packages(name: str) -> dict[str, LockedPackage]:
    """The packages of a locked file, by canonical name."""
    found: dict[str, LockedPackage] = {}
    last = LockedPackage("", set())
    for line in (ROOT / "requirements" / f"{name}.txt").read_text("utf-8").splitlines():
        if match := re.match(r"([A-Za-z0-9._-]+)(?:\[([^]]*)\])?==(\S+)", line):
            extras = set(match[2].split(",")) if match[2] else set()
            last = found[canonicalize_name(match[1])] = LockedPackage(match[3], extras)
        elif match := re.match(r"    --hash=(sha256:[0-9a-f]{64})", line):
            last.hashes.add(match[1])
        else:
            assert line.lstrip().startswith("#"), f"{name}.txt: {line!r} is not a locked requirement"
    return found


def read_requirement_lines(name: str) -> list[str]:
    lines = (ROOT / "requirements" / f"{name}.in").read_text("utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def parse_package_names(requirements: list[str]) -> set[str]:
    return {canonicalize_name(Requirement(text).name) for text in requirements}


@pytest.mark.parametrize("name", ["run", "dev"])
def test_every_locked_package_has_a_hash(name: str) -> None:
    packages = read_locked_packages(name)
    assert packages
    assert [package for package, entry in packages.items() if not entry.hashes] == []


@pytest.mark.parametrize("name", ["run", "dev"])
def test_required_extras_are_locked(name: str) -> None:
    """pip before 23.3 resolves `name[extra]` independently of a locked `name` and finds newer releases."""
    packages = read_locked_packages(name)
    required = [
        Requirement(text)
        for package in packages
        if _is_installed(package)
        for text in importlib.metadata.requires(package) or ()
    ]
    missing = {
        str(requirement)
        for requirement in required
        if (marker := requirement.marker) is None or marker.evaluate({"extra": ""})
        if (entry := packages.get(canonicalize_name(requirement.name))) is not None
        if requirement.extras - entry.extras
    }
    assert missing == set()


def _is_installed(package: str) -> bool:
    return next(iter(importlib.metadata.distributions(name=package)), None) is not None


def test_dev_set_contains_the_run_set_in_the_same_versions() -> None:
    run, dev = read_locked_packages("run"), read_locked_packages("dev")
    assert {name: dev.get(name) for name in run} == run


def test_tools_and_ray_are_only_in_the_dev_set() -> None:
    tools = parse_package_names(
        [*EXTRAS["dev"], *EXTRAS["ray"], *EXTRAS["etcd"], *EXTRAS["gossip"], *read_requirement_lines("dev")]
    )
    assert {"pytest", "ruff", "mypy", "ray"} <= tools
    assert tools & read_locked_packages("run").keys() == set()
    assert tools - read_locked_packages("dev").keys() == set()


def test_run_set_contains_all_dependencies() -> None:
    """This folder is installed with --no-deps and --no-build-isolation, PyTorch from an unlocked file."""
    direct = [
        *PROJECT["project"]["dependencies"],
        *PROJECT["build-system"]["requires"],
        *read_requirement_lines("run"),
    ]
    of_torch = [text for text in importlib.metadata.requires("torch") or () if "extra ==" not in text]
    assert (parse_package_names(direct) | parse_package_names(of_torch)) - read_locked_packages(
        "run"
    ).keys() == set()


def test_run_set_contains_every_imported_package() -> None:
    optional = parse_package_names([text for extra in OPTIONAL for text in EXTRAS[extra]])
    provided_by = importlib.metadata.packages_distributions()
    allowed = read_locked_packages("run").keys() | optional
    missing = {
        module: provided_by.get(module)
        for module in imported_modules()
        if not {canonicalize_name(name) for name in provided_by.get(module, ())} & allowed
    }
    assert missing == {}


def imported_modules() -> set[str]:
    """Top-level modules of other packages that genie or the tour imports."""
    files = [*python_files("genie"), ROOT / "examples" / "tour.py"]
    found = {name.partition(".")[0] for path in files for name in _list_imports(parse_file(path))}
    return found - sys.stdlib_module_names - {"genie"}


def _list_imports(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module
