"""Conversion of node reports and jobs to the scheduler's values."""

from __future__ import annotations

from dataclasses import replace

import msgspec
from hypothesis import example, given
from hypothesis import strategies as st

from genie.model.node import GPUInfo, NodeInfo, NodeRole, Vendor
from genie.scheduler.conversion import node_facts
from genie.scheduler.request import GpuFacts, NodeFacts, Shape
from tests.scheduler.clusters import SchedulerHarness

MIB = 1024**2
INT_MAX = 2**31 - 1  # of C++


def make_node_info(*gpus: GPUInfo, **fields: object) -> NodeInfo:
    base = NodeInfo(node_id="n1", hostname="n1", role=NodeRole.WORKER, host="10.0.0.1", gpus=gpus)
    return msgspec.structs.replace(base, **fields)


def make_h200(**fields: object) -> GPUInfo:
    whole = GPUInfo(
        gpu_id=4,
        name="NVIDIA H200",
        vendor=Vendor.NVIDIA,
        memory_total_bytes=141_000 * MIB,
        capability=(9, 0),
        island=4,
        numa=1,
    )
    return msgspec.structs.replace(whole, **fields)


def test_node_and_job_fields_are_converted() -> None:
    info = make_node_info(
        make_h200(),
        make_h200(gpu_id=5, available=False, reason="too hot", memory_outside_bytes=3 * MIB),
        cpus=8.0,
        memory_total_bytes=64 * MIB,
        labels={"disk": "ssd", "zone": "a"},
        rack="r7",
    )
    kind = GpuFacts("NVIDIA H200", "nvidia", 141_000, (9, 0), 4, 1)
    expected = NodeFacts(
        node_id="n1",
        cpu_milli=8000,
        memory_mib=64,
        gpus=(kind, kind),
        labels=frozenset({("disk", "ssd"), ("zone", "a")}),
        rack="r7",
        blocked_gpus=frozenset({1}),
        memory_used_outside_cluster_mib=(0, 3),
    )
    assert node_facts(info) == expected
    assert node_facts(info, blocked_reason="draining") == replace(expected, blocked_reason="draining")


def test_node_report_without_resources_has_none() -> None:
    assert node_facts(make_node_info()) == NodeFacts("n1", 0, 0)


_SIZES = st.one_of(st.integers(0, 1 << 60), st.integers(0, 5 * MIB))


@given(cpus=st.floats(0, 1e6), memory=_SIZES, total=_SIZES, outside=_SIZES)
@example(cpus=1e6, memory=1 << 60, total=1 << 60, outside=1 << 59)
def test_rounding_of_node_resources_never_overcommits(
    cpus: float, memory: int, total: int, outside: int
) -> None:
    gpu = make_h200(memory_total_bytes=total, memory_outside_bytes=outside)
    facts = node_facts(make_node_info(gpu, cpus=cpus, memory_total_bytes=memory))
    assert facts.cpu_milli <= cpus * 1000
    assert facts.memory_mib * MIB <= memory
    assert facts.gpus[0].memory_mib * MIB <= total
    free_mib = facts.gpus[0].memory_mib - facts.memory_used_outside_cluster_mib[0]
    assert 0 <= free_mib * MIB <= max(total - outside, 0)
    counted = (
        facts.cpu_milli,
        facts.memory_mib,
        facts.gpus[0].memory_mib,
        facts.memory_used_outside_cluster_mib[0],
    )
    assert all(0 <= amount <= INT_MAX for amount in counted)


@given(cpus=st.integers(0, 1_000_000), mib=st.integers(0, INT_MAX))
def test_whole_amounts_are_converted_exactly(cpus: int, mib: int) -> None:
    gpu = make_h200(memory_total_bytes=mib * MIB, memory_outside_bytes=mib // 2 * MIB)
    facts = node_facts(make_node_info(gpu, cpus=float(cpus), memory_total_bytes=mib * MIB))
    assert (facts.cpu_milli, facts.memory_mib) == (cpus * 1000, mib)
    assert (facts.gpus[0].memory_mib, facts.memory_used_outside_cluster_mib[0]) == (mib, mib // 2)


def test_unhealthy_or_occupied_gpu_is_avoided_until_it_recovers() -> None:
    half = Shape(gpus=1, gpu_memory_mib=100_000)
    busy = make_h200(memory_outside_bytes=60_000 * MIB)
    harness = SchedulerHarness(node_facts(make_node_info(make_h200(available=False, reason="too hot"), busy)))
    harness.submit("big", shape=half)
    assert harness.started() == []
    harness.scheduler.set_node(node_facts(make_node_info(make_h200(), busy)))
    assert harness.started() == ["big"]
    harness.submit("next", shape=half)
    assert harness.started() == []
    harness.scheduler.set_node(
        node_facts(make_node_info(make_h200(), make_h200(memory_outside_bytes=41_000 * MIB)))
    )
    assert harness.started() == ["next"]
