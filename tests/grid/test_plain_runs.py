"""Runs on a node without Python: the same behaviour, by lines of shell."""

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
from genie.grid import plain_runs
from genie.grid.remote import runs as remote_runs
from genie.grid.run import RunState, new_run_id
from genie.grid.runner import Runner
from genie.grid.ssh_pool import SshPool
from tests.grid.bed import Bed, Node
from tests.grid.conftest import grid_file_of
from tests.grid.test_runner import COUNTED, COUNTING, Heard, folder_of, ran, without_python
from tests.waiting import until


@pytest.fixture
def node(own_bed: Bed) -> Iterator[Node]:
    with without_python(own_bed["gpu1"]):
        yield own_bed["gpu1"]


@pytest_asyncio.fixture
async def runner(own_bed: Bed, node: Node) -> AsyncIterator[Runner]:
    file = grid_file_of(own_bed)
    async with SshPool(file, ssh_config=own_bed.ssh_config) as pool:
        async with pool.use("gpu1") as link:
            assert not link.has_helper
        yield Runner(pool, file)


async def test_a_run_gives_its_exit_code_its_output_and_has_its_variables(runner: Runner) -> None:
    env = {"A": "x y'$(z)", "run": "r", "watch": "w", "id": "i"}
    command = r"""echo "$PWD|$A|$run|$watch|$id"; printf '\377\000a' ; echo no >&2; exit 3"""
    code, out, err = await ran(runner, "gpu1", command, env=env)
    assert (code, out, err) == (3, b"/root/grid_workspace|x y'$(z)|r|w|i\n\xff\x00a", b"no\n")
    assert (await ran(runner, "gpu1", "pwd", cwd="/tmp"))[1] == b"/tmp\n"
    assert (await ran(runner, "gpu1", "kill -TERM $$"))[0] == 128 + 15
    with pytest.raises(NodeRefusedError, match="no folder nowhere"):
        await runner.start("gpu1", "true", cwd="nowhere")


async def test_variables_change_nothing_for_the_lines_around_the_command(runner: Runner, node: Node) -> None:
    env = {"PATH": "/nowhere", "SHELL": "/bin/false"}
    assert await ran(runner, "gpu1", "echo $PATH $SHELL; exit 3", env=env) == (
        3,
        b"/nowhere /bin/false\n",
        b"",
    )
    code, out, _ = await ran(runner, "gpu1", "env", env={"PATH": "/usr/bin:/bin"})
    assert code == 0 and b"_grid" not in out


async def test_a_variable_that_sh_does_not_take_is_named_and_nothing_runs(runner: Runner, node: Node) -> None:
    (node.bin / "sh").symlink_to("/bin/bash")
    with pytest.raises(NodeRefusedError, match="UID: readonly variable"):
        await runner.start("gpu1", "true", env={"UID": "7"})
    assert list((node.home / "grid_workspace/.grid/runs").iterdir()) == []


async def test_what_sh_says_of_a_locale_is_not_the_commands_output(runner: Runner, node: Node) -> None:
    (node.bin / "sh").symlink_to("/bin/bash")
    _, _, err = await ran(runner, "gpu1", "true", env={"LC_ALL": "no_NO"})
    assert err.count(b"setlocale") == 1  # by bash, which runs the command


async def test_an_interrupt_reaches_the_command(runner: Runner) -> None:
    run = await runner.start("gpu1", "sleep 7105")
    assert (await runner.cancel(run, signal="INT")).exit_code == 128 + 2


async def test_runs_are_listed_signalled_and_removed(runner: Runner, node: Node) -> None:
    ended = await runner.start("gpu1", "exit 4")
    assert await runner.wait(ended, lambda *_: None) == 4
    run = await runner.start("gpu1", "echo 'a -- b'; sleep 7101 & sleep 7101")
    states = {each.run_id: each.state for each in await runner.list("gpu1")}
    assert states == {ended.run_id: RunState.EXITED, run.run_id: RunState.RUNNING}
    assert (await runner.find(run.run_id[:10])).command == "echo 'a -- b'; sleep 7101 & sleep 7101"
    assert (await runner.cancel(run)).exit_code == 128 + 15
    await until(lambda: not node.processes("sleep 7101"), what="the end of its group")
    assert not await runner.signal(run, "TERM")
    await runner.remove(run)
    with pytest.raises(RunNotFoundError):
        await runner.status(run)


async def test_a_time_limit_holds_and_leaves_no_process(runner: Runner, node: Node) -> None:
    assert (await ran(runner, "gpu1", "sleep 7102", timeout_s=1))[0] == 124
    assert (await ran(runner, "gpu1", "exit 5", timeout_s=7103))[0] == 5
    await until(lambda: not node.processes("sleep 710"), what="the end of those who waited")


async def test_a_cut_link_loses_nothing_and_repeats_nothing(runner: Runner, node: Node) -> None:
    heard = Heard()
    run = await runner.start("gpu1", COUNTING)
    following = asyncio.ensure_future(runner.wait(run, heard))
    await until(lambda: len(heard.out) > 500, what="output")
    node.cut()
    assert await following == 7
    assert heard.out == COUNTED


async def test_a_start_that_is_asked_for_twice_begins_once(runner: Runner, node: Node) -> None:
    run_id = new_run_id()
    for _ in range(2):
        run = await runner.start("gpu1", "echo x >> ~/twice", run_id=run_id)
        assert await runner.wait(run, lambda *_: None) == 0
    assert (node.home / "twice").read_text() == "x\n"


async def test_the_oldest_ended_runs_are_removed(runner: Runner, node: Node) -> None:
    first = await runner.start("gpu1", "true")
    assert await runner.wait(first, lambda *_: None) == 0
    folder = folder_of(node, first)
    for number in range(remote_runs.RUNS_KEPT + 5):
        copy = shutil.copytree(folder, folder.with_name(f"r-{number}"))
        os.utime(copy, (1000 + number, 1000 + number))
    last = await runner.start("gpu1", "true")
    assert await runner.wait(last, lambda *_: None) == 0
    await until(lambda: len(list(folder.parent.iterdir())) == remote_runs.RUNS_KEPT, what="their removal")
    assert folder.exists()
    assert not folder.with_name("r-0").exists()


async def test_a_node_that_goes_down_makes_its_runs_lost(runner: Runner, node: Node) -> None:
    run = await runner.start("gpu1", "sleep 7104")
    node.restart()
    with pytest.raises(RunLostError):
        await runner.wait(run, lambda *_: None)


async def test_a_helper_reads_what_a_shell_has_started(own_bed: Bed, node: Node, runner: Runner) -> None:
    run = await runner.start("gpu1", "echo from a shell; exit 8")
    assert await runner.wait(run, lambda *_: None) == 8
    (node.bin / "python3").rename(node.bin / "python3.away")
    file = grid_file_of(own_bed)
    try:
        async with SshPool(file, ssh_config=own_bed.ssh_config) as pool, pool.use("gpu1") as link:
            assert link.has_helper
            heard = Heard()
            assert await Runner(pool, file).wait(run, heard) == 8
            assert heard.out == b"from a shell\n"
    finally:
        (node.bin / "python3.away").rename(node.bin / "python3")


@pytest.mark.parametrize("more", [{"stdin": b"x"}, {"gpus": 1}])
async def test_what_takes_python_is_refused(runner: Runner, more: dict[str, object]) -> None:
    with pytest.raises(NodeRefusedError, match="no usable python3"):
        await runner.start("gpu1", "true", **more)  # type: ignore[arg-type]


async def test_a_read_only_home_is_said(own_bed: Bed, node: Node) -> None:
    node.restart(before="mount -o remount,ro,bind /root")
    file = grid_file_of(own_bed)
    async with SshPool(file, ssh_config=own_bed.ssh_config) as pool:
        with pytest.raises(NodeRefusedError, match="Read-only file system") as caught:
            await Runner(pool, file).start("gpu1", "true")
    assert caught.value.reason == "read_only"
    assert "/root/grid_workspace" in caught.value.message


def test_values_are_never_shell_syntax() -> None:
    hostile = "'; touch /tmp/x; echo '"
    args = {"root": hostile, "id": "r-x", "command": hostile, "cwd": hostile, "env": {"A": hostile}}
    text = plain_runs.script("start", args, marker="@m")
    shells = [shell for shell in ("dash", "bash", "mksh", "zsh") if shutil.which(shell)]
    assert shells
    for shell in shells:
        done = subprocess.run([shell, "-n"], input=text, text=True, capture_output=True)
        assert (done.returncode, done.stderr) == (0, "")
    lines = [line for line in text.splitlines() if "touch" in line]
    assert all(line.startswith(("root=", "command=", "cwd=", "meta=", "  export A=")) for line in lines)


async def test_a_damaged_run_does_not_hide_the_others(runner: Runner, node: Node) -> None:
    run = await runner.start("gpu1", "true")
    await runner.wait(run, lambda *_: None)
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
        folder = node.home / f"grid_workspace/.grid/runs/r-damaged{number}"
        folder.mkdir()
        (folder / "meta.json").write_text(text)
    assert [each.run_id for each in await runner.list("gpu1")] == [run.run_id]


def test_a_run_that_is_removed_while_they_are_listed_ends_no_list(tmp_path: Path) -> None:
    """Its folder goes between the look for it and the look at it."""
    for name in ("r-aaaaaaaaaa", "r-bbbbbbbbbb", "r-cccccccccc"):
        folder = tmp_path / ".grid/runs" / name
        folder.mkdir(parents=True)
        (folder / "meta.json").write_text('{"command":"c","started":1,"gpus":[]}')
    text = plain_runs.script("list", {"root": str(tmp_path)}, marker="@m")
    text = text.replace("|| facts ;;", '|| { [ "$id" != r-bbbbbbbbbb ] || rm -r "$run"; facts; } ;;')
    done = subprocess.run(["sh", "-s"], input=text.encode(), capture_output=True, timeout=30)
    answer, _ = plain_runs._answer("gpu1", "list", done.stdout.partition(b"@m\n")[2])
    assert sorted(one["id"] for one in answer["runs"]) == ["r-aaaaaaaaaa", "r-cccccccccc"]


RUN = {"id": "r-aaaaaaaaaa", "command": 'echo x >>"$GRID_ROOT/ran"; pwd', "started": 1.0}


def asked(root: Path, name: str, *, bytes_max: int | None = None, **more: object) -> bytes:
    """What sh says to an op, as far as it gets of its text. Its environment has a folder to go astray in."""
    text = plain_runs.script(name, {**RUN, "root": str(root), **more}, marker="@m").encode()
    env = {**os.environ, "CDPATH": str(root / "astray")}
    done = subprocess.run(["sh", "-s"], input=text[:bytes_max], capture_output=True, env=env, timeout=30)
    return done.stdout.partition(b"@m\n")[2]


def test_of_a_start_that_breaks_off_on_its_way_nothing_begins(tmp_path: Path) -> None:
    text = plain_runs.script("start", {**RUN, "root": str(tmp_path)}, marker="@m").encode()
    end = text.index(plain_runs._COMMON.encode())
    while (end := text.find(b"\n", end + 1)) < len(text) - 1:
        asked(tmp_path, "start", bytes_max=end + 1)
        assert list(tmp_path.iterdir()) == [], text[:end].splitlines()[-1]


def test_a_run_that_is_being_started_is_not_lost(tmp_path: Path) -> None:
    """It is asked for again before the command has been written down."""
    text = plain_runs.script("start", {**RUN, "root": str(tmp_path)}, marker="@m")
    early = text.replace('set -- "$watch"', 'facts; printf -- "--\\n"\nset -- "$watch"')
    assert early != text
    done = subprocess.run(["sh", "-s"], input=early.encode(), capture_output=True, timeout=30)
    found, _ = plain_runs._answer("gpu1", "start", done.stdout.partition(b"@m\n")[2])
    assert found["state"] == "starting"


def test_a_folder_elsewhere_that_the_shell_would_go_to_is_not_taken(tmp_path: Path) -> None:
    for folder in (tmp_path / "project", tmp_path / "astray/project"):
        folder.mkdir(parents=True)
    assert b"created" in asked(tmp_path, "start", cwd="project")
    _, out = plain_runs._answer("gpu1", "read", asked(tmp_path, "read", out=0, err=0, wait_s=10))
    assert out == b"%s/project\n" % bytes(tmp_path)


def test_variables_that_no_program_can_be_given_are_named_as_a_cause(tmp_path: Path) -> None:
    said = asked(tmp_path, "start", env={"LONG": "x" * 200_000})
    with pytest.raises(NodeRefusedError, match="variables may be too long"):
        plain_runs._answer("gpu1", "start", said)
    assert list((tmp_path / ".grid/runs").iterdir()) == []


@pytest.mark.parametrize("change", ["boot", "pid_start", "no pid_start"])
def test_a_signal_goes_to_no_process_but_the_one_that_was_written_down(tmp_path: Path, change: str) -> None:
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
        said = asked(tmp_path, "signal", signal="KILL")
        assert not plain_runs._answer("gpu1", "signal", said)[0]["sent"]
        assert stranger.poll() is None
        stranger.kill()


@pytest.mark.parametrize(
    ("timeout_s", "told"), [(None, ""), (5400.0, "5400"), (0.5, "0.5"), (1e-9, "0"), (3e8, "300000000")]
)
def test_a_time_limit_is_told_as_every_sleep_takes_it(timeout_s: float | None, told: str) -> None:
    args = {**RUN, "root": "/r", "timeout_s": timeout_s}
    assert f"\ntimeout_s={told or repr('')}\n" in plain_runs.script("start", args, marker="@m")


async def test_a_sleep_that_takes_whole_seconds_only_ends_no_run_early(runner: Runner, node: Node) -> None:
    sleep = node.bin / "sleep"
    sleep.write_text('#!/bin/sh\ncase $1 in *.*) exit 1 ;; esac\nexec /bin/sleep "$@"\n')
    sleep.chmod(0o755)
    assert (await ran(runner, "gpu1", "/bin/sleep 0.2; exit 5", timeout_s=1.5))[0] == 5
