"""The capability matrix."""

from __future__ import annotations

import pytest

from genie.config import ClusterConfig
from genie.errors import ConfigError
from genie.runtime.backend_info import BACKEND_PRIORITY, BACKENDS, get_backend_info


def test_backends_have_the_documented_figures() -> None:
    figures = {
        name: (info.bandwidth_gbps, info.latency_ms, info.zero_copy) for name, info in BACKENDS.items()
    }
    assert figures == {
        "tcp": (10.0, 1.0, False),
        "dpdk": (90.0, 0.05, True),
        "dpdk_gpudev": (95.0, 0.03, True),
        "rdma": (100.0, 0.001, True),
    }


def test_priority_has_the_documented_order_and_all_backends() -> None:
    assert BACKEND_PRIORITY == ("dpdk_gpudev", "rdma", "dpdk", "tcp")
    assert set(BACKEND_PRIORITY) == set(BACKENDS)


def test_only_tcp_has_a_transport_and_no_requirements() -> None:
    assert [name for name, info in BACKENDS.items() if info.implemented] == ["tcp"]
    assert [name for name, info in BACKENDS.items() if not info.requirements] == ["tcp"]


def test_setting_allows_exactly_the_backends_and_auto() -> None:
    allowed = ClusterConfig.__dataclass_fields__["backend"].metadata["allowed"]
    assert set(allowed) == {"auto", *BACKENDS}


@pytest.mark.parametrize("name", ["auto", "smoke", ""])
def test_unknown_backend_error_lists_the_allowed_names(name: str) -> None:
    with pytest.raises(ConfigError, match=r"allowed: tcp, dpdk, dpdk_gpudev, rdma"):
        get_backend_info(name)
