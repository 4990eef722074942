"""Objects are wired in constructors, and private names are used in their own module only.

Exceptions are listed here with their reason. An entry that is no longer needed fails, too.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.house.repository_files import parse_file, python_files, relative_path

# "file: target": the reason.
ASSIGNED_FROM_OUTSIDE: dict[str, str] = {
    "genie/agent/shim.py: self._job_process.returncode": "Popen: the shim has reaped the process itself",
    "genie/cluster/lifecycle/heartbeats.py: self._state.node": "ClusterState is documented as mutable",
    "genie/cluster/lifecycle/heartbeats.py: self._state.nodes": "ClusterState is documented as mutable",
    "genie/device/import_hook.py: self._search_in_progress.now": "threading.local",
}
# Names that other libraries define, too.
OF_LIBRARIES: dict[str, str] = {"_exit": "os", "_parameters": "torch.nn.Module"}


def find_assignments_from_outside(tree: ast.Module) -> set[str]:
    """Targets `self.part.attribute`: a part is changed by its owner instead of by a method of its class.

    Parts whose class is in the same file are allowed.
    """
    own = _find_attributes_of_own_classes(tree)
    found = set()
    for node in ast.walk(tree):
        for target in _list_assignment_targets(node):
            match target:
                case ast.Attribute(value=ast.Attribute(value=ast.Name(id="self"), attr=part)):
                    if part not in own:
                        found.add(ast.unparse(target))
    return found


def _find_attributes_of_own_classes(tree: ast.Module) -> set[str]:
    """Attributes that are created from a class of the same file, or are annotated with one."""
    classes = {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    parts = set()
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=[ast.Attribute(attr=part)], value=ast.Call(func=ast.Name(id=name))):
                parts |= {part} if name in classes else set()
            case ast.FunctionDef(name="__init__", args=ast.arguments() as arguments):
                of_own_class = {
                    each.arg
                    for each in (*arguments.args, *arguments.kwonlyargs)
                    if each.annotation is not None and ast.unparse(each.annotation) in classes
                }
                parts |= _find_attributes_set_to(node, of_own_class)
    return parts


def _find_attributes_set_to(function: ast.FunctionDef, names: set[str]) -> set[str]:
    return {
        target.attr
        for node in ast.walk(function)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name) and node.value.id in names
        for target in node.targets
        if isinstance(target, ast.Attribute)
    }


def _list_assignment_targets(node: ast.AST) -> Iterator[ast.expr]:
    match node:
        case ast.Assign(targets=targets):
            for target in targets:
                yield from target.elts if isinstance(target, ast.Tuple) else [target]
        case ast.AugAssign(target=target) | ast.AnnAssign(target=target):
            yield target


def find_private_definitions(tree: ast.Module) -> set[str]:
    """Private names that a file defines: functions, classes, variables and attributes."""
    names = set()
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                names.add(name)
    return {name for name in names if _is_private(name)}


def find_foreign_private_names(tree: ast.Module, defined_elsewhere: set[str]) -> set[str]:
    """Private names of other files that a file uses: attributes of objects other than self, and imports."""
    own, found = find_private_definitions(tree), set()
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="self" | "cls")):
                continue
            case ast.Attribute(attr=name):
                names = {name}
            case ast.ImportFrom(module=str(module)) if module.startswith("genie"):
                names = {alias.name for alias in node.names}
            case _:
                continue
        found |= {name for name in names if _is_private(name) and name not in own}
    return found & defined_elsewhere


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def test_attributes_are_assigned_only_by_their_own_object() -> None:
    found = {
        f"{relative_path(path)}: {target}"
        for path in python_files("genie")
        for target in find_assignments_from_outside(parse_file(path))
    }
    assert found == ASSIGNED_FROM_OUTSIDE.keys()


def test_private_names_are_used_only_in_their_own_module() -> None:
    files = python_files("genie")
    defined: dict[Path, set[str]] = {path: find_private_definitions(parse_file(path)) for path in files}
    anywhere = set().union(*defined.values()) - OF_LIBRARIES.keys()
    found = {relative_path(path): find_foreign_private_names(parse_file(path), anywhere) for path in files}
    assert {path: names for path, names in found.items() if names} == {}


# --- tests of the rules -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("class A:\n  def f(self):\n    self.b.c = 1", {"self.b.c"}),
        ("class A:\n  def f(self):\n    self.b.c, x = 1, 2", {"self.b.c"}),
        ("class A:\n  def f(self):\n    self.b.c += 1", {"self.b.c"}),
        ("class A:\n  def f(self):\n    self.b = 1\n    row.c = 1", set()),
        ("class B: ...\nclass A:\n  def f(self):\n    self.b = B()\n    self.b.c = 1", set()),
        ("class B: ...\nclass A:\n  def __init__(self, b: B):\n    self.b = b\n    self.b.c = 1", set()),
    ],
)
def test_assignment_from_outside_is_detected(code: str, found: set[str]) -> None:
    assert find_assignments_from_outside(ast.parse(code)) == found


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("other._x()", {"_x"}),
        ("from genie.a import _x", {"_x"}),
        ("self._x()", set()),
        ("torch._C", set()),
        ("def _x(): ...\nother._x()", set()),
    ],
)
def test_foreign_private_name_is_detected(code: str, found: set[str]) -> None:
    assert find_foreign_private_names(ast.parse(code), {"_x"}) == found
