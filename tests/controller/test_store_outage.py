"""A controller without its store: it answers that it does not lead, makes no decisions, and resumes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from genie.controller.store import KeyValue
from genie.controller.store.etcd import EtcdStore
from genie.errors import NotLeaderError, StoreUnavailableError
from genie.runtime.credentials import Access, connect_authenticated
from genie.runtime.network import TcpNetwork
from genie.sim.store import MemoryStore
from tests.controller.running_controller import RunningController, running_controller
from tests.controller.store.etcd_server import EtcdServer
from tests.waiting import until

_AGENT_TIMEOUT_S = 3.0
"""Longer than the reply takes even on a busy machine, and shorter than the timeout of the store, 5 s."""


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EtcdServer]:
    server = EtcdServer(tmp_path / "etcd")
    server.start()
    yield server
    server.stop()


class HangingStore(MemoryStore):
    """Reads take until their timeout while `is_hanging`."""

    is_hanging = False

    async def get(self, key: str, *, timeout_s: float = 5.0) -> KeyValue | None:
        if self.is_hanging:
            await asyncio.sleep(timeout_s)
            raise StoreUnavailableError("the store did not respond")
        return await super().get(key, timeout_s=timeout_s)


async def test_standby_replies_that_it_does_not_lead_while_its_store_hangs(tmp_path: Path) -> None:
    async with running_controller(tmp_path / "1", name="one") as one:
        node = await one.join("n1")
        memory = await MemoryStore.open(clock=one.clock)
        hanging = HangingStore(memory._memory)
        hanging.is_hanging = True
        starting = RunningController(one.config, tmp_path / "2", one.clock, hanging, name="two")
        async with asyncio.TaskGroup() as group:
            started = group.create_task(starting.start())
            await until(lambda: starting.controller is not None and starting.controller.port)
            with pytest.raises(NotLeaderError, match="does not lead"):
                await _connect(Access("127.0.0.1", starting.port, node.token, node.tls))
            hanging.is_hanging = False
            await started
        await starting.stop()
        await hanging.close()
        await memory.close()


async def test_standby_replies_that_it_does_not_lead_while_etcd_is_stopped(
    etcd: EtcdServer, tmp_path: Path
) -> None:
    one_store, two_store = await EtcdStore.open(etcd.url), await EtcdStore.open(etcd.url)
    async with (
        running_controller(tmp_path / "1", store=one_store, name="one") as one,
        running_controller(tmp_path / "2", store=two_store, name="two") as two,
    ):
        known, unknown = await one.join("n1"), await one.join("n2")
        await _connect(Access("127.0.0.1", two.port, known.token, known.tls))
        etcd.suspend()
        with pytest.raises(NotLeaderError, match="does not lead"):
            await _connect(Access("127.0.0.1", two.port, unknown.token, unknown.tls))
        assert not await _connect(Access("127.0.0.1", two.port, known.token, known.tls)), "a cached token"
        etcd.resume()


async def _connect(access: Access) -> bool:
    """Send Hello; return whether the controller leads."""
    async with connect_authenticated(TcpNetwork(), access, timeout_s=_AGENT_TIMEOUT_S, program="agent") as (
        _,
        welcome,
    ):
        return welcome.leading
