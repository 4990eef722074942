"""Network discovery as a part of init(): what is found is kept with its reasons, and decides the backend."""

from __future__ import annotations

import pytest

import genie
from genie.errors import ConfigError
from tests.integration.running import RunningCluster


async def test_what_was_found_is_kept_with_its_reasons(cluster: RunningCluster) -> None:
    state = await genie.init()
    assert state.discovery is not None
    assert state.discovery.tcp_rtt_ms is not None
    assert set(state.discovery.probes) == {"tcp", "dpdk", "gpu_direct", "rdma"}
    assert all(probe.reason for probe in state.discovery.probes.values())
    assert state.selection is not None
    assert state.selection.reason
    assert state.local_node.network_backend == state.backend


async def test_tcp_may_be_asked_for_by_name(cluster: RunningCluster) -> None:
    assert (await genie.init(backend="tcp")).backend == "tcp"


@pytest.mark.parametrize("backend", ["dpdk", "dpdk_gpudev"])
async def test_a_backend_that_does_not_work_here_is_refused_with_the_reason(
    cluster: RunningCluster, backend: str
) -> None:
    with pytest.raises(ConfigError, match=f"backend '{backend}'"):
        await genie.init(backend=backend)
    assert not genie.is_initialized()
