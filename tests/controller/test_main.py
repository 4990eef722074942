"""The controller as a process: exit codes, error output, signals, the lock of its directory."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pytest

from genie.config import ClusterConfig
from genie.controller.__main__ import compile_scheduler_in_background
from genie.controller.election import CONTROLLER_KEY_PREFIX
from genie.controller.placement.placers import why_scheduler_not_compiled
from genie.controller.store.etcd import EtcdStore
from genie.errors import DuplicateControllerError, GenieError, StoreFullError
from genie.model.job import JobState
from genie.model.messages import GetStatus
from genie.native import libraries
from genie.runtime import tls
from genie.runtime.credentials import LocalCluster, connect_authenticated, find_access
from genie.runtime.network import TcpNetwork
from tests.controller.running_controller import running_controller
from tests.controller.store.etcd_server import EtcdServer
from tests.needs import require_namespaces
from tests.waiting import until, wait_until


def run_controller(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "genie.controller", *arguments],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=30,
    )


@contextmanager
def start_controller(
    state_dir: Path, *arguments: str, stderr: int | IO[bytes] = subprocess.PIPE
) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "genie.controller", "--port", "0", "--state-dir", str(state_dir), *arguments],
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
    )
    try:
        wait_until(lambda: (state_dir / "local.json").exists() or process.poll() is not None)
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate(timeout=30)


async def is_leading(state_dir: Path) -> bool:
    network = TcpNetwork()
    access = await find_access(ClusterConfig(), state_dir=state_dir, network=network, timeout_s=5)
    assert access.tls is not None
    async with connect_authenticated(network, access, timeout_s=5, program="test") as (peer, welcome):
        status = await peer.call(GetStatus(), timeout_s=5)
        return status.leading and welcome.leading


async def test_controller_serves_with_tls_until_sigterm(tmp_path: Path) -> None:
    state_dir = tmp_path / "s"
    with start_controller(state_dir) as process:
        assert await is_leading(state_dir)
        process.send_signal(signal.SIGTERM)
        out, log = process.communicate(timeout=20)
        assert (process.returncode, out) == (0, "")
        assert "stopping" in log
        assert "Traceback" not in log


@pytest.fixture
def small_disk_mount(tmp_path: Path) -> Iterator[Path]:
    require_namespaces("mount")  # the right to create one implies the right to mount
    folder = tmp_path / "disk"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


async def test_controller_waits_for_disk_space(small_disk_mount: Path, tmp_path: Path) -> None:
    """It does not exit: its supervisor would wait longer before each restart."""
    with start_controller(small_disk_mount) as process:
        assert await is_leading(small_disk_mount)
        process.kill()
    free = os.statvfs(small_disk_mount)
    (small_disk_mount / "ballast").write_bytes(bytes(free.f_bavail * free.f_frsize))
    log = tmp_path / "log"
    with log.open("wb") as file, start_controller(small_disk_mount, stderr=file) as process:
        wait_until(lambda: "waiting for disk space" in log.read_text() or process.poll() is not None)
        assert process.poll() is None, log.read_text()
        (small_disk_mount / "ballast").unlink()

        async def leads() -> bool:
            with contextlib.suppress(GenieError):
                return await is_leading(small_disk_mount)
            return False

        await until(leads)
        assert process.poll() is None


async def test_full_disk_of_the_state_directory_does_not_end_the_leadership(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: LocalCluster, state_dir: Path) -> None:
        raise StoreFullError("cannot write local.json: no space left on device")

    write = LocalCluster.write
    monkeypatch.setattr(LocalCluster, "write", fail)
    async with running_controller(tmp_path) as one, one.client() as owner:
        assert (await owner.status()).alarms == (
            "commands on this machine may not find the cluster: cannot write local.json: "
            "no space left on device",
        )
        monkeypatch.setattr(LocalCluster, "write", write)

        async def is_written() -> bool:
            return LocalCluster.read(one.state_dir) is not None and not (await owner.status()).alarms

        await until(is_written)


async def test_restarted_controller_uses_its_certificate_again(tmp_path: Path) -> None:
    async with running_controller(tmp_path, tls="on") as one:
        path = one.state_dir / "controller" / "controller.pem"
        before = path.read_text()
        await one.restart()
        assert path.read_text() == before
        (path.parent / "controller.key").write_bytes(tls.new_key_and_csr()[0])
        await one.restart()
        assert path.read_text() != before, "an interrupted renewal: the key is not that of the certificate"
        async with one.client() as owner:
            assert (await owner.status()).leading


async def test_controller_leads_again_after_sigkill_without_data_loss(tmp_path: Path) -> None:
    state_dir = tmp_path / "s"
    with start_controller(state_dir) as process:
        assert await is_leading(state_dir)
        before = LocalCluster.read(state_dir)
        token = (state_dir / "owner.token").read_text()
        process.kill()
        process.communicate(timeout=30)
    (state_dir / "local.json").unlink()
    with start_controller(state_dir):
        after = LocalCluster.read(state_dir)
        assert before is not None
        assert after is not None
        assert after.cluster_id == before.cluster_id
        assert (state_dir / "owner.token").read_text() == token
        await until(lambda: is_leading(state_dir), what="it leads")


def test_second_controller_on_the_same_directory_fails(tmp_path: Path) -> None:
    with start_controller(tmp_path / "s"):
        second = run_controller("--port", "0", "--state-dir", str(tmp_path / "s"))
        assert second.returncode == 1
        assert "another controller is using" in second.stderr
        assert "Traceback" not in second.stderr


def test_address_reachable_from_other_machines_needs_tls(tmp_path: Path) -> None:
    for bind in ("0.0.0.0", "::", "192.0.2.1"):
        refused = run_controller(
            "--bind", bind, "--tls", "off", "--port", "0", "--state-dir", str(tmp_path / "s")
        )
        assert refused.returncode == 2
        assert "controller.tls is off" in refused.stderr
        assert "hint: leave TLS on" in refused.stderr
        assert "Traceback" not in refused.stderr


def test_port_in_use_is_reported(tmp_path: Path) -> None:
    with start_controller(tmp_path / "a"):
        local = LocalCluster.read(tmp_path / "a")
        assert local is not None
        second = run_controller("--port", str(local.port), "--state-dir", str(tmp_path / "b"))
        assert second.returncode == 1
        assert f"port {local.port} on 127.0.0.1 is in use" in second.stderr
        assert "Traceback" not in second.stderr


def test_invalid_settings_are_usage_errors(tmp_path: Path) -> None:
    for arguments, words in [
        (("--port", "seventy"), "controller.port"),
        (("--port", "70000"), "from 0 to 65535"),
        (("--store", "mysql://x"), "invalid store URL"),
    ]:
        failed = run_controller(*arguments, "--state-dir", str(tmp_path / "s"))
        assert (failed.returncode, "Traceback" in failed.stderr) == (2, False)
        assert words in failed.stderr
    misspelt = run_controller("--port", "0", GENIE_CONTROLER_PORT="1")
    assert misspelt.returncode == 2
    assert "GENIE_CONTROLLER_PORT" in misspelt.stderr


def test_log_is_written_as_json_if_configured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GENIE_LOG_FORMAT", "json")
    with start_controller(tmp_path / "s") as process:
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=20)
    messages = [json.loads(line)["message"] for line in log.splitlines()]
    assert any("listening on" in what for what in messages)


@pytest.fixture
def compile_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """Pretend that the scheduler's library is not compiled; return a command that compiles it at once."""
    here = libraries.BuildCache.of_this_installation()
    library = here.build("genie_scheduler")
    empty = libraries.BuildCache(here.source_folder, tmp_path / "cache")
    monkeypatch.setattr(libraries.BuildCache, "of_this_installation", lambda: empty)
    code = "import pathlib, shutil, sys; pathlib.Path(sys.argv[2]).mkdir(); shutil.copy(*sys.argv[1:])"
    return (sys.executable, "-c", code, str(library), str(empty.cache_folder))


async def test_scheduler_library_is_compiled_in_the_background_and_used(
    tmp_path: Path, compile_command: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    async with (
        running_controller(tmp_path / "s") as one,
        one.client() as owner,
        one.agent("a", gpus=2) as agent,
    ):
        assert one.controller is not None
        planner = one.controller._planner
        first = await owner.submit(gpus=1)
        launch = await agent.start_next()
        assert planner._scheduler.allocations.uses_python_placer, "it starts without the library"
        await compile_scheduler_in_background(one.controller, is_enabled=True, command=compile_command)
        await owner.submit(gpus=1)
        second = await agent.start_next()
        assert not planner._scheduler.allocations.uses_python_placer
        assert launch.placement.gpu_ids != second.placement.gpu_ids, "running jobs are still accounted for"
        assert (await owner.job(first.job_id)).state is JobState.RUNNING
    assert "is not compiled yet; the controller compiles it in the background" in caplog.text
    assert "half a minute" in caplog.text
    assert "the scheduler's library is compiled" in caplog.text


async def test_log_says_how_to_compile_when_compile_ahead_is_off(
    tmp_path: Path, compile_command: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    async with running_controller(tmp_path / "s") as one:
        assert one.controller is not None
        await compile_scheduler_in_background(one.controller, is_enabled=False, command=compile_command)
        assert "to compile the scheduler library, run: python -m genie.native genie_scheduler" in caplog.text
        assert not one.controller.try_use_compiled_scheduler()


def test_missing_compiler_is_explained(
    compile_command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert why_scheduler_not_compiled() == (
        "the scheduler's library is not compiled, and CXX names 'no-such-compiler', which was not found; "
        "scheduling for many nodes is slow"
    )


async def test_a_copied_state_directory_is_refused_until_it_is_adopted(tmp_path: Path) -> None:
    original, copy = tmp_path / "original", tmp_path / "copy"
    with start_controller(original) as process:
        assert await is_leading(original)
        await asyncio.to_thread(shutil.copytree, original, copy)
        second = await asyncio.to_thread(run_controller, "--port", "0", "--state-dir", str(copy))
        assert second.returncode == DuplicateControllerError.exit_code
        assert f"error: {copy}/controller is a copy" in second.stderr
        assert "hint: " in second.stderr and "genie store adopt" in second.stderr
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=20)
    adopted = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-m", "genie", "store", "adopt"],
        env={**os.environ, "GENIE_STATE_DIR": str(copy)},
        timeout=30,
    )
    assert adopted.returncode == 0
    (copy / "local.json").unlink()
    with start_controller(copy):
        assert await is_leading(copy)


def _address_of(state_dir: Path) -> str:
    local = LocalCluster.read(state_dir)
    assert local is not None
    return f"{local.host}:{local.port}"


async def _read_controller_addresses(url: str) -> list[str]:
    store = await EtcdStore.open(url)
    try:
        return [item.value.decode() for item in (await store.range(CONTROLLER_KEY_PREFIX)).items]
    finally:
        await store.close()


async def test_a_copied_controller_of_an_etcd_cluster_is_refused(tmp_path: Path) -> None:
    etcd = EtcdServer(tmp_path / "etcd")
    await asyncio.to_thread(etcd.start)
    original, copy = tmp_path / "original", tmp_path / "copy"
    try:
        with start_controller(original, "--store", etcd.url) as process:
            assert await is_leading(original)
            await asyncio.to_thread(shutil.copytree, original, copy)
            second = await asyncio.to_thread(
                run_controller,
                *("--port", "0", "--state-dir", str(copy), "--store", etcd.url),
                GENIE_CONTROLLER_LEADER_TTL_S="2",
            )
            assert second.returncode == DuplicateControllerError.exit_code
            assert "is running with the name of this one" in second.stderr
            assert await is_leading(original)
            assert await _read_controller_addresses(etcd.url) == [_address_of(original)]
            process.kill()
            process.communicate(timeout=20)
        (original / "local.json").unlink()
        with start_controller(original, "--store", etcd.url):
            assert await is_leading(original), "the same controller takes its key without waiting"
    finally:
        await asyncio.to_thread(etcd.stop)
