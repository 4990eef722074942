"""--detach: what the command prints while the background process starts, and when it fails."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from genie.cli import background
from genie.errors import DeadlineError
from genie.supervisor import local_cluster, process_records


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    """Stands in for the supervisor."""
    with subprocess.Popen(["/bin/sleep", "300"]) as sleeping:
        yield sleeping
        sleeping.kill()


def wait(process: subprocess.Popen[bytes], state_dir: Path) -> None:
    log = state_dir / "log"
    log.touch()
    background._wait_until_ready(
        process, state_dir=state_dir, log=background._LogFollower(log, 0), timeout_s=0.0
    )


def test_missing_servers_are_those_of_the_process_record(
    process: subprocess.Popen[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "OTHER_SERVERS_WAIT_S", 0.0)
    process_records.record_process(
        tmp_path, local_cluster.SUPERVISOR, process.pid, missing_servers="waiting for a majority: 1 of 2"
    )
    with pytest.raises(
        DeadlineError, match=r"this server is waiting for a majority: 1 of 2 .*goes on waiting"
    ):
        wait(process, tmp_path)
    assert process.poll() is None


def test_process_that_waits_for_no_server_is_stopped_at_the_timeout(
    process: subprocess.Popen[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "OTHER_SERVERS_WAIT_S", 0.0)
    process_records.record_process(tmp_path, local_cluster.SUPERVISOR, process.pid)
    with pytest.raises(DeadlineError, match="was not ready"):
        wait(process, tmp_path)
    assert process.poll() is not None


def test_warning_is_printed_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "log"
    log.write_text("of an earlier start\n")
    follower = background._LogFollower(log, log.stat().st_size)
    with log.open("a") as file:
        print("starting\nwarning: slow disk", file=file, flush=True)
        follower.print_new_lines()
        print("error: no space", file=file, flush=True)
        follower.print_rest()
    assert capfd.readouterr().err.splitlines() == ["warning: slow disk", "starting", "error: no space"]
