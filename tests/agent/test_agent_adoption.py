"""The next agent of a node adopts running jobs: agents that are killed with SIGKILL."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from genie.agent import leftovers, preparation
from genie.agent.journal import JobRecord, Journal
from genie.agent.launcher import LaunchPlan, encode_plan, kill_jobs_of_stopped_agent
from genie.errors import NodeUnfitError, WorkersMissingError
from genie.model.job import JobKind
from genie.model.messages import ConfirmLaunch, ExitReport, JobOrder
from genie.processes import process_table
from tests.agent.conftest import STAY, WRITE_PID, RunAgent, StartAgent, wait_for_job_process
from tests.fakes.controller import FakeController
from tests.waiting import until

WAIT_FOR_GO = "while [ ! -e go ]; do sleep 0.02; done"
pytestmark = pytest.mark.usefixtures("reap_abandoned_shims")


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


async def test_job_whose_record_has_an_earlier_epoch_is_adopted(
    controller: FakeController, node_dir: Path, start_agent_process: StartAgent
) -> None:
    """A job can damage its record; that of its shim counts."""
    async with start_agent_process() as agent:
        await controller.launch("j1", *STAY)
        await wait_for_job_process(node_dir, "j1")
        await kill_and_wait(agent)
    path = node_dir / "jobs" / "j1" / "job.json"
    record = msgspec.json.decode(path.read_bytes(), type=JobRecord)
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(record, epoch=0)))
    before = len(controller.registers)
    async with start_agent_process():
        await until(lambda: len(controller.registers) > before, what="the next agent registers")
        assert [(one.job_id, one.epoch) for one in controller.registers[-1].running] == [("j1", 1)]


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
