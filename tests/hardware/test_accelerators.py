"""The inventory where there is no GPU; with GPUs see test_nvidia.py and tests/gpu."""

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
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that these tests say the same on a machine that has one."""

    def absent() -> None:
        raise HardwareError("NVML: not here", hint="install it")

    monkeypatch.setattr(accelerators, "NvidiaReader", absent)


@pytest.mark.usefixtures("_no_gpu")
@pytest.mark.parametrize("count", [0, 1, 3])
def test_without_a_gpu_there_are_as_many_cpu_accelerators_as_configured(count: int) -> None:
    gpus = inventory(count)
    assert [(gpu.gpu_id, gpu.vendor) for gpu in gpus] == [(index, Vendor.CPU) for index in range(count)]


@pytest.mark.usefixtures("_no_gpu")
async def test_async_readings_come_from_a_named_thread_that_close_ends() -> None:
    with Inventory(1) as opened:
        first = await opened.read_async(timeout_s=5)
        second = await opened.read_async(timeout_s=5)
        assert [gpu.gpu_id for gpu in first] == [gpu.gpu_id for gpu in second] == [0]
        assert any(one.name.startswith("genie-hardware") for one in threading.enumerate())
        assert opened.absent_reason == "NVML: not here (install it)"
    assert not any(one.name.startswith("genie-hardware") for one in threading.enumerate())


@pytest.mark.usefixtures("_no_gpu")
def test_making_an_inventory_opens_nothing_yet() -> None:
    assert Inventory(1).absent_reason == ""


def test_the_package_imports_neither_torch_nor_pynvml() -> None:
    """pynvml is thousands of lines that a client without a GPU does not need at import."""
    code = "import sys, genie.hardware; print(sorted({'torch', 'pynvml'} & set(sys.modules)))"
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
