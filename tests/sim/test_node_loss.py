"""A node that loses its power together with the leader is reported as lost within 20 s by the next leader."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from genie.controller.nodes.membership import Membership
from genie.model.node import NodeStatus
from genie.sim import loop
from genie.sim.cluster import SimCluster
from genie.sim.faults.outages import simulate_store_election
from genie.sim.invariants import NodeLossChecker
from tests.sim.seeds import seed_parameters

LOST_WITHIN_S = 20.0
OBSERVED_S = 30.0
POLL_S = 0.1


async def _power_off_leader_and_node(
    seed: int, directory: Path, *, with_store: bool
) -> tuple[float, list[str]]:
    """Return when the node was lost, in seconds after the power outage, and the violations."""
    async with asyncio.TaskGroup() as group:
        cluster = SimCluster(seed, directory, group, node_count=3, controller_count=3)
        await cluster.start()
        await cluster.wait_for_nodes()
        await asyncio.sleep(cluster.world.random.uniform(1.0, 4.0))
        checking = group.create_task(NodeLossChecker(cluster).check_periodically())
        node = cluster.world.random.choice(cluster.node_hosts)
        leader = next(filter(cluster.is_leader, cluster.controller_hosts))
        off_s, lost_s = cluster.world.now_s, float("inf")
        statuses: dict[str, NodeStatus] = {}
        for host in (leader, node):
            cluster.crash(host, power_off=True)
        if with_store:
            await simulate_store_election(cluster)
        while cluster.world.now_s < off_s + OBSERVED_S:
            await asyncio.sleep(POLL_S)
            statuses = cluster.leader.node_statuses() if cluster.leader is not None else {}
            if statuses.get(cluster.node_id(node)) is NodeStatus.DISCONNECTED:
                lost_s = min(lost_s, cluster.world.now_s - off_s)
        others = [status for node_id, status in statuses.items() if node_id != cluster.node_id(node)]
        assert others == [NodeStatus.HEALTHY] * 2
        checking.cancel()
        await cluster.stop()
    return lost_s, cluster.machines.violations


@pytest.mark.parametrize("with_store", [False, True])
@pytest.mark.parametrize("seed", seed_parameters(range(2), long=range(2, 12)))
def test_node_on_the_machine_of_the_leader_is_lost_within_20_s(
    seed: int, with_store: bool, tmp_path: Path
) -> None:
    lost_s, violations = loop.run_simulated(_power_off_leader_and_node(seed, tmp_path, with_store=with_store))
    assert violations == []
    assert LOST_WITHIN_S / 2 < lost_s <= LOST_WITHIN_S


def test_simulation_detects_a_new_leader_that_waits_for_the_full_time_to_live(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Membership, "_get_disconnected_after_s", lambda self, node_id: self._node_ttl_s)
    lost_s, violations = loop.run_simulated(_power_off_leader_and_node(0, tmp_path, with_store=True))
    assert lost_s > LOST_WITHIN_S
    assert any("is still suspect" in violation for violation in violations)
