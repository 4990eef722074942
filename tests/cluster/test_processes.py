"""Records of processes: they find and end the one that was meant, and never another."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from genie.cluster import processes
from tests.waiting import wait_until

Sleeper = subprocess.Popen[bytes]


@pytest.fixture
def sleeper() -> Iterator[Sleeper]:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        yield process
        process.kill()


def test_a_record_is_private_and_comes_back_as_it_was(tmp_path: Path, sleeper: Sleeper) -> None:
    written = processes.record_process(tmp_path, "agent", sleeper.pid, ready=True)
    assert written == processes.read_record(tmp_path, "agent")
    path = tmp_path / "run" / "agent.json"
    assert path.stat().st_mode & 0o777 == 0o600
    processes.forget_record(tmp_path, "agent")
    assert processes.read_record(tmp_path, "agent") is None


def test_a_process_that_has_ended_is_not_found(tmp_path: Path, sleeper: Sleeper) -> None:
    processes.record_process(tmp_path, "agent", sleeper.pid)
    sleeper.kill()
    wait_until(lambda: processes.read_record(tmp_path, "agent") is None)  # still a zombie here
    sleeper.wait()
    assert processes.record_process(tmp_path, "agent", sleeper.pid) is None


async def test_a_pid_that_someone_else_has_now_is_never_signalled(tmp_path: Path, sleeper: Sleeper) -> None:
    record = processes.record_process(tmp_path, "agent", sleeper.pid)
    assert record is not None
    path = tmp_path / "run" / "agent.json"
    body = json.loads(path.read_text())
    path.write_text(json.dumps(body | {"start": body["start"] + "1"}))
    assert processes.read_record(tmp_path, "agent") is None
    recycled = processes.ProcessRecord(
        name="agent", mark=processes.ProcessMark(record.pid, record.mark.start + "1")
    )
    await processes.end_process(recycled, grace_s=0)
    assert sleeper.poll() is None


@pytest.mark.parametrize("text", ["", "{", "[]", '{"pid": "x"}', '{"pid": 1}'])
def test_a_record_that_cannot_be_read_counts_as_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "agent.json").write_text(text)
    assert processes.read_record(tmp_path, "agent") is None


async def test_a_process_that_ignores_sigterm_is_killed_after_the_grace(tmp_path: Path) -> None:
    code = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as stubborn:  # noqa: ASYNC220
        assert stubborn.stdout is not None
        stubborn.stdout.readline()
        record = processes.record_process(tmp_path, "agent", stubborn.pid)
        assert record is not None
        await processes.end_process(record, grace_s=0.2)
        assert stubborn.wait(5) == -signal.SIGKILL


async def test_a_process_that_obeys_is_not_killed(tmp_path: Path, sleeper: Sleeper) -> None:
    record = processes.record_process(tmp_path, "agent", sleeper.pid)
    assert record is not None
    await processes.end_process(record, grace_s=10)
    assert sleeper.wait(5) == -signal.SIGTERM


def test_the_last_lines_of_a_log_leave_empty_ones_out(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_text("".join(f"line {number}\n\n" for number in range(1000)))
    assert processes.last_lines(log, count=2) == ["line 998", "line 999"]
    assert processes.last_lines(tmp_path / "none.log") == []


def test_our_own_process_is_alive() -> None:
    assert processes.ProcessMark.of(os.getpid()) is not None
