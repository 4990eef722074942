"""Locks of a session, and `genie lock list`, whose first server is a standby."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

import genie
from genie.model.messages.locks import ListLocks
from tests.cluster.small_controller import QUIET_SETTINGS
from tests.controller.standby.controllers_on_etcd import LeaderAndStandby, run_leader_and_standby


@asynccontextmanager
async def run_cluster_whose_first_server_is_a_standby(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[LeaderAndStandby]:
    """Not a fixture: pytest keeps its value, and so the connections to etcd, during the leak check."""
    async with run_leader_and_standby(folder) as running:
        monkeypatch.setenv("GENIE_MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("GENIE_MASTER_PORT", str(running.standby.port))
        monkeypatch.setenv("GENIE_TOKEN", (running.leader.state_dir / "owner.token").read_text())
        try:
            yield running
        finally:
            await genie.shutdown()


async def test_a_session_moves_to_the_leader_for_its_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wait for a lock ends with the connection of its client, so it is never forwarded."""
    async with run_cluster_whose_first_server_is_a_standby(tmp_path, monkeypatch) as cluster:
        state = await genie.init(enable_heartbeat=False, **QUIET_SETTINGS)
        connection = state.control_integration
        assert connection is not None and connection.where == f"127.0.0.1:{cluster.standby.port}"
        async with genie.lock("checkpoint") as lock:
            assert connection.where == cluster.leader_address
            async with cluster.leader.client() as of_leader:
                (view,) = (await of_leader.ask(ListLocks())).locks
            assert (view.name, view.fencing_token) == ("checkpoint", lock.fencing_token)
            assert state.session_id in view.holder


async def test_lock_list_through_a_standby_shows_the_locks_of_the_leader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with run_cluster_whose_first_server_is_a_standby(tmp_path, monkeypatch):
        await genie.init(**QUIET_SETTINGS)
        async with genie.lock("checkpoint") as lock:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "genie", "lock", "list", "--json"),
                stdout=asyncio.subprocess.PIPE,
            )
            listed, _ = await process.communicate()
            (view,) = json.loads(listed)["locks"]
            assert (view["name"], view["fencing_token"]) == ("checkpoint", lock.fencing_token)
