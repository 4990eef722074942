"""The agent against a scripted controller: registration, launches, refusals, ends, logs, sessions."""

from __future__ import annotations

import io
import json
import sys
import tarfile
from pathlib import Path

import pytest

from genie.agent import agent, preparation
from genie.agent.executor import config as executor_config
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
from genie.model.job import JobKind, JobSpec, Placement
from genie.model.messages import JobOrder, Launch
from genie.model.node import Vendor
from tests.agent.conftest import STAY, RunAgent, job_process
from tests.fakes.agent import node_info
from tests.fakes.controller import FakeController
from tests.waiting import until

# --- registration and heartbeats --------------------------------------------------------------


async def test_a_node_registers_with_what_it_has(controller: FakeController, run_agent: RunAgent) -> None:
    async with run_agent():
        await controller.peer()
    node = controller.registers[0].node
    assert (node.node_id, node.incarnation, node.gpu_count) == ("n1", 1, 2)
    assert node.cpus > 0
    assert node.memory_total_bytes > 0
    assert node.host == "127.0.0.1"


async def test_a_node_says_where_it_stands_and_what_it_is_labelled(
    controller: FakeController, run_agent: RunAgent
) -> None:
    async with run_agent(labels={"disk": "ssd"}, rack="r7"):
        await controller.peer()
    node = controller.registers[0].node
    assert (node.labels, node.rack) == ({"disk": "ssd"}, "r7")


async def test_what_jobs_use_of_a_gpu_is_not_outside_while_they_run(
    controller: FakeController, run_agent: RunAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent, "INVENTORY_S_MIN", 0.05)

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


async def test_every_life_has_a_higher_incarnation(controller: FakeController, run_agent: RunAgent) -> None:
    for _ in range(3):
        async with run_agent():
            await controller.peer()
    assert [request.node.incarnation for request in controller.registers] == [1, 2, 3]


async def test_a_reconnection_is_the_same_life(controller: FakeController, run_agent: RunAgent) -> None:
    async with run_agent():
        (await controller.peer()).close()
        await until(lambda: len(controller.registers) == 2, what="a second registration")
    assert {request.node.incarnation for request in controller.registers} == {1}


async def test_two_agents_cannot_be_the_same_node(
    controller: FakeController, run_agent: RunAgent, node_dir: Path
) -> None:
    async with run_agent():
        await controller.peer()
        other = Journal(node_dir)
        with pytest.raises(AgentRunningError, match="another agent"):
            other.open()


async def test_a_node_that_was_replaced_stops(controller: FakeController, run_agent: RunAgent) -> None:
    controller.register_error = FencedError("incarnation 1 was replaced by 2")
    with pytest.raises(ExceptionGroup) as caught:
        async with run_agent():
            await until(lambda: False, timeout_s=5)
    assert caught.group_contains(FencedError, match="replaced by 2")


# --- launches ---------------------------------------------------------------------------------


async def test_a_job_is_confirmed_run_and_reported(controller: FakeController, run_agent: RunAgent) -> None:
    async with run_agent():
        order = await controller.launch("j1", "/bin/sh", "-c", "echo hello; exit 3")
        end = await controller.end_of("j1")
        assert (end.epoch, end.exit_code, end.reason) == (order.placement.epoch, 3, "exit code 3")
        assert await controller.whole_log("j1") == "hello\n"
    assert [(one.job_id, one.epoch, one.incarnation) for one in controller.confirms] == [("j1", 1, 1)]


async def test_a_job_is_in_every_heartbeat_until_its_end_is(
    controller: FakeController, run_agent: RunAgent
) -> None:
    async with run_agent():
        before = len(controller.heartbeats)
        await controller.launch("j1", "sleep", "0.3")
        confirmed = len(controller.heartbeats)
        await controller.end_of("j1")
    told = [
        ({job.job_id for job in beat.running}, {report.job_id for report in beat.exits})
        for beat in controller.heartbeats[max(before, confirmed) :]
    ]
    told = told[: told.index((set(), {"j1"})) + 1]
    assert len(told) > 2
    assert all(running | ended == {"j1"} and not running & ended for running, ended in told)


async def test_a_job_sees_its_gpus_and_nothing_of_the_agent(
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


async def test_a_job_without_accelerators_sees_none(controller: FakeController, run_agent: RunAgent) -> None:
    async with run_agent():
        await controller.launch("j1", "/bin/sh", "-c", 'echo "<$CUDA_VISIBLE_DEVICES>"')
        assert await controller.whole_log("j1") == "<>\n"


async def test_a_job_for_accelerators_that_are_not_here_does_not_start(
    controller: FakeController, run_agent: RunAgent
) -> None:
    async with run_agent():
        await controller.launch("j1", "true", gpu_ids=(7,))
        end = await controller.end_of("j1")
    assert end.exit_code is None
    assert "accelerators [7], and this node has [0, 1]" in end.reason
    assert controller.confirms == []


async def test_a_job_runs_in_the_directory_that_was_sent_along(
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


async def test_a_directory_that_was_damaged_on_the_way_starts_nothing(
    controller: FakeController, run_agent: RunAgent
) -> None:
    async with run_agent():
        workdir = controller.keep_blob(b"something")
        controller.blobs[workdir.digest] = b"otherwise"
        await controller.launch("j1", "true", workdir=workdir)
        assert "its digest is another" in (await controller.end_of("j1")).reason
    assert controller.confirms == []


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"leader_token": 4}, FencedError, "leader token 4"),
        ({"incarnation": 9}, FencedError, "incarnation 9"),
        ({"node_id": "n2"}, LaunchError, "for node n2"),
    ],
)
async def test_an_order_that_is_not_for_this_life_of_this_node_is_refused(
    controller: FakeController,
    run_agent: RunAgent,
    changes: dict[str, object],
    error: type[Exception],
    words: str,
) -> None:
    async with run_agent():
        with pytest.raises(error, match=words):
            await controller.launch("j1", "true", **changes)
        assert controller.heartbeats[-1].running == ()


@pytest.mark.parametrize("epoch", [10, 9])
async def test_an_order_that_was_seen_before_is_refused(
    controller: FakeController, run_agent: RunAgent, epoch: int
) -> None:
    async with run_agent():
        await controller.launch("j1", "true", epoch=10)
        await controller.end_of("j1")
        with pytest.raises(FencedError, match="this node has seen 10"):
            await controller.launch("j1", "true", epoch=epoch)
        await controller.launch("j1", "true", epoch=11)
        await until(lambda: controller.exits["j1"].epoch == 11, what="the later attempt")


async def test_a_leader_token_is_remembered_over_lives(
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


async def test_a_second_attempt_waits_for_the_end_of_the_first(
    controller: FakeController, run_agent: RunAgent
) -> None:
    async with run_agent():
        await controller.launch("j1", *STAY)
        with pytest.raises(LaunchError, match="has not ended here yet"):
            await controller.launch("j1", *STAY)


async def test_a_launch_that_is_not_confirmed_starts_nothing(
    controller: FakeController, run_agent: RunAgent, node_dir: Path
) -> None:
    controller.confirm_error = JobStateError("launch 1 of job j1 is void")
    async with run_agent():
        await controller.launch("j1", "touch", "ran")
        end = await controller.end_of("j1")
    assert end.exit_code is None
    assert "launch 1 of job j1 is void" in end.reason
    assert not (node_dir / "jobs" / "j1" / "work" / "ran").exists()


# --- ends -------------------------------------------------------------------------------------


async def test_a_kill_ends_the_job_with_its_reason(
    controller: FakeController, run_agent: RunAgent, node_dir: Path
) -> None:
    async with run_agent():
        order = await controller.launch("j1", *STAY)
        job = await job_process(node_dir, "j1")
        await controller.order_kill(order, reason="cancelled by its owner")
        end = await controller.end_of("j1")
    assert (end.exit_code, end.reason) == (None, "cancelled by its owner")
    assert not job.is_alive


async def test_a_kill_of_another_attempt_is_left_alone(
    controller: FakeController, run_agent: RunAgent, node_dir: Path
) -> None:
    async with run_agent():
        order = await controller.launch("j1", *STAY, epoch=5)
        job = await job_process(node_dir, "j1")
        controller.kill.append(JobOrder(job_id="j1", epoch=4))
        await controller.peer()
        assert job.is_alive
        assert order.placement.epoch == controller.heartbeats[-1].running[0].epoch


async def test_a_kill_during_the_preparation_comes_before_the_start(
    controller: FakeController, run_agent: RunAgent, node_dir: Path
) -> None:
    controller.confirm_error = StoreUnavailableError("not now")  # asked again and again
    async with run_agent():
        order = await controller.launch("j1", "touch", "ran")
        await until(lambda: len(controller.confirms) > 1, what="a second attempt to confirm")
        await controller.order_kill(order)
        end = await controller.end_of("j1")
    assert end.reason == "cancelled by its owner"
    assert not (node_dir / "jobs" / "j1" / "work" / "ran").exists()


async def test_what_the_ledger_does_not_hold_is_killed(
    controller: FakeController, run_agent: RunAgent, node_dir: Path
) -> None:
    async with run_agent():
        order = await controller.launch("j1", *STAY)
        job = await job_process(node_dir, "j1")
        controller.kill.append(JobOrder(job_id="j1", epoch=order.placement.epoch, reason="not in the ledger"))
        assert (await controller.end_of("j1")).reason == "ended by Genie: not in the ledger"
    assert not job.is_alive


async def test_an_end_is_told_until_it_is_settled(
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


async def test_an_end_that_was_not_settled_is_told_by_the_next_life(
    controller: FakeController, run_agent: RunAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent, "LAST_WORDS_S", 0.1)
    controller.settle = False
    async with run_agent():
        await controller.launch("j1", "/bin/sh", "-c", "exit 6")
        await controller.end_of("j1")
    controller.exits.clear()
    async with run_agent():
        await controller.peer()
    assert [(one.job_id, one.exit_code) for one in controller.registers[-1].exits] == [("j1", 6)]


async def test_an_orderly_stop_ends_the_jobs_and_says_so(
    controller: FakeController, run_agent: RunAgent, node_dir: Path
) -> None:
    async with run_agent():
        await controller.launch("j1", *STAY)
        job = await job_process(node_dir, "j1")
    assert not job.is_alive
    assert controller.exits["j1"].reason == "ended by Genie: the agent was stopped"


async def test_a_stop_does_not_wait_for_a_controller_that_is_silent(
    controller: FakeController, run_agent: RunAgent, node_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent, "LAST_WORDS_S", 0.1)
    async with run_agent():
        await controller.launch("j1", *STAY)
        await job_process(node_dir, "j1")
        controller.silent = True
    assert (node_dir / "jobs" / "j1" / "exit.json").exists()


# --- contact ----------------------------------------------------------------------------------


async def test_a_cut_link_ends_the_job_in_time(
    tmp_path: Path, controller: FakeController, run_agent: RunAgent, node_dir: Path
) -> None:
    controller.ttl_s = 1.5
    async with run_agent():
        await controller.launch("j1", *STAY)
        job = await job_process(node_dir, "j1")
        controller.silent = True
        await until(lambda: not job.is_alive, timeout_s=5, what="the job ends")
        controller.silent = False
        assert "lost contact" in (await controller.end_of("j1")).reason


async def test_a_job_whose_confirmation_was_under_way_when_the_link_was_cut_has_not_failed(
    controller: FakeController, run_agent: RunAgent, node_dir: Path
) -> None:
    controller.ttl_s = 1.0
    controller.confirm_error = StoreUnavailableError("its answer did not come")
    async with run_agent():
        await controller.launch("j1", "/bin/true")
        await until(lambda: controller.confirms, what="it is to be confirmed")
        controller.silent = True
        journal = node_dir / "jobs" / "j1" / "exit.json"
        await until(journal.exists, what="it is given up")
        controller.silent = False
        report = await controller.end_of("j1")
    assert "lost contact" in report.reason
    assert (report.started, report.by_node) == (False, True)


async def test_a_leader_that_answers_keeps_a_job_running(
    controller: FakeController, run_agent: RunAgent
) -> None:
    controller.ttl_s = 0.6
    async with run_agent():
        await controller.launch("j1", "/bin/sh", "-c", "sleep 1; exit 7")
        assert (await controller.end_of("j1")).exit_code == 7


async def test_a_controller_that_does_not_lead_disturbs_nothing(
    controller: FakeController, run_agent: RunAgent, node_dir: Path
) -> None:
    controller.ttl_s = 1.0
    async with run_agent():
        await controller.launch("j1", "/bin/sh", "-c", "echo $$ > pid; sleep 1.3; exit 7")
        job = await job_process(node_dir, "j1")
        controller.leading = False
        await until(lambda: not job.is_alive, timeout_s=8, what="the job ends by itself")
        controller.leading = True
        assert (await controller.end_of("j1")).exit_code == 7


async def test_one_silent_controller_among_those_that_do_not_lead_is_a_cut_link(
    controller: FakeController, run_agent: RunAgent, node_dir: Path, tmp_path: Path
) -> None:
    controller.ttl_s = 1.5
    async with FakeController(tmp_path / "second", silent=True).listening() as second:
        controller.more_controllers = (second.address,)
        async with run_agent():
            await controller.launch("j1", *STAY)
            job = await job_process(node_dir, "j1")
            controller.leading = False
            await until(lambda: not job.is_alive, timeout_s=5, what="the job ends")


async def test_another_controller_that_leads_takes_over(
    controller: FakeController, run_agent: RunAgent, node_dir: Path, tmp_path: Path
) -> None:
    async with FakeController(tmp_path / "second", leading=False, leader_token=6).listening() as second:
        controller.more_controllers = (second.address,)
        async with run_agent():
            await controller.launch("j1", *STAY)
            job = await job_process(node_dir, "j1")
            controller.leading, second.leading = False, True
            await second.peer()
            assert [one.job_id for one in second.heartbeats[-1].running] == ["j1"]
            assert job.is_alive
            assert second.registers[0].node.incarnation == 1


async def test_nothing_is_launched_without_a_fresh_acknowledgement(
    controller: FakeController, run_agent: RunAgent
) -> None:
    controller.ttl_s = 0.0001
    async with run_agent():
        with pytest.raises(LaunchError, match="not been acknowledged lately"):
            await controller.launch("j1", "true")


# --- logs -------------------------------------------------------------------------------------


async def test_a_log_is_followed_while_it_is_written(
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
        assert (second.data, second.start) == (b"two\n", 4)
        end = await controller.log("j1", offset=second.next_offset, wait_s=5)
        assert (end.data, end.eof) == (b"", True)


async def test_the_log_of_an_earlier_run_is_kept_and_read_by_its_epoch(
    controller: FakeController, run_agent: RunAgent, node_dir: Path
) -> None:
    async with run_agent():
        first = await controller.launch("j1", "/bin/sh", "-c", "echo one")
        await controller.end_of("j1")
        controller.exits.clear()
        second = await controller.launch("j1", *STAY)
        await job_process(node_dir, "j1")
        old = await controller.log("j1", epoch=first.placement.epoch)
        assert old.data == b"one\n"
        end = await controller.log("j1", epoch=first.placement.epoch, offset=4)
        assert end.eof, "that run is over, though the job runs again"
        new = await controller.log("j1", epoch=second.placement.epoch, wait_s=5)
        assert (new.data, (await controller.log("j1")).data) == (b"here\n", b"here\n")
        with pytest.raises(JobNotFoundError):
            await controller.log("j1", epoch=999)


async def test_a_log_that_is_not_here_is_an_error(controller: FakeController, run_agent: RunAgent) -> None:
    async with run_agent():
        with pytest.raises(JobNotFoundError, match="no log of j9"):
            await controller.log("j9")


@pytest.mark.parametrize("job_id", ["../n1", "..", "a/b", ""])
async def test_a_log_is_not_looked_for_outside(
    controller: FakeController, run_agent: RunAgent, job_id: str
) -> None:
    async with run_agent():
        with pytest.raises(UsageError, match="job id"):
            await controller.log(job_id)


async def test_logs_of_the_newest_jobs_are_kept(
    controller: FakeController, run_agent: RunAgent, node_dir: Path
) -> None:
    async with run_agent(jobs_kept=2):
        for number in range(4):
            await controller.launch(f"j{number}", "true")
            await controller.end_of(f"j{number}")
        await until(lambda: {path.name for path in (node_dir / "jobs").iterdir()} == {"j2", "j3"})


# --- jobs that spoil their own directories ------------------------------------------------------

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
async def test_what_a_job_does_to_its_directory_is_its_own_trouble(
    controller: FakeController, run_agent: RunAgent, node_dir: Path, script: str
) -> None:
    for life in range(2):
        async with run_agent():
            if life == 0:
                await controller.launch("j1", "/bin/sh", "-c", f"{script}; exit 5")
                assert (await controller.end_of("j1")).exit_code == 5
                await until(lambda: not controller.heartbeats[-1].exits, what="it is settled")
            await controller.launch(f"next-{life}", "true")
            assert (await controller.end_of(f"next-{life}")).exit_code == 0
    assert controller.registers[-1].exits == ()


async def test_a_job_whose_directory_was_spoilt_can_run_again_and_nothing_stays(
    controller: FakeController, run_agent: RunAgent, node_dir: Path
) -> None:
    async with run_agent():
        await controller.launch("j1", "/bin/sh", "-c", "cd /; rm -r $GENIE_JOB_DIR; echo > $GENIE_JOB_DIR")
        await controller.end_of("j1")
        controller.exits.clear()
        await controller.launch("j1", "/bin/sh", "-c", "exit 6", epoch=9)
        assert (await controller.end_of("j1")).exit_code == 6
        await until(lambda: {path.name for path in (node_dir / "jobs").iterdir()} == {"j1"})


async def test_an_archive_with_an_endless_name_is_an_end_in_few_words(
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
def _other_executor(monkeypatch: pytest.MonkeyPatch) -> None:
    real = preparation.prepare_executor

    async def prepare(*args: object, **given: object) -> tuple[str, ...]:
        *_, path = await real(*args, **given)  # type: ignore[arg-type]
        return (sys.executable, "-c", LISTENER, path)

    monkeypatch.setattr(preparation, "prepare_executor", prepare)


@pytest.mark.usefixtures("_other_executor")
async def test_a_session_is_announced_when_its_executor_listens(
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
        assert (config["certificate_path"], config["ca_path"]) == ("", ""), "there is no TLS here"
    assert not (node_dir / "jobs" / "s1" / "executor.json").exists()


@pytest.mark.parametrize(
    ("vendor", "cpus", "looks"),
    [(Vendor.NVIDIA, 16, True), (Vendor.NVIDIA, 4, False), (Vendor.CPU, 16, False)],
)
async def test_an_executor_looks_for_its_next_frame_where_cores_are_to_spare(
    vendor: Vendor, cpus: int, looks: bool, tmp_path: Path
) -> None:
    node = node_info("n", gpus=2, vendor=vendor, cpus=cpus)
    launch = Launch(
        job_id="s1",
        tenant="default",
        spec=JobSpec(name="s1", command=(), kind=JobKind.SESSION),
        placement=Placement(node_id="n", incarnation=1, gpu_ids=(0,), epoch=1),
        leader_token=1,
        ticket_sha256="ab" * 32,
    )

    async def nobody(request: object) -> object:
        raise AssertionError("without TLS there is nothing to be signed")

    *_, path = await preparation.prepare_executor(
        nobody,  # type: ignore[arg-type]
        launch,
        directory=tmp_path,
        ca_path=None,
        listen_host="127.0.0.1",
        memory_bytes_max=0,
        node=node,
    )
    assert (executor_config.read(Path(path)).spin_us > 0) is looks


BUSY = """
import json, pathlib, sys, time
config = json.load(open(sys.argv[1]))
pathlib.Path(config["status_path"]).write_text("compiling its library")
while not pathlib.Path(config["endpoint_path"] + ".stop").exists(): time.sleep(0.01)
pathlib.Path(config["status_path"]).write_text("there is no C++ compiler (install one)")
sys.exit(3)
"""


async def test_what_an_executor_says_before_it_listens_is_told(
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
            lambda: any(job.note == "compiling its library" for job in controller.heartbeats[-1].running),
            what="a heartbeat with the note",
        )
        (node_dir / "jobs" / "s1" / f"{preparation.ENDPOINT_FILE}.stop").touch()
        end = await controller.end_of("s1")
    assert end.exit_code == 3
    assert end.reason.endswith(": there is no C++ compiler (install one)")


async def test_an_executor_that_cannot_come_up_is_an_end_with_a_reason(
    controller: FakeController, run_agent: RunAgent
) -> None:
    async with run_agent():
        await controller.launch("s1", kind=JobKind.SESSION, ticket_sha256="not a hash")
        end = await controller.end_of("s1", timeout_s=20)
    assert end.exit_code != 0
