"""grid-cli sync: output, JSON and exit codes."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from genie.grid.runs.launch import grid_metrics
from tests.cli.grid.loopback_grid import run_grid_cli_on_terminal
from tests.forkserver import ForkServer
from tests.grid.sync.trees import read_tree, write_files
from tests.grid.testbed import SshTestbed


@pytest.fixture(scope="module")
def two_node_testbed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshTestbed]:
    with SshTestbed(tmp_path_factory.mktemp("testbed") / "nodes", count=2) as testbed:
        yield testbed


@pytest.fixture
def run_grid_command(genie, two_node_testbed: SshTestbed, tmp_path: Path, monkeypatch):
    """Run a grid command on these nodes."""
    file = tmp_path / "grid.yaml"
    file.write_text(two_node_testbed.grid_yaml(more="ssh: {connect_timeout: 10, max_retries: 0}\n"))
    monkeypatch.setenv("GENIE_GRID_SSH_CONFIG", str(two_node_testbed.ssh_config))
    return lambda *argv: genie("grid", "--config", str(file), *argv)


def test_sync_prints_a_summary(run_grid_command, two_node_testbed: SshTestbed, tmp_path: Path) -> None:
    write_files(tmp_path / "one", {b"a": b"1", b"b/c": b"22"})
    first = run_grid_command("sync", str(tmp_path / "one"))
    assert first.code == 0, first.err
    assert [line.split()[:3] for line in first.out.splitlines()[1:]] == [
        ["gpu1", "2", "3"],
        ["gpu2", "2", "3"],
    ]
    assert read_tree(two_node_testbed["gpu2"].home / "grid_workspace") == read_tree(tmp_path / "one")
    assert "up to date" in run_grid_command("sync", str(tmp_path / "one")).out


@pytest.mark.parametrize("argv", [("sync",), ("run", "true", "--node", "gpu1", "--node", "gpu2", "--sync")])
def test_sync_shows_progress_on_a_terminal(
    run_grid_command, tmp_path: Path, argv: tuple[str, ...], fork_server: ForkServer
) -> None:
    folder = tmp_path / f"shown-{argv[0]}"
    write_files(folder, {argv[0].encode(): b"1"})
    config = ["--config", str(tmp_path / "grid.yaml")]
    code, shown = run_grid_cli_on_terminal(fork_server, [*config, *argv, str(folder)], typed=b"", after=b"")
    assert (code, "sending to 2 nodes: 2 files, 2 B 100%\r\x1b[K" in shown) == (0, True), shown


def test_metrics_count_a_sync_per_node(run_grid_command, tmp_path: Path) -> None:
    write_files(tmp_path / "counted", {b"counted": b"1"})
    before = sum(grid_metrics(Path(os.environ["GENIE_STATE_DIR"])).read_snapshot().syncs.counts)
    assert run_grid_command("sync", str(tmp_path / "counted")).code == 0
    assert sum(grid_metrics(Path(os.environ["GENIE_STATE_DIR"])).read_snapshot().syncs.counts) == before + 2


def test_sync_prints_json(run_grid_command, tmp_path: Path) -> None:
    write_files(tmp_path / "two", {b"x": b"1"})
    (report,) = json.loads(run_grid_command("sync", str(tmp_path / "two"), "--node", "gpu1", "--json").out)
    assert (report["node"], report["sent_files"], report["error"]) == ("gpu1", 1, None)
    (report,) = json.loads(run_grid_command("sync", str(tmp_path / "two"), "--node", "gpu1", "--json").out)
    assert report["unchanged"] is True


def test_dry_run_lists_the_files(run_grid_command, two_node_testbed: SshTestbed, tmp_path: Path) -> None:
    write_files(tmp_path / "three", {b"would-be": b"1"})
    ran = run_grid_command("sync", str(tmp_path / "three"), "--node", "gpu1", "--dry-run")
    assert ran.code == 0 and "would-be would be sent" in ran.err
    assert not (two_node_testbed["gpu1"].home / "grid_workspace/would-be").exists()


def test_dry_run_lists_files_to_delete(
    run_grid_command, two_node_testbed: SshTestbed, tmp_path: Path
) -> None:
    write_files(tmp_path / "six", {b"six": b"1", b"stays": b"1"})
    assert run_grid_command("sync", str(tmp_path / "six"), "--node", "gpu1").code == 0
    (tmp_path / "six" / "six").unlink()
    ran = run_grid_command("sync", str(tmp_path / "six"), "--node", "gpu1", "--dry-run")
    assert (ran.code, ran.err) == (0, "gpu1: six would be deleted\n")
    assert (two_node_testbed["gpu1"].home / "grid_workspace/six").exists()


def test_progress_counts_one_file_in_the_singular(
    run_grid_command, tmp_path: Path, fork_server: ForkServer
) -> None:
    write_files(tmp_path / "single", {b"single": b"1"})
    argv = ["--config", str(tmp_path / "grid.yaml"), "sync", str(tmp_path / "single"), "--node", "gpu1"]
    code, shown = run_grid_cli_on_terminal(fork_server, argv, typed=b"", after=b"")
    assert (code, "sending to 1 node: 1 file, 1 B 100%" in shown) == (0, True), shown


def test_usage_errors_exit_with_2(run_grid_command, tmp_path: Path) -> None:
    write_files(tmp_path / "four", {b"a": b"1"})
    assert run_grid_command("sync", str(tmp_path / "nowhere")).code == 2
    ran = run_grid_command("sync", str(tmp_path / "four"), "--node", "gpu9")
    assert ran.code != 0 and "gpu9" in ran.err


@pytest.mark.parametrize("argv", [("sync", "~"), ("run", "true", "--sync", ".")])
def test_home_directory_is_rejected(
    run_grid_command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, argv: tuple[str, ...]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    ran = run_grid_command(*argv)
    assert (ran.code, f"could not send {tmp_path}: it is the home directory" in ran.err) == (2, True), ran.err


def test_unreachable_node_exits_with_255_and_others_are_synced(
    run_grid_command, two_node_testbed: SshTestbed, tmp_path: Path
) -> None:
    write_files(tmp_path / "five", {b"five": b"1"})
    two_node_testbed["gpu2"].stop()
    try:
        ran = run_grid_command("sync", str(tmp_path / "five"))
        assert ran.code == 255 and "gpu2" in ran.err
        assert [line.split()[-1] for line in ran.out.splitlines()[1:]] == ["done", "unreachable"]
        assert (two_node_testbed["gpu1"].home / "grid_workspace/five").exists()
    finally:
        two_node_testbed["gpu2"].start()
        two_node_testbed["gpu2"].wait_ready()
