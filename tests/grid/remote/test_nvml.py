"""NVML readings: equal to those of nvidia-smi, which is used when NVML fails."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from genie.grid.remote import health, nvml
from genie.grid.remote.core import OpError
from tests.grid.remote.take_readings import take_readings
from tests.grid.testbed import convert_to_nvml_state
from tests.waiting import wait_until

MIB = 1 << 20
T4 = "0, T4, GPU-a, 15360, 300, 5, 33, 0"


class FakeDriver:
    """Fake nvidia-smi and NVML of one machine, which agree unless configured otherwise."""

    def __init__(self, folder: Path, write_tool: Callable[[str, str], Path], library: Path) -> None:
        self._folder = folder
        self._tool = write_tool
        self.library = library

    def has(self, *lines: str, reasons: Sequence[str] = ()) -> None:
        (self._folder / "gpus.csv").write_text("\n".join([*lines, ""]))
        (self._folder / "reasons.csv").write_text("\n".join([*reasons, ""]))
        self._tool(
            "nvidia-smi",
            f"echo x >> {self._folder}/started; case $1 in *throttle*) cat {self._folder}/reasons.csv;; "
            f"*) cat {self._folder}/gpus.csv;; esac",
        )
        self.nvml(*convert_to_nvml_state([line for line in lines if "No devices" not in line], reasons))

    def nvml(self, *lines: str) -> None:
        fresh = self._folder / "fresh"
        fresh.write_text("\n".join([*lines, ""]))
        fresh.rename(self._folder / "nvml.state")

    @property
    def smi_starts(self) -> int:
        started = self._folder / "started"
        return len(started.read_text().split()) if started.exists() else 0


@pytest.fixture
def driver(fake_tools, nvml_library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    monkeypatch.setenv("FAKE_NVML_STATE", str(tmp_path / "nvml.state"))
    monkeypatch.setattr(nvml, "NVML_LIBRARY_NAME", str(nvml_library))
    return FakeDriver(tmp_path, fake_tools, nvml_library)


@pytest.fixture
def opened_libraries(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of opened libraries, in order."""
    names: list[str] = []
    init = nvml._NvmlLibrary.__init__

    def spied(self: nvml._NvmlLibrary, name: str) -> None:
        names.append(name)
        init(self, name)

    monkeypatch.setattr(nvml._NvmlLibrary, "__init__", spied)
    return names


@pytest.fixture
def hanging_driver(driver: FakeDriver) -> Iterator[FakeDriver]:
    """A driver whose NVML calls hang until the state is replaced."""
    driver.has(T4)
    driver.nvml("hangs=1", *convert_to_nvml_state([T4]))
    yield driver
    driver.has(T4)
    health._THREAD_AND_DEADLINE_BY_PART["gpus"][0].join(20)


def read_gpus() -> Any:
    found = take_readings()
    assert found["failed"] == {}
    return found["vendor"], found["gpus"]


@pytest.mark.parametrize(
    ("lines", "reasons"),
    [
        ([T4, "1, NVIDIA H100 80GB HBM3, GPU-b, 81559, 9000, 97, 61, 3"], []),
        (["0, Orin, GPU-a, [N/A], [N/A], 3, [N/A], [N/A]"], []),
        (["0, H100, GPU-a, 81559, 10, [N/A], 40, 0", "1, T4, GPU-b, 9, 1, 2, 3, [N/A]"], []),
        (["0, T4, GPU-a, 9, 1, 2, 85, 0", "1, T4, GPU-b, 9, 1, 2, 30, 0"], ["0, 0x64", "1, 0x1"]),
        (["No devices were found"], []),
    ],
)
def test_readings_equal_those_of_nvidia_smi(
    driver: FakeDriver, monkeypatch, lines: list[str], reasons: list[str]
) -> None:
    driver.has(*lines, reasons=reasons)
    by_nvml = read_gpus()
    assert driver.smi_starts == 0
    nvml.close_library()
    monkeypatch.setattr(nvml, "NVML_LIBRARY_NAME", "no-such-library.so")
    by_smi = read_gpus()
    assert driver.smi_starts > 0
    assert by_nvml == by_smi


def test_cool_gpu_has_throttle_reasons(driver: FakeDriver) -> None:
    driver.has("0, T4, GPU-a, 9, 1, 2, 30, 0", reasons=["0, 0x81"])
    assert read_gpus()[1][0]["throttled"] == ["power brake"]


def test_memory_reserved_by_driver_does_not_count_as_used(driver: FakeDriver) -> None:
    driver.has(T4)
    lines = [*convert_to_nvml_state([T4]), f"0.memory_reserved={600 * MIB}"]
    driver.nvml(*lines)
    assert read_gpus()[1][0]["memory_used_bytes"] == 300 * MIB
    driver.nvml(*lines, "0.memory_v2=!13")
    (gpu,) = read_gpus()[1]
    assert (gpu["memory_total_bytes"], gpu["memory_used_bytes"]) == (15360 * MIB, 900 * MIB)
    assert driver.smi_starts == 0


def test_library_stays_open_and_readings_are_current(driver: FakeDriver, opened_libraries: list[str]) -> None:
    driver.has(T4)
    first = read_gpus()
    driver.has(T4.replace("300", "400"))
    second = read_gpus()
    assert [each[1][0]["memory_used_bytes"] // MIB for each in (first, second)] == [300, 400]
    assert opened_libraries == [str(driver.library)]


@pytest.mark.parametrize(
    "error", ["init=!9", "count=!999", "0.handle=!15", "0.temperature=!999", "0.lost=15"]
)
def test_error_falls_back_to_nvidia_smi_and_reopens_library(
    driver: FakeDriver, opened_libraries: list[str], error: str
) -> None:
    driver.has("Unable to determine the device handle for GPU0000:3B:00.0: Unknown Error")
    driver.nvml(*convert_to_nvml_state([T4]), error)
    assert "Unable to determine the device handle" in take_readings()["failed"]["gpus"]
    driver.has(T4)
    assert len(read_gpus()[1]) == 1
    assert (driver.smi_starts, len(opened_libraries)) == (1, 2)


@pytest.mark.parametrize("library", ["no-such-library.so", "libc.so.6"])
def test_missing_library_or_functions_fall_back_to_nvidia_smi(
    driver: FakeDriver, monkeypatch, library: str
) -> None:
    driver.has(T4)
    monkeypatch.setattr(nvml, "NVML_LIBRARY_NAME", library)
    assert read_gpus()[1][0]["uuid"] == "GPU-a"
    assert driver.smi_starts == 1


def test_missing_ctypes_falls_back_to_nvidia_smi(driver: FakeDriver, monkeypatch) -> None:
    driver.has(T4)
    monkeypatch.setitem(sys.modules, "ctypes", None)
    assert read_gpus()[1][0]["uuid"] == "GPU-a"
    assert driver.smi_starts == 1


def test_nvml_is_not_used_without_nvidia_smi(driver: FakeDriver, opened_libraries: list[str]) -> None:
    driver.nvml(*convert_to_nvml_state([T4]))
    assert read_gpus() == ("none", [])
    assert opened_libraries == []


def test_hanging_driver_fails_only_gpu_reading_and_uses_one_thread(hanging_driver: FakeDriver) -> None:
    before = threading.active_count()
    first = take_readings(timeout_s=1)
    assert first["failed"] == {"gpus": "took longer than 1 s"}
    assert first["load"] and first["disk_total_bytes"]
    for _ in range(3):
        assert take_readings(timeout_s=1)["failed"] == {"gpus": "a previous reading still hangs"}
    assert threading.active_count() == before + 1
    assert hanging_driver.smi_starts == 0
    hanging_driver.has(T4)
    wait_until(
        lambda: not health._THREAD_AND_DEADLINE_BY_PART["gpus"][0].is_alive(),
        what="the end of the call that hung",
    )
    assert len(read_gpus()[1]) == 1


def test_hanging_driver_does_not_block_gpu_choice(hanging_driver: FakeDriver) -> None:
    with pytest.raises(OpError, match=r"could not read the GPUs: took longer than 0\.1 s"):
        health.read_gpus(0.1)
    with pytest.raises(OpError, match="could not read the GPUs: a previous reading still hangs"):
        health.read_gpus(0.1)


def test_other_gpus_can_be_chosen_if_one_is_lost(driver: FakeDriver) -> None:
    driver.has("Unable to determine the device handle for GPU0000:3B:00.0", "1, T4, GPU-b, 9, 1, 2, 3, 0")
    assert [gpu["index"] for gpu in health.read_gpus(20.0)["gpus"]] == [1]
