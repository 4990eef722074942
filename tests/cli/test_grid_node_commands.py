"""nodes list, add, trust and remove, and completion of node names."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import asyncssh
import pytest

from genie.cli.grid_node_commands import who_asks
from tests.cli.grid_setup import on_a_terminal, use_grid
from tests.grid.bed import Bed


@pytest.fixture
def bed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bed]:
    with Bed(tmp_path / "nodes", count=2) as bed:
        use_grid(bed, tmp_path, monkeypatch)
        yield bed


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_user_without_a_name_is_told_by_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 7)
    assert who_asks() == f"{2**31 - 7}@{socket.gethostname()}"


def fingerprint(bed: Bed, name: str) -> str:
    return str(asyncssh.import_public_key(bed[name].public_key).get_fingerprint())


# --- the file ---------------------------------------------------------------------------------


def test_add_makes_the_file_and_says_what_comes_next(folder: Path, genie) -> None:
    ran = genie("grid", "nodes", "add", "gpu1", "bob@gpu2:2222")
    assert ran.code == 0
    assert "grid-cli nodes trust gpu1 gpu2" in ran.err
    text = (folder / "config/cluster_config.yaml").read_text()
    assert text.endswith("nodes:\n  - gpu1\n  - bob@gpu2:2222\n")
    assert genie("grid", "config", "check").code == 0


def test_add_keeps_comments_and_takes_weight_and_labels(folder: Path, genie) -> None:
    file = folder / "f.yaml"
    file.write_text("nodes:  # ours\n  - gpu1  # first\n")
    argv = ("nodes", "add", "gpu2", "--weight", "2", "--label", "zone=a", "--config", str(file), "--json")
    ran = genie("grid", *argv)
    assert json.loads(ran.out) == {"file": str(file), "added": ["gpu2"]}
    added = "  - {name: gpu2, weight: 2.0, labels: {zone: a}}\n"
    assert file.read_text() == f"nodes:  # ours\n  - gpu1  # first\n{added}"


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["-oProxyCommand=x"], "-o"),
        (["-oProxyCommand=x"], "a name that begins with '-' goes behind --"),
        (["--", "-oProxyCommand=x"], "not allowed"),
        (["a; touch x"], "not allowed"),
        (["../../etc/x"], "not allowed"),
        (["gpu1"], "already"),
        (["gpu2", "--label", "zone"], "KEY=VALUE"),
        (["gpu2", "--weight", "0"], "--weight"),
    ],
)
def test_what_is_wrong_leaves_the_file_alone(folder: Path, genie, argv: list[str], said: str) -> None:
    file = folder / "config/cluster_config.yaml"
    file.parent.mkdir()
    file.write_text("nodes: [gpu1]\n")
    ran = genie("grid", "nodes", "add", *argv)
    assert ran.code == 2
    assert said in ran.err
    assert file.read_text() == "nodes: [gpu1]\n"


def test_several_nodes_are_added_all_or_none(folder: Path, genie) -> None:
    assert genie("grid", "nodes", "add", "gpu1", "a b").code == 2
    assert not (folder / "config").exists()


def test_remove_takes_nodes_out(folder: Path, genie) -> None:
    genie("grid", "nodes", "add", "gpu1", "gpu2", "gpu3")
    ran = genie("grid", "nodes", "remove", "gpu1", "gpu3")
    assert (ran.code, ran.out) == (0, "config/cluster_config.yaml: removed gpu1 gpu3\n")
    assert genie("grid", "nodes", "remove", "gpu9").code == 1
    ran = genie("grid", "nodes", "remove", "gpu2")
    assert ran.code == 2
    assert "only node" in ran.err


def test_list_shows_where_openssh_leads(bed: Bed, genie) -> None:
    bed.write_known_hosts(without=["gpu2"])
    found = json.loads(genie("grid", "nodes", "list", "--json").out)["nodes"]
    node = bed["gpu1"]
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


def completed(words: str) -> list[str]:
    from typer.testing import CliRunner

    from genie.cli.app import grid

    place = str(len(words.split()) - 1)
    environment = {"_GRID_CLI_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": place}
    return CliRunner().invoke(grid, [], prog_name="grid-cli", env=environment).output.split()


def test_names_are_completed_from_the_file(folder: Path, genie) -> None:
    genie("grid", "nodes", "add", "gpu1", "gpu2", "box")
    assert completed("grid-cli health gp") == ["gpu1", "gpu2"]
    assert completed("grid-cli nodes remove b") == ["box"]
    for words in ("run --node", "ps --node", "sync --node", "setup --node", "cluster start --head", "demote"):
        assert completed(f"grid-cli {words} b") == ["box"], words


@pytest.mark.parametrize("words", ["--config f.yaml nodes trust o", "nodes trust --config f.yaml o"])
def test_names_are_completed_from_the_file_that_is_named(folder: Path, words: str, genie) -> None:
    genie("--version")  # registers the commands
    (folder / "f.yaml").write_text("nodes: [other]\n")
    assert completed(f"grid-cli {words}") == ["other"]


@pytest.mark.parametrize("word", ["promote", "demote"])
def test_commands_that_need_a_cluster_take_the_options_that_their_errors_name(
    folder: Path, genie, word: str
) -> None:
    genie("grid", "nodes", "add", "gpu1")
    assert "give --address" in genie("grid", word, "gpu1").err
    ran = genie("grid", word, "gpu1", "--address", "127.0.0.1:1", "--token-file", "no/file")
    assert ran.code == 2
    assert "--token-file 'no/file' cannot be read" in ran.err


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
def test_arguments_have_one_pair_of_brackets(genie, argv: str, usage: str) -> None:
    out = genie(*argv.split(), "--help").out
    assert f" {argv} [OPTIONS] {usage} " in out.replace("\n", " \n")


def test_a_file_that_cannot_be_read_completes_to_nothing(folder: Path, genie) -> None:
    genie("--version")
    (folder / "config").mkdir()
    (folder / "config/cluster_config.yaml").write_text("nodes: {")
    assert completed("grid-cli health g") == []


# --- trust ------------------------------------------------------------------------------------


def test_trust_with_yes_shows_the_fingerprint_and_adds_the_key(bed: Bed, genie) -> None:
    bed.write_known_hosts(without=["gpu1", "gpu2"])
    assert "unreachable" in genie("grid", "health").out
    ran = genie("grid", "nodes", "trust", "--all", "--yes")
    assert ran.code == 0
    for name in ("gpu1", "gpu2"):
        assert f"{name}: {fingerprint(bed, name)} added to {bed.known_hosts}\n" in ran.out
    assert "unreachable" not in genie("grid", "health").out, "what was known of the nodes is forgotten"
    again = genie("grid", "nodes", "trust", "gpu1", "--json")
    assert json.loads(again.out)["nodes"][0]["state"] == "known"


def test_trust_needs_someone_to_ask(bed: Bed, genie) -> None:
    bed.write_known_hosts(without=["gpu1"])
    before = bed.known_hosts.read_text()
    ran = genie("grid", "nodes", "trust", "gpu1")
    assert ran.code == 2
    assert f"--fingerprint {fingerprint(bed, 'gpu1')}" in ran.err
    assert bed.known_hosts.read_text() == before


@pytest.mark.parametrize(("answer", "code", "state"), [(b"y\n", 0, "added to"), (b"\n", 1, "refused")])
def test_trust_asks_on_a_terminal(bed: Bed, answer: bytes, code: int, state: str) -> None:
    bed.write_known_hosts(without=["gpu1"])
    before = bed.known_hosts.read_text()
    ended, seen = on_a_terminal(["nodes", "trust", "gpu1"], typed=answer, after=b"[y/N]")
    assert ended == code
    assert fingerprint(bed, "gpu1") in seen and state in seen
    assert (bed.known_hosts.read_text() == before) is (code == 1)


@pytest.mark.parametrize(("typed", "code"), [(b"\x04", 1), (b"\x03", 130)], ids=["end", "interrupt"])
def test_a_question_that_is_not_answered_changes_nothing(bed: Bed, typed: bytes, code: int) -> None:
    bed.write_known_hosts(without=["gpu1"])
    before = bed.known_hosts.read_text()
    ended, seen = on_a_terminal(["nodes", "trust", "gpu1"], typed=typed, after=b"[y/N]")
    aborted = "genie: aborted; the question was not answered" in seen
    assert (ended, aborted) == (code, code == 1), seen
    assert bed.known_hosts.read_text() == before


def test_a_fingerprint_is_compared(bed: Bed, genie) -> None:
    bed.write_known_hosts(without=["gpu1"])
    before = bed.known_hosts.read_text()
    ran = genie("grid", "nodes", "trust", "gpu1", "--fingerprint", fingerprint(bed, "gpu2"))
    assert ran.code == 255
    assert bed.known_hosts.read_text() == before
    ran = genie("grid", "nodes", "trust", "gpu1", "--fingerprint", fingerprint(bed, "gpu1"))
    assert ran.code == 0
    assert bed.known_hosts.read_text() != before


def test_a_changed_key_is_an_error_and_the_others_are_trusted_all_the_same(bed: Bed, genie) -> None:
    bed.write_known_hosts(without=["gpu2"])
    bed["gpu1"].write_host_key()
    bed["gpu1"].restart()
    ran = genie("grid", "nodes", "trust", "--all", "--yes")
    assert ran.code == 255
    assert "another host key" in ran.err and "ssh-keygen -f" in ran.err
    assert "gpu2: " in ran.out
    assert fingerprint(bed, "gpu1") not in ran.out


def test_a_node_that_is_away_is_a_transport_failure(bed: Bed, genie) -> None:
    bed["gpu1"].stop()
    assert genie("grid", "nodes", "trust", "gpu1", "--yes").code == 255


@pytest.mark.parametrize("argv", [[], ["gpu1", "--all"], ["--all", "--fingerprint", "SHA256:x"]])
def test_trust_wants_to_know_whom(bed: Bed, genie, argv: list[str]) -> None:
    ran = genie("grid", "nodes", "trust", *argv)
    assert ran.code == 2
    assert ("exclude each other" in ran.err) == (argv == ["gpu1", "--all"])
