"""run on several nodes: each is followed independently; Ctrl-C applies to all."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

from genie.grid.runs.launch import grid_metrics
from tests.grid.conftest import own_testbed
from tests.grid.testbed import SshTestbed
from tests.waiting import wait_until

__all__ = ["own_testbed"]
ROOT = Path(__file__).resolve().parents[3]
GRID_FILE_LIMITS = "ssh: {connect_timeout: 600, max_retries: 0}\n"
"""A start on the silent node does not fail by itself during a test."""


@pytest.fixture
def unresponsive_node(
    own_testbed: SshTestbed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """gpu3 accepts TCP connections and never replies; gpu1 and gpu2 work."""
    with socket.create_server(("127.0.77.3", 0)) as server:
        port = server.getsockname()[1]
        host = f"Host gpu3\n  HostName 127.0.77.3\n  Port {port}\n"
        own_testbed.ssh_config.write_text(host + own_testbed.ssh_config.read_text())
        (tmp_path / "grid.yaml").write_text(
            own_testbed.grid_yaml(nodes=["gpu3", "gpu1", "gpu2"], more=GRID_FILE_LIMITS)
        )
        monkeypatch.setenv("GENIE_GRID_FILE", str(tmp_path / "grid.yaml"))
        monkeypatch.setenv("GENIE_GRID_SSH_CONFIG", str(own_testbed.ssh_config))
        yield


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "name").write_text("the project\n")
    return folder


def start_grid_cli(*argv: str, stdout: int | IO[bytes] = subprocess.PIPE) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "genie", "grid", *argv]
    return subprocess.Popen(command, cwd=ROOT, stdout=stdout, stderr=subprocess.PIPE)


def read_sorted_lines(process: subprocess.Popen[bytes], count: int) -> list[bytes]:
    assert process.stdout is not None
    return sorted(process.stdout.readline() for _ in range(count))


@pytest.mark.parametrize("synced", [False, True])
def test_ctrl_c_with_an_unresponsive_node_interrupts_the_other_runs(
    own_testbed: SshTestbed, unresponsive_node: None, project: Path, synced: bool
) -> None:
    more = ["--sync", str(project)] if synced else []
    with start_grid_cli("run", "--all", "echo ready; exec sleep 7401", *more) as process:
        try:
            assert read_sorted_lines(process, 2) == [b"gpu1: ready\n", b"gpu2: ready\n"]
            process.send_signal(signal.SIGINT)
            _, raw = process.communicate(timeout=60)
        finally:
            process.kill()
    stderr = raw.decode()
    assert process.returncode == 130, stderr
    assert re.search(
        r"^interrupting r-\w+ on gpu1, r-\w+ on gpu2; cancelled the start on gpu3; press",
        stderr,
        re.MULTILINE,
    )
    assert re.search(r"^gpu1: exit code 130 after ", stderr, re.MULTILINE)
    assert re.search(r"^gpu2: exit code 130 after ", stderr, re.MULTILINE)
    assert "gpu3: not started\n" in stderr
    for name in ("gpu1", "gpu2"):
        wait_until(lambda name=name: not own_testbed[name].processes("sleep 7401"), what="the end")  # type: ignore[misc]


def test_ctrl_c_during_a_detached_start_keeps_started_runs(
    own_testbed: SshTestbed, unresponsive_node: None
) -> None:
    with start_grid_cli("run", "--all", "exec sleep 7402", "-d") as process:
        try:
            ids = [line.decode().strip() for line in read_sorted_lines(process, 2)]
            process.send_signal(signal.SIGINT)
            _, raw = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 130, raw
    assert b"cancelled the start on gpu3\n" in raw and b"gpu3: not started\n" in raw
    for name in ("gpu1", "gpu2"):
        wait_until(lambda name=name: own_testbed[name].processes("sleep 7402"), what="the command")  # type: ignore[misc]
    assert set(grid_metrics(Path(os.environ["GENIE_STATE_DIR"])).read_snapshot().runs) == set(ids)


LATE_REPLIES_PROGRAM = """
import asyncio, sys
from genie.cli import grid_main
from genie.grid.ssh.pool import NodeConnection

call = NodeConnection.call

async def answer_late(link, op, *args, **more):
    answer = await call(link, op, *args, **more)
    if op == "runs.start":
        await asyncio.Event().wait()
    return answer

NodeConnection.call = answer_late
sys.exit(grid_main(sys.argv[1:]))
"""


def test_ctrl_c_before_the_reply_to_a_start_reports_the_started_run(
    own_testbed: SshTestbed, unresponsive_node: None
) -> None:
    argv = ["run", "--node", "gpu1", "--node", "gpu2", "exec sleep 7405"]
    with subprocess.Popen(
        [sys.executable, "-c", LATE_REPLIES_PROGRAM, *argv], cwd=ROOT, stderr=subprocess.PIPE
    ) as process:
        try:
            for name in ("gpu1", "gpu2"):
                wait_until(lambda name=name: own_testbed[name].processes("sleep 7405"), what="the command")  # type: ignore[misc]
            process.send_signal(signal.SIGINT)
            _, raw = process.communicate(timeout=60)
        finally:
            process.kill()
    stderr = raw.decode()
    assert (process.returncode, "not started" in stderr) == (130, False), stderr
    for name in ("gpu1", "gpu2"):
        assert f"{name}: started and interrupted\n" in stderr
        assert re.search(
            rf"run (r-\w+) on {name} was interrupted; to show its output: grid-cli logs \1", stderr
        ), stderr


def test_cancelled_detached_run_is_not_active(own_testbed: SshTestbed, unresponsive_node: None) -> None:
    with start_grid_cli("run", "--node", "gpu1", "exec sleep 7403", "-d") as process:
        run_id = process.communicate(timeout=60)[0].decode().strip()
    kept = grid_metrics(Path(os.environ["GENIE_STATE_DIR"]))
    assert kept.read_snapshot().active_tasks == 1
    with start_grid_cli("cancel", run_id, "--config", os.environ["GENIE_GRID_FILE"]) as process:
        assert process.wait(60) == 0
    assert (kept.read_snapshot().active_tasks, kept.read_snapshot().completed["cancelled"]) == (0, 1)


def test_node_with_a_full_disk_runs_nothing_and_delays_no_other(
    own_testbed: SshTestbed, unresponsive_node: None, project: Path
) -> None:
    (own_testbed["gpu2"].home / "grid_workspace").write_text("a file where the folder should be")
    command = "cat name; while [ ! -e ~/go ]; do sleep 0.02; done"
    with start_grid_cli(
        "run", "--node", "gpu2", "--node", "gpu1", command, "--sync", str(project)
    ) as process:
        try:
            assert read_sorted_lines(process, 1) == [b"gpu1: the project\n"]
            (own_testbed["gpu1"].home / "go").touch()
            _, raw = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 1, raw
    assert b"gpu2: refused" in raw and b"gpu1: exit code 0 after" in raw


def test_unreadable_directory_is_one_error_for_all_nodes(
    own_testbed: SshTestbed, unresponsive_node: None
) -> None:
    with start_grid_cli("run", "--node", "gpu1", "--node", "gpu2", "true", "--sync", "/") as process:
        _, raw = process.communicate(timeout=60)
    assert process.returncode == 2, raw
    assert raw.count(b"could not send /: it is the root of the file system") == 1


FULL_DEVICE = Path("/dev/full")  # every write fails with ENOSPC


@pytest.mark.skipif(not FULL_DEVICE.exists(), reason="needs /dev/full (Linux)")
@pytest.mark.parametrize("command", ["echo a line", "printf unfinished"])
def test_unwritable_output_is_reported_per_node(
    own_testbed: SshTestbed, unresponsive_node: None, command: str
) -> None:
    with FULL_DEVICE.open("wb") as full:
        process = start_grid_cli("run", "--node", "gpu1", "--node", "gpu2", command, stdout=full)
        _, raw = process.communicate(timeout=60)
    assert process.returncode == 1, raw
    for name in (b"gpu1", b"gpu2"):
        assert name + b": could not write the output: No space left on device" in raw, raw


@pytest.mark.skipif(not FULL_DEVICE.exists(), reason="needs /dev/full (Linux)")
def test_detached_runs_start_although_output_is_unwritable(
    own_testbed: SshTestbed, unresponsive_node: None
) -> None:
    with FULL_DEVICE.open("wb") as full:
        process = start_grid_cli(
            "run", "--node", "gpu1", "--node", "gpu2", "exec sleep 7404", "-d", stdout=full
        )
        _, raw = process.communicate(timeout=60)
    assert process.returncode == 1, raw
    assert raw.count(b"could not write the output") == 2, raw
    for name in ("gpu1", "gpu2"):
        assert re.search(rf"run r-\w+ on {name}; to follow it: grid-cli attach", raw.decode()), raw
        wait_until(lambda name=name: own_testbed[name].processes("sleep 7404"), what="the command")  # type: ignore[misc]
