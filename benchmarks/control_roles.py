"""The processes of bench_control.py and bench_overload.py: a controller, and many agents in one process.

    python benchmarks/control_roles.py --state-dir DIR --nodes 63 [--first 0] [--gpus 8] [--kind real]

With `--kind real` each node is the agent of genie/agent: it joins, connects with its own certificate, keeps
its journal and sends heartbeats. Only its GPUs and job processes are simulated; the readings of the GPUs
change with every heartbeat, as those of real ones do. With `--kind light` it is the node of
placement_roles.py, which handles thousands of jobs per second. The process prints `ready`; each line on
standard input is answered with one JSON object (AgentsReport), and the process ends when standard input is
closed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import msgspec
import placement_roles

from genie import config
from genie.agent.agent import Agent
from genie.agent.disk import DiskAccess
from genie.agent.identity import read_identity
from genie.agent.joining import join_cluster
from genie.agent.journal import JobRecord
from genie.agent.launcher import LaunchPlan
from genie.agent.leftovers import AdoptedJob
from genie.cluster.client import open_client
from genie.model.messages import CreateToken, ExitReport
from genie.model.node import GPUInfo, NodeStatus, Vendor
from genie.model.tenant import TokenKind
from genie.processes.clock import SystemClock
from genie.processes.file_limit import raise_open_file_limit
from genie.processes.tasks import file_io_threads, loop_factory, reduce_garbage_collection
from genie.runtime import wire
from genie.runtime.credentials import connect_authenticated, find_access
from genie.runtime.network import Channel, ClientTls, TcpNetwork
from genie.telemetry import log

CALL_S = 30.0
START_S = 120.0
FILES_MAX = 16_640
GPU_MEMORY_BYTES = 80 << 30
_KIND_OFFSET = 4
"""Of the kind in the header of a frame; the call ID follows."""
_HEARTBEAT = msgspec.msgpack.encode({"type": "Heartbeat"})[1:]
"""How the payload of a heartbeat begins, after the number of its fields."""


@dataclass
class AgentsReport:
    """Since the last report."""

    latencies_ms: list[float] = field(default_factory=list)
    """From each heartbeat to its reply."""
    connections: int = 0
    """Opened connections."""


# --- used by the benchmarks ---------------------------------------------------------------------


class ControllerProcess:
    """`python -m genie.controller` on a free port of loopback, with TLS."""

    def __init__(self, process: subprocess.Popen[bytes], log_path: Path) -> None:
        self._process = process
        self._log_path = log_path
        self.pid = process.pid

    def count_logged(self, status: NodeStatus) -> int:
        """How often the controller has logged that a node has this status."""
        logged = re.compile(rf" node \S+ is {status}\b")
        return sum(1 for line in self._log_path.read_text("utf-8").splitlines() if logged.search(line))

    def check_running(self) -> None:
        if self._process.poll() is not None:
            raise SystemExit(f"the controller has ended:\n{self._log_path.read_text('utf-8')[-2000:]}")


@contextlib.contextmanager
def controller_process(folder: Path, *, profile: Path | None = None) -> Iterator[ControllerProcess]:
    """Runs a controller and yields it when it leads. `profile`: where to write what cProfile measured."""
    path = folder / "controller.log"
    command = ["-m", "genie.controller"]
    if profile is not None:
        command = ["-m", "cProfile", "-o", str(profile), *command]
    command += ["--port", "0", "--state-dir", str(folder)]
    with path.open("wb") as output:
        process = subprocess.Popen([sys.executable, *command], stdout=output, stderr=output)
    running = ControllerProcess(process, path)
    try:
        deadline_s = time.monotonic() + START_S
        while not (folder / "local.json").exists():
            running.check_running()
            if time.monotonic() > deadline_s:
                raise SystemExit(f"the controller did not start within {START_S:g} s")
            time.sleep(0.05)
        yield running
    finally:
        process.terminate()
        process.wait(timeout=60)


class AgentsProcess:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.pid = process.pid

    def take_report(self) -> AgentsReport:
        """What has happened since the last call. Blocks until the process answers."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write("report\n")
        self._process.stdin.flush()
        return AgentsReport(**json.loads(self._process.stdout.readline()))


@contextlib.contextmanager
def agents_process(
    folder: Path, *, nodes: int, gpus: int = 8, first: int = 0, kind: str = "real"
) -> Iterator[AgentsProcess]:
    """Runs the agents of `nodes` nodes, of which the first has the number `first`."""
    path = folder / f"agents-{first}.log"
    options = {"state-dir": folder, "nodes": nodes, "gpus": gpus, "first": first, "kind": kind}
    arguments = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    with path.open("wb") as errors:
        process = subprocess.Popen(
            [sys.executable, __file__, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
    assert process.stdin is not None and process.stdout is not None
    try:
        if process.stdout.readline().strip() != "ready":
            raise SystemExit(f"the agents did not start:\n{path.read_text('utf-8')[-2000:]}")
        yield AgentsProcess(process)
    finally:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


def wait_for_nodes(folder: Path, nodes: int) -> None:
    """Waits until the controller lists this number of healthy nodes."""

    async def wait() -> None:
        settings = config.load({"paths.state_dir": str(folder)})
        async with asyncio.timeout(START_S), open_client(settings, program="bench") as client:
            while True:
                healthy = [view for view in await client.nodes() if view.info.status is NodeStatus.HEALTHY]
                if len(healthy) == nodes:
                    return
                await asyncio.sleep(0.5)

    asyncio.run(wait())


# --- the agents ---------------------------------------------------------------------------------


class SimulatedGPUs:
    """GPUs whose temperature, power and utilization differ at every reading."""

    def __init__(self, count: int, rng: random.Random) -> None:
        self._count = count
        self._rng = rng

    async def read_async(self, held: Collection[int] = ()) -> tuple[GPUInfo, ...]:
        return tuple(
            GPUInfo(
                gpu_id=index,
                name="simulated",
                vendor=Vendor.NVIDIA,
                uuid=f"GPU-{index}",
                memory_total_bytes=GPU_MEMORY_BYTES,
                memory_used_bytes=self._rng.randrange(GPU_MEMORY_BYTES),
                utilization_pct=float(self._rng.randrange(101)),
                temperature_c=float(self._rng.randrange(30, 80)),
                power_w=float(self._rng.randrange(70, 700)),
            )
            for index in range(self._count)
        )


class SimulatedLauncher:
    """A launcher without processes: a job ends by itself at once, with exit code 0."""

    def __init__(self) -> None:
        self._exits: list[ExitReport] = []
        self._has_exits = asyncio.Event()

    async def adopt_jobs_and_kill_leftovers(
        self, jobs_dir: Path, *, may_adopt: Callable[[JobRecord], bool]
    ) -> tuple[list[AdoptedJob], int]:
        return [], 0

    async def start_job(self, plan: LaunchPlan, *, deadman_expiry_s: float) -> None:
        report = ExitReport(
            job_id=plan.job_id, epoch=plan.epoch, exit_code=0, reason="exit code 0", ended_at=time.time()
        )
        self._exits.append(report)
        self._has_exits.set()

    def extend_deadman_timers(self, deadman_expiry_s: float) -> None:
        pass

    def kill_job(self, job_id: str, *, reason: str, grace_s: float | None = None) -> None:
        pass

    def running_jobs_and_kill_errors(self) -> dict[str, str]:
        return {}

    def take_exit_reports(self) -> list[ExitReport]:
        self._has_exits.clear()
        ended, self._exits = self._exits, []
        return ended

    async def wait_for_exit_report(self) -> None:
        await self._has_exits.wait()

    def close(self) -> None:
        pass


class TimedChannel:
    """A channel that records the time from each heartbeat to its reply."""

    def __init__(self, channel: Channel, report: Callable[[], AgentsReport]) -> None:
        self._channel = channel
        self._report = report
        self._sent_s: dict[int, float] = {}
        self.peer = channel.peer
        self.certificate_name = channel.certificate_name
        self.set_frame_limit = channel.set_frame_limit
        self.set_authenticated = channel.set_authenticated
        self.close = channel.close

    async def send(self, frame: bytes) -> None:
        self._record_sent(frame)
        await self._channel.send(frame)

    def try_send_nowait(self, frame: bytes) -> bool:
        if not self._channel.try_send_nowait(frame):
            return False
        self._record_sent(frame)
        return True

    async def receive(self) -> wire.Frame:
        return self._record_received(await self._channel.receive())

    def try_receive_nowait(self) -> wire.Frame | None:
        frame = self._channel.try_receive_nowait()
        return None if frame is None else self._record_received(frame)

    def _record_sent(self, frame: bytes) -> None:
        if frame[_KIND_OFFSET] == wire.FrameKind.REQUEST and frame.startswith(
            _HEARTBEAT, wire.HEADER_BYTES + 1
        ):
            call_id = int.from_bytes(frame[_KIND_OFFSET + 1 : wire.HEADER_BYTES], "big")
            self._sent_s[call_id] = time.perf_counter()

    def _record_received(self, frame: wire.Frame) -> wire.Frame:
        if frame.kind is not wire.FrameKind.REQUEST:
            sent_s = self._sent_s.pop(frame.call_id, None)
            if sent_s is not None:
                self._report().latencies_ms.append((time.perf_counter() - sent_s) * 1000)
        return frame


class TimedNetwork(TcpNetwork):
    """TCP whose outgoing connections are timed."""

    def __init__(self) -> None:
        super().__init__()
        self.report = AgentsReport()

    async def connect(self, host: str, port: int, *, tls: ClientTls | None, timeout_s: float) -> Channel:
        channel = await super().connect(host, port, tls=tls, timeout_s=timeout_s)
        self.report.connections += 1
        return TimedChannel(channel, lambda: self.report)

    def take_report(self) -> AgentsReport:
        report, self.report = self.report, AgentsReport()
        return report


async def join_all(state_dir: Path, node_ids: Collection[str]) -> None:
    """Creates an identity for each node, as `genie join` does."""
    settings = config.load({"paths.state_dir": str(state_dir)})
    network = TcpNetwork()
    access = await find_access(settings.cluster, state_dir=state_dir, network=network, timeout_s=CALL_S)
    async with connect_authenticated(network, access, timeout_s=CALL_S, program="bench") as (peer, _):
        for node_id in node_ids:
            token = (await peer.call(CreateToken(kind=TokenKind.JOIN), timeout_s=CALL_S)).token
            await join_cluster(
                access.host,
                access.port,
                token,
                state_dir=state_dir,
                requested_node_id=node_id,
                network=network,
                clock=SystemClock(),
                is_node_id_fixed=True,
            )


async def run_agents(given: argparse.Namespace) -> None:
    raise_open_file_limit(FILES_MAX)
    settings = config.load({"paths.state_dir": str(given.state_dir)})
    log.configure(settings.log)
    node_ids = [f"node-{number:04d}" for number in range(given.first, given.first + given.nodes)]
    await join_all(given.state_dir, node_ids)
    network = TimedNetwork()
    with file_io_threads("genie-bench-files") as files:
        disk = DiskAccess(run_journal_call=files, run_job_file_call=files)

        async def run_node(number: int, node_id: str, group: asyncio.TaskGroup) -> None:
            phase_s = number / len(node_ids)
            await asyncio.sleep(phase_s * settings.agent.heartbeat_s)
            if given.kind == "light":
                info = placement_roles.make_node_info(node_id, given.gpus)
                node = placement_roles.SimulatedAgent(info, group)
                await node.run(given.state_dir, phase_s=0.0, up=asyncio.Semaphore(0), network=network)
                return
            node_dir = given.state_dir / "agents" / node_id
            agent = Agent(
                settings.agent,
                node_dir=node_dir,
                access=read_identity(node_dir),
                network=network,
                clock=SystemClock(),
                rng=random.Random(number),
                inventory=SimulatedGPUs(given.gpus, random.Random(number)),
                launcher=SimulatedLauncher(),
                disk=disk,
            )
            await agent.run()

        async with asyncio.TaskGroup() as group:
            running = [
                group.create_task(run_node(number, node_id, group)) for number, node_id in enumerate(node_ids)
            ]
            reduce_garbage_collection()
            print("ready", flush=True)
            while await asyncio.to_thread(sys.stdin.readline):
                print(json.dumps(asdict(network.take_report())), flush=True)
            for task in running:
                task.cancel()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--state-dir", type=Path, required=True)
    parser.add_argument("--nodes", type=int, required=True, help="number of nodes")
    parser.add_argument("--first", type=int, default=0, help="number of the first node (default: 0)")
    parser.add_argument("--gpus", type=int, default=8, help="GPUs per node (default: 8)")
    parser.add_argument("--kind", choices=("real", "light"), default="real", help="agent (default: real)")
    given = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the benchmark closes standard input
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(run_agents(given))
    return 0


if __name__ == "__main__":
    sys.exit(main())
