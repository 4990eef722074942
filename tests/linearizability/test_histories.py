"""Histories of real clients are linearizable: with one controller, and while the leader is killed.

A defect that is planted into the controller is found in the history of the same clients.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from genie.config import Settings
from genie.controller.jobs.submission import JobSubmission
from genie.controller.locks.lock_table import LockTable
from genie.runtime.controller_connection import ControllerConnection, open_controller_connection
from genie.runtime.network import TcpNetwork
from genie.supervisor.connection import open_connection
from tests.controller.running_controller import running_controller
from tests.controller.store.etcd_server import EtcdServer
from tests.integration.cluster_processes import ClusterProcesses
from tests.linearizability.checker import Counterexample, Operation, check_linearizable
from tests.linearizability.clients import JobClient, LockClient
from tests.linearizability.models import JOBS, LOCKS, Acquire, Expire, Release, Submit
from tests.linearizability.recorder import HistoryRecorder
from tests.waiting import until

LOCK_CLIENTS, JOB_CLIENTS = 5, 3
LOCK_NAMES = ("a", "b")
STEPS = 30
"""Rounds of each client in each phase of a test."""
TTL_S = 1.0
"""The shortest lease, so that abandoned locks expire during the test."""
LONG_TTL_S = 60.0
"""Its holder need not renew the lease while the leader changes."""
REPOSITORY = Path(__file__).parents[2]


class Clients:
    """Clients with connections of their own, and their histories."""

    def __init__(
        self, connections: list[ControllerConnection], *, ttl_s: float = TTL_S, abandoned_share: float = 0.1
    ) -> None:
        self.lock_history, self.job_history = HistoryRecorder(), HistoryRecorder()
        self._stopping = asyncio.Event()
        job_ids: dict[str, str] = {}
        self._clients: list[LockClient | JobClient] = [
            LockClient(
                f"locker{number}",
                sender,
                self.lock_history,
                locks=LOCK_NAMES,
                ttl_s=ttl_s,
                abandoned_share=abandoned_share,
                seed=number,
            )
            for number, sender in enumerate(connections[:LOCK_CLIENTS])
        ]
        self._clients += [
            JobClient(f"submitter{number}", sender, self.job_history, job_ids=job_ids, seed=number)
            for number, sender in enumerate(connections[LOCK_CLIENTS:])
        ]

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with asyncio.TaskGroup() as group:
            for client in self._clients:
                group.create_task(client.run(self._stopping))
            try:
                yield
            finally:
                self._stopping.set()

    async def wait_for_steps(self, count: int) -> None:
        """Wait until each client has done `count` more rounds."""
        targets = [(client, client.steps + count) for client in self._clients]
        await until(lambda: all(client.steps >= target for client, target in targets), timeout_s=60)

    async def wait_for_steps_of_all_together(self, count: int) -> None:
        target = sum(client.steps for client in self._clients) + count
        await until(lambda: sum(client.steps for client in self._clients) >= target, timeout_s=60)

    def make_holder(self, sender: ControllerConnection, *, ttl_s: float) -> LockClient:
        """Another client of the same history."""
        return LockClient(
            "holder",
            sender,
            self.lock_history,
            locks=LOCK_NAMES,
            ttl_s=ttl_s,
            abandoned_share=0.0,
            seed=LOCK_CLIENTS,
        )

    def find_counterexample(self) -> Counterexample | None:
        return check_linearizable(LOCKS, self.lock_history.operations) or check_linearizable(
            JOBS, self.job_history.operations
        )


def check_history_covers(history: list[Operation], *kinds: type) -> None:
    """Fail if the history does not have completed operations of each kind."""
    counts = Counter(type(each.input) for each in history if not each.is_pending or each.input is Expire)
    assert all(counts[kind] for kind in kinds), counts


async def run_clients_of_one_controller(folder: Path, *, steps: int = STEPS) -> Clients:
    async with AsyncExitStack() as stack:
        running = await stack.enter_async_context(running_controller(folder))
        access = await running.access()
        connections = [
            await stack.enter_async_context(
                open_controller_connection(access, network=TcpNetwork(), program="test", timeout_s=10)
            )
            for _ in range(LOCK_CLIENTS + JOB_CLIENTS)
        ]
        clients = Clients(connections)
        async with clients.running():
            await clients.wait_for_steps(steps)
    return clients


async def test_histories_of_one_controller_are_linearizable(tmp_path: Path) -> None:
    clients = await run_clients_of_one_controller(tmp_path)
    found = clients.find_counterexample()
    assert found is None, found.describe()
    check_history_covers(clients.lock_history.operations, Acquire, Release)
    check_history_covers(clients.job_history.operations, Submit)


def _plant_grants_without_comparing(patch: pytest.MonkeyPatch) -> None:
    """A lock is granted to every client that asks for it."""
    patch.setattr(LockTable, "_is_expired", lambda self, row: True)


def _plant_tokens_that_do_not_grow(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LockTable, "_next_fencing_token", lambda self, txn: 1)


def _plant_forgotten_requests(patch: pytest.MonkeyPatch) -> None:
    """A repeated submission creates another job."""
    patch.setattr(JobSubmission, "find_by_request_id", lambda self, tenant, request_id: None)


@pytest.mark.parametrize(
    "plant", [_plant_grants_without_comparing, _plant_tokens_that_do_not_grow, _plant_forgotten_requests]
)
async def test_a_planted_defect_is_found_in_a_history(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plant: Callable[[pytest.MonkeyPatch], None]
) -> None:
    plant(monkeypatch)
    clients = await run_clients_of_one_controller(tmp_path, steps=10)
    assert clients.find_counterexample() is not None


async def open_connections(settings: Settings, stack: AsyncExitStack) -> list[ControllerConnection]:
    return [
        await stack.enter_async_context(
            open_connection(settings, network=TcpNetwork(), timeout_s=10, program="test")
        )
        for _ in range(LOCK_CLIENTS + JOB_CLIENTS)
    ]


async def is_standby_announced(settings: Settings) -> bool:
    async with open_connection(settings, network=TcpNetwork(), timeout_s=10, program="test") as connection:
        return len(connection.announced_servers) == 2


async def test_histories_of_a_killed_leader_are_linearizable(etcd: EtcdServer, tmp_path: Path) -> None:
    cluster = ClusterProcesses(tmp_path, store=etcd.url)
    try:
        await cluster.start_controller()
        standby = await cluster.start_standby()
        async with AsyncExitStack() as stack:
            settings = cluster.settings()
            await until(lambda: is_standby_announced(settings), what="the leader knows the standby")
            connections = await open_connections(settings, stack)
            clients = Clients(connections)
            async with clients.running():
                await clients.wait_for_steps(STEPS // 2)
                await cluster.controller.kill()
                await clients.wait_for_steps(STEPS // 2)
            assert {each.access.port for each in connections} == {standby.port}
    finally:
        await cluster.stop()
    found = clients.find_counterexample()
    assert found is None, found.describe()


async def record_lock_held_across_a_leader_change(
    etcd: EtcdServer, folder: Path, *, controller_module: str
) -> Clients:
    """Kill the leader while a client holds a lock that others wait for; return the clients."""
    cluster = ClusterProcesses(folder, store=etcd.url, controller_module=controller_module)
    releasing = asyncio.Event()
    try:
        await cluster.start_controller()
        await cluster.start_standby()
        settings = cluster.settings()
        async with AsyncExitStack() as stack:
            await until(lambda: is_standby_announced(settings), what="the leader knows the standby")
            connections = await open_connections(settings, stack)
            clients = Clients(connections, ttl_s=LONG_TTL_S, abandoned_share=0.0)
            holder = clients.make_holder(connections[-1], ttl_s=LONG_TTL_S)
            async with clients.running(), asyncio.TaskGroup() as group:
                group.create_task(holder.hold_until(LOCK_NAMES[0], releasing))
                await until(lambda: holder.is_holding)
                await cluster.controller.kill()
                await clients.wait_for_steps_of_all_together(STEPS)
                releasing.set()
                await clients.wait_for_steps(2)
    finally:
        await cluster.stop()
    return clients


async def test_a_lock_is_held_across_a_leader_change(etcd: EtcdServer, tmp_path: Path) -> None:
    clients = await record_lock_held_across_a_leader_change(
        etcd, tmp_path, controller_module="genie.controller"
    )
    found = clients.find_counterexample()
    assert found is None, found.describe()


@pytest.mark.long("kills the leader of a second cluster")
async def test_early_expiry_after_a_leader_change_is_found(
    etcd: EtcdServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    clients = await record_lock_held_across_a_leader_change(
        etcd, tmp_path, controller_module="tests.linearizability.early_expiry_controller"
    )
    found = clients.find_counterexample()
    assert found is not None
    assert found.partition == LOCK_NAMES[0]
