"""Control groups of both versions, and the search for a usable one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from genie.processes import cgroups, process_table
from tests.needs import require_cgroup
from tests.waiting import wait_until

# Forks a child that leaves the session, clears its environment and outlives its parent.
DAEMONIZE = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execve("/bin/sleep", ["sleep", "300"], {})
    os._exit(0)
os.wait()
"""


@pytest.fixture(params=["v2", "freezer", "pids"])
def cgroup_path(request: pytest.FixtureRequest) -> Iterator[str]:
    path = require_cgroup(f"genie-test-{os.getpid()}", request.param)
    cgroups.create(path)
    yield path
    cgroups.kill(path)
    wait_until(lambda: cgroups.remove(path), what="the control group is empty")


def _run_in_cgroup(group: str, *argv: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(argv, preexec_fn=lambda: cgroups.enter(group))  # noqa: PLW1509


def test_group_contains_and_kills_a_process_that_left_its_session_and_parent(cgroup_path: str) -> None:
    job = f"{cgroup_path}/job"
    cgroups.create(job)
    with _run_in_cgroup(job, sys.executable, "-c", DAEMONIZE) as parent:
        parent.wait()
        processes = wait_until(lambda: cgroups.processes(cgroup_path))
        assert parent.pid not in processes
        assert not cgroups.remove(job)
        cgroups.kill(job)
        wait_until(lambda: not cgroups.processes(cgroup_path), what="the daemon ends")
    assert cgroups.children(cgroup_path) == [job]
    wait_until(lambda: cgroups.remove(job))
    assert cgroups.processes(job) == {}
    assert not Path(cgroup_path).exists(), "an empty parent is removed"


def test_kill_includes_nested_groups(cgroup_path: str) -> None:
    nested = f"{cgroup_path}/a/b"
    cgroups.create(nested)
    with _run_in_cgroup(nested, "/bin/sleep", "300") as process:
        assert list(cgroups.processes(cgroup_path)) == [process.pid]
        cgroups.kill(cgroup_path)
        assert process.wait() == -9


def test_group_without_freezer_and_kill_file_is_killed_by_signals(
    cgroup_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = cgroups._write_group_file

    def refuse(path: str, name: str, text: str) -> None:
        if name != "cgroup.procs":
            raise FileNotFoundError(name)
        write(path, name, text)

    monkeypatch.setattr(cgroups, "_write_group_file", refuse)
    with _run_in_cgroup(cgroup_path, "/bin/sleep", "300") as process:
        cgroups.kill(cgroup_path)
        assert process.wait() == -9


def test_zombie_is_not_a_process_of_the_group(cgroup_path: str) -> None:
    process = _run_in_cgroup(cgroup_path, "/bin/true")
    try:
        wait_until(lambda: process_table.thread_states(process.pid) == ["Z"])
        assert cgroups.processes(cgroup_path) == {}
    finally:
        process.wait()


def _write_fake_proc(root: Path, *, own: str, mounts: str) -> str:
    (root / "proc" / "self").mkdir(parents=True)
    (root / "proc" / "self" / "cgroup").write_text(own)
    (root / "proc" / "self" / "mountinfo").write_text(mounts)
    return f"{root}/"


V2 = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = (
    "31 30 0:27 / /sys/fs/cgroup/pids rw - cgroup cgroup rw,pids\n"
    "32 30 0:28 / /sys/fs/cgroup/freezer rw - cgroup cgroup rw,freezer\n"
    "33 30 0:29 /box /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
)


@pytest.mark.parametrize(
    ("own", "mounts", "groups"),
    [
        ("0::/system.slice/genie.service\n", V2, ["system.slice/genie.service"]),
        ("7:pids:/\n6:freezer:/a\n0::/\n", V1, ["freezer/a", "pids"]),
        ("7:pids:/\n0::/b\n", V1 + V2, ["b", "pids"]),
        ("5:cpu,cpuacct:/box/c\n", V1, ["cpu,cpuacct/c"]),
        ("5:cpu,cpuacct:/other\n0::/../..\n", V1 + V2, []),
        ("", "", []),
    ],
)
def test_own_control_groups_are_found_from_the_mount_table(
    tmp_path: Path, own: str, mounts: str, groups: list[str]
) -> None:
    root = _write_fake_proc(tmp_path, own=own, mounts=mounts)
    assert cgroups.own_control_groups(root) == [f"{root}sys/fs/cgroup/{group}" for group in groups]


def test_directory_that_is_no_control_group_is_not_usable(tmp_path: Path) -> None:
    assert cgroups.find_usable("genie-x", [str(tmp_path / "missing" / "x"), str(tmp_path)]) is None
    assert not (tmp_path / "genie-x").exists()


def test_process_is_running_while_one_of_its_threads_runs() -> None:
    # The first thread ends with the system call exit; the second one continues.
    code = """
import ctypes, platform, threading, time
threading.Thread(target=time.sleep, args=(300,)).start()
ctypes.CDLL(None).syscall({"x86_64": 60, "aarch64": 93}[platform.machine()], 0)
"""
    with subprocess.Popen([sys.executable, "-c", code]) as process:
        wait_until(lambda: sorted(process_table.thread_states(process.pid)) == ["S", "Z"])
        assert process_table.is_running(process.pid)
        process.kill()
        process.wait()
    assert not process_table.is_running(process.pid)
