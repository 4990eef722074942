"""A grid node's readings on a machine with a real nvidia-smi, compared with torch and NVML."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest

from genie.grid.remote import health, nvml
from genie.grid.remote.core import OP_AND_IS_QUICK_BY_NAME
from tests.needs import require_module, require_program

MIB = 1 << 20
_NEAR_BYTES = 8 * MIB
_NEAR_C = 10


@pytest.fixture(autouse=True)
def _close_nvml_afterwards():
    yield
    nvml.close_library()


def read_health() -> dict[str, Any]:
    function, _ = OP_AND_IS_QUICK_BY_NAME["health.read"]
    return dict(function({"root": "~/grid_workspace", "timeout_s": 60.0, "throttle_check_c": 80.0}, b""))


def test_gpus_match_torch() -> None:
    torch = require_module("torch", package="torch")
    found = read_health()
    assert (found["vendor"], found["failed"]) == ("nvidia", {})
    seen = {gpu["uuid"]: gpu for gpu in found["gpus"]}
    for index in range(torch.cuda.device_count()):
        there = torch.cuda.get_device_properties(index)
        gpu = seen[f"GPU-{there.uuid}"]
        assert gpu["name"] == there.name == torch.cuda.get_device_name(index)
        # The driver reserves some memory.
        assert 0.9 <= there.total_memory / gpu["memory_total_bytes"] <= 1.0


def test_memory_in_use_is_reported() -> None:
    torch = require_module("torch", package="torch")
    uuid = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
    held = torch.ones(1 << 30, dtype=torch.uint8, device="cuda:0")
    try:
        used = next(gpu["memory_used_bytes"] for gpu in read_health()["gpus"] if gpu["uuid"] == uuid)
    finally:
        del held
    assert used >= 1024 * MIB


def test_healthy_gpu_has_all_readings() -> None:
    for gpu in read_health()["gpus"]:
        assert 0 <= gpu["utilization_pct"] <= 100
        assert 0 < gpu["temperature_c"] < 120
        assert gpu["ecc_uncorrected"] in (0, None)


def test_reading_starts_no_program(monkeypatch) -> None:
    def started(argv: list[str], deadline: float) -> str:
        raise AssertionError(argv)

    monkeypatch.setattr(health, "_run_tool_and_get_output", started)
    assert health.read_gpus(60.0)["gpus"]


def test_nvml_readings_match_nvidia_smi() -> None:
    program = require_program("nvidia-smi", package="nvidia-smi")
    by_smi = health._read_gpus_by_nvidia_smi(program, health.time.monotonic() + 60, 80.0)["gpus"]
    found = [health._make_nvml_reading(**each) for each in nvml.read_gpus()]
    assert len(found) == len(by_smi) > 0
    for ours, theirs in zip(found, by_smi, strict=True):
        assert set(ours) == set(theirs)
        for key in ("index", "name", "uuid", "ecc_uncorrected"):
            assert ours[key] == theirs[key]
        for key in ("memory_total_bytes", "memory_used_bytes"):
            assert ours[key] == pytest.approx(theirs[key], abs=_NEAR_BYTES)
        assert ours["temperature_c"] == pytest.approx(theirs["temperature_c"], abs=_NEAR_C)


def test_driver_supports_throttle_reason_query() -> None:
    program = require_program("nvidia-smi", package="nvidia-smi")
    gpus = read_health()["gpus"]
    for gpu in gpus:
        gpu["throttled"] = None
    health._add_throttle_reasons(gpus, program, health.time.monotonic() + 60)
    assert all(isinstance(gpu["throttled"], list) for gpu in gpus)
    query = "--query-gpu=index,clocks_throttle_reasons.active"
    done = subprocess.run(
        [program, query, f"--format={health.NVIDIA_SMI_FORMAT}"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout
    assert "0x" in done.stdout


def test_kernel_log_is_read_or_reported_as_unknown() -> None:
    found = read_health()
    assert isinstance(found["xids"], list) or found["xids_unknown"]
