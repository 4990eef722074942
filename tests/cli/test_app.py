"""The parser and the error boundary: help, exit codes, format of errors."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import typer.main

from genie.cli import grid_main, main
from genie.cli.app import app
from genie.cli.commands import jobs
from tests.cli.conftest import CommandOutcome
from tests.forkserver import ForkServer
from tests.house.repository_files import ROOT


def list_command_paths() -> list[tuple[str, ...]]:
    """Return the path of every command, from the parser."""
    return list(_list_paths_below(typer.main.get_command(app), ()))


def _list_paths_below(
    group: Any, path: tuple[str, ...]
) -> Iterator[tuple[str, ...]]:  # Any: a type of the parser
    for name in group.list_commands(None):
        found = group.get_command(None, name)
        if hasattr(found, "list_commands"):
            yield from _list_paths_below(found, (*path, name))
        else:
            yield (*path, name)


@pytest.fixture(scope="module")
def help_cache() -> dict[tuple[str, ...], CommandOutcome]:
    """Cache of help texts: rendering all of them takes seconds."""
    return {}


@pytest.fixture
def get_help(
    genie, help_cache: dict[tuple[str, ...], CommandOutcome]
) -> Callable[[tuple[str, ...]], CommandOutcome]:
    def get_cached_help(path: tuple[str, ...]) -> CommandOutcome:
        if path not in help_cache:
            help_cache[path] = genie(*path, "--help")
        return help_cache[path]

    return get_cached_help


@pytest.mark.parametrize("path", list_command_paths(), ids=" ".join)
def test_help_of_every_command_has_an_example(path, get_help) -> None:
    ran = get_help(path)
    assert ran.code == 0
    # Examples of grid commands use grid-cli.
    typed = ("grid-cli", *path[1:]) if path[0] == "grid" else ("genie", *path)
    assert f"Example: {' '.join(typed)}" in ran.out
    assert re.findall(r"--[a-z].*<(?:bool|str|path|list.*|int.*|float.*)>", ran.out) == []


@pytest.mark.parametrize("path", list_command_paths(), ids=" ".join)
def test_parameters_have_a_description_a_metavar_and_at_most_one_default(path, get_help) -> None:
    text = " ".join(re.sub(r"[^ -~]", " ", get_help(path).out).split())
    assert re.findall(r"\(default: [^)]*\)\. \[default: ", text) == []
    found: Any = typer.main.get_command(app)
    for name in path:
        found = found.get_command(None, name)
    arguments = [each for each in found.params if each.param_type_name == "argument"]
    assert [each.name for each in arguments if not each.help or not (each.metavar or "").isupper()] == []


def test_grid_cli_runs_the_grid_commands(capfd: pytest.CaptureFixture[str]) -> None:
    assert grid_main(["nodes", "--help"]) == 0
    assert "Usage: grid-cli nodes" in capfd.readouterr().out
    assert grid_main(["health", "--config", "no-such-file.yaml"]) == 2
    assert "no-such-file.yaml does not exist" in capfd.readouterr().err


def test_cli_page_lists_exactly_the_commands() -> None:
    page = (ROOT / "docs" / "CLI.md").read_text("utf-8")
    listed = re.findall(r"^\| `genie ([a-z ]+)`", page, re.MULTILINE)
    assert sorted(listed) == sorted(" ".join(path) for path in list_command_paths())


def test_cli_page_marks_the_commands_with_json(get_help) -> None:
    page = (ROOT / "docs" / "CLI.md").read_text("utf-8")
    rows = re.findall(r"^\| `genie ([a-z ]+)` .*\| (yes)? ?\|$", page, re.MULTILINE)
    has = {" ".join(path) for path in list_command_paths() if "--json" in get_help(path).out}
    assert {name for name, yes in rows if yes} == has


def test_help_lists_the_commands_and_exits_with_0(genie) -> None:
    ran = genie("--help")
    assert ran.code == 0
    assert "submit" in ran.out and "doctor" in ran.out


def test_no_arguments_show_the_help(genie) -> None:
    ran = genie()
    assert (ran.code, "Usage: genie" in ran.out, ran.err) == (2, True, "")


def test_version_is_printed(genie) -> None:
    import genie as package

    assert genie("--version") == (0, f"genie {package.__version__}\n", "")


def test_grid_cli_prints_the_version(capfd: pytest.CaptureFixture[str]) -> None:
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
def test_usage_error_exits_with_2_and_names_the_argument(argv, named, genie) -> None:
    ran = genie(*argv)
    assert ran.code == 2
    assert named in ran.err
    assert ran.out == ""
    assert "Traceback" not in ran.err


@pytest.mark.parametrize(
    ("argv", "message", "hint"),
    [
        (["statsu"], "no such command 'statsu'. Did you mean 'status'?", "'genie --help' lists the commands"),
        (["logs"], "missing argument 'JOB[.RANK]'", "'genie logs --help' lists the options"),
        (["jobs", "--nosuch"], "no such option: --nosuch", "'genie jobs --help' lists the options"),
        (
            ["cancel", "a", "--x"],
            "no such option: --x",
            "put arguments that start with '-' after --; 'genie cancel --help' lists the options",
        ),
        (
            ["submit", "--gpu", "1", "--", "x"],
            "no such option: --gpu (Possible options: --cpus, --gpu-share, --gpus)",
            "'genie submit --help' lists the options",
        ),
        (["status", "x"], "got unexpected extra argument(s) (x)", "'genie status --help' lists the options"),
        (
            ["jobs", "--limit"],
            "option '--limit' requires an argument",
            "'genie jobs --help' lists the options",
        ),
        (["--log-level"], "option '--log-level' requires an argument", "'genie --help' lists the options"),
        (["jobs", "--json", "--json=x"], "option '--json' does not take a value", "'genie jobs --help'"),
        (
            ["grid", "nodes", "add"],
            "missing argument '[USER@]NAME[:PORT]...'",
            "'genie grid nodes add --help'",
        ),
        (["grid", "attach"], "missing argument 'RUN'", "'genie grid attach --help' lists the options"),
        (["grid", "run"], "missing argument 'COMMAND'", "quote the command, as in"),
        (
            ["grid", "sync", "--nosuch"],
            "no such option: --nosuch",
            "put arguments that start with '-' after --",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_usage_error_is_a_message_and_a_hint(argv, message, hint, genie) -> None:
    ran = genie(*argv)
    assert (ran.code, ran.out) == (2, "")
    first, second = ran.err.splitlines()
    assert first == f"genie: {message}"
    assert second.startswith(f"hint: {hint}")


def test_hints_of_grid_cli_name_grid_cli(capfd: pytest.CaptureFixture[str]) -> None:
    assert grid_main(["attach"]) == 2
    assert capfd.readouterr().err.splitlines()[1] == "hint: 'grid-cli attach --help' lists the options"
    assert grid_main(["--config"]) == 2
    assert capfd.readouterr().err.splitlines()[1] == "hint: 'grid-cli --help' lists the options"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["submit", "--gpus", "one", "--", "x"], "--gpus 'one' is not an integer"),
        (["submit", "--gpus", "1.5", "--", "x"], "--gpus '1.5' is not an integer"),
        (["submit", "--cpus", "two", "--", "x"], "--cpus 'two' is not a number"),
        (["jobs", "--limit", "all"], "--limit 'all' is not an integer"),
        (["jobs", "--limit", "1001"], "--limit '1001' is out of range"),
        (["up", "--port", "http"], "--port 'http' is not an integer"),
    ],
)
def test_invalid_number_is_a_readable_error(argv, message, genie) -> None:
    ran = genie(*argv)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith(f"genie: {message}\nhint: ")


def test_missing_cluster_hint_names_the_address_option(genie) -> None:
    ran = genie("status")
    assert "--address HOST[:PORT]" in ran.err
    assert "master_addr" not in ran.err


def test_error_is_two_lines_without_traceback(genie) -> None:
    ran = genie("status")
    assert ran.code == 2
    assert re.fullmatch(r"genie: no cluster.*\nhint: .*genie up.*\n", ran.err)


@pytest.mark.parametrize("argv", [["--debug", "status"], ["status", "--debug"]])
def test_debug_shows_the_traceback_before_and_after_the_command(argv, genie) -> None:
    ran = genie(*argv)
    assert "Traceback (most recent call last)" in ran.err
    assert "genie: no cluster" in ran.err


def test_internal_error_is_one_line_with_a_debug_hint(genie, monkeypatch) -> None:
    def raise_zero_division(*_args: object, **_kwargs: object) -> None:
        raise ZeroDivisionError("oops\x1b[2J")

    monkeypatch.setattr(jobs, "build_job_spec", raise_zero_division)
    ran = genie("submit", "--", "x")
    assert ran.code == 1
    assert ran.err.startswith("genie: internal error: ZeroDivisionError: oops [2J\n")
    assert "--debug" in ran.err and "Traceback" not in ran.err


def test_interrupt_exits_with_130_silently(genie, monkeypatch) -> None:
    def raise_keyboard_interrupt(*_args: object, **_kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(jobs, "build_job_spec", raise_keyboard_interrupt)
    assert genie("submit", "--", "x") == (130, "", "")


def test_closed_pipe_prints_no_error(fork_server: ForkServer) -> None:
    program = "import sys; from genie.cli import main; sys.exit(main(['config', 'show', '--markdown']))"
    reading, writing = os.pipe()
    os.close(reading)
    with fork_server.popen(["-c", program], stdout=writing, stderr=subprocess.PIPE) as process:
        os.close(writing)
        _, err = process.communicate(timeout=60)
    assert err == b""
    assert process.returncode in (0, 1)


def test_output_without_a_terminal_has_no_escape_sequences(genie) -> None:
    for argv in (["config", "show"], ["--help"], ["statsu"]):
        ran = genie(*argv)
        assert "\x1b" not in ran.out + ran.err


def test_no_color_is_honoured_on_a_terminal(fork_server: ForkServer) -> None:
    out = _run_on_terminal(fork_server, ["config", "show"], {"NO_COLOR": "1"})
    assert not re.search(r"\x1b\[[0-9;]*3[0-7]", out)
    assert "cluster.master_port" in out


def _run_on_terminal(server: ForkServer, argv: list[str], environ: dict[str, str]) -> str:
    parent, child = pty.openpty()
    try:
        process = server.popen(
            ["-m", "genie", *argv], stdout=child, stderr=child, env={**os.environ, **environ}
        )
        os.close(child)
        seen = b""
        while True:
            try:
                data = os.read(parent, 65536)
            except OSError:  # Linux raises it when the other side is closed
                break
            if not data:
                break
            seen += data
        process.wait(60)
    finally:
        os.close(parent)
    return seen.decode()


@pytest.mark.parametrize("level", ["LOUD", "1"])
def test_invalid_log_level_names_the_allowed_ones(level, genie) -> None:
    ran = genie("config", "check", "--log-level", level)
    assert ran.code == 2
    assert f"--log-level {level!r} is not allowed" in ran.err and "WARNING" in ran.err
    assert "log.level" not in ran.err and "argument" not in ran.err


def test_show_completion_prints_the_shell_script(genie, monkeypatch) -> None:
    monkeypatch.setenv("SHELL", "/bin/bash")
    monkeypatch.setattr("shellingham.detect_shell", lambda *_args: ("bash", "/bin/bash"))
    ran = genie("--show-completion")
    assert ran.code == 0
    assert "_GENIE_COMPLETE" in ran.out


def test_main_is_the_entry_point_of_the_package() -> None:
    assert 'genie = "genie.cli:main"' in (ROOT / "pyproject.toml").read_text("utf-8")
    assert main(["--version"]) == 0


@pytest.mark.parametrize("entry_point", [main, grid_main])
def test_interrupt_during_import_prints_no_traceback(entry_point, monkeypatch) -> None:
    class Loading:
        def __getattr__(self, name: str) -> object:
            raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "genie.cli.app", Loading())
    assert entry_point([]) == 130


@pytest.mark.parametrize(
    ("argv", "hint"),
    [
        (["up"], "--bind and --port"),
        (["join", "10.0.0.5"], "genie join ADDR"),
        (["down"], "on the machine to stop"),
        (["sim", "run"], "uses no cluster"),
        (["sim", "replay"], "uses no cluster"),
        (["sim", "generate", "-"], "uses no cluster"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
@pytest.mark.parametrize("before", [False, True], ids=["after", "before"])
def test_commands_that_connect_to_no_cluster_reject_an_address(genie, argv, hint, before) -> None:
    given = ["--address", "192.0.2.1:1"]
    ran = genie(*given, *argv) if before else genie(*argv, *given)
    assert ran.code == 2
    assert "takes no --address" in ran.err
    assert hint in ran.err


@pytest.mark.parametrize("path", [("up",), ("join",), ("down",), ("sim", "run")], ids=" ".join)
def test_help_does_not_list_an_address_that_is_rejected(path, get_help) -> None:
    assert "--address" not in get_help(path).out
