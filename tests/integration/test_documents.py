"""Runs the code samples of the requirement documents verbatim on a real cluster.

Only host names are replaced; ports and tokens are set in the environment. Top-level `await` works as in
notebooks and `python -m asyncio`. tests/grid/test_documents.py runs the samples of the grid document,
tests/house/test_document_names.py checks the file names of the documents.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

import genie
from genie.cluster import init
from genie.config import ClusterConfig, list_settings
from genie.model.event import EventType
from genie.model.names import address_text
from genie.model.node import NodeRole, NodeStatus
from genie.runtime import ControlDataIntegration, TransportCoordinator
from genie.runtime.backend_info import BACKEND_PRIORITY
from genie.runtime.logins import store_login
from genie.supervisor import local_cluster
from genie.tenancy.access import parse_token
from tests.house.repository_files import ROOT
from tests.house.small_suites import make_suite_environment
from tests.house.test_reference_tables import list_public_members
from tests.integration.running_cluster import RunningCluster

HOSTS = ("gpu-server.example.com", "prod-server", "gpu-server", "localhost")

# --- samples that compute, by title of the document ---------------------------------------------

SUMMARY = """
import genie
import torch

# Single line initialization
await genie.init(master_addr='gpu-server.example.com')

# Use remote GPUs transparently
x = torch.randn(1000, 1000, device='remote_accelerator:0')
y = x @ x
result = y.cpu()

# Clean shutdown
await genie.shutdown()
"""
BASIC_CLIENT = """
import genie

# Initialize connection to GPU cluster
await genie.init(master_addr='gpu-server.example.com')

# Use remote accelerators transparently
import torch
x = torch.randn(1000, 1000, device='remote_accelerator:0')
result = (x @ x).cpu()

# Clean shutdown
await genie.shutdown()
"""
MULTI_MODAL = """
# Initialize once
await genie.init(master_addr='gpu-server')

# Create model
model = VQAModel()  # Vision + Text

# Run inference
image = load_image('cat.jpg')
text = "What animal is this?"
result = model(image, text)
"""
# Prerequisites of the sample of the visual guide: a model on three accelerators, and an image.
BEFORE_MULTI_MODAL = """
import sys

import torch

import genie

sys.path.insert(0, EXAMPLES)
import multimodal


class VQAModel(multimodal.Multimodal):
    def __init__(self):
        count = torch.remote_accelerator.device_count()
        super().__init__([f"remote_accelerator:{number % count}" for number in range(3)])

    def forward(self, image, text):
        words = torch.tensor([[hash(word) % len(multimodal.WORDS) for word in text.split()]])
        return super().forward(image, words)


def load_image(name):
    return torch.randn(1, 1, multimodal.SIZE, multimodal.SIZE)
"""
PRINT_RESULT = "print(type(result).__module__, tuple(result.shape), result.device, genie.is_initialized())\n"
COMPUTING = {
    "summary": SUMMARY + PRINT_RESULT,
    "basic client": BASIC_CLIENT + PRINT_RESULT,
    "multi-modal": BEFORE_MULTI_MODAL + MULTI_MODAL + PRINT_RESULT + "await genie.shutdown()\n",
}
DRIVER = """
import ast, asyncio, contextlib, io, json, sys

async def main(samples):
    for name, code in samples.items():
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            compiled = compile(code, name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            await eval(compiled, {"__name__": "__main__", "EXAMPLES": sys.argv[1]})
        print(json.dumps([name, output.getvalue()]), flush=True)

asyncio.run(main(json.loads(sys.stdin.read())))
"""


def replace_hosts(sample: str, *, host: str = "127.0.0.1") -> str:
    for name in HOSTS:
        sample = sample.replace(f"'{name}'", f"'{host}'")
    return sample


@pytest.fixture(scope="module")
def sample_outputs(shared_cluster: RunningCluster) -> dict[str, str]:
    """Output of each computing sample. One process runs all of them, because importing torch is slow."""
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, str(ROOT / "examples")],
        input=json.dumps(
            {name: replace_hosts(code, host=shared_cluster.host) for name, code in COMPUTING.items()}
        ),
        env=shared_cluster.environ(),
        capture_output=True,
        text=True,
        timeout=85,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return dict(json.loads(line) for line in done.stdout.splitlines())


@pytest.mark.parametrize("name", ["summary", "basic client"])
def test_documented_sample_returns_a_remote_product(sample_outputs: dict[str, str], name: str) -> None:
    assert sample_outputs[name] == "torch (1000, 1000) cpu False\n"


def test_documented_multimodal_model_returns_a_result(sample_outputs: dict[str, str]) -> None:
    assert sample_outputs["multi-modal"].startswith("torch (1, 2) remote_accelerator:")


# --- samples that connect -----------------------------------------------------------------------

DEVELOPMENT = """
await genie.init(
    master_addr='localhost',
    backend='tcp',
    heartbeat_interval=5.0
)
"""
PRODUCTION = """
await genie.init(
    master_addr='prod-server',
    backend='auto',  # Let it choose best
    enable_gpu_monitoring=True,
    enable_health_checks=True
)
"""
SERVER_MODE = """
await genie.init(
    node_role='server',
    master_port=5555
)
"""
SERVER_WITH_MONITORING = """
import genie
from genie.cluster.monitoring import create_resource_monitor

# Initialize as server
await genie.init(master_addr='localhost', node_role='server')

# Custom monitoring
monitor = create_resource_monitor(local_node=genie.get_cluster_state().local_node)
await monitor.start()
"""
MIGRATION_BEFORE = """
from genie.runtime import TransportCoordinator, DataPlaneConfig

coordinator = TransportCoordinator(...)
await coordinator.initialize()
"""
MIGRATION_AFTER = """
import genie

await genie.init(master_addr='gpu-server')
"""


async def run_cell(code: str) -> dict[str, object]:
    """Runs code with top-level `await` on this loop, like a notebook. Returns its namespace."""
    names: dict[str, object] = {"__name__": "__main__", "genie": genie}
    coroutine = eval(compile(code, "sample", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), names)
    assert isinstance(coroutine, types.CoroutineType)
    await coroutine
    return names


@pytest.fixture
def _end_session() -> Iterator[None]:
    yield
    init.shutdown_blocking()


async def test_documented_development_configuration_works(cluster: RunningCluster) -> None:
    await run_cell(replace_hosts(DEVELOPMENT, host=cluster.host))
    state = genie.get_cluster_state()
    assert (state.backend, state.config.heartbeat_interval) == ("tcp", 5.0)


async def test_documented_production_configuration_works(cluster: RunningCluster) -> None:
    await run_cell(replace_hosts(PRODUCTION, host=cluster.host))
    state = genie.get_cluster_state()
    assert state.backend in BACKEND_PRIORITY
    assert state.monitor is not None
    assert state.health is not None


@pytest.mark.usefixtures("_end_session")
async def test_documented_server_mode_works(unused_tcp_port: int) -> None:
    await run_cell(SERVER_MODE.replace("5555", str(unused_tcp_port)))
    state = genie.get_cluster_state()
    assert state.local_node.role is NodeRole.SERVER
    assert state.config.token is not None
    assert state.config.token not in repr(state), "a notebook prints it"
    assert state.nodes[state.local_node.node_id].gpu_count >= 1
    await genie.shutdown()


@pytest.mark.usefixtures("_end_session")
async def test_documented_server_with_monitoring_works(
    unused_tcp_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GENIE_MASTER_PORT", str(unused_tcp_port))
    names = await run_cell(SERVER_WITH_MONITORING + "await monitor.stop()\n")
    assert names["monitor"].local_node.gpu_count >= 1  # type: ignore[attr-defined]
    await genie.shutdown()
    settings = init.load_settings_from_init_arguments((), {})
    assert local_cluster.find_running_cluster(Path(settings.paths.state_dir)) is None


async def test_documented_migration_from_manual_setup_works(cluster: RunningCluster) -> None:
    constructor = f"TransportCoordinator(DataPlaneConfig(host='{cluster.host}', port={cluster.port}))"
    before = await run_cell(MIGRATION_BEFORE.replace("TransportCoordinator(...)", constructor))
    coordinator = before["coordinator"]
    assert isinstance(coordinator, TransportCoordinator)
    await run_cell(replace_hosts(MIGRATION_AFTER, host=cluster.host))
    state = genie.get_cluster_state()
    assert isinstance(state.transport_coordinator, TransportCoordinator)
    assert isinstance(state.control_integration, ControlDataIntegration)
    assert state.transport_coordinator.backend == coordinator.backend == state.backend


# --- commands -----------------------------------------------------------------------------------


def test_integration_tests_can_run_on_an_external_server_after_a_login(
    shared_cluster: RunningCluster, tmp_path: Path
) -> None:
    """`GENIE_TEST_SERVER=server pytest tests/integration/ -v`, with one test of the folder."""
    host, port, laptop = shared_cluster.host, shared_cluster.port, tmp_path / "laptop"
    environ = make_suite_environment(
        tmp_path, GENIE_TEST_SERVER=address_text(host, port), GENIE_STATE_DIR=str(laptop)
    )
    test = "tests/integration/test_documents.py::test_documented_development_configuration_works"
    options = ["-p", "no:cacheprovider", f"--basetemp={tmp_path / 'b'}", "-v", test]

    def run() -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "pytest", *options],
            cwd=ROOT,
            env=environ,
            capture_output=True,
            text=True,
            timeout=60,
            stdin=subprocess.DEVNULL,
        )

    without = run()
    assert without.returncode != 0
    assert "no token for GENIE_TEST_SERVER" in without.stdout + without.stderr
    store_login(laptop, host, port, parse_token(shared_cluster.token))
    done = run()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout


# --- references ---------------------------------------------------------------------------------

CONFIGURATION = {
    "discovery_method": "auto",
    "master_addr": None,
    "master_port": 5555,
    "node_id": None,
    "node_role": "client",
    "backend": "auto",
    "enable_heartbeat": True,
    "heartbeat_interval": 10.0,
    "heartbeat_timeout": 60.0,
    "enable_gpu_monitoring": True,
    "gpu_poll_interval": 5.0,
    "enable_health_checks": True,
    "health_check_interval": 30.0,
    "timeout": 30.0,
}
VARIABLES = {
    "GENIE_MASTER_ADDR": "",
    "GENIE_MASTER_PORT": "5555",
    "GENIE_NODE_ID": "",
    "GENIE_NODE_ROLE": "client",
    "GENIE_BACKEND": "auto",
    "GENIE_LOG_LEVEL": "INFO",
}


def test_signatures_match_the_documents() -> None:
    given = inspect.signature(genie.init).parameters
    assert list(given) == [
        "master_addr",
        "master_port",
        "backend",
        "node_id",
        "node_role",
        "timeout",
        "kwargs",
    ]
    defaults = {name: given[name].default for name in list(given)[1:-1]}
    assert defaults == {name: CONFIGURATION[name] for name in defaults}
    assert inspect.iscoroutinefunction(genie.init)
    assert inspect.iscoroutinefunction(genie.shutdown)
    assert not inspect.signature(genie.shutdown).parameters
    assert inspect.get_annotations(genie.is_initialized, eval_str=True) == {"return": bool}
    assert inspect.get_annotations(genie.get_cluster_state, eval_str=True) == {"return": genie.ClusterState}


def test_configuration_has_the_documented_fields_and_defaults() -> None:
    defaults = {field.name: field.default for field in dataclasses.fields(ClusterConfig)}
    assert {name: defaults.get(name, "missing") for name in CONFIGURATION} == CONFIGURATION


def test_documented_variables_have_the_documented_defaults() -> None:
    known = {item.env: item.default for item in list_settings()}
    assert {name: known.get(name, "missing") for name in VARIABLES} == VARIABLES


async def test_documented_variables_replace_arguments(
    cluster: RunningCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {"GENIE_NODE_ID": "laptop", "GENIE_NODE_ROLE": "client", "GENIE_BACKEND": "tcp"}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    state = await genie.init()
    assert (state.local_node.node_id, state.backend) == ("laptop", "tcp")
    assert (state.config.master_addr, state.config.master_port) == (cluster.host, cluster.port)


async def test_option_names_of_the_visual_guide_are_accepted(cluster: RunningCluster) -> None:
    state = await genie.init(enable_gpu_monitor=False, health_interval=15.0)
    assert not state.config.enable_gpu_monitoring
    assert state.config.health_check_interval == 15.0


# Names in the diagrams of the visual guide: each must be a field or property.
DIAGRAMS = {
    genie.ClusterState: (
        "initialized config local_node nodes transport_coordinator control_integration monitor_tasks stats"
    ),
    genie.NodeInfo: (
        "node_id hostname role host control_port network_backend gpu_count gpus status last_heartbeat"
    ),
    genie.GPUInfo: "gpu_id name memory util temp available",
}


@pytest.mark.parametrize("kind", DIAGRAMS, ids=lambda kind: kind.__name__)
def test_fields_of_the_diagrams_exist(kind: type) -> None:
    assert set(DIAGRAMS[kind].split()) - list_public_members(kind) == set()


def test_events_and_states_of_the_diagrams_exist() -> None:
    assert {"GPU_AVAILABLE", "GPU_UNAVAILABLE", "GPU_OVERHEATED"} <= set(EventType.__members__)
    assert {"HEALTHY", "DEGRADED", "UNHEALTHY", "CRITICAL"} <= set(NodeStatus.__members__)


async def test_discovery_results_of_the_diagrams_exist(cluster: RunningCluster) -> None:
    found = (await genie.init()).discovery
    assert found is not None
    assert found.tcp_reachable
    others = (found.dpdk_available, found.gpu_direct_available, found.rdma_available)
    assert all(isinstance(each, bool) for each in others)
    assert found.recommendation is not None
    assert found.recommendation.reason
    assert found.recommendation.est_bandwidth_gbps > 0
    assert found.recommendation.est_latency_ms > 0
    assert found.recommendation.features
