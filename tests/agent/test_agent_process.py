"""The agent as a separate process: kill, stop, restart, join."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from pathlib import Path

import pytest

from genie.agent.launcher import kill_jobs_of_stopped_agent
from genie.agent.leftovers import read_start_record
from genie.errors import TokenRefusedError
from genie.model.tenant import TokenKind
from genie.processes.process_identity import ProcessIdentity
from tests.agent.conftest import STAY, WRITE_PID, StartAgent, wait_for_job_process
from tests.fakes.controller import FakeController
from tests.waiting import TIMEOUT_S, until


async def test_job_ends_when_dead_man_timer_expires_after_agent_was_killed(
    controller: FakeController, node_dir: Path, start_agent_process: StartAgent
) -> None:
    controller.ttl_s = 4.0
    async with start_agent_process() as agent:
        await controller.launch("j1", *STAY)
        job = await wait_for_job_process(node_dir, "j1")
        shim, _ = read_start_record(node_dir / "jobs" / "j1" / "started.json")
        agent.send_signal(signal.SIGKILL)
        await until(lambda: not job.is_alive and not shim.is_alive, what="job and shim end")
    assert "the agent has ended" in (node_dir / "jobs" / "j1" / "exit.json").read_text()


async def test_job_of_a_suspended_agent_ends_and_is_reported_later(
    controller: FakeController, node_dir: Path, start_agent_process: StartAgent
) -> None:
    controller.ttl_s = 4.0
    async with start_agent_process() as agent:
        await controller.launch("j1", *STAY)
        job = await wait_for_job_process(node_dir, "j1")
        agent.send_signal(signal.SIGSTOP)
        await until(lambda: not job.is_alive, what="the job ends")
        agent.send_signal(signal.SIGCONT)
        assert "lost contact" in (await controller.end_of("j1")).reason


async def test_job_without_a_dead_man_timer_survives_a_suspended_agent(
    controller: FakeController, node_dir: Path, start_agent_process: StartAgent
) -> None:
    controller.ttl_s = 4.0
    async with start_agent_process() as agent:
        await controller.launch("j1", *STAY, has_deadman_timer=False)
        await controller.launch("j2", *STAY)
        job, restartable = [await wait_for_job_process(node_dir, each) for each in ("j1", "j2")]
        agent.send_signal(signal.SIGSTOP)
        await until(lambda: not restartable.is_alive, what="the restartable job ends")
        agent.send_signal(signal.SIGCONT)
        assert "lost contact" in (await controller.end_of("j2")).reason
        await until(lambda: [one.job_id for one in controller.heartbeats[-1].running] == ["j1"])
        assert job.is_alive


async def test_job_without_a_dead_man_timer_is_killed_after_its_agent_has_ended(
    controller: FakeController, node_dir: Path, start_agent_process: StartAgent
) -> None:
    controller.ttl_s = 4.0
    async with start_agent_process() as agent:
        await controller.launch("j1", *STAY, has_deadman_timer=False)
        await controller.launch("j2", *STAY)
        job, restartable = [await wait_for_job_process(node_dir, each) for each in ("j1", "j2")]
        assert kill_jobs_of_stopped_agent(node_dir) == 0, "the agent runs"
        agent.send_signal(signal.SIGKILL)
        await until(lambda: not restartable.is_alive, what="the restartable job ends")
    assert job.is_alive
    assert kill_jobs_of_stopped_agent(node_dir) >= 2, "shim and job"
    assert not job.is_alive


async def test_agent_of_another_node_on_the_machine_kills_leftover_jobs_before_it_registers(
    controller: FakeController, node_dir: Path, start_agent_process: StartAgent
) -> None:
    """The machine joins again with another node ID: both nodes have the same accelerators."""
    async with start_agent_process() as agent:
        await controller.launch("j1", *STAY, has_deadman_timer=False)
        job = await wait_for_job_process(node_dir, "j1")
        agent.send_signal(signal.SIGKILL)
        await agent.wait()
    assert job.is_alive
    before = len(controller.registers)
    token = str(controller.token(TokenKind.JOIN))
    async with start_agent_process(
        "--join", controller.address, "--node-id", "b1", GENIE_TOKEN=token
    ) as other:
        await until(lambda: len(controller.registers) > before, what="the agent of the new node registers")
        assert not job.is_alive
        assert "leftover processes of agents of other nodes" in other.output.read_text()


async def test_agent_of_another_node_keeps_the_jobs_of_a_running_agent(
    controller: FakeController, node_dir: Path, start_agent_process: StartAgent
) -> None:
    async with start_agent_process():
        await controller.launch("j1", *STAY, has_deadman_timer=False)
        job = await wait_for_job_process(node_dir, "j1")
        before = len(controller.registers)
        token = str(controller.token(TokenKind.JOIN))
        async with start_agent_process("--join", controller.address, "--node-id", "b1", GENIE_TOKEN=token):
            await until(lambda: len(controller.registers) > before, what="the second agent registers")
            assert job.is_alive


async def test_exit_record_survives_a_killed_agent(
    controller: FakeController, node_dir: Path, start_agent_process: StartAgent
) -> None:
    async with start_agent_process() as agent:
        await controller.launch("j1", "/bin/sh", "-c", "while [ ! -e go ]; do sleep 0.02; done; exit 6")
        await until((node_dir / "jobs" / "j1" / "started.json").exists, what="the job starts")
        agent.send_signal(signal.SIGKILL)
        await agent.wait()
        (node_dir / "jobs" / "j1" / "work" / "go").touch()
        await until((node_dir / "jobs" / "j1" / "exit.json").exists, what="the exit record")
    async with start_agent_process():
        assert (await controller.end_of("j1")).exit_code == 6
        assert [report.job_id for report in controller.registers[-1].exits] == ["j1"]
        await until((node_dir / "jobs" / "j1" / "settled.json").exists, what="it is settled")


async def test_job_survives_a_controller_restart(
    tmp_path: Path, controller: FakeController, node_dir: Path, start_agent_process: StartAgent
) -> None:
    second = FakeController(tmp_path / "second", ttl_s=4.0)
    token = tmp_path / "token"
    token.write_text(str(second.token(TokenKind.JOIN)))
    async with contextlib.AsyncExitStack() as stack:
        async with second.listening():
            joining = start_agent_process(
                "--join", second.address, "--token-file", str(token), "--node-id", "n2"
            )
            await stack.enter_async_context(joining)
            await second.launch("j1", "/bin/sh", "-c", f"{WRITE_PID}; sleep 4; exit 7")
            job = await wait_for_job_process(node_dir.parent / "n2", "j1")
        await until(lambda: not job.is_alive, what="the job ends by itself")
        async with second.listening():
            assert (await second.end_of("j1")).exit_code == 7
            assert second.registers[-1].node.incarnation == 1


async def test_sigterm_stops_the_agent_gracefully(
    controller: FakeController, node_dir: Path, start_agent_process: StartAgent
) -> None:
    async with start_agent_process() as agent:
        await controller.launch("j1", *STAY)
        job = await wait_for_job_process(node_dir, "j1")
        agent.send_signal(signal.SIGTERM)
        assert await agent.wait() == 0
    assert not job.is_alive
    assert controller.exits["j1"].reason == "ended by Genie: the agent was stopped"


async def test_second_agent_process_on_the_same_node_reports_the_conflict(
    controller: FakeController, node_dir: Path, start_agent_process: StartAgent
) -> None:
    async with start_agent_process():
        await controller.peer()
        async with start_agent_process() as second:
            assert await second.wait() == 1
        text = second.output.read_text()
    assert "another agent already uses" in text
    assert "Traceback" not in text


async def test_node_joins_with_tls_and_presents_its_certificate(
    tmp_path: Path, start_agent_process: StartAgent
) -> None:
    async with FakeController(tmp_path / "tls", use_tls=True).listening() as secure:
        token = str(secure.token(TokenKind.JOIN))
        async with start_agent_process("--join", secure.address, "--node-id", "n5", GENIE_TOKEN=token):
            await secure.launch("j1", "/usr/bin/env")
            assert token not in await secure.whole_log("j1")
    assert secure.certificates == ["n5.node.genie.internal"]
    node_dir = tmp_path / "state" / "agents" / "n5"
    assert {path.stat().st_mode & 0o077 for path in (node_dir, *node_dir.iterdir())} == {0}


async def test_certificate_is_renewed_after_half_of_its_validity(
    tmp_path: Path, start_agent_process: StartAgent
) -> None:
    day_s = 86400.0
    fake = FakeController(tmp_path / "tls", use_tls=True, certificate_days=6.0 / day_s)
    async with fake.listening() as secure:
        token = str(secure.token(TokenKind.JOIN))
        async with start_agent_process("--join", secure.address, "--node-id", "n5", GENIE_TOKEN=token):
            await secure.peer()
            path = tmp_path / "state" / "agents" / "n5" / "node.pem"
            first = path.read_text()
            await until(lambda: path.read_text() != first, what="another certificate")
            (await secure.peer()).close()
            await until(lambda: len(secure.registers) >= 2, what="a connection with the new certificate")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--node-id", "nowhere"), 1, "has no node token"),
        (("--join", "127.0.0.1:1:1"), 2, "is not an address"),
        (("--join", "127.0.0.1:1"), 1, "joining a cluster requires a token"),
        (("--join", "127.0.0.1:1", "--token", "nonsense"), 1, "not a Genie token"),
        (("--controller", "nowhere"), 2, "has no port"),
    ],
)
async def test_invalid_arguments_print_an_error_and_return_its_exit_code(
    start_agent_process: StartAgent, arguments: tuple[str, ...], code: int, message: str
) -> None:
    async with start_agent_process(*arguments) as agent:
        assert await agent.wait() == code
    text = agent.output.read_text()
    assert message in text
    assert "Traceback" not in text


async def test_rejected_join_creates_no_node(
    tmp_path: Path, controller: FakeController, start_agent_process: StartAgent
) -> None:
    controller.join_error = TokenRefusedError("token abcd has expired")
    token = str(controller.token(TokenKind.JOIN))
    async with start_agent_process(
        "--join", controller.address, "--node-id", "n7", GENIE_TOKEN=token
    ) as agent:
        assert await agent.wait() == 1
    assert "has expired" in agent.output.read_text()
    assert not (tmp_path / "state" / "agents" / "n7").exists()


async def test_leftover_job_without_start_record_is_found_by_its_environment(
    node_dir: Path, controller: FakeController, start_agent_process: StartAgent
) -> None:
    directory = node_dir / "jobs" / "j1"
    directory.mkdir(parents=True)
    stray = await asyncio.create_subprocess_exec(
        "sleep", "300", env=os.environ | {"GENIE_JOB_DIR": str(directory)}, start_new_session=True
    )
    other = await asyncio.create_subprocess_exec(
        "sleep", "300", env=os.environ | {"GENIE_JOB_DIR": f"{node_dir}/jobs2/j1"}
    )
    try:
        mark = ProcessIdentity.of_pid(other.pid)
        async with start_agent_process():
            await until(lambda: controller.registers, what="the agent registers")
            assert await asyncio.wait_for(stray.wait(), TIMEOUT_S) == -signal.SIGKILL
            assert mark is not None
            assert mark.is_alive
    finally:
        other.kill()
        await other.wait()
        if stray.returncode is None:
            stray.kill()
            await stray.wait()


async def test_agent_that_has_compiled_the_library_stops_with_exit_code_zero(
    controller: FakeController, node_dir: Path, start_agent_process: StartAgent
) -> None:
    async with start_agent_process(GENIE_AGENT_COMPILE_AHEAD="true") as agent:
        await controller.peer()
        await until(
            lambda: "the executors' library is compiled" in agent.output.read_text(),
            timeout_s=60,
            what="the log",
        )
        agent.send_signal(signal.SIGTERM)
        assert await agent.wait() == 0


async def test_agent_stops_with_exit_code_zero_while_it_compiles_the_library(
    controller: FakeController, node_dir: Path, start_agent_process: StartAgent
) -> None:
    async with start_agent_process(GENIE_AGENT_COMPILE_AHEAD="true") as agent:
        await controller.peer()
        agent.send_signal(signal.SIGTERM)
        assert await agent.wait() == 0
    assert "Traceback" not in agent.output.read_text()
