"""A grid node's readings on a machine with a real nvidia-smi: what torch and NVML say of the same GPUs."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest

from genie.grid.remote import health, nvml
from genie.grid.remote.core import OPS
from tests.needs import require_module, require_program

MIB = 1 << 20
_NEAR_BYTES = 8 * MIB
_NEAR_C = 10


@pytest.fixture(autouse=True)
def _closed_afterwards():
    yield
    nvml.close()


def read() -> dict[str, Any]:
    function, _ = OPS["health.read"]
    return dict(function({"root": "~/grid_workspace", "timeout_s": 60.0}, b""))


def test_the_gpus_are_those_of_torch() -> None:
    torch = require_module("torch", package="torch")
    found = read()
    assert (found["vendor"], found["failed"]) == ("nvidia", {})
    seen = {gpu["uuid"]: gpu for gpu in found["gpus"]}
    for index in range(torch.cuda.device_count()):
        there = torch.cuda.get_device_properties(index)
        gpu = seen[f"GPU-{there.uuid}"]
        assert gpu["name"] == there.name == torch.cuda.get_device_name(index)
        # The driver keeps a little of the memory for itself.
        assert 0.9 <= there.total_memory / gpu["memory_total_bytes"] <= 1.0


def test_memory_in_use_is_seen() -> None:
    torch = require_module("torch", package="torch")
    uuid = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
    held = torch.ones(1 << 30, dtype=torch.uint8, device="cuda:0")
    try:
        used = next(gpu["memory_used_bytes"] for gpu in read()["gpus"] if gpu["uuid"] == uuid)
    finally:
        del held
    assert used >= 1024 * MIB


def test_every_reading_of_a_gpu_in_good_order_is_a_number() -> None:
    for gpu in read()["gpus"]:
        assert 0 <= gpu["utilization_pct"] <= 100
        assert 0 < gpu["temperature_c"] < 120
        assert gpu["ecc_uncorrected"] in (0, None)


def test_a_reading_starts_no_program(monkeypatch) -> None:
    def started(argv: list[str], deadline: float) -> str:
        raise AssertionError(argv)

    monkeypatch.setattr(health, "_output", started)
    assert health.read_gpus(60.0)["gpus"]


def test_nvml_says_what_nvidia_smi_says() -> None:
    program = require_program("nvidia-smi", package="nvidia-smi")
    told = health._nvidia_smi(program, health.time.monotonic() + 60)["gpus"]
    found = [health._gpu_by_nvml(**each) for each in nvml.read()]
    assert len(found) == len(told) > 0
    for ours, theirs in zip(found, told, strict=True):
        assert set(ours) == set(theirs)
        for key in ("index", "name", "uuid", "ecc_uncorrected"):
            assert ours[key] == theirs[key]
        for key in ("memory_total_bytes", "memory_used_bytes"):
            assert ours[key] == pytest.approx(theirs[key], abs=_NEAR_BYTES)
        assert ours["temperature_c"] == pytest.approx(theirs["temperature_c"], abs=_NEAR_C)


def test_the_driver_knows_the_question_why_clocks_are_held_down() -> None:
    program = require_program("nvidia-smi", package="nvidia-smi")
    gpus = read()["gpus"]
    for gpu in gpus:
        gpu["throttled"] = None
    health._add_reasons(gpus, program, health.time.monotonic() + 60)
    assert all(isinstance(gpu["throttled"], list) for gpu in gpus)
    query = "--query-gpu=index,clocks_throttle_reasons.active"
    done = subprocess.run(
        [program, query, f"--format={health.NVIDIA_FORMAT}"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout
    assert "0x" in done.stdout


def test_the_kernels_log_is_read_or_said_to_be_unknown() -> None:
    found = read()
    assert isinstance(found["xids"], list) or found["xids_unknown"]
