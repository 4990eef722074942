"""The connection of a standby to the leader."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from genie.controller.standby.leader_link import LeaderLink
from genie.errors import NothingListensError
from genie.processes.tasks import run_inline
from genie.runtime.network import Channel, ClientTls, TcpNetwork
from tests.controller.running_controller import CALL_S, running_controller
from tests.fakes.clock import FakeClock

LOST_HOST = "127.0.0.9"


class NetworkWithLostLeader(TcpNetwork):
    """Connections to LOST_HOST are refused, or never established."""

    def __init__(self, *, refuses: bool) -> None:
        super().__init__()
        self.attempted_event = asyncio.Event()
        self._refuses = refuses

    async def connect(self, host: str, port: int, *, tls: ClientTls | None, timeout_s: float) -> Channel:
        if host != LOST_HOST:
            return await super().connect(host, port, tls=tls, timeout_s=timeout_s)
        self.attempted_event.set()
        if self._refuses:
            raise NothingListensError(f"{host}:{port} refused the connection")
        await asyncio.Event().wait()
        raise AssertionError("cancelled")


@pytest.mark.parametrize("refuses", [True, False])
async def test_new_leader_is_tried_without_waiting_for_the_previous_one(
    refuses: bool, tmp_path: Path
) -> None:
    """On a clock that stands still: neither a backoff nor a timeout ends."""
    network = NetworkWithLostLeader(refuses=refuses)
    async with running_controller(tmp_path, tls="on") as leader, asyncio.TaskGroup() as group:
        assert leader.controller is not None
        certificates, directory = leader.controller._certificates, leader.state_dir / "controller"
        link = LeaderLink(
            name="standby",
            network=network,
            clock=FakeClock(),
            offload=run_inline,
            client_tls=lambda: certificates.client_tls(directory),
        )
        running = group.create_task(link.run())
        async with asyncio.timeout(CALL_S):
            link.set_leader(f"{LOST_HOST}:1")
            first = asyncio.gather(link.get_connection(), return_exceptions=True)
            await network.attempted_event.wait()
            link.set_leader(f"127.0.0.1:{leader.port}")
            assert not (await link.get_connection()).is_closed
            await first
        running.cancel()
