"""The hooks of tests/conftest.py: skips are listed, leaks are detected, tests are isolated.

The scenarios are small suites that run in child pytest processes with the conftest.py of this repository, in
one process and with two workers. A child takes a second or two, so scenarios share one.
"""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import psutil
import pytest

from tests.house.repository_files import ROOT
from tests.house.small_suites import WORKERS, SuiteOutcome, run_suite
from tests.needs import require_program
from tests.waiting import until, wait_until

LEAKING = """
import asyncio, os, socket, subprocess, sys, threading
import pytest
import tests.leaks

tests.leaks._SETTLE_S = 0.05  # no leak here ends without help
held = []

def test_thread():
    stop = threading.Event()
    held.append(stop)
    threading.Thread(target=stop.wait, args=(30,), name="left-thread").start()

def test_own_daemon():
    threading.Thread(target=held[0].wait, args=(30,), name="genie-left", daemon=True).start()

def test_daemon_of_others():
    threading.Thread(target=held[0].wait, args=(30,), name="their-daemon", daemon=True).start()

async def test_task():
    held.append(asyncio.create_task(asyncio.Event().wait(), name="left-task"))

def test_socket():
    held.append(socket.create_server(("127.0.0.1", 0)))

def test_child():
    held.append(subprocess.Popen([sys.executable, "-c", "input()", "left-child"], stdin=subprocess.PIPE))

def test_unreaped_child():
    child = subprocess.Popen(["true"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    held.append(child)

@pytest.mark.leaks_allowed("")
def test_no_reason():
    pass

def test_thread_ends():
    held[0].set()
"""

TIDY = '''
import asyncio, socket, subprocess, sys, threading
import pytest

@pytest.fixture(scope="module")
def wide():
    """Like an etcd server shared by several tests."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    server = socket.create_server(("127.0.0.1", 0))
    stop = threading.Event()
    threads = [threading.Thread(target=stop.wait), threading.Thread(target=stop.wait, daemon=True)]
    threads[1].name = "genie-shared"
    for thread in threads:
        thread.start()
    yield server
    stop.set()
    for thread in threads:
        thread.join()
    server.close()
    child.communicate(b"\\\\n")

def test_first_use(wide):
    pass

def test_second_use(wide):
    socket.create_connection(wide.getsockname()).close()

async def test_closes_everything():
    async with asyncio.TaskGroup() as group:
        group.create_task(asyncio.sleep(0))
    await asyncio.to_thread(int)
    child = await asyncio.create_subprocess_exec("true")
    await child.wait()
    server = await asyncio.start_server(lambda r, w: w.close(), "127.0.0.1", 0)
    server.close()
    await server.wait_closed()

@pytest.mark.leaks_allowed("shows that the marker works")
def test_may_leak():
    wide.socket = socket.create_server(("127.0.0.1", 0))

def test_marker_applies_only_to_its_test():
    wide.socket.close()
'''

SKIPPING = """
import pytest
from tests.needs import require_module, require_program

def test_program():
    require_program("no-such-program", package="no-such-package")

def test_module():
    require_module("no_such_module.part", package="no-such-wheel")

@pytest.mark.xfail(strict=True, raises=ZeroDivisionError, reason="known")
def test_expected_to_fail():
    1 / 0

def test_here():
    assert require_program("sh", package="dash")
    assert require_module("json", package="-").dumps
"""

SKIPPED_FILE = """
import pytest
from shared import not_here  # two files are skipped in one function

not_here()
"""

MANY_SKIPS = """
import pytest

@pytest.mark.parametrize("number", range(4))
def test_on_the_moon(number):
    pytest.skip("needs a moon")
"""

SOME_SKIPS = (
    MANY_SKIPS
    + """
def test_on_earth():
    pass
"""
)

DETACHING = """
import os, subprocess, sys

def test_starts_a_daemon():
    # The intermediate process ends at once, so that the last one is detached.
    start = "import subprocess as s; s.Popen(['sleep', '60'], stdout=s.DEVNULL, stderr=s.DEVNULL)"
    subprocess.run([sys.executable, "-c", start], check=True)
"""

CRASHING = (
    DETACHING
    + """
def test_crashes_its_worker():
    os._exit(3)
"""
)

HOME = """
import os
from pathlib import Path

def test_home(pytestconfig):
    # The folder of the run, not that of a worker: socket paths must be short.
    base = os.environ["RUN_FOLDER"] + "/"
    assert os.environ["HOME"].startswith(base) and Path.home().is_dir()
    assert os.environ["GENIE_STATE_DIR"].startswith(base)
    assert len(os.environ["GENIE_STATE_DIR"].removeprefix(base)) <= len("s/1/9999/state")
    ours = [name for name in os.environ if name.startswith(("GENIE_", "XDG_"))]
    assert ours == ["GENIE_STATE_DIR", "GENIE_AGENT_COMPILE_AHEAD", "GENIE_CONTROLLER_COMPILE_AHEAD"]
    Path("~/touched").expanduser().touch()

def test_home_is_empty():
    assert list(Path.home().iterdir()) == []
"""


STUCK = """
import pytest, time

@pytest.mark.timeout(0.2, func_only=True)
def test_stuck():
    time.sleep(50)
"""

LOGGING = """
import logging
log = logging.getLogger("genie.part")

def test_configures_logging():
    logging.getLogger("genie").propagate = False
    logging.getLogger("genie").setLevel("ERROR")
    logging.getLogger().handlers.clear()

def test_captures(caplog):
    log.warning("seen")
    assert caplog.messages == ["seen"]
    assert logging.getLogger("genie").propagate
"""


@pytest.fixture(scope="module", params=[(), WORKERS], ids=["one_process", "workers"])
def worker_options(request: pytest.FixtureRequest) -> tuple[str, ...]:
    return tuple(request.param)


# --- leaks ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def leaking_suite(worker_options: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> SuiteOutcome:
    files = {"test_leaking.py": LEAKING, "test_stuck.py": STUCK}
    return run_suite(tmp_path_factory.mktemp("leaking"), files, worker_options)


LEAK_MESSAGES = {
    "test_thread": "thread 'left-thread'",
    "test_own_daemon": "thread 'genie-left'",
    "test_task": "task 'left-task'",
    "test_socket": "socket addr(ip='127.0.0.1'",
    "test_child": "left-child",
    "test_unreaped_child": "was not waited for",
    "test_no_reason": "leaks_allowed needs a reason",
}


@pytest.mark.parametrize("test", LEAK_MESSAGES)
def test_leak_fails_its_test_and_is_described(leaking_suite: SuiteOutcome, test: str) -> None:
    assert LEAK_MESSAGES[test] in leaking_suite.part(f"ERROR at teardown of {test}"), leaking_suite.text


def test_leak_does_not_fail_later_tests(leaking_suite: SuiteOutcome) -> None:
    assert leaking_suite.status == 1
    assert leaking_suite.named("ERROR") == sorted(LEAK_MESSAGES), leaking_suite.text


def test_stuck_test_ends_at_its_timeout(leaking_suite: SuiteOutcome) -> None:
    assert "test_stuck" in leaking_suite.named("FAILED"), leaking_suite.text
    assert "Timeout" in leaking_suite.part("test_stuck")


def test_resources_of_session_fixtures_are_not_leaks(session_socket: socket.socket) -> None:
    assert session_socket.fileno() > 0  # the check runs after this test


@pytest.fixture(scope="session")
def session_socket() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def test_detached_process_is_listed_and_killed_and_fails_the_run(
    tmp_path: Path, worker_options: tuple[str, ...]
) -> None:
    outcome = run_suite(tmp_path, {"test_detaching.py": DETACHING}, worker_options)
    assert outcome.status == 1, outcome.text
    assert "1 passed" in outcome.text, "the run fails, not the test, which has ended"
    _check_listed_and_killed(outcome, "test_detaching.py::test_starts_a_daemon")


def test_crashed_worker_ends_the_run_and_its_processes_are_found(tmp_path: Path) -> None:
    outcome = run_suite(tmp_path, {"test_crashing.py": CRASHING, "test_tidy.py": TIDY}, WORKERS)
    assert outcome.status != 0
    assert outcome.named("FAILED") == ["test_crashes_its_worker"], outcome.text
    _check_listed_and_killed(outcome, "test_crashing.py::test_starts_a_daemon")


def _check_listed_and_killed(outcome: SuiteOutcome, test: str) -> None:
    line = outcome.part("processes still running after the tests")
    assert f"(sleep 60), started by {test}" in line, outcome.text
    wait_until(lambda: not _is_alive(int(line.split()[1])), what="the end of the process")


def _is_alive(pid: int) -> bool:
    """Whether the process exists and is not a zombie."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


# --- skipped tests and isolation --------------------------------------------------------------


@pytest.fixture(scope="module")
def passing_suite(worker_options: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> SuiteOutcome:
    files = {
        "test_far.py": SKIPPED_FILE,
        "test_farther.py": SKIPPED_FILE,
        "test_home.py": HOME,
        "test_logging.py": LOGGING,
        "test_moon.py": MANY_SKIPS,
        "test_orbit.py": SOME_SKIPS,
        "test_skipping.py": SKIPPING,
        "test_tidy.py": TIDY,
    }
    folder = tmp_path_factory.mktemp("passing")
    environ = {"GENIE_MASTER_ADDR": "elsewhere", "XDG_STATE_HOME": "/nowhere"}
    return run_suite(folder, files, worker_options, RUN_FOLDER=str(folder / "b"), **environ)


def test_resources_of_wider_fixtures_are_not_leaks(passing_suite: SuiteOutcome) -> None:
    assert passing_suite.named("ERROR") == []
    assert passing_suite.status == 0, passing_suite.text


def test_tests_are_isolated_from_the_user(passing_suite: SuiteOutcome) -> None:
    assert {"test_home", "test_home_is_empty"}.isdisjoint(passing_suite.named("FAILED")), passing_suite.text


def test_logging_is_restored(passing_suite: SuiteOutcome) -> None:
    assert "test_captures" not in passing_suite.named("FAILED"), passing_suite.text


def test_skip_is_listed_with_its_reason(passing_suite: SuiteOutcome) -> None:
    assert passing_suite.part("skipped").splitlines() == [
        "test_far.py: needs another machine",
        "test_farther.py: needs another machine",
        "test_moon.py (4 tests): needs a moon",
        *(f"test_orbit.py::test_on_the_moon[{number}]: needs a moon" for number in range(4)),
        "test_skipping.py::test_module: needs the module no_such_module.part (pip: no-such-wheel)",
        "test_skipping.py::test_program: needs no-such-program (Debian: no-such-package)",
    ], passing_suite.text
    assert passing_suite.status == 0, "skips are allowed without GENIE_TEST_REQUIRE_ALL"


@pytest.mark.parametrize("skipping", [MANY_SKIPS, SKIPPED_FILE], ids=["tests", "file"])
def test_skip_fails_the_run_when_everything_is_required(
    tmp_path: Path, worker_options: tuple[str, ...], skipping: str
) -> None:
    files = {"tests/gpu/test_moon.py": MANY_SKIPS, "tests/other/test_it.py": skipping}
    outcome = run_suite(tmp_path, files, worker_options, GENIE_TEST_REQUIRE_ALL="1")
    assert outcome.status == 1, outcome.text
    assert "tests/other/test_it.py" in outcome.part("skipped")


def test_gpu_tests_may_be_skipped_when_everything_is_required(
    tmp_path: Path, worker_options: tuple[str, ...]
) -> None:
    files = {"tests/gpu/test_far.py": SKIPPED_FILE, "tests/gpu/test_moon.py": MANY_SKIPS}
    outcome = run_suite(tmp_path, files, worker_options, GENIE_TEST_REQUIRE_ALL="1")
    assert outcome.part("skipped").splitlines() == [
        "tests/gpu/test_far.py: needs another machine",
        "tests/gpu/test_moon.py (4 tests): needs a moon",
    ]
    assert outcome.status == 0, outcome.text


def test_property_tests_have_no_deadline() -> None:
    assert hypothesis.settings.default is not None
    assert hypothesis.settings.default.deadline is None


def list_make_commands(*arguments: str) -> str:
    """Commands that make would run."""
    make = require_program("make", package="make")
    # Without the variables of a `make test ARGS=...` that runs this test.
    clean = {name: os.environ[name] for name in os.environ if name != "ARGS" and "MAKE" not in name}
    command = [make, "-C", str(ROOT), "--dry-run", "--no-print-directory", *arguments]
    return subprocess.run(command, env=clean, capture_output=True, text=True, timeout=30).stdout


def test_make_uses_workers_only_for_the_whole_suite() -> None:
    for target in ("test", "coverage"):
        assert " ".join(WORKERS[2:]) in list_make_commands(target)
        assert "--dist" not in list_make_commands(target, "ARGS=tests/test_config.py -k port")


def test_make_run_installs_no_development_tools_and_make_test_does() -> None:
    run, test = (list_make_commands("--always-make", target) for target in ("run", "test"))
    assert "requirements/run.txt" in run and "requirements/dev.txt" not in run
    assert "requirements/run.txt" in test and "requirements/dev.txt" in test


# --- waiting ----------------------------------------------------------------------------------


async def test_until_returns_the_first_truthy_result() -> None:
    results = iter([0, "", "here"])

    async def poll() -> object:
        return next(results)

    assert await until(poll, timeout_s=5) == "here"
    results = iter([None, [1]])
    assert await until(lambda: next(results), timeout_s=5) == [1]
    assert wait_until(lambda: 7, timeout_s=5) == 7


async def test_timeout_of_until_names_the_condition() -> None:
    with pytest.raises(pytest.fail.Exception, match=r"timed out after 0\.01 s waiting for: the event"):
        await until(lambda: False, timeout_s=0.01, what="the event")
    with pytest.raises(pytest.fail.Exception, match="the event"):
        wait_until(lambda: False, timeout_s=0.01, what="the event")


async def test_until_does_not_catch_exceptions_of_the_predicate() -> None:
    def poll() -> None:
        raise TimeoutError("of the predicate")

    with pytest.raises(TimeoutError, match="of the predicate"):
        await until(poll, timeout_s=5)
