"""Runs on a node without Python: the same behaviour, in POSIX shell."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from genie.errors import NodeRefusedError, RunLostError, RunNotFoundError
from genie.grid.remote import runs as remote_runs
from genie.grid.runs import shell_runs
from genie.grid.runs.run import RunState, new_run_id
from genie.grid.runs.run_client import Runner
from genie.grid.ssh.pool import SshPool
from tests.grid.conftest import make_testbed_grid_file
from tests.grid.runs.test_run_client import (
    COUNTED,
    COUNTING,
    OutputRecorder,
    get_run_folder,
    run_to_end,
    without_python,
)
from tests.grid.testbed import SshNode, SshTestbed
from tests.needs import require_program
from tests.waiting import until


@pytest.fixture
def node_without_python(own_testbed: SshTestbed) -> Iterator[SshNode]:
    with without_python(own_testbed["gpu1"]):
        yield own_testbed["gpu1"]


@pytest_asyncio.fixture
async def runner(own_testbed: SshTestbed, node_without_python: SshNode) -> AsyncIterator[Runner]:
    file = make_testbed_grid_file(own_testbed)
    async with SshPool(file, ssh_config=own_testbed.ssh_config) as pool:
        async with pool.connect("gpu1") as link:
            assert not link.has_helper
        yield Runner(pool, file)


async def test_run_has_exit_code_output_and_environment(runner: Runner) -> None:
    env = {"A": "x y'$(z)", "run": "r", "watch": "w", "id": "i"}
    command = r"""echo "$PWD|$A|$run|$watch|$id"; printf '\377\000a' ; echo no >&2; exit 3"""
    code, out, err = await run_to_end(runner, "gpu1", command, env=env)
    assert (code, out, err) == (3, b"/root/grid_workspace|x y'$(z)|r|w|i\n\xff\x00a", b"no\n")
    assert (await run_to_end(runner, "gpu1", "pwd", cwd="/tmp"))[1] == b"/tmp\n"
    assert (await run_to_end(runner, "gpu1", "kill -TERM $$"))[0] == 128 + 15
    with pytest.raises(NodeRefusedError, match="no directory nowhere"):
        await runner.start("gpu1", "true", cwd="nowhere")


async def test_environment_of_a_run_does_not_affect_its_start_script(
    runner: Runner, node_without_python: SshNode
) -> None:
    env = {"PATH": "/nowhere", "SHELL": "/bin/false"}
    assert await run_to_end(runner, "gpu1", "echo $PATH $SHELL; exit 3", env=env) == (
        3,
        b"/nowhere /bin/false\n",
        b"",
    )
    code, out, _ = await run_to_end(runner, "gpu1", "env", env={"PATH": "/usr/bin:/bin"})
    assert code == 0 and b"_grid" not in out


async def test_invalid_variable_is_named_and_nothing_runs(
    runner: Runner, node_without_python: SshNode
) -> None:
    (node_without_python.bin / "sh").symlink_to("/bin/bash")
    with pytest.raises(NodeRefusedError, match="UID: readonly variable"):
        await runner.start("gpu1", "true", env={"UID": "7"})
    assert list((node_without_python.home / "grid_workspace/.grid/runs").iterdir()) == []


async def test_locale_warnings_of_sh_are_not_in_the_output(
    runner: Runner, node_without_python: SshNode
) -> None:
    (node_without_python.bin / "sh").symlink_to("/bin/bash")
    _, _, err = await run_to_end(runner, "gpu1", "true", env={"LC_ALL": "no_NO"})
    assert err.count(b"setlocale") == 1  # by bash, which runs the command


async def test_an_interrupt_reaches_the_command(runner: Runner) -> None:
    run = await runner.start("gpu1", "sleep 7105")
    assert (await runner.cancel(run, signal="INT")).exit_code == 128 + 2


async def test_runs_are_listed_signalled_and_removed(runner: Runner, node_without_python: SshNode) -> None:
    ended = await runner.start("gpu1", "exit 4")
    assert await runner.follow_until_end(ended, lambda *_: None) == 4
    run = await runner.start("gpu1", "echo 'a -- b'; sleep 7101 & sleep 7101")
    states = {each.run_id: each.state for each in await runner.list_runs("gpu1")}
    assert states == {ended.run_id: RunState.EXITED, run.run_id: RunState.RUNNING}
    assert (
        await runner.fetch_run_by_prefix(run.run_id[:10])
    ).command == "echo 'a -- b'; sleep 7101 & sleep 7101"
    assert (await runner.cancel(run)).exit_code == 128 + 15
    await until(lambda: not node_without_python.processes("sleep 7101"), what="the end of its group")
    assert not await runner.send_signal(run, "TERM")
    await runner.remove_run(run)
    with pytest.raises(RunNotFoundError):
        await runner.fetch_status(run)


async def test_timeout_ends_the_run_and_leaves_no_process(
    runner: Runner, node_without_python: SshNode
) -> None:
    assert (await run_to_end(runner, "gpu1", "sleep 7102", timeout_s=1))[0] == 124
    assert (await run_to_end(runner, "gpu1", "exit 5", timeout_s=7103))[0] == 5
    await until(lambda: not node_without_python.processes("sleep 710"), what="the end of those who waited")


async def test_lost_connection_loses_and_repeats_no_output(
    runner: Runner, node_without_python: SshNode
) -> None:
    recorder = OutputRecorder()
    run = await runner.start("gpu1", COUNTING)
    following = asyncio.ensure_future(runner.follow_until_end(run, recorder))
    await until(lambda: len(recorder.out) > 500, what="output")
    node_without_python.kill_connections()
    assert await following == 7
    assert recorder.out == COUNTED


async def test_repeated_start_starts_once(runner: Runner, node_without_python: SshNode) -> None:
    run_id = new_run_id()
    for _ in range(2):
        run = await runner.start("gpu1", "echo x >> ~/twice", run_id=run_id)
        assert await runner.follow_until_end(run, lambda *_: None) == 0
    assert (node_without_python.home / "twice").read_text() == "x\n"


async def test_the_oldest_ended_runs_are_removed(runner: Runner, node_without_python: SshNode) -> None:
    first = await runner.start("gpu1", "true")
    assert await runner.follow_until_end(first, lambda *_: None) == 0
    folder = get_run_folder(node_without_python, first)
    for number in range(remote_runs.ENDED_RUNS_KEPT + 5):
        copy = shutil.copytree(folder, folder.with_name(f"r-{number}"))
        os.utime(copy, (1000 + number, 1000 + number))
    last = await runner.start("gpu1", "true")
    assert await runner.follow_until_end(last, lambda *_: None) == 0
    await until(
        lambda: len(list(folder.parent.iterdir())) == remote_runs.ENDED_RUNS_KEPT, what="their removal"
    )
    assert folder.exists()
    assert not folder.with_name("r-0").exists()


async def test_runs_are_lost_when_the_node_goes_down(
    runner: Runner, node_without_python: SshNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("genie.grid.runs.run_client._OUTPUT_WAIT_S", 0.5)
    run = await runner.start("gpu1", "sleep 7104")
    node_without_python.restart()
    with pytest.raises(RunLostError):
        await runner.follow_until_end(run, lambda *_: None)


async def test_helper_reads_runs_started_by_the_shell(
    own_testbed: SshTestbed, node_without_python: SshNode, runner: Runner
) -> None:
    run = await runner.start("gpu1", "echo from a shell; exit 8")
    assert await runner.follow_until_end(run, lambda *_: None) == 8
    (node_without_python.bin / "python3").rename(node_without_python.bin / "python3.away")
    file = make_testbed_grid_file(own_testbed)
    try:
        async with SshPool(file, ssh_config=own_testbed.ssh_config) as pool, pool.connect("gpu1") as link:
            assert link.has_helper
            recorder = OutputRecorder()
            assert await Runner(pool, file).follow_until_end(run, recorder) == 8
            assert recorder.out == b"from a shell\n"
    finally:
        (node_without_python.bin / "python3.away").rename(node_without_python.bin / "python3")


@pytest.mark.parametrize("more", [{"stdin": b"x"}, {"gpus": 1}])
async def test_features_that_need_python_are_rejected(runner: Runner, more: dict[str, object]) -> None:
    with pytest.raises(NodeRefusedError, match="no usable python3"):
        await runner.start("gpu1", "true", **more)  # type: ignore[arg-type]


async def test_read_only_home_is_reported(own_testbed: SshTestbed, node_without_python: SshNode) -> None:
    node_without_python.restart(before="mount -o remount,ro,bind /root")
    file = make_testbed_grid_file(own_testbed)
    async with SshPool(file, ssh_config=own_testbed.ssh_config) as pool:
        with pytest.raises(NodeRefusedError, match="Read-only file system") as caught:
            await Runner(pool, file).start("gpu1", "true")
    assert caught.value.reason == "read_only"
    assert "/root/grid_workspace" in caught.value.message


@pytest.mark.parametrize("shell", ["dash", "bash", "mksh", "zsh"])
def test_shell_syntax_in_values_is_not_executed(shell: str) -> None:
    hostile = "'; touch /tmp/x; echo '"
    args = {"root": hostile, "id": "r-x", "command": hostile, "cwd": hostile, "env": {"A": hostile}}
    text = shell_runs.make_op_script("start", args, marker="@m")
    program = require_program(shell, package=shell)
    done = subprocess.run([program, "-n"], input=text, text=True, capture_output=True, timeout=30)
    assert (done.returncode, done.stderr) == (0, "")
    lines = [line for line in text.splitlines() if "touch" in line]
    assert all(line.startswith(("root=", "command=", "cwd=", "meta=", "  export A=")) for line in lines)


async def test_damaged_run_does_not_hide_others(runner: Runner, node_without_python: SshNode) -> None:
    run = await runner.start("gpu1", "true")
    await runner.follow_until_end(run, lambda *_: None)
    damaged = (
        "",
        "[]",
        "{}",
        '{"id":"x"',
        '{"id":"x","command":"c","started":1,"gp',
        '{"command":"c","started":NaN,"gpus":[]}',
        '{"command":"c","started":1e999,"gpus":[]}',
        "[" * 100_000,
        "\x0crefused os a half",
        "\x1crun x\x85--\x85refused",
    )
    for number, text in enumerate(damaged):
        folder = node_without_python.home / f"grid_workspace/.grid/runs/r-damaged{number}"
        folder.mkdir()
        (folder / "meta.json").write_text(text)
    assert [each.run_id for each in await runner.list_runs("gpu1")] == [run.run_id]


def test_run_removed_during_a_listing_is_skipped(tmp_path: Path) -> None:
    """Its folder is removed between listing and reading."""
    for name in ("r-aaaaaaaaaa", "r-bbbbbbbbbb", "r-cccccccccc"):
        folder = tmp_path / ".grid/runs" / name
        folder.mkdir(parents=True)
        (folder / "meta.json").write_text('{"command":"c","started":1,"gpus":[]}')
    text = shell_runs.make_op_script("list", {"root": str(tmp_path)}, marker="@m")
    text = text.replace("|| facts ;;", '|| { [ "$id" != r-bbbbbbbbbb ] || rm -r "$run"; facts; } ;;')
    done = subprocess.run(["sh", "-s"], input=text.encode(), capture_output=True, timeout=30)
    answer, _ = shell_runs._parse_reply("gpu1", "list", done.stdout.partition(b"@m\n")[2])
    assert sorted(one["id"] for one in answer["runs"]) == ["r-aaaaaaaaaa", "r-cccccccccc"]


RUN = {"id": "r-aaaaaaaaaa", "command": 'echo x >>"$GRID_ROOT/ran"; pwd', "started": 1.0}


def run_operation_script(root: Path, name: str, *, bytes_max: int | None = None, **more: object) -> bytes:
    """Runs (part of) the script of an operation in sh, with a misleading CDPATH; returns its output."""
    text = shell_runs.make_op_script(name, {**RUN, "root": str(root), **more}, marker="@m").encode()
    env = {**os.environ, "CDPATH": str(root / "astray")}
    done = subprocess.run(["sh", "-s"], input=text[:bytes_max], capture_output=True, env=env, timeout=30)
    return done.stdout.partition(b"@m\n")[2]


def test_truncated_start_script_starts_nothing(tmp_path: Path) -> None:
    text = shell_runs.make_op_script("start", {**RUN, "root": str(tmp_path)}, marker="@m").encode()
    end = text.index(shell_runs._COMMON_FUNCTIONS_SCRIPT.encode())
    while (end := text.find(b"\n", end + 1)) < len(text) - 1:
        run_operation_script(tmp_path, "start", bytes_max=end + 1)
        assert list(tmp_path.iterdir()) == [], text[:end].splitlines()[-1]


def test_starting_run_is_not_lost(tmp_path: Path) -> None:
    """The start is repeated before the pid of the command is recorded."""
    text = shell_runs.make_op_script("start", {**RUN, "root": str(tmp_path)}, marker="@m")
    early = text.replace('set -- "$watch"', 'facts; printf -- "--\\n"\nset -- "$watch"')
    assert early != text
    done = subprocess.run(["sh", "-s"], input=early.encode(), capture_output=True, timeout=30)
    found, _ = shell_runs._parse_reply("gpu1", "start", done.stdout.partition(b"@m\n")[2])
    assert found["state"] == "starting"


def test_cdpath_is_ignored(tmp_path: Path) -> None:
    for folder in (tmp_path / "project", tmp_path / "astray/project"):
        folder.mkdir(parents=True)
    assert b"created" in run_operation_script(tmp_path, "start", cwd="project")
    _, out = shell_runs._parse_reply(
        "gpu1", "read", run_operation_script(tmp_path, "read", out=0, err=0, wait_s=10)
    )
    assert out == b"%s/project\n" % bytes(tmp_path)


def test_error_names_an_oversized_environment(tmp_path: Path) -> None:
    output = run_operation_script(tmp_path, "start", env={"LONG": "x" * 200_000})
    with pytest.raises(NodeRefusedError, match="environment may be too large"):
        shell_runs._parse_reply("gpu1", "start", output)
    assert list((tmp_path / ".grid/runs").iterdir()) == []


@pytest.mark.parametrize("change", ["boot", "pid_start", "no pid_start"])
def test_signal_is_sent_only_to_the_recorded_process(tmp_path: Path, change: str) -> None:
    with subprocess.Popen(["sleep", "7106"], start_new_session=True) as stranger:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        began = int(Path(f"/proc/{stranger.pid}/stat").read_text().rpartition(")")[2].split()[19])
        record = {"boot": boot, "watcher": stranger.pid, "watcher_start": began}
        record |= {"pid": stranger.pid, "pid_start": began}
        folder = tmp_path / ".grid/runs/r-aaaaaaaaaa"
        folder.mkdir(parents=True)
        (folder / "meta.json").write_text('{"command":"c","started":1,"gpus":[]}')
        (folder / "exit").touch()
        if change == "no pid_start":
            del record["pid_start"]
            record["pid"] = 2**22 + 1
        else:
            record[change] = "another" if change == "boot" else began + 1
        (folder / "pid").write_text(json.dumps(record, separators=(",", ":")))
        output = run_operation_script(tmp_path, "signal", signal="KILL")
        assert not shell_runs._parse_reply("gpu1", "signal", output)[0]["sent"]
        assert stranger.poll() is None
        stranger.kill()


@pytest.mark.parametrize(
    ("timeout_s", "formatted"), [(None, ""), (5400.0, "5400"), (0.5, "0.5"), (1e-9, "0"), (3e8, "300000000")]
)
def test_timeout_is_formatted_for_every_sleep_implementation(timeout_s: float | None, formatted: str) -> None:
    args = {**RUN, "root": "/r", "timeout_s": timeout_s}
    assert f"\ntimeout_s={formatted or repr('')}\n" in shell_runs.make_op_script("start", args, marker="@m")


async def test_sleep_with_integer_seconds_ends_no_run_early(
    runner: Runner, node_without_python: SshNode
) -> None:
    sleep = node_without_python.bin / "sleep"
    sleep.write_text('#!/bin/sh\ncase $1 in *.*) exit 1 ;; esac\nexec /bin/sleep "$@"\n')
    sleep.chmod(0o755)
    assert (await run_to_end(runner, "gpu1", "/bin/sleep 0.2; exit 5", timeout_s=30.5))[0] == 5
