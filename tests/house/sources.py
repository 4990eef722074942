"""The files of this repository, as the house tests read them. Generated code is left out."""

from __future__ import annotations

import ast
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
    """Every .py file under these folders of the repository."""
    return [path for path in _walk(folders) if path.suffix == ".py"]


def native_files() -> list[Path]:
    """Every file of C++."""
    return [path for path in _walk(("native",)) if path.suffix in (".cpp", ".h")]


def text_files() -> list[Path]:
    """Everything that people wrote: code, pages, settings of tools."""
    top = [path for path in sorted(ROOT.iterdir()) if path.is_file() and not path.name.startswith(".cov")]
    return [path for path in [*top, *_walk(_FOLDERS)] if path.suffix in _TEXT]


def pages() -> list[Path]:
    """The pages that users read."""
    return [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


def shown(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"), filename=str(path))


def functions(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Every function with its dotted name inside the file, nested ones too."""
    yield from _functions(tree, "")


def _functions(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield prefix + child.name, child
        inner = f"{prefix}{child.name}." if isinstance(child, _NAMED) else prefix
        yield from _functions(child, inner)


_NAMED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def _walk(folders: tuple[str, ...]) -> Iterator[Path]:
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*")):
            generated = "_pb2" in path.name or "__pycache__" in path.parts
            if path.is_file() and not generated:
                yield path
