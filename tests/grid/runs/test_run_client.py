"""Runs on real nodes: started once, followed across faults, reported correctly."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
import os
import shlex
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from genie.errors import (
    ConnectionLostError,
    DeadlineError,
    NameInvalidError,
    NodeRefusedError,
    NoNodeError,
    ProtocolError,
    RunLostError,
    RunNotFoundError,
    UnreachableError,
    UsageError,
)
from genie.grid.grid_file import GridFile
from genie.grid.health.check import NodeHealthChecker
from genie.grid.remote import runs as remote_runs
from genie.grid.runs import run_client as runner_module
from genie.grid.runs.run import Run, RunState, new_run_id
from genie.grid.runs.run_client import CancelledStartState, Runner
from genie.grid.ssh.pool import NodeConnection, SshPool
from tests.grid.conftest import make_testbed_grid_file
from tests.grid.testbed import SshNode, SshTestbed
from tests.waiting import until

IMPATIENT = "ssh: {connect_timeout: 10, max_retries: 2, timeout: 0.5}\n"


@pytest_asyncio.fixture
async def runner(pool: SshPool, grid_file: GridFile) -> Runner:
    return Runner(pool, grid_file)


@asynccontextmanager
async def open_runner(testbed: SshTestbed, *, more: str = "") -> AsyncIterator[Runner]:
    file = make_testbed_grid_file(testbed, more=more)
    async with SshPool(file, ssh_config=testbed.ssh_config) as pool:
        yield Runner(pool, file)


class OutputRecorder:
    """Collects the output of a run, and the notes about its node."""

    def __init__(self) -> None:
        self.out = b""
        self.err = b""
        self.notes: list[str] = []

    def __call__(self, stream: str, data: bytes) -> None:
        if stream == "out":
            self.out += data
        else:
            self.err += data


async def run_to_end(runner: Runner, node: str, command: str, **more: object) -> tuple[int, bytes, bytes]:
    recorder = OutputRecorder()
    run = await runner.start(node, command, **more)  # type: ignore[arg-type]
    return await runner.follow_until_end(run, recorder), recorder.out, recorder.err


def get_run_folder(node: SshNode, run: Run) -> Path:
    return node.home / "grid_workspace" / ".grid" / "runs" / run.run_id


@contextmanager
def without_python(node: SshNode) -> Iterator[None]:
    (node.bin / "python3").write_text("#!/bin/sh\nexit 127\n")
    (node.bin / "python3").chmod(0o755)
    try:
        yield
    finally:
        (node.bin / "python3").unlink()


# --- results ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("true", 0),
        ("exit 3", 3),
        ("no-such-program-here", 127),
        ("kill -TERM $$", 128 + 15),
        ("kill -KILL $$", 128 + 9),
        ("exit 255", 255),
    ],
)
async def test_exit_code_is_that_of_the_command(runner: Runner, command: str, code: int) -> None:
    assert (await run_to_end(runner, "gpu1", command))[0] == code


async def test_output_streams_are_separate_bytes(runner: Runner) -> None:
    code, out, err = await run_to_end(runner, "gpu1", r"printf '\377\000a\r\n'; printf 'no\n' >&2; hostname")
    assert (code, out, err) == (0, b"\xff\x00a\r\ngpu1\n", b"no\n")


async def test_large_output_is_complete(runner: Runner) -> None:
    code, out, _ = await run_to_end(runner, "gpu1", "seq 1 300000")
    assert code == 0
    assert out == b"".join(b"%d\n" % number for number in range(1, 300001))


async def test_run_has_shell_working_directory_and_environment(testbed: SshTestbed, runner: Runner) -> None:
    code, out, _ = await run_to_end(
        runner, "gpu2", 'echo "$PWD|$A|$GRID_ROOT|$0"; cat', env={"A": "x y'$(z)"}, stdin=b"given"
    )
    shell = os.environ.get("SHELL", "/bin/bash")
    assert code == 0
    first, _, rest = out.partition(b"\n")
    pwd, a, root, zero = first.decode().split("|")
    assert (pwd, a, root) == ("/root/grid_workspace", "x y'$(z)", "/root/grid_workspace")
    assert Path(zero).name in (Path(shell).name, "bash", "sh")
    assert rest == b"given"
    assert (await run_to_end(runner, "gpu2", "pwd", cwd="/tmp"))[1] == b"/tmp\n"
    assert (await run_to_end(runner, "gpu2", "pwd", cwd="~"))[1] == b"/root\n"
    with pytest.raises(NodeRefusedError, match="no directory /root/grid_workspace/nowhere"):
        await runner.start("gpu2", "true", cwd="nowhere")
    assert not list(testbed["gpu2"].home.glob("grid_workspace/.grid/runs/.new-*"))


async def test_sigpipe_has_its_default_action(runner: Runner) -> None:
    assert await run_to_end(runner, "gpu2", "yes | head -n 1") == (0, b"y\n", b"")


async def test_environment_values_and_standard_input_are_not_stored_on_the_node(
    testbed: SshTestbed, runner: Runner
) -> None:
    run = await runner.start("gpu2", "cat", env={"TOKEN": "s3cret-value"}, stdin=b"s3cret-input")
    assert await runner.follow_until_end(run, lambda *_: None) == 0
    folder = get_run_folder(testbed["gpu2"], run)
    assert json.loads((folder / "meta.json").read_text())["env"] == ["TOKEN"]
    assert not (folder / "in").exists()
    kept = b"".join(path.read_bytes() for path in folder.iterdir() if path.name != "out")
    assert b"s3cret" not in kept


async def test_run_over_its_timeout_ends_with_code_124(runner: Runner) -> None:
    assert (await run_to_end(runner, "gpu3", "sleep 60", timeout_s=0.2))[0] == 124
    assert (await run_to_end(runner, "gpu3", "exit 5", timeout_s=60))[0] == 5


async def test_setup_environment_is_first_in_the_path(testbed: SshTestbed, runner: Runner) -> None:
    folder = testbed["gpu3"].home / "grid_workspace" / "grid_env" / "bin"
    folder.mkdir(parents=True)
    (folder / "python").write_text("#!/bin/sh\necho ours $VIRTUAL_ENV\n")
    (folder / "python").chmod(0o755)
    try:
        assert (await run_to_end(runner, "gpu3", "python"))[1] == b"ours /root/grid_workspace/grid_env\n"
    finally:
        (folder / "python").unlink()


async def test_shell_syntax_in_a_command_is_passed_unchanged(testbed: SshTestbed, runner: Runner) -> None:
    text = "echo '--help'; echo \"$(echo -oProxyCommand=x)\"; echo '`'; # \\"
    assert (await run_to_end(runner, "gpu4", text))[1] == b"--help\n-oProxyCommand=x\n`\n"


HOSTILE = ["../../etc/x", "-oProxyCommand=x", "r-a; touch x", "r-ABCDEFGHIJ", "x", "r-aaaaaaaaaaa", "r-a\n"]


@pytest.mark.parametrize("run_id", HOSTILE)
async def test_hostile_run_id_is_rejected_before_use(runner: Runner, run_id: str) -> None:
    with pytest.raises(NameInvalidError):
        await runner.start("gpu1", "true", run_id=run_id)
    with pytest.raises(NameInvalidError):
        await runner.fetch_run_by_prefix(run_id)


async def test_node_rejects_a_hostile_run_id(pool: SshPool) -> None:
    async with pool.connect("gpu1") as link:
        for run_id in ("../../etc", ".", "a/b", "A"):
            with pytest.raises(NodeRefusedError, match="invalid run ID"):
                await link.call("runs.remove", {"root": "~/x", "id": run_id}, timeout_s=10)


@pytest.mark.parametrize("command", ["", "  ", "a\0b", "x" * 200_000])
async def test_invalid_command_is_rejected_before_sending(runner: Runner, command: str) -> None:
    with pytest.raises(UsageError):
        await runner.start("gpu1", command)


async def test_unknown_node_is_rejected(runner: Runner) -> None:
    with pytest.raises(NoNodeError):
        await runner.start("-oProxyCommand=x", "true")


@pytest.mark.parametrize("count", [50, 90], ids=["fifty", "more than a helper answers at a time"])
async def test_concurrent_runs_on_one_node_have_their_own_output_and_exit_code(
    runner: Runner, count: int
) -> None:
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(run_to_end(runner, "gpu5", f"sleep 0.5; echo {number}; exit {number}"))
            for number in range(count)
        ]
    assert [task.result()[:2] for task in tasks] == [(n, b"%d\n" % n) for n in range(count)]


# --- signals ------------------------------------------------------------------------------------


async def test_signal_reaches_the_whole_process_group(testbed: SshTestbed, runner: Runner) -> None:
    run = await runner.start("gpu6", "sleep 7001 & sleep 7001; true")
    await until(lambda: len(testbed["gpu6"].processes("sleep 7001")) >= 2, what="the sleepers")
    assert await runner.send_signal(run, "TERM")
    assert await runner.follow_until_end(run, lambda *_: None) == 128 + 15
    await until(lambda: not testbed["gpu6"].processes("sleep 7001"), what="their end")
    assert not await runner.send_signal(run, "TERM")


async def test_cancel_kills_a_run_that_ignores_the_signal(runner: Runner) -> None:
    run = await runner.start("gpu6", "trap '' TERM; echo ready; while :; do sleep 0.1; done")
    await until(lambda: _has_output(runner, run), what="the trap")
    cancelled = await runner.cancel(run, grace_s=0.0)
    assert (cancelled.state, cancelled.exit_code, cancelled.signal) == (RunState.EXITED, 137, 9)


async def _has_output(runner: Runner, run: Run) -> bool:
    return bool((await runner.read_output(run, out=0, err=0)).out)


async def test_process_with_a_reused_pid_gets_no_signal(testbed: SshTestbed, runner: Runner) -> None:
    """As after a reboot or a pid wrap-around: the pid exists, but is another process."""
    run = await runner.start("gpu6", "sleep 7002")
    await until(lambda: testbed["gpu6"].processes("sleep 7002"), what="the command")
    folder = get_run_folder(testbed["gpu6"], run)
    before = (folder / "pid").read_text()
    record = json.loads(before)
    moved = {name: value - 1 if name.endswith("_start") else value for name, value in record.items()}
    (folder / "pid").write_text(json.dumps(moved).ljust(512))
    try:
        assert (await runner.fetch_status(run)).state is RunState.LOST
        assert not await runner.send_signal(run, "KILL")
        assert testbed["gpu6"].processes("sleep 7002")
    finally:
        (folder / "pid").write_text(before)
    assert (await runner.cancel(run)).exit_code == 128 + 15


# --- GPUs ---------------------------------------------------------------------------------------


async def test_concurrent_runs_get_different_gpus(testbed: SshTestbed, runner: Runner) -> None:
    node = testbed["gpu7"]
    node.gpus(
        4, lines=[f"{i}, NVIDIA H100, GPU-{i}, 81559, {used}" for i, used in enumerate((3, 9000, 0, 5))]
    )
    try:
        first = await runner.start(
            "gpu7", 'echo "$CUDA_VISIBLE_DEVICES $CUDA_DEVICE_ORDER"; sleep 7003', gpus=2
        )
        second = await runner.start("gpu7", "sleep 7003", gpus=1)
        assert (first.gpus, second.gpus) == ((0, 2), (3,))
        await until(lambda: _has_output(runner, first), what="its variables")
        assert (await runner.read_output(first, out=0, err=0)).out == b"0,2 PCI_BUS_ID\n"
        with pytest.raises(NodeRefusedError, match="GPU 1 has 9000 MiB in use") as caught:
            await runner.start("gpu7", "true", gpus=1)
        assert caught.value.reason == "busy"
        assert f"GPU 3 is held by run {second.run_id}" in caught.value.message
        await runner.cancel(first)
        third = await runner.start("gpu7", "sleep 7003", gpus=2)
        assert third.gpus == (0, 2)
        for run in (second, third):
            await runner.cancel(run)
    finally:
        node.gpus(0)


async def test_amd_gpus_are_counted_by_rocm_smi(testbed: SshTestbed, runner: Runner) -> None:
    program = testbed["gpu8"].bin / "rocm-smi"
    cards = {
        f"card{i}": {"VRAM Total Used Memory (B)": str(used)} for i, used in enumerate((10 << 30, 1 << 20))
    }
    program.write_text(f"#!/bin/sh\necho '{json.dumps(cards)}'\n")
    program.chmod(0o755)
    try:
        run = await runner.start("gpu8", 'echo "$HIP_VISIBLE_DEVICES"', gpus=1)
        recorder = OutputRecorder()
        assert await runner.follow_until_end(run, recorder) == 0
        assert (run.gpus, recorder.out) == ((1,), b"1\n")
    finally:
        program.unlink()


async def test_unrelated_folder_does_not_block_gpu_selection(testbed: SshTestbed, runner: Runner) -> None:
    node = testbed["gpu7"]
    node.gpus(1)
    try:
        node.run("mkdir -p /root/grid_workspace/.grid/runs/r-aaaaaaaaaa")
        assert (await runner.start("gpu7", "true", gpus=1)).gpus == (0,)
    finally:
        node.run("rmdir /root/grid_workspace/.grid/runs/r-aaaaaaaaaa")
        node.gpus(0)


async def test_node_choice_and_gpu_selection_use_the_same_tool(own_testbed: SshTestbed) -> None:
    """AMD's newer tool, in a folder that is not on PATH."""
    cards = [{"gpu": 0, "mem_usage": {"total_vram": {"value": 64, "unit": "GB"}, "used_vram": {"value": 0}}}]
    own_testbed["gpu1"].restart(
        before="mount -t tmpfs none /opt && mkdir -p /opt/rocm/bin && cd /opt/rocm/bin && "
        f"printf '#!/bin/sh\\necho %s\\n' {shlex.quote(shlex.quote(json.dumps(cards)))} > amd-smi && "
        "chmod 755 amd-smi"
    )
    file = make_testbed_grid_file(own_testbed)
    async with SshPool(file, ssh_config=own_testbed.ssh_config) as pool:
        checker = NodeHealthChecker(pool, file, clock=time.time)
        for _ in range(2):  # the first reading is by sh, the second by the helper
            readings = (await checker.check("gpu1", fresh=True)).readings
            assert readings is not None
            assert (readings.vendor, readings.gpus_free) == ("amd", 1)
        assert (await Runner(pool, file).start("gpu1", "true", gpus=1)).gpus == (0,)


async def test_node_without_gpus_rejects_a_gpu_run(runner: Runner) -> None:
    with pytest.raises(NodeRefusedError, match="the node has no GPUs"):
        await runner.start("gpu9", "true", gpus=1)


# --- lists --------------------------------------------------------------------------------------


async def test_hanging_nodes_do_not_block_others_in_a_small_pool(own_testbed: SshTestbed) -> None:
    more = "ssh: {connect_timeout: 5, max_retries: 0, pool_size: 1}\n"
    async with open_runner(own_testbed, more=more) as runner:
        with own_testbed["gpu1"].suspended():
            first, second = await runner.list_runs_on_nodes()
    assert isinstance(first.error, UnreachableError)
    assert second.error is None


async def test_runs_are_listed_and_found_by_prefix(runner: Runner) -> None:
    run = await runner.start("gpu10", "exit 4")
    await runner.follow_until_end(run, lambda *_: None)
    assert (await runner.list_runs("gpu10"))[0].exit_code == 4
    assert (await runner.fetch_run_by_prefix(run.run_id)).node == "gpu10"
    assert (await runner.fetch_run_by_prefix(run.run_id[:9])).run_id == run.run_id
    with pytest.raises(RunNotFoundError, match="no run has the ID"):
        await runner.fetch_run_by_prefix(new_run_id())
    await runner.remove_run(run)
    with pytest.raises(RunNotFoundError, match=run.run_id):
        await runner.fetch_status(run)
    with pytest.raises(RunNotFoundError):
        await runner.follow_until_end(dataclasses.replace(run, output_if_ended=None), lambda *_: None)


async def test_short_run_is_complete_in_the_reply_to_its_start(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("genie.grid.runs.run_client._SHORT_RUN_WAIT_S", 1.0)
    run = await runner.start("gpu10", "echo out; echo err >&2; exit 7")
    assert run.has_ended
    assert run.output_if_ended is not None

    async def asked_again(*_: object, **__: object) -> None:
        raise AssertionError

    monkeypatch.setattr(runner, "read_output", asked_again)
    recorder = OutputRecorder()
    assert await runner.follow_until_end(run, recorder) == 7
    assert (recorder.out, recorder.err) == (b"out\n", b"err\n")


async def test_start_of_a_long_run_returns_before_its_end(runner: Runner) -> None:
    run = await runner.start("gpu10", "sleep 600")
    assert (run.has_ended, run.output_if_ended) == (False, None)
    assert await runner.send_signal(run, "KILL")
    assert await runner.follow_until_end(run, lambda *_: None) == 137


async def test_short_run_with_much_output_is_read_in_chunks(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("genie.grid.runs.run_client._SHORT_RUN_WAIT_S", 1.0)
    run = await runner.start("gpu10", f"head -c {remote_runs.OUTPUT_CHUNK_BYTES} /dev/zero")
    recorder = OutputRecorder()
    assert await runner.follow_until_end(run, recorder) == 0
    assert run.output_if_ended is None
    assert len(recorder.out) == remote_runs.OUTPUT_CHUNK_BYTES


@pytest.mark.parametrize(
    "first", [{"out": 99, "err": 0, "state": "exited", "end": True}, {"out": 0}, 3, {"state": "of mind"}]
)
async def test_invalid_reply_to_a_start_raises_protocol_error(
    runner: Runner, monkeypatch: pytest.MonkeyPatch, first: object
) -> None:
    asked = NodeConnection.call

    async def lying(link: NodeConnection, op: str, *args: Any, **more: Any) -> tuple[Any, bytes]:
        answer, data = await asked(link, op, *args, **more)
        return ({**answer, "first": first}, data) if op == "runs.start" else (answer, data)

    monkeypatch.setattr(NodeConnection, "call", lying)
    with pytest.raises(ProtocolError, match="gpu10: invalid output data"):
        await runner.start("gpu10", "true")


async def test_the_oldest_ended_runs_are_removed_when_there_are_too_many(
    testbed: SshTestbed, runner: Runner
) -> None:
    first = await runner.start("gpu10", "true")
    await runner.follow_until_end(first, lambda *_: None)
    folder = get_run_folder(testbed["gpu10"], first)
    exit_record = json.loads((folder / "exit").read_text())
    made = []
    for number in range(remote_runs.ENDED_RUNS_KEPT + 40):
        copy = folder.with_name(f"r-{number:0>10}".translate(str.maketrans("0189", "abcd")))
        copy.mkdir()
        for name in ("meta.json", "pid", "out", "err"):
            (copy / name).write_bytes((folder / name).read_bytes())
        (copy / "exit").write_text(json.dumps({**exit_record, "ended": 1000.0 + number}).ljust(512))
        made.append(copy)
    await runner.follow_until_end(await runner.start("gpu10", "true"), lambda *_: None)
    left = [copy for copy in made if copy.exists()]
    assert left == made[-len(left) :]
    assert remote_runs.ENDED_RUNS_KEPT - 10 <= len(left) <= remote_runs.ENDED_RUNS_KEPT
    assert folder.exists()


async def test_active_run_is_not_removed(runner: Runner) -> None:
    run = await runner.start("gpu9", "sleep 7004")
    with pytest.raises(NodeRefusedError, match="is still running"):
        await runner.remove_run(run)
    await runner.cancel(run)


# --- faults -------------------------------------------------------------------------------------

COUNTING = (
    "i=0; while [ $i -lt 400 ]; do i=$((i+1)); echo line $i; echo err $i >&2; sleep 0.005; done; exit 7"
)
COUNTED = b"".join(b"line %d\n" % number for number in range(1, 401))


async def test_connection_lost_during_output_loses_and_repeats_nothing(own_testbed: SshTestbed) -> None:
    async with open_runner(own_testbed) as runner:
        recorder = OutputRecorder()
        run = await runner.start("gpu1", COUNTING)
        following = asyncio.ensure_future(
            runner.follow_until_end(run, recorder, on_note=recorder.notes.append)
        )
        for share in (1, 2, 3):
            await until(lambda share=share: len(recorder.out) > len(COUNTED) * share // 5, what="output")
            own_testbed["gpu1"].kill_connections()
        assert await following == 7
    assert recorder.out == COUNTED
    assert recorder.err == COUNTED.replace(b"line", b"err")
    assert any(
        "gpu1 has been unreachable for" in note and "continues there" in note for note in recorder.notes
    )
    assert "gpu1 is reachable again" in recorder.notes[-1]


async def test_run_is_followed_after_its_node_hung(own_testbed: SshTestbed) -> None:
    async with open_runner(own_testbed, more=IMPATIENT) as runner:
        recorder = OutputRecorder()
        run = await runner.start("gpu1", COUNTING)
        following = asyncio.ensure_future(
            runner.follow_until_end(run, recorder, on_note=recorder.notes.append)
        )
        await until(lambda: len(recorder.out) > 100, what="output")
        with own_testbed["gpu1"].suspended():
            await until(lambda: recorder.notes, timeout_s=30, what="a word about it")
        assert await following == 7
    assert recorder.out == COUNTED


async def test_request_times_out_after_ssh_timeout(own_testbed: SshTestbed) -> None:
    file = make_testbed_grid_file(
        own_testbed, more="ssh: {connect_timeout: 20, timeout: 1.5, max_retries: 0}\n"
    )
    async with SshPool(file, ssh_config=own_testbed.ssh_config) as pool:
        runner = Runner(pool, file)
        run = await runner.start("gpu1", "sleep 7206")
        with own_testbed["gpu1"].suspended(), pytest.raises(DeadlineError, match=r"timed out after 1\.5 s"):
            await runner.fetch_status(run)


async def test_runs_are_lost_and_not_failed_when_the_node_goes_down(own_testbed: SshTestbed) -> None:
    async with open_runner(own_testbed) as runner:
        recorder = OutputRecorder()
        run = await runner.start("gpu1", "echo begun; sleep 7005")
        following = asyncio.ensure_future(
            runner.follow_until_end(run, recorder, on_note=recorder.notes.append)
        )
        await until(lambda: recorder.out, what="output")
        own_testbed["gpu1"].restart()
        with pytest.raises(RunLostError, match=f"{run.run_id} on gpu1 is lost"):
            await following
        assert recorder.out == b"begun\n"
        found = await runner.fetch_status(run)
        assert (found.state, found.exit_code) == (RunState.LOST, None)


async def test_helper_that_cannot_fork_is_replaced(own_testbed: SshTestbed) -> None:
    async with open_runner(own_testbed) as runner:
        assert (await run_to_end(runner, "gpu1", "exit 3"))[0] == 3
        # The supervisor of the run is a third process until it exits.
        helpers = await until(
            lambda: _pids_if_two(own_testbed["gpu1"].processes("python3 -ISc")), what="its end"
        )
        (fork_server,) = [pid for pid in helpers if _read_parent_pid(pid) in helpers]
        os.kill(fork_server, 9)
        assert (await run_to_end(runner, "gpu1", "exit 4"))[0] == 4


def _pids_if_two(pids: list[int]) -> list[int] | None:
    return pids if len(pids) == 2 else None


def _read_parent_pid(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


async def test_run_with_a_killed_supervisor_continues_and_is_then_lost(own_testbed: SshTestbed) -> None:
    async with open_runner(own_testbed) as runner:
        run = await runner.start("gpu1", "sleep 7006")
        record = json.loads((get_run_folder(own_testbed["gpu1"], run) / "pid").read_text())
        os.kill(record["watcher"], 9)
        assert (await runner.fetch_status(run)).state is RunState.RUNNING
        os.kill(record["pid"], 9)
        await until(lambda: _is_lost(runner, run), what="its loss")


async def _is_lost(runner: Runner, run: Run) -> bool:
    return (await runner.fetch_status(run)).state is RunState.LOST


class ConnectionCutter:
    """Replaces NodeConnection.call: cuts the connection after the first start request was sent."""

    def __init__(self, node: SshNode, monkeypatch: pytest.MonkeyPatch, *, answered: bool) -> None:
        self.cuts = 0
        call: Callable[..., Awaitable[object]] = NodeConnection.call

        async def cut(link: NodeConnection, op: str, *args: object, **more: object) -> object:
            if op != "runs.start" or self.cuts:
                return await call(link, op, *args, **more)
            self.cuts += 1
            if answered:
                await call(link, op, *args, **more)
                node.kill_connections()
                raise ConnectionLostError("the answer was lost")
            asking = asyncio.ensure_future(call(link, op, *args, **more))
            await asyncio.sleep(0)
            node.kill_connections()
            return await asking

        monkeypatch.setattr(NodeConnection, "call", cut)


@pytest.mark.parametrize("answered", [True, False], ids=["after the start", "right after sending"])
async def test_start_with_a_lost_reply_starts_once(
    own_testbed: SshTestbed, monkeypatch: pytest.MonkeyPatch, answered: bool
) -> None:
    node = own_testbed["gpu1"]
    async with open_runner(own_testbed) as runner:
        cutting = ConnectionCutter(node, monkeypatch, answered=answered)
        run = await runner.start("gpu1", "echo begun >> ~/begun")
        assert await runner.follow_until_end(run, lambda *_: None) == 0
        assert cutting.cuts == 1
        assert len(await runner.list_runs("gpu1")) == 1
    assert (node.home / "begun").read_text() == "begun\n"


@pytest.mark.parametrize(
    "wrong",
    [
        *({"timeout_s": value} for value in (math.nan, math.inf, 0, -1, "soon", 1e308)),
        {"env": {"EPOCHS": 10}},
    ],
)
async def test_invalid_options_are_rejected_before_sending(runner: Runner, wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"timeout_s|EPOCHS") as caught:
        await runner.start("gpu1", "true", **wrong)
    assert "env" in wrong or caught.value.hint == "use a number of seconds, at most 315360000 (10 years)"


@pytest.mark.parametrize(
    ("command", "presses", "known"),
    [
        ("touch ~/begun; exec sleep 7811", 1, CancelledStartState.INTERRUPTED),
        ("trap '' INT; touch ~/begun; sleep 7811; sleep 7811", 1, CancelledStartState.UNKNOWN),
        ("touch ~/begun; exec sleep 7811", 2, CancelledStartState.UNKNOWN),
    ],
)
async def test_cancelled_start_is_interrupted_only_when_the_run_has_ended(
    testbed: SshTestbed,
    runner: Runner,
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    presses: int,
    known: CancelledStartState,
) -> None:
    """The node has started the run, but its reply does not arrive."""
    if known is CancelledStartState.INTERRUPTED:
        monkeypatch.setattr(runner_module, "_INTERRUPT_START_TIMEOUT_S", 30.0)
    begun = testbed["gpu1"].home / "begun"
    begun.unlink(missing_ok=True)
    ask_link = runner._request_on_connection
    asked: list[str] = []

    async def ask(link: NodeConnection, op: str, *args: Any, **options: Any) -> Any:
        answer = await ask_link(link, op, *args, **options)
        if op == "start" or presses > 1:
            await until(begun.exists, what="the command")
            asked.append(op)
            await asyncio.Event().wait()
        return answer

    monkeypatch.setattr(runner, "_request_on_connection", ask)
    run_id = new_run_id()
    starting = asyncio.create_task(runner.start("gpu1", command, run_id=run_id))
    for press in range(presses):
        await until(lambda press=press: len(asked) > press)  # type: ignore[misc]
        starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert runner.cancelled_start_state(run_id) is known
    monkeypatch.undo()
    await runner.cancel(await runner.fetch_run_by_prefix(run_id), signal="KILL")


async def test_cancelled_start_interrupts_the_run(
    own_testbed: SshTestbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    call: Callable[..., Awaitable[object]] = NodeConnection.call

    async def answer_late(link: NodeConnection, op: str, *args: object, **more: object) -> object:
        answer = await call(link, op, *args, **more)
        if op == "runs.start":
            await asyncio.sleep(60)
        return answer

    async with open_runner(own_testbed) as runner:
        monkeypatch.setattr(NodeConnection, "call", answer_late)
        starting = asyncio.ensure_future(runner.start("gpu1", "sleep 7007"))
        await until(lambda: own_testbed["gpu1"].processes("sleep 7007"), what="the command")
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        (run,) = await runner.list_runs("gpu1")
        assert await runner.follow_until_end(run, lambda *_: None) == 128 + 2
        assert runner.cancelled_start_state(run.run_id) is CancelledStartState.INTERRUPTED


@pytest.mark.parametrize("cancels", [1, 2], ids=["once", "again while the run is interrupted"])
async def test_start_cancelled_on_a_hanging_node_may_have_started(
    own_testbed: SshTestbed, monkeypatch: pytest.MonkeyPatch, cancels: int
) -> None:
    call: Callable[..., Awaitable[object]] = NodeConnection.call
    asked = {"runs.start": asyncio.Event(), "runs.signal": asyncio.Event()}

    async def note(link: NodeConnection, op: str, *args: object, **more: object) -> object:
        asked[op].set()
        return await call(link, op, *args, **more)

    run_id = new_run_id()
    async with open_runner(own_testbed) as runner:
        await runner.list_runs("gpu1")  # connects before the node hangs
        monkeypatch.setattr(NodeConnection, "call", note)
        with own_testbed["gpu1"].suspended():
            starting = asyncio.ensure_future(runner.start("gpu1", "true", run_id=run_id))
            await asked["runs.start"].wait()
            starting.cancel()
            if cancels == 2:
                await asked["runs.signal"].wait()
                starting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await starting
        assert runner.cancelled_start_state(run_id) is CancelledStartState.UNKNOWN


async def test_two_starts_with_the_same_id_are_one_run(runner: Runner, testbed: SshTestbed) -> None:
    run_id = new_run_id()
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(runner.start("gpu9", "echo x >> ~/twice", run_id=run_id)) for _ in range(8)
        ]
    assert {task.result().run_id for task in tasks} == {run_id}
    assert await runner.follow_until_end(tasks[0].result(), lambda *_: None) == 0
    assert (testbed["gpu9"].home / "twice").read_text() == "x\n"
    runs = testbed["gpu9"].home / "grid_workspace/.grid/runs"
    await until(lambda: not list(runs.glob(".new-*")), what="the end of those who came too late")


async def test_start_that_never_reached_the_node_raises_unreachable(own_testbed: SshTestbed) -> None:
    own_testbed["gpu1"].stop()
    async with open_runner(own_testbed) as runner:
        with pytest.raises(UnreachableError, match="gpu1"):
            await runner.start("gpu1", "true")


async def test_start_with_an_unknown_outcome_raises_connection_lost(
    own_testbed: SshTestbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = own_testbed["gpu1"]

    async def lose(link: NodeConnection, op: str, *args: object, **more: object) -> object:
        node.stop()
        raise ConnectionLostError("connection lost")

    async with open_runner(own_testbed) as runner:
        monkeypatch.setattr(NodeConnection, "call", lose)
        with pytest.raises(
            ConnectionLostError, match=r"could not determine whether run r-.*grid-cli attach r-"
        ):
            await runner.start("gpu1", "true")


async def test_run_continues_without_its_client(own_testbed: SshTestbed) -> None:
    async with open_runner(own_testbed) as runner:
        run = await runner.start("gpu1", "while [ ! -e ~/go ]; do sleep 0.05; done; echo done; exit 6")
    (own_testbed["gpu1"].home / "go").touch()
    async with open_runner(own_testbed) as later:
        recorder = OutputRecorder()
        assert await later.follow_until_end(await later.fetch_run_by_prefix(run.run_id), recorder) == 6
    assert recorder.out == b"done\n"


async def test_full_disk_is_reported_with_path_and_hint(own_testbed: SshTestbed) -> None:
    node = own_testbed["gpu1"]
    node.restart(before="mount -t tmpfs -o size=1m tmpfs /root")
    node.run("head -c 2000000 /dev/zero > /root/fill || true")
    async with open_runner(own_testbed) as runner:
        with pytest.raises(
            NodeRefusedError, match=r"No space left on device: /root/grid_workspace"
        ) as caught:
            await runner.start("gpu1", "true")
    assert caught.value.reason == "no_space"
    assert "remote_root" in caught.value.hint


async def test_run_that_fills_the_disk_keeps_its_exit_code(own_testbed: SshTestbed) -> None:
    own_testbed["gpu1"].restart(before="mount -t tmpfs -o size=1m tmpfs /root")
    async with open_runner(own_testbed) as runner:
        recorder = OutputRecorder()
        run = await runner.start("gpu1", "head -c 3000000 /dev/zero; echo code $? >&2; exit 9")
        assert await runner.follow_until_end(run, recorder) == 9
    assert 500_000 < len(recorder.out) < 1_100_000
    assert not recorder.out.strip(b"\0")


async def test_read_only_home_is_reported_with_path_and_hint(own_testbed: SshTestbed) -> None:
    own_testbed["gpu1"].restart(before="mount -o remount,ro,bind /root")
    async with open_runner(own_testbed) as runner:
        with pytest.raises(NodeRefusedError, match="Read-only file system: /root/grid_workspace") as caught:
            await runner.start("gpu1", "true")
    assert caught.value.reason == "read_only"
    assert "remote_root" in caught.value.hint
