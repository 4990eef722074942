"""The next agent of a node adopts running jobs: real shims, and agents that are killed with SIGKILL."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from genie.agent import launcher, leftovers, preparation, shim
from genie.agent.journal import JobRecord, Journal
from genie.agent.launcher import LaunchPlan, ShimLauncher, encode_plan, kill_jobs_of_stopped_agent
from genie.agent.logs import read_log_chunk
from genie.errors import NodeUnfitError, WorkersMissingError
from genie.model.job import JobKind
from genie.model.messages import ConfirmLaunch, ExitReport, JobOrder
from genie.processes import process_table
from genie.processes.process_identity import ProcessIdentity
from tests.agent.conftest import STAY, WRITE_PID, RunAgent, StartAgent, wait_for_job_process
from tests.fakes.controller import FakeController
from tests.waiting import until

WAIT_FOR_GO = "while [ ! -e go ]; do sleep 0.02; done"
LONG_S = 60.0

MakeAdoptablePlan = Callable[..., LaunchPlan]
MakeLauncher = Callable[[], ShimLauncher]


@pytest.fixture(autouse=True)
def _reap_abandoned_shims(tmp_path: Path) -> Iterator[None]:
    """Reaps shims that an earlier agent in this process has abandoned; init does that for a killed one."""
    yield
    for path in tmp_path.rglob("started.json"):
        pid, _ = json.loads(path.read_text())["shim"]
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)


@pytest.fixture
def make_adoptable_plan(make_plan: Callable[..., LaunchPlan], tmp_path: Path) -> MakeAdoptablePlan:
    def make(*argv: str, **changes: object) -> LaunchPlan:
        record = JobRecord(job_id="job-1", epoch=7, incarnation=1, accepted_at=1.0, gpu_ids=(1,), tenant="t")
        changes = {"record": record, "socket_path": tmp_path / "shims" / "job-1.7", **changes}
        return make_plan(*argv, **changes)

    return make


@pytest.fixture
async def make_launcher() -> AsyncIterator[MakeLauncher]:
    """Makes launchers, as of successive agents of a node; the last one kills the job at the end."""
    made: list[ShimLauncher] = []

    def make() -> ShimLauncher:
        made.append(ShimLauncher())
        return made[-1]

    yield make
    last = made[-1]
    last.kill_job("job-1", reason="the test is over", grace_s=0.1)
    await until(lambda: not last.running_jobs_and_kill_errors(), what="the job ends")
    for each in made:
        each.close()


async def adopt_all(agent: ShimLauncher, directory: Path) -> list[leftovers.AdoptedJob]:
    adopted, _ = await agent.adopt_jobs_and_kill_leftovers(directory / "jobs", may_adopt=lambda record: True)
    return adopted


async def wait_for_exit(agent: ShimLauncher) -> ExitReport:
    ends: list[ExitReport] = []
    await until(lambda: ends.extend(agent.take_exit_reports()) or ends, what="an end")
    return ends[0]


# --- shims --------------------------------------------------------------------------------------


async def test_adopted_job_continues_and_its_exit_and_log_are_complete(
    make_launcher: MakeLauncher, make_adoptable_plan: MakeAdoptablePlan, tmp_path: Path
) -> None:
    plan = make_adoptable_plan("/bin/sh", "-c", f"echo before; {WAIT_FOR_GO}; echo after; exit 5")
    first, second = make_launcher(), make_launcher()
    started_after_s = time.monotonic()
    await first.start_job(plan, deadman_expiry_s=time.monotonic() + LONG_S)
    first.close()
    (job,) = await adopt_all(second, tmp_path)
    assert (job.record, job.kill_reason) == (plan.record, "")
    assert job.started_s is not None
    assert started_after_s < job.started_s < time.monotonic()
    assert second.running_jobs_and_kill_errors() == {"job-1": ""}
    (plan.work_dir / "go").touch()
    report = await wait_for_exit(second)
    assert (report.epoch, report.exit_code, report.reason) == (7, 5, "exit code 5")
    log = read_log_chunk(plan.directory, offset=0, bytes_max=100, is_live=False).data
    assert log == b"before\nafter\n"
    assert list((tmp_path / "shims").iterdir()) == []


async def test_adopted_job_can_be_killed(
    make_launcher: MakeLauncher, make_adoptable_plan: MakeAdoptablePlan, tmp_path: Path
) -> None:
    plan = make_adoptable_plan(*STAY, has_deadman_timer=False)
    first, second = make_launcher(), make_launcher()
    await first.start_job(plan, deadman_expiry_s=0.0)
    first.close()
    await adopt_all(second, tmp_path)
    second.kill_job("job-1", reason="cancelled by its owner")
    assert (await wait_for_exit(second)).reason == "cancelled by its owner"


async def test_agent_extends_the_dead_man_timer_of_an_adopted_job(
    make_launcher: MakeLauncher, make_adoptable_plan: MakeAdoptablePlan, tmp_path: Path
) -> None:
    plan = make_adoptable_plan("/bin/sh", "-c", f"{WAIT_FOR_GO}; exit 5")
    first, second = make_launcher(), make_launcher()
    expiry_s = time.monotonic() + 2.0
    await first.start_job(plan, deadman_expiry_s=expiry_s)
    first.close()
    await adopt_all(second, tmp_path)
    second.extend_deadman_timers(time.monotonic() + LONG_S)
    await until(lambda: time.monotonic() > expiry_s + plan.deadman_grace_s, what="the first expiry")
    (plan.work_dir / "go").touch()
    assert (await wait_for_exit(second)).exit_code == 5


async def test_kill_that_has_begun_continues_and_can_be_shortened(
    make_launcher: MakeLauncher, make_adoptable_plan: MakeAdoptablePlan, tmp_path: Path
) -> None:
    plan = make_adoptable_plan("/bin/sh", "-c", f"trap '' TERM; {WRITE_PID}; {WAIT_FOR_GO}")
    first, second = make_launcher(), make_launcher()
    await first.start_job(plan, deadman_expiry_s=time.monotonic() + LONG_S)
    await until((plan.work_dir / "pid").exists, what="the job ignores SIGTERM")
    first.kill_job("job-1", reason="makes room", grace_s=LONG_S)
    first.close()
    (job,) = await adopt_all(second, tmp_path)
    assert job.kill_reason == "makes room"
    second.kill_job("job-1", reason="cancelled", grace_s=0.1)
    assert (await wait_for_exit(second)).reason == "makes room"


async def test_later_agent_replaces_the_connection_of_an_earlier_one(
    make_launcher: MakeLauncher, make_adoptable_plan: MakeAdoptablePlan, tmp_path: Path
) -> None:
    first, second, third = make_launcher(), make_launcher(), make_launcher()
    plan = make_adoptable_plan("/bin/sh", "-c", f"{WAIT_FOR_GO}; exit 5")
    await first.start_job(plan, deadman_expiry_s=time.monotonic() + LONG_S)
    first.close()
    for each in (second, third):
        assert len(await adopt_all(each, tmp_path)) == 1
        if each is second:
            second.close()
    (plan.work_dir / "go").touch()
    assert (await wait_for_exit(third)).exit_code == 5


async def test_job_that_may_not_be_adopted_is_killed(
    make_launcher: MakeLauncher, make_adoptable_plan: MakeAdoptablePlan, tmp_path: Path
) -> None:
    first, second = make_launcher(), make_launcher()
    await first.start_job(make_adoptable_plan(*STAY), deadman_expiry_s=time.monotonic() + LONG_S)
    worker = await wait_for_job_process(tmp_path, "job-1")
    first.close()
    adopted, count = await second.adopt_jobs_and_kill_leftovers(
        tmp_path / "jobs", may_adopt=lambda record: False
    )
    assert (adopted, second.running_jobs_and_kill_errors()) == ([], {})
    assert count >= 2, "shim and job"
    assert not worker.is_alive


@pytest.mark.parametrize(
    ("version", "oldest_version", "is_adopted"), [(2, 2, False), (2, 1, True), (0, 0, False)]
)
async def test_job_is_adopted_if_its_shim_and_the_agent_have_a_common_version(
    version: int,
    oldest_version: int,
    is_adopted: bool,
    make_launcher: MakeLauncher,
    make_adoptable_plan: MakeAdoptablePlan,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    first, second = make_launcher(), make_launcher()
    await first.start_job(make_adoptable_plan(*STAY), deadman_expiry_s=time.monotonic() + LONG_S)
    worker = await wait_for_job_process(tmp_path, "job-1")
    first.close()
    monkeypatch.setattr(shim, "CONTROL_VERSION", version)
    monkeypatch.setattr(shim, "CONTROL_VERSION_OLDEST", oldest_version)
    assert bool(await adopt_all(second, tmp_path)) == worker.is_alive == is_adopted
    if not is_adopted:
        assert "job-1.7: it supports version 1 of the control connection, this agent version" in caplog.text


@dataclass
class StoppedShim:
    """A job that runs while its shim is stopped, and whose agent has ended."""

    plan: LaunchPlan
    job: ProcessIdentity
    shim: ProcessIdentity


MakeStoppedShim = Callable[..., Awaitable[StoppedShim]]


@pytest.fixture
def make_stopped_shim(
    make_launcher: MakeLauncher, make_adoptable_plan: MakeAdoptablePlan, tmp_path: Path
) -> MakeStoppedShim:
    async def make(
        *, has_deadman_timer: bool, has_record: bool = True, deadman_s: float = LONG_S
    ) -> StoppedShim:
        record = JobRecord(
            job_id="job-1", epoch=7, incarnation=1, accepted_at=1.0, has_deadman_timer=has_deadman_timer
        )
        script = f"{WRITE_PID}; {WAIT_FOR_GO}; exit 5"
        plan = make_adoptable_plan(
            "/bin/sh", "-c", script, record=record, has_deadman_timer=has_deadman_timer
        )
        if has_record:
            (plan.directory / "job.json").write_bytes(msgspec.json.encode(record))
        first = make_launcher()
        await first.start_job(plan, deadman_expiry_s=time.monotonic() + deadman_s)
        job = await wait_for_job_process(tmp_path, "job-1")
        first.close()
        shim_process, _ = leftovers.read_start_record(plan.directory / "started.json")
        assert shim_process.send_signal(signal.SIGSTOP)
        return StoppedShim(plan, job, shim_process)

    return make


async def test_job_whose_shim_does_not_respond_runs_on_and_is_adopted_later(
    make_launcher: MakeLauncher, make_stopped_shim: MakeStoppedShim, tmp_path: Path
) -> None:
    stopped = await make_stopped_shim(has_deadman_timer=False)
    second = make_launcher()
    (job,) = await adopt_all(second, tmp_path)
    assert (job.record, job.is_responding) == (stopped.plan.record, False)
    assert second.running_jobs_and_kill_errors() == {"job-1": ""}
    second.extend_deadman_timers(time.monotonic() - 1)
    assert stopped.job.is_alive
    stopped.shim.send_signal(signal.SIGCONT)
    await until(lambda: job.is_responding, what="the shim responds")
    (stopped.plan.work_dir / "go").touch()
    report = await wait_for_exit(second)
    assert (report.epoch, report.exit_code) == (7, 5)
    assert list((tmp_path / "shims").iterdir()) == []


async def test_shim_that_does_not_respond_does_not_delay_the_adoption_of_others(
    make_launcher: MakeLauncher,
    make_stopped_shim: MakeStoppedShim,
    make_plan: Callable[..., LaunchPlan],
    tmp_path: Path,
) -> None:
    record = JobRecord(job_id="job-2", epoch=7, incarnation=1, accepted_at=1.0)
    plan = make_plan(*STAY, job_id="job-2", record=record, socket_path=tmp_path / "shims" / "job-2.7")
    first = make_launcher()
    await first.start_job(plan, deadman_expiry_s=time.monotonic() + LONG_S)
    first.close()
    stopped = await make_stopped_shim(has_deadman_timer=True)
    second = make_launcher()
    ticks = 0

    async def count_ticks() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0)
            ticks += 1

    counting = asyncio.create_task(count_ticks())
    adopted = await adopt_all(second, tmp_path)
    counting.cancel()
    assert {job.record.job_id: job.is_responding for job in adopted} == {"job-1": False, "job-2": True}
    assert ticks > 1, "the event loop is not blocked"
    stopped.shim.send_signal(signal.SIGCONT)
    second.kill_job("job-2", reason="the test is over", grace_s=0.1)
    await until(lambda: "job-2" not in second.running_jobs_and_kill_errors(), what="the job ends")


async def test_agent_enforces_the_dead_man_timer_of_a_job_whose_shim_does_not_respond(
    make_launcher: MakeLauncher,
    make_stopped_shim: MakeStoppedShim,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(launcher, "SILENT_SHIM_TIMEOUT_S", 0.1)
    stopped = await make_stopped_shim(has_deadman_timer=True)
    second = make_launcher()
    await adopt_all(second, tmp_path)
    expiry_s = time.monotonic() + 1.0
    second.extend_deadman_timers(expiry_s)
    report = await wait_for_exit(second)
    assert time.monotonic() > expiry_s
    assert (report.reason, report.started) == (launcher.SILENT_SHIM_REASON, True)
    assert not stopped.job.is_alive


async def test_job_whose_shim_does_not_respond_ends_if_no_leader_acknowledges_a_heartbeat(
    make_launcher: MakeLauncher,
    make_stopped_shim: MakeStoppedShim,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(launcher, "SILENT_SHIM_TIMEOUT_S", 0.1)
    stopped = await make_stopped_shim(has_deadman_timer=True)
    second = make_launcher()
    await adopt_all(second, tmp_path)
    assert (await wait_for_exit(second)).reason == launcher.SILENT_SHIM_REASON
    assert not stopped.job.is_alive


async def test_extension_that_arrived_while_the_shim_was_stopped_counts(
    make_launcher: MakeLauncher, make_stopped_shim: MakeStoppedShim, tmp_path: Path
) -> None:
    stopped = await make_stopped_shim(has_deadman_timer=True, deadman_s=2.0)
    second = make_launcher()
    (job,) = await adopt_all(second, tmp_path)
    expiry_s = time.monotonic() + 2.0
    second.extend_deadman_timers(time.monotonic() + LONG_S)
    await until(lambda: time.monotonic() > expiry_s, what="the timer of the shim has expired")
    stopped.shim.send_signal(signal.SIGCONT)
    await until(lambda: job.is_responding, what="the shim responds")
    (stopped.plan.work_dir / "go").touch()
    assert (await wait_for_exit(second)).exit_code == 5


async def test_job_whose_shim_does_not_respond_is_killed_if_the_node_has_no_record_of_it(
    make_launcher: MakeLauncher,
    make_stopped_shim: MakeStoppedShim,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    stopped = await make_stopped_shim(has_deadman_timer=False, has_record=False)
    assert await adopt_all(make_launcher(), tmp_path) == []
    assert not stopped.job.is_alive
    assert "ending job job-1, epoch 7: its shim does not respond, and this node has no record" in caplog.text


@pytest.mark.parametrize("is_killed", [False, True])
async def test_start_in_progress_when_the_agent_ends_is_left_to_the_next_agent_unless_killed(
    is_killed: bool,
    make_launcher: MakeLauncher,
    make_adoptable_plan: MakeAdoptablePlan,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, second = make_launcher(), make_launcher()
    spawn, is_blocked, go_on = launcher._spawn_shim, threading.Event(), threading.Event()

    def spawn_when_unblocked(*args: object, **given: object) -> subprocess.Popen[bytes]:
        is_blocked.set()
        go_on.wait(LONG_S)
        return spawn(*args, **given)  # type: ignore[arg-type]

    monkeypatch.setattr(launcher, "_spawn_shim", spawn_when_unblocked)
    plan = make_adoptable_plan(*STAY, has_deadman_timer=False)
    starting = asyncio.create_task(first.start_job(plan, deadman_expiry_s=0.0))
    await until(is_blocked.is_set, what="the start is blocked")
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    if is_killed:
        first.kill_job("job-1", reason="the agent was stopped")
    go_on.set()
    first.close()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    adopted = await adopt_all(second, tmp_path)
    assert [job.record.job_id for job in adopted] == ([] if is_killed else ["job-1"])


@pytest.mark.parametrize("directory", ["shims", "prepared"])
async def test_files_of_jobs_among_those_of_the_agent_do_not_keep_it_from_starting(
    directory: str, controller: FakeController, node_dir: Path, run_agent: RunAgent
) -> None:
    """A job runs as the same user, so it can create them."""
    boot_id = process_table.boot_id()
    journal = Journal(node_dir)
    journal.open()
    names = ["j1.1", "j2.1", "j3.1", "j4.1"]
    for name in names:
        journal.record_launch(
            JobRecord(job_id=name[:2], epoch=1, incarnation=1, accepted_at=1.0, boot_id=boot_id)
        )
    journal.close()
    path = node_dir / directory
    path.mkdir(exist_ok=True)
    (path / "j1.1").mkdir()
    (path / "j1.1" / "file").touch()
    os.mkfifo(path / "j2.1")
    (path / "j3.1").symlink_to("/dev/zero")
    with (path / "j4.1").open("wb") as file:
        file.truncate(1 << 40)
    (path / "..odd name").mkdir()
    async with run_agent():
        await controller.peer()
        assert controller.registers[-1].running == ()
        await until(lambda: not list(path.iterdir()), what="the files are removed")


async def test_odd_entries_do_not_keep_a_job_from_starting(
    controller: FakeController, node_dir: Path, run_agent: RunAgent
) -> None:
    async with run_agent():
        for name in ("shims", "prepared"):
            (node_dir / name / "j1.1").mkdir(parents=True)
            (node_dir / name / "j1.1" / "file").touch()
            os.mkfifo(node_dir / name / "j2.2")
        for job_id in ("j1", "j2"):
            await controller.launch(job_id, "true")
            assert (await controller.end_of(job_id)).exit_code == 0


async def test_socket_that_belongs_to_another_job_is_rejected(
    make_launcher: MakeLauncher,
    make_adoptable_plan: MakeAdoptablePlan,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    first, second = make_launcher(), make_launcher()
    await first.start_job(make_adoptable_plan(*STAY), deadman_expiry_s=time.monotonic() + LONG_S)
    await wait_for_job_process(tmp_path, "job-1")
    first.close()
    (tmp_path / "shims" / "job-1.7").rename(tmp_path / "shims" / "job-2.7")
    assert await adopt_all(second, tmp_path) == []
    assert "could not adopt the job of the shim at job-2.7: it says that it runs job-1.7" in caplog.text


CONNECT = """
import os, pathlib, socket, sys, time
path, forks = sys.argv[1], sys.argv[2] == "orphan"
if forks and os.fork():
    time.sleep(300)
if forks:
    os.setsid()
    if os.fork():
        os._exit(0)
    os.environ.clear()
control = socket.socket(socket.AF_UNIX)
control.connect(path)
try:
    control.sendall(b"r 1e12\\n" + b'k ["hijacked", 0.0]\\n')
    received = control.recv(10)
except (BrokenPipeError, ConnectionResetError):
    received = b""
pathlib.Path("received.new").write_bytes(received)
os.rename("received.new", "received")
time.sleep(300)
"""


@pytest.mark.parametrize("target", ["job-1.7", "job-2.7"])
@pytest.mark.parametrize("how", ["child", "orphan"])
async def test_shim_rejects_connections_of_jobs(
    target: str,
    how: str,
    make_launcher: MakeLauncher,
    make_adoptable_plan: MakeAdoptablePlan,
    make_plan: Callable[..., LaunchPlan],
    tmp_path: Path,
) -> None:
    record = JobRecord(job_id="job-2", epoch=7, incarnation=1, accepted_at=1.0)
    other = make_plan(*STAY, job_id="job-2", record=record, socket_path=tmp_path / "shims" / "job-2.7")
    plan = make_adoptable_plan(sys.executable, "-c", CONNECT, str(tmp_path / "shims" / target), how)
    agent = make_launcher()
    for each in (other, plan):
        await agent.start_job(each, deadman_expiry_s=time.monotonic() + LONG_S)
    received = plan.work_dir / "received"
    await until(received.exists, what="the connection of the job is closed")
    assert received.read_bytes() == b""
    assert agent.running_jobs_and_kill_errors() == {"job-1": "", "job-2": ""}
    agent.kill_job("job-2", reason="the test is over", grace_s=0.1)
    assert (await wait_for_exit(agent)).reason == "the test is over"


async def test_dead_man_timer_is_not_extended_without_limit(
    make_launcher: MakeLauncher, make_adoptable_plan: MakeAdoptablePlan
) -> None:
    agent = make_launcher()
    await agent.start_job(make_adoptable_plan(*STAY), deadman_expiry_s=time.monotonic() + 2.0)
    for until_s in (1e12, float("inf"), float("nan")):
        agent.extend_deadman_timers(until_s)
    assert "lost contact" in (await wait_for_exit(agent)).reason


async def test_job_that_ended_without_an_agent_has_an_exit_record_and_no_socket(
    make_launcher: MakeLauncher, make_adoptable_plan: MakeAdoptablePlan, tmp_path: Path
) -> None:
    first, second = make_launcher(), make_launcher()
    plan = make_adoptable_plan("/bin/sh", "-c", f"{WAIT_FOR_GO}; exit 5")
    await first.start_job(plan, deadman_expiry_s=time.monotonic() + LONG_S)
    first.close()
    (plan.work_dir / "go").touch()
    await until((plan.directory / "exit.json").exists, what="the exit record")

    async def has_ended() -> bool | None:
        return not await adopt_all(second, tmp_path) or None

    await until(has_ended, what="the shim has ended")
    assert list((tmp_path / "shims").iterdir()) == []


async def test_socket_path_may_be_longer_than_a_socket_address(
    make_launcher: MakeLauncher, make_adoptable_plan: MakeAdoptablePlan, tmp_path: Path
) -> None:
    first, second = make_launcher(), make_launcher()
    state_dir = tmp_path / ("long" * 40)
    record = JobRecord(job_id="j" * 63, epoch=(1 << 63) - 1, incarnation=1, accepted_at=1.0)
    name = Journal(state_dir).shim_socket_path(record.job_id, record.epoch).name
    plan = make_adoptable_plan(*STAY, record=record, socket_path=state_dir / "shims" / name)
    await first.start_job(plan, deadman_expiry_s=time.monotonic() + LONG_S)
    first.close()
    (connection,) = leftovers.connect_to_shims(state_dir / "shims")
    connection.control_socket.close()
    await second.adopt_jobs_and_kill_leftovers(tmp_path / "jobs", may_adopt=lambda record: False)


def test_shim_accepts_the_configuration_of_an_agent_that_cannot_adopt_jobs(tmp_path: Path) -> None:
    """An agent may still run when the files of the next release are installed."""
    (tmp_path / "log").mkdir()
    config = {
        "job_id": "job-1",
        "epoch": 7,
        "argv": ["/bin/sh", "-c", "exit 5"],
        "cwd": str(tmp_path),
        "env": {},
        "log_dir": str(tmp_path / "log"),
        "log_bytes_max": 4096,
        "log_files_max": 1,
        "until_s": None,
        "grace_s": 0.1,
        "deadman_grace_s": 0.1,
        "exit_path": str(tmp_path / "exit.json"),
        "started_path": str(tmp_path / "started.json"),
        "control_fd": 0,
        "group": "",
    }
    (tmp_path / "shim.json").write_text(json.dumps(config))
    command = [sys.executable, "-I", "-S", shim.__file__, str(tmp_path / "shim.json")]
    subprocess.run(command, stdin=subprocess.PIPE, timeout=60, check=True)
    assert json.loads((tmp_path / "exit.json").read_text())["exit_code"] == 5


# --- agents -------------------------------------------------------------------------------------


def make_archive(name: str, data: bytes) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:") as archive:
        info = tarfile.TarInfo(name)
        info.size = len(data)
        archive.addfile(info, io.BytesIO(data))
    return file.getvalue()


async def kill_and_wait(agent: object) -> None:
    agent.send_signal(signal.SIGKILL)  # type: ignore[attr-defined]
    await agent.wait()  # type: ignore[attr-defined]


async def test_job_continues_when_its_agent_is_killed_and_restarted(
    controller: FakeController, node_dir: Path, start_agent_process: StartAgent
) -> None:
    script = f"echo before; {WRITE_PID}; {WAIT_FOR_GO}; echo after; exit 6"
    async with start_agent_process() as agent:
        await controller.launch("j1", "/bin/sh", "-c", script, gpu_ids=(0,))
        job = await wait_for_job_process(node_dir, "j1")
        await kill_and_wait(agent)
    before = len(controller.registers)
    async with start_agent_process():
        await until(lambda: len(controller.registers) > before, what="the next agent registers")
        register = controller.registers[-1]
        assert (register.node.incarnation, register.exits) == (2, ())
        assert [(one.job_id, one.epoch) for one in register.running] == [("j1", 1)]
        assert register.running[0].elapsed_s > 0
        with pytest.raises(NodeUnfitError, match="not ended on accelerator 0 yet"):
            await controller.launch("j2", "true", gpu_ids=(0,))
        assert [one.job_id for one in controller.heartbeats[-1].running] == ["j1"]
        assert job.is_alive
        (node_dir / "jobs" / "j1" / "work" / "go").touch()
        assert (await controller.end_of("j1")).exit_code == 6
        assert await controller.whole_log("j1") == "before\nafter\n"


async def test_job_whose_shim_does_not_respond_is_reported_as_running(
    controller: FakeController, node_dir: Path, start_agent_process: StartAgent
) -> None:
    async with start_agent_process() as agent:
        await controller.launch("j1", "/bin/sh", "-c", f"{WRITE_PID}; {WAIT_FOR_GO}; exit 6", gpu_ids=(0,))
        job = await wait_for_job_process(node_dir, "j1")
        await kill_and_wait(agent)
    shim_process, _ = leftovers.read_start_record(node_dir / "jobs" / "j1" / "started.json")
    assert shim_process.send_signal(signal.SIGSTOP)
    before = len(controller.registers)
    async with start_agent_process():
        await until(lambda: len(controller.registers) > before, what="the next agent registers")
        (running,) = controller.registers[-1].running
        assert (running.job_id, running.epoch, running.elapsed_s) == ("j1", 1, 0.0)
        assert running.status_note == "its shim does not respond; the state of the job is unknown"
        with pytest.raises(NodeUnfitError, match="not ended on accelerator 0 yet"):
            await controller.launch("j2", "true", gpu_ids=(0,))
        assert job.is_alive
        shim_process.send_signal(signal.SIGCONT)
        await until(lambda: not controller.heartbeats[-1].running[0].status_note, what="it is adopted")
        assert controller.heartbeats[-1].running[0].elapsed_s > 0
        (node_dir / "jobs" / "j1" / "work" / "go").touch()
        assert (await controller.end_of("j1")).exit_code == 6


async def test_adopted_jobs_obey_kills_of_the_leader(
    controller: FakeController, node_dir: Path, start_agent_process: StartAgent
) -> None:
    async with start_agent_process() as agent:
        launches = [await controller.launch(job_id, *STAY) for job_id in ("j1", "j2")]
        jobs = [await wait_for_job_process(node_dir, job_id) for job_id in ("j1", "j2")]
        await kill_and_wait(agent)
    controller.kill = [JobOrder(job_id="j2", epoch=launches[1].placement.epoch, reason="not in the ledger")]
    async with start_agent_process():
        assert "not in the ledger" in (await controller.end_of("j2")).reason
        assert jobs[0].is_alive
        await controller.order_kill(launches[0], reason="cancelled by its owner")
        assert "cancelled" in (await controller.end_of("j1")).reason
    assert not any(job.is_alive for job in jobs)


async def test_restartable_job_ends_if_the_restarted_agent_finds_no_leader(
    controller: FakeController, node_dir: Path, start_agent_process: StartAgent
) -> None:
    """A restart does not extend the lease: the job may run elsewhere by then."""
    controller.ttl_s = 6.0
    async with start_agent_process() as agent:
        await controller.launch("j1", *STAY)
        await controller.launch("j2", *STAY, has_deadman_timer=False)
        job, other = [await wait_for_job_process(node_dir, job_id) for job_id in ("j1", "j2")]
        controller.silent = True
        await kill_and_wait(agent)
    async with start_agent_process():
        await until(lambda: not job.is_alive, what="the restartable job ends")
        assert other.is_alive
        controller.silent = False
        assert "lost contact" in (await controller.end_of("j1")).reason
        await until(lambda: [one.job_id for one in controller.heartbeats[-1].running] == ["j2"])


async def test_restartable_job_survives_a_restart_within_its_dead_man_time(
    controller: FakeController, node_dir: Path, start_agent_process: StartAgent
) -> None:
    controller.ttl_s = 10.0
    async with start_agent_process() as agent:
        await controller.launch("j1", *STAY)
        job = await wait_for_job_process(node_dir, "j1")
        await kill_and_wait(agent)
    killed_s = time.monotonic()
    async with start_agent_process():
        await until(lambda: time.monotonic() > killed_s + controller.ttl_s, timeout_s=30)
        assert job.is_alive


async def test_prepared_launch_is_confirmed_and_started_by_the_next_agent(
    controller: FakeController, node_dir: Path, start_agent_process: StartAgent
) -> None:
    controller.refusals[ConfirmLaunch] = WorkersMissingError("worker 1 is missing")
    workdir = controller.keep_blob(make_archive("file", b"contents"))
    async with start_agent_process() as agent:
        await controller.launch("j1", "cat", "file", workdir=workdir)
        await until(lambda: controller.count(ConfirmLaunch) > 0, what="a confirmation")
        await kill_and_wait(agent)
    controller.refusals.clear()
    async with start_agent_process():
        assert (await controller.end_of("j1")).exit_code == 0
        assert await controller.whole_log("j1") == "contents"
        assert [(one.job_id, one.epoch) for one in controller.registers[-1].running] == [("j1", 1)]
        assert [one.incarnation for one in controller.confirms] == [1], "that of the launch"
        await until((node_dir / "jobs" / "j1" / "settled.json").exists, what="it is settled")
        assert list((node_dir / "prepared").iterdir()) == []


@pytest.mark.parametrize("case", ["started", "another boot", "ended", "earlier epoch"])
async def test_launch_is_not_repeated_if_the_job_may_have_run(
    case: str,
    controller: FakeController,
    node_dir: Path,
    run_agent: RunAgent,
    make_plan: Callable[..., LaunchPlan],
) -> None:
    boot_id = "another" if case == "another boot" else process_table.boot_id()
    plan = make_plan("true", epoch=3)
    journal = Journal(node_dir)
    journal.open()
    record = JobRecord(
        job_id="j1",
        epoch=4 if case == "earlier epoch" else 3,
        incarnation=1,
        accepted_at=1.0,
        boot_id=boot_id,
    )
    journal.record_launch(record)
    journal.store_prepared_launch(msgspec.structs.replace(record, epoch=3), encode_plan(plan))
    if case == "started":
        journal.discard_prepared_launch("j1", 3)
    if case == "ended":
        report = ExitReport(job_id="j1", epoch=3, exit_code=0, reason="exit code 0", ended_at=1.0)
        journal.write_exit_record(report)
    journal.close()
    async with run_agent():
        await controller.peer()
        assert controller.registers[-1].running == ()
        assert controller.confirms == []
    assert list((node_dir / "prepared").iterdir()) == []


async def test_prepared_launch_of_another_release_is_reported_as_not_started(
    controller: FakeController, node_dir: Path, run_agent: RunAgent
) -> None:
    journal = Journal(node_dir)
    journal.open()
    record = JobRecord(job_id="j1", epoch=3, incarnation=1, accepted_at=1.0, boot_id=process_table.boot_id())
    journal.record_launch(record)
    journal.store_prepared_launch(record, b"another format")
    journal.close()
    async with run_agent():
        report = await controller.end_of("j1")
        assert (report.epoch, report.started, report.is_caused_by_node) == (3, False, True)
        assert "cannot read what the earlier one had prepared" in report.reason
        assert controller.registers[-1].running == ()
    assert list((node_dir / "prepared").iterdir()) == []


def test_no_launch_is_continued_if_the_boot_is_unknown(
    node_dir: Path, make_plan: Callable[..., LaunchPlan]
) -> None:
    """After a power failure, the deleted plan of a job that has started may be back."""
    journal = Journal(node_dir)
    journal.open()
    record = JobRecord(job_id="j1", epoch=3, incarnation=1, accepted_at=1.0, boot_id="")
    journal.record_launch(record)
    journal.store_prepared_launch(record, encode_plan(make_plan("true")))
    assert journal.take_prepared_launches(boot_id="") == []
    assert list((node_dir / "prepared").iterdir()) == []
    journal.close()


def test_boot_id_is_empty_if_the_system_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **given: object) -> object:
        raise FileNotFoundError

    monkeypatch.setattr(process_table, "_boot_id_cache", [])
    monkeypatch.setattr("builtins.open", fail)
    assert process_table.boot_id() == ""


def test_prepared_launch_is_removed_when_the_jobs_of_a_stopped_agent_are_ended(
    node_dir: Path, make_plan: Callable[..., LaunchPlan]
) -> None:
    """`genie down` ends jobs; none starts after the next `genie up`."""
    journal = Journal(node_dir)
    journal.open()
    record = JobRecord(job_id="j1", epoch=3, incarnation=1, accepted_at=1.0, boot_id="this")
    journal.record_launch(record)
    journal.store_prepared_launch(record, encode_plan(make_plan("true")))
    assert kill_jobs_of_stopped_agent(node_dir) == 0, "the agent runs"
    assert len(journal.take_prepared_launches(boot_id="this")) == 1
    journal.close()
    assert kill_jobs_of_stopped_agent(node_dir) == 0, "no process"
    assert journal.take_prepared_launches(boot_id="this") == []


async def test_plan_is_removed_before_the_shim_is_started(
    controller: FakeController, node_dir: Path, run_agent: RunAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the next agent could start a job a second time."""
    found: list[bool] = []
    real = subprocess.Popen

    def start(command: list[str], **given: object) -> subprocess.Popen[bytes]:
        found.append((node_dir / "prepared" / "j1.1").exists())
        return real(command, **given)  # type: ignore[call-overload, no-any-return]

    async with run_agent():
        monkeypatch.setattr("genie.agent.launcher.subprocess.Popen", start)
        await controller.launch("j1", "true")
        assert (await controller.end_of("j1")).exit_code == 0
    assert found == [False]


async def test_earlier_epoch_of_a_job_is_not_adopted(
    controller: FakeController, node_dir: Path, start_agent_process: StartAgent
) -> None:
    async with start_agent_process() as agent:
        await controller.launch("j1", *STAY)
        job = await wait_for_job_process(node_dir, "j1")
        await kill_and_wait(agent)
    path = node_dir / "jobs" / "j1" / "job.json"
    record = msgspec.json.decode(path.read_bytes(), type=JobRecord)
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(record, epoch=2)))
    before = len(controller.registers)
    async with start_agent_process() as agent:
        await until(lambda: len(controller.registers) > before, what="the next agent registers")
        assert not job.is_alive
        assert controller.registers[-1].running == ()
        assert "ending job j1, epoch 1: this is not its last launch" in agent.output.read_text()


EXECUTOR = """
import json, os, sys, time
path = json.load(open(sys.argv[1]))["endpoint_path"]
open(path + ".new", "w").write('{"port": 4242}')
os.rename(path + ".new", path)
time.sleep(300)
"""


async def test_session_is_adopted_with_its_endpoint(
    controller: FakeController, node_dir: Path, run_agent: RunAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = preparation.prepare_executor

    async def prepare(*args: object, **given: object) -> tuple[str, ...]:
        *_, path = await real(*args, **given)  # type: ignore[arg-type]
        return (sys.executable, "-c", EXECUTOR, path)

    monkeypatch.setattr(preparation, "prepare_executor", prepare)
    async with run_agent() as agent:
        await controller.launch("s1", kind=JobKind.SESSION, ticket_sha256="ab" * 32, has_deadman_timer=False)
        await until(lambda: controller.ready, what="ExecutorReady")
        agent.stop(keep_jobs=True)
    async with run_agent():
        await until(lambda: len(controller.ready) == 2, what="ExecutorReady of the next agent")
        assert controller.ready[0] == controller.ready[1]
        await controller.peer()
        assert controller.heartbeats[-1].running[0].endpoint == controller.ready[0].endpoint


async def test_stopped_agent_can_keep_its_jobs(
    controller: FakeController, node_dir: Path, start_agent_process: StartAgent
) -> None:
    async with start_agent_process() as agent:
        await controller.launch("j1", *STAY)
        job = await wait_for_job_process(node_dir, "j1")
        agent.send_signal(signal.SIGUSR1)
        assert await agent.wait() == 0
    assert job.is_alive
    async with start_agent_process() as agent:
        await until(lambda: controller.registers[-1].running, what="the next agent has adopted it")
        agent.send_signal(signal.SIGTERM)
        assert await agent.wait() == 0
    assert not job.is_alive
