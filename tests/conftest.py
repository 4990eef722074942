"""Rules for every test: isolated from the user's files, no leaks, every skip is reported.

They hold in one process and with xdist (`-n 2`). With xdist the tests run in workers, and the main process
collects and reports the results of the whole run. tests/house/test_conftest_hooks.py tests the hooks.
"""

from __future__ import annotations

import asyncio
import atexit
import gc
import itertools
import logging
import os
from collections.abc import AsyncIterator, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests import forkserver, needs
from tests.controller.store.etcd_server import EtcdServer
from tests.durations import DurationRecorder
from tests.fakes.nvml.fake_nvml import compile_fake_nvml
from tests.forkserver import ForkServer
from tests.interrupts import InterruptHandler
from tests.leaks import LeakCheck, kill_processes, processes_of_run
from tests.ports import free_port
from tests.skips import SkipReport
from tests.unit import UnitTestSelection

# Folder of the state directories of the run. Set only in the main process, not in workers.
_STATE_FOLDER = pytest.StashKey[Path]()
_REMAINING = pytest.StashKey[list[str]]()
_SHM = Path("/dev/shm")
_MEMORY_BYTES_MIN = 2 << 30
_TEST_NUMBERS = itertools.count(1)
_PRELOADED = (
    *(f"genie.cli.{name}" for name in ("app", "grid.health", "grid.run", "grid.sync")),
    *(f"genie.grid.{name}" for name in ("executor", "metrics", "ssh.pool", "sync.syncer")),
    "genie.cluster.init",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--record-durations", action="store_true", help="write tests/durations.json (see make durations)"
    )
    parser.addoption("--unit", action="store_true", help="run only the files of tests/unit.txt")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--unit"):
        config.pluginmanager.register(UnitTestSelection(), "genie-unit")
    # If the environment sets it, each process of a test would compile Genie again.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    _use_shm_for_temporary_files(config)
    config.pluginmanager.register(
        DurationRecorder(record=config.getoption("--record-durations")), "genie-durations"
    )
    config.pluginmanager.register(SkipReport(required=needs.REQUIRE_ALL), "genie-skips")
    # A plugin, because the hooks of a conftest.py are not called for session fixtures.
    config.pluginmanager.register(LeakCheck(), "genie-leaks")
    config.pluginmanager.register(InterruptHandler(config, lambda: _run_folder(config)), "genie-interrupts")
    if config.pluginmanager.has_plugin("hypothesispytest"):
        _load_hypothesis_profile()


def _use_shm_for_temporary_files(config: pytest.Config) -> None:
    """Temporary files go to /dev/shm: stores and journals call fsync hundreds of times in a test.

    Unless a folder is configured, or /dev/shm has too little space or forbids programs.
    """
    chosen = (
        config.getoption("basetemp") or os.environ.get("PYTEST_DEBUG_TEMPROOT") or os.environ.get("TMPDIR")
    )
    if chosen or not os.access(_SHM, os.W_OK | os.X_OK):
        return
    facts = os.statvfs(_SHM)
    if facts.f_bavail * facts.f_frsize >= _MEMORY_BYTES_MIN and not facts.f_flag & os.ST_NOEXEC:
        os.environ["PYTEST_DEBUG_TEMPROOT"] = str(_SHM)


def _load_hypothesis_profile() -> None:
    """Deterministic examples in CI, random ones elsewhere; no deadline."""
    import hypothesis  # slow import; skip it with -p no:hypothesispytest

    settings = hypothesis.settings
    settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True, database=None)
    settings.register_profile("person", deadline=None, print_blob=True)
    settings.load_profile("ci" if needs.REQUIRE_ALL or os.environ.get("CI") else "person")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Generator[None, object, object]:
    """Excludes collected tests from garbage collection: they exist until the end of the run."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()
        atexit.register(gc.unfreeze)  # for a deterministic interpreter shutdown


# --- isolation: no test reads or changes files and settings of the user -----------------------


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:  # Any: xdist has no public type for it
    """Puts the state directories of all workers below one folder with a short path."""
    folder = node.config._tmp_path_factory.getbasetemp() / "s"
    node.config.stash[_STATE_FOLDER] = folder
    node.workerinput["state_folder"] = str(folder / node.gateway.id.removeprefix("gw"))


@pytest.fixture(scope="session")
def nvml_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The fake NVML library, compiled."""
    return compile_fake_nvml(needs.require_program("cc", package="gcc"), tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def unused_tcp_port() -> int:
    """Replaces that of pytest-asyncio, which may be taken by another process before it is used."""
    return free_port()


@pytest.fixture
def fork_server() -> ForkServer:
    """Starts Python programs with the command line, cluster and grid of Genie preloaded, without torch."""
    return forkserver.get_shared_server(*_PRELOADED)


@pytest.fixture(scope="session", autouse=True)
def _isolate_session(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
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
        _set_home_and_state_dir(patch, folder / "0")
        yield folder
        forkserver.close_shared_servers()


@pytest.fixture(autouse=True)
def _isolate_test(_isolate_session: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Short names: the path of a Unix socket in the state directory is limited to 107 bytes.
    _set_home_and_state_dir(monkeypatch, _isolate_session / str(next(_TEST_NUMBERS)))


@pytest.fixture(autouse=True)
def _restore_logging() -> Iterator[None]:
    """Restores the logging configuration after each test."""
    loggers = (logging.getLogger(), logging.getLogger("genie"))
    before = [(logger.level, logger.propagate, logger.disabled, list(logger.handlers)) for logger in loggers]
    yield
    for logger, (level, propagate, disabled, handlers) in zip(loggers, before, strict=True):
        if logger.level != level:
            logger.setLevel(level)  # also clears a cache
        logger.propagate, logger.disabled, logger.handlers[:] = propagate, disabled, handlers


def _set_home_and_state_dir(patch: pytest.MonkeyPatch, folder: Path) -> None:
    home = folder / "home"
    home.mkdir(parents=True)
    patch.setenv("HOME", str(home))
    patch.setenv("GENIE_STATE_DIR", str(folder / "state"))
    patch.setenv("GENIE_AGENT_COMPILE_AHEAD", "false")  # already compiled, and the check imports torch
    patch.setenv("GENIE_CONTROLLER_COMPILE_AHEAD", "false")


# --- leaks ------------------------------------------------------------------------------------


def pytest_itemcollected(item: pytest.Item) -> None:
    if pytest_asyncio.is_async_test(item) and isinstance(item, pytest.Function):
        item.fixturenames.insert(0, _no_leaked_tasks.__name__)  # set up first, torn down last


@pytest.fixture
async def _no_leaked_tasks() -> AsyncIterator[None]:
    """Fails an async test that leaves tasks; checked before the event loop cancels them."""
    before = asyncio.all_tasks()
    yield
    leaked = asyncio.all_tasks() - before - {asyncio.current_task()}
    for _ in range(20):  # a cancelled task needs a few loop iterations to end
        if not leaked:
            return
        await asyncio.sleep(0)
        leaked = {task for task in leaked if not task.done()}
    names = "\n  ".join(f"task {task.get_name()!r} in {task.get_coro()}" for task in leaked)
    pytest.fail(f"leaked by the test:\n  {names}", pytrace=False)


@pytest.hookimpl(trylast=True)  # after session fixtures and workers
def pytest_sessionfinish(session: pytest.Session) -> None:
    folder = _run_folder(session.config)
    if folder is None:
        return
    remaining = processes_of_run(folder)
    kill_processes(frozenset(remaining))
    session.config.stash[_REMAINING] = list(remaining.values())
    if remaining and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _run_folder(config: pytest.Config) -> Path | None:
    """Folder of all files of the run; None in a worker and before the first test."""
    folder = config.stash.get(_STATE_FOLDER, None)
    return None if folder is None else folder.parent


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    remaining = config.stash.get(_REMAINING, [])
    if remaining:
        terminalreporter.section("processes still running after the tests", red=True)
        for line in remaining:
            terminalreporter.line(line)


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EtcdServer]:
    """A running etcd of one member."""
    server = EtcdServer(tmp_path / "etcd")
    server.start()
    yield server
    server.stop()
