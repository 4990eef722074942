"""Commands on the machine of the cluster while its controller restarts."""

from __future__ import annotations

import asyncio
import os
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from genie.cluster.client import ClusterClient, open_client
from genie.config import Settings, load
from genie.errors import DeadlineError, NothingListensError, TokenRefusedError, UnreachableError
from genie.processes import files
from genie.processes.clock import SystemClock
from genie.runtime.credentials import LocalCluster
from genie.runtime.network import Channel, ClientTls, TcpNetwork
from genie.supervisor import connection
from genie.supervisor.process_records import CONTROLLER, ETCD, SUPERVISOR, log_path, record_process
from tests.controller.running_controller import RunningController, running_controller
from tests.supervisor.test_incomplete_join import MEMBER
from tests.supervisor.test_local_server import REMOVED, WAITING
from tests.waiting import until


class CountingNetwork(TcpNetwork):
    """Counts the attempts to connect."""

    def __init__(self) -> None:
        super().__init__()
        self.attempts = 0

    async def connect(self, host: str, port: int, *, tls: ClientTls | None, timeout_s: float) -> Channel:
        self.attempts += 1
        return await super().connect(host, port, tls=tls, timeout_s=timeout_s)


def _settings_of(one: RunningController) -> Settings:
    return load({"paths.state_dir": one.state_dir})


async def _fetch_status(settings: Settings, network: TcpNetwork, *, timeout_s: float = 10.0) -> bool:
    async with open_client(settings, network=network, timeout_s=timeout_s) as client:
        assert isinstance(client, ClusterClient)
        return (await client.status()).leading


async def test_command_waits_while_the_supervisor_restarts_the_controller(tmp_path: Path) -> None:
    network = CountingNetwork()
    async with running_controller(tmp_path, tls="on") as one, asyncio.TaskGroup() as group:
        assert record_process(one.state_dir, SUPERVISOR, os.getpid(), ready=True)
        port = one.port
        await one.stop()
        asking = group.create_task(_fetch_status(_settings_of(one), network))
        await until(lambda: network.attempts > 2)
        assert not asking.done()
        one.config = replace(one.config, port=port)
        await one.start()
        assert await asking


async def test_command_fails_at_once_without_a_supervisor(tmp_path: Path) -> None:
    network = CountingNetwork()
    async with running_controller(tmp_path, tls="on") as one:
        settings = _settings_of(one)
        await one.stop()
        with pytest.raises(NothingListensError):
            await _fetch_status(settings, network)
        assert network.attempts == 1
        await one.start()


async def test_command_for_another_port_fails_at_once(tmp_path: Path, unused_tcp_port: int) -> None:
    network = CountingNetwork()
    async with running_controller(tmp_path, tls="on") as one:
        assert record_process(one.state_dir, SUPERVISOR, os.getpid(), ready=True)
        token = (one.state_dir / "owner.token").read_text()
        settings = load(
            {
                "paths.state_dir": one.state_dir,
                "cluster.master_addr": "127.0.0.1",
                "cluster.master_port": unused_tcp_port,
                "cluster.token": token,
            }
        )
        with pytest.raises(NothingListensError):
            await _fetch_status(settings, network)
        assert network.attempts == 1


async def test_command_waits_a_bounded_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "CONTROLLER_RESTART_WAIT_S_MAX", 0.3)
    network = CountingNetwork()
    async with running_controller(tmp_path, tls="on", clock=SystemClock()) as one:
        assert record_process(one.state_dir, SUPERVISOR, os.getpid(), ready=True)
        await one.stop()
        with pytest.raises(NothingListensError):
            await _fetch_status(_settings_of(one), network)
        assert network.attempts > 1
        await one.start()


async def test_hint_names_the_process_of_a_frozen_controller(tmp_path: Path) -> None:
    async with running_controller(tmp_path, tls="on") as one:
        port = one.port
        await one.stop()
        with socket.create_server(("127.0.0.1", port)):  # accepts connections but never replies
            settings = load({"paths.state_dir": one.state_dir})
            with pytest.raises(DeadlineError) as unknown:
                await _fetch_status(settings, TcpNetwork(), timeout_s=0.2)
            assert "process" not in str(unknown.value.hint)
            assert record_process(one.state_dir, CONTROLLER, os.getpid())
            with pytest.raises(DeadlineError) as frozen:
                await _fetch_status(settings, TcpNetwork(), timeout_s=0.2)
    hint = str(frozen.value.hint)
    assert f"process {os.getpid()}" in hint
    assert str(log_path(one.state_dir, CONTROLLER)) in hint
    assert "firewall" not in hint


@pytest.mark.parametrize(
    ("bound", "asked", "is_supervised"),
    [
        ("10.0.0.5", "10.0.0.5", True),
        ("10.0.0.5", "10.0.0.6", False),
        ("10.0.0.5", "127.0.0.1", False),
        ("127.0.0.1", "localhost", True),
    ],
)
def test_address_is_compared_with_that_of_the_supervised_controller(
    bound: str, asked: str, is_supervised: bool, tmp_path: Path
) -> None:
    assert record_process(tmp_path, SUPERVISOR, os.getpid(), ready=True)
    LocalCluster(host=bound, port=7100, cluster_id="c").write(tmp_path)
    assert connection._is_supervised_controller(asked, 7100, tmp_path) is is_supervised


async def test_command_on_a_server_that_waits_for_others_says_so(tmp_path: Path) -> None:
    record_process(tmp_path, SUPERVISOR, os.getpid(), missing_servers=WAITING)
    with pytest.raises(UnreachableError, match=f"this server is {WAITING}"):
        await _fetch_status(load({"paths.state_dir": tmp_path}), TcpNetwork())


async def test_command_on_a_removed_server_says_so(tmp_path: Path) -> None:
    async with running_controller(tmp_path, tls="on") as one:
        MEMBER.write(one.state_dir)
        log = log_path(one.state_dir, ETCD)
        files.make_private_directory(log.parent)
        log.write_text(f"{REMOVED}\n", "utf-8")
        token = one.state_dir / "owner.token"
        kept = token.read_text("utf-8")
        token.write_text(kept.replace(kept.split(".")[2], "0123456789ab"), "utf-8")
        with pytest.raises(TokenRefusedError, match="this server, s2, was removed from the cluster") as error:
            await _fetch_status(_settings_of(one), TcpNetwork())
        assert "'genie join --server'" in error.value.hint
        token.write_text(kept, "utf-8")
