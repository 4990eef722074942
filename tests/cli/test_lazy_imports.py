"""Start-up: a command imports only its own module and dependencies."""

from __future__ import annotations

import importlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

from genie.cli import app as app_module

LIST_MODULES_PROGRAM = """
import json, sys
from genie.cli import grid_main, main
code = {"genie": main, "grid-cli": grid_main}[sys.argv[1]](sys.argv[3:])
with open(sys.argv[2], "w", encoding="utf-8") as file:
    json.dump([code, sorted(sys.modules)], file)
"""
HEAVY_MODULES = [
    "torch",
    "pydantic",
    "numpy",
    "ray",
    "grpc",
    "genie.scheduler",
    "genie.controller",
    "genie.agent",
    "genie.native.libraries",
]
"""Packages that no command here uses."""
SOME_USE = ["asyncssh", "cryptography", "msgspec", "psutil", "pathspec"]
"""Large packages that some commands use."""
TABLE_MODULES = ["rich", "markdown_it", "pygments"]
LATER = [
    "asyncio",
    "socket",
    "ssl",
    "yaml",
    "tomllib",
    "tempfile",
    "importlib.metadata",
    "importlib.resources",
]


@pytest.fixture
def grid_file(tmp_path: Path) -> Iterator[Path]:
    """A grid with one node, on a port that is bound but not listening."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        file = tmp_path / "grid.yaml"
        file.write_text(f"nodes:\n  - name: 127.0.0.1\n    port: {taken.getsockname()[1]}\n", "utf-8")
        yield file


def run_and_list_imported_modules(tmp_path: Path, *typed: str, code: int) -> set[str]:
    """Run a command that exits with `code` and return the imported modules."""
    program, *arguments = typed
    module_list = tmp_path / "modules.json"
    not_measured = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_")}
    done = subprocess.run(
        [sys.executable, "-c", LIST_MODULES_PROGRAM, program, str(module_list), *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        stdin=subprocess.DEVNULL,
        env=not_measured,
    )
    assert done.returncode == 0, done.stderr
    ended, names = json.loads(module_list.read_text("utf-8"))
    assert ended == code, done.stderr
    return set(names)


def filter_command_modules(names: set[str]) -> set[str]:
    """Return the command modules among the imported ones."""
    modules = {*app_module._COMMAND_MODULES.values(), *app_module._GRID_COMMAND_MODULES.values()} - {"app"}
    return {module for module in modules if f"genie.cli.{module}" in names}


@pytest.mark.parametrize("program", ["genie", "grid-cli"])
def test_version_imports_only_the_parser(program: str, tmp_path: Path) -> None:
    names = run_and_list_imported_modules(tmp_path, program, "--version", code=0)
    assert names.isdisjoint(
        [*HEAVY_MODULES, *SOME_USE, *TABLE_MODULES, *LATER, "genie.grid", "genie.cluster"]
    )
    assert filter_command_modules(names) == set()


@pytest.mark.parametrize("program", ["genie", "grid-cli"])
def test_help_imports_commands_without_dependencies(program: str, tmp_path: Path) -> None:
    names = run_and_list_imported_modules(tmp_path, program, "--help", code=0)
    assert names.isdisjoint(
        [*HEAVY_MODULES, *SOME_USE, "yaml", "genie.grid", "genie.cluster", "genie.runtime"]
    )


def test_config_check_imports_no_network_code(grid_file: Path, tmp_path: Path) -> None:
    names = run_and_list_imported_modules(
        tmp_path, "grid-cli", "--config", str(grid_file), "config", "check", code=0
    )
    assert names.isdisjoint(
        [*HEAVY_MODULES, *SOME_USE, *TABLE_MODULES, "genie.runtime", "genie.grid.ssh.pool"]
    )
    assert filter_command_modules(names) == {"grid.nodes"}


def test_grid_run_imports_only_what_it_needs(grid_file: Path, tmp_path: Path) -> None:
    given = ("--config", str(grid_file), "run", "--node", "127.0.0.1", "hostname")
    names = run_and_list_imported_modules(tmp_path, "grid-cli", *given, code=255)
    assert "asyncssh" in names
    unused = [
        *HEAVY_MODULES,
        *TABLE_MODULES,
        "psutil",
        "pathspec",
        "tomllib",
        "genie.cluster",
        "genie.grid.sync",
    ]
    assert names.isdisjoint(unused)
    assert filter_command_modules(names) <= {"grid.run", "grid.nodes", "grid.sync"}


def test_cluster_command_imports_no_grid_code(tmp_path: Path) -> None:
    names = run_and_list_imported_modules(tmp_path, "genie", "nodes", code=2)
    assert names.isdisjoint(
        [*HEAVY_MODULES, *TABLE_MODULES, "asyncssh", "psutil", "pathspec", "yaml", "genie.grid"]
    )
    assert filter_command_modules(names) == {"commands.status"}


@pytest.mark.parametrize("typed", [("nodse",), ("nodse", "run")])
def test_unknown_command_suggests_the_closest(typed: tuple[str, ...]) -> None:
    program = "import sys; from genie.cli import grid_main; sys.exit(grid_main(sys.argv[1:]))"
    done = subprocess.run([sys.executable, "-c", program, *typed], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "Did you mean 'nodes'?" in done.stderr


@pytest.mark.parametrize(
    ("commands", "modules"),
    [(app_module.app, app_module._COMMAND_MODULES), (app_module.grid_app, app_module._GRID_COMMAND_MODULES)],
    ids=["genie", "grid-cli"],
)
def test_each_command_is_registered_by_its_listed_module(
    commands: typer.Typer, modules: dict[str, str]
) -> None:
    for module in modules.values():
        importlib.import_module(f"genie.cli.{module}")
    group: Any = typer.main.get_command(commands)
    found = {name: get_registering_module(command) for name, command in group.commands.items()}
    assert found == {name: f"genie.cli.{module}" for name, module in modules.items()}


def get_registering_module(command: Any) -> str:
    """Return the module that registers a command or group."""
    if command.callback is None:
        command = next(iter(command.commands.values()))
    return str(command.callback.__module__)
