"""run, ps, logs, attach, cancel, against real nodes."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from genie.cli.quantities import parse_duration
from genie.grid.runs.launch import grid_metrics
from genie.grid.runs.run import Run
from genie.grid.runs.run_client import _KILL_TIMEOUT_S, Runner
from tests.cli.conftest import CommandOutcome
from tests.forkserver import ForkedProcess, ForkServer
from tests.grid import fake_syncer
from tests.grid.conftest import testbed
from tests.grid.testbed import SshTestbed
from tests.waiting import wait_until

__all__ = ["testbed"]
ROOT = Path(__file__).resolve().parents[3]
Cli = Callable[..., CommandOutcome]


def use_three_nodes_as_grid(
    testbed: SshTestbed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, more: str = ""
) -> None:
    more = more or "ssh: {connect_timeout: 10, max_retries: 0}\nhealth_check: {timeout: 10}\n"
    names = [node.name for node in testbed.nodes[:3]]  # commands without a node's name ask all of them
    (tmp_path / "grid.yaml").write_text(testbed.grid_yaml(nodes=names, more=more))
    monkeypatch.setenv("GENIE_GRID_FILE", str(tmp_path / "grid.yaml"))
    monkeypatch.setenv("GENIE_GRID_SSH_CONFIG", str(testbed.ssh_config))


@pytest.fixture
def cli(genie: Cli, testbed: SshTestbed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cli:
    use_three_nodes_as_grid(testbed, tmp_path, monkeypatch)
    return lambda *argv: genie("grid", *argv)


@pytest.fixture
def own_cli(genie: Cli, own_testbed: SshTestbed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cli:
    use_three_nodes_as_grid(own_testbed, tmp_path, monkeypatch)
    return lambda *argv: genie("grid", *argv)


# --- run ----------------------------------------------------------------------------------------


def test_run_prints_the_output_and_returns_the_exit_code(cli: Cli) -> None:
    done = cli("run", "hostname; echo no >&2; exit 3", "--node", "gpu2")
    assert (done.code, done.out) == (3, "gpu2\n")
    assert "no\n" in done.err
    assert "run r-" in done.err


@pytest.mark.parametrize("argv", [["nvidia-smi", "-L"], ["echo", "hello"], ["-L"]])
def test_unquoted_command_has_a_hint(genie: Cli, argv: list[str]) -> None:
    done = genie("grid", "run", *argv)
    assert (done.code, done.out) == (2, "")
    assert argv[-1] in done.err.splitlines()[0]
    assert "quote the command, as in" in done.err
    assert "--help" in done.err


@pytest.mark.parametrize("argv", [["ps", "gpu1"], ["ps", "--nodes"], ["sync", "a", "b"]])
def test_commands_without_a_remote_command_have_no_hint_about_dashes(genie: Cli, argv: list[str]) -> None:
    done = genie("grid", *argv)
    assert done.code == 2
    assert done.err.splitlines()[1] == f"hint: 'genie grid {argv[0]} --help' lists the options"


def test_mistyped_option_suggests_the_right_one(genie: Cli) -> None:
    done = genie("grid", "run", "true", "--gpu", "1")
    assert (done.code, "--gpus" in done.err.splitlines()[0]) == (2, True)


def test_global_options_are_accepted_after_the_command(cli: Cli) -> None:
    done = cli("run", "echo test", "--log-level", "DEBUG")
    assert (done.code, done.out) == (0, "test\n")
    assert "connecting" in done.err and "starting a run" in done.err


def test_best_node_is_the_default(cli: Cli) -> None:
    assert cli("run", "hostname").out.startswith("gpu")


def test_label_and_gpus_select_the_node(own_testbed: SshTestbed, own_cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "grid.yaml"
    file.write_text(file.read_text().replace("- gpu2\n", "- {name: gpu2, labels: {zone: b}}\n"))
    for node in own_testbed.nodes:
        node.gpus(2)
    command = "hostname; echo $CUDA_VISIBLE_DEVICES"
    assert own_cli("run", command, "--label", "zone=b", "--gpus", "2").out == "gpu2\n0,1\n"
    refused = own_cli("run", command, "--label", "zone=b", "--gpus", "3")
    assert (refused.code, "2 of 2 GPUs are free, 3 requested" in refused.err) == (1, True)


def start_run_with_trap(cli: Cli, trap: str) -> str:
    run_id = cli(
        "run", f"{trap}; echo ready; while :; do sleep 0.1; done", "--node", "gpu1", "-d"
    ).out.strip()
    wait_until(lambda: cli("logs", run_id).out == "ready\n", what="the trap")
    return run_id


@pytest.mark.parametrize("grace", ["0s", "0.1s"])
def test_cancel_kills_after_the_grace_period(
    own_cli: Cli, monkeypatch: pytest.MonkeyPatch, grace: str
) -> None:
    run_id = start_run_with_trap(own_cli, "trap '' TERM")
    waits: list[float] = []
    wait_for_end = Runner._wait_until_ended

    async def record(runner: Runner, run: Run, timeout_s: float) -> Run:
        waits.append(timeout_s)
        return await wait_for_end(runner, run, timeout_s)

    monkeypatch.setattr(Runner, "_wait_until_ended", record)
    assert "exit code 137" in own_cli("cancel", run_id, "--grace", grace).out
    assert waits == [parse_duration(grace, what="", zero_allowed=True), _KILL_TIMEOUT_S]


def test_cancel_sends_the_given_signal(own_cli: Cli) -> None:
    run_id = start_run_with_trap(own_cli, "trap 'exit 7' USR1")
    assert "exit code 7" in own_cli("cancel", run_id, "--signal", "sigusr1").out


def test_unreachable_node_is_not_chosen(own_testbed: SshTestbed, own_cli: Cli) -> None:
    own_testbed["gpu1"].stop()
    assert own_cli("run", "hostname").out == "gpu2\n"


def test_binary_output_is_unchanged(cli: Cli, tmp_path: Path, fork_server: ForkServer) -> None:
    (tmp_path / "in").write_bytes(bytes(range(256)) * 1000)
    argv = ["-m", "genie", "grid", "run", "cat", "--node", "gpu1", "--stdin", str(tmp_path / "in")]
    done = fork_server.run(argv, timeout=60, text=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == bytes(range(256)) * 1000


def test_output_of_several_nodes_is_prefixed_and_highest_code_wins(cli: Cli) -> None:
    done = cli(
        "run", "hostname; printf tail; [ $(hostname) != gpu2 ] || exit 4", "--node", "gpu1", "--node", "gpu2"
    )
    assert done.code == 4
    assert sorted(done.out.splitlines()) == ["gpu1: gpu1", "gpu1: tail", "gpu2: gpu2", "gpu2: tail"]
    assert "gpu1: exit code 0 after" in done.err
    assert "gpu2: exit code 4 after" in done.err


def test_run_on_all_nodes_exits_with_255_if_one_is_unreachable(own_testbed: SshTestbed, own_cli: Cli) -> None:
    own_testbed["gpu2"].stop()
    done = own_cli("run", "hostname", "--all")
    assert (done.code, done.out) == (255, "gpu1: gpu1\n")
    assert "gpu2: unreachable" in done.err


def test_node_that_rejects_the_login_is_reported(own_testbed: SshTestbed, own_cli: Cli) -> None:
    own_testbed.write_known_hosts(without=["gpu2"])
    done = own_cli("run", "hostname", "--all")
    assert (done.code, "gpu2: unreachable" in done.err) == (255, True)
    (row,) = (line for line in own_cli("ps").out.splitlines() if "gpu2" in line)
    assert "unreachable" in row and "node gpu2" not in row


def test_ps_of_a_rejecting_node_exits_with_1(own_testbed: SshTestbed, own_cli: Cli) -> None:
    root = own_testbed["gpu2"].home / "grid_workspace"
    root.mkdir()
    (root / ".grid").symlink_to(root / "missing")
    done = own_cli("ps", "--node", "gpu2")
    assert (done.code, "refused" in done.out) == (1, True)


def test_nodes_with_a_failed_sync_run_nothing(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = fake_syncer.install_fake_syncer(monkeypatch, failing=["gpu2"])
    done = cli("run", "hostname", "--node", "gpu1", "--node", "gpu2", "--sync", str(tmp_path))
    assert synced == [(tmp_path, ["gpu1", "gpu2"])]
    assert (done.code, done.out) == (1, "gpu1: gpu1\n")
    assert "gpu2: refused" in done.err


def test_run_prints_json(cli: Cli) -> None:
    done = cli("run", "echo out; echo err >&2; exit 2", "--node", "gpu1", "--json")
    document = json.loads(done.out)
    assert done.code == document["exit_code"] == 2
    (one,) = document["runs"]
    assert (one["node"], one["exit_code"], one["stdout"], one["stderr"]) == ("gpu1", 2, "out\n", "err\n")


def test_env_cwd_and_timeout_apply_to_the_command(cli: Cli) -> None:
    done = cli("run", 'echo "$A $PWD"', "--node", "gpu1", "--env", "A=b c", "--cwd", "/tmp")
    assert done.out == "b c /tmp\n"
    ran = cli("run", "sleep 60", "--node", "gpu1", "--timeout", "0.2s")
    assert (ran.code, "gpu1: the run exceeded --timeout 0.2s and was terminated\n" in ran.err) == (124, True)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (["--all", "--node", "gpu1"], "are mutually exclusive"),
        (["--label", "a=b", "--all"], "--label"),
        (["--env", "A"], "--env"),
        (["--env", "A-B=1"], "--env"),
        (["--gpus", "-1"], "--gpus"),
        (["--timeout", "soon"], "--timeout"),
        (["--stdin", "/no/such/file"], "--stdin"),
        (["--sync", "/no/such/folder"], "--sync"),
        (["--cwd", "a\nb", "--node", "gpu1"], "working directory"),
    ],
)
def test_invalid_options_are_usage_errors(cli: Cli, options: list[str], word: str) -> None:
    done = cli("run", "true", *options)
    assert done.code == 2
    assert word in done.err


@pytest.mark.parametrize("node", ["-oProxyCommand=touch x", "a; touch x", "../../etc/x", "gpu99"])
def test_node_missing_in_the_file_is_rejected(cli: Cli, node: str) -> None:
    done = cli("run", "true", "--node", node)
    assert done.code == 1
    assert "no node is named" in done.err


def test_too_large_standard_input_is_rejected(cli: Cli, tmp_path: Path) -> None:
    with (tmp_path / "large").open("wb") as file:
        file.truncate((16 << 20) + 1)
    done = cli("run", "cat", "--node", "gpu1", "--stdin", str(tmp_path / "large"))
    assert done.code == 2
    assert "larger than 16777216 bytes" in done.err


def test_unreachable_node_exits_with_255(own_testbed: SshTestbed, own_cli: Cli) -> None:
    own_testbed["gpu1"].stop()
    assert own_cli("run", "true", "--node", "gpu1").code == 255


def test_metrics_count_runs_by_status(cli: Cli, state_dir: Path) -> None:
    cli("run", "true", "--node", "gpu1")
    cli("run", "exit 9", "--node", "gpu1")
    text = grid_metrics(state_dir).text()
    assert 'grid_tasks_completed_total{status="succeeded"} 1.0' in text
    assert 'grid_tasks_completed_total{status="failed"} 1.0' in text


def test_attach_does_not_count_a_run_again(cli: Cli, state_dir: Path) -> None:
    done = cli("run", "true", "--node", "gpu1", "--json")
    run_id = json.loads(done.out)["runs"][0]["run_id"]
    assert cli("attach", run_id).code == 0
    assert grid_metrics(state_dir).text().count('grid_tasks_completed_total{status="succeeded"} 1.0') == 1


# --- detached ------------------------------------------------------------------------------------


def test_detached_run_is_listed_read_and_cancelled(cli: Cli) -> None:
    started = cli("run", "echo trouble >&2; echo begun; sleep 7201", "--node", "gpu3", "-d")
    run_id = started.out.strip()
    assert started.code == 0
    assert run_id.startswith("r-")
    wait_until(lambda: cli("logs", run_id).out == "begun\n", what="its output")
    wait_until(lambda: cli("logs", run_id[:8], "--stderr").out == "trouble\n", what="its errors")
    document = json.loads(cli("logs", run_id, "--json").out)
    assert (document["stdout"], document["stderr"]) == ("begun\n", "trouble\n")
    listed = cli("ps")
    assert any(run_id in line and "running" in line and "gpu3" in line for line in listed.out.splitlines())
    ended = cli("cancel", run_id)
    assert (ended.code, ended.out) == (0, f"{run_id}  gpu3  exited with exit code 143\n")
    assert run_id not in cli("ps").out
    found = {one["run_id"]: one for one in json.loads(cli("ps", "--all", "--json").out)["runs"]}
    assert (found[run_id]["state"], found[run_id]["exit_code"]) == ("exited", 143)
    assert cli("attach", run_id).code == 143


def test_json_of_a_run_excludes_its_output(cli: Cli) -> None:
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
def test_invalid_run_id_is_a_usage_error(cli: Cli, command: str, run_id: str) -> None:
    assert cli(command, "--", run_id).code == 2


def test_unknown_run_has_a_hint(cli: Cli) -> None:
    done = cli("logs", "r-aaaaaaaaaa")
    assert done.code == 1
    assert "grid-cli ps" in done.err


def test_run_on_an_unreachable_node_is_not_reported_as_unknown(own_testbed: SshTestbed, own_cli: Cli) -> None:
    run_id = own_cli("run", "true", "--node", "gpu2", "-d").out.strip()
    own_testbed["gpu2"].stop()
    for command in ("logs", "attach", "cancel"):
        done = own_cli(command, run_id)
        assert done.code == 255, command
        assert f"run {run_id} is on no reachable node; could not reach gpu2" in done.err


def test_unknown_signal_is_a_usage_error(cli: Cli) -> None:
    assert cli("cancel", "r-aaaaaaaaaa", "--signal", "NOPE").code == 2


def test_ps_lists_the_newest_run_first(cli: Cli) -> None:
    begun = [cli("run", "true", "--node", name, "-d").out.strip() for name in ("gpu1", "gpu2")]
    listed = [each["run_id"] for each in json.loads(cli("ps", "--all", "--json").out)["runs"]]
    assert listed[:2] == begun[::-1]


def test_ps_reports_unreachable_nodes(own_testbed: SshTestbed, own_cli: Cli) -> None:
    run_id = own_cli("run", "sleep 7202", "--node", "gpu1", "-d").out.strip()
    own_testbed["gpu2"].stop()
    done = own_cli("ps")
    assert done.code == 0
    lines = done.out.splitlines()
    assert any(line.startswith(run_id) for line in lines)
    assert any("gpu2" in line and "unreachable" in line for line in lines)
    assert own_cli("ps", "--node", "gpu2").code == 255


# --- in a separate process -------------------------------------------------------------------------


@pytest.fixture
def start_grid_cli(fork_server: ForkServer) -> Callable[..., ForkedProcess]:
    """Start a command and kill it at the end of the block."""

    def start(*argv: str) -> ForkedProcess:
        pipe = subprocess.PIPE
        argv = ("-m", "genie", "grid", *argv)
        return fork_server.popen(argv, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe)

    return start


def read_first_line(process: ForkedProcess) -> bytes:
    assert process.stdout is not None
    return process.stdout.readline()


def test_first_interrupt_is_forwarded_and_second_kills(
    own_testbed: SshTestbed, own_cli: Cli, start_grid_cli: Callable[..., ForkedProcess]
) -> None:
    stubborn = "trap 'echo interrupted' INT; echo ready; while :; do sleep 0.1; done"
    with start_grid_cli("run", stubborn, "--node", "gpu1") as process:
        assert read_first_line(process) == b"ready\n"
        process.send_signal(signal.SIGINT)
        assert read_first_line(process) == b"interrupted\n"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
        assert process.returncode == 128 + 9, err
    assert b"killing r-" in err
    (one,) = json.loads(own_cli("ps", "--all", "--json").out)["runs"]
    assert (one["state"], one["signal"]) == ("exited", 9)


def test_ctrl_c_on_a_terminal_interrupts_the_command(own_testbed: SshTestbed, own_cli: Cli) -> None:
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
    wait_until(lambda: not own_testbed["gpu1"].processes("sleep 7203"), what="the end of the command")


def test_attach_reports_the_duration_of_the_run(own_testbed: SshTestbed, own_cli: Cli) -> None:
    run_id = own_cli("run", "true", "--node", "gpu1", "-d").out.strip()
    assert own_cli("attach", run_id).code == 0
    meta = own_testbed["gpu1"].home / f"grid_workspace/.grid/runs/{run_id}/meta.json"
    document = json.loads(meta.read_text())
    meta.write_text(json.dumps({**document, "started": document["started"] - 1000}))
    (one,) = json.loads(own_cli("attach", run_id, "--json").out)["runs"]
    assert 1000 <= one["took_s"] < 2000


def test_run_survives_a_killed_client(
    own_testbed: SshTestbed, own_cli: Cli, start_grid_cli: Callable[..., ForkedProcess]
) -> None:
    command = "echo begun; while [ ! -e ~/go ]; do sleep 0.05; done; echo ended; exit 6"
    with start_grid_cli("run", command, "--node", "gpu1") as process:
        assert read_first_line(process) == b"begun\n"
        process.kill()
    (own_testbed["gpu1"].home / "go").touch()
    (one,) = json.loads(own_cli("ps", "--all", "--json").out)["runs"]
    with start_grid_cli("attach", one["run_id"]) as later:
        out, err = later.communicate(timeout=30)
        assert (later.returncode, out) == (6, b"begun\nended\n"), err


def test_second_interrupt_exits_if_the_node_is_unreachable(
    own_testbed: SshTestbed, own_cli: Cli, start_grid_cli: Callable[..., ForkedProcess]
) -> None:
    with start_grid_cli("run", "echo ready; sleep 7204", "--node", "gpu1") as process:
        assert read_first_line(process) == b"ready\n"
        own_testbed["gpu1"].stop()
        assert process.stderr is not None
        wait_for_stderr_line(process, b"has been unreachable for")
        process.send_signal(signal.SIGINT)
        wait_for_stderr_line(process, b"could not be signalled")
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 255


def test_third_interrupt_exits_at_once(
    own_testbed: SshTestbed,
    own_cli: Cli,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    start_grid_cli: Callable[..., ForkedProcess],
) -> None:
    run_id = own_cli("run", "echo ready; sleep 7205", "--node", "gpu1", "-d").out.strip()
    use_three_nodes_as_grid(
        own_testbed, tmp_path, monkeypatch, more="ssh: {connect_timeout: 300, timeout: 300}\n"
    )
    with start_grid_cli("attach", run_id) as process:
        assert read_first_line(process) == b"ready\n"
        with own_testbed["gpu1"].suspended():
            for word in (b"interrupting", b"killing", b""):
                process.send_signal(signal.SIGINT)
                if word:
                    wait_for_stderr_line(process, word)
            _, message = process.communicate(timeout=60)
    assert (process.returncode, b"may still be running" in message) == (130, True)
    assert b"could not be signalled" not in message


def test_interrupt_during_a_start_names_the_run(
    own_testbed: SshTestbed, own_cli: Cli, start_grid_cli: Callable[..., ForkedProcess]
) -> None:
    with own_testbed["gpu1"].suspended(), start_grid_cli("run", "true", "--node", "gpu1") as process:
        wait_until(psutil.Process(process.pid).net_connections, timeout_s=30, what="an attempt to connect")
        process.send_signal(signal.SIGINT)
        wait_for_stderr_line(process, b"grid-cli cancel r-")
        assert process.wait(30) == 130


def wait_for_stderr_line(process: subprocess.Popen[bytes], text: bytes) -> None:
    assert process.stderr is not None
    lines = []
    while text not in (lines or [b""])[-1]:
        lines.append(process.stderr.readline())
        assert lines[-1], lines


def test_closed_pipe_does_not_end_the_run(
    own_testbed: SshTestbed, own_cli: Cli, start_grid_cli: Callable[..., ForkedProcess]
) -> None:
    with start_grid_cli("run", "while :; do echo line; sleep 0.02; done", "--node", "gpu1") as process:
        assert read_first_line(process) == b"line\n"
        assert process.stdout is not None
        process.stdout.close()
        assert process.wait(30) == 1
        assert process.stderr is not None
        message = process.stderr.read()
    assert b"Traceback" not in message
    assert b"may still be running on gpu1; to follow it: grid-cli attach r-" in message
    (one,) = json.loads(own_cli("ps", "--json").out)["runs"]
    assert own_cli("cancel", one["run_id"]).code == 0
