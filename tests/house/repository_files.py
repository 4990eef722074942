"""The files of this repository for the tests of conventions, without generated code."""

from __future__ import annotations

import ast
import gc
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "genie"

_FOLDERS = ("genie", "tests", "benchmarks", "examples", "docs", "requirements", ".ci", "native")
_TEXT = {
    "",
    ".c",
    ".cpp",
    ".h",
    ".hpp",
    ".in",
    ".md",
    ".proto",
    ".py",
    ".pyi",
    ".svg",
    ".toml",
    ".txt",
    ".yaml",
    ".yml",
}


def python_files(*folders: str) -> list[Path]:
    """All .py files in these folders of the repository."""
    return [path for path in _walk_folders(folders) if path.suffix == ".py"]


def native_files() -> list[Path]:
    """All C++ files."""
    return [path for path in _walk_folders(("native",)) if path.suffix in (".cpp", ".h")]


def text_files() -> list[Path]:
    """All handwritten text files: code, pages, tool configuration."""
    # In a git worktree, .git is a file with a path of the machine.
    ours = [path for path in sorted(ROOT.iterdir()) if path.is_file() and path.name != ".git"]
    top = [path for path in ours if not path.name.startswith(".cov")]
    return [path for path in [*top, *_walk_folders(_FOLDERS)] if path.suffix in _TEXT]


def list_pages() -> list[Path]:
    """The Markdown pages in the root and in docs/."""
    return [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


def relative_path(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def read_table(text: str, heading: str) -> list[list[str]]:
    """Rows of the only table with this first column heading, each a list of cells."""
    found = re.findall(
        rf"^\| {re.escape(heading)} \|.*\n\|[-| ]+\|\n((?:\|.*\n)+)", text + "\n", re.MULTILINE
    )
    assert len(found) == 1, f"found {len(found)} tables with the heading {heading!r}, expected 1"
    return [_split_row(line) for line in found[0].splitlines()]


def _split_row(line: str) -> list[str]:
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


@cache
def parse_file(path: Path) -> ast.Module:
    text = path.read_text("utf-8")
    is_enabled = gc.isenabled()
    gc.disable()  # collecting garbage among millions of nodes takes longer than parsing
    try:
        return ast.parse(text, filename=str(path))
    finally:
        if is_enabled:
            gc.enable()


def list_functions(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """All functions, including nested ones, with their qualified names."""
    yield from _list_functions_below(tree, "")


def _list_functions_below(
    node: ast.AST, prefix: str
) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, _STATEMENTS):
            continue  # expressions contain no function definitions
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield prefix + child.name, child
        inner = f"{prefix}{child.name}." if isinstance(child, _NAMED) else prefix
        yield from _list_functions_below(child, inner)


_STATEMENTS = (ast.stmt, ast.ExceptHandler, ast.match_case)
_NAMED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def _walk_folders(folders: tuple[str, ...]) -> Iterator[Path]:
    for folder in folders:
        yield from _list_files_in(folder)


@cache
def _list_files_in(folder: str) -> list[Path]:
    found = sorted((ROOT / folder).rglob("*"))
    return [p for p in found if "_pb2" not in p.name and "__pycache__" not in p.parts and p.is_file()]
