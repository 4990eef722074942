"""The capability matrix."""

from __future__ import annotations

import pytest

from genie.config import ClusterConfig
from genie.errors import ConfigError
from genie.runtime.backend_info import BACKENDS, PRIORITY, get_backend_info


def test_the_documented_figures_are_kept() -> None:
    figures = {
        name: (info.bandwidth_gbps, info.latency_ms, info.zero_copy) for name, info in BACKENDS.items()
    }
    assert figures == {
        "tcp": (10.0, 1.0, False),
        "dpdk": (90.0, 0.05, True),
        "dpdk_gpudev": (95.0, 0.03, True),
        "rdma": (100.0, 0.001, True),
    }


def test_the_order_is_the_documented_one_and_names_every_backend() -> None:
    assert PRIORITY == ("dpdk_gpudev", "rdma", "dpdk", "tcp")
    assert set(PRIORITY) == set(BACKENDS)


def test_only_tcp_has_a_transport_and_only_tcp_needs_nothing() -> None:
    assert [name for name, info in BACKENDS.items() if info.implemented] == ["tcp"]
    assert [name for name, info in BACKENDS.items() if not info.requirements] == ["tcp"]


def test_the_setting_allows_exactly_the_backends_and_auto() -> None:
    allowed = ClusterConfig.__dataclass_fields__["backend"].metadata["allowed"]
    assert set(allowed) == {"auto", *BACKENDS}


@pytest.mark.parametrize("name", ["auto", "smoke", ""])
def test_a_name_that_is_no_backend_is_refused_with_the_allowed_ones(name: str) -> None:
    with pytest.raises(ConfigError, match=r"allowed: tcp, dpdk, dpdk_gpudev, rdma"):
        get_backend_info(name)
