"""The launcher's ear: a shim that leaves is always noticed, whatever it left unread."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import uvloop

from genie.agent import launcher, processes
from genie.agent.launcher import LaunchPlan, ShimLauncher
from genie.agent.logs import read_chunk
from genie.model.messages import ExitReport
from tests.waiting import until

RECORD = {"job_id": "j-1", "epoch": 3, "exit_code": 0, "reason": "exit code 0", "ended_at": 1.0}


def _plan(folder: Path) -> LaunchPlan:
    return LaunchPlan(
        job_id="j-1",
        epoch=3,
        argv=("true",),
        env={},
        directory=folder,
        work_dir=folder,
        log_bytes_max=4096,
        log_files_max=1,
        grace_s=0.0,
        deadman_grace_s=0.0,
    )


@pytest.mark.parametrize("factory", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_an_end_is_heard_though_the_shim_left_a_line_unread(
    factory: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends: list[int] = []

    def spawn(plan: LaunchPlan, control_fd: int, until_s: float) -> subprocess.Popen[bytes]:
        ends.append(os.dup(control_fd))
        return subprocess.Popen(["true"])

    monkeypatch.setattr(launcher, "_spawn", spawn)

    async def heard() -> list[ExitReport]:
        shims = ShimLauncher()
        shims.start(_plan(tmp_path), until_s=1.0)
        await asyncio.sleep(0)
        os.write(ends[0], json.dumps(RECORD).encode() + b"\n")
        shims.refresh(2.0)
        os.close(ends[0])
        async with asyncio.timeout(5):
            await shims.wait_exit()
        return shims.exits()

    with asyncio.Runner(loop_factory=factory) as runner:  # type: ignore[arg-type]
        assert [(end.job_id, end.exit_code) for end in runner.run(heard())] == [("j-1", 0)]


STUBBORN = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("up", flush=True)
time.sleep(600)
"""


def test_a_later_order_may_shorten_the_grace_of_an_earlier_one(tmp_path: Path) -> None:
    (tmp_path / "log").mkdir()
    plan = replace(_plan(tmp_path), argv=(sys.executable, "-c", STUBBORN), grace_s=0.1)

    async def ended() -> list[ExitReport]:
        shims = ShimLauncher()
        shims.start(plan, until_s=time.monotonic() + 60)
        await until(lambda: b"up" in read_chunk(tmp_path, offset=0, bytes_max=100, live=True).data)
        shims.kill("j-1", reason="makes room", grace_s=86400.0)
        assert shims.exits() == []
        shims.kill("j-1", reason="cancelled")
        async with asyncio.timeout(20):
            await shims.wait_exit()
        return shims.exits()

    assert ["makes room" in end.reason for end in asyncio.run(ended())] == [True], (
        "why it ends stays the first"
    )


def test_only_files_that_a_shim_would_name_are_a_log(tmp_path: Path) -> None:
    (tmp_path / "log").mkdir()
    for name in ("²", "٣", "0" * 20, "0" * 19 + "7", "x", "-1", "1 "):
        (tmp_path / "log" / f"{name}.log").write_text(name)
    assert [first for first, _ in launcher.log_files(tmp_path)] == [0, 7]
    (tmp_path / "log" / f"{'0' * 19}7.log").unlink()
    os.mkfifo(tmp_path / "log" / "00000000000000000020.log")
    (tmp_path / "log" / "00000000000000000021.log").symlink_to("/dev/zero")
    assert read_chunk(tmp_path, offset=0, bytes_max=100, live=False).data == b"0" * 20
    assert read_chunk(tmp_path, offset=20, bytes_max=100, live=False).eof


@pytest.mark.parametrize("content", ["[" * 60_000, '{"shim": [1e999, ""]}', "[1]", '{"a": 1}'])
def test_a_start_record_that_is_not_one_names_nobody(tmp_path: Path, content: str) -> None:
    (tmp_path / "started.json").write_text(content)
    assert processes.read_started(tmp_path / "started.json") == ()


def test_leftovers_stand_still_before_the_first_of_them_dies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[int] = []
    really_send = processes.ProcessMark.send_signal

    def send_signal(mark: processes.ProcessMark, number: int) -> bool:
        sent.append(number)
        return really_send(mark, number)

    monkeypatch.setattr(processes.ProcessMark, "send_signal", send_signal)
    environment = {processes.JOB_DIR_VARIABLE: str(tmp_path / "j1")}
    sleepers = [subprocess.Popen(["/bin/sleep", "300"], env=environment) for _ in range(3)]
    try:
        found, stubborn = processes.end_leftovers(tmp_path, ())
    finally:
        for sleeper in sleepers:
            sleeper.kill()
            sleeper.wait()
    assert (found, stubborn) == (3, frozenset())
    assert sent[:6] == [signal.SIGSTOP] * 3 + [signal.SIGKILL] * 3


def test_a_start_record_cannot_turn_the_agent_against_itself(tmp_path: Path) -> None:
    own = processes.ProcessMark.of(os.getpid())
    assert own is not None
    assert processes.end_leftovers(tmp_path, [own], within_s=0.1) == (0, frozenset())
