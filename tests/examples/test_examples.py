"""Every example does what its docstring describes and leaves no process running."""

from __future__ import annotations

import os
import re
import runpy
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from genie.supervisor import local_cluster
from tests import forkserver
from tests.cluster.small_controller import SmallController
from tests.executor.process import PRELOADED
from tests.forkserver import ForkServer
from tests.grid.conftest import own_testbed, testbed_lease
from tests.grid.testbed import SshTestbed
from tests.needs import require_program
from tests.waiting import wait_until

__all__ = ["own_testbed", "testbed_lease"]
ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
SCHEDULERS = {
    "schedulers/affinity_scheduler.py": (
        "near it   starts on n1",
        "GPU 1     pending: GPU 1 of n1 is held",
    ),
    "schedulers/fifo_scheduler.py": ("short  runs from 150 s", "short  runs from   2 s"),
    "schedulers/gang_scheduler.py": (
        "gang B  pending: waiting for resources on n1, n2",
        "elastic starts with 2 workers",
    ),
    "schedulers/own_policy.py": ("is too large for tests", "'broken' is disabled and replaced by FairShare"),
    "schedulers/priority_scheduler.py": ("runs at 130 s", "preempted 1 times"),
}
SCHEDULER_LINES_MAX = 60
RUN_HERE = {
    "basic_client.py",
    "consensus/raft.py",
    "failover/recovery_manager.py",
    "coordination/distributed_locks.py",  # tests/cluster/test_locks.py
    "gpu_server.py",
    "grid/batch_gpu_tasks.py",  # tests/grid/ray/test_cluster.py
    "grid/setup_cluster.py",  # tests/grid/ray/test_cluster.py
    "grid/monitor.py",
    "grid/run_job.py",
    "monitoring_dashboard.py",
    "multimodal.py",
    "networking/gossip.py",
    "tour.py",
    *SCHEDULERS,
}


def run_example(name: str, *arguments: str, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        stdin=subprocess.DEVNULL,
    )


def run_example_with_torch(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs an example in a fork of a process that has imported torch."""
    return forkserver.get_shared_server(*PRELOADED).run([str(EXAMPLES / name), *arguments], timeout=100)


@contextmanager
def running_example(name: str, log: Path, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, str(EXAMPLES / name), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_every_example_runs_in_a_test() -> None:
    assert {str(path.relative_to(EXAMPLES)) for path in EXAMPLES.rglob("*.py")} == RUN_HERE


@pytest.mark.parametrize("name", sorted(SCHEDULERS))
def test_scheduler_example_prints_the_decisions_of_its_policy(name: str) -> None:
    done = run_example(name)
    assert (done.returncode, done.stderr) == (0, "")
    assert [text for text in SCHEDULERS[name] if text not in done.stdout] == [], done.stdout
    assert len((EXAMPLES / name).read_text().splitlines()) <= SCHEDULER_LINES_MAX


@pytest.mark.timeout(240)
def test_server_serves_clients_and_stops_on_ctrl_c(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unused_tcp_port: int
) -> None:
    monkeypatch.setenv("GENIE_MASTER_PORT", str(unused_tcp_port))
    state_dir, log = Path(os.environ["GENIE_STATE_DIR"]), tmp_path / "server.log"
    with running_example("gpu_server.py", log) as server:
        wait_until(lambda: "clients connect" in log.read_text() or server.poll() is not None, timeout_s=60)
        assert f"clients connect to 127.0.0.1, port {unused_tcp_port}" in log.read_text()
        done = run_example_with_torch("basic_client.py", "127.0.0.1")
        assert done.returncode == 0, done.stderr
        assert "(1000, 1000) on remote_accelerator:0" in done.stdout
        assert "healthy, accelerators: 1" in done.stdout
        trained = run_example_with_torch("multimodal.py", "--steps", "12")
        assert trained.returncode == 0, trained.stderr
        losses = [float(each) for each in re.findall(r"loss ([0-9.]+)", trained.stdout)]
        assert losses[-1] < losses[0], trained.stdout
        server.send_signal(signal.SIGINT)
        assert server.wait(60) == 0, log.read_text()
    output = log.read_text()
    assert "stopped" in output
    assert "Traceback" not in output
    assert local_cluster.find_running_cluster(state_dir) is None


def test_raft_example_writes_before_and_after_the_leader_is_killed() -> None:
    require_program("etcd", package="etcd-server")
    done = run_example("consensus/raft.py")
    assert done.returncode == 0, done.stdout + done.stderr
    written = re.findall(r"'(\w+)' written through \w: revision (\d+)", done.stdout)
    assert [value for value, _ in written] == ["before", "after"]
    assert int(written[0][1]) < int(written[1][1])
    terms = [int(term) for term in re.findall(r"term (\d+), leader [abc], revision", done.stdout)]
    assert len(terms) == 3 + 2 + 3
    assert terms == sorted(terms)
    assert terms[0] < terms[-1]


def test_raft_example_names_the_missing_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    done = run_example("consensus/raft.py")
    assert done.returncode == 1
    assert "Debian: apt install etcd-server" in done.stderr


def test_recovery_manager_resumes_a_job_after_a_drain_and_the_loss_of_a_node() -> None:
    done = run_example("failover/recovery_manager.py", timeout_s=85)
    assert (done.returncode, done.stderr) == (0, "")
    resumed = re.findall(r"training on (a[12]) from step (\d+)", done.stdout)
    assert [node for node, _ in resumed] == ["a1", "a2", "a1"], done.stdout
    steps = [int(step) for _, step in resumed]
    assert steps[0] == 0 < steps[1] <= steps[2]
    assert "queued: moved from a1: draining (maintenance)" in done.stdout
    assert "the job has succeeded" in done.stdout


def test_multimodal_rejects_zero_steps() -> None:
    done = run_example_with_torch("multimodal.py", "--steps", "0")
    assert done.returncode == 2
    assert "must be at least 1" in done.stderr


def test_server_stops_after_the_given_time(monkeypatch: pytest.MonkeyPatch, unused_tcp_port: int) -> None:
    monkeypatch.setenv("GENIE_MASTER_PORT", str(unused_tcp_port))
    done = run_example("gpu_server.py", "--seconds", "0.1")
    assert done.returncode == 0, done.stderr
    assert "stopping after 0.1 s" in done.stdout
    assert local_cluster.find_running_cluster(Path(os.environ["GENIE_STATE_DIR"])) is None


def test_dashboard_shows_the_health_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    done = run_example("monitoring_dashboard.py", "--rounds", "1", "--refresh", "0.1")
    assert done.returncode == 0, done.stderr
    assert re.search(r"(healthy|degraded|unhealthy|critical): ", done.stdout), done.stdout
    assert done.stdout.endswith("\n")


@pytest.mark.parametrize("given", ["as an argument", "in the environment"])
def test_dashboard_shows_a_cluster(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with SmallController() as controller:
        controller.announce(Path(os.environ["GENIE_STATE_DIR"]))
        where = ["127.0.0.1"]
        if given == "as an argument":
            where += ["--port", str(controller.port)]
        else:
            monkeypatch.setenv("GENIE_MASTER_PORT", str(controller.port))
        shown = run_example("monitoring_dashboard.py", *where, "--rounds", "1", "--refresh", "0.1")
    assert shown.returncode == 0, shown.stderr
    assert "n1" in shown.stdout


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("basic_client.py", ["gpu-box"], "no token for gpu-box:5555"),
        ("gpu_server.py", ["--address", "0.0.0.0"], "is not an address that other machines can connect to"),
        ("monitoring_dashboard.py", ["gpu-box"], "no token for gpu-box:5555"),
    ],
)
def test_error_of_an_example_is_one_line(
    name: str, arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GENIE_LOG_LEVEL", "ERROR")
    done = (
        run_example_with_torch(name, *arguments)
        if name == "basic_client.py"
        else run_example(name, *arguments)
    )
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"{name.removesuffix('.py')}: ") and message in line


# --- the grid ---------------------------------------------------------------------------------


def test_grid_job_runs_through_command_line_and_python(
    own_testbed: SshTestbed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fork_server: ForkServer
) -> None:
    keys = "ssh: {connect_timeout: 10}\nhealth_check: {timeout: 10}\n"
    (tmp_path / "grid.yaml").write_text(own_testbed.grid_yaml(more=keys))
    monkeypatch.setenv("GENIE_GRID_FILE", str(tmp_path / "grid.yaml"))
    monkeypatch.setenv("GENIE_GRID_SSH_CONFIG", str(own_testbed.ssh_config))
    example = str(EXAMPLES / "grid" / "run_job.py")
    (tmp_path / "job").mkdir()

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return fork_server.run([example, *arguments], timeout=60, cwd=tmp_path / "job")

    done = run()
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"^a job on gpu[12]$", done.stdout, re.MULTILINE)) == 2, done.stdout
    assert re.search(r"ran on gpu[12] as r-[a-z2-7]{10}, exit code 0", done.stdout)
    assert run("exit 3").returncode == 3
    for node in own_testbed.nodes:
        node.stop()
    unreachable = run()
    assert unreachable.returncode in (1, 255)
    assert "Traceback" not in unreachable.stderr


# --- the tour ---------------------------------------------------------------------------------


@pytest.mark.long("runs all of `make run`, whose parts are also tested separately")
def test_tour_runs_the_readme_example_and_leaves_no_process() -> None:
    done = run_example("tour.py", timeout_s=85)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    steps = ("listens on 127.0.0.1:", "torch.Size([1000, 1000])", "hello from a job on", "no process is left")
    assert [step for step in steps if step not in done.stdout] == []


def test_tour_prints_help_without_starting_a_cluster() -> None:
    done = run_example("tour.py", "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert "A tour of Genie on this machine" in done.stdout
    assert "no process is left" not in done.stdout


WITHOUT_COMPILER = """
import runpy, sys
from pathlib import Path
from genie.native import libraries

empty = libraries.BuildCache(libraries.BuildCache.of_this_installation().source_folder, Path(sys.argv[2]))
libraries.BuildCache.of_this_installation = lambda: empty
sys.argv = sys.argv[1:2]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_tour_without_compiler_names_the_packages_and_skips_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_COMPILER, str(EXAMPLES / "tour.py"), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=85,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert "skipping the PyTorch device" in done.stdout
    assert "apt install g++ python3-dev" in done.stdout
    assert "without it the remote_accelerator device is not available" in done.stdout
    assert "hello from a job on" in done.stdout


@pytest.fixture
def tour_namespace(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:  # Any: the names of a script
    for name in ("GENIE_CONFIG", "GENIE_LOG_LEVEL", "GENIE_MASTER_ADDR", "GENIE_MASTER_PORT"):
        monkeypatch.setenv(name, "")
    return runpy.run_path(str(EXAMPLES / "tour.py"))


def test_tour_uses_the_first_python_example_of_the_readme(tour_namespace: dict[str, Any]) -> None:
    lines = tour_namespace["readme_example"]()
    compile(lines, "README.md", "exec")
    assert "await genie.init(" in lines
    assert 'device="remote_accelerator:0"' in lines
    assert len(lines.strip().splitlines()) <= 12


def test_tour_fails_when_a_step_fails(
    tour_namespace: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    main = tour_namespace["main"]
    monkeypatch.setitem(main.__globals__, "readme_example", lambda: "import sys; sys.exit('no luck')")
    assert main() == 1
    output = capsys.readouterr()
    assert "no luck" in output.out
    assert "no process is left" in output.out
    assert re.search(r"the tour failed: .* exit code 1", output.err)


async def test_tour_prints_the_output_of_a_step_that_times_out(
    tour_namespace: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tour_namespace["run"]
    monkeypatch.setitem(run.__globals__, "STEP_S", 5.0)
    with pytest.raises(tour_namespace["TourError"], match="a step: timed out after 5 s"):
        await run("a step", "sh", "-c", "echo compiling; exec sleep 60")
    assert "    compiling" in capsys.readouterr().out


def test_tour_finds_remaining_processes(tour_namespace: dict[str, Any], tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", str(tmp_path)]) as left:
        try:
            wait_until(lambda: len(tour_namespace["remaining_processes"](tmp_path)) == 1)
        finally:
            left.kill()


def test_grid_monitor_writes_health_and_metrics(
    own_testbed: SshTestbed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fork_server: ForkServer
) -> None:
    own_testbed["gpu1"].gpus(2)
    keys = "ssh: {connect_timeout: 10}\nhealth_check: {timeout: 10}\n"
    (tmp_path / "grid.yaml").write_text(own_testbed.grid_yaml(more=keys))
    monkeypatch.setenv("GENIE_GRID_FILE", str(tmp_path / "grid.yaml"))
    monkeypatch.setenv("GENIE_GRID_SSH_CONFIG", str(own_testbed.ssh_config))
    example = str(EXAMPLES / "grid" / "monitor.py")
    done = fork_server.run([example, "--rounds", "2", "--every", "0.1"], timeout=60, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"^gpu[12] +ok +[0-9.]+", done.stdout, re.MULTILINE)) == 4, done.stdout
    assert "DEBUG" in done.stderr
    assert 'grid_node_health_score{node="gpu1"}' in (tmp_path / "metrics.txt").read_text()


def test_gossip_example_shows_a_crash_a_leave_and_a_stranger() -> None:
    done = run_example("networking/gossip.py")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[1:3] == [
        "members that respond to a stranger with another key: 0",
        "gpu-1 was stopped: left",
    ]
    assert [line.split(" after ")[0] for line in lines[3:5]] == [
        "gpu-2 crashed: suspect",
        "gpu-2 crashed: dead",
    ]
    assert "'gpu-1': 'left', 'gpu-2': 'dead', 'gpu-3': 'alive'" in lines[5]
