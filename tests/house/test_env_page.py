"""docs/ENVIRONMENT_VARIABLES.md and the settings say the same, and only config.py reads the environment."""

from __future__ import annotations

import ast
import re

from genie.config import declared, environment_variables
from tests.house.sources import PACKAGE, ROOT, parsed, python_files, shown, text_files

PAGE = ROOT / "docs" / "ENVIRONMENT_VARIABLES.md"
_NAME = re.compile(r"GENIE_[A-Z0-9_]*[A-Z0-9]")
_READERS = {"environ", "environb", "getenv", "getenvb", "putenv"}

# Files besides config.py that may name os.environ, each with its reason.
MAY_READ: dict[str, str] = {
    "genie/grid/remote/health.py": "runs on nodes, and looks for their tools",
    "genie/grid/remote/environment.py": "runs on nodes, and hands their own environment on to pip",
    "genie/grid/remote/ray_node.py": "runs on nodes, and hands their own environment on to Ray",
    "genie/grid/remote/runs.py": "runs on nodes, where a command gets the environment of the login",
}


def page_rows() -> dict[str, str]:
    """Each variable that has a row of its own in a table of the page, with that row."""
    rows = re.findall(r"^\|\s*`(GENIE_\w+)`\s*\|.*$", PAGE.read_text("utf-8"), re.MULTILINE)
    lines = PAGE.read_text("utf-8").splitlines()
    return {
        name: next(line for line in lines if line.startswith("|") and f"`{name}`" in line) for name in rows
    }


def test_the_page_lists_exactly_the_variables_that_are_read() -> None:
    assert set(page_rows()) == set(environment_variables())


def test_the_page_shows_each_default() -> None:
    rows = page_rows()
    wrong = [item.env for item in declared() if item.default and f"`{item.default}`" not in rows[item.env]]
    assert wrong == []


def test_every_variable_that_any_page_or_file_names_exists() -> None:
    known = set(environment_variables())
    wrong = {
        f"{shown(path)}: {name}"
        for path in text_files()
        if "tests" not in path.parts and path.name != "CHANGELOG.md"
        for name in _NAME.findall(path.read_text("utf-8"))
        if name not in known
    }
    assert wrong == set()


def test_only_config_reads_the_environment() -> None:
    readers = {
        shown(path)
        for path in python_files("genie")
        if path != PACKAGE / "config.py" and any(_reads_environment(node) for node in ast.walk(parsed(path)))
    }
    assert readers - set(MAY_READ) == set()


def _reads_environment(node: ast.AST) -> bool:
    if isinstance(node, ast.Attribute):
        return node.attr in _READERS and isinstance(node.value, ast.Name) and node.value.id == "os"
    return (
        isinstance(node, ast.ImportFrom)
        and node.module == "os"
        and any(a.name in _READERS for a in node.names)
    )
