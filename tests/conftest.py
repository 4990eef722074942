"""What holds for every test: nothing of the user's is touched, nothing is left behind, no skip is silent.

The same in one process and with xdist (`-n 2`): there the tests run in workers, and what is said of the
whole run is gathered, judged and shown by the process that started them, which runs none.
The hooks are proven by tests/house/test_plumbing.py. Not for: fixtures of one folder (its own conftest.py).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests import needs
from tests.fakes.nvml.fake import build
from tests.leaks import LeakCheck, detached_processes, end_processes
from tests.skips import LeftOut

# Where the state directories of the run are. Not in the stash of a worker, which does not speak for the run.
_STATE_FOLDER = pytest.StashKey[Path]()
_OUTLIVED = pytest.StashKey[list[str]]()
_TEST_NUMBERS = itertools.count(1)
# Files are given to workers in this order, then as they are found: so that none is left with a long one
# when the others are done. Without workers it makes no difference.
LONGEST_FIRST = (
    "tests/grid/test_ray_cluster.py",
    "tests/device/test_inductor.py",
    "tests/examples/test_examples.py",
    "tests/device/test_interrupts.py",
    "tests/integration/test_multi_node.py",
    "tests/integration/test_faults.py",
    "tests/device/test_opinfo.py",
    "tests/integration/test_end_to_end.py",
    "tests/runtime/test_native.py",
    "tests/device/test_modules.py",
    "tests/device/test_tensors.py",
)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(LeftOut(required=needs.REQUIRE_ALL), "genie-left-out")
    # Its own plugin: the hooks of a conftest.py are not called for fixtures of the whole session.
    config.pluginmanager.register(LeakCheck(), "genie-leaks")
    if config.pluginmanager.has_plugin("hypothesispytest"):
        _load_profile()


def _load_profile() -> None:
    """Examples are the same in every run where nobody looks at single failures; no test asserts on time."""
    import hypothesis  # most of the time that a small run takes; -p no:hypothesispytest saves it

    settings = hypothesis.settings
    settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True, database=None)
    settings.register_profile("person", deadline=None, print_blob=True)
    settings.load_profile("ci" if needs.REQUIRE_ALL or os.environ.get("CI") else "person")


# --- isolation: no test sees or changes the user's own files and settings ---------------------


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:  # Any: xdist has no public name for what stands for a worker
    """The state directories of a worker are beside its long folder, not in it, and all below one."""
    folder = node.config._tmp_path_factory.getbasetemp() / "s"
    node.config.stash[_STATE_FOLDER] = folder
    node.workerinput["state_folder"] = str(folder / node.gateway.id.removeprefix("gw"))


@pytest.fixture(scope="session")
def nvml_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The fake NVML, which programs and nodes have as those with a driver do."""
    return build(needs.require_program("cc", package="gcc"), tmp_path_factory.mktemp("nvml"))


@pytest.fixture(scope="session", autouse=True)
def _isolated_session(
    pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    workerinput = getattr(pytestconfig, "workerinput", None)
    if workerinput is not None:
        folder = Path(workerinput["state_folder"])
    else:
        folder = tmp_path_factory.getbasetemp() / "s"
        pytestconfig.stash[_STATE_FOLDER] = folder
    folder.mkdir(parents=True)
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
    patch.setenv("GENIE_AGENT_COMPILE_AHEAD", "false")  # it is compiled, and looking takes torch's import
    patch.setenv("GENIE_CONTROLLER_COMPILE_AHEAD", "false")


# --- order ------------------------------------------------------------------------------------


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    places = {config.rootpath / name: place for place, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: places.get(item.path, len(places)))


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


@pytest.hookimpl(trylast=True)  # by then wider fixtures are torn down, and the workers have ended
def pytest_sessionfinish(session: pytest.Session) -> None:
    stash = session.config.stash
    if _STATE_FOLDER not in stash:  # no test has run here
        return
    outlived = detached_processes(stash[_STATE_FOLDER])
    end_processes(frozenset(outlived))
    stash[_OUTLIVED] = list(outlived.values())
    if outlived:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    outlived = config.stash.get(_OUTLIVED, [])
    if outlived:
        terminalreporter.section("still running after the tests", red=True)
        for line in outlived:
            terminalreporter.line(line)
