"""Sessions with the roles server and worker: processes that they start, reuse and stop."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import genie
from genie.cluster import init
from genie.errors import ConfigError, TokenMissingError
from genie.model.node import NodeRole, NodeStatus
from genie.model.tenant import TokenKind
from genie.supervisor import local_cluster
from tests.integration.running_cluster import StartedCluster
from tests.waiting import until


@pytest.fixture(autouse=True)
def _end_session() -> Iterator[None]:
    yield
    init.shutdown_blocking()


def state_dir() -> Path:
    return Path(os.environ["GENIE_STATE_DIR"])


async def test_server_runs_a_cluster_until_its_session_ends(unused_tcp_port: int) -> None:
    state = await genie.init(node_role="server", master_port=unused_tcp_port)
    assert state.local_node.role is NodeRole.SERVER
    assert (state.config.master_addr, state.config.node_id) == ("127.0.0.1", state.local_node.node_id)
    assert list(state.nodes) == [state.local_node.node_id]
    assert state.local_node.gpu_count == state.nodes[state.local_node.node_id].gpu_count == 1
    running = local_cluster.find_running_cluster(state_dir())
    assert running is not None
    assert set(running.pids) == {"controller", "agent"}
    assert running.cluster is not None
    assert running.cluster.port == unused_tcp_port
    await genie.shutdown()
    assert local_cluster.find_running_cluster(state_dir()) is None
    assert [pid for pid in running.pids.values() if psutil.pid_exists(pid)] == []


async def test_server_on_localhost_accepts_other_clients(
    unused_tcp_port: int,
) -> None:
    state = await genie.init("localhost", unused_tcp_port, node_role="server", node_id="box")
    assert state.local_node.node_id == "box"
    from genie import config
    from genie.cluster.client import open_client

    settings = config.load({"cluster.master_addr": "127.0.0.1", "cluster.master_port": unused_tcp_port})
    async with open_client(settings) as client:
        assert [view.info.node_id for view in await client.nodes()] == ["box"]
    await genie.shutdown()


async def test_server_reuses_a_running_cluster(
    own_cluster: StartedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, port = own_cluster.pids, own_cluster.running.port
    monkeypatch.delenv("GENIE_MASTER_PORT")
    state = await genie.init(node_role="server", master_addr=f"127.0.0.1:{port}")
    assert set(state.nodes) == {"n1"}
    assert state.local_node.control_port == port
    await genie.shutdown()
    assert own_cluster.pids == before
    assert all(psutil.pid_exists(pid) for pid in before.values())


async def test_worker_adds_this_machine_until_its_session_ends(
    own_cluster: StartedCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GENIE_STATE_DIR", str(tmp_path / "worker"))
    state = await genie.init(node_role="worker", node_id="w1", heartbeat_interval=0.2)
    assert set(state.nodes) == {"n1", "w1"}
    running = local_cluster.find_running_cluster(state_dir())
    assert running is not None
    assert set(running.pids) == {"agent"}
    await genie.shutdown()
    assert local_cluster.find_running_cluster(state_dir()) is None
    assert set(own_cluster.pids) == {"controller", "agent"}
    # The next session uses the same node without a new token.
    again = await genie.init(node_role="worker", node_id="w1")
    assert again.nodes["w1"].incarnation == 2
    await genie.shutdown()


async def test_worker_with_only_a_join_token_raises_token_missing(
    own_cluster: StartedCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from genie.cluster.client import open_client

    async with open_client(own_cluster.running.settings()) as client:
        token = (await client.create_token(TokenKind.JOIN)).token
    monkeypatch.setenv("GENIE_STATE_DIR", str(tmp_path / "worker"))
    with pytest.raises(TokenMissingError, match="genie join"):
        await genie.init(node_role="worker", token=token)
    assert local_cluster.find_running_cluster(tmp_path / "worker") is None


async def test_server_that_fails_to_start_stops_its_processes(
    unused_tcp_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="rdma"):
        await genie.init(node_role="server", master_port=unused_tcp_port, backend="rdma")
    assert local_cluster.find_running_cluster(state_dir()) is None
    assert not genie.is_initialized()


async def test_crashed_agent_of_a_server_is_restarted(unused_tcp_port: int) -> None:
    state = await genie.init(node_role="server", master_port=unused_tcp_port, heartbeat_interval=0.2)
    running = local_cluster.find_running_cluster(state_dir())
    assert running is not None
    os.kill(running.pids["agent"], signal.SIGKILL)
    name = state.local_node.node_id
    await until(lambda: state.nodes[name].incarnation == 2, timeout_s=30)
    assert state.nodes[name].status is NodeStatus.HEALTHY
    await genie.shutdown()
