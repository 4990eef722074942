"""The inventory of a machine without GPUs; for GPUs see test_nvidia.py and tests/gpu."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from genie.errors import HardwareError
from genie.hardware import Inventory, accelerators, inventory
from genie.model.node import Vendor


@pytest.fixture
def _hide_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives the same results on a machine with GPUs."""

    def absent() -> None:
        raise HardwareError("NVML: not here", hint="install it")

    monkeypatch.setattr(accelerators, "NvidiaReader", absent)


@pytest.mark.usefixtures("_hide_gpus")
@pytest.mark.parametrize("count", [0, 1, 3])
def test_machine_without_gpu_has_the_configured_cpu_accelerators(count: int) -> None:
    gpus = inventory(count)
    assert [(gpu.gpu_id, gpu.vendor) for gpu in gpus] == [(index, Vendor.CPU) for index in range(count)]


@pytest.mark.usefixtures("_hide_gpus")
async def test_async_reads_use_a_named_thread_that_close_ends() -> None:
    with Inventory(1) as opened:
        first = await opened.read_async(timeout_s=5)
        second = await opened.read_async(timeout_s=5)
        assert [gpu.gpu_id for gpu in first] == [gpu.gpu_id for gpu in second] == [0]
        assert any(one.name.startswith("genie-hardware") for one in threading.enumerate())
        assert opened.no_nvidia_gpu_reason == "NVML: not here (install it)"
    assert not any(one.name.startswith("genie-hardware") for one in threading.enumerate())


@pytest.mark.usefixtures("_hide_gpus")
def test_inventory_constructor_opens_no_driver() -> None:
    assert Inventory(1).no_nvidia_gpu_reason == ""


def test_package_imports_neither_torch_nor_pynvml() -> None:
    """pynvml is thousands of lines that a client without a GPU does not need at import."""
    code = "import sys, genie.hardware; print(sorted({'torch', 'pynvml'} & set(sys.modules)))"
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
