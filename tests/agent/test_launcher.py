"""The launcher's ear: a shim that leaves is always noticed, whatever it left unread."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from pathlib import Path

import pytest
import uvloop

from genie.agent import launcher
from genie.agent.launcher import LaunchPlan, ShimLauncher
from genie.model.messages import ExitReport

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
