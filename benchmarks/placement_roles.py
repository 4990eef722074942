"""The processes of bench_placements.py: a controller, and simulated agents with 1,000 GPUs.

    python benchmarks/placement_roles.py controller --state-dir DIR [--tls on|off]
    python benchmarks/placement_roles.py agents --state-dir DIR [--nodes 125] [--gpus 8]

The agents are simulated: every node joins, has its own connection and implements the agent protocol, but
starts no process. A job ends at the next tick of its node, which reports it in a heartbeat. Each role prints
`ready` and runs until SIGTERM.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from collections import Counter
from collections.abc import Coroutine
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from genie import config
from genie.agent.identity import read_identity
from genie.agent.joining import join_cluster
from genie.controller.controller import Controller
from genie.controller.store.sqlite import SqliteStore
from genie.errors import FencedError
from genie.model.messages import (
    AGENT_REQUESTS,
    ConfirmLaunch,
    CreateToken,
    Done,
    ExitReport,
    Heartbeat,
    Launch,
    Message,
    Register,
    RunningJob,
)
from genie.model.node import GPUInfo, NodeInfo, NodeRole, NodeStatus, Vendor
from genie.model.tenant import TokenKind
from genie.processes.clock import SystemClock
from genie.processes.tasks import loop_factory, reduce_garbage_collection
from genie.runtime.credentials import connect_authenticated, find_access
from genie.runtime.network import TcpNetwork
from genie.runtime.rpc import Peer
from genie.telemetry import log

REPORT_INTERVAL_S = 0.2
CALL_TIMEOUT_S = 30.0


async def run_controller(state_dir: Path, *, tls: str) -> None:
    """Runs a controller like `python -m genie.controller`."""
    settings = config.load({"controller.port": 0, "controller.tls": tls, "paths.state_dir": str(state_dir)})
    log.configure(settings.log)
    clock = SystemClock()
    store = await SqliteStore.open(state_dir / "controller" / "store.sqlite3", clock=clock)
    try:
        controller = Controller(
            settings.controller,
            state_dir=state_dir,
            store=store,
            network=TcpNetwork(),
            clock=clock,
            name="bench",
        )
        await run_until_sigterm(controller.run(), controller.wait_ready())
    finally:
        await store.close()


class SimulatedAgent:
    """Simulated agent: accepts and confirms launches, and reports their exit at the next tick."""

    def __init__(self, info: NodeInfo, group: asyncio.TaskGroup) -> None:
        self._info = info
        self._task_group = group
        self._running_jobs: dict[str, RunningJob] = {}

    async def run(
        self, state_dir: Path, *, phase_s: float, up: asyncio.Semaphore, network: TcpNetwork
    ) -> None:
        connection = connect_authenticated(
            network,
            read_identity(state_dir / "agents" / self._info.node_id),
            timeout_s=CALL_TIMEOUT_S,
            program="bench",
            requests=AGENT_REQUESTS,
            handler=self._handle,
        )
        async with connection as (peer, _):
            await peer.call(Register(node=self._info), timeout_s=CALL_TIMEOUT_S)
            await self._send_heartbeat(peer, ())
            up.release()
            await asyncio.sleep(phase_s)
            while True:
                await asyncio.sleep(REPORT_INTERVAL_S)
                ended, self._running_jobs = tuple(self._running_jobs.values()), {}
                await self._send_heartbeat(peer, ended)

    async def _handle(self, peer: Peer, request: Message) -> Message:
        if isinstance(request, Launch):
            self._task_group.create_task(self._confirm(peer, request.job_id, request.placement.epoch))
        return Done()

    async def _confirm(self, peer: Peer, job_id: str, epoch: int) -> None:
        confirmation = ConfirmLaunch(job_id=job_id, epoch=epoch, incarnation=self._info.incarnation)
        with suppress(FencedError):  # the launch was revoked
            await peer.call(confirmation, timeout_s=CALL_TIMEOUT_S)
            self._running_jobs[job_id] = RunningJob(job_id=job_id, epoch=epoch)

    async def _send_heartbeat(self, peer: Peer, ended: tuple[RunningJob, ...]) -> None:
        exits = tuple(
            ExitReport(job_id=job.job_id, epoch=job.epoch, exit_code=0, reason="", ended_at=0.0)
            for job in ended
        )
        while True:
            heartbeat = Heartbeat(
                node_id=self._info.node_id,
                incarnation=self._info.incarnation,
                node=self._info,
                running=tuple(self._running_jobs.values()),
                exits=exits,
            )
            ack = await peer.call(heartbeat, timeout_s=CALL_TIMEOUT_S)
            settled = {order.job_id for order in ack.settled_exits}
            exits = tuple(report for report in exits if report.job_id not in settled)
            if not exits:
                return


def make_node_info(node_id: str, gpus: int) -> NodeInfo:
    return NodeInfo(
        node_id=node_id,
        hostname=node_id,
        role=NodeRole.WORKER,
        host="127.0.0.1",
        gpus=tuple(
            GPUInfo(gpu_id=index, name="simulated", vendor=Vendor.NVIDIA, memory_total_bytes=80 << 30)
            for index in range(gpus)
        ),
        cpus=128.0,
        memory_total_bytes=1 << 40,
        status=NodeStatus.HEALTHY,
        incarnation=1,
    )


async def run_agents(state_dir: Path, *, nodes: int, gpus: int) -> None:
    settings = config.load({"paths.state_dir": str(state_dir)})
    network = TcpNetwork()
    access = await find_access(
        settings.cluster, state_dir=state_dir, network=network, timeout_s=CALL_TIMEOUT_S
    )
    infos = [make_node_info(f"node-{index:03d}", gpus) for index in range(nodes)]
    async with connect_authenticated(network, access, timeout_s=CALL_TIMEOUT_S, program="bench") as (peer, _):
        for info in infos:
            token = (await peer.call(CreateToken(kind=TokenKind.JOIN), timeout_s=CALL_TIMEOUT_S)).token
            await join_cluster(
                access.host,
                access.port,
                token,
                state_dir=state_dir,
                requested_node_id=info.node_id,
                network=network,
                clock=SystemClock(),
            )
    up = asyncio.Semaphore(0)

    async def run_all() -> None:
        async with asyncio.TaskGroup() as group:
            for index, info in enumerate(infos):
                phase_s = REPORT_INTERVAL_S * index / nodes
                agent = SimulatedAgent(info, group).run(state_dir, phase_s=phase_s, up=up, network=network)
                group.create_task(agent)

    async def wait_for_all() -> None:
        for _ in infos:
            await up.acquire()

    await run_until_sigterm(run_all(), wait_for_all())


async def run_until_sigterm(work: Coroutine[Any, Any, None], ready: Coroutine[Any, Any, None]) -> None:
    """Runs `work` until SIGTERM; prints `ready` when the coroutine `ready` returns."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    reduce_garbage_collection()
    async with asyncio.TaskGroup() as group:
        running = group.create_task(work)
        await ready
        print("ready", flush=True)
        await stop.wait()
        running.cancel()


class Profiler:
    """Sampling profile of the main thread by function: own time and cumulative time."""

    def __init__(self) -> None:
        self._own_samples: Counter[str] = Counter()
        self._cumulative_samples: Counter[str] = Counter()

    def start(self) -> None:
        signal.signal(signal.SIGPROF, self._sample)
        signal.setitimer(signal.ITIMER_PROF, 0.001, 0.001)

    def write(self, path: Path) -> None:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        total = self._own_samples.total()
        with path.open("w") as out:
            for title, counts in (("own", self._own_samples), ("cumulative", self._cumulative_samples)):
                out.write(f"{title}, in percent of {total} samples\n")
                for name, count in counts.most_common(60):
                    out.write(f"{count / total:7.1%}  {name}\n")

    def _sample(self, _: int, frame: FrameType | None) -> None:
        names = []
        while frame is not None:
            code = frame.f_code
            names.append(f"{Path(code.co_filename).name}:{code.co_firstlineno} {code.co_qualname}")
            frame = frame.f_back
        self._own_samples[names[0]] += 1
        self._cumulative_samples.update(set(names))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("role", choices=("controller", "agents"))
    parser.add_argument("--state-dir", type=Path, required=True)
    parser.add_argument("--tls", choices=("on", "off"), default="on")
    parser.add_argument("--nodes", type=int, default=125, help="number of nodes (default: 125)")
    parser.add_argument("--gpus", type=int, default=8, help="GPUs per node (default: 8)")
    parser.add_argument("--profile", type=Path, help="write a CPU profile to this file")
    given = parser.parse_args()
    if given.role == "controller":
        work = run_controller(given.state_dir, tls=given.tls)
    else:
        work = run_agents(given.state_dir, nodes=given.nodes, gpus=given.gpus)
    profiler = Profiler()
    if given.profile:
        profiler.start()
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(work)
    if given.profile:
        profiler.write(given.profile)
    return 0


if __name__ == "__main__":
    sys.exit(main())
