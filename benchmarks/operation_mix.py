"""A mix of operations on a whole cluster, and readings of all its processes: used by bench_leaks.py, soak.py.

A cluster as `genie up` starts it, on loopback with TLS, and a session of this process. A round is 1,000
operations:

| operations | processes |
|---|---|
| 800 of the torch device: additions, products, copies to the device, values read back | client, executor |
| 190 requests: GetJob, ListJobs, GetStatus, ListNodes | client, controller |
| 4 submitted jobs, of which 3 run `true` and 1 is cancelled while it runs | client, controller, agent |
| 4 waits until a job has ended, 1 cancellation, 1 log | client, controller, agent |

Most operations are those that a session issues by the thousand per second, because a leak of a few bytes
shows only there. Requests are a fifth, so that 300,000 operations contain 60,000 of them: a leak of 10 bytes
per request shows as 2 bytes per operation. Jobs are few because each starts two processes; 1,200 of them show
a leak of 500 bytes or one descriptor per job. Agent and session send a heartbeat every 50 ms instead of every
second meanwhile. Histories that are bounded by a setting are set so small that the warm-up fills them.

Tables of CPython fill up later. Names in paths are interned while they are used, so that after one to three
thousand jobs the table of interned strings is enlarged once: the agent grows by 1 MiB, which looks like
hundreds of bytes per job. After 9,000 jobs its number of objects is constant.
"""

from __future__ import annotations

import asyncio
import gc
import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import psutil
import report
import torch
from process_readings import ProcessReading, read_process, theil_sen_slope

import genie
from genie import config
from genie.cluster.client import ClusterClient, open_client
from genie.model.job import FINAL_STATES, Job, JobSpec, JobState
from genie.supervisor import local_cluster

REMOTE = "remote_accelerator:0"
ROUND_OPERATIONS = 1000
DEVICE_OPERATIONS = 800
REQUESTS = 190
JOBS_KEPT = 20
WARM_UP_ROUNDS = 100
"""Enough to fill the histories of jobs and of the store, with 4 jobs and about 20 transactions per round."""
JOB_S = 60.0
SETTINGS = {
    "GENIE_CONTROLLER_JOBS_KEPT": str(JOBS_KEPT),
    "GENIE_AGENT_JOBS_KEPT": str(JOBS_KEPT),
    "GENIE_AGENT_HEARTBEAT_S": "0.05",
}
RSS_SLOPE = report.value_at_most(2.0)
NO_GROWTH = report.value_at_most(0.0)
MIB = 1024**2


@dataclass
class ProcessSamples:
    """Readings of each process by the number of operations at that time."""

    readings: dict[str, list[tuple[int, ProcessReading]]] = field(default_factory=dict)

    def add(self, operations: int, pids: dict[str, int]) -> None:
        gc.collect()
        for name, pid in pids.items():
            self.readings.setdefault(name, []).append((operations, read_process(pid)))

    @property
    def operations(self) -> int:
        """Between the first and the last reading."""
        first, *_, last = next(iter(self.readings.values()))
        return last[0] - first[0]

    def rss_slope(self, name: str) -> float:
        """Bytes per operation."""
        return theil_sen_slope([(count, each.rss_bytes) for count, each in self.readings[name]])

    def growth(self, name: str, what: str) -> int:
        """How many descriptors or threads were added over all operations, by the slope."""
        slope = theil_sen_slope([(count, getattr(each, what)) for count, each in self.readings[name]])
        return round(slope * self.operations)

    def figures(self) -> list[report.Figure]:
        found: list[report.Figure] = []
        for name in self.readings:
            found.append(
                report.make_figure(
                    f"{name}_rss_slope", self.rss_slope(name), unit="B/op", samples=[], goal=RSS_SLOPE
                )
            )
            for what in ("descriptors", "threads"):
                grown = self.growth(name, what)
                found.append(
                    report.make_figure(f"{name}_{what}_grown", grown, unit="", samples=[], goal=NO_GROWTH)
                )
        return found

    def rss_line(self) -> str:
        """The resident memory of each process at the last reading."""
        last = {name: readings[-1][1] for name, readings in self.readings.items()}
        return ", ".join(f"{name} {each.rss_bytes / MIB:.1f} MiB" for name, each in last.items())


def warm_up_figures(before: ProcessSamples) -> list[report.Figure]:
    """By how much the warm-up, which fills bounded caches, has increased the memory of each process."""
    return [
        report.make_figure(
            f"{name}_warm_up",
            (readings[-1][1].rss_bytes - readings[0][1].rss_bytes) / MIB,
            unit="MiB",
            samples=[],
        )
        for name, readings in before.readings.items()
    ]


class OperationMix:
    """Runs rounds of operations and counts them."""

    def __init__(self, client: ClusterClient, pids: dict[str, int]) -> None:
        self._client = client
        self.pids = pids
        self.operations = 0
        self._input = torch.ones(16, 16, device=REMOTE)
        self._last_job = ""

    async def run_round(self) -> None:
        jobs = [await self._submit("true") for _ in range(3)]
        cancelled = await self._submit("sleep", "600")
        self._last_job = jobs[0].job_id
        self._run_device_operations()
        await self._send_requests()
        for job in jobs:
            done = await self._client.wait_job(job.job_id)
            if done.state is not JobState.SUCCEEDED:
                raise SystemExit(f"job {done.job_id} is {done.state}: {done.reason}")
        await self._cancel(cancelled)
        await self._client.read_log(self._last_job)
        self.operations += ROUND_OPERATIONS

    def _run_device_operations(self) -> None:
        there = self._input
        for number in range(DEVICE_OPERATIONS // 8):
            a = torch.add(there, there)
            b = torch.add(a, number)
            c = torch.mm(a, b)
            d = torch.add(c, torch.ones(16, 16).to(REMOTE))
            e = torch.mul(d, 0.5)
            f = torch.sum(e)
            if f.item() != f.item():
                raise SystemExit("the device returned NaN")

    async def _send_requests(self) -> None:
        for number in range(REQUESTS):
            if number % 19 == 0:
                await self._client.status()
            elif number % 19 == 1:
                await self._client.nodes()
            elif number % 2:
                await self._client.get_job(self._last_job)
            else:
                await self._client.list_jobs(limit=10)

    async def _submit(self, *command: str) -> Job:
        return await self._client.submit(JobSpec(name="mix", command=command))

    async def _cancel(self, job: Job) -> None:
        async with asyncio.timeout(JOB_S):
            while (await self._client.get_job(job.job_id)).state not in (JobState.RUNNING, *FINAL_STATES):
                pass  # a request takes about a millisecond
        await self._client.cancel(job.job_id)
        done = await self._client.wait_job(job.job_id)
        if done.state is not JobState.CANCELLED:
            raise SystemExit(f"job {done.job_id} is {done.state} after it was cancelled: {done.reason}")


@asynccontextmanager
async def running_mix() -> AsyncIterator[OperationMix]:
    """A cluster with an open session. Call it inside report.use_temporary_state()."""
    os.environ.update(SETTINGS)
    torch.set_num_threads(1)
    settings = config.load({"controller.port": 0})
    async with local_cluster.run_local_cluster(
        settings, progress=lambda text: print(text, file=sys.stderr)
    ) as running:
        state = await genie.init()
        try:
            async with open_client(settings, program="bench") as client:
                yield OperationMix(client, _find_processes(running.pids))
        finally:
            del state
            await genie.shutdown()


def _find_processes(started: dict[str, int]) -> dict[str, int]:
    """Client, controller, agent, executor and the executor's shim, by name."""
    torch.ones(1, device=REMOTE).item()
    executors = _descendants(started["agent"], "genie.executor")
    shims = _descendants(started["agent"], "shim.py")
    if len(executors) != 1 or len(shims) != 1:
        raise SystemExit(f"found {len(executors)} executors and {len(shims)} shims instead of one each")
    return {"client": os.getpid(), **started, "shim": shims[0], "executor": executors[0]}


def _descendants(pid: int, text: str) -> Sequence[int]:
    """IDs of the descendants of a process with this text in their command line."""
    found = psutil.Process(pid).children(recursive=True)
    return [process.pid for process in found if text in " ".join(process.cmdline())]
