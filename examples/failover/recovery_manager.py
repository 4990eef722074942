"""Failure recovery: a job with checkpoints survives the drain and the loss of its node.

    python examples/failover/recovery_manager.py

Runs a cluster of two nodes in a temporary directory. A restartable job saves its state on SIGTERM. When its
node is drained or shut down, the controller queues it again. It resumes from its checkpoint.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from genie import config
from genie.cluster.client import ClusterClient, open_client
from genie.model.job import Job, JobSpec, JobState, PlacementConstraints, Transition
from genie.supervisor import local_cluster

STEP_TIMEOUT_S = 60.0
TRAINING = """
import os, pathlib, signal, sys, time
folder = pathlib.Path(sys.argv[1])
checkpoint, resumed = folder / "checkpoint", folder / "resumed"
step = int(checkpoint.read_text()) if checkpoint.exists() else 0
def save_and_exit(*_):
    checkpoint.write_text(str(step))
    sys.exit(0)
signal.signal(signal.SIGTERM, save_and_exit)
with resumed.open("a") as file:
    file.write(f"{os.environ['GENIE_JOB_NODE']} from step {step}\\n")
while not (folder / "finish").exists():  # until the example has shown both failures
    time.sleep(0.02)
    step += 1
"""
START_S = time.monotonic()


async def submit_and_wait(client: ClusterClient, spec: JobSpec) -> Job:
    """Submit the job once and print its transitions until it ends."""
    printed: list[Transition] = []

    def print_new_transitions(job: Job) -> None:
        for step in job.history[len(printed) :]:
            print_event(f"{job.job_id} {step.state}: {step.reason}")
            printed.append(step)

    job = await client.submit(spec)
    return await client.wait_job(job.job_id, on_change=print_new_transitions)


def print_event(text: str) -> None:
    print(f"{time.monotonic() - START_S:5.1f} s  {text}", flush=True)


async def wait_resumed(folder: Path, node_id: str, *, run_count: int) -> None:
    """Wait until that many runs have started, the last one on this node."""
    async with asyncio.timeout(STEP_TIMEOUT_S):
        while True:
            lines = (folder / "resumed").read_text().splitlines()
            if len(lines) >= run_count and lines[-1].startswith(f"{node_id} "):
                return print_event(f"training on {lines[-1]}")
            await asyncio.sleep(0.05)


async def drain_and_shut_down(client: ClusterClient, folder: Path, second_node: config.Settings) -> None:
    """Drain the first node of the job, then shut down the second one; let the job finish on the first."""
    await wait_resumed(folder, "a1", run_count=1)
    async with local_cluster.run_local_agent(second_node, second_node.cluster, progress=print_event):
        await client.empty_node("a1", reason="maintenance")
        await wait_resumed(folder, "a2", run_count=2)
        await client.undrain_node("a1")
    await wait_resumed(folder, "a1", run_count=3)
    (folder / "finish").touch()


def load_settings(folder: Path, node_id: str, **more: object) -> config.Settings:
    """Settings of a node with its own state directory; address, store and token of the user are not used."""
    arguments = {"paths.state_dir": folder / node_id, "cluster.node_id": node_id, **more}
    return config.load(arguments, environ={"GENIE_CONFIG": os.devnull})


async def main(folder: Path) -> int:
    (folder / "resumed").touch()
    first = load_settings(folder, "a1", **{"controller.port": 0})
    constraints = PlacementConstraints(preemptible=True, grace_s=10.0)
    command = (sys.executable, "-c", TRAINING, str(folder))
    spec = JobSpec(name="training", command=command, constraints=constraints)
    async with local_cluster.run_local_cluster(first, progress=print_event) as running:
        assert running.cluster is not None
        access = local_cluster.make_owner_access(folder / "a1", running.cluster)
        second = replace(load_settings(folder, "a2"), cluster=replace(access, node_id="a2"))
        async with open_client(second) as client, asyncio.TaskGroup() as group:
            job = group.create_task(submit_and_wait(client, spec))
            group.create_task(drain_and_shut_down(client, folder, second))
    print_event(f"the job has {job.result().state}")
    return 0 if job.result().state is JobState.SUCCEEDED else 1


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="genie-recovery-") as name:
        sys.exit(asyncio.run(main(Path(name))))
