"""The program of the jobs of a fault run records what it does, and finds others on its accelerator."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.faults import job_wrapper
from tests.faults.checks import JobEvent, read_job_events
from tests.waiting import wait_until


def start_job(
    directory: Path,
    *,
    job_id: str = "j-1",
    gpus: str = "0",
    seconds: float = 0.0,
    exit_code: int = 0,
    **env: str,
) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-I", "-S", job_wrapper.__file__, str(directory), str(seconds), str(exit_code)]
    environ = {"GENIE_JOB_ID": job_id, "GENIE_JOB_NODE": "n1", "GENIE_JOB_GPUS": gpus, **env}
    return subprocess.Popen(command, env=environ, cwd=directory)


def events_of(directory: Path, job_id: str) -> list[str]:
    return [event.kind for event in read_job_events(directory) if event.job_id == job_id]


def conflicts(directory: Path) -> list[JobEvent]:
    return [event for event in read_job_events(directory) if event.kind == "conflict"]


def wait_locked(directory: Path, job_id: str, gpu: int) -> None:
    path = directory / f"gpu-n1-{gpu}.lock"
    wait_until(lambda: path.exists() and path.read_text() == job_id, what=f"{job_id} runs")


def test_start_end_and_exit_code_are_recorded(tmp_path: Path) -> None:
    assert start_job(tmp_path, seconds=0.01, exit_code=3).wait(30) == 3
    start, end = read_job_events(tmp_path)
    assert (start.kind, start.node_id, start.gpu_ids) == ("start", "n1", (0,))
    assert (end.kind, end.exit_code, end.pid) == ("end", 3, start.pid)
    assert end.boot_s >= start.boot_s


def test_second_process_on_an_accelerator_is_a_conflict(tmp_path: Path) -> None:
    first = start_job(tmp_path, job_id="j-1", gpus="0")
    wait_locked(tmp_path, "j-1", 0)
    assert start_job(tmp_path, job_id="j-2", gpus="1", seconds=0.01).wait(30) == 0
    assert conflicts(tmp_path) == []
    start_job(tmp_path, job_id="j-3", gpus="1,0", seconds=0.01).wait(30)
    (conflict,) = conflicts(tmp_path)
    assert (conflict.job_id, conflict.resource, conflict.holder) == ("j-3", "gpu-n1-0", "j-1")
    (tmp_path / "stop").touch()
    assert first.wait(30) == 0


def test_second_process_of_a_job_is_a_conflict(tmp_path: Path) -> None:
    first = start_job(tmp_path, gpus="0")
    wait_locked(tmp_path, "j-1", 0)
    start_job(tmp_path, gpus="1", seconds=0.01).wait(30)
    assert [conflict.resource for conflict in conflicts(tmp_path)] == ["job-j-1"]
    first.kill()
    first.wait(30)


def test_killed_process_releases_its_accelerator(tmp_path: Path) -> None:
    first = start_job(tmp_path)
    wait_locked(tmp_path, "j-1", 0)
    os.kill(first.pid, signal.SIGKILL)
    first.wait(30)
    assert start_job(tmp_path, job_id="j-2", seconds=0.01).wait(30) == 0
    assert conflicts(tmp_path) == []


def test_terminated_process_is_recorded(tmp_path: Path) -> None:
    job = start_job(tmp_path)
    wait_locked(tmp_path, "j-1", 0)
    job.terminate()
    assert job.wait(30) == 128 + signal.SIGTERM
    assert events_of(tmp_path, "j-1") == ["start", "terminated"]


def test_missing_or_wrong_working_directory_sets_the_exit_code(tmp_path: Path) -> None:
    assert start_job(tmp_path, seconds=0.01, FAULTS_INPUT="text").wait(30) == 9
    (tmp_path / "input").write_text("text")
    assert start_job(tmp_path, job_id="j-2", seconds=0.01, FAULTS_INPUT="text").wait(30) == 0
