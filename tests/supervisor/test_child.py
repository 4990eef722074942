"""Child processes: log rotation, exit errors, restart backoff."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from genie.errors import LaunchError
from genie.supervisor import child as children
from genie.supervisor import process_records
from genie.supervisor.child import (
    RESTART_BACKOFF_S_MAX,
    Child,
    python_module_command,
    restart_backoff_s,
    rotate_log_if_large,
)
from tests.waiting import until

PROGRAM = """
import os, pathlib, sys, time
where = pathlib.Path(sys.argv[1])
with where.open("a") as file:
    file.write(f"{os.getpid()}\\n")
print("hello from the child", flush=True)
if len(sys.argv) > 2:
    sys.exit(int(sys.argv[2]))
time.sleep(60)
"""


@pytest.fixture
async def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Child]:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "stand_in.py").write_text(PROGRAM)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "code"))
    made = Child("agent", command=python_module_command("stand_in"), state_dir=tmp_path)
    yield made
    await made.stop(grace_s=5)


def read_started_pids(tmp_path: Path) -> list[int]:
    path = tmp_path / "pids"
    return [int(line) for line in path.read_text().split()] if path.exists() else []


async def test_child_has_its_own_session_a_record_and_a_private_log(child: Child, tmp_path: Path) -> None:
    child.start([str(tmp_path / "pids")])
    await until(lambda: read_started_pids(tmp_path))
    assert child.pid is not None
    assert os.getsid(child.pid) == child.pid
    record = process_records.read_process_record(tmp_path, "agent")
    assert record is not None
    assert record.pid == child.pid
    assert child.log_path.stat().st_mode & 0o777 == 0o600
    await until(lambda: "hello from the child" in child.log_path.read_text())


async def test_child_whose_record_cannot_be_written_is_started_once_and_ended(
    child: Child, tmp_path: Path
) -> None:
    run = tmp_path / process_records.PROCESS_RECORDS_FOLDER
    run.write_text("stands in for a full disk: no record can be written")
    child.start([str(tmp_path / "pids")])
    watching = asyncio.create_task(child.restart_after_crashes(lambda reason: None))
    await until(lambda: read_started_pids(tmp_path))
    assert process_records.read_process_record(tmp_path, "agent") is None
    run.unlink()
    await until(
        lambda: process_records.read_process_record(tmp_path, "agent"), what="the record is written later"
    )
    assert read_started_pids(tmp_path) == [child.pid]
    watching.cancel()
    await child.stop(grace_s=5)
    assert not process_records.make_process_record("agent", read_started_pids(tmp_path)[0])


async def test_check_alive_quotes_only_the_log_of_the_last_start(child: Child, tmp_path: Path) -> None:
    child.log_path.parent.mkdir()
    child.log_path.write_text("error: of an earlier start\n")
    child.start([str(tmp_path / "pids"), "3"])
    await until(lambda: child.exit_code() is not None)
    with pytest.raises(LaunchError, match=r"exit code 3; its last output:\n  hello from the child") as caught:
        child.check_not_exited()
    assert "earlier" not in str(caught.value)


async def test_child_imports_nothing_from_the_current_directory(
    child: Child, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pathlib.py").write_text("raise SystemExit('someone else has put this here')")
    monkeypatch.chdir(tmp_path)
    child.start([str(tmp_path / "pids")])
    await until(lambda: read_started_pids(tmp_path))
    child.check_not_exited()


async def test_stop_ends_the_child_and_removes_its_record(child: Child, tmp_path: Path) -> None:
    child.start([str(tmp_path / "pids")])
    await child.stop(grace_s=5)
    assert child.exit_code() == -signal.SIGTERM
    assert process_records.read_process_record(tmp_path, "agent") is None
    await child.stop(grace_s=5)


async def test_child_is_not_restarted_after_stop_however_it_ended(tmp_path: Path) -> None:
    child = Child(
        "agent", command=["sh", "-c", "trap '' TERM; echo ready; exec sleep 1000"], state_dir=tmp_path
    )
    child.start([])
    await until(child.last_log_lines)
    async with asyncio.timeout(30), asyncio.TaskGroup() as group:
        group.create_task(child.restart_after_crashes(pytest.fail))
        await child.stop(grace_s=0.5)
    assert child.exit_code() == -signal.SIGKILL


async def test_etcd_is_named_without_an_article(tmp_path: Path) -> None:
    child = Child("etcd", command=["false"], state_dir=tmp_path)
    child.start([])
    await until(lambda: child.exit_code() is not None)
    with pytest.raises(LaunchError, match=r"^etcd ended with exit code 1"):
        child.check_not_exited()
    await child.stop(grace_s=5)


async def test_check_alive_quotes_the_log_of_a_crashed_child(child: Child, tmp_path: Path) -> None:
    child.start([str(tmp_path / "pids"), "3"])
    await until(lambda: child.exit_code() is not None)
    with pytest.raises(LaunchError, match=r"the agent ended with exit code 3.*\n  hello from the child"):
        child.check_not_exited()


async def test_crashed_child_is_restarted_with_the_same_arguments(child: Child, tmp_path: Path) -> None:
    crashes: list[str] = []
    child.start([str(tmp_path / "pids")])
    await until(lambda: read_started_pids(tmp_path))
    async with asyncio.TaskGroup() as group:
        watch = group.create_task(child.restart_after_crashes(crashes.append))
        os.kill(read_started_pids(tmp_path)[0], signal.SIGKILL)
        await until(lambda: len(read_started_pids(tmp_path)) == 2)
        watch.cancel()
    assert read_started_pids(tmp_path)[1] == child.pid
    assert ["SIGKILL" in line for line in crashes] == [True]


@pytest.mark.parametrize("number", [signal.SIGTERM, None])
async def test_stopped_child_is_not_restarted(
    child: Child, tmp_path: Path, number: signal.Signals | None
) -> None:
    child.start([str(tmp_path / "pids"), *([] if number else ["0"])])
    await until(lambda: read_started_pids(tmp_path))
    if number is not None:
        os.kill(read_started_pids(tmp_path)[0], number)
    async with asyncio.timeout(30):
        await child.restart_after_crashes(pytest.fail)
    assert len(read_started_pids(tmp_path)) == 1


def test_restart_delay_doubles_up_to_five_seconds() -> None:
    now, crashes, delays = 0.0, [], []
    for _ in range(40):
        crashes.append(now)
        delays.append(restart_backoff_s(crashes, now=now))
        now += delays[-1]
    assert delays[:6] == pytest.approx([0.2, 0.4, 0.8, 1.6, 3.2, 5.0])
    assert set(delays[6:]) == {RESTART_BACKOFF_S_MAX}


def test_restart_delay_ignores_old_crashes() -> None:
    assert restart_backoff_s([0.0, 1.0, 1000.0], now=1000.0) == restart_backoff_s([1000.0], now=1000.0)


def test_oversized_log_is_rotated_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children, "CHILD_LOG_BYTES_MAX", 100)
    log = tmp_path / "agent.log"
    with log.open("ab") as held_by_child:
        held_by_child.write(b"x" * 101)
        held_by_child.flush()
        rotate_log_if_large(log)
        held_by_child.write(b"next\n")
    assert log.read_bytes() == b"next\n"
    assert (tmp_path / "agent.log.1").read_bytes() == b"x" * 101
    rotate_log_if_large(log)
    assert log.read_bytes() == b"next\n"
    rotate_log_if_large(tmp_path / "none.log")
