"""Accounts that cannot run commands are distinguished from nodes without Python."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from genie.errors import LoginRefusedError
from genie.grid.health.check import HealthState, NodeHealthChecker
from genie.grid.runs.run_client import Runner
from genie.grid.setup import EnvironmentSetup, read_environment_spec
from genie.grid.ssh.pool import SshPool
from genie.grid.sync.syncer import Syncer
from tests.grid.conftest import make_testbed_grid_file
from tests.grid.ssh.test_shell_words import set_login_shell
from tests.grid.testbed import SshTestbed


@pytest.mark.parametrize(("shell", "output"), [("nologin", "not available"), ("false", "")])
async def test_error_names_a_login_shell_that_does_not_run_commands(
    own_testbed: SshTestbed, tmp_path: Path, shell: str, output: str
) -> None:
    set_login_shell(own_testbed["gpu1"], f"#!/bin/sh\nPATH=/usr/sbin:/bin\nexec {shell}\n")
    file = make_testbed_grid_file(own_testbed)
    project = tmp_path / "project"
    project.mkdir()
    wanted = read_environment_spec(
        requirements=None, packages=["x"], python="python3", system_packages=False, wheels=None
    )
    async with SshPool(file, ssh_config=own_testbed.ssh_config) as pool:
        with pytest.raises(LoginRefusedError, match=f"does not run commands.*{output}") as refused:
            await Runner(pool, file).start("gpu1", "true")
        assert "nologin" in str(refused.value.hint)
        (report,) = await Syncer(pool, file, state_dir=tmp_path / "state").sync(project, ["gpu1"])
        assert isinstance(report.error, LoginRefusedError)
        health = await NodeHealthChecker(pool, file, clock=time.time).check("gpu1")
        assert (health.state, "does not run commands" in health.note) == (HealthState.UNREACHABLE, True)
        (report,) = await EnvironmentSetup(pool, file).run(wanted, ["gpu1"])
        assert "does not run commands" in report.error
