"""The lease of the agent with a scripted controller: which jobs end when no leader can be found."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from genie.agent import leftovers
from genie.errors import LaunchError, NodeRemovedError, StoreUnavailableError
from genie.model.messages.handshake import Hello
from tests.agent.conftest import STAY, WRITE_PID, RunAgent, wait_for_job_process
from tests.fakes.controller import FakeController
from tests.waiting import until


async def test_network_partition_ends_the_job_in_time(
    tmp_path: Path, controller: FakeController, run_agent: RunAgent, node_dir: Path
) -> None:
    controller.ttl_s = 4.0
    async with run_agent():
        await controller.launch("j1", *STAY)
        job = await wait_for_job_process(node_dir, "j1")
        controller.silent = True
        await until(lambda: not job.is_alive, what="the job ends")
        controller.silent = False
        assert "lost contact" in (await controller.end_of("j1")).reason


async def test_network_partition_ends_a_job_with_a_stopped_shim_whatever_its_grace_period(
    controller: FakeController, run_agent: RunAgent, node_dir: Path
) -> None:
    """The leader reclaims its accelerators after a fixed time."""
    controller.ttl_s = 4.0
    async with run_agent(stop_grace_s=600.0):
        await controller.launch("j1", *STAY)
        job = await wait_for_job_process(node_dir, "j1")
        shim_process, _ = leftovers.read_start_record(node_dir / "jobs" / "j1" / "started.json")
        assert shim_process.send_signal(signal.SIGSTOP)
        controller.silent = True
        await until(lambda: not job.is_alive, what="the job ends")
        controller.silent = False
        assert "lost contact" in (await controller.end_of("j1")).reason


async def test_network_partition_does_not_end_a_job_without_a_dead_man_timer(
    controller: FakeController, run_agent: RunAgent, node_dir: Path
) -> None:
    controller.ttl_s = 4.0
    async with run_agent():
        await controller.launch("j1", *STAY, has_deadman_timer=False)
        await controller.launch("j2", *STAY)
        job, restartable = [await wait_for_job_process(node_dir, each) for each in ("j1", "j2")]
        controller.silent = True
        await until(lambda: not restartable.is_alive, what="the restartable job ends")
        controller.silent = False
        await controller.end_of("j2")
        await until(lambda: [one.job_id for one in controller.heartbeats[-1].running] == ["j1"])
        assert job.is_alive
        assert len({register.node.incarnation for register in controller.registers}) == 1


async def test_job_without_a_dead_man_timer_starts_when_a_lost_confirmation_is_repeated(
    controller: FakeController, run_agent: RunAgent, node_dir: Path
) -> None:
    """The controller may count it as running, so it would never be queued again."""
    controller.ttl_s = 2.0
    controller.confirm_error = StoreUnavailableError("its answer did not come")
    async with run_agent():
        await controller.launch("j1", "/bin/sh", "-c", "exit 7", has_deadman_timer=False)
        await controller.launch("j2", "/bin/true")
        await until(lambda: len(controller.confirms) >= 2, what="both are to be confirmed")
        controller.silent = True
        given_up = node_dir / "jobs" / "j2" / "exit.json"
        await until(given_up.exists, what="the restartable job is given up")
        controller.silent, controller.confirm_error = False, None
        assert (await controller.end_of("j1")).exit_code == 7


async def test_agent_of_a_removed_node_ends_its_jobs(
    controller: FakeController, run_agent: RunAgent, node_dir: Path
) -> None:
    controller.ttl_s = 4.0
    with pytest.raises(ExceptionGroup) as caught:
        async with run_agent():
            await controller.launch("j1", *STAY, has_deadman_timer=False)
            job = await wait_for_job_process(node_dir, "j1")
            controller.refusals[Hello] = NodeRemovedError("node n1 was removed from the cluster")
            (await controller.peer()).close()
            await until(lambda: not job.is_alive, what="the job ends")
    assert caught.group_contains(NodeRemovedError)
    assert "node n1 was removed from the cluster" in (node_dir / "jobs" / "j1" / "exit.json").read_text()


async def test_job_whose_confirmation_was_lost_is_reported_as_not_started(
    controller: FakeController, run_agent: RunAgent, node_dir: Path
) -> None:
    controller.ttl_s = 2.0
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
    assert (report.started, report.is_caused_by_node) == (False, True)


async def test_acknowledged_heartbeats_keep_the_job_running(
    controller: FakeController, run_agent: RunAgent
) -> None:
    controller.ttl_s = 4.0
    async with run_agent():
        await controller.launch("j1", "/bin/sh", "-c", "sleep 3.5; exit 7")
        assert (await controller.end_of("j1")).exit_code == 7


async def test_controller_without_leadership_does_not_end_jobs(
    controller: FakeController, run_agent: RunAgent, node_dir: Path
) -> None:
    controller.ttl_s = 4.0
    async with run_agent():
        await controller.launch("j1", "/bin/sh", "-c", f"{WRITE_PID}; sleep 4; exit 7")
        job = await wait_for_job_process(node_dir, "j1")
        controller.leading = False
        await until(lambda: not job.is_alive, what="the job ends by itself")
        controller.leading = True
        assert (await controller.end_of("j1")).exit_code == 7


async def test_job_ends_if_no_known_controller_leads_and_one_does_not_reply(
    controller: FakeController, run_agent: RunAgent, node_dir: Path, tmp_path: Path
) -> None:
    controller.ttl_s = 4.0
    async with FakeController(tmp_path / "second", silent=True).listening() as second:
        controller.more_controllers = (second.address,)
        async with run_agent():
            await controller.launch("j1", *STAY)
            job = await wait_for_job_process(node_dir, "j1")
            controller.leading = False
            await until(lambda: not job.is_alive, what="the job ends")


async def test_agent_switches_to_the_new_leader(
    controller: FakeController, run_agent: RunAgent, node_dir: Path, tmp_path: Path
) -> None:
    async with FakeController(tmp_path / "second", leading=False, leader_token=6).listening() as second:
        controller.more_controllers = (second.address,)
        async with run_agent():
            await controller.launch("j1", *STAY)
            job = await wait_for_job_process(node_dir, "j1")
            controller.leading, second.leading = False, True
            await second.peer()
            assert [one.job_id for one in second.heartbeats[-1].running] == ["j1"]
            assert job.is_alive
            assert second.registers[0].node.incarnation == 1


async def test_launch_is_rejected_after_the_lease_expired(
    controller: FakeController, run_agent: RunAgent
) -> None:
    controller.ttl_s = 0.0001
    async with run_agent():
        with pytest.raises(LaunchError, match="the lease of this node has expired"):
            await controller.launch("j1", "true")
