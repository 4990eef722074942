"""Shared fixtures: a scripted controller, a node directory, an agent in this or another process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import sys
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from genie.agent.agent import Agent
from genie.agent.disk import DiskAccess
from genie.agent.identity import write_identity
from genie.agent.launcher import LaunchPlan, ShimLauncher
from genie.agent.leftovers import JobProcesses
from genie.config import AgentConfig, environment_for_jobs
from genie.model.node import GPUInfo, Vendor
from genie.model.tenant import TokenKind
from genie.processes.clock import SystemClock
from genie.processes.process_identity import ProcessIdentity
from genie.runtime.credentials import Access
from genie.runtime.network import TcpNetwork
from tests.fakes.controller import HOST, FakeController
from tests.waiting import TIMEOUT_S, until

FAST = AgentConfig(heartbeat_s=0.05, stop_grace_s=0.5)
NODE_ID = "n1"
# Renamed, because a file that is just created may be empty.
WRITE_PID = "echo $$ > pid.new; mv pid.new pid"
# A job that writes its process ID and runs until it is ended.
STAY = ("/bin/sh", "-c", f"{WRITE_PID}; echo here; exec sleep 300")


class TwoGpuInventory:
    """Two healthy GPUs. A GPU that no job holds has outside memory use."""

    async def read_async(self, held: Collection[int] = ()) -> tuple[GPUInfo, ...]:
        return tuple(
            GPUInfo(
                gpu_id=index,
                name="fake",
                vendor=Vendor.NVIDIA,
                uuid=f"GPU-{index}",
                memory_outside_bytes=0 if index in held else 1000,
            )
            for index in (0, 1)
        )


@pytest.fixture
def kill_leftover_job_processes(tmp_path: Path) -> Iterator[None]:
    """Kills processes of jobs that outlive the test, such as children of a killed shim."""
    yield
    JobProcesses(tmp_path).kill_all_processes()


@pytest.fixture
async def controller(tmp_path: Path) -> AsyncIterator[FakeController]:
    async with FakeController(tmp_path / "controller").listening() as fake:
        yield fake


@pytest.fixture
def node_dir(tmp_path: Path, controller: FakeController) -> Path:
    return make_joined_node_dir(tmp_path / "state", controller)


def make_joined_node_dir(state_dir: Path, controller: FakeController) -> Path:
    """A node that has joined a cluster without TLS."""
    directory = state_dir / "agents" / NODE_ID
    write_identity(
        directory,
        token=str(controller.token(TokenKind.NODE)),
        certificate_pem="",
        key_pem=b"",
        ca_pem="",
        controller=(HOST, controller.port),
    )
    return directory


RunAgent = Callable[..., AbstractAsyncContextManager[Agent]]


@pytest.fixture
def run_agent(controller: FakeController, node_dir: Path, kill_leftover_job_processes: None) -> RunAgent:
    """Runs an agent in this process for the block and stops it at the end."""

    @contextlib.asynccontextmanager
    async def run(
        *, group: str | None = None, disk: DiskAccess | None = None, **changes: object
    ) -> AsyncIterator[Agent]:
        token = controller.token(TokenKind.NODE)
        agent = Agent(
            replace(FAST, **changes),  # type: ignore[arg-type]
            node_dir=node_dir,
            access=Access(host=HOST, port=controller.port, token=token, tls=None),
            network=TcpNetwork(),
            clock=SystemClock(),
            rng=random.Random(1),
            inventory=TwoGpuInventory(),
            launcher=ShimLauncher(group),
            base_env=environment_for_jobs(),
            disk=disk,
        )
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(agent.run())
            try:
                yield agent
            finally:
                agent.stop()

    return run


@dataclass
class AgentProcess:
    """An agent in a separate process. `output` is its standard error."""

    process: asyncio.subprocess.Process
    output: Path

    def send_signal(self, number: int) -> None:
        self.process.send_signal(number)

    async def wait(self, *, timeout_s: float = TIMEOUT_S) -> int:
        async with asyncio.timeout(timeout_s):
            return await self.process.wait()


StartAgent = Callable[..., AbstractAsyncContextManager[AgentProcess]]


@pytest.fixture
def start_agent_process(
    tmp_path: Path, controller: FakeController, kill_leftover_job_processes: None
) -> StartAgent:
    """Runs `python -m genie.agent` for the block; kills it at the end if it still runs."""

    @contextlib.asynccontextmanager
    async def start(*arguments: str, **env: str) -> AsyncIterator[AgentProcess]:
        output = tmp_path / f"agent-{random.randrange(1 << 30)}.log"
        with output.open("wb") as file:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "genie.agent", "--state-dir", str(tmp_path / "state"), *arguments),
                env=os.environ | {"GENIE_AGENT_HEARTBEAT_S": "0.1", "GENIE_AGENT_STOP_GRACE_S": "0.5"} | env,
                stdin=asyncio.subprocess.DEVNULL,
                stderr=file,
            )
        try:
            yield AgentProcess(process, output)
        finally:
            if process.returncode is None:
                process.send_signal(signal.SIGKILL)
                await process.wait()

    return start


async def wait_for_job_process(node_dir: Path, job_id: str) -> ProcessIdentity:
    """Waits for a job that runs WRITE_PID and for its start record; returns its process."""
    directory = node_dir / "jobs" / job_id
    path = directory / "work" / "pid"
    await until(path.exists, what=f"{job_id} writes its process ID")
    await until((directory / "started.json").exists, what=f"the start record of {job_id}")
    mark = ProcessIdentity.of_pid(int(path.read_text()))
    assert mark is not None, f"{job_id} has ended"
    return mark


@pytest.fixture
def reap_abandoned_shims(tmp_path: Path) -> Iterator[None]:
    """Reaps shims that an earlier agent in this process has abandoned; init does that for a killed one."""
    yield
    for path in tmp_path.rglob("started.json"):
        pid, _ = json.loads(path.read_text())["shim"]
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)


@pytest.fixture
async def launcher() -> AsyncIterator[ShimLauncher]:
    """A launcher with real shims; kills running jobs at the end."""
    shims = ShimLauncher()
    yield shims
    for job_id in shims.running_jobs_and_kill_errors():
        shims.kill_job(job_id, reason="the test is over")
    await until(lambda: not shims.running_jobs_and_kill_errors(), what="the shims end")
    shims.close()


@pytest.fixture
def make_plan(tmp_path: Path, kill_leftover_job_processes: None) -> Callable[..., LaunchPlan]:
    def make(*argv: str, job_id: str = "job-1", **changes: object) -> LaunchPlan:
        directory = tmp_path / "jobs" / job_id
        for name in ("log", "work", "tmp"):
            (directory / name).mkdir(parents=True)
        plan = LaunchPlan(
            job_id=job_id,
            epoch=7,
            argv=argv,
            env={"PATH": os.environ["PATH"], "GENIE_JOB_DIR": str(directory)},
            directory=directory,
            work_dir=directory / "work",
            log_file_bytes_max=1 << 20,
            log_files_max=3,
            grace_s=0.3,
            deadman_grace_s=0.2,
        )
        return replace(plan, **changes)  # type: ignore[arg-type]

    return make
