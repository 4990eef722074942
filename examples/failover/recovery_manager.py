"""Failure recovery: a job with checkpoints survives the drain and the loss of its node.

    python examples/failover/recovery_manager.py

Runs a cluster of two nodes in a temporary directory. A preemptible job saves its state on SIGTERM. When its
node is drained, the controller moves the job. When its next node shuts down, the controller queues the job
again if it can; if the job is lost, `RecoveryManager` submits it again. It resumes from its checkpoint.
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
from genie.model.job import Job, JobSpec, JobState, PlacementConstraints
from genie.supervisor import local_cluster

SUBMISSIONS_MAX = 3
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


class RecoveryManager:
    """Runs one job until it succeeds: submits it again when it is lost, and prints its transitions."""

    def __init__(self, client: ClusterClient, spec: JobSpec) -> None:
        self._client = client
        self._spec = spec
        self._printed_count = 0

    async def run(self) -> Job:
        for _ in range(SUBMISSIONS_MAX):
            self._printed_count = 0
            job = await self._client.submit(self._spec)
            ended = await self._client.wait_job(job.job_id, on_change=self._print_new_transitions)
            if ended.state is not JobState.LOST:
                return ended
        raise SystemExit(f"lost {SUBMISSIONS_MAX} times, most recently: {ended.reason}")

    def _print_new_transitions(self, job: Job) -> None:
        """The history also has the transitions between two replies of the controller."""
        for step in job.history[self._printed_count :]:
            print_event(f"{job.job_id} {step.state}: {step.reason}")
        self._printed_count = len(job.history)


def print_event(text: str) -> None:
    print(f"{time.monotonic() - START_S:5.1f} s  {text}", flush=True)


async def wait_resumed(folder: Path, node_id: str, *, run_count: int) -> None:
    """Wait until that many runs have started, the last one on this node."""
    async with asyncio.timeout(STEP_TIMEOUT_S):
        while True:
            lines = (folder / "resumed").read_text().splitlines() if (folder / "resumed").exists() else []
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
    """Settings of a node with its own state directory; those of the user are ignored."""
    for name in [name for name in os.environ if name.startswith("GENIE_")]:
        del os.environ[name]
    os.environ["GENIE_CONFIG"] = os.devnull
    return config.load({"paths.state_dir": folder / node_id, "cluster.node_id": node_id, **more})


async def main(folder: Path) -> int:
    first = load_settings(folder, "a1", **{"controller.port": 0})
    constraints = PlacementConstraints(preemptible=True, grace_s=10.0)
    command = (sys.executable, "-c", TRAINING, str(folder))
    spec = JobSpec(name="training", command=command, constraints=constraints)
    async with local_cluster.run_local_cluster(first, progress=print_event) as running:
        assert running.cluster is not None
        access = local_cluster.make_owner_access(folder / "a1", running.cluster)
        second = replace(load_settings(folder, "a2"), cluster=replace(access, node_id="a2"))
        async with open_client(second) as client, asyncio.TaskGroup() as group:
            job = group.create_task(RecoveryManager(client, spec).run())
            group.create_task(drain_and_shut_down(client, folder, second))
    print_event(f"the job has {job.result().state}")
    return 0 if job.result().state is JobState.SUCCEEDED else 1


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="genie-recovery-") as name:
        sys.exit(asyncio.run(main(Path(name))))
