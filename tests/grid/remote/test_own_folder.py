"""Symbolic links at .grid: helper and shell script apply the same rule."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from genie.grid.remote.core import OpError
from genie.grid.remote.own_folder import grid_folder_path
from genie.grid.ssh.shell_words import CHECK_GRID_FOLDER_LINK_SCRIPT, quote_path


@pytest.mark.parametrize(
    ("target", "followed"),
    [
        ("home/elsewhere", True),
        ("root/elsewhere", True),
        ("home/link-to-home-elsewhere", True),
        ("home", False),
        ("root", False),
        ("home-of-another/elsewhere", False),
        ("outside", False),
        ("home/link-out", False),
        ("home/nothing", False),
        ("home/file", False),
    ],
)
def test_link_is_followed_only_within_home_and_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str, followed: bool
) -> None:
    home, root = tmp_path / "home", tmp_path / "root"
    for name in ("home/elsewhere", "root/elsewhere", "home-of-another/elsewhere", "outside"):
        (tmp_path / name).mkdir(parents=True)
    (home / "link-to-home-elsewhere").symlink_to(home / "elsewhere")
    (home / "link-out").symlink_to(tmp_path / "outside")
    (home / "file").touch()
    (root / ".grid").symlink_to(tmp_path / target)
    monkeypatch.setenv("HOME", str(home))
    try:
        by_helper = bool(grid_folder_path(str(root), "runs"))
    except OpError:
        by_helper = False
    script = f"root={quote_path(str(root))}\n{CHECK_GRID_FOLDER_LINK_SCRIPT}\n_grid_refused_link"
    by_shell = subprocess.run(["sh", "-c", script], capture_output=True, timeout=30).returncode != 0
    assert (by_helper, by_shell) == (followed, followed)
