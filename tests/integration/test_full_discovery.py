"""Network discovery during init(): results are stored with reasons and determine the backend."""

from __future__ import annotations

import pytest

import genie
from genie.errors import ConfigError
from tests.integration.running_cluster import RunningCluster


async def test_discovery_results_are_stored_with_reasons(cluster: RunningCluster) -> None:
    state = await genie.init()
    assert state.discovery is not None
    assert state.discovery.tcp_rtt_ms is not None
    assert set(state.discovery.probes) == {"tcp", "dpdk", "gpu_direct", "rdma"}
    assert all(probe.reason for probe in state.discovery.probes.values())
    assert state.selection is not None
    assert state.selection.reason
    assert state.local_node.network_backend == state.backend


async def test_tcp_backend_can_be_selected(cluster: RunningCluster) -> None:
    assert (await genie.init(backend="tcp")).backend == "tcp"


@pytest.mark.parametrize("backend", ["dpdk", "dpdk_gpudev"])
async def test_unavailable_backend_is_rejected_with_the_reason(cluster: RunningCluster, backend: str) -> None:
    with pytest.raises(ConfigError, match=f"backend '{backend}'"):
        await genie.init(backend=backend)
    assert not genie.is_initialized()
