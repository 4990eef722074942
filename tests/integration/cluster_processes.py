"""Controller and agents as separate processes with separate state directories, as on separate machines.

For tests that kill them individually; conftest.py has a shared cluster for the others.
"""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from genie import config
from genie.agent import joining
from genie.cluster.client import ClusterClient, open_client
from genie.config import Settings
from genie.model.messages import NodeView
from genie.model.node import NodeInfo, NodeStatus
from genie.model.tenant import TokenKind
from genie.processes import files
from genie.runtime.credentials import OWNER_TOKEN_FILE, LocalCluster
from genie.runtime.network import TcpNetwork
from genie.supervisor.child import Child, python_module_command
from genie.supervisor.local_cluster import make_owner_access
from tests.waiting import until

STOP_TIMEOUT_S = 20.0


class ClusterProcess:
    """A controller or agent process with its arguments."""

    def __init__(self, child: Child, arguments: list[str]) -> None:
        self._child = child
        self._arguments = arguments

    @property
    def pid(self) -> int:
        assert self._child.pid is not None
        return self._child.pid

    def start(self) -> None:
        self._child.start(self._arguments)

    def start_with(self, *more: str) -> None:
        """Replaces the arguments and starts the process."""
        self._arguments = list(more)
        self.start()

    async def kill(self) -> None:
        """Sends SIGKILL and waits for the end of the process."""
        if self._child.exit_code() is None:
            os.kill(self.pid, signal.SIGKILL)
        await self.wait_ended()

    async def wait_ended(self) -> None:
        await until(lambda: self._child.exit_code() is not None)

    async def stop(self) -> None:
        await self._child.stop(grace_s=STOP_TIMEOUT_S)

    def check_not_exited(self) -> None:
        self._child.check_not_exited()


class ClusterProcesses:
    """A controller and agents by node ID on loopback. `controller_module` runs as the controller; `store` is
    its store."""

    def __init__(
        self, folder: Path, *, store: str = "sqlite", controller_module: str = "genie.controller"
    ) -> None:
        self._folder = folder
        self._store = store
        self._controller_module = controller_module
        self._settings = config.load({"paths.state_dir": folder / "controller"})
        self.agents: dict[str, ClusterProcess] = {}
        state_dir = self._make_state_dir("controller")
        self.controller = self._make_controller(state_dir)
        self.standby: ClusterProcess | None = None
        self.address: LocalCluster | None = None

    @property
    def state_dir(self) -> Path:
        """The state directory of the controller."""
        return self._settings.paths.state_dir

    async def start_controller(self) -> None:
        """Starts the controller; a restart uses the same port."""
        state_dir = self._settings.paths.state_dir
        if self.address is None:
            self.controller.start()
        else:
            bind = ["--bind", "127.0.0.1", "--port", str(self.address.port)]
            (state_dir / "local.json").unlink(missing_ok=True)
            self.controller.start_with("--state-dir", str(state_dir), *bind)
        self.address = await until(lambda: self._read_controller_address(state_dir), timeout_s=30)

    def make_state_dir_of_standby(self, name: str) -> Path:
        """A state directory with the certificate authority and the owner token of the controller."""
        first, state_dir = self._settings.paths.state_dir, self._make_state_dir(name)
        (state_dir / "controller").mkdir(mode=0o700)
        for file in ("controller/ca.pem", "controller/ca.key", OWNER_TOKEN_FILE):
            files.write_private(state_dir / file, (first / file).read_bytes())
        return state_dir

    async def start_standby(self, *, host: str = "127.0.0.1") -> LocalCluster:
        """Starts a second controller on the same store; returns its address."""
        state_dir = self.make_state_dir_of_standby("standby")
        standby = self.standby = self._make_controller(state_dir, host=host)
        standby.start()

        def read_address() -> LocalCluster | None:
            standby.check_not_exited()
            return LocalCluster.read(state_dir)

        found = await until(read_address, timeout_s=30, what="the standby listens")
        assert found is not None
        return found

    async def start_agent(self, node_id: str) -> NodeInfo:
        """Starts an agent, which joins on its first start. Returns its registration at the controller."""
        if node_id not in self.agents:
            await self._join_and_add_agent(node_id)
        before = (await self.node(node_id)).incarnation if node_id in await self._fetch_node_views() else 0
        self.agents[node_id].start()

        async def find_new_registration() -> NodeInfo | None:
            self.agents[node_id].check_not_exited()
            known = (await self._fetch_node_views()).get(node_id)
            fresh = known is not None and known.info.incarnation > before
            return known.info if known and fresh and known.info.status is NodeStatus.HEALTHY else None

        found = await until(find_new_registration, timeout_s=30, what=f"node {node_id} registers")
        assert found is not None
        return found

    async def node(self, node_id: str) -> NodeInfo:
        return (await self._fetch_node_views())[node_id].info

    @asynccontextmanager
    async def client(self) -> AsyncIterator[ClusterClient]:
        async with open_client(self.settings()) as client:
            yield client

    def settings(self) -> Settings:
        assert self.address is not None
        return replace(
            self._settings, cluster=make_owner_access(self._settings.paths.state_dir, self.address)
        )

    async def stop(self) -> None:
        for agent in self.agents.values():
            await agent.stop()
        if self.standby is not None:
            await self.standby.stop()
        await self.controller.stop()

    def _make_controller(self, state_dir: Path, *, host: str = "127.0.0.1") -> ClusterProcess:
        return ClusterProcess(
            Child("controller", command=python_module_command(self._controller_module), state_dir=state_dir),
            ["--state-dir", str(state_dir), "--bind", host, "--port", "0", "--store", self._store],
        )

    async def _join_and_add_agent(self, node_id: str) -> None:
        assert self.address is not None
        state_dir = self._make_state_dir(node_id)
        async with self.client() as client:
            token = await client.create_token(TokenKind.JOIN)
        await joining.join_cluster(
            self.address.host,
            self.address.port,
            token.token,
            state_dir=state_dir,
            requested_node_id=node_id,
            network=TcpNetwork(),
        )
        self.agents[node_id] = ClusterProcess(
            Child("agent", command=python_module_command("genie.agent"), state_dir=state_dir),
            ["--state-dir", str(state_dir), "--node-id", node_id],
        )

    async def _fetch_node_views(self) -> dict[str, NodeView]:
        async with self.client() as client:
            return {view.info.node_id: view for view in await client.nodes()}

    def _read_controller_address(self, state_dir: Path) -> LocalCluster | None:
        self.controller.check_not_exited()
        return LocalCluster.read(state_dir) if (state_dir / OWNER_TOKEN_FILE).exists() else None

    def _make_state_dir(self, name: str) -> Path:
        path = self._folder / name
        path.mkdir(mode=0o700)
        return path


@asynccontextmanager
async def run_cluster_processes(
    folder: Path, *agents: str, controller_module: str = "genie.controller"
) -> AsyncIterator[ClusterProcesses]:
    """Starts a controller and these agents, each in a separate process; stops them at the end."""
    cluster = ClusterProcesses(folder, controller_module=controller_module)
    try:
        await cluster.start_controller()
        for name in agents:
            await cluster.start_agent(name)
        yield cluster
    finally:
        await cluster.stop()
