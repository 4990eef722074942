"""The launcher: exits of shims, log files, leftovers."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import uvloop

from genie.agent import launcher, leftovers
from genie.agent.launcher import LaunchPlan, ShimLauncher
from genie.agent.logs import log_files_with_offsets, read_log_chunk
from genie.model.messages import ExitReport
from tests.waiting import until

RECORD = {"job_id": "j-1", "epoch": 3, "exit_code": 0, "reason": "exit code 0", "ended_at": 1.0}


def _make_plan(folder: Path) -> LaunchPlan:
    return LaunchPlan(
        job_id="j-1",
        epoch=3,
        argv=("true",),
        env={},
        directory=folder,
        work_dir=folder,
        log_file_bytes_max=4096,
        log_files_max=1,
        grace_s=0.0,
        deadman_grace_s=0.0,
    )


@pytest.mark.parametrize("factory", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_exit_is_received_if_the_shim_left_a_line_unread(
    factory: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends: list[int] = []

    def spawn(plan: LaunchPlan, control_fd: int, until_s: float, **_: object) -> subprocess.Popen[bytes]:
        ends.append(os.dup(control_fd))
        return subprocess.Popen(["true"])

    monkeypatch.setattr(launcher, "_spawn_shim", spawn)

    async def receive_exits() -> list[ExitReport]:
        shims = ShimLauncher()
        await shims.start_job(_make_plan(tmp_path), deadman_expiry_s=1.0)
        await asyncio.sleep(0)
        os.write(ends[0], json.dumps(RECORD).encode() + b"\n")
        shims.extend_deadman_timers(2.0)
        os.close(ends[0])
        async with asyncio.timeout(20):
            await shims.wait_for_exit_report()
        ended = shims.take_exit_reports()
        shims.close()
        return ended

    with asyncio.Runner(loop_factory=factory) as runner:  # type: ignore[arg-type]
        assert [(end.job_id, end.exit_code) for end in runner.run(receive_exits())] == [("j-1", 0)]


def test_cancelled_start_leaves_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    may_spawn, spawned = threading.Event(), []
    real = launcher._spawn_shim

    def spawn(*args: object, **given: object) -> subprocess.Popen[bytes]:
        assert may_spawn.wait(10)
        spawned.append(real(*args, **given))  # type: ignore[arg-type]
        return spawned[0]

    monkeypatch.setattr(launcher, "_spawn_shim", spawn)
    (tmp_path / "log").mkdir()
    plan = replace(_make_plan(tmp_path), argv=(sys.executable, "-c", STUBBORN))

    async def start_and_cancel() -> None:
        shims = ShimLauncher()
        starting = asyncio.ensure_future(shims.start_job(plan, deadman_expiry_s=time.monotonic() + 60))
        await asyncio.sleep(0)
        starting.cancel()
        await asyncio.wait([starting])
        may_spawn.set()
        await until(lambda: spawned and spawned[0].returncode is not None, what="the shim is killed")
        assert shims.running_jobs_and_kill_errors() == {}
        shims.close()

    asyncio.run(start_and_cancel())


def _exit_record_with_survivor(pid: int) -> bytes:
    mark = leftovers.ProcessIdentity.of_pid(pid)
    assert mark is not None
    return json.dumps(RECORD | {"survivors": [[mark.pid, mark.start_mark]]}).encode()


def test_exit_is_reported_after_the_end_of_processes_that_the_shim_could_not_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends: list[int] = []

    def spawn(plan: LaunchPlan, control_fd: int, until_s: float, **_: object) -> subprocess.Popen[bytes]:
        ends.append(os.dup(control_fd))
        return subprocess.Popen(["true"])

    monkeypatch.setattr(launcher, "_spawn_shim", spawn)

    async def receive_exit() -> ExitReport:
        shims = ShimLauncher()
        await shims.start_job(_make_plan(tmp_path), deadman_expiry_s=1.0)
        os.write(ends[0], _exit_record_with_survivor(survivor.pid) + b"\n")
        os.close(ends[0])
        (report,) = await until(shims.take_exit_reports)
        shims.close()
        return report

    with subprocess.Popen(["/bin/sleep", "300"], env={}) as survivor:
        assert asyncio.run(receive_exit()).exit_code == 0
        assert survivor.wait() == -signal.SIGKILL


def test_new_agent_kills_processes_that_a_shim_could_not_kill(tmp_path: Path) -> None:
    (tmp_path / "jobs" / "j-1").mkdir(parents=True)

    async def end_leftovers() -> int:
        shims = ShimLauncher()
        try:
            _, count = await shims.adopt_jobs_and_kill_leftovers(
                tmp_path / "jobs", may_adopt=lambda record: True
            )
            return count
        finally:
            shims.close()

    with subprocess.Popen(["/bin/sleep", "300"], env={}) as survivor:
        (tmp_path / "jobs" / "j-1" / "exit.json").write_bytes(_exit_record_with_survivor(survivor.pid))
        assert asyncio.run(end_leftovers()) == 1
        assert survivor.wait() == -signal.SIGKILL


@pytest.mark.parametrize("record", [b"", b"[]", b'{"survivors": 1}', b'{"survivors": [[1]]}', b"[" * 60_000])
def test_invalid_exit_record_names_no_survivor(record: bytes) -> None:
    assert leftovers.parse_survivors(record) == ()


STUBBORN = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("up", flush=True)
time.sleep(600)
"""


def test_second_kill_can_shorten_the_grace_period(tmp_path: Path) -> None:
    (tmp_path / "log").mkdir()
    plan = replace(_make_plan(tmp_path), argv=(sys.executable, "-c", STUBBORN), grace_s=0.1)

    async def ended() -> list[ExitReport]:
        shims = ShimLauncher()
        await shims.start_job(plan, deadman_expiry_s=time.monotonic() + 60)
        await until(lambda: b"up" in read_log_chunk(tmp_path, offset=0, bytes_max=100, is_live=True).data)
        shims.kill_job("j-1", reason="makes room", grace_s=86400.0)
        assert shims.take_exit_reports() == []
        shims.kill_job("j-1", reason="cancelled")
        async with asyncio.timeout(20):
            await shims.wait_for_exit_report()
        ended = shims.take_exit_reports()
        shims.close()
        return ended

    assert ["makes room" in end.reason for end in asyncio.run(ended())] == [True], (
        "why it ends stays the first"
    )


def test_log_files_ignores_other_file_names(tmp_path: Path) -> None:
    (tmp_path / "log").mkdir()
    for name in ("²", "٣", "0" * 20, "0" * 19 + "7", "x", "-1", "1 "):
        (tmp_path / "log" / f"{name}.log").write_text(name)
    assert [first for first, _ in log_files_with_offsets(tmp_path)] == [0, 7]
    (tmp_path / "log" / f"{'0' * 19}7.log").unlink()
    os.mkfifo(tmp_path / "log" / "00000000000000000020.log")
    (tmp_path / "log" / "00000000000000000021.log").symlink_to("/dev/zero")
    assert read_log_chunk(tmp_path, offset=0, bytes_max=100, is_live=False).data == b"0" * 20
    assert read_log_chunk(tmp_path, offset=20, bytes_max=100, is_live=False).eof


@pytest.mark.parametrize("content", ["[" * 60_000, '{"shim": [1e999, ""]}', "[1]", '{"a": 1}'])
def test_invalid_start_record_contains_no_process(tmp_path: Path, content: str) -> None:
    (tmp_path / "started.json").write_text(content)
    assert leftovers.read_start_record(tmp_path / "started.json") == ()


def test_leftovers_are_all_stopped_before_one_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[int] = []
    really_send = leftovers.ProcessIdentity.send_signal

    def send_signal(mark: leftovers.ProcessIdentity, number: int) -> bool:
        sent.append(number)
        return really_send(mark, number)

    monkeypatch.setattr(leftovers.ProcessIdentity, "send_signal", send_signal)
    environment = {leftovers.JOB_DIR_VARIABLE: str(tmp_path / "j1")}
    sleepers = [subprocess.Popen(["/bin/sleep", "300"], env=environment) for _ in range(3)]
    try:
        found, stubborn = leftovers.JobProcesses(tmp_path).kill_all_processes()
    finally:
        for sleeper in sleepers:
            sleeper.kill()
            sleeper.wait()
    assert (found, stubborn) == (3, {})
    assert sent[:6] == [signal.SIGSTOP] * 3 + [signal.SIGKILL] * 3


def test_start_record_cannot_make_the_agent_kill_itself(tmp_path: Path) -> None:
    own = leftovers.ProcessIdentity.of_pid(os.getpid())
    assert own is not None
    with subprocess.Popen(["/bin/sleep", "300"]) as child:
        assert leftovers.JobProcesses(tmp_path, recorded_processes={own: "j1"}).kill_all_processes(
            timeout_s=0.1
        ) == (
            0,
            {},
        )
        assert child.poll() is None
        child.kill()
