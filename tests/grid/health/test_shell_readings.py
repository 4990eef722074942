"""Readings by shell script: a real sh runs it, and the parsed output has the format of the helper's."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import msgspec
import pytest

from genie.grid.health import shell_readings
from genie.grid.health.check import HealthState, Readings, assess_health
from tests.needs import require_program


def run_readings_script(
    folder: Path, *, shell: str = "sh", root: str = "/", timeout_s: float = 20.0, home: str = "/"
) -> Readings:
    script = shell_readings.make_readings_script(root, timeout_s=timeout_s)
    done = subprocess.run(
        shell.split(),
        input=script,
        capture_output=True,
        timeout=60,
        env={"PATH": f"{folder}:/usr/bin:/bin", "HOME": home},
    )
    assert done.returncode == 0, done.stderr
    return msgspec.convert(shell_readings.parse_readings(done.stdout.decode()), Readings)


def write_tool(folder: Path, name: str, line: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{line}\n")
    (folder / name).chmod(0o755)


def test_node_without_gpus_has_other_readings(tmp_path: Path) -> None:
    found = run_readings_script(tmp_path)
    assert found.failed == {}
    # The script also searches the usual directories, where a machine with GPUs has the real tool.
    assert found.vendor == ("nvidia" if shutil.which("nvidia-smi") else "none")
    assert found.cores == os.cpu_count()
    assert found.load is not None and found.memory_total_bytes and found.disk_total_bytes


def test_nvidia_gpus_and_xid_errors_are_read(tmp_path: Path) -> None:
    write_tool(tmp_path, "nvidia-smi", "echo '0, T4, GPU-a, 100, 50, 5, 33, 0'")
    write_tool(tmp_path, "dmesg", "echo '[ 1.0] NVRM: Xid (PCI:0000:01:00): 79, pid=1, gone'; echo other")
    found = run_readings_script(tmp_path)
    assert (found.vendor, found.gpus[0].name, found.gpus[0].memory_used_fraction) == ("nvidia", "T4", 0.5)
    assert found.xids is not None
    assert [xid.code for xid in found.xids] == [79]


def test_unreadable_kernel_log_is_not_a_failure(tmp_path: Path) -> None:
    write_tool(tmp_path, "nvidia-smi", "echo '0, T4, GPU-a, 100, 50, 5, 33, 0'")
    write_tool(tmp_path, "dmesg", "exit 1")
    found = run_readings_script(tmp_path)
    assert (found.xids, found.failed) == (None, {})
    assert assess_health(found)[0] is not HealthState.DEGRADED


@pytest.mark.parametrize("shell", ["dash", "bash", "mksh", "busybox sh"])
def test_hanging_tool_is_killed_and_reported(tmp_path: Path, shell: str) -> None:
    name = shell.partition(" ")[0]
    program = require_program(name, package=name)
    if shell == "busybox sh":
        subprocess.run([program, "--install", "-s", str(tmp_path)], check=True, timeout=30)
    write_tool(tmp_path, "nvidia-smi", "exec sleep 3600")
    found = run_readings_script(tmp_path, shell=shell, timeout_s=1)
    assert found.failed == {"gpus": "nvidia-smi timed out and was killed"}
    assert found.load is not None


def test_failing_tool_is_reported_with_its_output(tmp_path: Path) -> None:
    write_tool(tmp_path, "nvidia-smi", "echo no driver; exit 9")
    assert run_readings_script(tmp_path).failed == {"gpus": "nvidia-smi exited with code 9: no driver"}


@pytest.mark.parametrize("root", ["~/it's; touch x/y", "/no such/$(touch x)/place"])
def test_path_with_shell_syntax_is_not_executed(tmp_path: Path, root: str) -> None:
    found = run_readings_script(tmp_path, root=root, home=str(tmp_path))
    assert found.failed == {}
    assert found.disk_total_bytes
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "output", ["", "welcome\n", "@@genie load\nx y z\n", "@@genie disk\n@@genie code 1\n"]
)
def test_truncated_output_fails_all_missing_readings(output: str) -> None:
    found = msgspec.convert(shell_readings.parse_readings(output), Readings)
    assert set(found.failed) == {"load", "memory", "disk", "gpus"}
    assert assess_health(found)[0] is HealthState.DEGRADED


def test_tool_with_excessive_output_fails_only_its_reading(tmp_path: Path) -> None:
    line = "0, T4, GPU-a, 100, 50, 5, 33, 0"
    write_tool(tmp_path, "nvidia-smi", f"yes '{line}' | head -c 2000000")
    found = run_readings_script(tmp_path)
    assert found.failed == {"gpus": "nvidia-smi printed more than 1048576 bytes"}
    assert (found.cores, found.gpus) == (os.cpu_count(), ())
    write_tool(tmp_path, "nvidia-smi", f"yes '{line}' | head -c 60000000")
    assert list(run_readings_script(tmp_path).failed) == ["answer"]
