"""The inventory with the real NVML, under the contract of the fake in tests/hardware."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from genie.hardware import Inventory, inventory, probe_accelerators, visible_devices_env
from genie.model.node import Vendor
from tests.hardware.inventory_contract import check_nvidia_inventory
from tests.needs import require_module, require_program

MIB = 1024**2


@pytest.fixture
def opened_inventory() -> Iterator[Inventory]:
    with Inventory(cpu_accelerators=1) as made:
        yield made


def query_nvidia_smi(fields: str) -> list[list[str]]:
    """The same readings from nvidia-smi: one row per GPU."""
    program = require_program("nvidia-smi", package="nvidia-smi")
    command = [program, f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines()]


def test_real_nvml_passes_the_inventory_contract(opened_inventory: Inventory) -> None:
    check_nvidia_inventory(opened_inventory.read)
    assert opened_inventory.no_nvidia_gpu_reason == ""


def test_names_ids_and_memory_match_nvidia_smi(opened_inventory: Inventory) -> None:
    rows = query_nvidia_smi("index,name,uuid,memory.total")
    assert [
        [str(gpu.gpu_id), gpu.name, gpu.uuid, str(gpu.memory_total_bytes // MIB)]
        for gpu in opened_inventory.read()
    ] == rows


def test_temperature_power_and_utilization_are_close_to_nvidia_smi(opened_inventory: Inventory) -> None:
    """Approximately equal, because the values change between the two readings."""
    for gpu, row in zip(
        opened_inventory.read(), query_nvidia_smi("temperature.gpu,power.draw,memory.used"), strict=True
    ):
        assert gpu.temperature_c == pytest.approx(float(row[0]), abs=15)
        assert gpu.power_w == pytest.approx(float(row[1]), abs=150)
        used_mib = gpu.memory_used_bytes / MIB
        assert used_mib >= float(row[2]) - 64, "what the driver keeps for itself counts as used here"


def test_compute_capability_matches_nvidia_smi(opened_inventory: Inventory) -> None:
    rows = query_nvidia_smi("compute_cap")
    assert [["{}.{}".format(*gpu.capability)] for gpu in opened_inventory.read()] == rows


def test_healthy_gpu_is_ok_and_first_of_its_island(opened_inventory: Inventory) -> None:
    gpus = opened_inventory.read()
    assert [(gpu.available, gpu.reason) for gpu in gpus] == [(True, "")] * len(gpus)
    assert gpus[0].island == 0
    assert {gpu.island for gpu in gpus} <= {gpu.gpu_id for gpu in gpus}


@pytest.fixture
def gpu_memory_holder() -> Iterator[subprocess.Popen[str]]:
    """A child process that holds 1 GiB of the first GPU until its stdin closes."""
    require_module("torch", package="torch")
    hold = "x = torch.ones(2**30, dtype=torch.uint8, device='cuda:0')"
    code = f"import sys, torch; {hold}; print('held', flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.stdin.close()


def test_memory_of_a_job_is_not_external(
    opened_inventory: Inventory, gpu_memory_holder: subprocess.Popen[str]
) -> None:
    gpu = opened_inventory.read(held=[0])[0]
    # If the driver lists no processes, as in containers, no memory counts as external; else all but theirs.
    assert gpu.memory_outside_bytes <= gpu.memory_used_bytes - 1024 * MIB
    assert opened_inventory.read()[0].memory_outside_bytes >= 1024 * MIB, (
        "and for one who holds nothing all of it is"
    )


async def test_async_readings_run_on_the_named_thread(opened_inventory: Inventory) -> None:
    gpus = await opened_inventory.read_async(timeout_s=30)
    assert gpus[0].vendor is Vendor.NVIDIA
    assert any(one.name.startswith("genie-hardware") for one in threading.enumerate())


def test_reading_after_close_reopens_nvml(opened_inventory: Inventory) -> None:
    before = [gpu.uuid for gpu in opened_inventory.read()]
    opened_inventory.close()
    assert [(gpu.uuid, gpu.available) for gpu in opened_inventory.read()] == [(uuid, True) for uuid in before]


def test_probe_reports_gpu_usable() -> None:
    nvidia = probe_accelerators()[0]
    assert (nvidia.vendor, nvidia.usable, nvidia.fix) == (Vendor.NVIDIA, True, "")


@pytest.mark.parametrize("held", [True, False])
def test_process_sees_only_its_allocated_gpu(held: bool) -> None:
    require_module("torch", package="torch")
    gpus = inventory(0)
    environment = visible_devices_env(Vendor.NVIDIA, [gpus[0].gpu_id] if held else [], gpus)
    code = "import torch; print(torch.cuda.device_count())"
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["1" if held else "0"]
