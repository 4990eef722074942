"""Every example does what its docstring says, and ends without a trace."""

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

from genie.cluster import local
from tests.cluster.small_controller import SmallController
from tests.grid.bed import Bed
from tests.grid.conftest import own_bed
from tests.waiting import wait_until

__all__ = ["own_bed"]
ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
SCHEDULERS = {
    "schedulers/affinity_scheduler.py": ("near it   starts on n1", "GPU 1     waits: GPU 1 of n1 is held by"),
    "schedulers/fifo_scheduler.py": ("short  runs from 150 s", "short  runs from   2 s"),
    "schedulers/gang_scheduler.py": ("gang B  waits: has a reservation", "elastic starts with 2 workers"),
    "schedulers/own_policy.py": ("is too large for tests", "'broken' is out of use, and FairShare decides"),
    "schedulers/priority_scheduler.py": ("runs at 130 s", "preempted 1 times"),
}
SCHEDULER_LINES_MAX = 60
RUN_HERE = {
    "basic_client.py",
    "gpu_server.py",
    "grid/batch_gpu_tasks.py",  # tests/grid/test_ray_cluster.py
    "grid/setup_cluster.py",  # tests/grid/test_ray_cluster.py
    "grid/monitor.py",
    "grid/run_job.py",
    "monitoring_dashboard.py",
    "multimodal.py",
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
def test_a_scheduler_shows_what_its_policy_does(name: str) -> None:
    done = run_example(name)
    assert (done.returncode, done.stderr) == (0, "")
    assert [text for text in SCHEDULERS[name] if text not in done.stdout] == [], done.stdout
    assert len((EXAMPLES / name).read_text().splitlines()) <= SCHEDULER_LINES_MAX


def test_a_server_serves_a_client_and_ends_at_ctrl_c_without_a_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unused_tcp_port: int
) -> None:
    monkeypatch.setenv("GENIE_MASTER_PORT", str(unused_tcp_port))
    state_dir, log = Path(os.environ["GENIE_STATE_DIR"]), tmp_path / "server.log"
    with running_example("gpu_server.py", log) as server:
        wait_until(lambda: "clients connect" in log.read_text() or server.poll() is not None, timeout_s=60)
        assert f"clients connect to port {unused_tcp_port}" in log.read_text()
        done = run_example("basic_client.py", "127.0.0.1")
        assert done.returncode == 0, done.stderr
        assert "(1000, 1000) on remote_accelerator:0" in done.stdout
        assert "is healthy and has 1" in done.stdout
        trained = run_example("multimodal.py", "--steps", "12")
        assert trained.returncode == 0, trained.stderr
        losses = [float(each) for each in re.findall(r"loss ([0-9.]+)", trained.stdout)]
        assert losses[-1] < losses[0], trained.stdout
        server.send_signal(signal.SIGINT)
        assert server.wait(30) == 0, log.read_text()
    said = log.read_text()
    assert "stopped" in said
    assert "Traceback" not in said
    assert local.find_running(state_dir) is None


def test_training_for_no_steps_is_refused() -> None:
    done = run_example("multimodal.py", "--steps", "0")
    assert done.returncode == 2
    assert "at least 1" in done.stderr


def test_a_server_ends_by_itself_after_its_seconds(
    monkeypatch: pytest.MonkeyPatch, unused_tcp_port: int
) -> None:
    monkeypatch.setenv("GENIE_MASTER_PORT", str(unused_tcp_port))
    done = run_example("gpu_server.py", "--seconds", "0.1")
    assert done.returncode == 0, done.stderr
    assert "are over" in done.stdout
    assert local.find_running(Path(os.environ["GENIE_STATE_DIR"])) is None


def test_the_dashboard_shows_how_this_machine_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    done = run_example("monitoring_dashboard.py", "--rounds", "1", "--refresh", "0.1")
    assert done.returncode == 0, done.stderr
    assert re.search(r"(healthy|degraded|unhealthy|critical): ", done.stdout), done.stdout
    assert done.stdout.endswith("\n")


@pytest.mark.parametrize("given", ["as an argument", "in the environment"])
def test_the_dashboard_shows_a_cluster(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
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


# --- the grid ---------------------------------------------------------------------------------


def test_a_job_runs_on_a_node_of_the_grid_by_both_doors(
    own_bed: Bed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = "ssh: {connect_timeout: 10}\nhealth_check: {timeout: 10}\n"
    (tmp_path / "grid.yaml").write_text(own_bed.grid_yaml(more=keys))
    monkeypatch.setenv("GENIE_GRID_FILE", str(tmp_path / "grid.yaml"))
    monkeypatch.setenv("GENIE_GRID_SSH_CONFIG", str(own_bed.ssh_config))
    example = str(EXAMPLES / "grid" / "run_job.py")

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, example, *arguments],
            capture_output=True,
            text=True,
            timeout=60,
            stdin=subprocess.DEVNULL,
            cwd=ROOT,
        )

    done = run()
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"^a job on gpu[12]$", done.stdout, re.MULTILINE)) == 2, done.stdout
    assert re.search(r"ran on gpu[12] as r-[a-z2-7]{10}, exit code 0", done.stdout)
    assert run("exit 3").returncode == 3
    for node in own_bed.nodes:
        node.stop()
    gone = run()
    assert gone.returncode in (1, 255)
    assert "Traceback" not in gone.stderr


# --- the tour ---------------------------------------------------------------------------------


def test_the_tour_runs_the_lines_of_the_readme_and_leaves_no_process() -> None:
    done = run_example("tour.py", timeout_s=85)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    steps = ("listens on 127.0.0.1:", "torch.Size([1000, 1000])", "a job on", "no process is left")
    assert [step for step in steps if step not in done.stdout] == []


WITHOUT_COMPILER = """
import runpy, sys
from pathlib import Path
from genie.runtime import native

empty = native.Workshop(native.Workshop.of_this_installation().sources, Path(sys.argv[2]))
native.Workshop.of_this_installation = lambda: empty
runpy.run_path(sys.argv[1], run_name="__main__")
"""


def test_without_a_compiler_the_tour_says_what_to_install_and_shows_the_rest(
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
    assert "the PyTorch device is left out" in done.stdout
    assert "apt install g++ python3-dev" in done.stdout
    assert "everything but the remote_accelerator device works without it" in done.stdout
    assert "a job on" in done.stdout


@pytest.fixture
def tour(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:  # Any: the names of a script
    for name in ("GENIE_CONFIG", "GENIE_LOG_LEVEL", "GENIE_MASTER_ADDR", "GENIE_MASTER_PORT"):
        monkeypatch.setenv(name, "")
    return runpy.run_path(str(EXAMPLES / "tour.py"))


def test_the_tour_takes_the_first_python_of_the_readme(tour: dict[str, Any]) -> None:
    lines = tour["snippet"]()
    compile(lines, "README.md", "exec")
    assert "await genie.init(" in lines
    assert 'device="remote_accelerator:0"' in lines
    assert len(lines.strip().splitlines()) <= 12


def test_a_step_that_fails_fails_the_tour(
    tour: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    main = tour["main"]
    monkeypatch.setitem(main.__globals__, "snippet", lambda: "import sys; sys.exit('no luck')")
    assert main() == 1
    said = capsys.readouterr()
    assert "no luck" in said.out
    assert "no process is left" in said.out
    assert re.search(r"the tour failed: .* exit code 1", said.err)


def test_a_process_that_is_left_is_seen(tour: dict[str, Any], tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", str(tmp_path)]) as left:
        try:
            wait_until(lambda: len(tour["processes_left"](tmp_path)) == 1)
        finally:
            left.kill()


def test_a_grid_is_watched(own_bed: Bed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own_bed["gpu1"].gpus(2)
    keys = "ssh: {connect_timeout: 10}\nhealth_check: {timeout: 10}\n"
    (tmp_path / "grid.yaml").write_text(own_bed.grid_yaml(more=keys))
    monkeypatch.setenv("GENIE_GRID_FILE", str(tmp_path / "grid.yaml"))
    monkeypatch.setenv("GENIE_GRID_SSH_CONFIG", str(own_bed.ssh_config))
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "grid" / "monitor.py"), "--rounds", "2", "--every", "0.1"],
        capture_output=True,
        text=True,
        timeout=60,
        stdin=subprocess.DEVNULL,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"^gpu[12] +ok +[0-9.]+", done.stdout, re.MULTILINE)) == 4, done.stdout
    assert "DEBUG" in done.stderr
    assert 'grid_node_health_score{node="gpu1"}' in (tmp_path / "metrics.txt").read_text()
