"""A leader and a standby with TLS on one real etcd."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from genie.controller.store.etcd import EtcdStore
from genie.model.names import address_text
from tests.controller.running_controller import RunningController, running_controller
from tests.controller.store.etcd_server import EtcdServer
from tests.waiting import until

LEASE_S = 30.0
"""Outlasts each test: after the leader was lost, the standby does not take over."""


@dataclass(frozen=True)
class LeaderAndStandby:
    etcd: EtcdServer
    leader: RunningController
    leader_store: EtcdStore
    standby: RunningController

    @property
    def leader_address(self) -> str:
        return address_text("127.0.0.1", self.leader.port)

    async def until_copied(self) -> None:
        """Wait until the standby has a current copy of the ledger."""
        assert self.standby.controller is not None
        requests = self.standby.controller._standby_requests

        def has_current_copy() -> bool:
            return requests._copy is not None and requests._copy.is_loaded and requests._copy.age_s < 2.0

        await until(has_current_copy, what="a current copy of the ledger")

    async def lose_leader(self) -> None:
        """End the leader as if it was killed: it does not resign."""
        await self.until_copied()
        assert self.leader.controller is not None
        for connection in list(self.leader.controller._connections._open_connections):
            connection.peer.close()
        await self.leader_store.close()
        await self.leader.stop()


@asynccontextmanager
async def run_leader_and_standby(
    folder: Path, *, leader_ttl_s: float = LEASE_S
) -> AsyncIterator[LeaderAndStandby]:
    etcd = EtcdServer(folder / "etcd")
    etcd.start()
    try:
        leader_store, standby_store = await EtcdStore.open(etcd.url), await EtcdStore.open(etcd.url)
        async with running_controller(
            folder / "1", store=leader_store, tls="on", leader_ttl_s=leader_ttl_s, name="one"
        ) as leader:
            _copy_identity(leader.state_dir, folder / "2" / "state")
            async with running_controller(
                folder / "2", store=standby_store, tls="on", leader_ttl_s=leader_ttl_s, name="two"
            ) as standby:
                yield LeaderAndStandby(etcd, leader, leader_store, standby)
    finally:
        etcd.stop()


def _copy_identity(source: Path, target: Path) -> None:
    (target / "controller").mkdir(parents=True, mode=0o700)
    for name in ("controller/ca.pem", "controller/ca.key", "owner.token"):
        (target / name).write_bytes((source / name).read_bytes())
        (target / name).chmod(0o600)
