"""The engines under the contract test, and how time passes for each."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import pytest

from genie.controller.store import SnapshotStore, Store
from genie.controller.store.etcd import EtcdStore
from genie.controller.store.sqlite import SqliteStore
from genie.sim.store import MemoryStore
from tests.controller.store.etcd_server import EtcdServer
from tests.fakes.clock import FakeClock

_NAMESPACES = itertools.count(1)


class ContractStore(Store, SnapshotStore, Protocol):
    """A store that also has snapshots and can be compacted on demand, as the contract tests need."""

    async def compact(self, revision: int, *, timeout_s: float = 5.0) -> None: ...


@dataclass(frozen=True)
class Engine:
    """`pass_time` advances the time of the engine by some seconds."""

    name: str
    store: ContractStore
    pass_time: Callable[[float], Awaitable[None]]


@pytest.fixture(scope="package")
def etcd_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    server = EtcdServer(tmp_path_factory.mktemp("etcd"))
    server.start()
    yield server
    server.stop()


@pytest.fixture
def etcd_url(etcd_server: EtcdServer) -> str:
    """The shared server, with a namespace unique to this test."""
    return f"{etcd_server.url}?namespace=/test-{next(_NAMESPACES)}/"


@pytest.fixture(params=["memory", "sqlite", "etcd"])
async def engine(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Engine]:
    clock = FakeClock()
    name: str = request.param
    made: Engine
    if name == "memory":
        made = Engine(name, await MemoryStore.open(clock=clock), clock.advance)
    elif name == "sqlite":
        made = Engine(name, await SqliteStore.open(tmp_path / "store.sqlite3", clock=clock), clock.advance)
    else:
        made = Engine(name, await EtcdStore.open(request.getfixturevalue("etcd_url")), asyncio.sleep)
    try:
        yield made
    finally:
        await made.store.close()


@pytest.fixture
def store(engine: Engine) -> ContractStore:
    return engine.store
