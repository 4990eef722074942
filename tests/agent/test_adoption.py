"""The next agent of a node adopts running jobs: launchers and real shims."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import pytest

from genie.agent import launcher, leftovers, shim
from genie.agent.journal import JobRecord, Journal
from genie.agent.launcher import LaunchPlan, ShimLauncher
from genie.agent.logs import read_log_chunk
from genie.model.messages import ExitReport
from genie.processes.process_identity import ProcessIdentity
from tests.agent.conftest import STAY, WRITE_PID, wait_for_job_process
from tests.waiting import until

WAIT_FOR_GO = "while [ ! -e go ]; do sleep 0.02; done"
LONG_S = 60.0

MakeAdoptablePlan = Callable[..., LaunchPlan]
MakeLauncher = Callable[[], ShimLauncher]


pytestmark = pytest.mark.usefixtures("reap_abandoned_shims")


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
    assert "could not adopt the job of the shim at job-2.7: its greeting names job-1.7" in caplog.text


async def test_only_the_last_launch_of_a_job_is_adopted(
    make_launcher: MakeLauncher, make_adoptable_plan: MakeAdoptablePlan, tmp_path: Path
) -> None:
    """Also if an agent has left two, and the names of their sockets sort the other way."""
    shims: dict[int, ProcessIdentity] = {}
    first = make_adoptable_plan(*STAY)
    for epoch in (9, 10):
        record = JobRecord(job_id="job-1", epoch=epoch, incarnation=1, accepted_at=1.0)
        socket_path = tmp_path / "shims" / f"job-1.{epoch}"
        plan = replace(first, epoch=epoch, record=record, socket_path=socket_path)
        agent = make_launcher()
        await agent.start_job(plan, deadman_expiry_s=time.monotonic() + LONG_S)
        started = plan.directory / "started.json"
        await until(lambda path=started: leftovers.read_start_record(path), what="the job has started")
        shims[epoch], _ = leftovers.read_start_record(started)
        agent.close()
        if epoch == 9:  # the other one writes it again
            (tmp_path / "first").mkdir()
            started.rename(tmp_path / "first" / "started.json")
    (job,) = await adopt_all(make_launcher(), tmp_path)
    assert job.record.epoch == 10
    assert (shims[9].is_alive, shims[10].is_alive) == (False, True)
    assert [path.name for path in (tmp_path / "shims").iterdir()] == ["job-1.10"]


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
