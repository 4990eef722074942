"""Executor: commands on nodes for programs without asyncio."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from genie.errors import ConfigError, NodeRefusedError, SyncError, UnreachableError, UsageError
from genie.grid import executor as executor_module
from genie.grid.executor import Executor, RunResult
from genie.grid.runs import run_client as runner_module
from genie.grid.runs.launch import grid_metrics
from tests.forkserver import ForkServer
from tests.grid import fake_syncer
from tests.grid.testbed import SshTestbed
from tests.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]
ONE = ["gpu1"]


def write_and_use_grid_file(testbed: SshTestbed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "grid.yaml"
    more = "ssh: {connect_timeout: 10, max_retries: 0}\nhealth_check: {timeout: 10, refresh_interval: 0}\n"
    path.write_text(testbed.grid_yaml(more=more))
    monkeypatch.setenv("GENIE_GRID_SSH_CONFIG", str(testbed.ssh_config))
    monkeypatch.setenv("GENIE_GRID_FILE", str(path))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")  # synced to the node
    return path


@pytest.fixture
def executor(testbed: SshTestbed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Executor]:
    with Executor(write_and_use_grid_file(testbed, tmp_path, monkeypatch)) as executor:
        yield executor


@pytest.fixture
def own_executor(
    own_testbed: SshTestbed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Executor]:
    with Executor(write_and_use_grid_file(own_testbed, tmp_path, monkeypatch)) as executor:
        yield executor


def test_run_returns_output_and_exit_code(executor: Executor) -> None:
    result = executor.run_distributed("hostname; echo no >&2; exit 3", node="gpu2")
    assert (result.exit_code, result.stdout, result.stderr, result.node) == (3, "gpu2\n", "no\n", "gpu2")
    assert not result.ok
    assert str(result) == f"gpu2\nno\nexit code 3 on gpu2 (run {result.run_id})"


def test_result_prints_as_its_output(executor: Executor) -> None:
    assert str(executor.run_distributed("echo done")) == "done"


def test_run_options_are_applied_on_the_node(
    testbed: SshTestbed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_and_use_grid_file(testbed, tmp_path, monkeypatch)
    path.write_text(path.read_text().replace("- gpu4\n", "- {name: gpu4, labels: {zone: b}}\n"))
    with Executor(path) as executor:
        result = executor.run_distributed("pwd; echo $A", labels={"zone": "b"}, env={"A": "x y"}, cwd="/usr")
        assert (result.node, result.stdout) == ("gpu4", "/usr\nx y\n")
        assert executor.run_distributed("sleep 60", node="gpu4", timeout_s=0.2).exit_code == 124


def test_grid_file_defaults_to_settings(executor: Executor) -> None:
    with Executor() as other:
        assert other.run_distributed("hostname", node="gpu3").stdout == "gpu3\n"


def test_executor_is_thread_safe(executor: Executor) -> None:
    results: dict[str, str] = {}

    def run(name: str) -> None:
        results[name] = executor.run_distributed("hostname", node=name).stdout.strip()

    threads = [threading.Thread(target=run, args=(f"gpu{number}",)) for number in (1, 2, 3, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {f"gpu{number}": f"gpu{number}" for number in (1, 2, 3, 4)}


async def test_executor_works_inside_a_running_event_loop(executor: Executor) -> None:
    assert asyncio.get_running_loop().is_running()
    assert executor.run_distributed("echo x", node="gpu1").stdout == "x\n"


def test_output_beyond_the_limit_is_truncated(executor: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor_module, "RUN_OUTPUT_BYTES_MAX", 1000)
    result = executor.run_distributed("seq 1 1000", node="gpu1")
    assert result.truncated
    assert len(result.stdout) == 1000


def test_runs_are_counted_by_status(executor: Executor) -> None:
    executor.run_distributed("true", node="gpu1")
    executor.run_distributed("false", node="gpu1")
    text = grid_metrics(Path(os.environ["GENIE_STATE_DIR"])).text()
    assert 'status="succeeded"' in text
    assert 'status="failed"' in text


def test_busy_node_is_skipped(own_testbed: SshTestbed, own_executor: Executor) -> None:
    for node in own_testbed.nodes:
        node.gpus(1)
    with Executor() as other:
        run = threading.Thread(
            target=other.run_distributed,
            args=("touch ~/started; sleep 7301",),
            kwargs={"gpus": 1, "node": "gpu1"},
        )
        run.start()
        wait_until((own_testbed["gpu1"].home / "started").exists, what="the first")
        assert own_executor.run_distributed("hostname", gpus=1).stdout == "gpu2\n"
        with pytest.raises(NodeRefusedError, match="0 of 1 GPUs are free") as caught:
            own_executor.run_distributed("hostname", gpus=1, node="gpu1")
        assert caught.value.reason == "busy"
        for pid in own_testbed["gpu1"].processes("sleep 7301"):
            os.kill(pid, signal.SIGKILL)
        run.join()


def test_folder_is_synced_before_the_run(executor: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = fake_syncer.install_fake_syncer(monkeypatch)
    executor.run_distributed("true", node="gpu1", sync=".")
    assert synced == [(Path.cwd(), ["gpu1"])]


def test_failed_sync_prevents_the_run(
    executor: Executor, monkeypatch: pytest.MonkeyPatch, testbed: SshTestbed
) -> None:
    fake_syncer.install_fake_syncer(monkeypatch, failing=["gpu1"])
    with pytest.raises(SyncError, match="gpu1"):
        executor.run_distributed("touch ~/ran-without-its-folder", node="gpu1", sync=".")
    assert not (testbed["gpu1"].home / "ran-without-its-folder").exists()


def test_unreachable_node_raises(own_testbed: SshTestbed, own_executor: Executor) -> None:
    own_testbed["gpu1"].stop()
    with pytest.raises(UnreachableError):
        own_executor.run_distributed("true", node="gpu1")


def test_missing_grid_file_raises(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        Executor(tmp_path / "none.yaml")


def test_sigint_interrupts_the_command(
    own_testbed: SshTestbed, own_executor: Executor, fork_server: ForkServer
) -> None:
    text = "from genie.grid.executor import Executor\nExecutor().run_distributed('sleep 7302', node='gpu1')\n"
    with fork_server.popen(["-c", text], stderr=subprocess.PIPE) as process:
        wait_until(lambda: own_testbed["gpu1"].processes("sleep 7302"), timeout_s=30, what="the command")
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    assert b"KeyboardInterrupt" in err
    wait_until(lambda: not own_testbed["gpu1"].processes("sleep 7302"), what="the end of the command")


def test_sigint_in_another_thread_interrupts_the_command(
    own_testbed: SshTestbed, own_executor: Executor, fork_server: ForkServer
) -> None:
    text = (
        "import signal, sys, threading\n"
        "from genie.grid.executor import Executor\n"
        "def interrupt():\n"
        "    sys.stdin.readline()\n"
        "    signal.pthread_kill(threading.get_ident(), signal.SIGINT)\n"
        "threading.Thread(target=interrupt, daemon=True).start()\n"
        "Executor().run_distributed('sleep 7303', node='gpu1')\n"
    )
    with fork_server.popen(["-c", text], stdin=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        wait_until(lambda: own_testbed["gpu1"].processes("sleep 7303"), timeout_s=30, what="the command")
        assert process.stdin is not None
        process.stdin.write(b"\n")
        process.stdin.flush()
        _, err = process.communicate(timeout=30)
    assert b"KeyboardInterrupt" in err
    wait_until(lambda: not own_testbed["gpu1"].processes("sleep 7303"), what="the end of the command")


def test_program_exits_without_closing_the_executor(own_executor: Executor) -> None:
    text = (
        "from genie.grid.executor import Executor\n"
        "executor = Executor()\n"
        "print(executor.run_distributed('echo done', node='gpu1'))\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", text],
        env=dict(os.environ, PYTHONPATH=str(ROOT)),
        capture_output=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"done\n", b"")


@pytest.mark.parametrize("quick_s", [0.0, 1.0])
def test_close_releases_waiting_thread_and_command_continues(
    own_testbed: SshTestbed, own_executor: Executor, monkeypatch: pytest.MonkeyPatch, quick_s: float
) -> None:
    monkeypatch.setattr(runner_module, "_SHORT_RUN_WAIT_S", quick_s)  # with or without waiting for quick runs
    caught: list[BaseException] = []

    def run() -> None:
        try:
            own_executor.run_distributed("sleep 7303", node="gpu1")
        except BaseException as error:
            caught.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    wait_until(lambda: own_testbed["gpu1"].processes("sleep 7303"), timeout_s=30, what="the command")
    own_executor.close()
    thread.join(10)
    assert not thread.is_alive()
    assert [type(error) for error in caught] == [UsageError]
    assert own_testbed["gpu1"].processes("sleep 7303")


def test_result_without_output_prints_nothing() -> None:
    assert str(RunResult(exit_code=0, stdout="", stderr="x", node="n", run_id="r")) == ""
