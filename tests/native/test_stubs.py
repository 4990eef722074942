"""The .pyi files of the compiled modules declare what the modules contain."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

from genie.native import libraries
from tests.needs import native_library

FOLDER = Path(libraries.__file__).parent
STUBS = sorted(path.stem for path in FOLDER.glob("*.pyi"))


def declared_names(body: list[ast.stmt]) -> set[str]:
    """Public names; special methods are inherited or bound by pybind11 in its own way."""
    names = set()
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
    return {name for name in names if not name.startswith("_")}


def public_names(owner: object) -> set[str]:
    return {name for name in vars(owner) if not name.startswith("_")}


def test_every_compiled_module_has_a_stub() -> None:
    modules = set(libraries.LIBRARIES) - set(libraries.STANDALONE_LIBRARIES)
    assert set(STUBS) == modules


@pytest.mark.parametrize("name", STUBS)
def test_stub_declares_the_names_of_the_module(name: libraries.LibraryName) -> None:
    module = native_library(name)
    stub = ast.parse((FOLDER / f"{name}.pyi").read_text("utf-8")).body
    assert declared_names(stub) == public_names(module)
    for node in stub:
        if isinstance(node, ast.ClassDef):
            declared = declared_names(node.body)
            assert declared == public_names(getattr(module, node.name)), node.name


@pytest.mark.parametrize("name", libraries.TORCH_LIBRARIES)
def test_lazy_module_returns_the_attributes_of_the_library(name: libraries.LibraryName) -> None:
    lazy = importlib.import_module(f"genie.native.{name}")
    assert lazy.Stream is native_library(name).Stream
    assert not hasattr(lazy, "no_such_name")
    assert not hasattr(lazy, "__no_such_name__")
