"""Every process of a job is killed with it; accelerators are withheld until all of them have ended."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from genie.agent import agent as agent_module
from genie.agent import launcher as launching
from genie.agent.journal import JobRecord
from genie.agent.launcher import LaunchPlan, ShimLauncher
from genie.errors import NodeUnfitError
from genie.model.messages import ExitReport, JobOrder, RunningJob
from genie.model.node import GPUInfo
from genie.processes import cgroups
from genie.processes.process_identity import ProcessIdentity
from tests.agent.conftest import STAY, RunAgent, StartAgent, wait_for_job_process
from tests.fakes.controller import FakeController
from tests.needs import require_cgroup
from tests.waiting import until, wait_until

MakePlan = Callable[..., LaunchPlan]
# Forks a process that leaves session, parent and environment, then kills the shim, its own parent.
ESCAPE = """
import os, signal, time
shim = os.getppid()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for fd in (0, 1, 2): os.close(fd)
        with open("stray.new", "w") as file: file.write(str(os.getpid()))
        os.rename("stray.new", "stray")
        os.execve("/bin/sleep", ["sleep", "300"], {})
    os._exit(0)
os.wait()
while not os.path.exists("stray"): time.sleep(0.01)
while not os.path.exists("go"): time.sleep(0.01)
os.kill(shim, signal.SIGKILL)
time.sleep(300)
"""


@pytest.fixture(params=["v2", "pids"])
def cgroup_path(request: pytest.FixtureRequest) -> Iterator[str]:
    path = require_cgroup(f"genie-test-{os.getpid()}", request.param)
    yield path
    cgroups.kill(path)
    assert cgroups.children(path) == [], "the groups of ended jobs are removed"


@pytest.fixture
async def launcher_with_cgroup(cgroup_path: str, make_plan: MakePlan) -> AsyncIterator[ShimLauncher]:
    shims = ShimLauncher(cgroup_path)
    yield shims
    for job_id in shims.running_jobs_and_kill_errors():
        shims.kill_job(job_id, reason="the test is over")
    await until(lambda: not shims.running_jobs_and_kill_errors(), what="the shims end")
    shims.close()


class ProcessFreezer:
    """A frozen process stands in for one that is blocked in the kernel: signals do not reach it."""

    def __init__(self, path: str) -> None:
        self._path = path
        cgroups.create(path)

    def freeze(self, pid: int) -> None:
        cgroups._write_group_file(self._path, "cgroup.procs", str(pid))
        cgroups._write_group_file(self._path, "freezer.state", "FROZEN")
        wait_until(lambda: cgroups._read_text_or_empty(f"{self._path}/freezer.state").strip() == "FROZEN")

    def thaw(self) -> None:
        cgroups._write_group_file(self._path, "freezer.state", "THAWED")


@pytest.fixture
def freezer() -> Iterator[ProcessFreezer]:
    path = require_cgroup(f"genie-test-frozen-{os.getpid()}", "freezer")
    freezer = ProcessFreezer(path)
    yield freezer
    freezer.thaw()
    cgroups.kill(path)
    wait_until(lambda: cgroups.remove(path), what="the control group is empty")


def _abandon_shim(launcher: ShimLauncher) -> None:
    """Ends the agent of this launcher abruptly; its shims continue, as children of the test."""
    (shim,) = launcher._shims.values()
    launcher.close()
    shim.process.returncode = None
    _abandoned.append(shim.process)


_abandoned: list[subprocess.Popen[bytes]] = []


@pytest.fixture(autouse=True)
def _wait_for_abandoned_shims() -> Iterator[None]:
    yield
    while _abandoned:
        _abandoned.pop().wait(timeout=10)


async def _wait_for_exit(launcher: ShimLauncher) -> ExitReport:
    (report,) = await until(launcher.take_exit_reports, what="an exit")
    return report


async def _wait_for_escaped_process(plan: LaunchPlan) -> ProcessIdentity:
    path = plan.work_dir / "stray"
    await until(path.exists, what="the job has forked")
    mark = ProcessIdentity.of_pid(int(path.read_text()))
    assert mark is not None
    return mark


async def test_process_that_escaped_from_its_shim_is_killed_with_the_job(
    launcher_with_cgroup: ShimLauncher, make_plan: MakePlan
) -> None:
    plan = make_plan(sys.executable, "-c", ESCAPE)
    await launcher_with_cgroup.start_job(plan, deadman_expiry_s=time.monotonic() + 60)
    stray = await _wait_for_escaped_process(plan)
    (plan.work_dir / "go").touch()
    report = await _wait_for_exit(launcher_with_cgroup)
    assert "the shim exited unexpectedly" in report.reason
    assert not stray.is_alive


async def test_process_of_a_job_with_a_forged_exit_record_is_killed(
    launcher_with_cgroup: ShimLauncher, make_plan: MakePlan
) -> None:
    record = {"job_id": "job-1", "epoch": 7, "exit_code": 0, "reason": "exit code 0", "ended_at": 1.0}
    forge = f"open('../exit.json', 'w').write('''{json.dumps(record)}''')\n"
    plan = make_plan(sys.executable, "-c", ESCAPE.replace("os.kill(shim", f"{forge}os.kill(shim"))
    await launcher_with_cgroup.start_job(plan, deadman_expiry_s=time.monotonic() + 60)
    stray = await _wait_for_escaped_process(plan)
    (plan.work_dir / "go").touch()
    assert (await _wait_for_exit(launcher_with_cgroup)).exit_code == 0
    assert not stray.is_alive


async def test_new_agent_kills_a_process_that_escaped_from_an_earlier_one(
    launcher_with_cgroup: ShimLauncher, cgroup_path: str, make_plan: MakePlan, tmp_path: Path
) -> None:
    plan = make_plan(sys.executable, "-c", ESCAPE)
    earlier = ShimLauncher(cgroup_path)
    await earlier.adopt_jobs_and_kill_leftovers(tmp_path / "jobs", may_adopt=lambda record: False)
    await earlier.start_job(plan, deadman_expiry_s=time.monotonic() + 60)
    stray = await _wait_for_escaped_process(plan)
    _abandon_shim(earlier)
    (plan.work_dir / "go").touch()
    await until(lambda: list(cgroups.processes(cgroup_path)) == [stray.pid], what="only the stray is left")
    elsewhere = ShimLauncher(None)
    _, count = await elsewhere.adopt_jobs_and_kill_leftovers(
        tmp_path / "jobs", may_adopt=lambda record: False
    )
    assert count >= 1, "the group of the earlier agent is recorded"
    assert not stray.is_alive
    assert elsewhere.running_jobs_and_kill_errors() == {}
    elsewhere.close()


async def test_agent_of_another_control_group_adopts_a_job_with_its_group(
    launcher_with_cgroup: ShimLauncher, cgroup_path: str, make_plan: MakePlan, tmp_path: Path
) -> None:
    """Also the processes that have escaped from a shim which is killed after the adoption."""
    record = JobRecord(job_id="job-1", epoch=7, incarnation=1, accepted_at=1.0)
    plan = make_plan(sys.executable, "-c", ESCAPE, record=record, socket_path=tmp_path / "shims" / "job-1.7")
    earlier = ShimLauncher(cgroup_path)
    await earlier.adopt_jobs_and_kill_leftovers(tmp_path / "jobs", may_adopt=lambda record: False)
    await earlier.start_job(plan, deadman_expiry_s=time.monotonic() + 60)
    stray = await _wait_for_escaped_process(plan)
    _abandon_shim(earlier)
    elsewhere = ShimLauncher(None)
    adopted, count = await elsewhere.adopt_jobs_and_kill_leftovers(
        tmp_path / "jobs", may_adopt=lambda record: True
    )
    assert (len(adopted), count, stray.is_alive) == (1, 0, True)
    (plan.work_dir / "go").touch()
    await _wait_for_exit(elsewhere)
    assert not stray.is_alive
    assert list(cgroups.children(cgroup_path)) == []
    elsewhere.close()


async def test_job_that_cannot_enter_its_control_group_is_a_failure_of_the_node(
    launcher_with_cgroup: ShimLauncher, make_plan: MakePlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cgroups, "create", lambda path: None)
    await launcher_with_cgroup.start_job(make_plan("touch", "ran"), deadman_expiry_s=time.monotonic() + 60)
    report = await _wait_for_exit(launcher_with_cgroup)
    assert (report.started, report.is_caused_by_node) == (False, True)
    assert "could not move the job into the control group" in report.reason


ADOPT = """
import asyncio, os, sys, time
from pathlib import Path
from genie.agent.launcher import LaunchPlan, ShimLauncher
from genie.processes import process_table

async def main(directory, code):
    shims = ShimLauncher(None, adopts_orphans=process_table.become_subreaper())
    plan = LaunchPlan(job_id="job-1", epoch=1, argv=(sys.executable, "-c", code), env={}, directory=directory,
        work_dir=directory / "work", log_file_bytes_max=4096, log_files_max=1, grace_s=0.0,
        deadman_grace_s=0.0)
    other = LaunchPlan(job_id="job-2", epoch=1, argv=("/bin/sleep", "300"), env={},
        directory=directory.with_name("job-2"), work_dir=directory, log_file_bytes_max=4096, log_files_max=1,
        grace_s=0.0, deadman_grace_s=0.0)
    await shims.start_job(other, deadman_expiry_s=time.monotonic() + 60)
    await shims.start_job(plan, deadman_expiry_s=time.monotonic() + 60)
    (directory / "work" / "go").touch()
    await shims.wait_for_exit_report()
    (report,) = shims.take_exit_reports()
    pid = int((directory / "work" / "stray").read_text())
    print(report.job_id, process_table.is_running(pid), sorted(shims.running_jobs_and_kill_errors()))
    shims.kill_job("job-2", reason="the test is over")
    await shims.wait_for_exit_report()
    shims.close()

asyncio.run(main(Path(sys.argv[1]), sys.argv[2]))
"""


def test_without_control_groups_the_agent_adopts_and_kills_escaped_processes(tmp_path: Path) -> None:
    for name in ("job-1/work", "job-1/log", "job-2/log"):
        (tmp_path / name).mkdir(parents=True)
    command = [sys.executable, "-c", ADOPT, str(tmp_path / "job-1"), ESCAPE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "job-1 False ['job-2']\n"


# --- processes that cannot be killed ----------------------------------------------------------


def _jobs_in_last_heartbeat(controller: FakeController) -> list[RunningJob]:
    return list(controller.heartbeats[-1].running)


def _first_gpu_in_last_heartbeat(controller: FakeController) -> GPUInfo:
    return controller.heartbeats[-1].node.gpus[0]


@pytest.mark.parametrize("cgroup_path", ["pids"], indirect=True)
async def test_accelerator_is_withheld_until_an_unkillable_process_has_ended(
    controller: FakeController,
    run_agent: RunAgent,
    node_dir: Path,
    cgroup_path: str,
    freezer: ProcessFreezer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(agent_module, "HARDWARE_POLL_INTERVAL_S_MIN", 0.05)
    monkeypatch.setattr(launching, "SHIM_KILL_DELAY_AFTER_GRACE_S", 0.0)
    monkeypatch.setattr(launching, "KILL_RETRY_INTERVAL_S", 0.05)
    async with run_agent(group=cgroup_path):
        order = await controller.launch("j1", *STAY, gpu_ids=(0,))
        worker = await wait_for_job_process(node_dir, "j1")
        freezer.freeze(worker.pid)
        controller.kill.append(JobOrder(job_id="j1", epoch=order.placement.epoch, reason="cancelled"))
        note = f"cannot kill process {worker.pid}"
        await until(
            lambda: any(note in job.status_note for job in _jobs_in_last_heartbeat(controller)),
            what="a heartbeat with the reason",
        )
        await until(lambda: not _first_gpu_in_last_heartbeat(controller).available)
        assert (
            _first_gpu_in_last_heartbeat(controller).reason
            == f"{_jobs_in_last_heartbeat(controller)[0].status_note} of job j1"
        )
        assert controller.heartbeats[-1].node.gpus[1].available
        with pytest.raises(NodeUnfitError, match="cannot kill process"):
            await controller.launch("j2", *STAY, gpu_ids=(0,))
        assert "j1" not in controller.exits
        freezer.thaw()
        assert "cancelled" in (await controller.end_of("j1")).reason
        assert not worker.is_alive
        await until(lambda: _first_gpu_in_last_heartbeat(controller).available)
        await controller.launch("j2", "/bin/true", gpu_ids=(0,))
        await controller.end_of("j2")


@pytest.mark.parametrize("cgroup_path", ["v2"], indirect=True)
async def test_restarted_agent_withholds_the_accelerator_of_a_process_that_it_cannot_kill(
    controller: FakeController,
    run_agent: RunAgent,
    node_dir: Path,
    cgroup_path: str,
    freezer: ProcessFreezer,
    make_plan: MakePlan,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(agent_module, "HARDWARE_POLL_INTERVAL_S_MIN", 0.05)
    monkeypatch.setattr(launching, "KILL_RETRY_INTERVAL_S", 0.05)
    (node_dir / "jobs").mkdir(parents=True)
    directory = node_dir / "jobs" / "j1"
    for name in ("log", "work", "tmp"):
        (directory / name).mkdir(parents=True)
    plan = make_plan(*STAY, job_id="j1", directory=directory, work_dir=directory / "work")
    record = JobRecord(job_id="j1", epoch=7, incarnation=1, accepted_at=1.0, gpu_ids=(0,))
    (directory / "job.json").write_bytes(msgspec.json.encode(record))
    earlier = ShimLauncher(cgroup_path)
    await earlier.start_job(plan, deadman_expiry_s=time.monotonic() + 60)
    worker = await wait_for_job_process(node_dir, "j1")
    freezer.freeze(worker.pid)
    _abandon_shim(earlier)

    async with run_agent(group=cgroup_path):
        await controller.peer()
        gpus = controller.registers[0].node.gpus
        assert [gpu.available for gpu in gpus] == [False, True]
        assert gpus[0].reason == f"cannot kill process {worker.pid} (uninterruptible) of job j1"
        for job_id in ("j1", "j2"):
            with pytest.raises(NodeUnfitError):
                await controller.launch(job_id, *STAY, epoch=8, gpu_ids=(0,))
        freezer.thaw()
        await until(
            lambda: _first_gpu_in_last_heartbeat(controller).available,
            what="the accelerator is available again",
        )
        assert not worker.is_alive


async def test_agent_process_runs_each_job_in_a_control_group(
    controller: FakeController, start_agent_process: StartAgent, node_dir: Path
) -> None:
    require_cgroup(f"genie-test-{os.getpid()}", "v2")
    async with start_agent_process() as process:
        await controller.launch("j1", *STAY)
        worker = await wait_for_job_process(node_dir, "j1")
        own = cgroups._read_text_or_empty(f"/proc/{worker.pid}/cgroup")
        assert "/genie-n1-" in own
        assert own.rstrip().endswith("/j1.1")
        with contextlib.suppress(ProcessLookupError):
            process.process.terminate()
        await process.wait()
    assert not worker.is_alive
