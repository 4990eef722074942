"""What a command imports before it does anything: its own module and what that needs, and nothing else."""

from __future__ import annotations

import importlib
import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

from genie.cli import app as app_module

PROGRAM = """
import json, sys
from genie.cli import grid_main, main
code = {"genie": main, "grid-cli": grid_main}[sys.argv[1]](sys.argv[3:])
with open(sys.argv[2], "w", encoding="utf-8") as file:
    json.dump([code, sorted(sys.modules)], file)
"""
HEAVY = [
    "torch",
    "pydantic",
    "numpy",
    "ray",
    "grpc",
    "genie.scheduler",
    "genie.controller",
    "genie.agent",
    "genie.runtime.native",
]
"""What none of the commands here uses."""
SOME_USE = ["asyncssh", "cryptography", "msgspec", "psutil", "pathspec"]
"""Large packages that some commands use."""
TABLES = ["rich", "markdown_it", "pygments"]
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
    """A grid with one node, at a port that refuses: it is taken, and nobody listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        file = tmp_path / "grid.yaml"
        file.write_text(f"nodes:\n  - name: 127.0.0.1\n    port: {taken.getsockname()[1]}\n", "utf-8")
        yield file


def modules_after(tmp_path: Path, *typed: str, code: int) -> set[str]:
    """The modules that a process has imported when the command ends with `code`."""
    program, *arguments = typed
    told = tmp_path / "modules.json"
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, program, str(told), *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stderr
    ended, names = json.loads(told.read_text("utf-8"))
    assert ended == code, done.stderr
    return set(names)


def commands_among(names: set[str]) -> set[str]:
    """Which of the modules that register commands are there."""
    homes = {*app_module._COMMANDS.values(), *app_module._GRID_COMMANDS.values()} - {"app"}
    return {home for home in homes if f"genie.cli.{home}" in names}


@pytest.mark.parametrize("program", ["genie", "grid-cli"])
def test_the_version_needs_the_parser_alone(program: str, tmp_path: Path) -> None:
    names = modules_after(tmp_path, program, "--version", code=0)
    assert names.isdisjoint([*HEAVY, *SOME_USE, *TABLES, *LATER, "genie.grid", "genie.cluster"])
    assert commands_among(names) == set()


@pytest.mark.parametrize("program", ["genie", "grid-cli"])
def test_help_imports_the_commands_and_nothing_that_they_use(program: str, tmp_path: Path) -> None:
    names = modules_after(tmp_path, program, "--help", code=0)
    assert names.isdisjoint([*HEAVY, *SOME_USE, "yaml", "genie.grid", "genie.cluster", "genie.runtime"])


def test_checking_the_grid_s_file_reads_it_and_connects_nothing(grid_file: Path, tmp_path: Path) -> None:
    names = modules_after(tmp_path, "grid-cli", "--config", str(grid_file), "config", "check", code=0)
    assert names.isdisjoint([*HEAVY, *SOME_USE, *TABLES, "genie.runtime", "genie.grid.ssh_pool"])
    assert commands_among(names) == {"grid_node_commands"}


def test_a_run_imports_what_reaches_a_node_and_no_more(grid_file: Path, tmp_path: Path) -> None:
    given = ("--config", str(grid_file), "run", "--node", "127.0.0.1", "hostname")
    names = modules_after(tmp_path, "grid-cli", *given, code=255)
    assert "asyncssh" in names
    unused = [*HEAVY, *TABLES, "psutil", "pathspec", "tomllib", "genie.cluster", "genie.grid.sync"]
    assert names.isdisjoint(unused)
    assert commands_among(names) <= {"grid_run_commands", "grid_node_commands", "grid_sync_commands"}


def test_a_command_of_the_cluster_imports_nothing_of_the_grid(tmp_path: Path) -> None:
    names = modules_after(tmp_path, "genie", "nodes", code=2)
    assert names.isdisjoint([*HEAVY, *TABLES, "asyncssh", "psutil", "pathspec", "yaml", "genie.grid"])
    assert commands_among(names) == {"view_commands"}


@pytest.mark.parametrize("typed", [("nodse",), ("nodse", "run")])
def test_a_name_that_there_is_not_is_compared_with_all_commands(typed: tuple[str, ...]) -> None:
    program = "import sys; from genie.cli import grid_main; sys.exit(grid_main(sys.argv[1:]))"
    done = subprocess.run([sys.executable, "-c", program, *typed], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "Did you mean 'nodes'?" in done.stderr


@pytest.mark.parametrize(
    ("door", "homes"),
    [(app_module.app, app_module._COMMANDS), (app_module.grid, app_module._GRID_COMMANDS)],
    ids=["genie", "grid-cli"],
)
def test_the_modules_register_exactly_the_commands_that_are_looked_for_in_them(
    door: typer.Typer, homes: dict[str, str]
) -> None:
    for home in homes.values():
        importlib.import_module(f"genie.cli.{home}")
    group: Any = typer.main.get_command(door)
    found = {name: home_of(command) for name, command in group.commands.items()}
    assert found == {name: f"genie.cli.{home}" for name, home in homes.items()}


def home_of(command: Any) -> str:
    """Where it is registered; a group with options of its own has them there, too."""
    if command.callback is None:
        command = next(iter(command.commands.values()))
    return str(command.callback.__module__)
