"""run, ps, logs, attach, cancel: as they are typed, against real nodes."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from genie.grid.launch import figures
from tests.cli.conftest import Ran
from tests.grid import parts
from tests.grid.bed import Bed
from tests.grid.conftest import bed, bed_of_session, own_bed
from tests.waiting import wait_until

__all__ = ["bed", "bed_of_session", "own_bed"]
ROOT = Path(__file__).resolve().parents[2]
Cli = Callable[..., Ran]


def use(bed: Bed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, more: str = "") -> None:
    more = more or "ssh: {connect_timeout: 10, max_retries: 0}\nhealth_check: {timeout: 10}\n"
    (tmp_path / "grid.yaml").write_text(bed.grid_yaml(more=more))
    monkeypatch.setenv("GENIE_GRID_FILE", str(tmp_path / "grid.yaml"))
    monkeypatch.setenv("GENIE_GRID_SSH_CONFIG", str(bed.ssh_config))


@pytest.fixture
def cli(genie: Cli, bed: Bed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cli:
    use(bed, tmp_path, monkeypatch)
    return lambda *argv: genie("grid", *argv)


@pytest.fixture
def own_cli(genie: Cli, own_bed: Bed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cli:
    use(own_bed, tmp_path, monkeypatch)
    return lambda *argv: genie("grid", *argv)


# --- run ----------------------------------------------------------------------------------------


def test_a_run_shows_the_output_and_ends_with_the_exit_code(cli: Cli) -> None:
    done = cli("run", "hostname; echo no >&2; exit 3", "--node", "gpu2")
    assert (done.code, done.out) == (3, "gpu2\n")
    assert "no\n" in done.err
    assert "run r-" in done.err


@pytest.mark.parametrize("argv", [["nvidia-smi", "-L"], ["echo", "hello"], ["-L"]])
def test_a_command_without_quotes_is_told_to_be_one_argument(genie: Cli, argv: list[str]) -> None:
    done = genie("grid", "run", *argv)
    assert (done.code, done.out) == (2, "")
    assert argv[-1] in done.err.splitlines()[0]
    assert "the command is one argument, in quotes" in done.err
    assert "--help" in done.err


@pytest.mark.parametrize("argv", [["ps", "gpu1"], ["ps", "--nodes"], ["sync", "a", "b"]])
def test_what_is_said_of_dashes_is_said_where_a_name_may_have_been_meant(genie: Cli, argv: list[str]) -> None:
    done = genie("grid", *argv)
    assert done.code == 2
    assert done.err.splitlines()[1] == f"hint: 'genie grid {argv[0]} --help' has the options"


def test_a_mistyped_option_still_names_the_right_one(genie: Cli) -> None:
    done = genie("grid", "run", "true", "--gpu", "1")
    assert (done.code, "--gpus" in done.err.splitlines()[0]) == (2, True)


def test_the_options_of_every_command_may_stand_behind_it(cli: Cli) -> None:
    done = cli("run", "echo test", "--log-level", "DEBUG")
    assert (done.code, done.out) == (0, "test\n")
    assert "connecting" in done.err and "starting a run" in done.err


def test_without_a_node_the_best_one_is_taken(cli: Cli) -> None:
    assert cli("run", "hostname").out.startswith("gpu")


def test_a_label_and_gpus_choose_the_node(own_bed: Bed, own_cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "grid.yaml"
    file.write_text(file.read_text().replace("- gpu2\n", "- {name: gpu2, labels: {zone: b}}\n"))
    for node in own_bed.nodes:
        node.gpus(2)
    command = "hostname; echo $CUDA_VISIBLE_DEVICES"
    assert own_cli("run", command, "--label", "zone=b", "--gpus", "2").out == "gpu2\n0,1\n"
    refused = own_cli("run", command, "--label", "zone=b", "--gpus", "3")
    assert (refused.code, "2 of 2 GPUs are free, 3 wanted" in refused.err) == (1, True)


def start_trapping(cli: Cli, trap: str) -> str:
    run_id = cli(
        "run", f"{trap}; echo ready; while :; do sleep 0.1; done", "--node", "gpu1", "-d"
    ).out.strip()
    wait_until(lambda: cli("logs", run_id).out == "ready\n", what="the trap")
    return run_id


def test_cancel_kills_after_the_time_that_it_is_given(own_cli: Cli) -> None:
    run_id = start_trapping(own_cli, "trap '' TERM")
    began = time.monotonic()
    assert "exit code 137" in own_cli("cancel", run_id, "--grace", "0.1s").out
    assert time.monotonic() - began < 9  # it would have 10 s by itself


def test_cancel_sends_the_signal_that_it_is_given(own_cli: Cli) -> None:
    run_id = start_trapping(own_cli, "trap 'exit 7' USR1")
    assert "exit code 7" in own_cli("cancel", run_id, "--signal", "sigusr1").out


def test_a_node_that_cannot_be_reached_is_left_out_of_the_choice(own_bed: Bed, own_cli: Cli) -> None:
    own_bed["gpu1"].stop()
    assert own_cli("run", "hostname").out == "gpu2\n"


def test_output_is_not_changed(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(bytes(range(256)) * 1000)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "genie",
            "grid",
            "run",
            "cat",
            "--node",
            "gpu1",
            "--stdin",
            str(tmp_path / "in"),
        ],
        capture_output=True,
        timeout=60,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == bytes(range(256)) * 1000


def test_several_nodes_are_told_apart_line_by_line_and_the_highest_code_counts(cli: Cli) -> None:
    done = cli(
        "run", "hostname; printf tail; [ $(hostname) != gpu2 ] || exit 4", "--node", "gpu1", "--node", "gpu2"
    )
    assert done.code == 4
    assert sorted(done.out.splitlines()) == ["gpu1: gpu1", "gpu1: tail", "gpu2: gpu2", "gpu2: tail"]
    assert "gpu1: exit code 0 after" in done.err
    assert "gpu2: exit code 4 after" in done.err


def test_all_nodes_run_it_and_one_that_is_gone_is_255(own_bed: Bed, own_cli: Cli) -> None:
    own_bed["gpu2"].stop()
    done = own_cli("run", "hostname", "--all")
    assert (done.code, done.out) == (255, "gpu1: gpu1\n")
    assert "gpu2: unreachable" in done.err


def test_a_node_that_lets_nobody_in_has_one_word_for_it(own_bed: Bed, own_cli: Cli) -> None:
    own_bed.write_known_hosts(without=["gpu2"])
    done = own_cli("run", "hostname", "--all")
    assert (done.code, "gpu2: unreachable" in done.err) == (255, True)
    (row,) = (line for line in own_cli("ps").out.splitlines() if "gpu2" in line)
    assert "unreachable" in row and "node gpu2" not in row


def test_ps_of_a_node_that_refuses_is_1(own_bed: Bed, own_cli: Cli) -> None:
    root = own_bed["gpu2"].home / "grid_workspace"
    root.mkdir()
    (root / ".grid").symlink_to(root / "missing")
    done = own_cli("ps", "--node", "gpu2")
    assert (done.code, "refused" in done.out) == (1, True)


def test_a_folder_is_sent_to_all_nodes_at_once_and_those_that_did_not_get_it_run_nothing(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = parts.install_syncer(monkeypatch, failing=["gpu2"])
    done = cli("run", "hostname", "--node", "gpu1", "--node", "gpu2", "--sync", str(tmp_path))
    assert synced == [(tmp_path, ["gpu1", "gpu2"])]
    assert (done.code, done.out) == (1, "gpu1: gpu1\n")
    assert "gpu2: refused" in done.err


def test_a_run_as_json(cli: Cli) -> None:
    done = cli("run", "echo out; echo err >&2; exit 2", "--node", "gpu1", "--json")
    told = json.loads(done.out)
    assert done.code == told["exit_code"] == 2
    (one,) = told["runs"]
    assert (one["node"], one["exit_code"], one["stdout"], one["stderr"]) == ("gpu1", 2, "out\n", "err\n")


def test_variables_folder_and_time_limit_reach_the_command(cli: Cli) -> None:
    done = cli("run", 'echo "$A $PWD"', "--node", "gpu1", "--env", "A=b c", "--cwd", "/tmp")
    assert done.out == "b c /tmp\n"
    ran = cli("run", "sleep 60", "--node", "gpu1", "--timeout", "0.2s")
    assert (ran.code, "gpu1: the node ended the run after its --timeout 0.2s\n" in ran.err) == (124, True)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (["--all", "--node", "gpu1"], "exclude each other"),
        (["--label", "a=b", "--all"], "--label"),
        (["--env", "A"], "--env"),
        (["--env", "A-B=1"], "--env"),
        (["--gpus", "-1"], "--gpus"),
        (["--timeout", "soon"], "--timeout"),
        (["--stdin", "/no/such/file"], "--stdin"),
        (["--sync", "/no/such/folder"], "--sync"),
        (["--cwd", "a\nb", "--node", "gpu1"], "folder"),
    ],
)
def test_options_that_cannot_be_meant_are_usage_errors(cli: Cli, options: list[str], word: str) -> None:
    done = cli("run", "true", *options)
    assert done.code == 2
    assert word in done.err


@pytest.mark.parametrize("node", ["-oProxyCommand=touch x", "a; touch x", "../../etc/x", "gpu99"])
def test_a_node_that_is_not_in_the_file_is_refused(cli: Cli, node: str) -> None:
    done = cli("run", "true", "--node", node)
    assert done.code == 1
    assert "no node is named" in done.err


def test_standard_input_that_is_too_large_is_refused(cli: Cli, tmp_path: Path) -> None:
    with (tmp_path / "large").open("wb") as file:
        file.truncate((16 << 20) + 1)
    done = cli("run", "cat", "--node", "gpu1", "--stdin", str(tmp_path / "large"))
    assert done.code == 2
    assert "more than 16777216 bytes" in done.err


def test_a_node_that_cannot_be_reached_is_exit_code_255(own_bed: Bed, own_cli: Cli) -> None:
    own_bed["gpu1"].stop()
    assert own_cli("run", "true", "--node", "gpu1").code == 255


def test_runs_are_counted(cli: Cli, state_dir: Path) -> None:
    cli("run", "true", "--node", "gpu1")
    cli("run", "exit 9", "--node", "gpu1")
    text = figures(state_dir).text()
    assert 'grid_tasks_completed_total{status="succeeded"} 1' in text
    assert 'grid_tasks_completed_total{status="failed"} 1' in text


def test_a_run_is_counted_once_however_often_it_is_looked_at(cli: Cli, state_dir: Path) -> None:
    done = cli("run", "true", "--node", "gpu1", "--json")
    run_id = json.loads(done.out)["runs"][0]["run_id"]
    assert cli("attach", run_id).code == 0
    assert figures(state_dir).text().count('grid_tasks_completed_total{status="succeeded"} 1') == 1


# --- detached ------------------------------------------------------------------------------------


def test_a_detached_run_is_listed_read_and_cancelled(cli: Cli) -> None:
    started = cli("run", "echo begun; echo trouble >&2; sleep 7201", "--node", "gpu3", "-d")
    run_id = started.out.strip()
    assert started.code == 0
    assert run_id.startswith("r-")
    wait_until(lambda: cli("logs", run_id).out == "begun\n", what="its output")
    assert cli("logs", run_id[:8], "--stderr").out == "trouble\n"
    told = json.loads(cli("logs", run_id, "--json").out)
    assert (told["stdout"], told["stderr"]) == ("begun\n", "trouble\n")
    listed = cli("ps")
    assert any(run_id in line and "running" in line and "gpu3" in line for line in listed.out.splitlines())
    ended = cli("cancel", run_id)
    assert (ended.code, ended.out) == (0, f"{run_id}  gpu3  exited with exit code 143\n")
    assert run_id not in cli("ps").out
    found = {one["run_id"]: one for one in json.loads(cli("ps", "--all", "--json").out)["runs"]}
    assert (found[run_id]["state"], found[run_id]["exit_code"]) == ("exited", 143)
    assert cli("attach", run_id).code == 143


def test_what_a_short_run_wrote_is_no_part_of_how_it_is(cli: Cli) -> None:
    started = json.loads(cli("run", "echo out", "--node", "gpu3", "-d", "--json").out)["runs"]
    listed = json.loads(cli("ps", "--all", "--json").out)["runs"]
    assert [one["node"] for one in started] == ["gpu3"]
    assert all("first" not in one for one in started + listed)


def test_logs_follow_to_the_end(cli: Cli) -> None:
    run_id = cli(
        "run", "for i in 1 2 3; do echo $i; sleep 0.1; done; exit 5", "--node", "gpu3", "-d"
    ).out.strip()
    done = cli("logs", "-f", run_id)
    assert (done.code, done.out) == (0, "1\n2\n3\n")


@pytest.mark.parametrize("run_id", ["../../etc/x", "-oProxyCommand=x", "r-a; touch x", "x"])
@pytest.mark.parametrize("command", ["logs", "attach", "cancel"])
def test_a_hostile_run_id_is_a_usage_error(cli: Cli, command: str, run_id: str) -> None:
    assert cli(command, "--", run_id).code == 2


def test_an_unknown_run_says_where_to_look(cli: Cli) -> None:
    done = cli("logs", "r-aaaaaaaaaa")
    assert done.code == 1
    assert "grid-cli ps" in done.err


def test_a_run_that_may_be_on_a_node_that_does_not_answer_is_not_said_to_be_none(
    own_bed: Bed, own_cli: Cli
) -> None:
    run_id = own_cli("run", "true", "--node", "gpu2", "-d").out.strip()
    own_bed["gpu2"].stop()
    for command in ("logs", "attach", "cancel"):
        done = own_cli(command, run_id)
        assert done.code == 255, command
        assert f"run {run_id} is on no node that answers; gpu2 cannot be asked" in done.err


def test_a_signal_that_is_not_known_is_a_usage_error(cli: Cli) -> None:
    assert cli("cancel", "r-aaaaaaaaaa", "--signal", "NOPE").code == 2


def test_ps_lists_the_newest_first_whichever_node_it_is_on(cli: Cli) -> None:
    begun = [cli("run", "true", "--node", name, "-d").out.strip() for name in ("gpu1", "gpu2")]
    listed = [each["run_id"] for each in json.loads(cli("ps", "--all", "--json").out)["runs"]]
    assert listed[:2] == begun[::-1]


def test_ps_says_which_node_cannot_be_asked(own_bed: Bed, own_cli: Cli) -> None:
    run_id = own_cli("run", "sleep 7202", "--node", "gpu1", "-d").out.strip()
    own_bed["gpu2"].stop()
    done = own_cli("ps")
    assert done.code == 0
    lines = done.out.splitlines()
    assert any(line.startswith(run_id) for line in lines)
    assert any("gpu2" in line and "unreachable" in line for line in lines)
    assert own_cli("ps", "--node", "gpu2").code == 255


# --- in a process of its own ------------------------------------------------------------------------


@contextlib.contextmanager
def grid_cli(*argv: str, stdin: int = subprocess.DEVNULL) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "genie", "grid", *argv],
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=ROOT,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def first_line(process: subprocess.Popen[bytes]) -> bytes:
    assert process.stdout is not None
    return process.stdout.readline()


def test_the_first_interrupt_is_passed_on_and_the_second_kills(own_bed: Bed, own_cli: Cli) -> None:
    stubborn = "trap 'echo interrupted' INT; echo ready; while :; do sleep 0.1; done"
    with grid_cli("run", stubborn, "--node", "gpu1") as process:
        assert first_line(process) == b"ready\n"
        process.send_signal(signal.SIGINT)
        assert first_line(process) == b"interrupted\n"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
        assert process.returncode == 128 + 9, err
    assert b"killing r-" in err
    (one,) = json.loads(own_cli("ps", "--all", "--json").out)["runs"]
    assert (one["state"], one["signal"]) == ("exited", 9)


def test_ctrl_c_on_a_terminal_interrupts_the_command(own_bed: Bed, own_cli: Cli) -> None:
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(ROOT)
        os.execv(
            sys.executable,
            [sys.executable, "-m", "genie", "grid", "run", "echo ready; sleep 7203", "--node", "gpu1"],
        )
    try:
        shown = b""
        while b"ready" not in shown:
            shown += os.read(terminal, 4096)
        os.write(terminal, b"\x03")
        with contextlib.suppress(OSError):  # the terminal is gone when the program is
            while data := os.read(terminal, 4096):
                shown += data
        _, status = os.waitpid(pid, 0)
    finally:
        os.close(terminal)
    assert os.waitstatus_to_exitcode(status) == 128 + 2, shown
    assert b"interrupting r-" in shown
    wait_until(lambda: not own_bed["gpu1"].processes("sleep 7203"), what="the end of the command")


def test_attach_tells_how_long_the_run_took_and_not_how_long_it_was_watched(
    own_bed: Bed, own_cli: Cli
) -> None:
    run_id = own_cli("run", "true", "--node", "gpu1", "-d").out.strip()
    assert own_cli("attach", run_id).code == 0
    meta = own_bed["gpu1"].home / f"grid_workspace/.grid/runs/{run_id}/meta.json"
    told = json.loads(meta.read_text())
    meta.write_text(json.dumps({**told, "started": told["started"] - 1000}))
    (one,) = json.loads(own_cli("attach", run_id, "--json").out)["runs"]
    assert 1000 <= one["took_s"] < 2000


def test_a_killed_client_leaves_the_run_and_another_one_attaches(own_bed: Bed, own_cli: Cli) -> None:
    command = "echo begun; while [ ! -e ~/go ]; do sleep 0.05; done; echo ended; exit 6"
    with grid_cli("run", command, "--node", "gpu1") as process:
        assert first_line(process) == b"begun\n"
        process.kill()
    (own_bed["gpu1"].home / "go").touch()
    (one,) = json.loads(own_cli("ps", "--all", "--json").out)["runs"]
    with grid_cli("attach", one["run_id"]) as later:
        out, err = later.communicate(timeout=30)
        assert (later.returncode, out) == (6, b"begun\nended\n"), err


def test_an_interrupt_while_the_node_is_gone_says_so_and_the_second_one_leaves(
    own_bed: Bed, own_cli: Cli
) -> None:
    with grid_cli("run", "echo ready; sleep 7204", "--node", "gpu1") as process:
        assert first_line(process) == b"ready\n"
        own_bed["gpu1"].stop()
        assert process.stderr is not None
        wait_for(process, b"is unreachable since")
        process.send_signal(signal.SIGINT)
        wait_for(process, b"has not got the signal")
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 255


def test_the_third_interrupt_leaves_at_once_and_waits_for_no_node(
    own_bed: Bed, own_cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id = own_cli("run", "echo ready; sleep 7205", "--node", "gpu1", "-d").out.strip()
    use(own_bed, tmp_path, monkeypatch, more="ssh: {connect_timeout: 300, timeout: 300}\n")
    with grid_cli("attach", run_id) as process:
        assert first_line(process) == b"ready\n"
        with own_bed["gpu1"].hanging():
            for word in (b"interrupting", b"killing", b""):
                process.send_signal(signal.SIGINT)
                if word:
                    wait_for(process, word)
            _, said = process.communicate(timeout=60)
    assert (process.returncode, b"may go on" in said, b"has not got the signal" in said) == (130, True, False)


def test_an_interrupt_while_a_run_is_started_names_it(own_bed: Bed, own_cli: Cli) -> None:
    with own_bed["gpu1"].hanging(), grid_cli("run", "true", "--node", "gpu1") as process:
        wait_until(psutil.Process(process.pid).net_connections, timeout_s=30, what="an attempt to connect")
        process.send_signal(signal.SIGINT)
        wait_for(process, b"'grid-cli cancel r-")
        assert process.wait(30) == 130


def wait_for(process: subprocess.Popen[bytes], text: bytes) -> None:
    assert process.stderr is not None
    lines = []
    while text not in (lines or [b""])[-1]:
        lines.append(process.stderr.readline())
        assert lines[-1], lines


def test_a_reader_that_goes_away_leaves_the_run_alone(own_bed: Bed, own_cli: Cli) -> None:
    with grid_cli("run", "while :; do echo line; sleep 0.02; done", "--node", "gpu1") as process:
        assert first_line(process) == b"line\n"
        assert process.stdout is not None
        process.stdout.close()
        assert process.wait(30) == 1
        assert process.stderr is not None
        said = process.stderr.read()
    assert b"Traceback" not in said
    assert b"goes on; 'grid-cli attach r-" in said
    (one,) = json.loads(own_cli("ps", "--json").out)["runs"]
    assert own_cli("cancel", one["run_id"]).code == 0
