"""Controller and agents as single processes, each with a state directory of its own, as on single machines.

For tests that kill them one by one. Not for: a cluster that simply works (conftest.py).
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
from genie.cluster.children import Child
from genie.cluster.client import ClusterClient, open_client
from genie.cluster.local import owner_access
from genie.config import Settings
from genie.model.messages import NodeView
from genie.model.node import NodeInfo, NodeStatus
from genie.model.tenant import TokenKind
from genie.runtime.credentials import OWNER_TOKEN_FILE, LocalCluster
from genie.runtime.network import TcpNetwork
from tests.waiting import until

STOP_S = 20.0


class Machine:
    """One process and the directory that it lives in."""

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
        """Starts it, now and later, with other arguments."""
        self._arguments = list(more)
        self.start()

    async def kill(self) -> None:
        """kill -9, and gone."""
        if self._child.exit_code() is None:
            os.kill(self.pid, signal.SIGKILL)
        await until(lambda: self._child.exit_code() is not None)

    async def stop(self) -> None:
        await self._child.stop(grace_s=STOP_S)

    def check_alive(self) -> None:
        self._child.check_alive()


class Machines:
    """A controller and agents by name, on loopback. Everything is stopped at the end."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._settings = config.load({"paths.state_dir": folder / "controller"})
        self.agents: dict[str, Machine] = {}
        state_dir = self._made("controller")
        self.controller = Machine(
            Child("controller", module="genie.controller", state_dir=state_dir),
            ["--state-dir", str(state_dir), "--bind", "127.0.0.1", "--port", "0"],
        )
        self.where: LocalCluster | None = None

    async def start_controller(self) -> None:
        """The second time on the port of the first."""
        state_dir = self._settings.paths.state_dir
        if self.where is None:
            self.controller.start()
        else:
            place = ["--bind", "127.0.0.1", "--port", str(self.where.port)]
            (state_dir / "local.json").unlink(missing_ok=True)
            self.controller.start_with("--state-dir", str(state_dir), *place)
        self.where = await until(lambda: self._announced(state_dir), timeout_s=30)

    async def start_agent(self, node_id: str) -> NodeInfo:
        """Joins with a token of its own the first time. Returns what the controller knows of it."""
        if node_id not in self.agents:
            await self._join(node_id)
        before = (await self.node(node_id)).incarnation if node_id in await self._known() else 0
        self.agents[node_id].start()

        async def registered() -> NodeInfo | None:
            self.agents[node_id].check_alive()
            known = (await self._known()).get(node_id)
            fresh = known is not None and known.info.incarnation > before
            return known.info if known and fresh and known.info.status is NodeStatus.HEALTHY else None

        found = await until(registered, timeout_s=30, what=f"node {node_id} registers")
        assert found is not None
        return found

    async def node(self, node_id: str) -> NodeInfo:
        return (await self._known())[node_id].info

    @asynccontextmanager
    async def client(self) -> AsyncIterator[ClusterClient]:
        async with open_client(self.settings()) as client:
            yield client

    def settings(self) -> Settings:
        assert self.where is not None
        return replace(self._settings, cluster=owner_access(self._settings.paths.state_dir, self.where))

    async def stop(self) -> None:
        for agent in self.agents.values():
            await agent.stop()
        await self.controller.stop()

    async def _join(self, node_id: str) -> None:
        assert self.where is not None
        state_dir = self._made(node_id)
        async with self.client() as client:
            token = await client.create_token(TokenKind.JOIN)
        await joining.join(
            self.where.host,
            self.where.port,
            token.token,
            state_dir=state_dir,
            node_id_wish=node_id,
            network=TcpNetwork(),
        )
        self.agents[node_id] = Machine(
            Child("agent", module="genie.agent", state_dir=state_dir),
            ["--state-dir", str(state_dir), "--node-id", node_id],
        )

    async def _known(self) -> dict[str, NodeView]:
        async with self.client() as client:
            return {view.info.node_id: view for view in await client.nodes()}

    def _announced(self, state_dir: Path) -> LocalCluster | None:
        self.controller.check_alive()
        return LocalCluster.read(state_dir) if (state_dir / OWNER_TOKEN_FILE).exists() else None

    def _made(self, name: str) -> Path:
        path = self._folder / name
        path.mkdir(mode=0o700)
        return path


@asynccontextmanager
async def machines(folder: Path, *agents: str) -> AsyncIterator[Machines]:
    """A controller and these agents, each in a process of its own."""
    made = Machines(folder)
    try:
        await made.start_controller()
        for name in agents:
            await made.start_agent(name)
        yield made
    finally:
        await made.stop()
