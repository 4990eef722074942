"""Draws texts and names for a reader test: can they be understood without the code behind them?

    python -m tests.house.reader_sample SEED COUNT

prints a numbered list of help lines, column headers, errors, log lines, identifiers with their signatures,
files and tests. CONTRIBUTING.md has the rule by which the explanations of a reader are judged.
"""

from __future__ import annotations

import argparse
import ast
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.house.repository_files import native_files, parse_file, python_files, relative_path
from tests.house.test_docs import list_commands_by_name

_LOG_LEVELS = ("debug", "info", "warning", "error", "exception", "critical")
_CPP_DEFINITION = re.compile(
    r"^[ \t]*((?:(?:class|struct|enum class|enum)\s+(?P<type>[A-Z]\w*)[^;{}()]*\{)"
    r"|(?:[\w:<>,*&\[\] ]*[\w>*&] )?(?P<function>~?[A-Za-z_][\w:]*)\([^;{}]*\)[^;{}()]*[;{])",
    re.MULTILINE,
)
_CPP_STATEMENTS = ("return ", "else ", "throw ", "new ", "delete ", "co_return ", "case ", "using ", "#")
_CPP_KEYWORDS = frozenset(
    ("if", "for", "while", "switch", "return", "catch", "sizeof", "defined", "static_assert")
)
_TEXT_CHARS_MAX = 300


def list_help_lines() -> Iterator[str]:
    seen = set[str]()
    for name, command in walk_commands(list_commands_by_name()):
        yield f"command '{name}': {next(iter((command.help or '').splitlines()), '')}"
        for parameter in command.params:
            text = getattr(parameter, "help", None)
            if text and text not in seen:  # shared options have one text
                seen.add(text)
                yield f"'{name}', {'/'.join(parameter.opts)}: {text}"


def walk_commands(commands: dict[str, Any], group: str = "genie") -> Iterator[tuple[str, Any]]:
    """All commands and subcommands with their full names. Any: Typer has no public type for a command."""
    for name, command in commands.items():
        yield f"{group} {name}", command
        yield from walk_commands(getattr(command, "commands", {}), f"{group} {name}")


def list_column_headers() -> Iterator[str]:
    for path in python_files("genie/cli", "genie/sim"):
        for node in parse_file(path).body:
            target = _assigned_name(node)
            value = getattr(node, "value", None)
            if target and re.search(r"_COLUMNS$", target) and isinstance(value, ast.Tuple):
                for item in value.elts:
                    if isinstance(item, ast.Constant) and isinstance(item.value, str):
                        yield f"{_module_name(path)}, table {target.strip('_')}: {item.value.upper()}"


def list_errors() -> Iterator[str]:
    for path in python_files("genie"):
        for node in ast.walk(parse_file(path)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.args:
                message = _text_of(node.args[0])
                if message and re.search(r"(Error|Error_)$", node.func.id):
                    hints = [_text_of(item.value) for item in node.keywords if item.arg == "hint"]
                    hint = f"  (hint: {hints[0]})" if hints and hints[0] else ""
                    yield f"{node.func.id}: {message}{hint}"[:_TEXT_CHARS_MAX]


def list_log_lines() -> Iterator[str]:
    for path in python_files("genie"):
        for node in ast.walk(parse_file(path)):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr in _LOG_LEVELS
                and isinstance(node.func.value, ast.Name)
                and node.func.value.id in ("_log", "log", "logger")
                and node.args
            ):
                values = ", ".join(ast.unparse(item) for item in node.args[1:])
                yield f"{_module_name(path)} [{node.func.attr}]: {_text_of(node.args[0])}  <- {values}"


def list_python_identifiers() -> Iterator[str]:
    for path in python_files("genie"):
        module = _module_name(path)
        tree = parse_file(path)
        yield from _identifiers_of_body(tree.body, module, is_class=False)


def _identifiers_of_body(body: list[ast.stmt], prefix: str, *, is_class: bool) -> Iterator[str]:
    for node in body:
        if isinstance(node, ast.ClassDef):
            bases = ", ".join(ast.unparse(base) for base in node.bases)
            yield f"[class] {prefix}.{node.name}({bases})"
            yield from _identifiers_of_body(node.body, f"{prefix}.{node.name}", is_class=True)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            if node.name.startswith("__") and node.name != "__init__":
                continue
            if node.name == "__init__":
                yield from _attributes_of_constructor(node, prefix)
                continue
            result = f" -> {ast.unparse(node.returns)}" if node.returns else ""
            kind = "property" if _is_property(node) else "function"
            yield f"[{kind}] {prefix}.{node.name}({ast.unparse(node.args)}){result}"[:_TEXT_CHARS_MAX]
        elif target := _assigned_name(node):
            if target.startswith("__") or target in ("_log", "_Reply"):
                continue
            kind = "field" if is_class else "constant"
            annotation = getattr(node, "annotation", None)
            shown = f": {ast.unparse(annotation)}" if annotation else ""
            value = getattr(node, "value", None)
            shown += f" = {ast.unparse(value)}" if value is not None else ""
            yield f"[{kind}] {prefix}.{target}{shown}"[:_TEXT_CHARS_MAX]


def _attributes_of_constructor(node: ast.FunctionDef | ast.AsyncFunctionDef, prefix: str) -> Iterator[str]:
    for statement in node.body:
        targets = (
            statement.targets
            if isinstance(statement, ast.Assign)
            else [statement.target]
            if isinstance(statement, ast.AnnAssign)
            else []
        )
        for target in targets:
            if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name):
                assigned = ast.unparse(statement).split(" = ", 1)[-1]
                if isinstance(statement, ast.AnnAssign):
                    assigned = f"{ast.unparse(statement.annotation)} = {assigned}"
                yield f"[attribute] {prefix}.{target.attr} = {assigned}"[:_TEXT_CHARS_MAX]


def list_cpp_identifiers() -> Iterator[str]:
    for path in native_files():
        for match in _CPP_DEFINITION.finditer(path.read_text("utf-8")):
            text = " ".join(match[1].split()).rstrip("{; ").strip()
            name = match["type"] or match["function"]
            if text.startswith(_CPP_STATEMENTS) or name in _CPP_KEYWORDS or " = " in text.split("(")[0]:
                continue
            if match["function"] and not re.search(r"[\w>*&] ", text.split("(")[0]):
                continue  # a call
            kind = "type" if match["type"] else "function"
            yield f"[{kind}] {relative_path(path)}: {text}"[:_TEXT_CHARS_MAX]


def list_files() -> Iterator[str]:
    for path in [*python_files("genie", "tests", "benchmarks", "examples"), *native_files()]:
        if path.name != "__init__.py":
            yield relative_path(path)


def list_tests() -> Iterator[str]:
    for path in python_files("tests"):
        for node in parse_file(path).body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                shown = "" if node.name.startswith("test_") else f"({ast.unparse(node.args)})"
                yield f"{relative_path(path)}::{node.name}{shown}"[:_TEXT_CHARS_MAX]


LISTS: dict[str, tuple[float, Callable[[], Iterator[str]]]] = {
    "help": (0.14, list_help_lines),
    "header": (0.10, list_column_headers),
    "error": (0.16, list_errors),
    "log": (0.14, list_log_lines),
    "python": (0.30, list_python_identifiers),
    "cpp": (0.10, list_cpp_identifiers),
    "file": (0.02, list_files),
    "test": (0.04, list_tests),
}
"""Share of each category in a sample, and all its items."""


def draw_items(*, seed: int, count: int) -> list[str]:
    rng = random.Random(seed)
    drawn = []
    for category, (share, list_items) in LISTS.items():
        items = sorted(set(list_items()))
        drawn += [f"[{category}] {item}" for item in rng.sample(items, round(share * count))]
    return drawn


def _module_name(path: Path) -> str:
    return relative_path(path).removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _assigned_name(node: ast.stmt) -> str:
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
        return node.targets[0].id
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return node.target.id
    return ""


def _is_property(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any(ast.unparse(item).endswith("property") for item in node.decorator_list)


def _text_of(node: ast.expr) -> str:
    """A text or format string as written, with the expressions in braces; empty for anything else."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(
            str(part.value) if isinstance(part, ast.Constant) else f"{{{ast.unparse(part.value)}}}"
            for part in node.values
            if isinstance(part, ast.Constant | ast.FormattedValue)
        )
    return ""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("seed", type=int)
    parser.add_argument("count", type=int)
    arguments = parser.parse_args()
    for number, item in enumerate(draw_items(seed=arguments.seed, count=arguments.count), 1):
        print(f"{number}. {item}")


if __name__ == "__main__":
    main()
