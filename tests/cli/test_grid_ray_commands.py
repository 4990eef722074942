"""`grid-cli setup` and `grid-cli cluster` as a person types them; the nodes' `ray` is a script."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from genie.cli.grid_ray_commands import _last_line
from tests.cli.conftest import Ran
from tests.grid.bed import Bed
from tests.grid.ray_bed import install_ray
from tests.grid.test_ray_faults import scripted
from tests.grid.test_setup import make_wheel


@pytest.fixture
def bed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bed]:
    with Bed(tmp_path / "nodes", count=2) as bed:
        file = tmp_path / "grid.yaml"
        file.write_text(bed.grid_yaml(more="ssh: {connect_timeout: 10, max_retries: 0}\n"))
        monkeypatch.setenv("GENIE_GRID_FILE", str(file))
        monkeypatch.setenv("GENIE_GRID_SSH_CONFIG", str(bed.ssh_config))
        monkeypatch.chdir(tmp_path)
        yield bed


def test_setup_takes_the_requirements_of_the_folder(
    bed: Bed, genie: Callable[..., Ran], tmp_path: Path
) -> None:
    ran = genie("grid", "setup")
    assert (ran.code, "no requirements.txt here" in ran.err) == (2, True)
    make_wheel(tmp_path / "wheels")
    (tmp_path / "requirements.txt").write_text("small-thing==1.0\n")
    ran = genie("grid", "setup", "--wheels", "wheels", "--json", "--node", "gpu1")
    assert ran.code == 0, ran.err
    assert [(each["node"], each["state"]) for each in json.loads(ran.out)] == [("gpu1", "installed")]
    assert "gpu1: installing with Python" in ran.err
    ran = genie("grid", "setup", "--wheels", "wheels", "--node", "gpu1")
    assert (ran.code, "unchanged" in ran.out) == (0, True)
    config = bed["gpu1"].home / "grid_workspace/grid_env/pyvenv.cfg"
    (config.parent / "lib/installed-before").touch()
    for option, sees in (("--again", "false"), ("--system-packages", "true")):
        ran = genie("grid", "setup", "--wheels", "wheels", "--json", "--node", "gpu1", option)
        assert (ran.code, json.loads(ran.out)[0]["state"]) == (0, "installed"), ran.err
        assert f"include-system-site-packages = {sees}" in config.read_text()
    assert (config.parent / "lib/installed-before").exists()


def test_the_table_of_setup_has_the_line_that_says_what_went_wrong() -> None:
    told = "node gpu1: Looking in links: wheels\nERROR: No matching distribution found for nope\n"
    assert _last_line(told) == "ERROR: No matching distribution found for nope"
    assert _last_line("") == ""


def test_setup_that_fails_on_a_node_ends_with_1_and_says_why(bed: Bed, genie: Callable[..., Ran]) -> None:
    ran = genie("grid", "setup", "--package", "x", "--python", "no-such-python", "--node", "gpu2")
    assert ran.code == 1
    assert "gpu2" in ran.out and "failed" in ran.out
    assert "there is no program no-such-python" in ran.err


def test_packages_and_extras_are_told_as_they_are_typed(genie: Callable[..., Ran]) -> None:
    assert "--package 'ray[default]'" in genie("grid", "setup", "--help").out
    ran = genie("grid", "setup", "numpy")
    assert (ran.code, "packages go behind --package" in ran.err) == (2, True)


def test_nodes_that_cannot_be_reached_are_255_and_named_once_in_a_line(
    bed: Bed, genie: Callable[..., Ran]
) -> None:
    for node in bed.nodes:
        node.stop()
    ran = genie("grid", "setup", "--package", "x")
    assert ran.code == 255
    assert [line.split()[:2] for line in ran.out.splitlines()[1:]] == [
        [n, "unreachable"] for n in ("gpu1", "gpu2")
    ]
    assert "node gpu1" not in ran.out
    start = genie("grid", "cluster", "start")
    assert (start.code, "gpu1: node gpu1" in start.err) == (255, False)
    submit = genie("grid", "cluster", "submit", "--", "true")
    assert (submit.code, "nothing is known of gpu1, gpu2" in submit.err) == (255, True)
    status = json.loads(genie("grid", "cluster", "status", "--json").out)
    assert [each["node"] for each in status["nodes"]] == ["gpu1", "gpu2"]


def test_a_start_that_is_refused_lists_the_versions(bed: Bed, genie: Callable[..., Ran]) -> None:
    install_ray(bed["gpu1"], scripted("exit 0"))
    install_ray(bed["gpu2"], scripted("exit 0", version="2.0.0"))
    ran = genie("grid", "cluster", "start")
    assert ran.code == 1
    assert "gpu1: Ray 2.60.0" in ran.err and "gpu2: Ray 2.0.0" in ran.err
    assert "hint: " in ran.err


def test_the_head_can_be_named(bed: Bed, genie: Callable[..., Ran]) -> None:
    for node in bed.nodes:
        install_ray(node, scripted("exit 1"))
    ran = genie("grid", "cluster", "start", "--head", "gpu2")
    assert (ran.code, "gpu2: starting the head" in ran.err) == (1, True), ran.err


def test_without_a_cluster_it_is_said(bed: Bed, genie: Callable[..., Ran]) -> None:
    assert genie("grid", "cluster", "stop").out == "no Ray cluster was running\n"
    status = genie("grid", "cluster", "status")
    assert status.code == 0
    assert status.out.splitlines()[0].split() == ["state", "stopped"]
    submit = genie("grid", "cluster", "submit", "--", "true")
    assert (submit.code, "grid-cli cluster start" in submit.err) == (1, True)


def test_a_node_that_cannot_be_reached_is_not_said_to_be_stopped(bed: Bed, genie: Callable[..., Ran]) -> None:
    bed["gpu2"].stop()
    shown = json.loads(genie("grid", "cluster", "status", "--json").out)
    assert [each["state"] for each in shown["nodes"]] == ["not started", "unreachable"]
    stop = genie("grid", "cluster", "stop", "--json")
    assert (stop.code, [each["exit_code"] for each in json.loads(stop.out)]) == (255, [0, 255])


def test_status_says_of_each_node_in_a_word_why_it_tells_nothing(bed: Bed, genie: Callable[..., Ran]) -> None:
    (bed["gpu2"].bin / "python3").write_text("#!/bin/sh\nexit 127\n")
    (bed["gpu2"].bin / "python3").chmod(0o755)
    bed.write_known_hosts(without=["gpu1"])
    status = genie("grid", "cluster", "status")
    assert status.code == 255
    assert status.out.splitlines()[0].split() == ["state", "unknown"]
    assert re.search(r"^gpu1 +host key unknown ", status.out, re.MULTILINE)
    assert re.search(r"^gpu2 +no python .*has no usable python3", status.out, re.MULTILINE)
    bed.write_known_hosts()
    (bed.folder / "authorized_keys").write_text("")
    shown = json.loads(genie("grid", "cluster", "status", "--json").out)
    assert [each["state"] for each in shown["nodes"]] == ["login refused"] * 2


def test_status_that_reaches_no_node_does_not_say_stopped_and_ends_with_255(
    bed: Bed, genie: Callable[..., Ran]
) -> None:
    for node in bed.nodes:
        node.stop()
    ran = genie("grid", "cluster", "status", "--json")
    assert (ran.code, json.loads(ran.out)["state"]) == (255, "unreachable")


def test_a_program_must_be_given(bed: Bed, genie: Callable[..., Ran]) -> None:
    ran = genie("grid", "cluster", "submit")
    assert (ran.code, "no program was given" in ran.err) == (2, True)
    ran = genie("grid", "cluster", "submit", "--env", "NOTHING", "--", "true")
    assert (ran.code, "is not KEY=VALUE" in ran.err) == (2, True)


def test_what_a_node_says_about_a_failure_cannot_move_the_cursor(bed: Bed, genie: Callable[..., Ran]) -> None:
    program = bed["gpu2"].bin / "evil-python"
    program.write_text(
        '#!/bin/sh\ncase "$*" in *venv*) printf \'no\\033[2Jroom\' >&2; exit 1 ;; esac\nexec python3 "$@"\n'
    )
    program.chmod(0o755)
    ran = genie("grid", "setup", "--package", "x", "--python", "evil-python", "--node", "gpu2")
    assert ran.code == 1
    assert "room" in ran.err
    assert "\x1b" not in ran.out + ran.err
