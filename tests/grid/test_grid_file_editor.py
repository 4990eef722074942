"""Adding and removing nodes in the grid file: everything else stays unchanged."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from genie.errors import ConfigError, NoNodeError, UsageError
from genie.grid.grid_file import GridNode, parse_grid_file
from genie.grid.grid_file_editor import (
    add_node_to_text,
    edit_grid_file,
    read_grid_file_text,
    remove_node_from_text,
)

BLOCK = """\
# our boxes
nodes:
  - gpu1   # the old one
  # bought in spring
  - name: gpu2
    weight: 2
    labels:
      zone: a

  - alice@gpu3:2222
# where things go
remote_root: /srv  # fast disk
"""


def parse_node_names(text: str) -> list[str]:
    return [node.name for node in parse_grid_file(text, name="f").nodes]


def test_node_is_appended_and_nothing_else_changes() -> None:
    made = add_node_to_text(BLOCK, GridNode(name="gpu4"), name="f")
    assert made == BLOCK.replace("alice@gpu3:2222\n", "alice@gpu3:2222\n  - gpu4\n")


def test_node_with_settings_is_one_line() -> None:
    node = GridNode(name="gpu4", user="bob", port=23, weight=2.0, labels={"zone": "null"})
    made = add_node_to_text(BLOCK, node, name="f")
    assert "  - {name: gpu4, user: bob, port: 23, weight: 2.0, labels: {zone: 'null'}}\n" in made
    assert parse_grid_file(made, name="f").nodes[-1] == node


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("nodes: [a, b] # x\n", "nodes: [a, b, new] # x\n"),
        ("nodes: [a,\n  b,  # x\n]\n", "nodes: [a,\n  b, new,  # x\n]\n"),
        ("nodes: []\nssh: {}\n", "nodes: [new]\nssh: {}\n"),
        ("nodes:\nssh: {}\n", "nodes:\n  - new\nssh: {}\n"),
        ("nodes:\n- a\n- b\n", "nodes:\n- a\n- b\n- new\n"),
        ("nodes:\n    - a", "nodes:\n    - a\n    - new\n"),
        ("ssh: {}", "ssh: {}\nnodes:\n  - new\n"),
        ("nodes:\r\n  - a\r\n", "nodes:\r\n  - a\r\n  - new\r\n"),
        ("nodes:\n  - name: a\n    labels: {x: y}\n\n\nssh: {}\n", None),
        ("# only a comment\n", "# only a comment\nnodes:\n  - new\n"),
    ],
)
def test_node_can_be_added_to_every_list_style(before: str, after: str | None) -> None:
    made = add_node_to_text(before, GridNode(name="new"), name="f")
    assert made == (after or before.replace("{x: y}\n", "{x: y}\n  - new\n"))


def test_empty_file_gets_a_header() -> None:
    made = add_node_to_text("", GridNode(name="gpu1"), name="f")
    assert made.startswith("# ")
    assert parse_node_names(made) == ["gpu1"]


def test_existing_node_is_not_added_again() -> None:
    with pytest.raises(UsageError, match="already has a node 'gpu2'"):
        add_node_to_text(BLOCK, GridNode(name="gpu2"), name="f")


@pytest.mark.parametrize(
    ("node", "gone"),
    [
        ("gpu1", "  - gpu1   # the old one\n"),
        ("gpu2", "  - name: gpu2\n    weight: 2\n    labels:\n      zone: a\n"),
        ("gpu3", "  - alice@gpu3:2222\n"),
    ],
)
def test_removing_a_node_removes_only_its_lines(node: str, gone: str) -> None:
    assert remove_node_from_text(BLOCK, node, name="f") == BLOCK.replace(gone, "")


@pytest.mark.parametrize(
    ("node", "after"),
    [
        ("a", "nodes: [{name: b}, c] # x\n"),
        ("b", "nodes: [a, c] # x\n"),
        ("c", "nodes: [a, {name: b}] # x\n"),
    ],
)
def test_node_is_removed_from_a_flow_list(node: str, after: str) -> None:
    assert remove_node_from_text("nodes: [a, {name: b}, c] # x\n", node, name="f") == after


def test_only_node_and_unknown_node_are_not_removed() -> None:
    with pytest.raises(UsageError, match="only node"):
        remove_node_from_text("nodes: [a]\n", "a", name="f")
    with pytest.raises(NoNodeError):
        remove_node_from_text("nodes: [a, b]\n", "c", name="f")


@pytest.mark.parametrize(
    "text",
    [
        "nodes: &all\n  - a\n  - b\nssh: {key_file: *all}\n",
        "nodes: ['a', 'b\n    ']\n",
        "nodes: [a]\nssh: {timout: 3}\n",
        "nodes: [a\n",
        "- a\n",
    ],
)
def test_invalid_file_is_not_edited(text: str) -> None:
    with pytest.raises((ConfigError, UsageError)):
        add_node_to_text(text, GridNode(name="new"), name="f")


def test_edit_that_would_change_another_setting_is_rejected() -> None:
    # The last node is an alias, whose position is that of its anchor: among the patterns.
    text = "sync: {exclude_patterns: [&last a, z]}\nnodes: [b, *last]\n"
    with pytest.raises(UsageError, match="by hand"):
        add_node_to_text(text, GridNode(name="new"), name="f")


_NAMES = st.from_regex(r"[a-z_][a-z0-9_.-]{0,8}", fullmatch=True).filter(lambda name: ".." not in name)


@given(st.lists(_NAMES, min_size=1, max_size=6, unique=True), _NAMES, st.booleans())
def test_adding_and_removing_a_node_restores_the_text(before: list[str], new: str, in_brackets: bool) -> None:
    lines = [f"  - {name}  # {number}" for number, name in enumerate(before)]
    text = f"nodes: [{', '.join(before)}]\n" if in_brackets else "\n".join(["nodes:", *lines, "ssh: {}", ""])
    if new in before:
        return
    made = add_node_to_text(text, GridNode(name=new), name="f")
    assert parse_node_names(made) == [*before, new]
    assert remove_node_from_text(made, new, name="f") == text


def test_file_keeps_its_mode_and_its_link(tmp_path: Path) -> None:
    real = tmp_path / "real.yaml"
    real.write_text("nodes: [a]\n")
    real.chmod(0o640)
    link = tmp_path / "link.yaml"
    link.symlink_to(real)
    edit_grid_file(link, lambda text: add_node_to_text(text, GridNode(name="b"), name="f"))
    assert link.is_symlink()
    assert (real.read_text(), real.stat().st_mode & 0o777) == ("nodes: [a, b]\n", 0o640)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.yaml", "real.yaml"]


def test_parent_folders_are_created_for_a_new_file(tmp_path: Path) -> None:
    path = tmp_path / "config" / "cluster_config.yaml"
    assert read_grid_file_text(path) == ""
    edit_grid_file(path, lambda _: "nodes: [a]\n")
    assert path.read_text() == "nodes: [a]\n"


def test_file_that_is_not_text_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="UTF-8"):
        read_grid_file_text(tmp_path / "f")
    with pytest.raises(ConfigError, match="could not read"):
        read_grid_file_text(tmp_path)


def test_concurrent_edits_are_serialized(tmp_path: Path) -> None:
    path = tmp_path / "grid.yaml"
    path.write_text("nodes:\n  - gpu0\n")

    def added(name: str) -> None:
        edit_grid_file(path, lambda text: f"{text}  - {name}\n")

    with ThreadPoolExecutor(8) as pool:
        assert len(list(pool.map(added, (f"gpu{number}" for number in range(1, 40))))) == 39
    assert sorted(read_grid_file_text(path).split()) == sorted(
        ["nodes:", *["-"] * 40, *(f"gpu{n}" for n in range(40))]
    )
    assert [each.name for each in tmp_path.iterdir()] == ["grid.yaml"]
