"""Killed processes: every lost job is reported, and no accelerator is allocated twice.

Three processes, as on three machines: a controller and two agents with one accelerator each.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from genie.agent.leftovers import read_start_record
from genie.cluster.client import ClusterClient
from genie.model.allocation import FULL_MILLI
from genie.model.job import Job, JobSpec, JobState
from genie.processes.process_identity import ProcessIdentity
from tests.integration.cluster_processes import ClusterProcesses, run_cluster_processes
from tests.integration.running_cluster import make_python_job
from tests.waiting import until

NODE_TTL_S = 6.0
"""Jobs are reclaimed after this and a grace period of 3 s."""


def make_counting_job(file: Path, *, node_id: str = "", until_file: Path | None = None) -> JobSpec:
    """A job that writes its PID once and then counts until `until_file` exists."""
    code = f"""
        import os, pathlib, time
        out, end = pathlib.Path({str(file)!r}), pathlib.Path({str(until_file or "/nonexistent")!r})
        out.write_text(f"pid {{os.getpid()}}\\n")
        number = 0
        while not end.exists():
            number += 1
            with out.open("a") as file:
                file.write(f"{{number}}\\n")
            print(number)
            time.sleep(0.05)
        print("end")
    """
    return make_python_job(code, name=f"count-{file.stem}", gpus=1, node_id=node_id)


class CountingJobOutput:
    """Output file of a counting job."""

    def __init__(self, file: Path) -> None:
        self.file = file

    @property
    def pid(self) -> int:
        return int(self._lines()[0].split()[1])

    @property
    def number(self) -> int:
        lines = self._lines()
        return int(lines[-1]) if len(lines) > 1 else 0

    @property
    def start_count(self) -> int:
        return sum(line.startswith("pid") for line in self._lines())

    @property
    def is_alive(self) -> bool:
        process = ProcessIdentity.of_pid(self.pid)
        return process is not None and process.is_alive

    async def wait_started(self) -> None:
        await until(lambda: self.file.exists() and self.number > 0, timeout_s=30)

    def _lines(self) -> list[str]:
        # The last line may be incomplete.
        return self.file.read_text().rpartition("\n")[0].split("\n") if self.file.exists() else []


@asynccontextmanager
async def watch_ledger(client: ClusterClient) -> AsyncIterator[set[tuple[str, tuple[str, ...]]]]:
    """Polls the ledger and fails if an accelerator is allocated beyond its capacity.

    Yields the observations: each node with the jobs that had its accelerator at the same time.
    """
    observed: set[tuple[str, tuple[str, ...]]] = set()

    async def check_allocations_repeatedly() -> None:
        while True:
            for view in await client.nodes():
                for gpu in view.info.gpus:
                    used = view.node_holds.gpu_used_milli(gpu.gpu_id)
                    assert used <= FULL_MILLI, (
                        f"{view.info.node_id}/{gpu.gpu_id}: {used} of {FULL_MILLI} allocated"
                    )
                observed.add((view.info.node_id, tuple(hold.job_id for hold in view.node_holds.holds)))
            await asyncio.sleep(0.02)

    async with asyncio.TaskGroup() as group:
        polling = group.create_task(check_allocations_repeatedly())
        yield observed
        polling.cancel()


@asynccontextmanager
async def follow_log(client: ClusterClient, job_id: str) -> AsyncIterator[bytearray]:
    """Follows the log of a job and yields the growing output."""
    log = bytearray()

    async def follow() -> None:
        async for data in client.follow_log(job_id):
            log.extend(data)

    async with asyncio.TaskGroup() as group:
        following = group.create_task(follow())
        yield log
        following.cancel()


async def wait_for_job_state(
    client: ClusterClient, job_id: str, state: JobState, *, timeout_s: float = 30
) -> Job:
    async def fetch_job_in_state() -> Job | None:
        job = await client.get_job(job_id)
        assert job.state is state or not job.state.is_final, f"{job_id} is {job.state}: {job.reason}"
        return job if job.state is state else None

    found = await until(fetch_job_in_state, timeout_s=timeout_s, what=f"{job_id} becomes {state}")
    assert found is not None
    return found


async def fetch_holds(client: ClusterClient) -> dict[str, list[tuple[str, int]]]:
    return {
        view.info.node_id: [(hold.job_id, hold.epoch) for hold in view.node_holds.holds]
        for view in await client.nodes()
    }


@pytest.mark.timeout(120)
async def test_job_of_a_killed_agent_continues_when_its_node_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GENIE_CONTROLLER_NODE_TTL_S", str(NODE_TTL_S))
    first, next_one = CountingJobOutput(tmp_path / "first"), CountingJobOutput(tmp_path / "next")
    async with run_cluster_processes(tmp_path, "a") as cluster, cluster.client() as client:
        spec = make_counting_job(first.file, node_id="a", until_file=tmp_path / "end")
        job = await client.submit(spec)
        await first.wait_started()
        queued = await client.submit(make_counting_job(next_one.file, node_id="a"))
        async with watch_ledger(client) as observed:
            await cluster.agents["a"].kill()

            async def is_withheld() -> bool:
                return "until the node returns" in (await client.get_job(job.job_id)).reason

            await until(is_withheld, timeout_s=60)
            before = await client.get_job(job.job_id)
            assert (await cluster.start_agent("a")).incarnation == 2
            number = first.number
            await until(lambda: first.number > number, what="the job goes on")
            now = await client.get_job(job.job_id)
            assert (now.state, now.placements) == (JobState.RUNNING, before.placements)
            assert (await client.get_job(queued.job_id)).state is JobState.QUEUED
            (tmp_path / "end").touch()
            ended = await wait_for_job_state(client, job.job_id, JobState.SUCCEEDED)
            assert (ended.exit_code, first.start_count) == (0, 1)
            log = b"".join([data async for data in client.follow_log(job.job_id)]).decode().split()
            assert log == [*map(str, range(1, first.number + 1)), "end"]
            await wait_for_job_state(client, queued.job_id, JobState.RUNNING)
        assert {jobs for _, jobs in observed} <= {(), (job.job_id,), (queued.job_id,)}


@pytest.mark.timeout(120)
async def test_job_that_ended_with_its_agent_is_lost_when_its_node_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GENIE_CONTROLLER_NODE_TTL_S", str(NODE_TTL_S))
    doomed, other, later = (CountingJobOutput(tmp_path / name) for name in ("doomed", "other", "later"))
    async with run_cluster_processes(tmp_path, "a", "b") as cluster, cluster.client() as client:
        job_a = await client.submit(make_counting_job(doomed.file, node_id="a"))
        job_b = await client.submit(make_counting_job(other.file, node_id="b"))
        await doomed.wait_started()
        await other.wait_started()
        # Queued until the accelerator of the doomed job is free.
        job_c = await client.submit(make_counting_job(later.file, node_id="a"))
        assert job_c.state is JobState.QUEUED
        async with watch_ledger(client) as observed:
            await cluster.agents["a"].kill()

            async def is_withheld() -> bool:
                return "until the node returns" in (await client.get_job(job_a.job_id)).reason

            await until(is_withheld, timeout_s=60)
            # It goes on and keeps its accelerator, because it is never started elsewhere.
            assert doomed.is_alive
            assert [job_id for job_id, _ in (await fetch_holds(client))["a"]] == [job_a.job_id]
            assert (await client.get_job(job_c.job_id)).state is JobState.QUEUED
            # Its shim cannot be adopted: the queued job runs, the lost one does not.
            started = tmp_path / "a" / "agents" / "a" / "jobs" / job_a.job_id / "started.json"
            shim, _ = read_start_record(started)
            assert shim.send_signal(signal.SIGKILL)
            await cluster.start_agent("a")
            lost = await wait_for_job_state(client, job_a.job_id, JobState.LOST)
            assert not doomed.is_alive
            assert [step.state for step in lost.history].count(JobState.LOST) == 1
            assert lost.reason == "node a restarted"
            running = await wait_for_job_state(client, job_c.job_id, JobState.RUNNING)
            await later.wait_started()
            assert running.placement is not None
            assert lost.placement is not None
            assert running.placement.epoch > lost.placement.epoch
            assert (await client.get_job(job_b.job_id)).state is JobState.RUNNING
        on_a = [jobs for node, jobs in observed if node == "a"]
        assert set(on_a) - {()} == {(job_a.job_id,), (job_c.job_id,)}
        assert (other.is_alive, other.start_count, doomed.start_count) == (True, 1, 1)
        assert (await client.get_job(job_a.job_id)).history == lost.history


@pytest.mark.timeout(120)
async def test_restarted_controller_restores_its_state_and_jobs_continue(tmp_path: Path) -> None:
    count, end = CountingJobOutput(tmp_path / "count"), tmp_path / "end"
    async with (
        run_cluster_processes(tmp_path, "a", "b") as cluster,
        cluster.client() as client,
        AsyncExitStack() as stack,
    ):
        finished = await client.submit(make_python_job("print('done before')"))
        await client.wait_job(finished.job_id, timeout_s=30)
        job = await client.submit(make_counting_job(count.file, node_id="a", until_file=end))
        waiting = await client.submit(make_counting_job(tmp_path / "next", node_id="a", until_file=end))
        await count.wait_started()
        before, pid = await fetch_holds(client), count.pid
        known = await client.get_job(job.job_id)
        log = await stack.enter_async_context(follow_log(client, job.job_id))

        await cluster.controller.kill()
        number = count.number
        await until(lambda: count.number > number + 10)
        await cluster.start_controller()

        # The same client reconnects.
        again = await client.get_job(job.job_id)
        assert (again.state, again.placement, again.history) == (
            JobState.RUNNING,
            known.placement,
            known.history,
        )
        assert (await client.get_job(waiting.job_id)).state is JobState.QUEUED
        assert (await client.get_job(finished.job_id)).state is JobState.SUCCEEDED
        assert await fetch_holds(client) == before
        for node_id in ("a", "b"):
            await until(lambda node_id=node_id: _is_healthy(cluster, node_id), timeout_s=30)

        number = count.number
        await until(lambda: count.number > number + 10)
        assert (count.pid, count.start_count, count.is_alive) == (pid, 1, True)
        end.touch()
        ended = await client.wait_job(job.job_id, timeout_s=30)
        assert (ended.state, ended.exit_code) == (JobState.SUCCEEDED, 0), ended.reason
        after = await client.wait_job(waiting.job_id, timeout_s=30)
        assert after.state is JobState.SUCCEEDED, after.reason
        await until(lambda: log.endswith(b"end\n"))
        numbers = [int(line) for line in log.split()[:-1]]
        assert numbers == list(range(1, len(numbers) + 1)), "every line arrives exactly once"


async def _is_healthy(cluster: ClusterProcesses, node_id: str) -> bool:
    return (await cluster.node(node_id)).status == "healthy"


@pytest.mark.timeout(120)
async def test_submit_interrupted_by_a_controller_crash_is_executed_once(tmp_path: Path) -> None:
    async with run_cluster_processes(tmp_path, "a") as cluster, cluster.client() as client:
        async with asyncio.TaskGroup() as group:
            submits = [
                group.create_task(client.submit(make_python_job("pass", name=f"j{i}"))) for i in range(20)
            ]
            await asyncio.sleep(0)
            await cluster.controller.kill()
            await cluster.start_controller()
        accepted = {task.result().job_id for task in submits}
        assert len(accepted) == 20
        jobs, more = await client.list_jobs(limit=1000)
        assert {job.job_id for job in jobs} == accepted
        assert not more
        for job_id in accepted:
            assert (await client.wait_job(job_id, timeout_s=60)).state is JobState.SUCCEEDED


@pytest.mark.timeout(120)
async def test_upload_resumes_after_a_controller_crash(tmp_path: Path) -> None:
    directory = tmp_path / "project"
    directory.mkdir()
    (directory / "data").write_bytes(os.urandom(20_000_000))
    sent: list[int] = []
    async with run_cluster_processes(tmp_path, "a") as cluster, cluster.client() as client:

        def progress(what: str, done: int, _total: int) -> None:
            if what == "sending":
                sent.append(done)
                if done > 10_000_000 and not killed:
                    killed.append(done)
                    os.kill(cluster.controller.pid, signal.SIGKILL)

        killed: list[int] = []
        spec = make_python_job("import os; print(os.stat('data').st_size)")
        async with asyncio.TaskGroup() as group:
            submitting = group.create_task(client.submit(spec, workdir=directory, progress=progress))
            await until(lambda: bool(killed), timeout_s=30)
            await cluster.controller.kill()
            await cluster.start_controller()
        job = await client.wait_job(submitting.result().job_id, timeout_s=60)
        assert job.state is JobState.SUCCEEDED, job.reason
        log = b"".join([data async for data in client.follow_log(job.job_id)])
        assert log == b"20000000\n"
        assert min(sent[sent.index(killed[0]) :]) > 0, "received data is not sent again"
