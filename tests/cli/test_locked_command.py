"""`genie lock run` as a process, with a real controller: its exit codes, and how it ends its command."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from genie.model.tenant import TokenKind
from genie.tenancy.access import NO_PIN, SECRET_BYTES, new_token
from tests.cluster.locking_controller import LockingController
from tests.waiting import TIMEOUT_S, wait_until

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")


@pytest.fixture
def controller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LockingController]:
    with LockingController(tmp_path / "cluster") as started:
        assert started.running is not None
        monkeypatch.setenv("GENIE_MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("GENIE_MASTER_PORT", str(started.running.port))
        monkeypatch.setenv("GENIE_TOKEN", (started.running.state_dir / "owner.token").read_text())
        yield started


def start_lock_run(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "genie", "lock", "run", "l", *arguments]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def run_and_get_exit_code_and_messages(*arguments: str) -> tuple[int, str]:
    process = start_lock_run(*arguments)
    messages = process.communicate(timeout=TIMEOUT_S)[1]
    return process.returncode, messages


class DetachedSleeper:
    """A command that starts a process in a session of its own, which ignores SIGTERM."""

    def __init__(self, folder: Path) -> None:
        self._pid_file = folder / "detached.pid"
        self._command_file = folder / "command.pid"
        self.script = (
            f"echo $$ > {self._command_file}; "
            f'setsid sh -c \'trap "" TERM; echo $$ > {self._pid_file}.new; '
            f"mv {self._pid_file}.new {self._pid_file}; while true; do sleep 0.1; done' & "
            "sleep 60 & wait"
        )

    def wait_started(self) -> psutil.Process:
        wait_until(self._pid_file.exists)
        return psutil.Process(int(self._pid_file.read_text()))

    def read_command_pid(self) -> int:
        return int(self._command_file.read_text())


@pytest.fixture
def detached(tmp_path: Path) -> DetachedSleeper:
    return DetachedSleeper(tmp_path)


def has_ended(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


# --- exit codes -------------------------------------------------------------------------------


def test_the_exit_code_is_that_of_the_command(controller: LockingController) -> None:
    assert run_and_get_exit_code_and_messages("--", "sh", "-c", "exit 3") == (3, "")
    assert run_and_get_exit_code_and_messages("--", "sh", "-c", "kill -TERM $$") == (128 + signal.SIGTERM, "")
    code, messages = run_and_get_exit_code_and_messages("--", "./no-such-program")
    assert (code, messages) == (127, "genie: could not run './no-such-program': No such file or directory\n")
    _, messages = run_and_get_exit_code_and_messages("--", "\x1b[31m" + "x" * 5000)
    assert messages.startswith("genie: could not run '\\x1b[31mxxx") and len(messages) < 200


def test_a_lock_that_another_client_holds_has_its_own_exit_codes(controller: LockingController) -> None:
    assert controller.hold_as_another_client("l")
    code, messages = run_and_get_exit_code_and_messages("--timeout", "0", "--", "true")
    assert code == 75
    assert "could not acquire lock 'l' within 0 s: another client holds it" in messages
    code, messages = run_and_get_exit_code_and_messages("--timeout", "0.3", "--", "true")
    assert code == 124
    assert "waiting for lock l: another client holds it" in messages
    assert "could not acquire lock 'l' within 0.3 s: another client holds it" in messages


def test_the_timeout_includes_the_connection(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    token = new_token(TokenKind.OWNER, token_id="owner", secret=bytes(SECRET_BYTES), pin=NO_PIN)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("GENIE_STATE_DIR", str(tmp_path))
        monkeypatch.setenv("GENIE_MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("GENIE_MASTER_PORT", str(silent.getsockname()[1]))
        monkeypatch.setenv("GENIE_TOKEN", str(token))
        code, messages = run_and_get_exit_code_and_messages("--timeout", "0.2", "--", "true")
    assert (code, messages.splitlines()[0]) == (
        124,
        "genie: could not acquire lock 'l' within 0.2 s: the cluster did not reply in this time",
    )


# --- the end of the command -------------------------------------------------------------------


@linux_only
def test_a_detached_process_of_the_command_is_ended_when_the_lock_is_lost(
    controller: LockingController, detached: DetachedSleeper
) -> None:
    process = start_lock_run("--ttl", "1s", "--", "sh", "-c", detached.script)
    sleeper = detached.wait_started()
    controller.break_lock("l")
    _, messages = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 1
    assert "ending the command: lock l was lost" in messages
    assert has_ended(sleeper)


@linux_only
def test_all_processes_of_the_command_end_when_genie_is_killed(
    controller: LockingController, detached: DetachedSleeper
) -> None:
    process = start_lock_run("--", "sh", "-c", detached.script)
    sleeper = detached.wait_started()
    descendants = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    wait_until(lambda: all(map(has_ended, [*descendants, sleeper])))
    process.communicate(timeout=TIMEOUT_S)


@linux_only
def test_the_command_ends_when_its_guard_is_killed(
    controller: LockingController, detached: DetachedSleeper
) -> None:
    process = start_lock_run("--", "sh", "-c", detached.script)
    sleeper = detached.wait_started()
    command = psutil.Process(detached.read_command_pid())
    group = [command, *(each for each in command.children() if each != sleeper)]
    os.kill(command.ppid(), signal.SIGKILL)
    assert process.wait(TIMEOUT_S) == 128 + signal.SIGKILL
    wait_until(lambda: all(map(has_ended, group)))
    sleeper.kill()  # in another session: docs/LOCKS.md
    process.communicate(timeout=TIMEOUT_S)


def test_processes_that_the_command_leaves_running_are_not_ended(
    controller: LockingController, tmp_path: Path
) -> None:
    pid_file = tmp_path / "pid"
    script = f"sleep 60 </dev/null >/dev/null 2>&1 & echo $! > {pid_file}"
    assert run_and_get_exit_code_and_messages("--", "sh", "-c", script) == (0, "")
    left = psutil.Process(int(pid_file.read_text()))
    assert not has_ended(left)
    left.kill()
