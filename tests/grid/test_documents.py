"""Commands, Python samples and configuration of the Grid document, with real SSH servers and Ray.

Adapted: the number of nodes, ports, timeouts (all nodes share this machine), the size of matrices, and the
packages of `setup`, because test nodes have no network. The document's modules `cluster` and `tasks` are
`genie.grid` here. tests/integration/test_documents.py tests the other documents.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml

from genie.grid.grid_file import parse_grid_file
from tests.grid.quick_venv import QuickVenv
from tests.grid.ray_testbed import start_ray_testbed
from tests.grid.small_wheel import make_wheel
from tests.grid.testbed import SshTestbed
from tests.house.repository_files import ROOT
from tests.needs import require_module, require_program
from tests.ports import free_ports

CONFIGURATION = """
# Node configuration
nodes:
  - gpu1
  - gpu2
  - gpu3

# Remote workspace path
remote_root: ~/grid_workspace

# SSH connection settings
ssh:
  timeout: 10              # SSH command timeout
  connect_timeout: 5       # SSH connection timeout
  max_retries: 3          # Retry attempts
  pool_size: 10           # Max concurrent SSH connections
  key_file: null          # SSH key file (optional)

# Health check settings
health_check:
  timeout: 3              # SSH timeout for health check
  max_workers: 20         # Parallel health check threads
  cpu_weight: 1.0         # Weight for CPU load in score
  gpu_weight: 3.0         # Weight for GPU memory in score
  refresh_interval: 60    # Cache health check results

# Code synchronization
sync:
  exclude_patterns:
    - .git
    - __pycache__
    - .env
    - '*.pyc'
    - node_modules
    - .next
  use_checksums: true     # Use MD5 for delta detection
  follow_symlinks: false  # Don't follow symlinks
  max_parallel_transfers: 5

# Ray cluster configuration
ray:
  dashboard_port: 8265    # Ray dashboard port
  redis_port: 6379        # Redis port for cluster
  head_bind_all: true     # Bind to 0.0.0.0
  namespace: default      # Ray namespace
  log_level: info         # Ray log level
"""
TUNING = (
    """
health_check:
  max_workers: 50         # Increase parallelism
  timeout: 3              # Keep 3s timeout
  cpu_weight: 0.5         # Reduce CPU sensitivity
  gpu_weight: 2.0         # Increase GPU sensitivity
""",
    """
ssh:
  pool_size: 30           # Larger pool

sync:
  exclude_patterns:       # Remove unneeded files
    - .git
    - __pycache__
    - .env
    - node_modules
    - venv
    - .pytest_cache
""",
)
SINGLE_JOB = """
from cluster.executor_optimized import OptimizedExecutor
executor = OptimizedExecutor()
result = executor.run_distributed("python train.py --epochs 100")
print(result)
"""
BATCH = """
import ray
from tasks.batch_executor import BatchExecutor, batch_gpu_task

ray.init(address="auto")

executor = BatchExecutor(batch_size=10)
tasks = [(i, 2000) for i in range(100)]
results = executor.submit_batched_tasks(batch_gpu_task, tasks)

print(f"Results: {len(results)} tasks completed")
ray.shutdown()
"""
CACHED_CHOICE = """
# Use caching
from functools import lru_cache

@lru_cache(maxsize=1)
def get_best_node():
    return find_best_node()

# Refresh every 60 seconds
"""
TRAIN = "import sys, socket; print('trained', *sys.argv[1:], 'on', socket.gethostname())\n"
RAY_S = 240
"""Timeout in seconds; starting Ray takes long on a busy machine."""
METRICS = (
    "grid_node_health_score",
    "grid_tasks_completed_total",
    "grid_task_duration_seconds",
    "grid_sync_duration_seconds",
    "grid_active_tasks",
)
ALERTS = {
    "UnhealthyNode": ("grid_node_health_score > 200", "5m"),
    "HighTaskFailureRate": ('rate(grid_tasks_completed_total{status="failed"}[5m]) > 0.1', "5m"),
    "SlowSync": ("grid_sync_duration_seconds", "10m"),
}


def replace_document_modules(sample: str) -> str:
    """Replace the document's modules by genie.grid."""
    return re.sub(r"from (cluster|tasks)\.\w+ import", "from genie.grid import", sample)


@dataclass
class DocumentedProject:
    """A project directory with config/cluster_config.yaml and train.py, and two nodes."""

    folder: Path
    testbed: SshTestbed
    shown: dict[str, str] = field(default_factory=dict)
    """Output of the commands of task 1."""

    def run(self, *argv: str, code: int = 0) -> str:
        done = subprocess.run(
            argv,
            cwd=self.folder,
            env=os.environ
            | {
                "GENIE_GRID_SSH_CONFIG": str(self.testbed.ssh_config),
                "GENIE_STATE_DIR": str(self.folder.parent / "state"),
            },
            capture_output=True,
            text=True,
            timeout=RAY_S - 5,
            stdin=subprocess.DEVNULL,
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    def grid_cli(self, *argv: str) -> str:
        program = "import sys; from genie.cli import grid_main; sys.exit(grid_main())"
        return self.run(sys.executable, "-c", program, *argv)

    def on_node(self, command: str) -> str:
        """Run a command with `ssh gpu1`."""
        ssh = require_program("ssh", package="openssh-client")
        return self.run(ssh, "-F", str(self.testbed.ssh_config), "gpu1", command)

    def python(self, sample: str) -> str:
        return self.run(sys.executable, "-c", replace_document_modules(sample))


@pytest.fixture(scope="module")
def project(quick_venv: QuickVenv, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DocumentedProject]:
    """Task 1, "Setup New Cluster", up to the environment on all nodes."""
    folder = tmp_path_factory.mktemp("documents")
    (folder / "project" / "config").mkdir(parents=True)
    (folder / "project" / "train.py").write_text(TRAIN)
    make_wheel(folder / "wheels")
    with start_ray_testbed(folder / "nodes", count=2) as testbed:
        testbed["gpu1"].gpus(1)
        for node in testbed.nodes:
            quick_venv.install(node)
        (folder / "project" / "config" / "cluster_config.yaml").write_text(configuration_of_two_nodes())
        created = DocumentedProject(folder / "project", testbed)
        created.shown["test connectivity"] = created.grid_cli("health")
        # `python scripts/grid_setup_enhanced.py` in the document
        created.grid_cli("setup", "--package", "small-thing", "--wheels", str(folder / "wheels"))
        yield created


@pytest.fixture(scope="module")
def ray_project(project: DocumentedProject) -> Iterator[DocumentedProject]:
    """The rest of task 1: Ray on all nodes."""
    require_module("ray", package="ray")
    project.shown["start Ray cluster"] = project.grid_cli("cluster", "start")
    project.shown["verify"] = project.grid_cli("health", "--fresh")
    yield project
    project.grid_cli("cluster", "stop")


def configuration_of_two_nodes() -> str:
    """Return the document's configuration with two nodes, free ports and longer timeouts."""
    redis, dashboard = free_ports(2)
    changed = {
        "  - gpu3\n": "",
        "6379": str(redis),
        "8265": str(dashboard),
        " connect_timeout: 5 ": " connect_timeout: 20 ",
        " timeout: 3 ": " timeout: 20 ",
    }
    text = CONFIGURATION
    for old, new in changed.items():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


# --- the configuration --------------------------------------------------------------------------


def test_full_configuration_is_read() -> None:
    read, written = parse_grid_file(CONFIGURATION, name="document"), yaml.safe_load(CONFIGURATION)
    assert [node.name for node in read.nodes] == written.pop("nodes")
    assert read.remote_root == written.pop("remote_root")
    for section, keys in written.items():
        found = {name: getattr(getattr(read, section), name) for name in keys}
        assert found == {name: tuple(v) if isinstance(v, list) else v for name, v in keys.items()}, section


@pytest.mark.parametrize("tuning", TUNING)
def test_tuned_configurations_are_read(tuning: str) -> None:
    read = parse_grid_file("nodes: [gpu1]\n" + tuning, name="tuned")
    for section, keys in yaml.safe_load(tuning).items():
        for name, value in keys.items():
            found = getattr(getattr(read, section), name)
            assert found == (tuple(value) if isinstance(value, list) else value)


def test_alert_rules_match_the_document() -> None:
    groups = yaml.safe_load((ROOT / "docs" / "grid" / "alert_rules.yml").read_text("utf-8"))["groups"]
    rules = {rule["alert"]: (rule["expr"], rule["for"]) for group in groups for rule in group["rules"]}
    assert set(rules) == set(ALERTS)
    for name, (part, held) in ALERTS.items():
        assert part in rules[name][0] and rules[name][1] == held, name


# --- the tasks ----------------------------------------------------------------------------------


def parse_healthy_nodes(shown: str) -> list[str]:
    return re.findall(r"^(gpu[12]) +ok ", shown, re.MULTILINE)


def test_task_1_tests_the_connections(project: DocumentedProject) -> None:
    shown = project.shown["test connectivity"]
    assert sorted(parse_healthy_nodes(shown)) == ["gpu1", "gpu2"], shown


@pytest.mark.long("starts Ray on two nodes")
@pytest.mark.timeout(RAY_S)
def test_task_1_starts_a_ray_cluster(ray_project: DocumentedProject) -> None:
    shown = ray_project.shown["start Ray cluster"]
    assert len(re.findall(r"^gpu[12] +alive ", shown, re.MULTILINE)) == 2, shown
    assert len(parse_healthy_nodes(ray_project.shown["verify"])) == 2, ray_project.shown["verify"]


def test_task_2_runs_a_job_by_command(project: DocumentedProject) -> None:
    project.grid_cli("sync")
    output = project.grid_cli("run", "python train.py --epochs 100")
    assert re.search(r"^trained --epochs 100 on gpu[12]$", output, re.MULTILINE), output


def test_task_2_runs_a_job_from_python_with_the_working_directory(project: DocumentedProject) -> None:
    (project.folder / "train.py").write_text(TRAIN.replace("trained", "trained anew"))
    output = project.python(SINGLE_JOB)
    assert re.search(r"^trained anew --epochs 100 on gpu[12]$", output, re.MULTILINE), output


@pytest.mark.long("starts Ray on two nodes")
@pytest.mark.timeout(RAY_S)
def test_task_3_runs_batches(ray_project: DocumentedProject) -> None:
    (ray_project.folder / "batch.py").write_text(replace_document_modules(BATCH).replace("2000", "20"))
    script = f"{sys.executable} {ray_project.folder / 'batch.py'}"
    output = ray_project.grid_cli("cluster", "submit", "--env", f"PYTHONPATH={ROOT}", "--", script)
    assert "Results: 100 tasks completed" in output


def test_task_4_monitors_the_cluster(project: DocumentedProject) -> None:
    assert "best node: gpu" in project.grid_cli("health")
    text = project.grid_cli("metrics")
    assert [name for name in METRICS if f"# TYPE {name} " not in text] == []
    assert 'grid_node_health_score{node="gpu1"}' in text
    assert "DEBUG" in project.grid_cli("run", "echo test", "--log-level", "DEBUG")


def test_task_5_reads_load_and_gpus_of_a_node(project: DocumentedProject) -> None:
    assert len(project.on_node("cat /proc/loadavg").split()) >= 5
    project.on_node("nvidia-smi")


@pytest.mark.long("starts Ray on two nodes")
@pytest.mark.timeout(RAY_S)
def test_task_5_reads_the_status_of_ray_on_a_node(ray_project: DocumentedProject) -> None:
    path = f"PATH={ray_project.testbed['gpu1'].bin}:$PATH"  # where the Ray of these nodes is
    output = ray_project.on_node(f"{path}; . ~/grid_workspace/grid_env/bin/activate; ray status")
    assert "Active:" in output


# --- the names ----------------------------------------------------------------------------------


def test_documented_caching_of_the_best_node_works(project: DocumentedProject) -> None:
    sample = "from genie.grid import find_best_node\n" + CACHED_CHOICE
    output = project.python(sample + "print(get_best_node(), get_best_node.cache_info().currsize)\n")
    assert re.fullmatch(r"gpu[12] 1\n", output)


def test_check_all_nodes_sorts_by_score(project: DocumentedProject) -> None:
    sample = """
import json
from genie.grid import check_all_nodes
print(json.dumps([(node.name, node.score) for node in check_all_nodes()]))
"""
    found: list[tuple[str, float]] = json.loads(project.python(sample))
    assert {name for name, _ in found} == {"gpu1", "gpu2"}
    assert [score for _, score in found] == sorted(score for _, score in found)


def test_smart_sync_reaches_all_nodes(project: DocumentedProject) -> None:
    (project.folder / "notes.txt").write_text("notes\n")
    project.python("from genie.grid import smart_sync\nsmart_sync()\n")
    arrived = [node.home / "grid_workspace" / "notes.txt" for node in project.testbed.nodes]
    assert [path.read_text() for path in arrived] == ["notes\n"] * 2


@pytest.mark.parametrize(
    "name",
    [
        "OptimizedExecutor",
        "BatchExecutor",
        "batch_gpu_task",
        "find_best_node",
        "check_all_nodes",
        "smart_sync",
    ],
)
def test_documented_name_is_public(name: str) -> None:
    import genie.grid

    assert name in genie.grid.__all__
    assert getattr(genie.grid, name).__doc__
