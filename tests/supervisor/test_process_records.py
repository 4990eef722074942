"""Process records identify one process and never another."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from genie.supervisor import process_records
from tests.waiting import wait_until

Sleeper = subprocess.Popen[bytes]


@pytest.fixture
def sleeping_process() -> Iterator[Sleeper]:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        yield process
        process.kill()


def test_record_is_private_and_round_trips(tmp_path: Path, sleeping_process: Sleeper) -> None:
    written = process_records.record_process(tmp_path, "agent", sleeping_process.pid, ready=True)
    assert written == process_records.read_process_record(tmp_path, "agent")
    path = tmp_path / "run" / "agent.json"
    assert path.stat().st_mode & 0o777 == 0o600
    process_records.remove_process_record(tmp_path, "agent")
    assert process_records.read_process_record(tmp_path, "agent") is None


def test_read_record_ignores_an_ended_process(tmp_path: Path, sleeping_process: Sleeper) -> None:
    process_records.record_process(tmp_path, "agent", sleeping_process.pid)
    sleeping_process.kill()
    wait_until(lambda: process_records.read_process_record(tmp_path, "agent") is None)  # still a zombie here
    sleeping_process.wait()
    assert process_records.record_process(tmp_path, "agent", sleeping_process.pid) is None


async def test_reused_pid_is_never_signalled(tmp_path: Path, sleeping_process: Sleeper) -> None:
    record = process_records.record_process(tmp_path, "agent", sleeping_process.pid)
    assert record is not None
    path = tmp_path / "run" / "agent.json"
    body = json.loads(path.read_text())
    path.write_text(json.dumps(body | {"start": body["start"] + "1"}))
    assert process_records.read_process_record(tmp_path, "agent") is None
    recycled = process_records.ProcessRecord(
        name="agent", identity=process_records.ProcessIdentity(record.pid, record.identity.start_mark + "1")
    )
    await process_records.end_process(recycled, grace_s=0)
    assert sleeping_process.poll() is None


@pytest.mark.parametrize("text", ["", "{", "[]", '{"pid": "x"}', '{"pid": 1}'])
def test_invalid_record_is_ignored(tmp_path: Path, text: str) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "agent.json").write_text(text)
    assert process_records.read_process_record(tmp_path, "agent") is None


async def test_process_that_ignores_sigterm_is_killed_after_the_grace_period(tmp_path: Path) -> None:
    code = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as stubborn:  # noqa: ASYNC220
        assert stubborn.stdout is not None
        stubborn.stdout.readline()
        record = process_records.record_process(tmp_path, "agent", stubborn.pid)
        assert record is not None
        await process_records.end_process(record, grace_s=0.2)
        assert stubborn.wait(30) == -signal.SIGKILL


async def test_process_that_ends_on_sigterm_is_not_killed(tmp_path: Path, sleeping_process: Sleeper) -> None:
    record = process_records.record_process(tmp_path, "agent", sleeping_process.pid)
    assert record is not None
    await process_records.end_process(record, grace_s=10)
    assert sleeping_process.wait(30) == -signal.SIGTERM


def test_last_lines_skips_empty_lines(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_text("".join(f"line {number}\n\n" for number in range(1000)))
    assert process_records.read_last_lines(log, count=2) == ["line 998", "line 999"]
    assert process_records.read_last_lines(tmp_path / "none.log") == []


def test_running_process_has_an_identity() -> None:
    assert process_records.ProcessIdentity.of_pid(os.getpid()) is not None
