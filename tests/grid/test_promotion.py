"""SSH nodes become nodes of a real cluster, run a job there, and come back."""

from __future__ import annotations

import asyncio
import io
import json
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from genie import config
from genie.cli import grid_main
from genie.cluster.client import open_client
from genie.grid import own_wheel
from genie.grid.promotion import PYTHONS
from genie.model.job import JobSpec, JobState, Resources
from genie.telemetry import log
from tests.grid.bed import Bed, Node
from tests.grid.test_shell_words import NARROW, give_login_shell
from tests.integration.running import RunningCluster, StartedCluster


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunningCluster]:
    settings = config.load(
        {"paths.state_dir": tmp_path / "c", "controller.port": 0, "cluster.node_id": "here"}
    )
    with StartedCluster(settings) as started:
        started.running.use(monkeypatch)
        yield started.running


@pytest.fixture
def grid_cli(
    own_bed: Bed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Iterator[Callable[..., tuple[int, str, str]]]:
    file = tmp_path / "grid.yaml"
    file.write_text(own_bed.grid_yaml(more="remote_root: ~/work space\nssh: {connect_timeout: 10}\n"))
    monkeypatch.setenv("GENIE_GRID_FILE", str(file))
    monkeypatch.setenv("GENIE_GRID_SSH_CONFIG", str(own_bed.ssh_config))

    def run(*argv: str) -> tuple[int, str, str]:
        capfd.readouterr()
        code = grid_main(list(argv))
        return (code, *capfd.readouterr())

    yield run
    log.reset()


def give_environment(node: Node) -> None:
    """An environment on the node that finds Genie's dependencies here: nothing is fetched."""
    node.run("python3 -m venv '/root/work space/genie_env'")
    pth = next((node.home / "work space/genie_env/lib").glob("python3*")) / "site-packages" / "here.pth"
    pth.write_text(str(Path(msgspec.__file__).parents[1]))


async def run_on(cluster: RunningCluster, node: str) -> JobState:
    async with open_client(cluster.settings()) as client:
        job = await client.submit(
            JobSpec(name="where", command=("hostname",), resources=Resources(gpus=0), node_id=node)
        )
        return (await client.wait_job(job.job_id, timeout_s=60)).state


def test_a_node_is_promoted_runs_a_job_and_is_demoted(
    own_bed: Bed, cluster: RunningCluster, grid_cli: Callable[..., tuple[int, str, str]]
) -> None:
    node = own_bed["gpu1"]
    give_environment(node)
    where = f"{cluster.host}:{cluster.port}"
    code, out, err = grid_cli("promote", "gpu1", "--controller", where, "--json")
    assert code == 0, out + err
    assert json.loads(out)["nodes"] == [{"node": "gpu1", "outcome": "promoted", "error": "", "exit_code": 0}]
    assert cluster.token not in err
    assert asyncio.run(run_on(cluster, "gpu1")) is JobState.SUCCEEDED
    assert '"was there"' in grid_cli("promote", "gpu1", "--controller", where, "--json")[1]

    code, out, err = grid_cli("demote", "gpu1", "--json")
    assert code == 0, out + err
    assert json.loads(out)["nodes"][0]["outcome"] == "demoted"
    assert node.run("ls -A '/root/work space'") == ""
    assert not node.processes("genie")
    assert '"was not there"' in grid_cli("demote", "gpu1", "--json")[1]

    give_environment(node)
    code, out, err = grid_cli("promote", "gpu1", "--controller", where, "--json")
    assert (code, json.loads(out)["nodes"][0]["outcome"]) == (0, "promoted"), out + err


def test_a_user_whose_login_shell_is_not_sh_is_demoted_all_the_same(
    own_bed: Bed, cluster: RunningCluster, grid_cli: Callable[..., tuple[int, str, str]]
) -> None:
    node = own_bed["gpu1"]
    give_login_shell(node, NARROW)
    node.run("mkdir -p '/root/work space/genie_env'")
    code, out, err = grid_cli("demote", "gpu1", "--json")
    assert (code, json.loads(out)["nodes"][0]["outcome"]) == (0, "was not there"), out + err
    assert node.run("ls -A '/root/work space'") == ""


def test_an_environment_whose_making_broke_off_is_finished(
    own_bed: Bed, cluster: RunningCluster, grid_cli: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    node = own_bed["gpu1"]
    node.run("python3 -m venv --without-pip '/root/work space/genie_env'")
    (tmp_path / "wheels").mkdir()
    where = f"{cluster.host}:{cluster.port}"
    argv = ("promote", "gpu1", "--controller", where, "--wheels", str(tmp_path / "wheels"), "--json")
    error = json.loads(grid_cli(*argv)[1])["nodes"][0]["error"]
    assert "No matching distribution" in error  # pip's own words: it is there
    assert (node.home / "work space/genie_env/bin/pip").exists()


def test_each_node_that_fails_is_named_with_its_own_reason(
    own_bed: Bed, cluster: RunningCluster, grid_cli: Callable[..., tuple[int, str, str]]
) -> None:
    own_bed["gpu1"].stop()
    for name in PYTHONS:
        (own_bed["gpu2"].bin / name).write_text("#!/bin/sh\necho 3.8\n")
        (own_bed["gpu2"].bin / name).chmod(0o755)
    where = f"{cluster.host}:{cluster.port}"
    code, out, _ = grid_cli("promote", "--all", "--controller", where, "--json")
    assert code == 255
    first, second = json.loads(out)["nodes"]
    assert (first["outcome"], second["outcome"]) == ("unreachable", "failed")
    assert "gpu1" in first["error"]
    assert "cannot be reached" in first["error"]
    assert "gpu2 has no Python 3.11 or newer: python3 3.8" in second["error"]


def test_a_cluster_that_listens_on_loopback_alone_is_not_offered_to_other_machines(
    cluster: RunningCluster, grid_cli: Callable[..., tuple[int, str, str]]
) -> None:
    code, _, err = grid_cli("promote", "gpu1")
    assert code == 2
    assert "genie up --bind" in err


@pytest.mark.parametrize("argv", [("promote",), ("promote", "gpu1", "--all"), ("demote",)])
def test_it_must_be_said_which_nodes(
    argv: tuple[str, ...], grid_cli: Callable[..., tuple[int, str, str]]
) -> None:
    code, _, err = grid_cli(*argv)
    assert code == 2
    assert "--all" in err


def test_a_package_can_not_be_an_option(grid_cli: Callable[..., tuple[int, str, str]]) -> None:
    code, _, err = grid_cli("promote", "gpu1", "--package=--index-url=http://127.0.0.1:1")
    assert (code, "--package '--index-url=http://127.0.0.1:1' is not allowed" in err) == (2, True), err


def test_the_wheel_has_the_package_and_its_cpp_sources_and_is_the_same_every_time() -> None:
    name, content = own_wheel.wheel()
    assert name.endswith("-py3-none-any.whl")
    assert own_wheel.wheel() == (name, content)
    names = zipfile.ZipFile(io.BytesIO(content)).namelist()
    assert "genie/grid/remote/core.py" in names
    assert any(each.startswith("genie/_native/scheduler/") for each in names)
    assert not any("__pycache__" in each for each in names)
