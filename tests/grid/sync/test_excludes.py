"""Exclusions: gitignore patterns of the grid file and of the tree."""

from __future__ import annotations

import random

import pytest
from pathspec import GitIgnoreSpec

from genie.errors import ConfigError
from genie.grid.grid_file import SyncSettings
from genie.grid.sync.excludes import ExclusionRules, IgnorePatterns
from tests.forkserver import ForkServer


def test_documented_patterns_exclude_their_files(tmp_path) -> None:
    excludes = ExclusionRules(tmp_path, SyncSettings().exclude_patterns)
    for path, is_folder in [
        (b".git", True),
        (b"a/__pycache__", True),
        (b".env", False),
        (b"a/b.pyc", False),
        (b"web/node_modules", True),
        (b"web/.next", True),
    ]:
        assert excludes.is_excluded(path, is_folder), path
    for path in (b"git", b"a/env", b"b.py", b"\xff\n.txt"):
        assert not excludes.is_excluded(path, False), path


def test_nearest_gitignore_decides_and_can_re_include(tmp_path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / ".gitignore").write_text("*.log\n/top\nbuild/\n")
    (tmp_path / "a" / ".gitignore").write_text("# a comment\n!keep.log\nlocal\n")
    excludes = ExclusionRules(tmp_path, ())
    assert excludes.is_excluded(b"x.log", False)
    assert excludes.is_excluded(b"a/x.log", False)
    assert not excludes.is_excluded(b"a/keep.log", False)
    assert excludes.is_excluded(b"a/local", False)
    assert not excludes.is_excluded(b"local", False)
    assert excludes.is_excluded(b"top", False)
    assert not excludes.is_excluded(b"a/top", False)
    assert excludes.is_excluded(b"a/build", True)
    assert not excludes.is_excluded(b"a/build", False)


def test_gitignore_cannot_re_include_what_the_grid_file_excludes(tmp_path) -> None:
    (tmp_path / ".gitignore").write_text("!.env\n")
    assert ExclusionRules(tmp_path, (".env",)).is_excluded(b".env", False)


def test_invalid_line_is_skipped_in_gitignore_and_rejected_in_the_grid_file(tmp_path) -> None:
    (tmp_path / ".gitignore").write_text("!\n*.log\n")
    assert ExclusionRules(tmp_path, ()).is_excluded(b"x.log", False)
    with pytest.raises(ConfigError, match="exclude_patterns"):
        ExclusionRules(tmp_path, ("!",))


def test_gitignore_that_is_a_link_is_ignored(tmp_path) -> None:
    (tmp_path / "rules").write_text("*\n")
    (tmp_path / ".gitignore").symlink_to("rules")
    assert not ExclusionRules(tmp_path, ()).is_excluded(b"a", False)


@pytest.mark.parametrize("seed", range(8))
def test_patterns_with_many_stars_keep_their_meaning(seed: int) -> None:
    chance = random.Random(seed)
    fitting = 0
    for _ in range(600):
        parts = chance.choices(["a", "b", "*", "*", "?", "/", "/**/", "[ab]"], k=chance.randint(3, 9))
        line = chance.choice(["", "", "/", "**/"]) + "".join(parts).strip("/") + chance.choice(["", "", "/"])
        try:
            (plain,) = GitIgnoreSpec.from_lines([line]).patterns
        except ValueError:
            continue
        if plain.regex is None:
            continue
        ours = IgnorePatterns([line])
        for _ in range(30):
            names = [
                "".join(chance.choices("aab", k=chance.randint(1, 4))) for _ in range(chance.randint(1, 6))
            ]
            path = "/".join(names) + chance.choice(["", "/"])
            expected = True if plain.regex.match(path) else None
            fitting += expected is True
            assert ours.find_exclusion(path) is expected, (seed, line, path)
    assert fitting > 200


@pytest.mark.parametrize(
    ("line", "path"),
    [
        ("a*" * 30 + "b", "a" * 250),
        ("?*" * 30 + "b", "a" * 250),
        ("*a" * 30 + "*/b", "x/" * 100 + "a" * 250),
        ("**/a" * 20 + "/b", "a/" * 1000 + "c"),
        ("/a/**" * 20 + "/b", "a/" * 1000 + "c"),
    ],
)
def test_pattern_with_many_stars_matches_quickly(line: str, path: str, fork_server: ForkServer) -> None:
    """In a subprocess: an expression with exponential backtracking would never return."""
    code = (
        "import sys; from genie.grid.sync.excludes import IgnorePatterns\n"
        "print(IgnorePatterns(sys.argv[1:2]).find_exclusion(sys.argv[2]))"
    )
    done = fork_server.run(["-c", code, line, path], timeout=20)
    assert (done.stdout, done.stderr) == ("None\n", "")
