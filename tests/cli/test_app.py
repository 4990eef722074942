"""The parser and the boundary: help, exit codes, where errors go and what they look like."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import typer.main

from genie.cli import grid_main, job_commands, main
from genie.cli.app import app
from tests.house.sources import ROOT


def commands() -> list[tuple[str, ...]]:
    """Every command as a person types it, read from the parser itself."""
    return list(_below(typer.main.get_command(app), ()))


def _below(group: Any, path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:  # Any: the parser's own
    for name in group.list_commands(None):
        found = group.get_command(None, name)
        if hasattr(found, "list_commands"):
            yield from _below(found, (*path, name))
        else:
            yield (*path, name)


@pytest.mark.parametrize("path", commands(), ids=" ".join)
def test_help_of_every_command_has_an_example_that_names_it(path, genie) -> None:
    ran = genie(*path, "--help")
    assert ran.code == 0
    # The grid's commands are shown as its own program has them, which is what people type.
    typed = ("grid-cli", *path[1:]) if path[0] == "grid" else ("genie", *path)
    assert f"Example: {' '.join(typed)}" in ran.out
    assert re.findall(r"--[a-z].*<(?:bool|str|path|list.*|int.*|float.*)>", ran.out) == []


def test_the_grid_has_a_program_of_its_own(capfd: pytest.CaptureFixture[str]) -> None:
    assert grid_main(["nodes", "--help"]) == 0
    assert "Usage: grid-cli nodes" in capfd.readouterr().out
    assert grid_main(["health", "--config", "no-such-file.yaml"]) == 2
    assert "no-such-file.yaml is not there" in capfd.readouterr().err


def test_the_page_of_commands_lists_exactly_the_commands() -> None:
    page = (ROOT / "docs" / "CLI.md").read_text("utf-8")
    listed = re.findall(r"^\| `genie ([a-z ]+)`", page, re.MULTILINE)
    assert sorted(listed) == sorted(" ".join(path) for path in commands())


def test_the_page_of_commands_knows_which_have_json(genie) -> None:
    page = (ROOT / "docs" / "CLI.md").read_text("utf-8")
    rows = re.findall(r"^\| `genie ([a-z ]+)` .*\| (yes)? ?\|$", page, re.MULTILINE)
    has = {" ".join(path) for path in commands() if "--json" in genie(*path, "--help").out}
    assert {name for name, yes in rows if yes} == has


def test_help_lists_the_commands_and_ends_well(genie) -> None:
    ran = genie("--help")
    assert ran.code == 0
    assert "submit" in ran.out and "doctor" in ran.out


def test_no_arguments_show_the_help_and_no_error(genie) -> None:
    ran = genie()
    assert (ran.code, "Usage: genie" in ran.out, ran.err) == (2, True, "")


def test_the_version_is_told(genie) -> None:
    import genie as package

    assert genie("--version") == (0, f"genie {package.__version__}\n", "")


def test_the_grid_s_own_door_tells_the_version(capfd: pytest.CaptureFixture[str]) -> None:
    import genie as package

    assert grid_main(["--version"]) == 0
    assert capfd.readouterr().out == f"genie {package.__version__}\n"


def test_python_dash_m_runs_the_same_program() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "genie", "--version"], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout[:6]) == (0, "genie ")


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["statsu"], "status"),
        (["submit", "--gpu", "1", "--", "x"], "--gpus"),
        (["submit", "--gpus", "many", "--", "x"], "--gpus"),
        (["submit", "--cpus", "x", "--", "x"], "--cpus"),
        (["up", "--port", "http"], "--port"),
        (["logs"], "JOB"),
        (["cancel"], "JOB"),
        (["token", "revoke"], "ID"),
        (["jobs", "--limit", "0"], "--limit"),
    ],
)
def test_a_command_that_is_wrong_ends_with_2_and_names_what(argv, named, genie) -> None:
    ran = genie(*argv)
    assert ran.code == 2
    assert named in ran.err
    assert ran.out == ""
    assert "Traceback" not in ran.err


@pytest.mark.parametrize(
    ("argv", "said", "hint"),
    [
        (["statsu"], "no such command 'statsu'. Did you mean 'status'?", "'genie --help' has the commands"),
        (["logs"], "missing argument 'JOB[.RANK]'", "'genie logs --help' has the options"),
        (["jobs", "--nosuch"], "no such option: --nosuch", "'genie jobs --help' has the options"),
        (
            ["cancel", "a", "--x"],
            "no such option: --x",
            "a name that begins with '-' goes behind --; 'genie cancel --help' has the options",
        ),
        (
            ["submit", "--gpu", "1", "--", "x"],
            "no such option: --gpu (Possible options: --cpus, --gpu-share, --gpus)",
            "'genie submit --help' has the options",
        ),
        (["status", "x"], "got unexpected extra argument(s) (x)", "'genie status --help' has the options"),
        (
            ["jobs", "--limit"],
            "option '--limit' requires an argument",
            "'genie jobs --help' has the options",
        ),
        (["--log-level"], "option '--log-level' requires an argument", "'genie --help' has the options"),
        (["jobs", "--json", "--json=x"], "option '--json' does not take a value", "'genie jobs --help'"),
        (["grid", "nodes", "add"], "missing argument '[USER@]NAME[:PORT]'", "'genie grid nodes add --help'"),
        (["grid", "attach"], "missing argument 'RUN'", "'genie grid attach --help' has the options"),
        (["grid", "run"], "missing argument 'COMMAND'", "the command is one argument, in quotes"),
        (["grid", "sync", "--nosuch"], "no such option: --nosuch", "a name that begins with '-' goes behind"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_usage_is_told_as_every_other_error(argv, said, hint, genie) -> None:
    ran = genie(*argv)
    assert (ran.code, ran.out) == (2, "")
    first, second = ran.err.splitlines()
    assert first == f"genie: {said}"
    assert second.startswith(f"hint: {hint}")


def test_the_grid_s_own_door_names_itself_in_hints(capfd: pytest.CaptureFixture[str]) -> None:
    assert grid_main(["attach"]) == 2
    assert capfd.readouterr().err.splitlines()[1] == "hint: 'grid-cli attach --help' has the options"
    assert grid_main(["--config"]) == 2
    assert capfd.readouterr().err.splitlines()[1] == "hint: 'grid-cli --help' has the options"


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["submit", "--gpus", "one", "--", "x"], "--gpus 'one' is not a whole number"),
        (["submit", "--gpus", "1.5", "--", "x"], "--gpus '1.5' is not a whole number"),
        (["submit", "--cpus", "two", "--", "x"], "--cpus 'two' is not a number"),
        (["jobs", "--limit", "all"], "--limit 'all' is not a whole number"),
        (["jobs", "--limit", "1001"], "--limit '1001' is not allowed"),
        (["up", "--port", "http"], "--port 'http' is not a whole number"),
    ],
)
def test_a_number_that_is_none_is_told_in_plain_words(argv, said, genie) -> None:
    ran = genie(*argv)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith(f"genie: {said}\nhint: ")


def test_without_a_cluster_the_hint_speaks_of_options(genie) -> None:
    ran = genie("status")
    assert "--address HOST[:PORT]" in ran.err
    assert "master_addr" not in ran.err


def test_an_error_is_two_lines_and_no_traceback(genie) -> None:
    ran = genie("status")
    assert ran.code == 2
    assert re.fullmatch(r"genie: no cluster.*\nhint: .*genie up.*\n", ran.err)


@pytest.mark.parametrize("argv", [["--debug", "status"], ["status", "--debug"]])
def test_debug_shows_the_traceback_wherever_it_stands(argv, genie) -> None:
    ran = genie(*argv)
    assert "Traceback (most recent call last)" in ran.err
    assert "genie: no cluster" in ran.err


def test_a_bug_is_one_line_and_asks_for_debug(genie, monkeypatch) -> None:
    def broken(*_args: object, **_kwargs: object) -> None:
        raise ZeroDivisionError("oops\x1b[2J")

    monkeypatch.setattr(job_commands, "job_spec", broken)
    ran = genie("submit", "--", "x")
    assert ran.code == 1
    assert ran.err.startswith("genie: internal error: ZeroDivisionError: oops [2J\n")
    assert "--debug" in ran.err and "Traceback" not in ran.err


def test_an_interrupt_ends_with_130_and_says_nothing(genie, monkeypatch) -> None:
    def interrupted(*_args: object, **_kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(job_commands, "job_spec", interrupted)
    assert genie("submit", "--", "x") == (130, "", "")


def test_a_reader_that_goes_away_is_no_error_message() -> None:
    program = "import sys; from genie.cli import main; sys.exit(main(['config', 'show', '--markdown']))"
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    process.stdout.close()
    _, err = process.communicate(timeout=60)
    assert err == ""
    assert process.returncode in (0, 1)


def test_output_without_a_terminal_has_no_escape_sequences(genie) -> None:
    for argv in (["config", "show"], ["--help"], ["statsu"]):
        ran = genie(*argv)
        assert "\x1b" not in ran.out + ran.err


def test_no_color_is_honoured_on_a_terminal(monkeypatch) -> None:
    out = _on_a_terminal(["config", "show"], {"NO_COLOR": "1"})
    assert not re.search(r"\x1b\[[0-9;]*3[0-7]", out)
    assert "cluster.master_port" in out


def _on_a_terminal(argv: list[str], environ: dict[str, str]) -> str:
    import os
    import pty

    parent, child = pty.openpty()
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "genie", *argv], stdout=child, stderr=child, env={**os.environ, **environ}
        )
        os.close(child)
        seen = b""
        while True:
            try:
                data = os.read(parent, 65536)
            except OSError:  # Linux says so when the other side is closed
                break
            if not data:
                break
            seen += data
        process.wait(60)
    finally:
        os.close(parent)
    return seen.decode()


@pytest.mark.parametrize("level", ["LOUD", "1"])
def test_a_log_level_that_is_none_names_the_allowed_ones(level, genie) -> None:
    ran = genie("config", "check", "--log-level", level)
    assert ran.code == 2
    assert f"--log-level {level!r} is not allowed" in ran.err and "WARNING" in ran.err
    assert "log.level" not in ran.err and "argument" not in ran.err


def test_completion_can_be_shown(genie, monkeypatch) -> None:
    monkeypatch.setenv("SHELL", "/bin/bash")
    monkeypatch.setattr("shellingham.detect_shell", lambda *_args: ("bash", "/bin/bash"))
    ran = genie("--show-completion")
    assert ran.code == 0
    assert "_GENIE_COMPLETE" in ran.out


def test_main_is_the_program_of_the_package() -> None:
    assert 'genie = "genie.cli:main"' in (ROOT / "pyproject.toml").read_text("utf-8")
    assert main(["--version"]) == 0


@pytest.mark.parametrize("door", [main, grid_main])
def test_an_interrupt_while_the_program_is_being_loaded_is_no_traceback(door, monkeypatch) -> None:
    class Loading:
        def __getattr__(self, name: str) -> object:
            raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "genie.cli.app", Loading())
    assert door([]) == 130
