"""docs/ENVIRONMENT_VARIABLES.md matches the settings, and only genie/config reads the environment."""

from __future__ import annotations

import ast
import re

from genie.config import environment_variables, list_settings
from tests.house.repository_files import PACKAGE, ROOT, parse_file, python_files, relative_path, text_files

PAGE = ROOT / "docs" / "ENVIRONMENT_VARIABLES.md"
_NAME = re.compile(r"GENIE_[A-Z0-9_]*[A-Z0-9]")
_READERS = {"environ", "environb", "getenv", "getenvb", "putenv"}

# Other files that may use os.environ, with the reason.
MAY_READ: dict[str, str] = {
    "genie/cli/commands/etcd.py": "sets the log level of gRPC, which has no other setting for it",
    "genie/grid/remote/health.py": "runs on nodes and finds their tools",
    "genie/grid/remote/environment.py": "runs on nodes and passes their environment to pip",
    "genie/grid/remote/ray_node.py": "runs on nodes and passes their environment to Ray",
    "genie/grid/remote/runs.py": "runs on nodes and passes the login environment to commands",
}


def read_variable_rows() -> dict[str, str]:
    """Variables that have a row in a table of the page, with that row."""
    rows = re.findall(r"^\|\s*`(GENIE_\w+)`\s*\|.*$", PAGE.read_text("utf-8"), re.MULTILINE)
    lines = PAGE.read_text("utf-8").splitlines()
    return {
        name: next(line for line in lines if line.startswith("|") and f"`{name}`" in line) for name in rows
    }


def test_page_lists_exactly_the_variables_that_are_read() -> None:
    assert set(read_variable_rows()) == set(environment_variables())


def test_page_shows_the_defaults() -> None:
    rows = read_variable_rows()
    wrong = [
        item.env for item in list_settings() if item.default and f"`{item.default}`" not in rows[item.env]
    ]
    assert wrong == []


def test_variables_in_pages_and_files_exist() -> None:
    known = set(environment_variables())
    wrong = {
        f"{relative_path(path)}: {name}"
        for path in text_files()
        if "tests" not in path.parts and path.name != "CHANGELOG.md"
        for name in _NAME.findall(path.read_text("utf-8"))
        if name not in known
    }
    assert wrong == set()


def test_only_config_reads_the_environment() -> None:
    readers = {
        relative_path(path)
        for path in python_files("genie")
        if path.parent != PACKAGE / "config"
        and any(_reads_environment(node) for node in ast.walk(parse_file(path)))
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
