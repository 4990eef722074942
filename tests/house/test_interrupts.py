"""An interrupted test run leaves no process, with one or two signals, in one process or with workers.

The suites start a cluster with controller and agent, a detached process, and, as root, a node of the grid's
testbed.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from tests.house.small_suites import WORKERS, make_suite_environment, write_suite_and_make_command
from tests.leaks import kill_processes, processes_of_run
from tests.needs import require_namespaces, require_program
from tests.waiting import wait_until

WAITING = """
import asyncio, os, time
from pathlib import Path
import pytest
from tests.integration.conftest import shared_cluster

async def test_waits(shared_cluster):
    Path(os.environ["READY"]).touch()
    await asyncio.sleep(600)
"""

STUBBORN = """
import os, subprocess, sys, time
from pathlib import Path
import pytest

@pytest.fixture(scope="session")
def stubborn():
    child = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    start = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {child!r}])"
    subprocess.run([sys.executable, "-c", start], check=True)  # detached: its parent has ended
    yield subprocess.Popen([sys.executable, "-c", child])
    Path(os.environ["READY"] + "-ending").touch()
    time.sleep(600)

def test_waits(stubborn):
    Path(os.environ["READY"]).touch()
    time.sleep(600)
"""

NODE = """
import asyncio, os, time
from pathlib import Path
import pytest
from tests.grid.testbed import SshTestbed

@pytest.fixture(scope="session")
def node(tmp_path_factory):
    with SshTestbed(tmp_path_factory.mktemp("testbed") / "nodes", count=1) as testbed:
        yield testbed.nodes[0]

def test_waits(node):
    # A detached process with the environment of the node.
    node.run(f"FAKE_NVML_STATE={node.folder}/nvml.state setsid sleep 600 >/dev/null 2>&1 </dev/null &")
    Path(os.environ["READY"]).touch()
    time.sleep(600)
"""

HANDLES_SIGTERM = """
import asyncio, os, signal
from pathlib import Path

async def test_handles_signals():
    received = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, received.set)
    Path(os.environ["READY"]).touch()
    await received.wait()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.remove_signal_handler(number)

def test_default_handling_is_restored():
    signal.raise_signal(signal.SIGTERM)
    raise AssertionError("still running")
"""

FORKING = """
import os, signal, subprocess, sys, time
import pytest

def test_child_has_the_default_signals():
    code = "from signal import *; print(*(getsignal(n) == SIG_DFL for n in (SIGHUP, SIGQUIT, SIGTERM)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.split() == ["True"] * 3

def test_child_can_be_interrupted():
    child = subprocess.Popen([sys.executable, "-c", "print(flush=True); import time; time.sleep(60)"],
                             stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    with child:
        child.stdout.readline()
        child.send_signal(signal.SIGINT)
        assert child.wait(30) == -signal.SIGINT

def test_interrupt_raises():
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)

def test_fork_ends_on_sigterm():
    pid = os.fork()
    if not pid:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGTERM
"""

both = pytest.mark.parametrize("options", [(), WORKERS], ids=["one_process", "workers"])


@contextmanager
def running_suite(folder: Path, code: str, options: tuple[str, ...]) -> Iterator[subprocess.Popen[bytes]]:
    """Runs the suite in its own process group and yields it when its test is waiting."""
    ready = folder / "ready"
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            write_suite_and_make_command(folder, {"test_it.py": code}, options),
            cwd=folder,
            env=make_suite_environment(folder, READY=str(ready)),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        wait_until(lambda: ready.exists() or process.poll() is not None, timeout_s=60, what="the test")
        assert process.poll() is None, read_suite_log(folder)
        yield process
    finally:
        kill_processes(frozenset(list_started_processes(process, folder)))
        process.kill()
        process.wait()


def read_suite_log(folder: Path) -> str:
    return (folder / "log").read_text()


def list_started_processes(process: subprocess.Popen[bytes], folder: Path) -> dict[int, str]:
    """All processes that the suite has started."""
    found = processes_of_run(folder / "b")
    if process.poll() is None:
        for child in psutil.Process(process.pid).children(recursive=True):
            with suppress(psutil.Error):  # it has ended since
                found[child.pid] = " ".join(child.cmdline())
    return found


def check_processes_have_ended(started: dict[int, str], folder: Path) -> None:
    left = {pid: started[pid] for pid in started if is_alive(pid)} | processes_of_run(folder / "b")
    assert left == {}, read_suite_log(folder)


def is_alive(pid: int) -> bool:
    """Whether the process exists and is not a zombie."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize(
    ("method", "options"),
    [("ctrl-c", WORKERS), ("ctrl-c", ()), ("sigterm", WORKERS), ("sigterm", ())],
    ids=["ctrl-c_workers", "ctrl-c_one_process", "sigterm_workers", "sigterm_one_process"],
)
def test_interrupted_run_leaves_no_cluster(tmp_path: Path, method: str, options: tuple[str, ...]) -> None:
    with running_suite(tmp_path, WAITING, options) as process:
        started = list_started_processes(process, tmp_path)
        assert any("genie.controller" in line for line in started.values()), started
        assert any("genie.agent" in line for line in started.values()), started
        if method == "ctrl-c":
            os.killpg(process.pid, signal.SIGINT)
        else:
            process.terminate()
        code = process.wait(60)
        check_processes_have_ended(started, tmp_path)
    assert code == (2 if method == "ctrl-c" else 143), read_suite_log(tmp_path)
    if not options:  # workers have 10 s to tear fixtures down
        assert "processes still running after the tests" not in read_suite_log(tmp_path)


@both
def test_second_signal_ends_the_run_and_kills_its_processes(tmp_path: Path, options: tuple[str, ...]) -> None:
    with running_suite(tmp_path, STUBBORN, options) as process:
        started = list_started_processes(process, tmp_path)
        process.terminate()
        wait_until((tmp_path / "ready-ending").exists, timeout_s=30, what="the end of the fixture")

        def ended() -> bool:
            process.terminate()  # repeated until it counts as a second signal
            return process.poll() is not None

        wait_until(ended, timeout_s=30, what="the end of the run")
        wait_until(lambda: not any(map(is_alive, started)), timeout_s=10, what="the end of its processes")
        check_processes_have_ended(started, tmp_path)
    assert process.returncode == 143, read_suite_log(tmp_path)
    assert len(started) >= 2


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs pidfd_open (Linux)")
def test_workers_end_all_processes_when_the_main_process_is_killed(tmp_path: Path) -> None:
    with running_suite(tmp_path, STUBBORN, WORKERS) as process:
        started = list_started_processes(process, tmp_path)
        assert len(started) >= 4, started  # two workers, the child and the detached process
        process.kill()
        process.wait(30)
        wait_until(lambda: not any(map(is_alive, started)), timeout_s=30, what="the end of its processes")
        check_processes_have_ended(started, tmp_path)


def test_interrupted_run_leaves_no_grid_node(tmp_path: Path) -> None:
    require_namespaces("mount", "uts")
    require_program("sshd", package="openssh-server")
    with running_suite(tmp_path, NODE, ()) as process:
        started = list_started_processes(process, tmp_path)
        assert any("sshd" in line for line in started.values()), started
        assert any("sleep 600" in line for line in started.values()), started
        process.terminate()
        assert process.wait(60) == 143, read_suite_log(tmp_path)
        check_processes_have_ended(started, tmp_path)


def test_sigterm_handled_by_a_test_ends_the_run_after_the_test(tmp_path: Path) -> None:
    """The signal may be meant for the test, so the run ends before the next test."""
    with running_suite(tmp_path, HANDLES_SIGTERM, ()) as process:
        process.terminate()
        assert process.wait(60) == 143, read_suite_log(tmp_path)
    assert "1 passed" in read_suite_log(tmp_path)


@both
def test_run_in_the_background_resets_ignored_signals(tmp_path: Path, options: tuple[str, ...]) -> None:
    """A shell ignores signals in background processes, and so does nohup."""
    suite = write_suite_and_make_command(tmp_path, {"test_it.py": FORKING}, options)
    done = subprocess.run(
        ["sh", "-c", "trap '' INT QUIT HUP TERM; exec \"$@\"", "sh", *suite],
        cwd=tmp_path,
        env=make_suite_environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr
