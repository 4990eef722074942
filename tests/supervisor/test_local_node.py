"""Joining again on a machine whose node the cluster refuses, and the jobs that the node has left."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from genie import config
from genie.agent.joining import join_cluster
from genie.config import ClusterConfig
from genie.errors import NodeNotAcceptedError, NodeRemovedError, TokenRefusedError
from genie.model.messages.handshake import Hello
from genie.model.tenant import TokenKind
from genie.runtime.network import TcpNetwork
from genie.supervisor.local_node import LocalNode
from tests.fakes.controller import HOST, FakeController
from tests.supervisor.leftover_jobs import run_job

REMOVED = NodeRemovedError("node n1 was removed from the cluster (genie forget)")
UNKNOWN = TokenRefusedError("token t1 is unknown here or its secret is wrong")


async def join(fake: FakeController, state_dir: Path) -> Path:
    token = str(fake.token(TokenKind.JOIN))
    return await join_cluster(
        HOST, fake.port, token, state_dir=state_dir, requested_node_id="n1", network=TcpNetwork()
    )


def make_access(fake: FakeController) -> ClusterConfig:
    return ClusterConfig(
        discovery_method="address",
        master_addr=HOST,
        master_port=fake.port,
        token=str(fake.token(TokenKind.JOIN)),
    )


def make_node(state_dir: Path) -> LocalNode:
    settings = config.load({"paths.state_dir": state_dir, "cluster.node_id": "n1"})
    return LocalNode(settings, progress=lambda _line: None)


async def test_jobs_of_a_removed_node_are_ended_after_it_has_joined_again(tmp_path: Path) -> None:
    fake = FakeController(tmp_path / "c", use_tls=True, refusals={Hello: REMOVED})
    async with fake.listening():
        node_dir = await join(fake, tmp_path / "s")
        with run_job(node_dir) as process:
            fake.join_error = TokenRefusedError("token j1 has expired")
            with pytest.raises(TokenRefusedError, match="has expired"):
                await make_node(tmp_path / "s").find_or_join(make_access(fake), rejoin=False)
            assert process.poll() is None, "the join has failed"
            fake.join_error = None
            await make_node(tmp_path / "s").find_or_join(make_access(fake), rejoin=False)
            assert process.wait(timeout=30) != 0


async def test_jobs_of_a_node_with_an_unknown_token_keep_running(tmp_path: Path) -> None:
    """The store may be older than the node."""
    fake = FakeController(tmp_path / "c", use_tls=True, refusals={Hello: UNKNOWN})
    async with fake.listening():
        node_dir = await join(fake, tmp_path / "s")
        with run_job(node_dir) as process:
            with pytest.raises(NodeNotAcceptedError, match="so its jobs keep running"):
                access = replace(make_access(fake), token=None)
                await make_node(tmp_path / "s").find_or_join(access, rejoin=False)
            assert await make_node(tmp_path / "s").find_or_join(make_access(fake), rejoin=False) == node_dir
            assert len(fake.joins) == 2
            assert process.poll() is None
