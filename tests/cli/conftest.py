"""Fixtures of the command-line tests: a command runner and a scripted controller."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer.main

from genie.cli import app as app_module
from genie.cli import main
from genie.telemetry import log
from tests.cli.scripted_controller import ScriptedController
from tests.grid.conftest import own_testbed, session_testbed, testbed_lease
from tests.grid.quick_venv import quick_venv

__all__ = ["own_testbed", "quick_venv", "session_testbed", "testbed_lease"]


class CommandOutcome(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture(scope="session", autouse=True)
def _shared_parser() -> Iterator[None]:
    """Share one parser between tests: building it, with all command modules imported, takes longer than most
    commands. It is rebuilt when a command is registered."""
    known: dict[tuple[int, int], Any] = {}  # Any: a type of the parser

    def get_command(app: typer.Typer) -> Any:
        key = (id(app), _count_commands(app))
        if key not in known:
            known[key] = typer.main.get_command(app)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(app_module, "get_command", get_command)
        yield


def _count_commands(app: typer.Typer) -> int:
    below = (group.typer_instance for group in app.registered_groups)
    return len(app.registered_commands) + sum(1 + _count_commands(each) for each in below if each is not None)


@pytest.fixture(autouse=True)
def _reset_logging() -> Iterator[None]:
    """Reset the logging configuration of commands after each test."""
    yield
    log.reset()


@pytest.fixture
def genie(capfd: pytest.CaptureFixture[str]) -> Callable[..., CommandOutcome]:
    """Run a command in this process and return its exit code and output."""

    def run(*argv: str) -> CommandOutcome:
        capfd.readouterr()
        code = main(list(argv))
        return CommandOutcome(code, *capfd.readouterr())

    return run


@pytest.fixture
def state_dir() -> Path:
    return Path(os.environ["GENIE_STATE_DIR"])


@pytest.fixture
def controller(state_dir: Path) -> Iterator[ScriptedController]:
    with ScriptedController() as scripted:
        scripted.announce(state_dir)
        yield scripted
