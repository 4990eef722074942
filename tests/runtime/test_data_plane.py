"""The coordinator of the data plane: probes a real port and selects a backend, or raises the reason."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from math import inf, nan
from typing import Any

import pytest

from genie.errors import ConfigError, UnreachableError, UsageError
from genie.runtime import DataPlaneConfig, TransportCoordinator
from genie.runtime.network_discovery import NetworkDiscovery


@pytest.fixture
def listening_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


async def test_initialize_probes_the_network_and_selects_a_backend(listening_port: int) -> None:
    coordinator = TransportCoordinator(DataPlaneConfig(host="127.0.0.1", port=listening_port))
    assert (coordinator.discovery, coordinator.selection, coordinator.backend) == (None, None, "")
    selection = await coordinator.initialize()
    assert coordinator.discovery is not None
    assert coordinator.discovery.tcp_reachable
    assert coordinator.selection is selection
    assert coordinator.backend == selection.backend == "tcp"
    assert selection.reason


async def test_coordinator_is_initialized_once(listening_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    coordinator = TransportCoordinator(DataPlaneConfig(host="127.0.0.1", port=listening_port))
    selection = await coordinator.initialize()
    monkeypatch.delattr(NetworkDiscovery, "discover")
    assert await coordinator.initialize() is selection


async def test_unreachable_host_is_an_error(unused_tcp_port: int) -> None:
    coordinator = TransportCoordinator(DataPlaneConfig(host="127.0.0.1", port=unused_tcp_port, timeout_s=5))
    with pytest.raises(UnreachableError, match="connection refused"):
        await coordinator.initialize()
    assert coordinator.backend == ""


async def test_backend_given_by_name_is_never_replaced(listening_port: int) -> None:
    coordinator = TransportCoordinator(DataPlaneConfig(host="127.0.0.1", port=listening_port, backend="rdma"))
    with pytest.raises(ConfigError, match="rdma"):
        await coordinator.initialize()


@pytest.mark.parametrize(
    "wrong",
    [
        {"host": ""},
        *({"port": n} for n in (0, -1, 99999)),
        {"backend": "infiniband"},
        {"backend": ""},
        *({"timeout_s": n} for n in (0, -1, nan, inf)),
    ],
)
def test_invalid_field_of_the_data_plane_config_is_rejected(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        DataPlaneConfig(**{"host": "127.0.0.1", **wrong})


def test_select_before_discover_is_an_error() -> None:
    with pytest.raises(UsageError, match="initialize"):
        TransportCoordinator(DataPlaneConfig(host="127.0.0.1")).select()
