"""Grid nodes are promoted to a real cluster, run a job, and are demoted."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from genie import config
from genie.cli import grid_main
from genie.cluster.client import open_client
from genie.grid import own_wheel
from genie.grid.promotion import PYTHON_CANDIDATES
from genie.model.job import JobSpec, JobState, Resources
from genie.model.tenant import TokenRecord
from genie.telemetry import log
from tests.grid.quick_venv import QuickVenv
from tests.grid.ssh.test_shell_words import NARROW, set_login_shell
from tests.grid.testbed import SshNode, SshTestbed
from tests.integration.running_cluster import RunningCluster, StartedCluster
from tests.waiting import wait_until


@pytest.fixture(scope="module")
def module_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    """One cluster for all tests. Nodes that a test leaves in it do not respond."""
    state_dir = tmp_path_factory.mktemp("cluster") / "c"
    settings = config.load({"paths.state_dir": state_dir, "controller.port": 0, "cluster.node_id": "here"})
    with StartedCluster(settings) as started:
        yield started.running


@pytest.fixture
def cluster(module_cluster: RunningCluster, monkeypatch: pytest.MonkeyPatch) -> RunningCluster:
    module_cluster.configure_for_this_process(monkeypatch)
    return module_cluster


@pytest.fixture
def run_grid_cli(
    own_testbed: SshTestbed,
    quick_venv: QuickVenv,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> Iterator[Callable[..., tuple[int, str, str]]]:
    for node in own_testbed.nodes:
        quick_venv.install(node)
    file = tmp_path / "grid.yaml"
    file.write_text(own_testbed.grid_yaml(more="remote_root: ~/work space\nssh: {connect_timeout: 10}\n"))
    monkeypatch.setenv("GENIE_GRID_FILE", str(file))
    monkeypatch.setenv("GENIE_GRID_SSH_CONFIG", str(own_testbed.ssh_config))

    def run(*argv: str) -> tuple[int, str, str]:
        capfd.readouterr()
        code = grid_main(list(argv))
        return (code, *capfd.readouterr())

    yield run
    log.reset()


def create_environment(node: SshNode) -> None:
    """Create an environment on the node that uses the dependencies of this machine, without downloads."""
    node.run(f"{node.bin}/python3 -m venv '/root/work space/genie_env'")
    pth = next((node.home / "work space/genie_env/lib").glob("python3*")) / "site-packages" / "here.pth"
    pth.write_text(str(Path(msgspec.__file__).parents[1]))


async def run_job_on(cluster: RunningCluster, node: str) -> JobState:
    async with open_client(cluster.settings()) as client:
        job = await client.submit(
            JobSpec(name="where", command=("hostname",), resources=Resources(gpus=0), node_id=node)
        )
        return (await client.wait_job(job.job_id, timeout_s=60)).state


@pytest.mark.long("Genie is installed on the node twice, and agents start there")
def test_node_is_promoted_runs_a_job_and_is_demoted(
    own_testbed: SshTestbed, cluster: RunningCluster, run_grid_cli: Callable[..., tuple[int, str, str]]
) -> None:
    node = own_testbed["gpu1"]
    create_environment(node)
    where = f"{cluster.host}:{cluster.port}"
    code, out, err = run_grid_cli("promote", "gpu1", "--controller", where, "--json")
    assert code == 0, out + err
    assert json.loads(out)["nodes"] == [{"node": "gpu1", "outcome": "promoted", "error": "", "exit_code": 0}]
    assert cluster.token not in err
    assert asyncio.run(run_job_on(cluster, "gpu1")) is JobState.SUCCEEDED
    assert '"already promoted"' in run_grid_cli("promote", "gpu1", "--controller", where, "--json")[1]

    code, out, err = run_grid_cli("demote", "gpu1", "--json")
    assert code == 0, out + err
    assert json.loads(out)["nodes"][0]["outcome"] == "demoted"
    assert node.run("ls -A '/root/work space'") == ""
    assert not node.processes("genie")
    assert '"not promoted"' in run_grid_cli("demote", "gpu1", "--json")[1]

    create_environment(node)
    code, out, err = run_grid_cli("promote", "gpu1", "--controller", where, "--json")
    assert (code, json.loads(out)["nodes"][0]["outcome"]) == (0, "promoted"), out + err
    assert run_grid_cli("demote", "gpu1", "--json")[0] == 0  # the cluster is shared with other tests


def test_demote_works_with_another_login_shell(
    own_testbed: SshTestbed, cluster: RunningCluster, run_grid_cli: Callable[..., tuple[int, str, str]]
) -> None:
    node = own_testbed["gpu1"]
    set_login_shell(node, NARROW)
    node.run("mkdir -p '/root/work space/genie_env'")
    code, out, err = run_grid_cli("demote", "gpu1", "--json")
    assert (code, json.loads(out)["nodes"][0]["outcome"]) == (0, "not promoted"), out + err
    assert node.run("ls -A '/root/work space'") == ""


def test_incomplete_environment_is_finished(
    own_testbed: SshTestbed,
    cluster: RunningCluster,
    run_grid_cli: Callable[..., tuple[int, str, str]],
    tmp_path: Path,
) -> None:
    node = own_testbed["gpu1"]
    node.run("python3 -m venv --without-pip '/root/work space/genie_env'")
    (tmp_path / "wheels").mkdir()
    where = f"{cluster.host}:{cluster.port}"
    argv = ("promote", "gpu1", "--controller", where, "--wheels", str(tmp_path / "wheels"), "--json")
    error = json.loads(run_grid_cli(*argv)[1])["nodes"][0]["error"]
    assert "No matching distribution" in error  # printed by pip, so pip is installed
    assert (node.home / "work space/genie_env/bin/pip").exists()


_BROKEN_VENV = """#!/bin/sh
if [ "$1 $2" != "-m venv" ]; then exec /usr/bin/python3 "$@"; fi
mkdir -p "$3/bin"
printf '#!/bin/sh\\n' > "$3/bin/pip"
printf '#!/bin/sh\\n' > "$3/bin/python"
printf '#!/bin/sh\\nmkdir -p "$GENIE_STATE_DIR"\\n[ "$1" = down ] || { echo broken; exit 1; }\\n' \\
    > "$3/bin/genie"
chmod 755 "$3"/bin/*
"""


def test_failed_join_leaves_no_token_and_no_environment(
    own_testbed: SshTestbed, cluster: RunningCluster, run_grid_cli: Callable[..., tuple[int, str, str]]
) -> None:
    node = own_testbed["gpu1"]
    (node.bin / "python3").write_text(_BROKEN_VENV)
    where = f"{cluster.host}:{cluster.port}"
    result = json.loads(run_grid_cli("promote", "gpu1", "--controller", where, "--json")[1])["nodes"][0]
    assert result["outcome"] == "failed"
    assert "could not join the cluster" in result["error"] and "broken" in result["error"]
    assert node.run("ls -A '/root/work space'") == ""

    found = asyncio.run(list_gpu1_tokens(cluster))
    assert found and all(token.revoked_at or token.used_at for token in found)


@pytest.mark.parametrize("step", ["install", "join"])
def test_ctrl_c_leaves_no_token_and_no_environment(
    own_testbed: SshTestbed,
    cluster: RunningCluster,
    run_grid_cli: Callable[..., tuple[int, str, str]],
    step: str,
) -> None:
    node = own_testbed["gpu1"]
    broken = "echo broken; exit 1"
    assert broken in _BROKEN_VENV
    script = _BROKEN_VENV.replace(broken, "sleep 5903")
    if step == "install":
        pip = "printf '#!/bin/sh\\n' > \"$3/bin/python\""
        assert pip in script
        script = script.replace(pip, "printf '#!/bin/sh\\nsleep 5903\\n' > \"$3/bin/python\"")
    (node.bin / "python3").write_text(script)
    where = f"{cluster.host}:{cluster.port}"
    command = [sys.executable, "-m", "genie", "grid", "promote", "gpu1", "--controller", where]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            wait_until(lambda: node.processes("sleep 5903"), what=f"the {step}", timeout_s=60)
        finally:
            process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "gpu1: removing the incomplete installation" in errors
    assert node.run("ls -A '/root/work space'") == ""
    assert all(token.revoked_at or token.used_at for token in asyncio.run(list_gpu1_tokens(cluster)))
    for pid in node.processes("sleep 5903"):
        os.kill(pid, signal.SIGKILL)


async def list_gpu1_tokens(cluster: RunningCluster) -> list[TokenRecord]:
    async with open_client(cluster.settings()) as client:
        return [token for token in await client.list_tokens() if token.name == "grid-gpu1"]


def test_failed_install_removes_only_what_it_created(
    own_testbed: SshTestbed,
    cluster: RunningCluster,
    run_grid_cli: Callable[..., tuple[int, str, str]],
    tmp_path: Path,
) -> None:
    node = own_testbed["gpu1"]
    node.run("mkdir -p '/root/work space/.genie' && touch '/root/work space/.genie/kept'")
    (tmp_path / "wheels").mkdir()
    where = f"{cluster.host}:{cluster.port}"
    argv = ("promote", "gpu1", "--controller", where, "--wheels", str(tmp_path / "wheels"), "--json")
    assert "No matching distribution" in json.loads(run_grid_cli(*argv)[1])["nodes"][0]["error"]
    assert node.run("cd '/root/work space' && find . -type f").split() == ["./.genie/kept"]


def test_wrong_address_of_the_controller_is_found_before_the_installation(
    own_testbed: SshTestbed,
    cluster: RunningCluster,
    run_grid_cli: Callable[..., tuple[int, str, str]],
    unused_tcp_port: int,
) -> None:
    where = f"{cluster.host}:{unused_tcp_port}"
    code, out, err = run_grid_cli("promote", "gpu1", "--controller", where, "--json")
    (result,) = json.loads(out)["nodes"]
    assert (code, result["outcome"]) == (1, "failed")
    assert f"node gpu1: could not reach the controller at {where}" in result["error"]
    assert "Connection refused" in result["error"] and "--controller" in result["error"]
    assert "installing" not in err and "uploading" not in err
    assert own_testbed["gpu1"].run("ls -A '/root/work space' 2>&1 || true").find("genie_env") == -1


def test_each_failing_node_has_its_reason(
    own_testbed: SshTestbed, cluster: RunningCluster, run_grid_cli: Callable[..., tuple[int, str, str]]
) -> None:
    own_testbed["gpu1"].stop()
    for name in PYTHON_CANDIDATES:
        (own_testbed["gpu2"].bin / name).write_text("#!/bin/sh\necho 3.8\n")
        (own_testbed["gpu2"].bin / name).chmod(0o755)
    where = f"{cluster.host}:{cluster.port}"
    code, out, _ = run_grid_cli("promote", "--all", "--controller", where, "--json")
    assert code == 255
    first, second = json.loads(out)["nodes"]
    assert (first["outcome"], second["outcome"]) == ("unreachable", "failed")
    assert "gpu1" in first["error"]
    assert "could not reach" in first["error"]
    assert "gpu2 has no Python 3.11 or newer: python3 3.8" in second["error"]


def test_cluster_on_loopback_is_rejected(
    cluster: RunningCluster, run_grid_cli: Callable[..., tuple[int, str, str]]
) -> None:
    code, _, err = run_grid_cli("promote", "gpu1")
    assert code == 2
    assert "genie up --bind" in err


@pytest.mark.parametrize("argv", [("promote",), ("promote", "gpu1", "--all"), ("demote",)])
def test_nodes_must_be_selected(
    argv: tuple[str, ...], run_grid_cli: Callable[..., tuple[int, str, str]]
) -> None:
    code, _, err = run_grid_cli(*argv)
    assert code == 2
    assert "--all" in err


def test_package_that_looks_like_an_option_is_rejected(
    run_grid_cli: Callable[..., tuple[int, str, str]],
) -> None:
    code, _, err = run_grid_cli("promote", "gpu1", "--package=--index-url=http://127.0.0.1:1")
    assert (code, "--package '--index-url=http://127.0.0.1:1' is not allowed" in err) == (2, True), err


def test_wheel_is_complete_and_reproducible() -> None:
    name, content = own_wheel.build_genie_wheel()
    assert name.endswith("-py3-none-any.whl")
    assert own_wheel.build_genie_wheel() == (name, content)
    names = zipfile.ZipFile(io.BytesIO(content)).namelist()
    assert "genie/grid/remote/core.py" in names
    assert any(each.startswith("genie/_native/scheduler/") for each in names)
    assert not any("__pycache__" in each for each in names)
