"""config init: writes the commented file and overwrites only with --force."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from genie.grid.grid_file import read_sample_grid_file_text
from tests.cli.conftest import CommandOutcome

Cli = Callable[..., CommandOutcome]


@pytest.fixture(autouse=True)
def _in_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_init_writes_the_default_grid_file(genie: Cli) -> None:
    missing = genie("grid", "config", "check")
    assert (missing.code, "grid-cli config init" in missing.err) == (2, True)
    done = genie("grid", "config", "init")
    assert (done.code, done.out) == (0, "config/cluster_config.yaml: written\n")
    assert "grid-cli nodes trust --all" in done.err
    assert Path("config/cluster_config.yaml").read_text() == read_sample_grid_file_text()
    assert genie("grid", "config", "check").code == 0


def test_check_reads_the_given_file(genie: Cli) -> None:
    Path("mine.yaml").write_text("nodes: [mine]\n")
    done = genie("grid", "config", "check", "mine.yaml")
    assert (done.code, done.out) == (0, "mine.yaml: valid, 1 node\n")
    Path("mine.yaml").write_text("nodes: mine\n")
    assert "mine.yaml:1: nodes must be a list" in genie("grid", "config", "check", "mine.yaml").err


def test_existing_file_is_kept_without_force(genie: Cli) -> None:
    Path("mine.yaml").write_text("nodes: [mine]\n")
    refused = genie("grid", "config", "init", "mine.yaml")
    assert (refused.code, "--force" in refused.err) == (2, True)
    assert Path("mine.yaml").read_text() == "nodes: [mine]\n"
    done = genie("grid", "config", "init", "mine.yaml", "--force", "--json")
    assert (done.code, json.loads(done.out)) == (0, {"file": "mine.yaml"})
    assert Path("mine.yaml").read_text() == read_sample_grid_file_text()


def test_init_writes_to_the_path_of_the_config_option(genie: Cli) -> None:
    assert genie("grid", "config", "init", "--config", "deep/own.yaml").code == 0
    assert Path("deep/own.yaml").exists()


def test_unwritable_path_is_named(genie: Cli) -> None:
    Path("file").touch()
    done = genie("grid", "config", "init", "file/below.yaml")
    assert (done.code, "could not write file/below.yaml" in done.err) == (2, True)


@pytest.mark.parametrize("name", ["a" * 300, "~no-such-user/grid.yaml"])
def test_invalid_file_name_is_rejected(genie: Cli, name: str) -> None:
    done = genie("grid", "config", "init", name)
    assert (done.code, "could not write" in done.err) == (2, True)


@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir, lambda path: path.symlink_to("/dev/null")])
def test_only_a_regular_file_is_overwritten(genie: Cli, make: Callable[[Path], None]) -> None:
    make(Path("odd"))
    done = genie("grid", "config", "init", "odd", "--force")
    assert (done.code, "not a regular file" in done.err) == (2, True)
    assert not Path("odd").is_file()


@pytest.mark.parametrize("options", [["mine.yaml", "--force"], ["new.yaml"]])
def test_partially_written_file_is_removed(options: list[str]) -> None:
    """A file size limit of 1 KiB simulates a full disk."""
    Path("mine.yaml").write_text("nodes: [mine]\n")
    limited = ["sh", "-c", "trap '' XFSZ; ulimit -f 1; exec \"$@\"", "sh", sys.executable]
    command = [*limited, "-B", "-m", "genie", "grid", "config", "init", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, "File too large" in done.stderr) == (2, True), done.stderr
    assert [path.name for path in Path().iterdir()] == ["mine.yaml"]
    assert Path("mine.yaml").read_text() == "nodes: [mine]\n"
