"""`grid-cli setup` and `grid-cli cluster`, with a script in place of `ray` on the nodes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from genie.cli.grid.ray import _last_line
from tests.cli.conftest import CommandOutcome
from tests.grid.quick_venv import QuickVenv
from tests.grid.ray.test_faults import make_fake_ray_script
from tests.grid.ray_testbed import install_ray_program
from tests.grid.small_wheel import make_wheel
from tests.grid.testbed import SshTestbed


@pytest.fixture
def testbed(
    own_testbed: SshTestbed, quick_venv: QuickVenv, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> SshTestbed:
    for node in own_testbed.nodes:
        quick_venv.install(node)
    file = tmp_path / "grid.yaml"
    file.write_text(own_testbed.grid_yaml(more="ssh: {connect_timeout: 10, max_retries: 0}\n"))
    monkeypatch.setenv("GENIE_GRID_FILE", str(file))
    monkeypatch.setenv("GENIE_GRID_SSH_CONFIG", str(own_testbed.ssh_config))
    monkeypatch.chdir(tmp_path)
    return own_testbed


def test_setup_installs_defaults_and_requirements(
    testbed: SshTestbed, genie: Callable[..., CommandOutcome], tmp_path: Path
) -> None:
    """Uses fake wheels: nothing is downloaded."""
    for name in ("small-thing", "ray", "torch", "numpy"):
        make_wheel(tmp_path / "wheels", name=name)
    (tmp_path / "requirements.txt").write_text("small-thing==1.0\n")
    ran = genie("grid", "setup", "--wheels", "wheels", "--json", "--node", "gpu1")
    assert ran.code == 0, ran.err
    assert "installing ray[default], torch, numpy and requirements.txt (override with" in ran.err
    python = "/root/grid_workspace/grid_env/bin/python"
    shown = testbed["gpu1"].run(
        f"{python} -c 'import ray, torch, numpy, small_thing as t; print(torch.VALUE, t.VALUE)'"
    )
    assert shown == "1 1\n"
    assert [(each["node"], each["state"]) for each in json.loads(ran.out)] == [("gpu1", "installed")]
    assert "gpu1: installing with Python" in ran.err
    ran = genie("grid", "setup", "--wheels", "wheels", "--node", "gpu1")
    assert (ran.code, "unchanged" in ran.out) == (0, True)
    config = testbed["gpu1"].home / "grid_workspace/grid_env/pyvenv.cfg"
    (config.parent / "lib/installed-before").touch()
    for option, sees in (("--again", "false"), ("--system-packages", "true")):
        ran = genie("grid", "setup", "--wheels", "wheels", "--json", "--node", "gpu1", option)
        assert (ran.code, json.loads(ran.out)[0]["state"]) == (0, "installed"), ran.err
        assert f"include-system-site-packages = {sees}" in config.read_text()
    assert (config.parent / "lib/installed-before").exists()


def test_setup_installs_defaults_without_requirements(
    testbed: SshTestbed, genie: Callable[..., CommandOutcome], tmp_path: Path
) -> None:
    for name in ("ray", "torch", "numpy"):
        make_wheel(tmp_path / "wheels", name=name)
    ran = genie("grid", "setup", "--wheels", "wheels", "--json", "--node", "gpu1")
    assert "installing ray[default], torch, numpy (override with" in ran.err
    assert (ran.code, json.loads(ran.out)[0]["packages"]) == (0, 3), ran.err


def test_setup_skips_default_packages_without_wheels(
    testbed: SshTestbed, genie: Callable[..., CommandOutcome], tmp_path: Path
) -> None:
    make_wheel(tmp_path / "wheels")
    ran = genie("grid", "setup", "--wheels", "wheels", "--node", "gpu1")
    assert (ran.code, "nothing to install from wheels" in ran.err) == (2, True), ran.err
    (tmp_path / "requirements.txt").write_text("small-thing==1.0\n")
    ran = genie("grid", "setup", "--wheels", "wheels", "--node", "gpu1")
    assert (ran.code, "installed" in ran.out) == (0, True), ran.err
    assert "not installing ray[default], torch, numpy: not in wheels\n" in ran.err
    assert "installing requirements.txt (override with" in ran.err
    assert "unchanged" in genie("grid", "setup", "--wheels", "wheels", "--node", "gpu1").out


def test_setup_installs_only_named_packages(
    testbed: SshTestbed, genie: Callable[..., CommandOutcome], tmp_path: Path
) -> None:
    make_wheel(tmp_path / "wheels")
    (tmp_path / "requirements.txt").write_text("not-there==1.0\n")
    ran = genie("grid", "setup", "--wheels", "wheels", "--node", "gpu1", "--package", "small-thing")
    assert (ran.code, "torch" in ran.err) == (0, False), ran.err


def test_setup_table_shows_the_error_line() -> None:
    output = "node gpu1: Looking in links: wheels\nERROR: No matching distribution found for nope\n"
    assert _last_line(output) == "ERROR: No matching distribution found for nope"
    assert _last_line("") == ""


def test_setup_failure_exits_with_1_and_the_reason(
    testbed: SshTestbed, genie: Callable[..., CommandOutcome]
) -> None:
    ran = genie("grid", "setup", "--package", "x", "--python", "no-such-python", "--node", "gpu2")
    assert ran.code == 1
    assert "gpu2" in ran.out and "failed" in ran.out
    assert "program not found: no-such-python" in ran.err


def test_setup_help_and_hints_show_package_syntax(genie: Callable[..., CommandOutcome]) -> None:
    assert "--package 'ray[default]'" in genie("grid", "setup", "--help").out
    ran = genie("grid", "setup", "numpy")
    assert (ran.code, "give packages with --package" in ran.err) == (2, True)


def test_unreachable_nodes_exit_with_255(testbed: SshTestbed, genie: Callable[..., CommandOutcome]) -> None:
    for node in testbed.nodes:
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
    assert (submit.code, "could not query gpu1, gpu2" in submit.err) == (255, True)
    status = json.loads(genie("grid", "cluster", "status", "--json").out)
    assert [each["node"] for each in status["nodes"]] == ["gpu1", "gpu2"]


def test_rejected_start_lists_the_versions(testbed: SshTestbed, genie: Callable[..., CommandOutcome]) -> None:
    install_ray_program(testbed["gpu1"], make_fake_ray_script("exit 0"))
    install_ray_program(testbed["gpu2"], make_fake_ray_script("exit 0", version="2.0.0"))
    ran = genie("grid", "cluster", "start")
    assert ran.code == 1
    assert "gpu1: Ray 2.60.0" in ran.err and "gpu2: Ray 2.0.0" in ran.err
    assert "hint: " in ran.err


def test_head_option_selects_the_head(testbed: SshTestbed, genie: Callable[..., CommandOutcome]) -> None:
    for node in testbed.nodes:
        install_ray_program(node, make_fake_ray_script("exit 1"))
    ran = genie("grid", "cluster", "start", "--head", "gpu2")
    assert (ran.code, "gpu2: starting the head" in ran.err) == (1, True), ran.err


def test_unknown_head_is_an_error_before_nodes_are_contacted(
    testbed: SshTestbed, genie: Callable[..., CommandOutcome]
) -> None:
    for node in testbed.nodes:
        node.stop()
    ran = genie("grid", "cluster", "start", "--head", "gpu9")
    assert (ran.code, "no node is named 'gpu9'" in ran.err) == (1, True), ran.err


def test_commands_report_a_missing_cluster(testbed: SshTestbed, genie: Callable[..., CommandOutcome]) -> None:
    assert genie("grid", "cluster", "stop").out == "no Ray cluster is running\n"
    status = genie("grid", "cluster", "status")
    assert status.code == 0
    assert status.out.splitlines()[0].split() == ["state", "stopped"]
    submit = genie("grid", "cluster", "submit", "--", "true")
    assert (submit.code, "grid-cli cluster start" in submit.err) == (1, True)


def test_unreachable_node_is_not_reported_as_stopped(
    testbed: SshTestbed, genie: Callable[..., CommandOutcome]
) -> None:
    testbed["gpu2"].stop()
    shown = json.loads(genie("grid", "cluster", "status", "--json").out)
    assert [each["state"] for each in shown["nodes"]] == ["not started", "unreachable"]
    table = genie("grid", "cluster", "status").out.splitlines()
    assert table[-1].split()[:7] == ["gpu2", "unreachable", *"-----"], (
        "no resources are known, which is not 0"
    )
    stop = genie("grid", "cluster", "stop", "--json")
    assert (stop.code, [each["exit_code"] for each in json.loads(stop.out)]) == (255, [0, 255])


def test_status_shows_why_a_node_has_no_data(
    testbed: SshTestbed, genie: Callable[..., CommandOutcome]
) -> None:
    (testbed["gpu2"].bin / "python3").write_text("#!/bin/sh\nexit 127\n")
    (testbed["gpu2"].bin / "python3").chmod(0o755)
    testbed.write_known_hosts(without=["gpu1"])
    status = genie("grid", "cluster", "status")
    assert status.code == 255
    assert status.out.splitlines()[0].split() == ["state", "unknown"]
    assert re.search(r"^gpu1 +host key unknown ", status.out, re.MULTILINE)
    assert re.search(r"^gpu2 +no python .*has no usable python3", status.out, re.MULTILINE)
    testbed.write_known_hosts()
    (testbed.folder / "authorized_keys").write_text("")
    shown = json.loads(genie("grid", "cluster", "status", "--json").out)
    assert [each["state"] for each in shown["nodes"]] == ["login refused"] * 2


def test_status_without_reachable_nodes_exits_with_255(
    testbed: SshTestbed, genie: Callable[..., CommandOutcome]
) -> None:
    for node in testbed.nodes:
        node.stop()
    ran = genie("grid", "cluster", "status", "--json")
    assert (ran.code, json.loads(ran.out)["state"]) == (255, "unreachable")


def test_submit_requires_a_command(testbed: SshTestbed, genie: Callable[..., CommandOutcome]) -> None:
    ran = genie("grid", "cluster", "submit")
    assert (ran.code, "no command given" in ran.err) == (2, True)
    ran = genie("grid", "cluster", "submit", "--env", "NOTHING", "--", "true")
    assert (ran.code, "is not KEY=VALUE" in ran.err) == (2, True)


@pytest.mark.parametrize("option", [(), ("--json",)])
def test_passwords_in_pip_output_are_hidden(
    testbed: SshTestbed, genie: Callable[..., CommandOutcome], option: tuple[str, ...]
) -> None:
    program = testbed["gpu2"].bin / "failing-python"
    program.write_text(
        '#!/bin/sh\ncase "$*" in *venv*) echo no https://me:hunter2@host/x; exit 1 ;; esac\n'
        'exec python3 "$@"\n'
    )
    program.chmod(0o755)
    ran = genie("grid", "setup", "--package", "x", "--python", "failing-python", "--node", "gpu2", *option)
    assert (ran.code, "://me:***@host/x" in ran.out) == (1, True), ran.out
    assert "no https://me:***@host/x" in ran.err
    assert "hunter2" not in ran.out + ran.err


def test_control_characters_in_node_output_are_removed(
    testbed: SshTestbed, genie: Callable[..., CommandOutcome]
) -> None:
    program = testbed["gpu2"].bin / "evil-python"
    program.write_text(
        '#!/bin/sh\ncase "$*" in *venv*) printf \'no\\033[2Jroom\' >&2; exit 1 ;; esac\nexec python3 "$@"\n'
    )
    program.chmod(0o755)
    ran = genie("grid", "setup", "--package", "x", "--python", "evil-python", "--node", "gpu2")
    assert ran.code == 1
    assert "room" in ran.err
    assert "\x1b" not in ran.out + ran.err
