"""This process as a node."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import genie
from genie.cluster import node_info
from genie.cluster.node_info import (
    create_local_node,
    detect_local_gpus,
    local_node_id,
    new_session_id,
)
from genie.config import ClusterConfig
from genie.errors import NameInvalidError
from genie.hardware import HostFacts
from genie.model import node as model
from genie.model.names import validate_node_id
from genie.model.node import GPUInfo, NodeRole, NodeStatus, Vendor
from genie.runtime.network import local_address_towards

HOST_FACTS = HostFacts(cpus=4.0, memory_total_bytes=100, memory_used_bytes=40, hostname="Box.Example")


@pytest.mark.parametrize("name", ["NodeInfo", "GPUInfo", "NodeStatus", "NodeRole"])
def test_documented_names_are_those_of_the_model(name: str) -> None:
    assert getattr(node_info, name) is getattr(model, name)


def test_local_node_has_configuration_and_host_facts() -> None:
    gpu = GPUInfo(gpu_id=0, name="x", vendor=Vendor.CPU)
    config = ClusterConfig(node_role="worker")
    node = create_local_node(config, suffix="abc", host="10.0.0.1", gpus=(gpu,), facts=HOST_FACTS, now=7.0)
    assert (node.node_id, node.hostname, node.host) == ("box-example-abc", "Box.Example", "10.0.0.1")
    assert (node.role, node.status) == (NodeRole.WORKER, NodeStatus.INITIALIZING)
    assert (node.cpus, node.memory_total_bytes, node.memory_used_bytes) == (4.0, 100, 40)
    assert (node.gpus, node.gpu_count) == ((gpu,), 1)
    assert (node.last_heartbeat, node.version) == (7.0, genie.__version__)
    assert (node.network_backend, node.control_port) == ("tcp", 0)


def test_server_node_has_its_port_and_backend() -> None:
    config = ClusterConfig(node_role="server", master_port=6000, backend="rdma")
    node = create_local_node(config, suffix="a", gpus=(), facts=HOST_FACTS)
    assert (node.control_port, node.network_backend) == (6000, "rdma")


def test_configured_node_id_is_used_unchanged() -> None:
    config = ClusterConfig(node_id="my-node")
    assert create_local_node(config, suffix="abc", gpus=(), facts=HOST_FACTS).node_id == "my-node"


def test_invalid_configured_node_id_is_rejected() -> None:
    with pytest.raises(NameInvalidError, match="My Node"):
        create_local_node(ClusterConfig(node_id="My Node"), suffix="abc", gpus=(), facts=HOST_FACTS)


@given(st.text(max_size=80), st.text("0123456789abcdef", min_size=1, max_size=32))
def test_every_host_name_gives_a_valid_node_id_with_suffix(hostname: str, suffix: str) -> None:
    node_id = local_node_id(ClusterConfig(), hostname=hostname, suffix=suffix)
    assert validate_node_id(node_id) == node_id
    assert node_id.endswith(f"-{suffix}")


def test_local_node_reads_the_machine_by_default() -> None:
    node = create_local_node(ClusterConfig(), suffix="abc")
    assert node.memory_total_bytes > 0
    assert node.cpus > 0


def test_cpu_accelerators_are_detected_only_on_request() -> None:
    found = detect_local_gpus(cpu_accelerators=2)
    vendors = {gpu.vendor for gpu in found}
    assert vendors in ({Vendor.CPU}, {Vendor.NVIDIA})
    assert all(gpu.vendor is not Vendor.CPU for gpu in detect_local_gpus())


def test_session_id_is_a_node_id_with_the_full_suffix() -> None:
    assert new_session_id("box", suffix="a1b2c3") == "box-a1b2c3"
    long = new_session_id("x" * 55 + "-" + "y" * 7, suffix="a1b2c3")
    assert validate_node_id(long).endswith("x-a1b2c3")


def test_address_towards_returns_the_local_address() -> None:
    assert local_address_towards("127.0.0.1", 5555) == "127.0.0.1"
    assert local_address_towards("256.0.0.1", 5555) is None
