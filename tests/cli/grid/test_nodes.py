"""nodes list, add, trust and remove, and completion of node names."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import asyncssh
import pytest

from genie.cli.grid.nodes import local_user_at_host
from tests.cli.grid.loopback_grid import run_grid_cli_on_terminal, use_testbed_as_grid
from tests.forkserver import ForkServer
from tests.grid.testbed import SshTestbed


@pytest.fixture
def testbed(own_testbed: SshTestbed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SshTestbed:
    use_testbed_as_grid(own_testbed, tmp_path, monkeypatch)
    return own_testbed


@pytest.fixture
def working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_user_without_passwd_entry_is_shown_by_uid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 7)
    assert local_user_at_host() == f"{2**31 - 7}@{socket.gethostname()}"


def read_host_fingerprint(testbed: SshTestbed, name: str) -> str:
    return str(asyncssh.import_public_key(testbed[name].public_key).get_fingerprint())


# --- the file ---------------------------------------------------------------------------------


def test_add_creates_the_file_and_prints_the_next_command(working_folder: Path, genie) -> None:
    ran = genie("grid", "nodes", "add", "gpu1", "bob@gpu2:2222")
    assert ran.code == 0
    assert "grid-cli nodes trust gpu1 gpu2" in ran.err
    text = (working_folder / "config/cluster_config.yaml").read_text()
    assert text.endswith("nodes:\n  - gpu1\n  - bob@gpu2:2222\n")
    assert genie("grid", "config", "check").code == 0


def test_add_keeps_comments_and_sets_weight_and_labels(working_folder: Path, genie) -> None:
    file = working_folder / "f.yaml"
    file.write_text("nodes:  # ours\n  - gpu1  # first\n")
    argv = ("nodes", "add", "gpu2", "--weight", "2", "--label", "zone=a", "--config", str(file), "--json")
    ran = genie("grid", *argv)
    assert json.loads(ran.out) == {"file": str(file), "added": ["gpu2"]}
    added = "  - {name: gpu2, weight: 2.0, labels: {zone: a}}\n"
    assert file.read_text() == f"nodes:  # ours\n  - gpu1  # first\n{added}"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["-oProxyCommand=x"], "-o"),
        (["-oProxyCommand=x"], "put arguments that start with '-' after --"),
        (["--", "-oProxyCommand=x"], "not allowed"),
        (["a; touch x"], "not allowed"),
        (["../../etc/x"], "not allowed"),
        (["gpu1"], "already"),
        (["gpu2", "--label", "zone"], "KEY=VALUE"),
        (["gpu2", "--weight", "0"], "--weight"),
    ],
)
def test_failed_add_does_not_change_the_file(
    working_folder: Path, genie, argv: list[str], message: str
) -> None:
    file = working_folder / "config/cluster_config.yaml"
    file.parent.mkdir()
    file.write_text("nodes: [gpu1]\n")
    ran = genie("grid", "nodes", "add", *argv)
    assert ran.code == 2
    assert message in ran.err
    assert file.read_text() == "nodes: [gpu1]\n"


def test_several_nodes_are_added_atomically(working_folder: Path, genie) -> None:
    assert genie("grid", "nodes", "add", "gpu1", "a b").code == 2
    assert not (working_folder / "config").exists()


def test_remove_deletes_nodes(working_folder: Path, genie) -> None:
    genie("grid", "nodes", "add", "gpu1", "gpu2", "gpu3")
    ran = genie("grid", "nodes", "remove", "gpu1", "gpu2", "gpu3")
    assert ran.code == 2
    assert "this would remove all nodes of config/cluster_config.yaml" in ran.err
    ran = genie("grid", "nodes", "remove", "gpu1", "gpu3")
    assert (ran.code, ran.out) == (0, "config/cluster_config.yaml: removed gpu1 gpu3\n")
    assert genie("grid", "nodes", "remove", "gpu9").code == 1
    ran = genie("grid", "nodes", "remove", "gpu2")
    assert ran.code == 2
    assert "only node" in ran.err


def test_list_shows_hosts_resolved_by_openssh(testbed: SshTestbed, genie) -> None:
    testbed.write_known_hosts(without=["gpu2"])
    found = json.loads(genie("grid", "nodes", "list", "--json").out)["nodes"]
    node = testbed["gpu1"]
    assert found[0] == {
        "name": "gpu1",
        "weight": 1.0,
        "labels": {},
        "host": node.address,
        "port": node.port,
        "user": "root",
        "host_key": "known",
    }
    assert found[1]["host_key"] == "unknown: grid-cli nodes trust gpu2"
    assert genie("grid", "nodes", "list").out.splitlines()[1].split()[:2] == ["gpu1", node.address]


def complete_command_line(words: str) -> list[str]:
    from typer.testing import CliRunner

    from genie.cli.app import grid_app

    place = str(len(words.split()) - 1)
    environment = {"_GRID_CLI_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": place}
    return CliRunner().invoke(grid_app, [], prog_name="grid-cli", env=environment).output.split()


def test_names_are_completed_from_the_file(working_folder: Path, genie) -> None:
    genie("grid", "nodes", "add", "gpu1", "gpu2", "box")
    assert complete_command_line("grid-cli health gp") == ["gpu1", "gpu2"]
    assert complete_command_line("grid-cli nodes remove b") == ["box"]
    for words in ("run --node", "ps --node", "sync --node", "setup --node", "cluster start --head", "demote"):
        assert complete_command_line(f"grid-cli {words} b") == ["box"], words


@pytest.mark.parametrize("words", ["--config f.yaml nodes trust o", "nodes trust --config f.yaml o"])
def test_names_are_completed_from_the_given_file(working_folder: Path, words: str, genie) -> None:
    genie("--version")  # registers the commands
    (working_folder / "f.yaml").write_text("nodes: [other]\n")
    assert complete_command_line(f"grid-cli {words}") == ["other"]


@pytest.mark.parametrize("word", ["promote", "demote"])
def test_promote_and_demote_accept_cluster_options(working_folder: Path, genie, word: str) -> None:
    genie("grid", "nodes", "add", "gpu1")
    assert "give --address" in genie("grid", word, "gpu1").err
    ran = genie("grid", word, "gpu1", "--address", "127.0.0.1:1", "--token-file", "no/file")
    assert ran.code == 2
    assert "could not read --token-file 'no/file'" in ran.err


@pytest.mark.parametrize(
    ("argv", "usage"),
    [
        ("grid health", "[NODE...]"),
        ("grid nodes remove", "{NODE...}"),
        ("grid cancel", "{RUN...}"),
        ("grid sync", "[DIR]"),
        ("cancel", "{JOB...}"),
        ("token revoke", "{ID...}"),
    ],
)
def test_usage_line_shows_arguments_in_one_pair_of_brackets(genie, argv: str, usage: str) -> None:
    out = genie(*argv.split(), "--help").out
    assert f" {argv} [OPTIONS] {usage} " in out.replace("\n", " \n")


def test_unreadable_file_gives_no_completions(working_folder: Path, genie) -> None:
    genie("--version")
    (working_folder / "config").mkdir()
    (working_folder / "config/cluster_config.yaml").write_text("nodes: {")
    assert complete_command_line("grid-cli health g") == []


# --- trust ------------------------------------------------------------------------------------


def test_trust_with_yes_adds_the_key(testbed: SshTestbed, genie) -> None:
    testbed.write_known_hosts(without=["gpu1", "gpu2"])
    assert "unreachable" in genie("grid", "health").out
    ran = genie("grid", "nodes", "trust", "--all", "--yes")
    assert ran.code == 0
    for name in ("gpu1", "gpu2"):
        assert f"{name}: {read_host_fingerprint(testbed, name)} added to {testbed.known_hosts}\n" in ran.out
    assert "unreachable" not in genie("grid", "health").out, "what was known of the nodes is forgotten"
    again = genie("grid", "nodes", "trust", "gpu1", "--json")
    assert json.loads(again.out)["nodes"][0]["state"] == "known"


def test_trust_without_a_terminal_is_a_usage_error(testbed: SshTestbed, genie) -> None:
    testbed.write_known_hosts(without=["gpu1"])
    before = testbed.known_hosts.read_text()
    ran = genie("grid", "nodes", "trust", "gpu1")
    assert ran.code == 2
    assert "standard input is not a terminal" in ran.err
    assert f"--fingerprint {read_host_fingerprint(testbed, 'gpu1')}" in ran.err
    assert testbed.known_hosts.read_text() == before


@pytest.mark.parametrize(("answer", "code", "state"), [(b"y\n", 0, "added to"), (b"\n", 1, "refused")])
def test_trust_prompts_on_a_terminal(
    testbed: SshTestbed, answer: bytes, code: int, state: str, fork_server: ForkServer
) -> None:
    testbed.write_known_hosts(without=["gpu1"])
    before = testbed.known_hosts.read_text()
    ended, seen = run_grid_cli_on_terminal(
        fork_server, ["nodes", "trust", "gpu1"], typed=answer, after=b"[y/N]"
    )
    assert ended == code
    assert read_host_fingerprint(testbed, "gpu1") in seen and state in seen
    assert (testbed.known_hosts.read_text() == before) is (code == 1)


@pytest.mark.parametrize(("typed", "code"), [(b"\x04", 1), (b"\x03", 130)], ids=["end", "interrupt"])
def test_aborted_prompt_changes_nothing(
    testbed: SshTestbed, typed: bytes, code: int, fork_server: ForkServer
) -> None:
    testbed.write_known_hosts(without=["gpu1"])
    before = testbed.known_hosts.read_text()
    ended, seen = run_grid_cli_on_terminal(
        fork_server, ["nodes", "trust", "gpu1"], typed=typed, after=b"[y/N]"
    )
    aborted = "genie: aborted: the prompt was not answered" in seen
    assert (ended, aborted) == (code, code == 1), seen
    assert testbed.known_hosts.read_text() == before


def test_trust_requires_a_matching_fingerprint(testbed: SshTestbed, genie) -> None:
    testbed.write_known_hosts(without=["gpu1"])
    before = testbed.known_hosts.read_text()
    ran = genie("grid", "nodes", "trust", "gpu1", "--fingerprint", read_host_fingerprint(testbed, "gpu2"))
    assert ran.code == 255
    assert testbed.known_hosts.read_text() == before
    ran = genie("grid", "nodes", "trust", "gpu1", "--fingerprint", read_host_fingerprint(testbed, "gpu1"))
    assert ran.code == 0
    assert testbed.known_hosts.read_text() != before


def test_changed_key_is_an_error_and_other_nodes_are_trusted(testbed: SshTestbed, genie) -> None:
    testbed.write_known_hosts(without=["gpu2"])
    testbed["gpu1"].write_host_key()
    testbed["gpu1"].restart()
    ran = genie("grid", "nodes", "trust", "--all", "--yes")
    assert ran.code == 255
    assert "host key of" in ran.err and "has changed" in ran.err and "ssh-keygen -f" in ran.err
    assert "gpu2: " in ran.out
    assert read_host_fingerprint(testbed, "gpu1") not in ran.out


def test_unreachable_node_is_a_transport_error(testbed: SshTestbed, genie) -> None:
    testbed["gpu1"].stop()
    assert genie("grid", "nodes", "trust", "gpu1", "--yes").code == 255


@pytest.mark.parametrize("argv", [[], ["gpu1", "--all"], ["--all", "--fingerprint", "SHA256:x"]])
def test_trust_without_nodes_is_a_usage_error(testbed: SshTestbed, genie, argv: list[str]) -> None:
    ran = genie("grid", "nodes", "trust", *argv)
    assert ran.code == 2
    assert ("are mutually exclusive" in ran.err) == (argv == ["gpu1", "--all"])
