"""`genie drain --wait` with real agents: a job saves its state on SIGTERM and resumes on the other node."""

from __future__ import annotations

import asyncio
import os
import sys
import textwrap
from pathlib import Path

import msgspec
import pytest

from genie.cluster.client import ClusterClient
from genie.model.job import Job, JobSpec, JobState, PlacementConstraints
from tests.integration.cluster_processes import ClusterProcesses, run_cluster_processes
from tests.integration.running_cluster import make_python_job
from tests.waiting import until


def make_checkpointing_job(folder: Path) -> JobSpec:
    """A job that counts until `folder`/end exists, and continues from the number that it saved on SIGTERM."""
    code = f"""
        import pathlib, signal, sys, time
        folder = pathlib.Path({str(folder)!r})
        saved = folder / "checkpoint"
        number = int(saved.read_text()) if saved.exists() else 0
        print("from", number, flush=True)
        def save(*_):
            saved.write_text(str(number))
            sys.exit(0)
        signal.signal(signal.SIGTERM, save)
        while not (folder / "end").exists():
            number += 1
            (folder / "progress").write_text(str(number))
            time.sleep(0.02)
    """
    return make_restartable(make_python_job(textwrap.dedent(code), name="checkpointing"), grace_s=20.0)


def make_restartable(spec: JobSpec, *, grace_s: float) -> JobSpec:
    return msgspec.structs.replace(spec, constraints=PlacementConstraints(preemptible=True, grace_s=grace_s))


async def submit_and_wait_running(client: ClusterClient, spec: JobSpec) -> Job:
    job = await client.submit(spec)

    async def is_running() -> Job | None:
        found = await client.get_job(job.job_id)
        return found if found.state is JobState.RUNNING else None

    running = await until(is_running, what=f"{spec.name} runs")
    assert running is not None
    return running


async def start_genie(cluster: ClusterProcesses, *arguments: str) -> asyncio.subprocess.Process:
    access = cluster.settings().cluster
    environ = {
        "GENIE_MASTER_ADDR": str(access.master_addr),
        "GENIE_MASTER_PORT": str(access.master_port),
        "GENIE_TOKEN": str(access.token),
        "GENIE_STATE_DIR": str(cluster.state_dir),
    }
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "genie", *arguments),
        env={**os.environ, **environ},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


async def read_until(stream: asyncio.StreamReader | None, text: str) -> None:
    assert stream is not None
    async with asyncio.timeout(60):
        while text not in (line := (await stream.readline()).decode()):
            assert line, f"the output has ended without {text!r}"


@pytest.mark.timeout(120)
async def test_drain_moves_restartable_jobs_and_waits_for_the_others(tmp_path: Path) -> None:
    end = tmp_path / "end"
    wait_for_end = f"import os, time\nwhile not os.path.exists({str(end)!r}): time.sleep(0.02)"
    ignore_sigterm = f"import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n{wait_for_end}"
    async with run_cluster_processes(tmp_path, "a") as cluster, cluster.client() as client:
        moving = await submit_and_wait_running(client, make_checkpointing_job(tmp_path))
        stubborn = await submit_and_wait_running(
            client, make_restartable(make_python_job(ignore_sigterm, name="stubborn"), grace_s=0.5)
        )
        staying = await submit_and_wait_running(client, make_python_job(wait_for_end, name="staying"))
        await until((tmp_path / "progress").exists)
        await cluster.start_agent("b")
        drain = await start_genie(cluster, "drain", "a", "--reason", "new fans", "--wait", "--timeout", "90s")
        await read_until(
            drain.stdout, f"a is draining: 2 jobs move (grace period up to 20 s), 1 job runs until it ends: "
            f"{staying.job_id}"
        )  # fmt: skip
        await read_until(drain.stderr, f"a: 1 job is left: {staying.job_id}")
        for job in (moving, stubborn):
            again = await until(lambda job=job: _get_job_on_b(client, job.job_id))  # type: ignore[misc]
            assert again.run_number == 2
            assert "moved from a: draining (new fans)" in [step.reason for step in again.history]
        end.touch()
        await read_until(drain.stdout, "a is drained")
        assert await drain.wait() == 0
        assert (await client.wait_job(moving.job_id, timeout_s=60)).state is JobState.SUCCEEDED
        log = b"".join([part async for part in client.follow_log(moving.job_id, follow=False, run=2)])
        saved = int((tmp_path / "checkpoint").read_text())
        assert log.decode() == f"from {saved}\n"
        assert saved > 0


async def _get_job_on_b(client: ClusterClient, job_id: str) -> Job | None:
    job = await client.get_job(job_id)
    is_on_b = job.placement is not None and job.placement.node_id == "b"
    return job if is_on_b and job.state is JobState.RUNNING else None
