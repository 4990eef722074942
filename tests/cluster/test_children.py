"""A child process: its log is bounded, its end explained, and a crash answered with a bounded restart."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from genie.cluster import children, processes
from genie.cluster.children import CRASH_WINDOW_S, CRASHES_MAX, Child, bound_log, restart_delay_s
from genie.errors import LaunchError
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
    made = Child("agent", module="stand_in", state_dir=tmp_path)
    yield made
    await made.stop(grace_s=5)


def started(tmp_path: Path) -> list[int]:
    path = tmp_path / "pids"
    return [int(line) for line in path.read_text().split()] if path.exists() else []


async def test_a_child_has_a_session_of_its_own_a_record_and_a_private_log(
    child: Child, tmp_path: Path
) -> None:
    child.start([str(tmp_path / "pids")])
    await until(lambda: started(tmp_path))
    assert child.pid is not None
    assert os.getsid(child.pid) == child.pid
    record = processes.read_record(tmp_path, "agent")
    assert record is not None
    assert record.pid == child.pid
    assert child.log_path.stat().st_mode & 0o777 == 0o600
    await until(lambda: "hello from the child" in child.log_path.read_text())


async def test_the_end_of_a_child_is_told_in_its_own_words_and_not_in_those_of_an_earlier_life(
    child: Child, tmp_path: Path
) -> None:
    child.log_path.parent.mkdir()
    child.log_path.write_text("error: of an earlier life\n")
    child.start([str(tmp_path / "pids"), "3"])
    await until(lambda: child.exit_code() is not None)
    with pytest.raises(LaunchError, match=r"exit code 3; it said:\n  hello from the child") as caught:
        child.check_alive()
    assert "earlier" not in str(caught.value)


async def test_a_child_imports_nothing_that_lies_in_the_current_directory(
    child: Child, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pathlib.py").write_text("raise SystemExit('someone else has put this here')")
    monkeypatch.chdir(tmp_path)
    child.start([str(tmp_path / "pids")])
    await until(lambda: started(tmp_path))
    child.check_alive()


async def test_stopping_ends_it_and_forgets_it(child: Child, tmp_path: Path) -> None:
    child.start([str(tmp_path / "pids")])
    await child.stop(grace_s=5)
    assert child.exit_code() == -signal.SIGTERM
    assert processes.read_record(tmp_path, "agent") is None
    await child.stop(grace_s=5)


async def test_a_child_that_died_is_an_error_with_its_last_words(child: Child, tmp_path: Path) -> None:
    child.start([str(tmp_path / "pids"), "3"])
    await until(lambda: child.exit_code() is not None)
    with pytest.raises(LaunchError, match=r"the agent ended with exit code 3.*\n  hello from the child"):
        child.check_alive()


async def test_a_crashed_child_is_started_again_with_the_same_arguments(child: Child, tmp_path: Path) -> None:
    told: list[str] = []
    child.start([str(tmp_path / "pids")])
    await until(lambda: started(tmp_path))
    async with asyncio.TaskGroup() as group:
        watch = group.create_task(child.watch(told.append))
        os.kill(started(tmp_path)[0], signal.SIGKILL)
        await until(lambda: len(started(tmp_path)) == 2)
        watch.cancel()
    assert started(tmp_path)[1] == child.pid
    assert ["SIGKILL" in line for line in told] == [True]


@pytest.mark.parametrize("number", [signal.SIGTERM, None])
async def test_a_child_that_someone_stopped_in_order_stays_stopped(
    child: Child, tmp_path: Path, number: signal.Signals | None
) -> None:
    child.start([str(tmp_path / "pids"), *([] if number else ["0"])])
    await until(lambda: started(tmp_path))
    if number is not None:
        os.kill(started(tmp_path)[0], number)
    async with asyncio.timeout(10):
        await child.watch(pytest.fail)
    assert len(started(tmp_path)) == 1


def test_the_delay_doubles_and_starts_are_at_most_so_many_in_a_window() -> None:
    now, crashes, starts = 0.0, [], []
    for _ in range(40):
        crashes.append(now)
        now += restart_delay_s(crashes, now=now)
        starts.append(now)
    assert starts[1] - starts[0] > starts[0]
    for first in starts:
        assert len([at for at in starts if first <= at < first + CRASH_WINDOW_S]) <= CRASHES_MAX + 1


def test_a_crash_long_ago_does_not_slow_the_next_start() -> None:
    assert restart_delay_s([0.0, 1.0, 1000.0], now=1000.0) == restart_delay_s([1000.0], now=1000.0)


def test_a_log_over_its_size_is_emptied_in_place_and_kept_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(children, "LOG_BYTES_MAX", 100)
    log = tmp_path / "agent.log"
    with log.open("ab") as held_by_child:
        held_by_child.write(b"x" * 101)
        held_by_child.flush()
        bound_log(log)
        held_by_child.write(b"next\n")
    assert log.read_bytes() == b"next\n"
    assert (tmp_path / "agent.log.1").read_bytes() == b"x" * 101
    bound_log(log)
    assert log.read_bytes() == b"next\n"
    bound_log(tmp_path / "none.log")
