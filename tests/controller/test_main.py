"""The controller as a process: exit codes, one line of error, signals, one at a time."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from genie.config import ClusterConfig
from genie.controller.__main__ import compile_beside
from genie.model.job import JobState
from genie.model.messages import GetStatus
from genie.runtime import native
from genie.runtime.credentials import LocalCluster, find_access, greet
from genie.runtime.network import TcpNetwork
from genie.runtime.placers import why_plain
from genie.scheduler.placement.plain import PlainPlacer
from tests.controller.standing import standing
from tests.waiting import until, wait_until


def run(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "genie.controller", *arguments],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=30,
    )


@contextmanager
def started(state_dir: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "genie.controller", "--port", "0", "--state-dir", str(state_dir), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        wait_until(lambda: (state_dir / "local.json").exists() or process.poll() is not None)
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate(timeout=10)


async def status_of(state_dir: Path) -> bool:
    network = TcpNetwork()
    access = await find_access(ClusterConfig(), state_dir=state_dir, network=network, timeout_s=5)
    assert access.tls is not None
    async with greet(network, access, timeout_s=5, program="test") as (peer, welcome):
        status = await peer.call(GetStatus(), timeout_s=5)
        return status.leading and welcome.leading


async def test_it_serves_with_tls_until_sigterm_and_ends_in_order(tmp_path: Path) -> None:
    state_dir = tmp_path / "s"
    with started(state_dir) as process:
        assert await status_of(state_dir)
        process.send_signal(signal.SIGTERM)
        out, log = process.communicate(timeout=20)
        assert (process.returncode, out) == (0, "")
        assert "stopping" in log
        assert "Traceback" not in log


async def test_after_kill_9_it_leads_again_at_once_with_everything(tmp_path: Path) -> None:
    state_dir = tmp_path / "s"
    with started(state_dir) as process:
        assert await status_of(state_dir)
        before = LocalCluster.read(state_dir)
        token = (state_dir / "owner.token").read_text()
        process.kill()
        process.communicate(timeout=10)
    (state_dir / "local.json").unlink()
    with started(state_dir):
        after = LocalCluster.read(state_dir)
        assert before is not None
        assert after is not None
        assert after.cluster_id == before.cluster_id
        assert (state_dir / "owner.token").read_text() == token
        await until(lambda: status_of(state_dir), what="it leads")


def test_a_second_controller_on_the_same_directory_is_refused(tmp_path: Path) -> None:
    with started(tmp_path / "s"):
        second = run("--port", "0", "--state-dir", str(tmp_path / "s"))
        assert second.returncode == 1
        assert "another controller runs on" in second.stderr
        assert "Traceback" not in second.stderr


def test_an_address_that_others_reach_needs_tls(tmp_path: Path) -> None:
    for bind in ("0.0.0.0", "::", "192.0.2.1"):
        refused = run("--bind", bind, "--tls", "off", "--port", "0", "--state-dir", str(tmp_path / "s"))
        assert refused.returncode == 1
        assert "controller.tls is off" in refused.stderr
        assert "hint: leave TLS on" in refused.stderr
        assert "Traceback" not in refused.stderr


def test_a_port_in_use_is_said(tmp_path: Path) -> None:
    with started(tmp_path / "a"):
        local = LocalCluster.read(tmp_path / "a")
        assert local is not None
        second = run("--port", str(local.port), "--state-dir", str(tmp_path / "b"))
        assert second.returncode == 1
        assert f"port {local.port} on 127.0.0.1 is in use" in second.stderr
        assert "Traceback" not in second.stderr


def test_bad_settings_are_usage_errors(tmp_path: Path) -> None:
    for arguments, words in [
        (("--port", "seventy"), "controller.port"),
        (("--port", "70000"), "from 0 to 65535"),
        (("--store", "mysql://x"), "is not a store"),
    ]:
        failed = run(*arguments, "--state-dir", str(tmp_path / "s"))
        assert (failed.returncode, "Traceback" in failed.stderr) == (2, False)
        assert words in failed.stderr
    misspelt = run("--port", "0", GENIE_CONTROLER_PORT="1")
    assert misspelt.returncode == 2
    assert "GENIE_CONTROLLER_PORT" in misspelt.stderr


def test_the_log_can_be_read_by_machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GENIE_LOG_FORMAT", "json")
    with started(tmp_path / "s") as process:
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=20)
    said = [json.loads(line)["message"] for line in log.splitlines()]
    assert any("listening on" in what for what in said)


@pytest.fixture
def not_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """The scheduler's library is still to be compiled; gives a command that does it at once."""
    here = native.Workshop.of_this_installation()
    library = here.build("genie_scheduler")
    empty = native.Workshop(here.sources, tmp_path / "cache")
    monkeypatch.setattr(native.Workshop, "of_this_installation", lambda: empty)
    code = "import pathlib, shutil, sys; pathlib.Path(sys.argv[2]).mkdir(); shutil.copy(*sys.argv[1:])"
    return (sys.executable, "-c", code, str(library), str(empty.cache))


async def test_the_schedulers_library_is_compiled_beside_the_work_and_decides_from_then_on(
    tmp_path: Path, not_compiled: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    async with standing(tmp_path / "s") as one, one.client() as owner, one.agent("a", gpus=2) as agent:
        assert one.controller is not None
        planner = one.controller._planner
        first = await owner.submit(gpus=1)
        launch = await agent.start_next()
        assert isinstance(planner._scheduler.book._real, PlainPlacer), "it does not wait for the library"
        await compile_beside(one.controller, is_wanted=True, command=not_compiled)
        await owner.submit(gpus=1)
        second = await agent.start_next()
        assert not isinstance(planner._scheduler.book._real, PlainPlacer)
        assert launch.placement.gpu_ids != second.placement.gpu_ids, "what runs is still accounted for"
        assert (await owner.job(first.job_id)).state is JobState.RUNNING
    assert "is not compiled yet; a controller does that in the background" in caplog.text
    assert "half a minute" in caplog.text
    assert "the scheduler's library is ready" in caplog.text


async def test_where_it_is_not_to_be_compiled_it_is_said_how_to(
    tmp_path: Path, not_compiled: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    async with standing(tmp_path / "s") as one:
        assert one.controller is not None
        await compile_beside(one.controller, is_wanted=False, command=not_compiled)
        assert "'python -m genie.runtime.native genie_scheduler' compiles it" in caplog.text
        assert not one.controller.use_compiled()


def test_a_machine_without_a_compiler_is_told_what_that_means(
    not_compiled: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert why_plain() == (
        "the scheduler's library is not compiled, and CXX names 'no-such-compiler', which is not there; "
        "decisions for many nodes are slow"
    )
