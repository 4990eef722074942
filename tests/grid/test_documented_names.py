"""The public names of genie.grid as the Grid document uses them, in scripts and inside an event loop."""

from __future__ import annotations

import asyncio
import pwd
import subprocess
import sys
from functools import lru_cache
from pathlib import Path

import pytest

import genie.grid
from genie.errors import ConfigError, UnreachableError, UsageError
from genie.grid import Executor, OptimizedExecutor, check_all_nodes, find_best_node, smart_sync
from genie.grid.health.check import HealthState
from genie.grid.runs.launch import grid_metrics
from genie.grid.sync.local_tree import resolve_local_root
from tests.grid.testbed import SshTestbed

LIMITS = "ssh: {connect_timeout: 20, max_retries: 0}\nhealth_check: {timeout: 20, cpu_weight: 0}\n"
"""Scores depend on GPUs only, because all nodes share the load of this machine."""


@pytest.fixture
def project(own_testbed: SshTestbed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, with config/cluster_config.yaml. gpu2 is the best node."""
    folder = tmp_path / "project"
    (folder / "config").mkdir(parents=True)
    (folder / "config/cluster_config.yaml").write_text(own_testbed.grid_yaml(more=LIMITS))
    (folder / "train.py").write_text("import sys; print('trained', *sys.argv[1:])\n")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("GENIE_GRID_SSH_CONFIG", str(own_testbed.ssh_config))
    monkeypatch.setenv("GENIE_STATE_DIR", str(tmp_path / "state"))
    own_testbed["gpu1"].gpus(1, lines=["0, NVIDIA H100, GPU-1, 1000, 900, 0, 30, 0"])
    own_testbed["gpu2"].gpus(1, lines=["0, NVIDIA H100, GPU-2, 1000, 100, 0, 30, 0"])
    return folder


def test_names_are_imported_lazily() -> None:
    for name in genie.grid.__all__:
        assert getattr(genie.grid, name) is not None
    assert OptimizedExecutor is Executor
    program = "import sys, genie.grid; sys.exit('asyncssh' in sys.modules or 'ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0


def test_find_best_node_uses_file_in_current_directory(project: Path) -> None:
    @lru_cache(maxsize=1)
    def get_best_node() -> str:
        return find_best_node()

    assert get_best_node() == "gpu2"
    assert find_best_node(project / "config/cluster_config.yaml") == "gpu2"


def test_check_all_nodes_sorts_by_score(project: Path, own_testbed: SshTestbed, tmp_path: Path) -> None:
    assert [(node.name, node.score) for node in check_all_nodes()] == [("gpu2", 30.0), ("gpu1", 270.0)]
    own_testbed["gpu2"].stop()
    first, last = check_all_nodes(fresh=True)
    assert (first.name, last.name, last.state) == ("gpu1", "gpu2", HealthState.UNREACHABLE)
    assert grid_metrics(tmp_path / "state").read_snapshot().scores == {"gpu1": 270.0, "gpu2": None}


def test_smart_sync_sends_only_changes(project: Path, own_testbed: SshTestbed) -> None:
    first = smart_sync()
    assert [(each.node, each.sent_files, each.error) for each in first] == [
        ("gpu1", 2, None),
        ("gpu2", 2, None),
    ]
    (project / "train.py").write_text("print('changed')\n")
    assert [each.sent_files for each in smart_sync(project, nodes=["gpu1"])] == [1]
    text = {node.name: (node.home / "grid_workspace/train.py").read_text() for node in own_testbed.nodes}
    assert ("changed" in text["gpu1"], "changed" in text["gpu2"]) == (True, False)


def test_smart_sync_reports_unreachable_node(project: Path, own_testbed: SshTestbed) -> None:
    own_testbed["gpu1"].stop()
    lost, sent = smart_sync()
    assert isinstance(lost.error, UnreachableError) and sent.error is None


def test_run_distributed_syncs_current_directory(project: Path) -> None:
    with OptimizedExecutor() as executor:
        result = executor.run_distributed("python3 train.py --epochs 100")
        assert (str(result), result.node) == ("trained --epochs 100", "gpu2")
        (project / "train.py").write_text("print('again')\n")
        assert str(executor.run_distributed("python3 train.py", sync=None)) == "trained"
        assert str(executor.run_distributed("python3 train.py")) == "again"


@pytest.mark.parametrize(
    ("folder", "why"),
    [
        (".", "it is the home directory"),
        ("..", "it contains the home directory"),
        ("~/..", "it contains the home directory"),
        ("/", "it is the root of the file system"),
        ("train.py", "it is not a folder"),
        ("~no-such-user/x", "home directory"),
        ("a\0b", "null"),
        ("loop", "loop|symbolic links"),
        ("none", "No such file"),
    ],
)
def test_invalid_or_home_directory_is_not_synced(
    project: Path, monkeypatch: pytest.MonkeyPatch, folder: str, why: str
) -> None:
    monkeypatch.setenv("HOME", str(project))
    (project / "loop").symlink_to("loop")
    rejected = pytest.raises(UsageError, match=f"^could not send .*({why})")
    with Executor() as executor, rejected as run_error:
        executor.run_distributed("true", sync=folder)
    assert run_error.value.hint.endswith("pass its path, or sync=None to send nothing")
    with rejected as sync_error:
        smart_sync(folder)
    assert (sync_error.value.message, sync_error.value.hint[-13:]) == (
        run_error.value.message,
        "pass its path",
    )


def test_user_without_home_may_sync_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "~")
    monkeypatch.chdir(tmp_path)
    assert resolve_local_root(Path()) == tmp_path


@pytest.mark.parametrize("home", ["", "/", "here", "elsewhere", "loop"])
def test_home_in_user_database_is_not_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: str
) -> None:
    (tmp_path / "user/project").mkdir(parents=True)
    (tmp_path / "loop").symlink_to("loop")
    monkeypatch.setattr(
        pwd, "getpwuid", lambda _uid: pwd.struct_passwd(("ann", "x", 1, 1, "", str(tmp_path / "user"), ""))
    )
    monkeypatch.setenv("HOME", str(tmp_path / home) if home in ("elsewhere", "loop") else home)
    with pytest.raises(UsageError, match="it is the home directory"):
        resolve_local_root(tmp_path / "user")
    with pytest.raises(UsageError, match="it contains the home directory"):
        resolve_local_root(tmp_path)
    assert resolve_local_root(tmp_path / "user/project") == tmp_path / "user/project"


def test_unknown_user_may_sync_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/")
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)
    assert resolve_local_root(tmp_path) == tmp_path


async def test_functions_work_inside_a_running_event_loop(project: Path) -> None:
    assert asyncio.get_running_loop().is_running()
    assert find_best_node() == "gpu2"
    assert [node.name for node in await asyncio.to_thread(check_all_nodes)] == ["gpu2", "gpu1"]
    assert [each.error for each in smart_sync(nodes=["gpu1"])] == [None]


def test_missing_grid_file_error_has_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"config/cluster_config\.yaml"):
        find_best_node()
