"""What process records and logs show of the server of this machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from genie.errors import AgentRunningError
from genie.processes import files
from genie.supervisor.local_cluster import find_running_cluster, hold_supervisor_lock
from genie.supervisor.local_server import find_local_server_problem
from genie.supervisor.process_records import (
    AGENT,
    CONTROLLER,
    ETCD,
    SUPERVISOR,
    log_path,
    record_process,
)
from tests.supervisor.test_incomplete_join import MEMBER

WAITING = "waiting for a majority of the etcd members: 1 of 3 running, 2 needed"
REMOVED = "the member has been permanently removed from the cluster"


def found_problem(state_dir: Path) -> str:
    problem = find_local_server_problem(state_dir)
    return "" if problem is None else f"{problem.message}: {problem.hint}"


def test_machine_that_is_no_server_has_no_problem(tmp_path: Path) -> None:
    assert found_problem(tmp_path) == ""


def test_server_that_waits_for_a_majority_says_so(tmp_path: Path) -> None:
    MEMBER.write(tmp_path)
    record_process(tmp_path, SUPERVISOR, os.getpid(), missing_servers=WAITING)
    assert f"this server is {WAITING}: " in found_problem(tmp_path)
    record_process(tmp_path, SUPERVISOR, os.getpid(), ready=True)
    assert found_problem(tmp_path) == ""


def test_second_start_says_that_the_first_one_waits(tmp_path: Path) -> None:
    record_process(tmp_path, SUPERVISOR, os.getpid(), missing_servers=WAITING)
    with (
        hold_supervisor_lock(tmp_path),
        pytest.raises(AgentRunningError, match=rf"already running .*, and {WAITING}"),
        hold_supervisor_lock(tmp_path),
    ):
        pass


def test_stopped_server_is_not_running(tmp_path: Path) -> None:
    MEMBER.write(tmp_path)
    assert found_problem(tmp_path) == "this server is not running: start it with 'genie up'"


def test_processes_without_a_supervisor_are_named(tmp_path: Path) -> None:
    for name in (CONTROLLER, AGENT, ETCD):
        record_process(tmp_path, name, os.getpid())
    found = found_problem(tmp_path)
    assert (
        f"processes without a supervisor, which nothing restarts (controller: process {os.getpid()}" in found
    )
    assert "run 'genie down --keep-jobs', and start it again" in found
    assert find_running_cluster(tmp_path) is not None
    with hold_supervisor_lock(tmp_path):  # as a program does that has called genie.init
        assert found_problem(tmp_path) == ""
    assert found_problem(tmp_path)


def test_removed_server_says_so_and_how_to_join_again(tmp_path: Path) -> None:
    MEMBER.write(tmp_path)
    log = log_path(tmp_path, ETCD)
    files.make_private_directory(log.parent)
    log.write_text(f"{REMOVED}\nstopping\nstopped\n", "utf-8")
    found = found_problem(tmp_path)
    assert "this server, s2, was removed from the cluster with 'genie etcd remove': " in found
    assert "run 'genie join --server'" in found
    record_process(tmp_path, SUPERVISOR, os.getpid(), ready=True)
    assert found_problem(tmp_path) == found
    record_process(tmp_path, ETCD, os.getpid())  # it has joined again
    assert found_problem(tmp_path) == ""
