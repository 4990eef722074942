"""The machines of a fault run: three servers and some nodes, with the commands that a user runs on them.

Each machine has an address, a state directory and a supervisor: `genie up` or `genie join` in the foreground.
The state directory of a server is a small file system of its own, which a fault can fill.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from genie import config
from genie.agent.identity import AGENTS_DIR
from genie.agent.journal import LEADER_TOKEN_FILE
from genie.cluster.client import ClusterClient, open_client
from genie.config import Settings
from genie.errors import GenieError
from genie.model.messages import StatusReply
from genie.model.tenant import TokenKind
from genie.runtime.credentials import OWNER_TOKEN_FILE
from genie.supervisor import local_cluster
from tests.faults.namespaces import MachineNetwork, run_command

CONTROLLER_PORT = 5555
GPUS_PER_NODE = 3
"""Accelerators that each node offers: CPU accelerators, because the machines have no GPU."""
SERVER_DISK_MIB = 768
_START_TIMEOUT_S = 120.0
_STOP_TIMEOUT_S = 30.0
_POLL_S = 0.1
_FILL_BLOCK_BYTES = 1 << 20
_FILLER_FILE = "filler"
_CLOCK_SOURCE = Path(__file__).with_name("stepped_clock.c")
_CLOCK_LIBRARY = "stepped_clock.so"


def compile_stepped_clock(directory: Path) -> Path:
    """Compiles stepped_clock.c into this directory; returns the library."""
    library = directory / _CLOCK_LIBRARY
    run_command("cc", "-O1", "-Wall", "-shared", "-fPIC", str(_CLOCK_SOURCE), "-ldl", "-o", str(library))
    return library


@dataclass
class Machine:
    """One machine. `is_server`: it runs an etcd member and a controller besides its agent."""

    name: str
    address: str
    is_server: bool
    folder: Path
    network: MachineNetwork

    def __post_init__(self) -> None:
        self.state_dir = self.folder / "state"
        self._supervisor: subprocess.Popen[bytes] | None = None
        self._clock_file = self.folder / "clock"

    @property
    def endpoint(self) -> str:
        return f"{self.address}:{CONTROLLER_PORT}"

    @property
    def pids(self) -> dict[str, int]:
        """Running processes by name: up, etcd, controller, agent."""
        running = local_cluster.find_running_cluster(self.state_dir)
        return {} if running is None else running.pids

    @property
    def is_supervised(self) -> bool:
        return self._supervisor is not None and self._supervisor.poll() is None

    def create_folders(self, environ: Mapping[str, str]) -> None:
        """Creates the folders of the machine; `environ` is for all of its processes."""
        self._environ = {**os.environ, **environ, "GENIE_STATE_DIR": str(self.state_dir)}
        self._environ |= {"GENIE_NODE_ID": self.name, "HOME": str(self.folder)}
        self._environ["STEPPED_CLOCK_FILE"] = str(self._clock_file)
        self.state_dir.mkdir(parents=True, mode=0o700)
        if self.is_server:
            size = f"size={SERVER_DISK_MIB}m,mode=0700"
            run_command("mount", "-t", "tmpfs", "-o", size, "none", str(self.state_dir))
        self.step_clock(0)

    # --- commands --------------------------------------------------------------------------------

    def start(self, *arguments: str) -> None:
        """Starts `genie ARGUMENTS` as the supervisor."""
        with (self.folder / "supervisor.log").open("ab") as log:
            self._supervisor = subprocess.Popen(
                [*self.network.command_prefix(self.name), sys.executable, "-P", "-m", "genie", *arguments],
                env=self._environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def restart(self) -> None:
        """Starts the supervisor of a machine that is already a server or a node, as after a boot."""
        if self.is_server:
            self.start("up")
        else:
            controllers = json.loads((self.folder / "controllers.json").read_text())
            self.start("join", controllers[0], "--node-id", self.name)

    def remember_controllers(self, endpoints: Iterable[str]) -> None:
        """For restart() of a node."""
        (self.folder / "controllers.json").write_text(json.dumps(list(endpoints)))

    def step_clock(self, offset_s: int) -> None:
        """Sets the wall clock of supervisor, controller and agent to this distance from the real one."""
        descriptor = os.open(self._clock_file, os.O_WRONLY | os.O_CREAT, 0o600)
        os.pwrite(descriptor, struct.pack("=q", offset_s), 0)
        os.close(descriptor)

    async def wait_started(self) -> None:
        """Waits until all processes of the machine have been recorded; raises an error if the supervisor
        ends."""
        wanted = {"up", "agent", *(("etcd", "controller") if self.is_server else ())}
        async with asyncio.timeout(_START_TIMEOUT_S):
            while not wanted <= set(self.pids):
                if not self.is_supervised:
                    raise RuntimeError(f"{self.name} did not start:\n{self.read_supervisor_log()}")
                await asyncio.sleep(_POLL_S)

    def read_supervisor_log(self) -> str:
        return (self.folder / "supervisor.log").read_text("utf-8", "replace")[-3000:]

    # --- faults of processes and disks -----------------------------------------------------------

    def send_signal(self, process_name: str, number: signal.Signals) -> None:
        """Sends a signal to a process by its name, as in `pids`. Does nothing if it does not run."""
        pid = self.pids.get(process_name)
        if pid is not None:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def kill_service_processes(self) -> None:
        """Sends SIGKILL to supervisor, etcd member, controller and agent; jobs and their shims remain."""
        pids = self.pids
        for name in ("up", "etcd", "controller", "agent"):
            if name in pids:
                with suppress(ProcessLookupError):
                    os.kill(pids[name], signal.SIGKILL)
        self._reap_supervisor(signal.SIGKILL)

    def kill_everything(self) -> None:
        """Sends SIGKILL to every process on the machine, jobs included, until there is none."""
        while pids := self.network.list_processes(self.name):
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._reap_supervisor(signal.SIGKILL)

    def fill_disk(self) -> None:
        """Fills the file system of the state directory."""
        block = bytes(_FILL_BLOCK_BYTES)
        with suppress(OSError), (self.state_dir / _FILLER_FILE).open("wb", buffering=0) as file:
            while file.write(block) == len(block):
                pass
        with suppress(OSError), (self.state_dir / _FILLER_FILE).open("ab", buffering=0) as file:
            while file.write(b"\0" * 512):
                pass

    def free_disk(self) -> None:
        (self.state_dir / _FILLER_FILE).unlink(missing_ok=True)

    def read_leader_token(self) -> int:
        """The highest fencing token that the agent of this machine has accepted; 0 before the first."""
        path = self.state_dir / AGENTS_DIR / self.name / LEADER_TOKEN_FILE
        try:
            return int(json.loads(path.read_text("utf-8"))["leader_token"])
        except (OSError, ValueError, KeyError):
            return 0

    def _reap_supervisor(self, number: signal.Signals) -> None:
        if self._supervisor is None:
            return
        with suppress(ProcessLookupError):
            self._supervisor.send_signal(number)
        try:
            self._supervisor.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._supervisor.kill()
            self._supervisor.wait(_STOP_TIMEOUT_S)


class FaultCluster:
    """Three servers, and nodes that run only an agent."""

    def __init__(self, folder: Path, network: MachineNetwork, *, nodes: int) -> None:
        self.folder = folder
        self.network = network
        self.servers = [self._make_machine(f"s{number}", is_server=True) for number in (1, 2, 3)]
        self.nodes = [self._make_machine(f"n{number}", is_server=False) for number in range(1, nodes + 1)]
        self._client_numbers = 0

    @property
    def machines(self) -> list[Machine]:
        """All of them; each has an agent."""
        return [*self.servers, *self.nodes]

    async def start(self) -> None:
        """Sets the cluster up with the commands of docs/HIGH_AVAILABILITY.md."""
        environ = {
            # The history of etcd is the record that the checks read.
            "GENIE_CONTROLLER_COMPACT_STORE": "false",
            "GENIE_CONTROLLER_COMPILE_AHEAD": "false",
            "GENIE_AGENT_COMPILE_AHEAD": "false",
            "GENIE_AGENT_CPU_ACCELERATORS": str(GPUS_PER_NODE),
            "LD_PRELOAD": str(compile_stepped_clock(self.folder)),
        }
        for machine in self.machines:
            machine.create_folders(environ)
        first, *others = self.servers
        first.start("up", "--store", "etcd", "--bind", first.address)
        await first.wait_started()
        for server in others:
            token_file = await self._create_token_file(TokenKind.SERVER_JOIN, server)
            server.start(
                *("join", "--server", first.endpoint, "--bind", server.address),
                *("--node-id", server.name, "--token-file", str(token_file)),
            )
            await server.wait_started()
        for node in self.nodes:
            token_file = await self._create_token_file(TokenKind.JOIN, node)
            node.remember_controllers(server.endpoint for server in self.servers)
            node.start("join", first.endpoint, "--node-id", node.name, "--token-file", str(token_file))
        await asyncio.gather(*(node.wait_started() for node in self.nodes))

    def stop(self) -> None:
        """Kills every process of every machine."""
        for machine in self.machines:
            machine.kill_everything()

    def owner_token(self) -> str:
        return (self.servers[0].state_dir / OWNER_TOKEN_FILE).read_text("utf-8").strip()

    def client_settings(self, server: Machine, *, token: str = "") -> Settings:
        """Settings of a new client, with its own state directory, whose first connection is to `server`."""
        self._client_numbers += 1
        return config.load(
            {
                "paths.state_dir": self.folder / "clients" / str(self._client_numbers),
                "cluster.discovery_method": "address",
                "cluster.master_addr": server.address,
                "cluster.master_port": CONTROLLER_PORT,
                "cluster.token": token or self.owner_token(),
            }
        )

    async def fetch_status(self, server: Machine) -> StatusReply:
        """What this server says of the cluster."""
        async with open_client(self.client_settings(server), timeout_s=3.0) as client:
            return await asyncio.wait_for(client.status(), 5.0)

    async def find_leader(self) -> Machine:
        """The server that leads, as the servers say; waits until there is one."""
        by_endpoint = {server.endpoint: server for server in self.servers}
        async with asyncio.timeout(_START_TIMEOUT_S):
            while True:
                for server in self.servers:
                    with suppress(GenieError, TimeoutError, OSError):
                        status = await self.fetch_status(server)
                        if status.leader in by_endpoint:
                            return by_endpoint[status.leader]
                await asyncio.sleep(_POLL_S)

    async def _create_token_file(self, kind: TokenKind, machine: Machine) -> Path:
        async with open_client(self.client_settings(self.servers[0])) as client:
            return await self._write_token_file(client, kind, machine)

    async def _write_token_file(self, client: ClusterClient, kind: TokenKind, machine: Machine) -> Path:
        path = machine.folder / "join.token"
        path.write_text((await client.create_token(kind)).token)
        path.chmod(0o600)
        return path

    def _make_machine(self, name: str, *, is_server: bool) -> Machine:
        address = self.network.add_machine(name)
        folder = self.folder / name
        folder.mkdir(parents=True)
        return Machine(name, address, is_server, folder, self.network)
