"""Exit codes of all grid commands with unreachable nodes or without nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from genie.errors import NodeNotFoundError
from genie.model.messages import ListNodes, NodesReply, RemoveNode
from tests.cli.conftest import CommandOutcome
from tests.cli.scripted_controller import ScriptedController
from tests.cli.test_app import list_command_paths
from tests.grid.testbed import SshTestbed

USAGE_EXIT_CODE, TRANSPORT_EXIT_CODE = 2, 255

# Exit codes of each command: if no node is reachable, and if one of two is. Commands that read nodes or
# choose one exit with 255 if none is reachable; commands that act on several nodes exit with the
# highest code. Commands below need no node.
EXPECTED_EXIT_CODES: list[tuple[str, int, int]] = [
    ("health", TRANSPORT_EXIT_CODE, 0),
    ("health gpu2", TRANSPORT_EXIT_CODE, TRANSPORT_EXIT_CODE),
    ("top", TRANSPORT_EXIT_CODE, 0),
    ("top --json", TRANSPORT_EXIT_CODE, 0),
    ("run true", TRANSPORT_EXIT_CODE, 0),
    ("run true --detach", TRANSPORT_EXIT_CODE, 0),
    ("run true --json", TRANSPORT_EXIT_CODE, 0),
    ("run true --node gpu2", TRANSPORT_EXIT_CODE, TRANSPORT_EXIT_CODE),
    ("run true --all", TRANSPORT_EXIT_CODE, TRANSPORT_EXIT_CODE),
    ("run true --all --detach", TRANSPORT_EXIT_CODE, TRANSPORT_EXIT_CODE),
    ("run true --all --sync .", TRANSPORT_EXIT_CODE, TRANSPORT_EXIT_CODE),
    ("ps", TRANSPORT_EXIT_CODE, 0),
    ("ps --node gpu2", TRANSPORT_EXIT_CODE, TRANSPORT_EXIT_CODE),
    ("logs r-7k2m", TRANSPORT_EXIT_CODE, TRANSPORT_EXIT_CODE),
    ("attach r-7k2m", TRANSPORT_EXIT_CODE, TRANSPORT_EXIT_CODE),
    ("cancel r-7k2m", TRANSPORT_EXIT_CODE, TRANSPORT_EXIT_CODE),
    ("sync .", TRANSPORT_EXIT_CODE, TRANSPORT_EXIT_CODE),
    ("sync . --dry-run", TRANSPORT_EXIT_CODE, TRANSPORT_EXIT_CODE),
    ("setup --package x --python no-such-python", TRANSPORT_EXIT_CODE, TRANSPORT_EXIT_CODE),
    ("cluster start", TRANSPORT_EXIT_CODE, TRANSPORT_EXIT_CODE),
    ("cluster start --allow-missing", TRANSPORT_EXIT_CODE, 1),  # the one that answers has no Ray
    ("cluster stop", TRANSPORT_EXIT_CODE, TRANSPORT_EXIT_CODE),
    ("cluster status", TRANSPORT_EXIT_CODE, 0),
    ("cluster dashboard", TRANSPORT_EXIT_CODE, TRANSPORT_EXIT_CODE),
    ("cluster submit -- true", TRANSPORT_EXIT_CODE, TRANSPORT_EXIT_CODE),
    ("promote --all --controller 10.0.0.5 --python no-such-python", TRANSPORT_EXIT_CODE, TRANSPORT_EXIT_CODE),
    ("demote --all", TRANSPORT_EXIT_CODE, TRANSPORT_EXIT_CODE),
    ("nodes trust --all", TRANSPORT_EXIT_CODE, TRANSPORT_EXIT_CODE),
    ("metrics", 0, 0),  # that they cannot be reached is what it tells
    ("nodes list", 0, 0),
    ("nodes add other", 0, 0),
    ("nodes remove gpu2", 0, 0),
    ("config init other.yaml --force", 0, 0),
    ("config check", 0, 0),
    ("config show", 0, 0),
]


@pytest.fixture(scope="module")
def partly_stopped_testbed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshTestbed]:
    """gpu1 is reachable; gpu2 and gpu3 are not."""
    with SshTestbed(tmp_path_factory.mktemp("testbed") / "nodes", count=3) as testbed:
        testbed["gpu2"].stop()
        testbed["gpu3"].stop()
        yield testbed


@pytest.fixture
def run_grid_command(
    partly_stopped_testbed: SshTestbed,
    genie: Callable[..., CommandOutcome],
    controller: ScriptedController,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[[str, str], CommandOutcome]:
    """Run a grid command in an empty directory, with this grid file."""
    controller.replies = {ListNodes: NodesReply(nodes=()), RemoveNode: NodeNotFoundError("no such node")}
    monkeypatch.setenv("GENIE_GRID_SSH_CONFIG", str(partly_stopped_testbed.ssh_config))
    file = tmp_path / "grid.yaml"
    folder = tmp_path / "folder"
    folder.mkdir()
    monkeypatch.chdir(folder)

    def run(line: str, text: str) -> CommandOutcome:
        file.write_text(text)
        return genie("grid", "--config", str(file), *line.split())

    return run


def test_expected_exit_codes_cover_every_grid_command() -> None:
    of_the_grid = {" ".join(path[1:]) for path in list_command_paths() if path[0] == "grid"}
    assert {
        name
        for name in of_the_grid
        for line, _, _ in EXPECTED_EXIT_CODES
        if f"{line} ".startswith(f"{name} ")
    } == (of_the_grid)


@pytest.mark.parametrize(
    ("line", "none", "some"), EXPECTED_EXIT_CODES, ids=[row[0] for row in EXPECTED_EXIT_CODES]
)
def test_exit_code_depends_on_whether_some_or_all_nodes_are_unreachable(
    partly_stopped_testbed: SshTestbed,
    run_grid_command: Callable[[str, str], CommandOutcome],
    line: str,
    none: int,
    some: int,
) -> None:
    more = "ssh: {connect_timeout: 20, max_retries: 0}\nhealth_check: {timeout: 20}\n"
    ran = run_grid_command(line, partly_stopped_testbed.grid_yaml(nodes=["gpu2", "gpu3"], more=more))
    assert ran.code == none, ran
    ran = run_grid_command(line, partly_stopped_testbed.grid_yaml(nodes=["gpu1", "gpu2"], more=more))
    assert ran.code == some, ran


@pytest.mark.parametrize("line", ["sync .", "run true --all", "setup --package x", "cluster stop"])
def test_highest_exit_code_wins_regardless_of_node_order(
    partly_stopped_testbed: SshTestbed,
    run_grid_command: Callable[[str, str], CommandOutcome],
    line: str,
) -> None:
    more = "remote_root: /proc/not-to-be-made\nssh: {connect_timeout: 20, max_retries: 0}\n"
    refused = run_grid_command(line, partly_stopped_testbed.grid_yaml(nodes=["gpu1"], more=more))
    assert (refused.code, "Traceback" in refused.err) == (0 if line == "cluster stop" else 1, False), refused
    for names in (["gpu1", "gpu2"], ["gpu2", "gpu1"]):
        assert (
            run_grid_command(line, partly_stopped_testbed.grid_yaml(nodes=names, more=more)).code
            == TRANSPORT_EXIT_CODE
        )


@pytest.mark.parametrize(
    "line",
    [
        *("sync .", "run true --all", "setup --package x", "cluster start", "cluster stop", "cluster status"),
        *("promote --all --controller 10.0.0.5", "demote --all", "ps"),
    ],
)
def test_missing_key_file_is_a_usage_error(
    partly_stopped_testbed: SshTestbed,
    run_grid_command: Callable[[str, str], CommandOutcome],
    line: str,
) -> None:
    ran = run_grid_command(
        line,
        partly_stopped_testbed.grid_yaml(
            nodes=["gpu1"], more="ssh: {key_file: /no/such/key, max_retries: 0}\n"
        ),
    )
    assert ran.code == USAGE_EXIT_CODE, ran


@pytest.mark.parametrize("line", [row[0] for row in EXPECTED_EXIT_CODES])
def test_grid_file_without_nodes_is_a_usage_error(
    run_grid_command: Callable[[str, str], CommandOutcome], line: str
) -> None:
    ran = run_grid_command(line, "nodes: []\n")
    expected = 0 if line.startswith(("nodes add", "config init")) else USAGE_EXIT_CODE
    assert ran.code == expected, ran
