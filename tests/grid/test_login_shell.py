"""Accounts that may log in and not run anything are told apart from nodes without Python."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from genie.errors import LoginRefusedError
from genie.grid.health_check import HealthChecker, NodeState
from genie.grid.runner import Runner
from genie.grid.setup import Setup, wish
from genie.grid.ssh_pool import SshPool
from genie.grid.sync.syncer import Syncer
from tests.grid.bed import Bed
from tests.grid.conftest import grid_file_of
from tests.grid.test_shell_words import give_login_shell


@pytest.mark.parametrize(("shell", "said"), [("nologin", "not available"), ("false", "")])
async def test_a_shell_that_runs_nothing_is_named_as_what_is_wrong(
    own_bed: Bed, tmp_path: Path, shell: str, said: str
) -> None:
    give_login_shell(own_bed["gpu1"], f"#!/bin/sh\nPATH=/usr/sbin:/bin\nexec {shell}\n")
    file = grid_file_of(own_bed)
    project = tmp_path / "project"
    project.mkdir()
    wanted = wish(requirements=None, packages=["x"], python="python3", system_packages=False, wheels=None)
    async with SshPool(file, ssh_config=own_bed.ssh_config) as pool:
        with pytest.raises(LoginRefusedError, match=f"runs no commands.*{said}") as refused:
            await Runner(pool, file).start("gpu1", "true")
        assert "nologin" in str(refused.value.hint)
        (report,) = await Syncer(pool, file, state_dir=tmp_path / "state").sync(project, ["gpu1"])
        assert isinstance(report.error, LoginRefusedError)
        health = await HealthChecker(pool, file, clock=time.time).check("gpu1")
        assert (health.state, "runs no commands" in health.note) == (NodeState.UNREACHABLE, True)
        (told,) = await Setup(pool, file).run(wanted, ["gpu1"])
        assert "runs no commands" in told.error
