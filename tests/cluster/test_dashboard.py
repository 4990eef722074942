"""The tables of the dashboard and its example."""

from __future__ import annotations

import asyncio
import io
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console, RenderableType

from genie.cluster.dashboard import render, show
from genie.cluster.health import CheckResult, HealthReport, check_cpu
from genie.hardware import CpuReading
from genie.model.node import GPUInfo, NodeInfo, NodeRole, NodeStatus, Vendor
from tests.fakes.step_clock import StepClock
from tests.waiting import until

GIB = 1024**3
ROOT = Path(__file__).parents[2]


def make_node(
    name: str, *gpus: GPUInfo, status: NodeStatus = NodeStatus.HEALTHY, reason: str = ""
) -> NodeInfo:
    return NodeInfo(
        node_id=name,
        hostname=name,
        role=NodeRole.WORKER,
        host="10.0.0.1",
        control_port=5555,
        gpus=gpus,
        cpus=16.0,
        memory_total_bytes=64 * GIB,
        memory_used_bytes=8 * GIB,
        status=status,
        status_reason=reason,
        last_heartbeat=990.0,
    )


def make_console() -> Console:
    return Console(file=io.StringIO(), width=200, force_terminal=False, color_system=None)


def render_to_text(what: RenderableType) -> str:
    target = make_console()
    target.print(what)
    assert isinstance(target.file, io.StringIO)
    return target.file.getvalue()


def test_node_table_shows_status_heartbeat_age_and_size() -> None:
    text = render_to_text(render([make_node("box", status=NodeStatus.SUSPECT, reason="silent")], now=1000.0))
    for part in ("box", "worker", "10.0.0.1:5555", "suspect: silent", "10 s ago", "16", "8.0 / 64.0 GiB"):
        assert part in text


def test_accelerator_table_shows_readings_and_a_dash_if_unknown() -> None:
    full = GPUInfo(
        gpu_id=0,
        name="NVIDIA H200",
        vendor=Vendor.NVIDIA,
        memory_total_bytes=141 * GIB,
        memory_used_bytes=2 * GIB,
        utilization_pct=37.4,
        temperature_c=61.0,
        power_w=412.6,
    )
    lost = GPUInfo(gpu_id=1, name="gone", vendor=Vendor.NVIDIA, available=False, reason="GPU is lost")
    lines = render_to_text(render([make_node("box", full, lost)], now=0.0)).splitlines()
    (full_line,) = [line for line in lines if "NVIDIA H200" in line]
    for part in ("2.0 / 141.0 GiB", "37%", "61 C", "413 W", "available"):
        assert part in full_line
    (lost_line,) = [line for line in lines if "gone" in line]
    assert "GPU is lost" in lost_line
    assert lost_line.count(" - ") == 4


def test_health_table_is_shown_if_there_is_a_report() -> None:
    checks = (
        check_cpu(CpuReading(cores=2, load_1m=5.0, busy_pct=97.0)),
        CheckResult(name="network", status=NodeStatus.HEALTHY, reason="connected through eth0, 10 Gbit/s"),
    )
    report = HealthReport(status=NodeStatus.DEGRADED, checks=checks, at=1.0)
    lines = render_to_text(render([make_node("box")], now=0.0, report=report)).splitlines()
    (cpu,) = [line for line in lines if " cpu " in line]
    assert "degraded" in cpu and "97% used, load 5.0 on 2 cores" in cpu
    (network,) = [line for line in lines if " network " in line]
    assert "healthy" in network and "eth0, 10 Gbit/s" in network
    assert "Health" not in render_to_text(render([make_node("box")], now=0.0))


def test_node_names_are_not_interpreted_as_markup() -> None:
    assert "[bold]x[/bold]" in render_to_text(render([make_node("[bold]x[/bold]")], now=0.0))


def test_nodes_are_sorted_by_node_id() -> None:
    text = render_to_text(render([make_node("bbb"), make_node("aaa")], now=0.0))
    assert text.index("aaa") < text.index("bbb")


@dataclass
class FakeDashboardState:
    local_node: NodeInfo
    nodes: dict[str, NodeInfo] = field(default_factory=dict)
    health_report: HealthReport | None = None


async def test_show_rereads_the_state_and_includes_the_local_node() -> None:
    clock, target = StepClock(), Console(file=io.StringIO(), width=200, force_terminal=True)
    assert isinstance(target.file, io.StringIO)
    state = FakeDashboardState(make_node("local"))
    async with asyncio.TaskGroup() as group:
        group.create_task(show(state, 3.0, console=target, clock=clock, rounds=2))
        await until(lambda: clock.slept_s == [3.0])
        assert "local" in target.file.getvalue()
        assert "newcomer" not in target.file.getvalue()
        state.nodes = {"newcomer": make_node("newcomer")}
        clock.step()
    assert "newcomer" in target.file.getvalue()


def test_example_shows_this_machine_without_a_cluster() -> None:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "examples/monitoring_dashboard.py", "--rounds", "2", "--refresh", "0.05"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": path, "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert "Nodes" in done.stdout
    assert "Accelerators" in done.stdout
