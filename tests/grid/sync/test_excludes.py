"""What is left out: patterns as .gitignore writes them, from the grid's file and from the tree."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest
from pathspec import GitIgnoreSpec

from genie.errors import ConfigError
from genie.grid.grid_file import SyncKeys
from genie.grid.sync.excludes import Excludes, Patterns


def test_the_documented_patterns_leave_out_what_they_name(tmp_path) -> None:
    excludes = Excludes(tmp_path, SyncKeys().exclude_patterns)
    for path, is_folder in [
        (b".git", True),
        (b"a/__pycache__", True),
        (b".env", False),
        (b"a/b.pyc", False),
        (b"web/node_modules", True),
        (b"web/.next", True),
    ]:
        assert excludes.is_left_out(path, is_folder), path
    for path in (b"git", b"a/env", b"b.py", b"\xff\n.txt"):
        assert not excludes.is_left_out(path, False), path


def test_the_nearest_gitignore_decides_and_can_bring_back(tmp_path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / ".gitignore").write_text("*.log\n/top\nbuild/\n")
    (tmp_path / "a" / ".gitignore").write_text("# a comment\n!keep.log\nlocal\n")
    excludes = Excludes(tmp_path, ())
    assert excludes.is_left_out(b"x.log", False)
    assert excludes.is_left_out(b"a/x.log", False)
    assert not excludes.is_left_out(b"a/keep.log", False)
    assert excludes.is_left_out(b"a/local", False)
    assert not excludes.is_left_out(b"local", False)
    assert excludes.is_left_out(b"top", False)
    assert not excludes.is_left_out(b"a/top", False)
    assert excludes.is_left_out(b"a/build", True)
    assert not excludes.is_left_out(b"a/build", False)


def test_no_gitignore_brings_back_what_the_grid_file_leaves_out(tmp_path) -> None:
    (tmp_path / ".gitignore").write_text("!.env\n")
    assert Excludes(tmp_path, (".env",)).is_left_out(b".env", False)


def test_a_line_that_means_nothing_is_passed_over_in_a_gitignore_and_refused_in_the_file(tmp_path) -> None:
    (tmp_path / ".gitignore").write_text("!\n*.log\n")
    assert Excludes(tmp_path, ()).is_left_out(b"x.log", False)
    with pytest.raises(ConfigError, match="exclude_patterns"):
        Excludes(tmp_path, ("!",))


def test_a_gitignore_that_is_a_link_does_not_count(tmp_path) -> None:
    (tmp_path / "rules").write_text("*\n")
    (tmp_path / ".gitignore").symlink_to("rules")
    assert not Excludes(tmp_path, ()).is_left_out(b"a", False)


@pytest.mark.parametrize("seed", range(8))
def test_lines_with_many_stars_mean_what_they_meant(seed: int) -> None:
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
        ours = Patterns([line])
        for _ in range(30):
            names = [
                "".join(chance.choices("aab", k=chance.randint(1, 4))) for _ in range(chance.randint(1, 6))
            ]
            path = "/".join(names) + chance.choice(["", "/"])
            expected = True if plain.regex.match(path) else None
            fitting += expected is True
            assert ours.verdict(path) is expected, (seed, line, path)
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
def test_a_line_with_many_stars_is_decided_in_good_time(line: str, path: str) -> None:
    """In a process of its own: a matcher that tries every way would never come back."""
    code = (
        "import sys; from genie.grid.sync.excludes import Patterns\n"
        "print(Patterns(sys.argv[1:2]).verdict(sys.argv[2]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, line, path], capture_output=True, text=True, timeout=20
    )
    assert (done.stdout, done.stderr) == ("None\n", "")
