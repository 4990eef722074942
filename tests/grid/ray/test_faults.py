"""Failed starts of Ray are reported and cleaned up without touching other processes.

`ray` on these nodes is a script that fails as required; test_cluster.py uses the real one.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from genie.errors import RayError, UnreachableError
from genie.grid.grid_file import GridFile
from genie.grid.ray.cluster import RayCluster
from genie.grid.ssh.pool import SshPool
from tests.grid.ray_testbed import install_ray_program, write_ray_grid_file
from tests.grid.testbed import SshTestbed
from tests.waiting import until

FOLDER = "/root/grid_workspace/.grid/ray"


def make_fake_ray_script(start: str, *, version: str = "2.60.0") -> str:
    return f'#!/bin/sh\ncase "$1" in\n--version) echo "ray, version {version}";;\nstart) {start};;\nesac\n'


@contextlib.asynccontextmanager
async def open_ray_cluster(
    testbed: SshTestbed, folder: Path, file: GridFile | None = None
) -> AsyncIterator[RayCluster]:
    file = file or write_ray_grid_file(testbed, folder / "grid.yaml")
    async with SshPool(file, ssh_config=testbed.ssh_config) as pool:
        yield RayCluster(pool, file, state_dir=folder / "state")


def list_matching_processes(testbed: SshTestbed, text: str) -> list[int]:
    return [pid for node in testbed.nodes for pid in node.processes(text)]


def list_record_files(testbed: SshTestbed) -> str:
    files = f"ls {FOLDER} 2>/dev/null | grep -v -e lock -e start.log || true"
    return "".join(node.run(files) for node in testbed.nodes)


async def test_failing_node_stops_all_nodes(own_testbed: SshTestbed, tmp_path: Path) -> None:
    # Like Ray's workers, which overwrite their environment and outlive their parents.
    install_ray_program(
        own_testbed["gpu1"], make_fake_ray_script("sleep 5101 & (env -i sleep 5103 &); exit 0")
    )
    install_ray_program(
        own_testbed["gpu2"], make_fake_ray_script("sleep 5102 & echo the raylet is not well; exit 7")
    )
    async with open_ray_cluster(own_testbed, tmp_path) as cluster:
        with pytest.raises(RayError) as caught:
            await cluster.start()
        assert "gpu2" in caught.value.message
        assert "exited with code 7" in caught.value.message
        assert "the raylet is not well" in caught.value.message
        assert (list_matching_processes(own_testbed, "sleep 510"), list_record_files(own_testbed)) == ([], "")
        assert not cluster.token_file.exists()
        assert (await cluster.status()).state == "stopped"


async def test_namespace_and_log_level_are_passed_to_ray(own_testbed: SshTestbed, tmp_path: Path) -> None:
    install_ray_program(own_testbed["gpu1"], make_fake_ray_script("env > /root/ray-env; exit 1"))
    file = write_ray_grid_file(
        own_testbed, tmp_path / "grid.yaml", nodes=["gpu1"], more=", namespace: lab, log_level: debug"
    )
    async with open_ray_cluster(own_testbed, tmp_path, file) as cluster:
        with pytest.raises(RayError):
            await cluster.start()
    found = set((own_testbed["gpu1"].home / "ray-env").read_text().splitlines())
    assert {"RAY_NAMESPACE=lab", "RAY_BACKEND_LOG_LEVEL=debug", "RAY_AUTH_MODE=token"} <= found


async def test_start_is_undone_after_disconnect(own_testbed: SshTestbed, tmp_path: Path) -> None:
    install_ray_program(own_testbed["gpu1"], make_fake_ray_script("sleep 5201 & sleep 5202; exit 0"))
    file = write_ray_grid_file(own_testbed, tmp_path / "grid.yaml", nodes=["gpu1"])
    async with open_ray_cluster(own_testbed, tmp_path, file) as cluster:
        starting = asyncio.ensure_future(cluster.start())
        await until(lambda: list_matching_processes(own_testbed, "sleep 5202"), what="the start")
        own_testbed["gpu1"].kill_connections()
        with pytest.raises(UnreachableError, match="not started: node gpu1: connection lost"):
            await starting
        assert (list_matching_processes(own_testbed, "sleep 520"), list_record_files(own_testbed)) == ([], "")


async def test_start_is_undone_after_cancellation(own_testbed: SshTestbed, tmp_path: Path) -> None:
    install_ray_program(own_testbed["gpu1"], make_fake_ray_script("sleep 5301 & sleep 5302; exit 0"))
    file = write_ray_grid_file(own_testbed, tmp_path / "grid.yaml", nodes=["gpu1"])
    async with open_ray_cluster(own_testbed, tmp_path, file) as cluster:
        starting = asyncio.ensure_future(cluster.start())
        await until(lambda: list_matching_processes(own_testbed, "sleep 5302"), what="the start")
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        await until(
            lambda: (
                not list_matching_processes(own_testbed, "sleep 530") and not list_record_files(own_testbed)
            ),
            what="the end",
        )


async def test_version_mismatch_is_rejected_before_start(own_testbed: SshTestbed, tmp_path: Path) -> None:
    install_ray_program(own_testbed["gpu1"], make_fake_ray_script("sleep 5401 & exit 0"))
    install_ray_program(own_testbed["gpu2"], make_fake_ray_script("sleep 5402 & exit 0", version="2.9.1"))
    async with open_ray_cluster(own_testbed, tmp_path) as cluster:
        with pytest.raises(RayError, match="same version") as caught:
            await cluster.start()
    assert "gpu1: Ray 2.60.0" in caught.value.message
    assert "gpu2: Ray 2.9.1" in caught.value.message
    assert (list_matching_processes(own_testbed, "sleep 540"), list_record_files(own_testbed)) == ([], "")


async def test_ray_in_grid_env_takes_precedence_over_path(own_testbed: SshTestbed, tmp_path: Path) -> None:
    install_ray_program(own_testbed["gpu1"], make_fake_ray_script("exit 1", version="1.0.0"))
    install_ray_program(own_testbed["gpu2"], make_fake_ray_script("exit 1", version="2.0.0"))
    own = own_testbed["gpu1"].home / "grid_workspace" / "grid_env" / "bin"
    own.mkdir(parents=True)
    (own / "ray").write_text(make_fake_ray_script("exit 1", version="3.0.0"))
    (own / "ray").chmod(0o755)
    async with open_ray_cluster(own_testbed, tmp_path) as cluster:
        with pytest.raises(RayError, match=r"gpu1: Ray 3\.0\.0") as caught:
            await cluster.start()
    assert "gpu2: Ray 2.0.0" in caught.value.message


async def test_python_of_ray_is_first_on_path(own_testbed: SshTestbed, tmp_path: Path) -> None:
    node = own_testbed["gpu1"]
    own = node.home / "grid_workspace" / "grid_env" / "bin"
    own.mkdir(parents=True)
    (own / "ray").write_text(make_fake_ray_script('echo "$PATH" > ~/path-of-ray; exit 1'))
    (own / "ray").chmod(0o755)
    async with open_ray_cluster(own_testbed, tmp_path) as cluster:
        with pytest.raises(RayError):
            await cluster.start(nodes=["gpu1"])
    assert (node.home / "path-of-ray").read_text() == f"/root/grid_workspace/grid_env/bin:{node.path}\n"


async def test_port_in_use_is_reported_with_its_key(own_testbed: SshTestbed, tmp_path: Path) -> None:
    for node in own_testbed.nodes:
        install_ray_program(node, make_fake_ray_script("sleep 5501 & exit 0"))
    file = write_ray_grid_file(own_testbed, tmp_path / "grid.yaml")
    with socket.create_server(("127.0.0.1", file.ray.redis_port)):
        async with open_ray_cluster(own_testbed, tmp_path, file) as cluster:
            with pytest.raises(RayError, match=rf"port {file.ray.redis_port} \(ray.redis_port\)"):
                await cluster.start()
    assert (list_matching_processes(own_testbed, "sleep 5501"), list_record_files(own_testbed)) == ([], "")


async def test_node_without_ray_or_unreachable_fails_the_start(
    own_testbed: SshTestbed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_ray_program(own_testbed["gpu1"], make_fake_ray_script("sleep 5601 & exit 0"))
    async with open_ray_cluster(own_testbed, tmp_path) as cluster:
        with pytest.raises(RayError, match="Ray is not installed on gpu2"):
            await cluster.start()
        monkeypatch.setattr("genie.grid.ray.cluster.NODES_JOIN_TIMEOUT_S", 0.5)
        shown: list[tuple[str, str]] = []
        with pytest.raises(RayError, match="gpu1 did not join"):
            await cluster.start(allow_missing=True, on_progress=lambda *each: shown.append(each))
        assert ("gpu2", "skipped: Ray is not installed") in shown
        own_testbed["gpu2"].stop()
        with pytest.raises(UnreachableError, match="cannot join") as caught:
            await cluster.start()
        assert "gpu2" in caught.value.message
        assert "--allow-missing" in caught.value.hint
        assert (await cluster.status()).nodes[1].state == "unreachable"
    assert own_testbed["gpu1"].processes("sleep 5601") == []


async def test_start_fails_cleanly_if_head_does_not_listen(
    own_testbed: SshTestbed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("genie.grid.ray.cluster.NODES_JOIN_TIMEOUT_S", 0.5)
    install_ray_program(own_testbed["gpu1"], make_fake_ray_script("sleep 5701 & exit 0"))
    file = write_ray_grid_file(own_testbed, tmp_path / "grid.yaml", nodes=["gpu1"])
    async with open_ray_cluster(own_testbed, tmp_path, file) as cluster:
        with pytest.raises(RayError, match="gpu1 did not join"):
            await cluster.start()
    assert (list_matching_processes(own_testbed, "sleep 5701"), list_record_files(own_testbed)) == ([], "")


async def test_record_from_before_a_reboot_stops_nothing(own_testbed: SshTestbed, tmp_path: Path) -> None:
    """After a reboot the same PIDs belong to other processes."""
    node = own_testbed["gpu1"]
    node.run("sleep 5801 >/dev/null 2>&1 & sleep 0")
    (pid,) = node.processes("sleep 5801")
    start = node.run(f"cat /proc/{pid}/stat").rpartition(")")[2].split()[19]
    record = (
        f'{{"cluster": "c", "mark": "c.gpu1", "role": "head", "head": "h:1", "dashboard_port": 1, '
        f'"boot": "another", "session": {pid}, "processes": [[{pid}, "{start}"]], "session_dir": ""}}'
    )
    folder = node.home / "grid_workspace" / ".grid" / "ray"
    folder.mkdir(parents=True)
    (folder / "cluster.json").write_text(record)
    file = write_ray_grid_file(own_testbed, tmp_path / "grid.yaml", nodes=["gpu1"])
    async with open_ray_cluster(own_testbed, tmp_path, file) as cluster:
        assert (await cluster.status()).nodes[0].state == "dead"
        (report,) = await cluster.stop()
        assert (report.role, report.ended, report.error) == ("head", 0, "")
    assert node.processes("sleep 5801") == [pid]
    assert not (folder / "cluster.json").exists()


async def test_start_on_full_disk_leaves_no_record(own_testbed: SshTestbed, tmp_path: Path) -> None:
    node = own_testbed["gpu1"]
    install_ray_program(node, make_fake_ray_script("sleep 5901 & exit 0"))
    node.run(f"mkdir -p {FOLDER} && mount -t tmpfs -o size=16k tmpfs {FOLDER}")
    node.run(f"head -c 100000 /dev/zero > {FOLDER}/start.log || true")
    file = write_ray_grid_file(own_testbed, tmp_path / "grid.yaml", nodes=["gpu1"])
    async with open_ray_cluster(own_testbed, tmp_path, file) as cluster:
        with pytest.raises(RayError, match="No space left on device"):
            await cluster.start()
        (report,) = await cluster.stop()
        assert (report.role, report.error) == ("", "")
    assert node.run(f"ls {FOLDER}").split() == ["lock", "start.log"]
    node.run(f"umount {FOLDER}")
