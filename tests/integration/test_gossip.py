"""Gossip between real controllers and agents: `genie members` with and without a leader, and failures."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import pytest

from genie.model.member import MemberRole, MemberState
from genie.model.names import address_text
from tests.controller.store.etcd_server import EtcdServer
from tests.integration.cluster_processes import ClusterProcesses
from tests.ports import free_port
from tests.waiting import until, wait_until

STANDBY_HOST = "127.0.0.2"
"""Servers use the same port of gossip, so on one machine they need addresses of their own."""


@pytest.fixture(autouse=True)
def gossip_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clusters on loopback have no gossip by default."""
    monkeypatch.setenv("GENIE_GOSSIP_ENABLED", "on")
    monkeypatch.setenv("GENIE_GOSSIP_SERVER_PORT", str(free_port()))
    monkeypatch.setenv("GENIE_GOSSIP_NODE_PORT", "0")


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[ClusterProcesses]:
    processes = ClusterProcesses(tmp_path)
    try:
        await processes.start_controller()
        yield processes
    finally:
        await processes.stop()


async def fetch_node_states(cluster: ClusterProcesses) -> dict[str, MemberState]:
    async with cluster.client() as client:
        members = (await client.members()).members
    return {member.name: member.state for member in members if member.role is MemberRole.NODE}


async def until_node_states(cluster: ClusterProcesses, **expected: MemberState) -> None:
    async def are_reached() -> bool:
        return await fetch_node_states(cluster) == expected

    await until(are_reached, timeout_s=45, what=f"{expected}")


def run_members_command(state_dir: Path, *, address: str = "") -> subprocess.CompletedProcess[str]:
    arguments = ["--address", address] if address else []
    return subprocess.run(
        [sys.executable, "-m", "genie", *arguments, "members", "--json"],
        env=os.environ | {"GENIE_STATE_DIR": str(state_dir), "GENIE_LOG_LEVEL": "ERROR"},
        capture_output=True,
        text=True,
        timeout=60,
        stdin=subprocess.DEVNULL,
    )


def states_by_member(reply: Mapping[str, object]) -> dict[str, str]:
    """State by node ID, and by the address of a controller."""
    members = reply["members"]
    assert isinstance(members, list)
    return {each.get("controller_address") or each["name"]: each["state"] for each in members}


async def test_killed_stopped_and_paused_nodes_have_their_states(cluster: ClusterProcesses) -> None:
    for name in ("a", "b", "c"):
        await cluster.start_agent(name)
    alive = MemberState.ALIVE
    await until_node_states(cluster, a=alive, b=alive, c=alive)

    os.kill(cluster.agents["b"].pid, signal.SIGSTOP)
    await until_node_states(cluster, a=alive, b=MemberState.DEAD, c=alive)
    os.kill(cluster.agents["b"].pid, signal.SIGCONT)
    await until_node_states(cluster, a=alive, b=alive, c=alive)

    await cluster.agents["b"].kill()
    await cluster.agents["c"].stop()
    await until_node_states(cluster, a=alive, b=MemberState.DEAD, c=MemberState.LEFT)
    await cluster.start_agent("b")
    await until_node_states(cluster, a=alive, b=alive, c=MemberState.LEFT)


async def test_members_command_works_without_leader_and_store(etcd: EtcdServer, tmp_path: Path) -> None:
    cluster = ClusterProcesses(tmp_path, store=etcd.url)
    try:
        await cluster.start_controller()
        standby = await cluster.start_standby(host=STANDBY_HOST)
        await cluster.start_agent("a")
        assert cluster.address is not None
        leader_address = address_text(cluster.address.host, cluster.address.port)
        standby_address = address_text(standby.host, standby.port)
        everyone = dict.fromkeys((leader_address, standby_address, "a"), "alive")

        def members_reported_by(address: str) -> dict[str, str]:
            done = run_members_command(tmp_path / "standby", address=address)
            return states_by_member(json.loads(done.stdout)) if done.returncode == 0 else {}

        for address in (leader_address, standby_address):
            await asyncio.to_thread(
                wait_until, lambda address=address: members_reported_by(address) == everyone
            )
        etcd.kill()
        await cluster.controller.kill()
        await asyncio.to_thread(
            wait_until, lambda: members_reported_by(standby_address) == everyone | {leader_address: "dead"}
        )

        assert cluster.standby is not None
        await cluster.standby.kill()

        def stored_by_the_agent() -> dict[str, str]:
            done = run_members_command(tmp_path / "a")
            assert done.returncode == 0, done.stderr
            assert "listing the members that a on this machine knew" in done.stderr
            return states_by_member(json.loads(done.stdout))

        nobody_else = {leader_address: "dead", standby_address: "dead", "a": "alive"}
        await asyncio.to_thread(wait_until, lambda: stored_by_the_agent() == nobody_else)
    finally:
        await cluster.stop()
