"""docs/README.md lists every page, and the location of every file that the requirement documents name.

The documents are not part of the repository, so the names are listed here, without files of the user
(`train.py`, `metrics.txt`). The code samples of the documents are tested in test_documents.py of
tests/integration and tests/grid.
"""

from __future__ import annotations

import importlib
import re

import pytest

from tests.house.repository_files import ROOT, list_pages, read_table, relative_path

DOCS = ROOT / "docs"
INDEX = DOCS / "README.md"
NAMES: dict[str, tuple[str, ...]] = {
    "Cluster Initialization Feature - Executive Summary": (
        "CLUSTER_INIT_IMPLEMENTATION_PLAN.md",
        "CLUSTER_INIT_IMPLEMENTATION_PLAN_PART2.md",
        "genie/cluster/init.py",
        "genie/cluster/node_info.py",
        "genie/cluster/monitoring.py",
        "genie/cluster/health.py",
        "genie/cluster/events.py",
        "genie/cluster/dashboard.py",
        "genie/cluster/backend_info.py",
        "genie/runtime/network_discovery.py",
        "genie/runtime/backend_info.py",
        "genie/__init__.py",
        "genie/core/device.py",
        "tests/test_cluster_init.py",
        "tests/test_cluster_node_info.py",
        "tests/test_network_discovery.py",
        "tests/test_resource_monitor.py",
        "test_health.py",
        "test_events.py",
        "test_full_discovery.py",
        "test_end_to_end.py",
        "tests/integration/test_multi_node.py",
        "docs/USER_GUIDE.md",
        "docs/ENVIRONMENT_VARIABLES.md",
        "docs/CLUSTER_INITIALIZATION.md",
        "docs/implementation/README.md",
        "docs/implementation/01-architecture-overview.md",
        "docs/implementation/05-runtime-transport.md",
        "examples/basic_client.py",
        "examples/gpu_server.py",
        "examples/monitoring_dashboard.py",
        "benchmarks/bench_init.py",
        "bench_discovery.py",
        "bench_backend_comparison.py",
        ".kiro/HotNets25.tex",
    ),
    "Cluster Initialization - Visual Guide": (
        "genie/cluster/network_discovery.py",
        "VQAModel",
        "CLUSTER_INIT_INDEX.md",
        "CLUSTER_INIT_QUICK_START.md",
    ),
    "Genie Cluster Management Documentation": (
        "CLUSTER_INIT_SUMMARY.md",
        "CLUSTER_INIT_VISUAL_GUIDE.md",
        "archive/CLUSTER_INIT_PHASES_1_2_3_COMPLETE.md",
        "README.md",
        "docs/implementation/00-INDEX.md",
    ),
    "INITIAL.md - Advanced GPU Cluster Manager": (
        "INITIAL.md",
        "examples/gpu_manager.py",
        "examples/memory_pool.py",
        "examples/device_topology.py",
        "examples/thermal_manager.py",
        "examples/schedulers/fifo_scheduler.py",
        "examples/schedulers/priority_scheduler.py",
        "examples/schedulers/affinity_scheduler.py",
        "examples/schedulers/gang_scheduler.py",
        "examples/consensus/raft.py",
        "examples/networking/gossip.py",
        "examples/coordination/distributed_locks.py",
        "examples/failover/recovery_manager.py",
        "examples/profiling/kernel_tracer.py",
        "examples/optimization/batch_processor.py",
        "examples/networking/rdma_transport.py",
        "examples/memory/numa_allocator.py",
        "examples/apis/openai_compat.py",
        "examples/apis/grpc_server.py",
        "examples/apis/rest_endpoints.py",
    ),
    "Grid Cluster - Architecture & Quick Reference": (
        "config/cluster_config.yaml",
        "scripts/grid_setup_enhanced.py",
        "cluster/executor_optimized.py",
        "cluster/balancer_optimized.py",
        "tasks/batch_executor.py",
        "ssh_pool.py",
        "health_check.py",
        "sync_manager.py",
        "retry.py",
        "logging.py",
        "metrics.py",
        "grid_cli.py",
        "alert rules for Prometheus",
        "optimization_report.md",
        "scaffold_p1.md",
        "scaffold_p2.md",
    ),
}
# Names that the documents import or call. Those of the grid are in tests/grid/test_documents.py.
IMPORTED = (
    "genie:init",
    "genie:shutdown",
    "genie:is_initialized",
    "genie:get_cluster_state",
    "genie.cluster.init:init",
    "genie.cluster.init:shutdown",
    "genie.cluster.init:ClusterState",
    "genie.cluster.init:ClusterConfig",
    "genie.cluster.node_info:NodeInfo",
    "genie.cluster.node_info:GPUInfo",
    "genie.cluster.node_info:NodeStatus",
    "genie.cluster.monitoring:ResourceMonitor",
    "genie.cluster.monitoring:create_resource_monitor",
    "genie.cluster.health:HealthChecker",
    "genie.cluster.health:HealthReport",
    "genie.cluster.events:EventBus",
    "genie.cluster.events:ClusterEvent",
    "genie.cluster.dashboard:show",
    "genie.runtime.network_discovery:NetworkDiscovery",
    "genie.cluster.network_discovery:NetworkDiscovery",
    "genie.runtime.backend_info:BackendInfo",
    "genie.cluster.backend_info:BackendInfo",
    "genie.runtime:TransportCoordinator",
    "genie.runtime:DataPlaneConfig",
    "genie.runtime:ControlDataIntegration",
)
_LINK = re.compile(r"\[[^\]]+\]\(([^)]+)\)")


def read_index_rows() -> dict[str, str]:
    """Names of the documents with their entry on the page."""
    return {
        row[0].partition(",")[0].strip("`"): row[1]
        for row in read_table(INDEX.read_text("utf-8"), "in the documents")
    }


def is_link_or_reason_cell(cell: str) -> bool:
    """Whether the cell links to an existing file or states that there is none."""
    targets = _LINK.findall(cell)
    if not all((DOCS / target.partition("#")[0]).exists() for target in targets):
        return False
    return bool(targets) or cell == "this page" or re.match(r"not yet\b|not planned: \w", cell) is not None


def test_index_links_every_page() -> None:
    linked = {
        (DOCS / target.partition("#")[0]).resolve() for target in _LINK.findall(INDEX.read_text("utf-8"))
    }
    missing = [
        relative_path(page) for page in list_pages() if page != INDEX and not {page, page.parent} & linked
    ]
    assert missing == []


def test_readme_links_the_index() -> None:
    assert "(docs/README.md)" in (ROOT / "README.md").read_text("utf-8")


def test_index_table_has_exactly_the_names_of_the_documents() -> None:
    named = [name for names in NAMES.values() for name in names]
    assert len(named) == len(set(named))
    assert sorted(read_index_rows()) == sorted(named)


@pytest.mark.parametrize("name", sorted(read_index_rows()))
def test_name_has_a_link_or_is_marked_as_missing(name: str) -> None:
    assert is_link_or_reason_cell(read_index_rows()[name])


def test_name_marked_as_missing_does_not_exist() -> None:
    absent = [name for name, cell in read_index_rows().items() if cell.startswith("not ")]
    assert [name for name in absent if (ROOT / name).exists()] == []


@pytest.mark.parametrize("name", IMPORTED)
def test_name_of_the_documents_can_be_imported(name: str) -> None:
    module, _, attribute = name.partition(":")
    found = getattr(importlib.import_module(module), attribute)
    assert found.__doc__, "it needs a docstring"


@pytest.mark.parametrize("cell", ["", "soon", "[x](no-such-page.md)", "not planned", "not planned: "])
def test_invalid_cell_is_detected(cell: str) -> None:
    assert not is_link_or_reason_cell(cell)
