"""Sessions, computations and jobs on a real cluster."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

import genie
from genie.cluster.client import ClusterClient, open_client
from genie.cluster.events import EventType
from genie.cluster.lifecycle.init_phases import INIT_PHASES
from genie.errors import AlreadyInitializedError, JobNotFoundError, JobRefusedError
from genie.model.job import JobSpec, JobState, Resources
from tests.integration.running_cluster import RunningCluster, make_python_job
from tests.waiting import until, wait_until

SNIPPET = """
    import asyncio
    import genie
    import torch

    async def main():
        await genie.init()
        x = torch.randn(1000, 1000, device="remote_accelerator:0")
        y = x @ x
        remote, local = y.cpu(), x.cpu() @ x.cpu()
        await genie.shutdown()
        assert torch.allclose(remote, local, atol=1e-2), (remote - local).abs().max()
        print("device", x.device, "shape", tuple(remote.shape))

    asyncio.run(main())
"""


def test_client_process_computes_on_the_remote_device(cluster: RunningCluster) -> None:
    done = cluster.run_client(SNIPPET)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "device remote_accelerator:0 shape (1000, 1000)\n"
    assert done.stderr == ""


def test_session_left_open_by_a_process_that_imports_torch_late_is_released(
    cluster: RunningCluster,
) -> None:
    done = cluster.run_client(
        """
        import genie
        genie.connect(node_id="forgetful")
        import torch
        x = torch.ones(3, device="remote_accelerator:0")
        print(x.sum().item())
        """
    )
    assert (done.returncode, done.stdout) == (0, "3.0\n"), done.stderr
    assert done.stderr == ""
    wait_until(lambda: _unfinished_jobs_of_session("forgetful", cluster) == [], timeout_s=20)


def _unfinished_jobs_of_session(session: str, cluster: RunningCluster) -> list[str]:
    async def fetch() -> list[str]:
        async with open_client(cluster.settings()) as client:
            jobs, _ = await client.list_jobs(states=(JobState.QUEUED, JobState.PLACING, JobState.RUNNING))
            return [job.job_id for job in jobs if job.spec.name == f"session-{session}"]

    return asyncio.run(fetch())


async def test_init_completes_all_phases(cluster: RunningCluster) -> None:
    state = await genie.init()
    done = [
        event.facts["name"]
        for event in state.events.history()
        if event.type is EventType.INIT_PHASE and event.facts["state"] == "done"
    ]
    assert done == list(INIT_PHASES)
    assert state.nodes
    assert state.cluster_id
    assert state.discovery is not None
    assert state.discovery.tcp_reachable
    assert state.backend == "tcp"


async def test_second_init_returns_the_same_session(cluster: RunningCluster) -> None:
    first = await genie.init()
    assert await genie.init() is first
    with pytest.raises(AlreadyInitializedError, match="node_id"):
        await genie.init(node_id="another")


async def test_heartbeats_continue_while_the_event_loop_of_the_user_is_blocked(
    cluster: RunningCluster,
) -> None:
    state = await genie.init(heartbeat_interval=0.1)
    before = state.stats["heartbeats_sent"]
    wait_until(lambda: state.stats["heartbeats_sent"] >= before + 5)  # this blocks the loop
    assert state.stats["heartbeats_failed"] == 0


async def test_twenty_sequential_sessions_leave_no_thread(cluster: RunningCluster) -> None:
    before = set(threading.enumerate())
    for _ in range(20):
        await genie.init()
        await genie.shutdown()
    await until(lambda: set(threading.enumerate()) <= before)


# --- jobs -------------------------------------------------------------------------------------


async def test_job_runs_and_its_log_is_returned(client: ClusterClient) -> None:
    job = await client.submit(make_python_job("print('to stdout')", gpus=1))
    seen: list[JobState] = []
    ended = await client.wait_job(job.job_id, timeout_s=60, on_change=lambda job: seen.append(job.state))
    assert (ended.state, ended.exit_code) == (JobState.SUCCEEDED, 0), ended.reason
    assert seen[-1] is JobState.SUCCEEDED
    log = b"".join([data async for data in client.follow_log(job.job_id)])
    assert log == b"to stdout\n"


async def test_log_is_followed_while_it_is_written(client: ClusterClient) -> None:
    code = """
        import time
        for number in range(5):
            print(number)
            time.sleep(0.1)
    """
    job = await client.submit(make_python_job(code))
    chunks = [data async for data in client.follow_log(job.job_id)]
    assert b"".join(chunks) == b"0\n1\n2\n3\n4\n"
    middle = [data async for data in client.follow_log(job.job_id, offset=4)]
    assert b"".join(middle) == b"2\n3\n4\n"


async def test_working_directory_is_uploaded_once(client: ClusterClient, tmp_path: Path) -> None:
    (tmp_path / "data.txt").write_text("x" * 1_500_000)
    (tmp_path / "main.py").write_text("print(len(open('data.txt').read()))")
    (tmp_path / ".gitignore").write_text("secret\n")
    (tmp_path / "secret").write_text("not for others")
    steps: list[tuple[str, int, int]] = []
    spec = make_python_job("import os; print(sorted(os.listdir())); exec(open('main.py').read())")
    job = await client.submit(spec, workdir=tmp_path, progress=lambda *step: steps.append(step))
    ended = await client.wait_job(job.job_id, timeout_s=60)
    log = b"".join([data async for data in client.follow_log(job.job_id)]).decode()
    assert ended.state is JobState.SUCCEEDED, log
    assert "1500000" in log
    assert "secret" not in log
    assert sum(what == "sending" for what, _, _ in steps) > 2
    steps.clear()
    again = await client.submit(spec, workdir=tmp_path, progress=lambda *step: steps.append(step))
    assert again.spec.workdir == job.spec.workdir
    assert [what for what, _, _ in steps if what == "sending"] == ["sending"], "the blob is already uploaded"
    await client.wait_job(again.job_id, timeout_s=60)


async def test_job_that_can_never_run_is_rejected_with_the_reason(client: ClusterClient) -> None:
    spec = JobSpec(name="huge", command=("true",), resources=Resources(gpus=1000))
    with pytest.raises(JobRefusedError, match="1000"):
        await client.submit(spec)


async def test_running_job_is_cancelled(client: ClusterClient) -> None:
    job = await client.submit(make_python_job("import time; print('up'); time.sleep(60)"))
    async for _ in client.follow_log(job.job_id):
        break
    await client.cancel(job.job_id)
    ended = await client.wait_job(job.job_id, timeout_s=60)
    assert ended.state is JobState.CANCELLED


async def test_unknown_job_raises_not_found(client: ClusterClient) -> None:
    with pytest.raises(JobNotFoundError, match="j-nothere"):
        await client.get_job("j-nothere")


async def test_status_counts_the_gpus_of_all_nodes(client: ClusterClient) -> None:
    status, views = await client.status(), await client.nodes()
    assert status.leading
    assert status.store_ok
    assert status.gpus_total == sum(len(view.info.gpus) for view in views)
