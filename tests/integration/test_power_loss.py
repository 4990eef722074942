"""The machine of the leader vanishes, with the leader of etcd: no job ends, and another controller leads.

Two controllers and an agent as processes, and three members of etcd. A stopped process (SIGSTOP) stands in
for a machine without power: it answers nothing, and connections to it hang.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from genie.errors import LeadershipError
from genie.model.job import JobSpec, JobState
from genie.model.node import NodeStatus
from tests.controller.store.etcd_server import EtcdCluster
from tests.integration.cluster_processes import ClusterProcesses
from tests.integration.test_faults import CountingJobOutput, make_counting_job
from tests.waiting import until


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EtcdCluster]:
    cluster = EtcdCluster(tmp_path / "etcd")
    cluster.start()
    yield cluster
    cluster.stop()


@pytest.mark.timeout(120)
async def test_machine_of_the_leaders_vanishes_and_no_job_ends(tmp_path: Path, etcd: EtcdCluster) -> None:
    output = CountingJobOutput(tmp_path / "job")
    first, second = _make_controllers(tmp_path, store=etcd.url)
    try:
        await first.start_controller()
        _copy_certificate_authority(first.state_dir, second.state_dir)
        await second.start_controller()
        await first.start_agent("a")
        async with first.client() as client:
            job = await client.submit(make_counting_job(output.file, node_id="a"))
            await output.wait_started()
        (await asyncio.to_thread(etcd.find_leader)).suspend()
        os.kill(first.controller.pid, signal.SIGSTOP)

        async def does_second_controller_lead() -> bool:
            with suppress(LeadershipError):  # without a leader of etcd, it cannot check tokens
                async with second.client() as client:
                    return (await client.status()).leading
            return False

        await until(does_second_controller_lead, what="the other controller leads")
        async with second.client() as client:
            later = await client.submit(JobSpec(name="later", command=("true",), node_id="a"))

            async def has_agent_reconnected() -> bool:
                return (await second.node("a")).status is NodeStatus.HEALTHY

            await until(has_agent_reconnected, what="the agent has found the new leader")
            before = output.number
            await until(lambda: output.number > before + 20, what="the job continues")
            assert (await client.get_job(job.job_id)).state is JobState.RUNNING
            assert output.start_count == 1

            async def has_later_job_succeeded() -> bool:
                return (await client.get_job(later.job_id)).state is JobState.SUCCEEDED

            await until(has_later_job_succeeded, what="the agent runs jobs of the new leader")
    finally:
        with suppress(ProcessLookupError):
            os.kill(first.controller.pid, signal.SIGCONT)
        await first.stop()
        await second.stop()


def _make_controllers(folder: Path, *, store: str) -> tuple[ClusterProcesses, ClusterProcesses]:
    folders = [folder / name for name in ("first", "second")]
    for each in folders:
        each.mkdir()
    first, second = (ClusterProcesses(each, store=store) for each in folders)
    return first, second


def _copy_certificate_authority(source: Path, target: Path) -> None:
    (target / "controller").mkdir(mode=0o700, exist_ok=True)
    for name in ("controller/ca.pem", "controller/ca.key", "owner.token"):
        shutil.copy2(source / name, target / name)
