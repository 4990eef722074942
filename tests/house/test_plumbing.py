"""The plumbing of the tests themselves: skips are listed, leaks are caught, the user's files are safe.

The scenarios are small suites that run in child pytests with this repository's conftest.py, each in one
process and in two workers. A child takes a second or two, so several scenarios share one.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hypothesis
import psutil
import pytest

from tests import conftest
from tests.house.sources import ROOT
from tests.needs import require_program
from tests.waiting import until, wait_until

LEAKING = """
import asyncio, os, socket, subprocess, sys, threading
import pytest
import tests.leaks

tests.leaks._SETTLE_S = 0.05  # nothing here goes away by itself
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

def test_the_thread_ends():
    held[0].set()
"""

TIDY = '''
import asyncio, socket, subprocess, sys, threading
import pytest

@pytest.fixture(scope="module")
def wide():
    """Like an etcd server that several tests share."""
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

async def test_gives_everything_back():
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

def test_the_marker_ends_with_its_test():
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
from shared import not_here  # two files with one place where they are skipped

not_here()
"""

SHARED = """
import pytest

def not_here():
    pytest.skip("needs another machine", allow_module_level=True)
"""

MANY_SKIPS = """
import pytest

@pytest.mark.parametrize("number", range(4))
def test_on_the_moon(number):
    pytest.skip("needs a moon")
"""

DETACHING = """
import os, subprocess, sys

def test_starts_a_daemon():
    # The middle process ends at once, so that the last one is nobody's child any more.
    start = "import subprocess as s; s.Popen(['sleep', '60'], stdout=s.DEVNULL, stderr=s.DEVNULL)"
    subprocess.run([sys.executable, "-c", start], check=True)
"""

CRASHING = (
    DETACHING
    + """
def test_takes_its_worker_along():
    os._exit(3)
"""
)

HOME = """
import os
from pathlib import Path

def test_home(pytestconfig):
    # Of the run, not of a worker: its folder has a longer name, and a socket's path must be short.
    base = os.environ["RUN_FOLDER"] + "/"
    assert os.environ["HOME"].startswith(base) and Path.home().is_dir()
    assert os.environ["GENIE_STATE_DIR"].startswith(base)
    assert len(os.environ["GENIE_STATE_DIR"].removeprefix(base)) <= len("s/1/9999/state")
    ours = [name for name in os.environ if name.startswith(("GENIE_", "XDG_"))]
    assert ours == ["GENIE_STATE_DIR", "GENIE_AGENT_COMPILE_AHEAD", "GENIE_CONTROLLER_COMPILE_AHEAD"]
    Path("~/touched").expanduser().touch()

def test_a_home_of_its_own():
    assert list(Path.home().iterdir()) == []
"""


STUCK = """
import pytest, time

@pytest.mark.timeout(0.2)
def test_stuck():
    time.sleep(50)
"""

LOGGING = """
import logging
log = logging.getLogger("genie.part")

def test_starts_logging_like_a_program():
    logging.getLogger("genie").propagate = False
    logging.getLogger("genie").setLevel("ERROR")
    logging.getLogger().handlers.clear()

def test_captures(caplog):
    log.warning("seen")
    assert caplog.messages == ["seen"]
    assert logging.getLogger("genie").propagate
"""

WORKERS = ("-n", "2", "--dist", "loadfile", "--no-loadscope-reorder", "--max-worker-restart", "0")


@dataclass(frozen=True)
class Outcome:
    status: int
    text: str

    def part(self, heading: str) -> str:
        """What stands between this heading and the next."""
        after = self.text.partition(f" {heading} ")[2].partition("\n")[2]
        return after.partition("\n__")[0].partition("\n==")[0]

    def named(self, verdict: str) -> list[str]:
        """The tests that are listed as FAILED or ERROR."""
        return sorted(re.findall(rf"^{verdict} \S+::(\w+)", self.text, re.MULTILINE))


def run_suite(folder: Path, files: dict[str, str], options: tuple[str, ...], **environ: str) -> Outcome:
    for name, code in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(code)
    (folder / "shared.py").write_text(SHARED)
    clean = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("GENIE_", "COV_", "PYTEST_"))
    }
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", *options]
    command += ["-p", "no:cacheprovider", "-p", "no:hypothesispytest"]
    command += [f"--config-file={ROOT / 'pyproject.toml'}", f"--rootdir={folder}"]
    done = subprocess.run(
        [*command, f"--basetemp={folder / 'b'}", *files],
        cwd=folder,
        env={**clean, "PYTHONPATH": f"{ROOT}{os.pathsep}{folder}", **environ},
        capture_output=True,
        text=True,
        timeout=60,
        stdin=subprocess.DEVNULL,
    )
    return Outcome(done.returncode, done.stdout + done.stderr)


@pytest.fixture(scope="module", params=[(), WORKERS], ids=["one_process", "workers"])
def options(request: pytest.FixtureRequest) -> tuple[str, ...]:
    return tuple(request.param)


# --- what a test leaves behind ----------------------------------------------------------------


@pytest.fixture(scope="module")
def untidy(options: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    files = {"test_leaking.py": LEAKING, "test_stuck.py": STUCK}
    return run_suite(tmp_path_factory.mktemp("untidy"), files, options)


LEAKS = {
    "test_thread": "thread 'left-thread'",
    "test_own_daemon": "thread 'genie-left'",
    "test_task": "task 'left-task'",
    "test_socket": "socket addr(ip='127.0.0.1'",
    "test_child": "left-child",
    "test_unreaped_child": "nobody waited for it",
    "test_no_reason": "leaks_allowed needs a reason",
}


@pytest.mark.parametrize("test", LEAKS)
def test_a_leak_fails_the_test_that_leaked_and_is_named(untidy: Outcome, test: str) -> None:
    assert LEAKS[test] in untidy.part(f"ERROR at teardown of {test}"), untidy.text


def test_a_leak_does_not_fail_the_tests_after_it(untidy: Outcome) -> None:
    assert untidy.status == 1
    assert untidy.named("ERROR") == sorted(LEAKS), untidy.text


def test_a_stuck_test_ends_at_its_deadline(untidy: Outcome) -> None:
    assert "test_stuck" in untidy.named("FAILED"), untidy.text
    assert "Timeout" in untidy.part("test_stuck")


def test_what_session_fixtures_hold_is_not_blamed_on_a_test(session_socket: socket.socket) -> None:
    assert session_socket.fileno() > 0  # the check is what happens after this test


@pytest.fixture(scope="session")
def session_socket() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def test_a_detached_process_is_named_ended_and_fails_the_run(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    outcome = run_suite(tmp_path, {"test_detaching.py": DETACHING}, options)
    assert outcome.status == 1, outcome.text
    assert "1 passed" in outcome.text, "the run fails, not the test, which is long past"
    _check_named_and_ended(outcome, "test_detaching.py::test_starts_a_daemon")


def test_a_test_that_takes_its_worker_along_ends_the_run_and_what_it_left_is_found(tmp_path: Path) -> None:
    outcome = run_suite(tmp_path, {"test_crashing.py": CRASHING, "test_tidy.py": TIDY}, WORKERS)
    assert outcome.status != 0
    assert outcome.named("FAILED") == ["test_takes_its_worker_along"], outcome.text
    _check_named_and_ended(outcome, "test_crashing.py::test_starts_a_daemon")


def _check_named_and_ended(outcome: Outcome, test: str) -> None:
    line = outcome.part("still running after the tests")
    assert f"(sleep 60), started by {test}" in line, outcome.text
    wait_until(lambda: not _alive(int(line.split()[1])), what="the end of the process")


def _alive(pid: int) -> bool:
    """Neither gone nor a zombie that its new parent has yet to reap."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


# --- what is left out, and what tests see -----------------------------------------------------


@pytest.fixture(scope="module")
def orderly(options: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    files = {
        "test_far.py": SKIPPED_FILE,
        "test_farther.py": SKIPPED_FILE,
        "test_home.py": HOME,
        "test_logging.py": LOGGING,
        "test_moon.py": MANY_SKIPS,
        "test_skipping.py": SKIPPING,
        "test_tidy.py": TIDY,
    }
    folder = tmp_path_factory.mktemp("orderly")
    environ = {"GENIE_MASTER_ADDR": "elsewhere", "XDG_STATE_HOME": "/nowhere"}
    return run_suite(folder, files, options, RUN_FOLDER=str(folder / "b"), **environ)


def test_what_wider_fixtures_hold_is_not_blamed_on_a_test(orderly: Outcome) -> None:
    assert orderly.named("ERROR") == []
    assert orderly.status == 0, orderly.text


def test_tests_see_nothing_of_the_user(orderly: Outcome) -> None:
    assert {"test_home", "test_a_home_of_its_own"}.isdisjoint(orderly.named("FAILED")), orderly.text


def test_logging_is_given_back_as_it_was(orderly: Outcome) -> None:
    assert "test_captures" not in orderly.named("FAILED"), orderly.text


def test_a_skip_is_listed_by_name_with_its_reason(orderly: Outcome) -> None:
    assert orderly.part("left out").splitlines() == [
        "test_far.py: needs another machine",
        "test_farther.py: needs another machine",
        "test_moon.py (4 tests): needs a moon",
        "test_skipping.py::test_module: needs the module no_such_module.part (pip: no-such-wheel)",
        "test_skipping.py::test_program: needs no-such-program (Debian: no-such-package)",
    ], orderly.text
    assert orderly.status == 0, "nobody asked for everything"


@pytest.mark.parametrize("skipping", [MANY_SKIPS, SKIPPED_FILE], ids=["tests", "file"])
def test_a_skip_fails_the_run_when_everything_is_required(
    tmp_path: Path, options: tuple[str, ...], skipping: str
) -> None:
    files = {"tests/gpu/test_moon.py": MANY_SKIPS, "tests/other/test_it.py": skipping}
    outcome = run_suite(tmp_path, files, options, GENIE_TEST_REQUIRE_ALL="1")
    assert outcome.status == 1, outcome.text
    assert "tests/other/test_it.py" in outcome.part("left out")


def test_only_tests_of_gpus_may_be_left_out_when_everything_is_required(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    files = {"tests/gpu/test_far.py": SKIPPED_FILE, "tests/gpu/test_moon.py": MANY_SKIPS}
    outcome = run_suite(tmp_path, files, options, GENIE_TEST_REQUIRE_ALL="1")
    assert outcome.part("left out").splitlines() == [
        "tests/gpu/test_far.py: needs another machine",
        "tests/gpu/test_moon.py (4 tests): needs a moon",
    ]
    assert outcome.status == 0, outcome.text


def test_property_tests_have_no_deadline() -> None:
    assert hypothesis.settings.default is not None
    assert hypothesis.settings.default.deadline is None


def test_make_shares_out_the_whole_suite_and_keeps_a_part_of_it_together() -> None:
    make = require_program("make", package="make")
    # Not what a `make test ARGS=...` that runs this very test hands down.
    clean = {name: os.environ[name] for name in os.environ if name != "ARGS" and "MAKE" not in name}

    def printed(*arguments: str) -> str:
        command = [make, "-C", str(ROOT), "--dry-run", "--no-print-directory", *arguments]
        return subprocess.run(command, env=clean, capture_output=True, text=True, timeout=30).stdout

    for target in ("test", "coverage"):
        assert " ".join(WORKERS[2:]) in printed(target)
        assert "--dist" not in printed(target, "ARGS=tests/test_config.py -k port")


# --- waiting ----------------------------------------------------------------------------------


def test_the_longest_files_come_first(pytestconfig: pytest.Config) -> None:
    longest = [ROOT / name for name in conftest.LONGEST_FIRST]
    assert [path for path in longest if not path.is_file()] == []
    others = [ROOT / "tests" / "test_a.py", ROOT / "tests" / "test_b.py"]
    items: list[Any] = [SimpleNamespace(path=path) for path in (others[0], *reversed(longest), others[1])]
    conftest.pytest_collection_modifyitems(pytestconfig, items)
    assert [item.path for item in items] == [*longest, *others]


async def test_waiting_returns_what_came() -> None:
    answers = iter([0, "", "here"])

    async def ask() -> object:
        return next(answers)

    assert await until(ask, timeout_s=5) == "here"
    answers = iter([None, [1]])
    assert await until(lambda: next(answers), timeout_s=5) == [1]
    assert wait_until(lambda: 7, timeout_s=5) == 7


async def test_waiting_gives_up_with_what_it_waited_for() -> None:
    with pytest.raises(pytest.fail.Exception, match=r"waited 0\.01 s for: a blue moon"):
        await until(lambda: False, timeout_s=0.01, what="a blue moon")
    with pytest.raises(pytest.fail.Exception, match="a blue moon"):
        wait_until(lambda: False, timeout_s=0.01, what="a blue moon")


async def test_waiting_lets_through_what_the_question_raises() -> None:
    def ask() -> None:
        raise TimeoutError("of the question itself")

    with pytest.raises(TimeoutError, match="of the question itself"):
        await until(ask, timeout_s=5)
