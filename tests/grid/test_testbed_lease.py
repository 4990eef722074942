"""A testbed that a test has broken is restored for the next test."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.grid.testbed import SshNode, SshTestbed
from tests.grid.testbed_lease import SshTestbedLease
from tests.waiting import wait_until


@pytest.fixture
def testbed(tmp_path: Path) -> Iterator[SshTestbed]:
    with SshTestbed(tmp_path / "nodes", count=1) as testbed:
        yield testbed


def read_testbed_files(testbed: SshTestbed) -> dict[str, tuple[int, str]]:
    """Return all files of the testbed with mode and content, except those that servers write."""
    return {
        str(path.relative_to(testbed.folder)): (
            path.lstat().st_mode,
            str(path.readlink()) if path.is_symlink() else path.read_text() if path.is_file() else "",
        )
        for path in testbed.folder.rglob("*")
        if path.name not in ("sshd.log", "sshd.pid")
    }


def change_files_and_settings(testbed: SshTestbed, node: SshNode) -> None:
    """Change everything that a test can change without restarting the server."""
    node.gpus(3)
    node.nvml_state(["hangs=1"])
    (node.bin / "python3").write_text("#!/bin/sh\nexit 127\n")
    (node.folder / "smi-hangs").touch()
    (node.folder / "leftover").mkdir()
    (node.folder / "lib/libnvidia-ml.so.1").unlink()
    node.write_host_key()
    node.login_shell = Path("/bin/false")
    node.path = "/nowhere"
    node.home.chmod(0o500)
    for name in (b"plain", b"\xff \n"):
        Path(os.fsdecode(os.fsencode(node.home / "x") + name)).write_bytes(b"1")
    (node.home / "link").symlink_to("/etc")
    (node.home / "folder/deep").mkdir(parents=True)
    testbed.write_known_hosts(without=[node.name])
    testbed.write_ssh_config(more="  Port 1\n")
    testbed.key.chmod(0o644)


def test_files_processes_and_settings_are_restored_without_restart(testbed: SshTestbed) -> None:
    started: list[int] = []
    lease = SshTestbedLease(testbed, on_start=started.append)
    before, (node,), server = read_testbed_files(testbed), testbed.nodes, testbed.nodes[0]._process
    public_key, path = node.public_key, node.path
    with lease.take():
        node.run("trap '' TERM; (while :; do sleep 7401; done) >/dev/null 2>&1 & sleep 0")
        wait_until(lambda: node.processes("sleep 7401"), what="a process on the node")
        change_files_and_settings(testbed, node)
    assert read_testbed_files(testbed) == before
    assert list(node.home.iterdir()) == []
    assert node.processes("sleep 7401") == []
    assert (node.public_key, node.path, node.login_shell) == (public_key, path, None)
    assert (node._process, started) == (server, [])
    node.wait_ready()


@pytest.mark.parametrize(
    "how",
    ["stopped", "restarted", "killed", "mounted"],
)
def test_stopped_or_changed_server_is_restarted(testbed: SshTestbed, how: str) -> None:
    started: list[int] = []
    lease = SshTestbedLease(testbed, on_start=started.append)
    before, (node,) = read_testbed_files(testbed), testbed.nodes
    for _ in range(2):
        with lease.take():
            if how == "stopped":
                node.stop()
            elif how == "restarted":
                node.write_host_key()
                node.restart(before="mount -t tmpfs -o size=1m tmpfs /root")
                node.run("touch /root/left")
            elif how == "killed":
                assert node._process is not None
                os.kill(node._process.pid, 9)
                node._process.wait(10)
            else:
                node.run("mkdir /root/mounted && mount -t tmpfs tmpfs /root/mounted && touch /root/mounted/x")
        assert read_testbed_files(testbed) == before
        assert node.run("ls -A /root; hostname").split() == ["gpu1"]
    assert len(started) == 2
    assert node._process is not None and started[-1] == node._process.pid
    with lease.take():
        pass
    assert len(started) == 2
