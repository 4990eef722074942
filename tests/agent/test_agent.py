"""The agent with a scripted controller: registration, launches, exits, logs, sessions."""

from __future__ import annotations

import asyncio
import io
import json
import sys
import tarfile
from pathlib import Path

import pytest

from genie.agent import agent, jobs, preparation
from genie.agent.journal import Journal
from genie.errors import (
    AgentRunningError,
    FencedError,
    JobNotFoundError,
    JobStateError,
    LaunchError,
    StoreUnavailableError,
    UsageError,
)
from genie.model.job import CLIENT_LOST_EXIT_CODE, JobKind, JobSpec, Placement
from genie.model.messages import GetBlob, JobOrder, Launch
from genie.model.node import Vendor
from genie.processes import executor_config
from genie.processes.tasks import run_inline
from tests.agent.conftest import STAY, RunAgent, wait_for_job_process
from tests.fakes.agent import make_node_info
from tests.fakes.controller import FakeController
from tests.waiting import until

# --- registration and heartbeats --------------------------------------------------------------


async def test_agent_registers_its_hardware(controller: FakeController, run_agent: RunAgent) -> None:
    async with run_agent():
        await controller.peer()
    node = controller.registers[0].node
    assert (node.node_id, node.incarnation, node.gpu_count) == ("n1", 1, 2)
    assert node.cpus > 0
    assert node.memory_total_bytes > 0
    assert node.host == "127.0.0.1"


async def test_agent_registers_rack_and_labels(controller: FakeController, run_agent: RunAgent) -> None:
    async with run_agent(labels={"disk": "ssd"}, rack="r7"):
        await controller.peer()
    node = controller.registers[0].node
    assert (node.labels, node.rack) == ({"disk": "ssd"}, "r7")


async def test_gpu_memory_of_running_jobs_does_not_count_as_outside_use(
    controller: FakeController, run_agent: RunAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent, "HARDWARE_POLL_INTERVAL_S_MIN", 0.05)

    def outside() -> list[int]:
        return [gpu.memory_outside_bytes for gpu in controller.heartbeats[-1].node.gpus]

    async with run_agent():
        await until(lambda: bool(controller.heartbeats), what="a heartbeat")
        assert outside() == [1000, 1000]
        order = await controller.launch("j1", *STAY, gpu_ids=(1,))
        await until(lambda: outside() == [1000, 0], what="a reading with the job on its GPU")
        await controller.order_kill(order)
        await controller.end_of("j1")
        await until(lambda: outside() == [1000, 1000], what="a reading without it")


async def test_every_agent_start_increments_the_incarnation(
    controller: FakeController, run_agent: RunAgent
) -> None:
    for _ in range(3):
        async with run_agent():
            await controller.peer()
    assert [request.node.incarnation for request in controller.registers] == [1, 2, 3]


async def test_reconnection_of_the_agent_keeps_the_incarnation(
    controller: FakeController, run_agent: RunAgent
) -> None:
    async with run_agent():
        (await controller.peer()).close()
        await until(lambda: len(controller.registers) >= 2, what="a second registration")
    assert {request.node.incarnation for request in controller.registers} == {1}


async def test_second_agent_on_the_same_node_directory_is_rejected(
    controller: FakeController, run_agent: RunAgent, node_dir: Path
) -> None:
    async with run_agent():
        await controller.peer()
        other = Journal(node_dir)
        with pytest.raises(AgentRunningError, match="another agent"):
            other.open()


async def test_agent_stops_when_its_registration_is_fenced(
    controller: FakeController, run_agent: RunAgent
) -> None:
    controller.register_error = FencedError("incarnation 1 was replaced by 2")
    with pytest.raises(ExceptionGroup) as caught:
        async with run_agent():
            await until(lambda: False)
    assert caught.group_contains(FencedError, match="replaced by 2")


# --- launches ---------------------------------------------------------------------------------


async def test_job_is_confirmed_then_run_then_reported(
    controller: FakeController, run_agent: RunAgent
) -> None:
    async with run_agent():
        order = await controller.launch("j1", "/bin/sh", "-c", "echo hello; exit 3")
        end = await controller.end_of("j1")
        assert (end.epoch, end.exit_code, end.reason) == (order.placement.epoch, 3, "exit code 3")
        assert await controller.whole_log("j1") == "hello\n"
    assert [(one.job_id, one.epoch, one.incarnation) for one in controller.confirms] == [("j1", 1, 1)]
    assert controller.confirms[0].wait_s > 1, "it waits at the controller for the other workers of a gang"


async def test_every_heartbeat_lists_a_job_as_running_or_ended(
    controller: FakeController, run_agent: RunAgent, node_dir: Path
) -> None:
    async with run_agent():
        before = len(controller.heartbeats)
        await controller.launch("j1", "/bin/sh", "-c", "while [ ! -e go ]; do sleep 0.02; done")
        confirmed = len(controller.heartbeats)
        await until(lambda: len(controller.heartbeats) >= confirmed + 3, what="heartbeats")
        (node_dir / "jobs" / "j1" / "work" / "go").touch()
        await controller.end_of("j1")
    heartbeats = [
        ({job.job_id for job in beat.running}, {report.job_id for report in beat.exits})
        for beat in controller.heartbeats[max(before, confirmed) :]
    ]
    heartbeats = heartbeats[: heartbeats.index((set(), {"j1"})) + 1]
    assert len(heartbeats) > 2
    assert all(running | ended == {"j1"} and not running & ended for running, ended in heartbeats)


async def test_heartbeats_report_the_elapsed_time_of_a_job(
    controller: FakeController, run_agent: RunAgent
) -> None:
    async with run_agent():
        await controller.launch("j1", *STAY)

        def elapsed_s() -> list[float]:
            return [job.elapsed_s for beat in controller.heartbeats for job in beat.running]

        await until(lambda: sum(seconds > 0 for seconds in elapsed_s()) > 2)
        assert elapsed_s() == sorted(elapsed_s())


async def test_job_sees_its_gpus_and_no_secrets_of_the_agent(
    controller: FakeController, run_agent: RunAgent, node_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GENIE_TOKEN", "genie.owner.secret")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    dump = "import json, os; print(json.dumps(dict(os.environ)))"
    async with run_agent():
        given = {"COLOUR": "blue", "CUDA_VISIBLE_DEVICES": "all", "GENIE_JOB_ID": "other"}
        await controller.launch("j1", sys.executable, "-c", dump, gpu_ids=(1,), env=given)
        env = json.loads(await controller.whole_log("j1"))
    assert env["CUDA_VISIBLE_DEVICES"] == "GPU-1"
    assert (env["GENIE_JOB_ID"], env["GENIE_JOB_NODE"], env["GENIE_JOB_GPUS"]) == ("j1", "n1", "1")
    assert env["COLOUR"] == "blue"
    assert env["TMPDIR"] == str(node_dir / "jobs" / "j1" / "tmp")
    assert "GENIE_TOKEN" not in env
    assert "GENIE_STATE_DIR" not in env
    assert "AWS_SECRET_ACCESS_KEY" not in env


async def test_job_without_accelerators_sees_none(controller: FakeController, run_agent: RunAgent) -> None:
    async with run_agent():
        await controller.launch("j1", "/bin/sh", "-c", 'echo "<$CUDA_VISIBLE_DEVICES>"')
        assert await controller.whole_log("j1") == "<>\n"


async def test_job_on_missing_accelerators_does_not_start(
    controller: FakeController, run_agent: RunAgent
) -> None:
    async with run_agent():
        await controller.launch("j1", "true", gpu_ids=(7,))
        end = await controller.end_of("j1")
    assert end.exit_code is None
    assert "accelerators [7], but this node has [0, 1]" in end.reason
    assert controller.confirms == []


async def test_job_runs_in_its_uploaded_working_directory(
    controller: FakeController, run_agent: RunAgent
) -> None:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:") as archive:
        info = tarfile.TarInfo("big.txt")
        info.size = 1_200_000
        archive.addfile(info, io.BytesIO(b"a" * info.size))
    async with run_agent():
        workdir = controller.keep_blob(file.getvalue())
        await controller.launch("j1", "wc", "-c", "big.txt", workdir=workdir)
        assert await controller.whole_log("j1") == "1200000 big.txt\n"


async def test_download_of_a_working_directory_does_not_delay_other_jobs(
    controller: FakeController, run_agent: RunAgent
) -> None:
    async with run_agent():
        large, small = (controller.keep_blob(_make_archive(size)) for size in (1_200_000, 3))
        released = controller.held_blobs[large.digest] = asyncio.Event()
        await controller.launch("j1", "true", workdir=large)
        await controller.launch("j2", "true", workdir=small)
        assert (await controller.end_of("j2")).exit_code == 0
        assert [confirm.job_id for confirm in controller.confirms] == ["j2"]
        released.set()
        assert (await controller.end_of("j1")).exit_code == 0


async def test_number_of_concurrent_downloads_is_bounded(
    controller: FakeController, run_agent: RunAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "PREPARING_JOBS_MAX", 1)
    async with run_agent():
        first, second = (controller.keep_blob(_make_archive(size)) for size in (3, 4))
        released = controller.held_blobs[first.digest] = asyncio.Event()
        await controller.launch("j1", "true", workdir=first)
        await controller.launch("j2", "true", workdir=second)
        await until(lambda: len(controller.heartbeats) > 2)
        assert second.digest not in _requested_blobs(controller)
        released.set()
        assert (await controller.end_of("j2")).exit_code == 0
        assert _requested_blobs(controller) == [first.digest, second.digest]


def _requested_blobs(controller: FakeController) -> list[str]:
    return [request.digest for request in controller.asked if isinstance(request, GetBlob)]


def _make_archive(size_bytes: int) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:") as archive:
        info = tarfile.TarInfo("data")
        info.size = size_bytes
        archive.addfile(info, io.BytesIO(b"a" * size_bytes))
    return file.getvalue()


async def test_job_with_damaged_working_directory_does_not_start(
    controller: FakeController, run_agent: RunAgent
) -> None:
    async with run_agent():
        workdir = controller.keep_blob(b"something")
        controller.blobs[workdir.digest] = b"otherwise"
        await controller.launch("j1", "true", workdir=workdir)
        assert "its digest does not match" in (await controller.end_of("j1")).reason
    assert controller.confirms == []


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"leader_token": 4}, FencedError, "leader token, revision 4"),
        ({"incarnation": 9}, FencedError, "incarnation 9"),
        ({"node_id": "n2"}, LaunchError, "for node n2"),
    ],
)
async def test_launch_for_another_node_or_incarnation_is_rejected(
    controller: FakeController,
    run_agent: RunAgent,
    changes: dict[str, object],
    error: type[Exception],
    message: str,
) -> None:
    async with run_agent():
        with pytest.raises(error, match=message):
            await controller.launch("j1", "true", **changes)
        assert controller.heartbeats[-1].running == ()


@pytest.mark.parametrize("epoch", [10, 9])
async def test_launch_with_an_old_epoch_is_rejected(
    controller: FakeController, run_agent: RunAgent, epoch: int
) -> None:
    async with run_agent():
        await controller.launch("j1", "true", epoch=10)
        await controller.end_of("j1")
        with pytest.raises(FencedError, match="this node has already seen 10"):
            await controller.launch("j1", "true", epoch=epoch)
        await controller.launch("j1", "true", epoch=11)
        await until(lambda: controller.exits["j1"].epoch == 11, what="the later attempt")


async def test_agent_rejects_an_older_leader_token_after_its_restart(
    controller: FakeController, run_agent: RunAgent
) -> None:
    controller.leader_token = 8
    async with run_agent():
        await controller.peer()
    controller.leader_token = 7
    async with run_agent():
        await until(lambda: len(controller.registers) >= 3, what="attempts to register")
        assert len(controller.heartbeats) == len(
            [one for one in controller.heartbeats if one.incarnation == 1]
        )
        controller.leader_token = 9
        await controller.peer()


async def test_launch_is_rejected_while_an_earlier_run_has_not_ended(
    controller: FakeController, run_agent: RunAgent
) -> None:
    async with run_agent():
        await controller.launch("j1", *STAY)
        with pytest.raises(LaunchError, match="has not ended on this node yet"):
            await controller.launch("j1", *STAY)


async def test_unconfirmed_launch_does_not_start(
    controller: FakeController, run_agent: RunAgent, node_dir: Path
) -> None:
    controller.confirm_error = JobStateError("launch 1 of job j1 is no longer valid")
    async with run_agent():
        await controller.launch("j1", "touch", "ran")
        end = await controller.end_of("j1")
    assert end.exit_code is None
    assert "launch 1 of job j1 is no longer valid" in end.reason
    assert not (node_dir / "jobs" / "j1" / "work" / "ran").exists()


# --- exits ------------------------------------------------------------------------------------


async def test_killed_job_is_reported_with_the_reason_of_the_kill(
    controller: FakeController, run_agent: RunAgent, node_dir: Path
) -> None:
    async with run_agent():
        order = await controller.launch("j1", *STAY)
        job = await wait_for_job_process(node_dir, "j1")
        await controller.order_kill(order, reason="cancelled by its owner")
        end = await controller.end_of("j1")
    assert (end.exit_code, end.reason) == (None, "cancelled by its owner")
    assert not job.is_alive


async def test_kill_with_another_epoch_is_ignored(
    controller: FakeController, run_agent: RunAgent, node_dir: Path
) -> None:
    async with run_agent():
        order = await controller.launch("j1", *STAY, epoch=5)
        job = await wait_for_job_process(node_dir, "j1")
        controller.kill.append(JobOrder(job_id="j1", epoch=4))
        await controller.peer()
        assert job.is_alive
        assert order.placement.epoch == controller.heartbeats[-1].running[0].epoch


async def test_kill_during_preparation_prevents_the_start(
    controller: FakeController, run_agent: RunAgent, node_dir: Path
) -> None:
    controller.confirm_error = StoreUnavailableError("not now")  # retried
    async with run_agent():
        order = await controller.launch("j1", "touch", "ran")
        await until(lambda: len(controller.confirms) > 1, what="a second attempt to confirm")
        await controller.order_kill(order)
        end = await controller.end_of("j1")
    assert end.reason == "cancelled by its owner"
    assert not (node_dir / "jobs" / "j1" / "work" / "ran").exists()


async def test_job_that_the_controller_does_not_know_is_killed(
    controller: FakeController, run_agent: RunAgent, node_dir: Path
) -> None:
    async with run_agent():
        order = await controller.launch("j1", *STAY)
        job = await wait_for_job_process(node_dir, "j1")
        controller.kill.append(JobOrder(job_id="j1", epoch=order.placement.epoch, reason="not in the ledger"))
        assert (await controller.end_of("j1")).reason == "ended by Genie: not in the ledger"
    assert not job.is_alive


async def test_exit_is_reported_until_it_is_settled(
    controller: FakeController, run_agent: RunAgent, node_dir: Path
) -> None:
    controller.settle = False
    async with run_agent():
        await controller.launch("j1", "true")
        await controller.end_of("j1")
        count = len(controller.heartbeats)
        await until(lambda: len(controller.heartbeats) > count + 2)
        assert all(beat.exits for beat in controller.heartbeats[count:])
        assert (node_dir / "jobs" / "j1" / "exit.json").exists()
        controller.settle = True
        await until(lambda: not controller.heartbeats[-1].exits, what="it is settled")
        assert not (node_dir / "jobs" / "j1" / "exit.json").exists()


async def test_unsettled_exit_is_reported_after_an_agent_restart(
    controller: FakeController, run_agent: RunAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent, "LEAVE_REQUEST_TIMEOUT_S", 0.1)
    controller.settle = False
    async with run_agent():
        await controller.launch("j1", "/bin/sh", "-c", "exit 6")
        await controller.end_of("j1")
    controller.exits.clear()
    async with run_agent():
        await controller.peer()
    assert [(one.job_id, one.exit_code) for one in controller.registers[-1].exits] == [("j1", 6)]


async def test_stopping_the_agent_ends_its_jobs_and_reports_them(
    controller: FakeController, run_agent: RunAgent, node_dir: Path
) -> None:
    async with run_agent():
        await controller.launch("j1", *STAY)
        job = await wait_for_job_process(node_dir, "j1")
    assert not job.is_alive
    assert controller.exits["j1"].reason == "ended by Genie: the agent was stopped"


async def test_stopping_the_agent_does_not_wait_for_an_unresponsive_controller(
    controller: FakeController, run_agent: RunAgent, node_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent, "LEAVE_REQUEST_TIMEOUT_S", 0.1)
    async with run_agent():
        await controller.launch("j1", *STAY)
        await wait_for_job_process(node_dir, "j1")
        controller.silent = True
    assert (node_dir / "jobs" / "j1" / "exit.json").exists()


# --- logs -------------------------------------------------------------------------------------


async def test_log_can_be_followed_while_the_job_runs(
    controller: FakeController, run_agent: RunAgent, node_dir: Path
) -> None:
    async with run_agent():
        await controller.launch(
            "j1", "/bin/sh", "-c", "echo one; while [ ! -e go ]; do sleep 0.02; done; echo two"
        )
        first = await controller.log("j1", wait_s=5)
        assert (first.data, first.eof) == (b"one\n", False)
        (node_dir / "jobs" / "j1" / "work" / "go").touch()
        second = await controller.log("j1", offset=first.next_offset, wait_s=5)
        assert (second.data, second.start_offset) == (b"two\n", 4)
        end = await controller.log("j1", offset=second.next_offset, wait_s=5)
        assert (end.data, end.eof) == (b"", True)


async def test_log_of_an_earlier_run_is_read_by_epoch(
    controller: FakeController, run_agent: RunAgent, node_dir: Path
) -> None:
    async with run_agent():
        first = await controller.launch("j1", "/bin/sh", "-c", "echo one")
        await controller.end_of("j1")
        controller.exits.clear()
        second = await controller.launch("j1", *STAY)
        await wait_for_job_process(node_dir, "j1")
        old = await controller.log("j1", epoch=first.placement.epoch)
        assert old.data == b"one\n"
        end = await controller.log("j1", epoch=first.placement.epoch, offset=4)
        assert end.eof, "that run has ended, though the job runs again"
        new = await controller.log("j1", epoch=second.placement.epoch, wait_s=5)
        assert (new.data, (await controller.log("j1")).data) == (b"here\n", b"here\n")
        with pytest.raises(JobNotFoundError):
            await controller.log("j1", epoch=999)


async def test_reading_a_missing_log_fails(controller: FakeController, run_agent: RunAgent) -> None:
    async with run_agent():
        with pytest.raises(JobNotFoundError, match="no log of j9"):
            await controller.log("j9")


@pytest.mark.parametrize("job_id", ["../n1", "..", "a/b", ""])
async def test_log_request_cannot_leave_the_job_directory(
    controller: FakeController, run_agent: RunAgent, job_id: str
) -> None:
    async with run_agent():
        with pytest.raises(UsageError, match="job ID"):
            await controller.log(job_id)


async def test_logs_of_the_newest_jobs_are_kept(
    controller: FakeController, run_agent: RunAgent, node_dir: Path
) -> None:
    async with run_agent(jobs_kept=2):
        for number in range(4):
            await controller.launch(f"j{number}", "true")
            await controller.end_of(f"j{number}")
        await until(lambda: {path.name for path in (node_dir / "jobs").iterdir()} == {"j2", "j3"})


# --- jobs that damage their directories ---------------------------------------------------------

SPOILING = [
    "mkdir $GENIE_JOB_DIR/executor.key",
    "mkdir $GENIE_JOB_DIR/settled.json",
    "rm -f $GENIE_JOB_DIR/exit.json.new; mkdir -p $GENIE_JOB_DIR/exit.json/x",
    "mkfifo $GENIE_JOB_DIR/s; mv -f $GENIE_JOB_DIR/s $GENIE_JOB_DIR/started.json",
    "rm $GENIE_JOB_DIR/job.json; mkfifo $GENIE_JOB_DIR/job.json",
    "cd /; rm -r $GENIE_JOB_DIR; echo file > $GENIE_JOB_DIR",
    "cd /; rm -r $GENIE_JOB_DIR; ln -s /nowhere $GENIE_JOB_DIR",
    "ln -s /dev/zero $GENIE_JOB_DIR/log/00.log; mkdir $GENIE_JOB_DIR/log/²2.log",
]


@pytest.mark.parametrize("script", SPOILING)
async def test_damaged_job_directory_does_not_affect_other_jobs(
    controller: FakeController, run_agent: RunAgent, node_dir: Path, script: str
) -> None:
    for start in range(2):
        async with run_agent():
            if start == 0:
                await controller.launch("j1", "/bin/sh", "-c", f"{script}; exit 5")
                assert (await controller.end_of("j1")).exit_code == 5
                await until(lambda: not controller.heartbeats[-1].exits, what="it is settled")
            await controller.launch(f"next-{start}", "true")
            assert (await controller.end_of(f"next-{start}")).exit_code == 0
    assert controller.registers[-1].exits == ()


async def test_job_with_damaged_directory_can_run_again(
    controller: FakeController, run_agent: RunAgent, node_dir: Path
) -> None:
    async with run_agent():
        await controller.launch("j1", "/bin/sh", "-c", "cd /; rm -r $GENIE_JOB_DIR; echo > $GENIE_JOB_DIR")
        await controller.end_of("j1")
        controller.exits.clear()
        await controller.launch("j1", "/bin/sh", "-c", "exit 6", epoch=9)
        assert (await controller.end_of("j1")).exit_code == 6
        await until(lambda: {path.name for path in (node_dir / "jobs").iterdir()} == {"j1"})


async def test_exit_reason_is_bounded_for_an_archive_with_a_long_name(
    controller: FakeController, run_agent: RunAgent, caplog: pytest.LogCaptureFixture
) -> None:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:", format=tarfile.GNU_FORMAT) as archive:
        archive.addfile(tarfile.TarInfo("n" * 80_000))
    async with run_agent():
        await controller.launch("j1", "true", workdir=controller.keep_blob(file.getvalue()))
        assert (await controller.end_of("j1")).exit_code is None
    assert max(len(record.getMessage()) for record in caplog.records) < 1000


# --- sessions ---------------------------------------------------------------------------------

LISTENER = """
import json, os, sys, time
config = json.load(open(sys.argv[1]))
assert config["ticket_sha256"] == "ab" * 32, config
with open(config["endpoint_path"] + ".new", "w") as file: json.dump({"port": 4242}, file)
os.rename(config["endpoint_path"] + ".new", config["endpoint_path"])
time.sleep(300)
"""


@pytest.fixture
def _replace_executor_by_listener(monkeypatch: pytest.MonkeyPatch) -> None:
    real = preparation.prepare_executor

    async def prepare(*args: object, **given: object) -> tuple[str, ...]:
        *_, path = await real(*args, **given)  # type: ignore[arg-type]
        return (sys.executable, "-c", LISTENER, path)

    monkeypatch.setattr(preparation, "prepare_executor", prepare)


@pytest.mark.usefixtures("_replace_executor_by_listener")
async def test_endpoint_is_reported_when_the_executor_listens(
    controller: FakeController, run_agent: RunAgent, node_dir: Path
) -> None:
    async with run_agent():
        await controller.launch("s1", kind=JobKind.SESSION, gpu_ids=(1,), ticket_sha256="ab" * 32)
        await until(lambda: controller.ready, what="ExecutorReady")
        endpoint = controller.ready[0].endpoint
        assert (endpoint.host, endpoint.port) == ("127.0.0.1", 4242)
        assert endpoint.server_name == "s1.executor.genie.internal"
        await controller.peer()
        assert controller.heartbeats[-1].running[0].endpoint == endpoint
        config = json.loads((node_dir / "jobs" / "s1" / "executor.json").read_text())
        assert (config["vendor"], config["device_index"], config["listen_host"]) == ("nvidia", 0, "127.0.0.1")
        assert (config["certificate_path"], config["ca_path"]) == ("", ""), "the cluster has no TLS"
    assert not (node_dir / "jobs" / "s1" / "executor.json").exists()


@pytest.mark.parametrize(
    ("vendor", "cpus", "looks"),
    [(Vendor.NVIDIA, 16, True), (Vendor.NVIDIA, 4, False), (Vendor.CPU, 16, False)],
)
async def test_executor_spins_only_if_cores_are_free(
    vendor: Vendor, cpus: int, looks: bool, tmp_path: Path
) -> None:
    node = make_node_info("n", gpus=2, vendor=vendor, cpus=cpus)
    launch = Launch(
        job_id="s1",
        tenant="default",
        spec=JobSpec(name="s1", command=(), kind=JobKind.SESSION),
        placement=Placement(node_id="n", incarnation=1, gpu_ids=(0,), epoch=1),
        leader_token=1,
        ticket_sha256="ab" * 32,
    )

    async def no_call(request: object) -> object:
        raise AssertionError("without TLS there is nothing to be signed")

    *_, path = await preparation.prepare_executor(
        no_call,  # type: ignore[arg-type]
        launch,
        directory=tmp_path,
        ca_path=None,
        listen_host="127.0.0.1",
        memory_bytes_max=0,
        op_libraries={"mylib": "/opt/mylib.so"},
        node=node,
        offload=run_inline,
    )
    written = executor_config.read(Path(path))
    assert (written.spin_us > 0) is looks
    assert written.op_libraries == {"mylib": "/opt/mylib.so"}


BUSY = """
import json, pathlib, sys, time
config = json.load(open(sys.argv[1]))
pathlib.Path(config["status_path"]).write_text("compiling its library")
while not pathlib.Path(config["endpoint_path"] + ".stop").exists(): time.sleep(0.01)
pathlib.Path(config["status_path"]).write_text("there is no C++ compiler (install one)")
sys.exit(3)
"""


async def test_heartbeats_report_what_an_executor_does_before_it_listens(
    controller: FakeController, run_agent: RunAgent, node_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = preparation.prepare_executor

    async def prepare(*args: object, **given: object) -> tuple[str, ...]:
        *_, path = await real(*args, **given)  # type: ignore[arg-type]
        return (sys.executable, "-c", BUSY, path)

    monkeypatch.setattr(preparation, "prepare_executor", prepare)
    async with run_agent():
        await controller.launch("s1", kind=JobKind.SESSION, ticket_sha256="ab" * 32)
        await until(
            lambda: any(
                job.status_note == "compiling its library" for job in controller.heartbeats[-1].running
            ),
            what="a heartbeat with the note",
        )
        (node_dir / "jobs" / "s1" / f"{preparation.EXECUTOR_ENDPOINT_FILE}.stop").touch()
        end = await controller.end_of("s1")
    assert end.exit_code == 3
    assert end.reason.endswith(": there is no C++ compiler (install one)")


ABANDONED = """
import json, os, pathlib, sys, time
config = json.load(open(sys.argv[1]))
pathlib.Path(config["endpoint_path"] + ".new").write_text('{"port": 4242}')
os.rename(config["endpoint_path"] + ".new", config["endpoint_path"])
while not pathlib.Path(config["endpoint_path"] + ".stop").exists(): time.sleep(0.01)
pathlib.Path(config["status_path"]).write_text("the client disconnected")
sys.exit(74)
"""


async def test_loss_of_the_client_is_the_reason_of_the_exit(
    controller: FakeController, run_agent: RunAgent, node_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = preparation.prepare_executor

    async def prepare(*args: object, **given: object) -> tuple[str, ...]:
        *_, path = await real(*args, **given)  # type: ignore[arg-type]
        return (sys.executable, "-c", ABANDONED, path)

    monkeypatch.setattr(preparation, "prepare_executor", prepare)
    async with run_agent():
        await controller.launch("s1", kind=JobKind.SESSION, ticket_sha256="ab" * 32)
        await until(lambda: controller.ready, what="ExecutorReady")
        (node_dir / "jobs" / "s1" / f"{preparation.EXECUTOR_ENDPOINT_FILE}.stop").touch()
        end = await controller.end_of("s1")
    assert (end.exit_code, end.reason) == (CLIENT_LOST_EXIT_CODE, "exit code 74: the client disconnected")


async def test_failed_executor_start_is_reported_with_its_reason(
    controller: FakeController, run_agent: RunAgent
) -> None:
    async with run_agent():
        await controller.launch("s1", kind=JobKind.SESSION, ticket_sha256="not a hash")
        end = await controller.end_of("s1", timeout_s=20)
    assert end.exit_code != 0
