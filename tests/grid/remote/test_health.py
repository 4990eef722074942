"""Readings on a node, with tools that work, print unusual values, fail or hang."""

from __future__ import annotations

import ast
import contextlib
import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from genie.grid.remote import health
from tests.grid.remote.take_readings import take_readings
from tests.house.repository_files import ROOT
from tests.waiting import wait_until

MIB = 1 << 20
# Output of rocm-smi 6, with a warning before the JSON.
ROCM = """WARNING: AMD GPU device(s) is/are in a low-power state.
{"card1": {"Card Series": "AMD Instinct MI300X", "Unique ID": "0xb", "VRAM Total Memory (B)": "1000",
 "VRAM Total Used Memory (B)": "250", "GPU use (%)": "7", "Temperature (Sensor edge) (C)": "N/A"},
 "card0": {"Card series": "AMD Instinct MI300X", "Unique ID": "0xa", "VRAM Total Memory (B)": "1000",
 "VRAM Total Used Memory (B)": "0", "GPU use (%)": "0", "Temperature (Sensor edge) (C)": "35.0",
 "Temperature (Sensor junction) (C)": "41.0"}, "system": {"Driver version": "6.7.0"}}
"""
AMD = [
    {
        "gpu": 0,
        "usage": {"gfx_activity": {"value": 12, "unit": "%"}},
        "temperature": {"edge": "N/A", "hotspot": {"value": 44, "unit": "C"}},
        "mem_usage": {"total_vram": {"value": 64, "unit": "GB"}, "used_vram": {"value": 512, "unit": "MB"}},
        "ecc": {"total_uncorrectable_count": 1},
    }
]


def list_live_processes(group: int) -> list[int]:
    """Return the processes of a group that are neither ended nor zombies."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
    return found


def test_source_is_valid_python_3_8() -> None:
    text = (ROOT / "genie/grid/remote/health.py").read_text("utf-8")
    ast.parse(text, feature_version=(3, 8))


def test_node_without_gpus_has_other_readings(fake_tools) -> None:
    found = take_readings(root="~/not/made/yet")
    assert (found["vendor"], found["gpus"], found["failed"]) == ("none", [], {})
    assert found["cores"] == os.cpu_count()
    assert len(found["load"]) == 3
    assert 0 < found["memory_available_bytes"] <= found["memory_total_bytes"]
    assert 0 <= found["disk_free_bytes"] <= found["disk_total_bytes"]
    assert ("xids" in found) == Path("/proc/driver/nvidia").is_dir()


def test_nvidia_smi_query_has_eight_columns(fake_tools, tmp_path: Path) -> None:
    arguments = tmp_path / "arguments"
    fake_tools("nvidia-smi", f'echo "$@" > {arguments}; echo "0, NVIDIA H200, GPU-a, 143771, 1000, 5, 33, 0"')
    (gpu,) = take_readings()["gpus"]
    assert arguments.read_text().split()[0] == (
        "--query-gpu=index,name,uuid,memory.total,memory.used,utilization.gpu,temperature.gpu,"
        "ecc.errors.uncorrected.volatile.total"
    )
    assert (gpu["index"], gpu["name"], gpu["uuid"]) == (0, "NVIDIA H200", "GPU-a")
    assert (gpu["memory_total_bytes"], gpu["memory_used_bytes"]) == (143771 * MIB, 1000 * MIB)
    assert (gpu["utilization_pct"], gpu["temperature_c"], gpu["ecc_uncorrected"]) == (5, 33, 0)


@pytest.mark.parametrize("nothing", ["[N/A]", "[Not Supported]", "[Unknown Error]", "N/A", "ERR!", ""])
def test_nvidia_smi_placeholder_is_read_as_none(nothing: str) -> None:
    line = f"0, Orin, GPU-a, {nothing}, {nothing}, {nothing}, {nothing}, {nothing}"
    found = health.parse_nvidia_smi(line)
    (gpu,) = found["gpus"]
    names = ("memory_total_bytes", "memory_used_bytes", "utilization_pct", "temperature_c", "ecc_uncorrected")
    assert [gpu[name] for name in names] == [None] * 5
    assert "failed" not in found


def test_missing_columns_and_names_with_commas_are_parsed() -> None:
    short, odd = health.parse_nvidia_smi(
        "0, Tesla K80, GPU-a, 100, 50\n1, Two, Three, GPU-b, 9, 1, 2, 3, 4\n"
    )["gpus"]
    assert (short["memory_used_bytes"], short["utilization_pct"]) == (50 * MIB, None)
    assert (odd["name"], odd["uuid"], odd["ecc_uncorrected"]) == ("Two, Three", "GPU-b", 4)


def test_lost_gpu_is_reported_and_others_are_kept() -> None:
    lost = "Unable to determine the device handle for GPU0000:3B:00.0: Unknown Error"
    found = health.parse_nvidia_smi(f"{lost}\n1, T4, GPU-b, 9, 1, 2, 3, 0\n")
    assert [gpu["index"] for gpu in found["gpus"]] == [1]
    assert "device handle" in found["failed"]["gpus"]


def test_failing_tool_is_reported_with_its_output(fake_tools) -> None:
    fake_tools("nvidia-smi", "echo 'could not talk to the driver'; exit 9")
    found = take_readings()
    assert "nvidia-smi exited with code 9: could not talk to the driver" in found["failed"]["gpus"]
    assert found["cores"]


def test_no_devices_found_means_no_gpus(fake_tools) -> None:
    fake_tools("nvidia-smi", "echo 'No devices were found'; exit 6")
    found = take_readings()
    assert (found["gpus"], found["failed"]) == ([], {})


def test_hanging_tool_fails_only_its_reading_and_is_killed(fake_tools, tmp_path: Path) -> None:
    fake_tools("nvidia-smi", f"cd {tmp_path}; echo $$ > pid.new; mv pid.new pid; sleep 3600 & wait")
    found = take_readings(timeout_s=2)
    assert list(found["failed"]) == ["gpus"]
    # On a busy machine, the killed tool is reported too late.
    assert found["failed"]["gpus"].removeprefix("nvidia-smi ") == "took longer than 2 s"
    assert found["load"] and found["disk_total_bytes"]
    group = int((tmp_path / "pid").read_text())
    wait_until(lambda: not list_live_processes(group), what="the end of the tool's process group")


def test_hanging_reading_is_not_started_again(fake_tools, monkeypatch) -> None:
    calls = []
    release = health.threading.Event()

    def hangs(root: str) -> dict[str, Any]:
        calls.append(root)
        release.wait(60)
        return {}

    monkeypatch.setattr(health, "_read_disk", hangs)
    try:
        assert "longer than 0.05 s" in take_readings(timeout_s=0.05)["failed"]["disk"]
        assert "still hangs" in take_readings(timeout_s=0.05)["failed"]["disk"]
        assert len(calls) == 1
    finally:
        release.set()
        health._THREAD_AND_DEADLINE_BY_PART["disk"][0].join(10)


class ThreadEndingWhenJoined(threading.Thread):
    """Ends when it is joined."""

    def __init__(self) -> None:
        self.release = threading.Event()
        super().__init__(target=self.release.wait, args=(60,), daemon=True)

    def join(self, timeout: float | None = None) -> None:
        self.release.set()
        super().join(timeout)


@pytest.mark.parametrize(
    ("left_s", "failed"), [(60.0, {}), (-1.0, {"disk": "a previous reading still hangs"})]
)
def test_previous_reading_is_awaited_until_its_deadline(fake_tools, left_s: float, failed: object) -> None:
    other = ThreadEndingWhenJoined()
    other.start()
    health._THREAD_AND_DEADLINE_BY_PART["disk"] = (other, time.monotonic() + left_s)
    try:
        assert take_readings(timeout_s=60)["failed"] == failed
    finally:
        other.join(10)


def test_tool_with_excessive_output_is_killed(fake_tools) -> None:
    fake_tools("nvidia-smi", "exec yes '0, T4, GPU-a, 9, 1, 2, 3, 0'")
    assert take_readings(timeout_s=60)["failed"] == {"gpus": "nvidia-smi printed more than 1048576 bytes"}


def test_hot_gpu_has_throttle_reasons(fake_tools) -> None:
    fake_tools(
        "nvidia-smi",
        "case $1 in *throttle*) echo '0, 0x0000000000000020'; echo '1, 0x0000000000000001';;"
        "*) echo '0, T4, GPU-a, 9, 1, 2, 85, 0'; echo '1, T4, GPU-b, 9, 1, 2, 30, 0';; esac",
    )
    assert [gpu["throttled"] for gpu in take_readings()["gpus"]] == [["software thermal slowdown"], []]


def test_cool_gpu_needs_only_one_query(fake_tools, tmp_path: Path) -> None:
    fake_tools("nvidia-smi", f"echo x >> {tmp_path}/calls; echo '0, T4, GPU-a, 9, 1, 2, 30, 0'")
    take_readings()
    assert (tmp_path / "calls").read_text() == "x\n"


def test_rocm_smi_cards_are_sorted(fake_tools, tmp_path: Path) -> None:
    (tmp_path / "rocm.json").write_text(ROCM)
    fake_tools("rocm-smi", f"cat {tmp_path}/rocm.json")
    found = take_readings()
    assert (found["vendor"], found["failed"]) == ("amd", {})
    first, second = found["gpus"]
    assert (first["index"], first["uuid"], first["temperature_c"]) == (0, "0xa", 41.0)
    assert (second["name"], second["memory_total_bytes"], second["memory_used_bytes"]) == (
        "AMD Instinct MI300X",
        1000,
        250,
    )
    assert (second["utilization_pct"], second["temperature_c"]) == (7, None)


@pytest.mark.parametrize("wrapped", [True, False])
def test_amd_smi_is_used_without_rocm_smi(fake_tools, tmp_path: Path, wrapped: bool) -> None:
    (tmp_path / "metric").write_text(json.dumps({"gpu_data": AMD} if wrapped else AMD))
    static = [{"gpu": 0, "asic": {"market_name": "MI300A", "asic_serial": "0x1"}}]
    (tmp_path / "static").write_text(json.dumps(static))
    fake_tools("amd-smi", f"cat {tmp_path}/$1")
    (gpu,) = take_readings()["gpus"]
    assert (gpu["name"], gpu["uuid"], gpu["utilization_pct"]) == ("MI300A", "0x1", 12)
    assert (gpu["memory_total_bytes"], gpu["memory_used_bytes"]) == (64 << 30, 512 * MIB)
    assert (gpu["temperature_c"], gpu["ecc_uncorrected"]) == (44, 1)


def test_output_without_json_fails_the_reading(fake_tools) -> None:
    fake_tools("rocm-smi", "echo ERROR: GPU not found")
    assert "no JSON" in take_readings()["failed"]["gpus"]


@pytest.mark.parametrize(
    ("line", "at_s"),
    [
        ("4,1234,5000000,-;NVRM: Xid (PCI:0000:3b:00): 79, pid=7, GPU has fallen off the bus.", 5.0),
        ("[    5.000000] NVRM: Xid (PCI:0000:3b:00): 79, pid=7, GPU has fallen off the bus.", 5.0),
        (
            "[    5.000000] gpu1 kernel: NVRM: Xid (PCI:0000:3b:00): 79, pid=7, GPU has fallen off the bus.",
            5.0,
        ),
        ("NVRM: Xid (PCI:0000:3b:00): 79, pid=7, GPU has fallen off the bus.", None),
    ],
)
def test_xid_is_parsed_in_every_log_format(line: str, at_s: float | None) -> None:
    (xid,) = health.parse_xids(f"something else\n{line}\nand more\n")
    assert (xid["bus"], xid["code"], xid["at_s"]) == ("PCI:0000:3b:00", 79, at_s)
    assert xid["text"].endswith("fallen off the bus.")


def test_unreadable_kernel_log_is_not_a_failure(fake_tools, monkeypatch) -> None:
    fake_tools("nvidia-smi", "echo '0, T4, GPU-a, 9, 1, 2, 30, 0'")
    fake_tools("dmesg", "echo 'dmesg: read kernel buffer failed: Operation not permitted' >&2; exit 1")
    opened = []

    def refuse(self: object, timeout_s: float) -> list[Any]:
        opened.append(timeout_s)
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(health._KernelLog, "read_xids", refuse)
    found = take_readings()
    assert (found["xids"], found["xids_unknown"], found["failed"]) == (None, "Operation not permitted", {})
    take_readings()
    assert len(opened) == 1, "must not be retried on this connection"


def test_dmesg_is_used_if_kmsg_is_not_readable(fake_tools, monkeypatch) -> None:
    fake_tools("nvidia-smi", "echo '0, T4, GPU-a, 9, 1, 2, 30, 0'")
    fake_tools("dmesg", "echo '[    0.500000] NVRM: Xid (PCI:0000:01:00): 48, pid=1, DBE'")

    def refuse(self: object, timeout_s: float) -> list[Any]:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(health._KernelLog, "read_xids", refuse)
    (xid,) = take_readings()["xids"]
    assert (xid["code"], xid["text"]) == (48, "pid=1, DBE")
    assert xid["age_s"] == pytest.approx(time.monotonic() - 0.5, abs=60)
