"""Fixtures of the command-line tests: a way to run a command, and a controller to run it against."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from genie.cli import main
from genie.telemetry import log
from tests.cli.scripted import ScriptedController


class Ran(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture(autouse=True)
def _own_logging() -> Iterator[None]:
    """Commands set up logging; the tests after them must not notice."""
    yield
    log.reset()


@pytest.fixture
def genie(capfd: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    """Runs one command in this process and gives back its exit code and what it wrote."""

    def run(*argv: str) -> Ran:
        capfd.readouterr()
        code = main(list(argv))
        return Ran(code, *capfd.readouterr())

    return run


@pytest.fixture
def state_dir() -> Path:
    return Path(os.environ["GENIE_STATE_DIR"])


@pytest.fixture
def controller(state_dir: Path) -> Iterator[ScriptedController]:
    with ScriptedController() as scripted:
        scripted.announce(state_dir)
        yield scripted
