"""Compiling a library in the background: a separate process, whose result is logged."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from genie.native.prebuild import prebuild_command, try_build_in_background
from tests.waiting import until


async def run_background_build(command: Sequence[str]) -> bool:
    return await try_build_in_background(command, what="the library", consequence="it will not work here")


async def test_built_library_logs_one_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    assert await run_background_build(prebuild_command("genie_scheduler"))
    assert caplog.messages == ["the library is compiled"]


async def test_failed_build_logs_one_line(caplog: pytest.LogCaptureFixture) -> None:
    code = "import sys; sys.stderr.write('there is no C++ compiler\\n(install one)\\n'); sys.exit(69)"
    assert not await run_background_build((sys.executable, "-c", code))
    assert caplog.messages == [
        "could not compile the library: there is no C++ compiler (install one); it will not work here"
    ]


async def test_missing_interpreter_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    assert not await run_background_build(("/no/such/python", *prebuild_command("genie_scheduler")[1:]))
    assert "could not start compiling the library" in caplog.text


async def test_cancellation_kills_the_compilers(tmp_path: Path) -> None:
    started = tmp_path / "started"
    code = (
        "import os, pathlib, subprocess, sys, time\n"
        "deadline = time.monotonic() + 30\n"
        "while os.getpriority(os.PRIO_PROCESS, 0) != 19 and time.monotonic() < deadline: time.sleep(0.01)\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(300)'])\n"
        "path = pathlib.Path(sys.argv[1])\n"
        "path.with_suffix('.new').write_text(f'{child.pid} {os.getpriority(os.PRIO_PROCESS, 0)}')\n"
        "path.with_suffix('.new').replace(path)\n"
        "child.wait()\n"
    )
    async with asyncio.TaskGroup() as group:
        building = group.create_task(run_background_build((sys.executable, "-c", code, str(started))))
        await until(started.exists, timeout_s=60, what="the compiler to run")
        building.cancel()
    pid, priority = map(int, started.read_text().split())
    assert priority == 19
    await until(lambda: not _is_running(pid), what="the compiler to end")


def _is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"
