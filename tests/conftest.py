"""What holds for every test: nothing of the user's is touched, nothing is left behind, no skip is silent.

The hooks are proven by tests/house/test_plumbing.py. Not for: fixtures of one folder (its own conftest.py).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
from collections.abc import AsyncIterator, Generator, Iterator
from pathlib import Path

import hypothesis
import pytest
import pytest_asyncio

from tests import needs
from tests.leaks import LeakCheck, detached_processes, end_processes

# Examples are the same in every run where nobody looks at single failures; no test asserts on time.
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True, database=None)
hypothesis.settings.register_profile("person", deadline=None, print_blob=True)
hypothesis.settings.load_profile("ci" if needs.REQUIRE_ALL or os.environ.get("CI") else "person")

_LEFT_OUT = pytest.StashKey[dict[str, str]]()
_STATE_FOLDER = pytest.StashKey[Path]()
_OUTLIVED = pytest.StashKey[list[str]]()
_TEST_NUMBERS = itertools.count(1)
# Nobody can install what these need, so they may be left out even where everything is required.
_MAY_BE_LEFT_OUT = "tests/gpu/"
# More tests of one file with one reason share a line.
_NAMED_MAX = 3


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_LEFT_OUT] = {}
    # Its own plugin: the hooks of a conftest.py are not called for fixtures of the whole session.
    config.pluginmanager.register(LeakCheck(), "genie-leaks")


# --- isolation: no test sees or changes the user's own files and settings ---------------------


@pytest.fixture(scope="session", autouse=True)
def _isolated_session(
    pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    folder = tmp_path_factory.getbasetemp() / "s"
    folder.mkdir()
    pytestconfig.stash[_STATE_FOLDER] = folder
    with pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            if name.startswith(("GENIE_", "XDG_")):
                patch.delenv(name)
        _point_home_at(patch, folder / "0")
        yield folder


@pytest.fixture(autouse=True)
def _isolated_test(_isolated_session: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Short names: a Unix socket under the state directory must fit into 108 bytes.
    _point_home_at(monkeypatch, _isolated_session / str(next(_TEST_NUMBERS)))


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    """A test that starts logging as a program does must not change what the next one can capture."""
    loggers = (logging.getLogger(), logging.getLogger("genie"))
    before = [(logger.level, logger.propagate, logger.disabled, list(logger.handlers)) for logger in loggers]
    yield
    for logger, (level, propagate, disabled, handlers) in zip(loggers, before, strict=True):
        if logger.level != level:
            logger.setLevel(level)  # also clears a cache, so not without need
        logger.propagate, logger.disabled, logger.handlers[:] = propagate, disabled, handlers


def _point_home_at(patch: pytest.MonkeyPatch, folder: Path) -> None:
    home = folder / "home"
    home.mkdir(parents=True)
    patch.setenv("HOME", str(home))
    patch.setenv("GENIE_STATE_DIR", str(folder / "state"))


# --- leaks: a test gives back what it took ----------------------------------------------------


def pytest_itemcollected(item: pytest.Item) -> None:
    if pytest_asyncio.is_async_test(item) and isinstance(item, pytest.Function):
        item.fixturenames.insert(0, _no_loose_tasks.__name__)  # first set up, last torn down


@pytest.fixture
async def _no_loose_tasks() -> AsyncIterator[None]:
    """Runs around every async test: its loop cancels what is left, so this looks before that."""
    before = asyncio.all_tasks()
    yield
    loose = asyncio.all_tasks() - before - {asyncio.current_task()}
    for _ in range(20):  # a cancelled task needs a few turns of the loop to end
        if not loose:
            return
        await asyncio.sleep(0)
        loose = {task for task in loose if not task.done()}
    names = "\n  ".join(f"task {task.get_name()!r} in {task.get_coro()}" for task in loose)
    pytest.fail(f"the test left behind:\n  {names}", pytrace=False)


# --- skips: each is listed by name and reason, or fails the run -------------------------------


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.skipped and not hasattr(report, "wasxfail"):
        item.config.stash[_LEFT_OUT][report.nodeid] = _reason(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    if report.skipped:
        collector.config.stash[_LEFT_OUT][report.nodeid] = _reason(report)
    return report


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return text.removeprefix("Skipped: ")


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    stash = session.config.stash
    folder = stash.get(_STATE_FOLDER, None)
    outlived = {} if folder is None else detached_processes(folder)
    end_processes(frozenset(outlived))
    stash[_OUTLIVED] = list(outlived.values())
    if outlived or (needs.REQUIRE_ALL and _not_excused(stash[_LEFT_OUT])):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _not_excused(left_out: dict[str, str]) -> list[str]:
    return [name for name in left_out if not name.startswith(_MAY_BE_LEFT_OUT)]


def _listed(left_out: dict[str, str]) -> list[str]:
    """A line for each test, or one for the file where it would be many lines with the same reason."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name, reason in left_out.items():
        groups.setdefault((name.partition("::")[0], reason), []).append(name)
    lines = []
    for (file, reason), names in groups.items():
        shown = names if len(names) <= _NAMED_MAX else [f"{file} ({len(names)} tests)"]
        lines += [f"{name}: {reason}" for name in shown]
    return lines


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    left_out = config.stash[_LEFT_OUT]
    if left_out:
        failing = needs.REQUIRE_ALL and bool(_not_excused(left_out))
        terminalreporter.section("left out", red=failing, yellow=not failing)
        for line in _listed(left_out):
            terminalreporter.line(line)
        if failing:
            terminalreporter.line("GENIE_TEST_REQUIRE_ALL=1: a test that is left out fails the run", red=True)
    outlived = config.stash.get(_OUTLIVED, [])
    if outlived:
        terminalreporter.section("still running after the tests", red=True)
        for line in outlived:
            terminalreporter.line(line)
