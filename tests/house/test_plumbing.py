"""The plumbing of the tests themselves: skips are listed, leaks are caught, the user's files are safe.

Each scenario is a small suite that runs in a child pytest with this repository's conftest.py.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.house.sources import ROOT
from tests.waiting import until, wait_until

LEAKING = """
import asyncio, os, socket, subprocess, sys, threading
import pytest
import tests.leaks

tests.leaks._SETTLE_S = 0.2  # nothing here goes away by itself
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

MANY_SKIPS = """
import pytest

@pytest.mark.parametrize("number", range(4))
def test_on_the_moon(number):
    pytest.skip("needs a moon")
"""

LATE = """
import subprocess, sys

def test_starts_a_daemon():
    # The middle process ends at once, so that the last one is nobody's child any more.
    start = "import subprocess as s; s.Popen(['sleep', '60'], stdout=s.DEVNULL, stderr=s.DEVNULL)"
    subprocess.run([sys.executable, "-c", start], check=True)
"""

HOME = """
import os
from pathlib import Path

def test_home(tmp_path_factory):
    base = str(tmp_path_factory.getbasetemp())
    assert os.environ["HOME"].startswith(base) and Path.home().is_dir()
    assert os.environ["GENIE_STATE_DIR"].startswith(base)
    assert [name for name in os.environ if name.startswith(("GENIE_", "XDG_"))] == ["GENIE_STATE_DIR"]
    Path("~/touched").expanduser().touch()

def test_a_home_of_its_own():
    assert list(Path.home().iterdir()) == []
"""


@dataclass(frozen=True)
class Outcome:
    status: int
    text: str

    def part(self, heading: str) -> str:
        """What stands between this heading and the next."""
        after = self.text.partition(f" {heading} ")[2].partition("\n")[2]
        return after.partition("\n__")[0].partition("\n==")[0]


def run_suite(folder: Path, code: str, *, name: str = "test_scenario.py", **environ: str) -> Outcome:
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(code)
    clean = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("GENIE_", "COV_", "PYTEST_"))
    }
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider"]
    command += [
        f"--config-file={ROOT / 'pyproject.toml'}",
        f"--rootdir={folder}",
        f"--basetemp={folder / 'b'}",
    ]
    done = subprocess.run(
        [*command, str(file)],
        cwd=folder,
        env={**clean, "PYTHONPATH": str(ROOT), **environ},
        capture_output=True,
        text=True,
        timeout=60,
        stdin=subprocess.DEVNULL,
    )
    return Outcome(done.returncode, done.stdout + done.stderr)


@pytest.fixture(scope="module")
def leaking(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return run_suite(tmp_path_factory.mktemp("leaking"), LEAKING)


@pytest.mark.parametrize(
    ("test", "named"),
    [
        ("test_thread", "thread 'left-thread'"),
        ("test_own_daemon", "thread 'genie-left'"),
        ("test_task", "task 'left-task'"),
        ("test_socket", "socket addr(ip='127.0.0.1'"),
        ("test_child", "left-child"),
        ("test_unreaped_child", "nobody waited for it"),
        ("test_no_reason", "leaks_allowed needs a reason"),
    ],
)
def test_a_leak_fails_the_test_that_leaked_and_is_named(leaking: Outcome, test: str, named: str) -> None:
    assert named in leaking.part(f"ERROR at teardown of {test}"), leaking.text


def test_a_leak_does_not_fail_the_tests_after_it(leaking: Outcome) -> None:
    assert leaking.status == 1
    assert "9 passed, 7 errors" in leaking.text


def test_what_wider_fixtures_hold_is_not_blamed_on_a_test(tmp_path: Path) -> None:
    outcome = run_suite(tmp_path, TIDY)
    assert outcome.status == 0, outcome.text


@pytest.fixture(scope="session")
def session_socket() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def test_what_session_fixtures_hold_is_not_blamed_on_a_test(session_socket: socket.socket) -> None:
    assert session_socket.fileno() > 0  # the check is what happens after this test


def test_a_skip_is_listed_by_name_with_its_reason(tmp_path: Path) -> None:
    outcome = run_suite(tmp_path, SKIPPING)
    assert outcome.status == 0, outcome.text
    assert outcome.part("left out").splitlines() == [
        "test_scenario.py::test_program: needs no-such-program (Debian: no-such-package)",
        "test_scenario.py::test_module: needs the module no_such_module.part (pip: no-such-wheel)",
    ]


def test_a_skip_fails_the_run_when_everything_is_required(tmp_path: Path) -> None:
    outcome = run_suite(tmp_path, SKIPPING, GENIE_TEST_REQUIRE_ALL="1")
    assert outcome.status == 1
    assert "needs no-such-program" in outcome.part("left out")


def test_a_skipped_file_is_listed_too(tmp_path: Path) -> None:
    code = "import pytest\npytest.skip('needs another machine', allow_module_level=True)"
    outcome = run_suite(tmp_path, code, GENIE_TEST_REQUIRE_ALL="1")
    assert outcome.status == 1
    assert outcome.part("left out").startswith("test_scenario.py: needs another machine")


def test_many_skips_of_one_file_share_a_line(tmp_path: Path) -> None:
    outcome = run_suite(tmp_path, MANY_SKIPS)
    assert outcome.part("left out").splitlines() == ["test_scenario.py (4 tests): needs a moon"]


def test_only_tests_of_gpus_may_be_left_out_when_everything_is_required(tmp_path: Path) -> None:
    excused = run_suite(tmp_path, MANY_SKIPS, name="tests/gpu/test_moon.py", GENIE_TEST_REQUIRE_ALL="1")
    assert excused.part("left out").splitlines() == ["tests/gpu/test_moon.py (4 tests): needs a moon"]
    assert excused.status == 0, excused.text
    other = run_suite(tmp_path, MANY_SKIPS, name="tests/other/test_moon.py", GENIE_TEST_REQUIRE_ALL="1")
    assert other.status == 1


def test_a_detached_process_is_named_ended_and_fails_the_run(tmp_path: Path) -> None:
    outcome = run_suite(tmp_path, LATE)
    assert outcome.status == 1
    line = outcome.part("still running after the tests")
    assert "(sleep 60), started by test_scenario.py::test_starts_a_daemon" in line
    wait_until(lambda: not _alive(int(line.split()[1])), what="the end of the process")


def _alive(pid: int) -> bool:
    """Neither gone nor a zombie that its new parent has yet to reap."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_tests_see_nothing_of_the_user(tmp_path: Path) -> None:
    outcome = run_suite(tmp_path, HOME, GENIE_MASTER_ADDR="elsewhere", XDG_STATE_HOME="/nowhere")
    assert outcome.status == 0, outcome.text


def test_logging_is_given_back_as_it_was(tmp_path: Path) -> None:
    code = """
import logging
log = logging.getLogger("genie.part")

def test_starts_logging_like_a_program():
    logging.getLogger("genie").propagate = False
    logging.getLogger("genie").setLevel("ERROR")
    logging.getLogger().handlers.clear()

def test_captures(caplog):
    log.warning("seen")
    assert caplog.messages == ["seen"]
"""
    outcome = run_suite(tmp_path, code)
    assert outcome.status == 0, outcome.text


def test_a_stuck_test_ends_at_its_deadline(tmp_path: Path) -> None:
    code = "import pytest, time\n@pytest.mark.timeout(0.2)\ndef test_stuck():\n    time.sleep(50)"
    outcome = run_suite(tmp_path, code)
    assert outcome.status == 1
    assert "Timeout" in outcome.text


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
