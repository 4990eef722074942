"""Imports follow the layer list, and every package is in it."""

from __future__ import annotations

import ast
import graphlib
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.house.repository_files import PACKAGE, ROOT, parse_file, python_files, read_table

# The layer list, top first; the same as in pyproject.toml. A change needs a page in docs/decisions.
LAYERS = (
    {"cli"},
    {"tui", "gateway", "grid", "sim"},
    {"serving"},
    {"cluster"},
    {"supervisor"},
    {"controller", "agent", "executor", "device"},
    {"native"},
    {"runtime", "hardware", "telemetry"},
    {"processes"},
    {"scheduler", "memory", "tenancy"},
    {"model"},
    {"config"},
    {"errors", "version"},
)
PURE = {"model", "scheduler", "memory", "tenancy"}


def read_import_contracts() -> dict[str, dict[str, list[str]]]:
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["importlinter"]
    return {contract["type"]: contract for contract in tool["contracts"]}


def list_top_level_names() -> set[str]:
    found = {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    return found | {path.stem for path in PACKAGE.glob("*.py") if not path.stem.startswith("__")}


def test_import_linter_finds_no_violation() -> None:
    # In a separate process: the linter reconfigures logging.
    run_linter = "import sys; from importlinter.cli import lint_imports_command; lint_imports_command()"
    done = subprocess.run(
        [sys.executable, "-c", run_linter, "--no-cache", "--no-logo"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_import_linter_has_the_same_layers() -> None:
    actual = [
        {name.strip(" ()") for name in layer.split("|")}
        for layer in read_import_contracts()["layers"]["layers"]
    ]
    assert actual == list(LAYERS)


def test_every_package_has_a_layer() -> None:
    assert list_top_level_names() - set().union(*LAYERS) == set()


def test_existing_packages_are_not_optional_in_the_linter() -> None:
    optional = {
        name.strip(" ()")
        for layer in read_import_contracts()["layers"]["layers"]
        for name in layer.split("|")
        if "(" in name
    }
    assert optional & list_top_level_names() == set(), "remove their parentheses in pyproject.toml"


def test_import_linter_lists_every_pure_package() -> None:
    actual = {name.removeprefix("genie.") for name in read_import_contracts()["forbidden"]["source_modules"]}
    assert actual == PURE & list_top_level_names(), "list them in pyproject.toml"


# --- import cycles ----------------------------------------------------------------------------


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def find_imported_names(tree: ast.Module) -> set[str]:
    """Everything that a file imports anywhere: at the top, in functions and for type checkers."""
    names: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Import():
                names.update(alias.name for alias in node.names)
            case ast.ImportFrom(module=str(module)):
                names.update(f"{module}.{alias.name}" for alias in node.names)
    return names


def make_import_graph(trees: dict[str, ast.Module]) -> dict[str, set[str]]:
    """The modules that each module imports. `from package import name` imports the package unless `name` is
    one of its modules."""
    graph: dict[str, set[str]] = {}
    for module, tree in trees.items():
        found = {name if name in trees else name.rpartition(".")[0] for name in find_imported_names(tree)}
        graph[module] = found & trees.keys()
    return graph


def test_no_import_cycle_between_files() -> None:
    graph = make_import_graph({module_name(path): parse_file(path) for path in python_files("genie")})
    assert len(graph) > 200
    graphlib.TopologicalSorter(graph).prepare()  # CycleError names the files


@pytest.mark.parametrize(
    ("package", "module", "is_cycle"),
    [
        ("", "from pkg import name", False),
        ("from pkg.mod import name", "import os", False),
        ("from pkg.mod import name", "from pkg import other", True),
        ("def f():\n  import pkg.mod", "import pkg", True),
        ("if TYPE_CHECKING:\n  from pkg import mod", "def f():\n  from pkg import name", True),
    ],
)
def test_import_cycle_is_detected(package: str, module: str, is_cycle: bool) -> None:
    graph = make_import_graph({"pkg": ast.parse(package), "pkg.mod": ast.parse(module)})
    if not is_cycle:
        graphlib.TopologicalSorter(graph).prepare()
        return
    with pytest.raises(graphlib.CycleError):
        graphlib.TopologicalSorter(graph).prepare()


# --- pages that list the packages -------------------------------------------------------------


def existing_layers() -> list[set[str]]:
    return [here for layer in LAYERS if (here := layer & list_top_level_names())]


def parse_layers(rows: list[str]) -> list[set[str]]:
    return [{name.strip() for name in row.split("|")} for row in rows]


def test_architecture_page_has_the_layers() -> None:
    text = (ROOT / "docs" / "ARCHITECTURE.md").read_text("utf-8")
    (block,) = re.findall(r"^## Layers\n.*?^```\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert parse_layers(block.splitlines()) == existing_layers()


def test_contributing_page_has_the_layers() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    (sentence,) = re.findall(r"\*\*Layers\.\*\* Imports point down: (.*?)\. Siblings", text, re.DOTALL)
    assert parse_layers(re.findall(r"`([^`]+)`", sentence)) == existing_layers()


def test_readme_has_a_row_for_every_package() -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    (table,) = re.findall(r"^\| folder \|.*\n((?:\|.*\n)+)", text, re.MULTILINE)
    first_cells = " ".join(row.split("|")[1] for row in table.splitlines())
    assert set(re.findall(r"`genie/(\w+)(?:/|\.py)`", first_cells)) == list_top_level_names()


def test_architecture_page_has_a_row_for_every_package() -> None:
    text = (ROOT / "docs" / "ARCHITECTURE.md").read_text("utf-8")
    rows = [row[0].strip("`") for row in read_table(text, "package")]
    folders = {
        f"{path.parent.relative_to(ROOT).as_posix()}/"
        for path in PACKAGE.rglob("__init__.py")
        if path.parent != PACKAGE and not path.parent.name.endswith("_proto")
    }
    modules = {f"genie/{path.name}" for path in PACKAGE.glob("*.py") if not path.stem.startswith("__")}
    assert sorted(rows) == sorted(folders | modules)
