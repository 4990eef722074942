"""NVIDIA GPUs: the real pynvml over a scripted NVML library."""

from __future__ import annotations

import os

import pytest

from genie.hardware.limits import RECOVERY_GOOD_READINGS_MIN
from genie.model.node import GPUInfo, Vendor
from tests.fakes.nvml.fake_nvml import FakeNvml
from tests.hardware.inventory_contract import check_nvidia_inventory

GIB = 1024**3


def test_fake_nvml_satisfies_the_inventory_contract(fake_nvml: FakeNvml) -> None:
    fake_nvml.script("count=3")
    check_nvidia_inventory(fake_nvml.read)


def test_readings_have_the_right_field_and_unit(fake_nvml: FakeNvml) -> None:
    fake_nvml.script(
        "count=2",
        "0.name=NVIDIA H200",
        "0.uuid=GPU-0000000a-0000-0000-0000-00000000000a",
        f"0.memory_total={141 * GIB}",
        f"0.memory_used={20 * GIB}",
        "0.utilization=37",
        "0.temperature=61",
        "0.power=412500",
    )
    gpu = fake_nvml.read()[0]
    assert (gpu.name, gpu.vendor) == ("NVIDIA H200", Vendor.NVIDIA)
    assert gpu.uuid == "GPU-0000000a-0000-0000-0000-00000000000a"
    assert (gpu.memory_total_bytes, gpu.memory_used_bytes) == (141 * GIB, 20 * GIB)
    assert (gpu.utilization_pct, gpu.temperature_c, gpu.power_w) == (37.0, 61.0, 412.5)
    assert (gpu.available, gpu.reason) == (True, "")


def test_readings_are_current_while_handles_stay_open(fake_nvml: FakeNvml) -> None:
    fake_nvml.script("count=1", "0.temperature=50")
    assert fake_nvml.read()[0].temperature_c == 50.0
    fake_nvml.script("count=1", "0.temperature=70")
    assert fake_nvml.read()[0].temperature_c == 70.0


def test_unsupported_reading_is_none_and_the_gpu_stays_available(fake_nvml: FakeNvml) -> None:
    """As with MIG (no utilization) or without permission (no power)."""
    fake_nvml.script("count=1", "0.utilization=!3", "0.power=!4", "0.temperature=!3", "0.memory_total=!3")
    gpu = fake_nvml.read()[0]
    assert (gpu.utilization_pct, gpu.power_w, gpu.temperature_c) == (None, None, None)
    assert gpu.memory_total_bytes == 0
    assert gpu.available


def test_temperature_of_an_older_driver_is_read(fake_nvml: FakeNvml) -> None:
    fake_nvml.script("count=1", "0.temperature=55", "0.temperature_v=!13")
    assert fake_nvml.read()[0].temperature_c == 55.0


def test_lost_gpu_stays_listed_as_unavailable(fake_nvml: FakeNvml) -> None:
    fake_nvml.script("count=2", "0.temperature=50")
    before = fake_nvml.read()
    fake_nvml.script("count=2", "0.lost=15", "1.temperature=51")
    lost, well = fake_nvml.read()
    assert (lost.gpu_id, lost.uuid, lost.name) == (0, before[0].uuid, before[0].name)
    assert not lost.available
    assert "lost" in lost.reason
    assert (lost.temperature_c, lost.memory_used_bytes, lost.memory_outside_bytes) == (None, 0, 0)
    assert (well.available, well.temperature_c) == (True, 51.0)


def test_lost_gpu_that_returns_becomes_available_again(fake_nvml: FakeNvml) -> None:
    fake_nvml.script("count=1", "0.lost=15")
    assert not fake_nvml.read()[0].available
    fake_nvml.script("count=1")
    for _ in range(RECOVERY_GOOD_READINGS_MIN):
        gpu = fake_nvml.read()[0]
    assert (gpu.available, gpu.reason) == (True, "")
    assert gpu.name == "NVIDIA Fake 80GB"


def test_gpu_without_a_handle_is_listed_with_the_reason(fake_nvml: FakeNvml) -> None:
    fake_nvml.script("count=2", "0.handle=!15")
    dead, well = fake_nvml.read()
    assert (dead.gpu_id, dead.available) == (0, False)
    assert "lost" in dead.reason
    assert (well.gpu_id, well.available) == (1, True)


def test_gpu_is_unavailable_only_above_ninety_percent(fake_nvml: FakeNvml) -> None:
    fake_nvml.script("count=2", "0.utilization=91", "1.utilization=90")
    busy, free = fake_nvml.read()
    assert (busy.available, busy.reason) == (False, "utilization 91% is above 90%")
    assert busy.utilization_pct == 91.0
    assert free.available


def test_gpu_busy_with_our_job_stays_available(
    fake_nvml: FakeNvml,
) -> None:
    fake_nvml.script("count=2", "0.utilization=99", "1.utilization=99")
    assert [gpu.available for gpu in fake_nvml.read(held=[0])] == [True, False]
    fake_nvml.script("count=1", "0.utilization=99", "0.clocks=64")
    assert not fake_nvml.read(held=[0])[0].available, "unless it is not well"


# --- properties for the scheduler -------------------------------------------------------------


def test_capability_and_numa_node_are_read(fake_nvml: FakeNvml) -> None:
    fake_nvml.script("count=2", "0.capability=10.3", "0.numa=12", "1.capability=!3", "1.numa=!3")
    first, second = fake_nvml.read()
    assert (first.capability, first.numa) == ((10, 3), 2), "the lowest node of the mask"
    assert (second.capability, second.numa, second.available) == ((0, 0), 0, True)


@pytest.mark.parametrize(
    ("links", "islands"),
    [
        ([], [0, 1, 2, 3]),
        (["0.link.0=gpu:2", "1.link.5=gpu:1", "2.link.0=gpu:4", "3.link.0=gpu:3"], [0, 0, 2, 2]),
        (["0.link.0=gpu:2", "1.link.1=gpu:3", "2.link.17=gpu:4"], [0, 0, 0, 0]),
        (["1.link.0=switch", "2.link.3=switch", "3.link.0=switch"], [0, 1, 1, 1]),
        (["1.link.0=other:9", "3.link.0=other:9"], [0, 1, 2, 1]),
        (["0.link.0=off", "1.link.0=off", "2.link.0=npu:9", "3.link.0=npu:9"], [0, 1, 2, 3]),
        (["0.link.0=other:0", "1.link.0=other:0"], [0, 1, 2, 3]),
        (["0.link.0=gpu:2", "1.bus=!3", "2.link.0=switch", "3.link.0=switch"], [0, 1, 2, 2]),
    ],
    ids=["PCIe", "pairs", "chain", "switch", "unknown kind", "off or npu", "nowhere", "failing"],
)
def test_linked_gpus_form_an_island(fake_nvml: FakeNvml, links: list[str], islands: list[int]) -> None:
    fake_nvml.script("count=4", *links)
    gpus = fake_nvml.read()
    assert [gpu.island for gpu in gpus] == islands
    assert all(gpu.available for gpu in gpus)


def test_static_properties_do_not_change_while_a_gpu_is_lost(fake_nvml: FakeNvml) -> None:
    """The scheduler relies on them."""
    machine = ["count=3", *(f"{gpu}.link.0=switch" for gpu in range(3)), "0.capability=8.6", "0.numa=4"]
    fake_nvml.script(*machine)
    before = [static_fields(gpu) for gpu in fake_nvml.read()]
    assert before[0][2:] == (85899345920, (8, 6), 0, 2)
    silent = [f"0.{call}=!3" for call in ("name", "uuid", "memory_total", "capability", "numa", "link.0")]
    for fault in (silent, ["0.lost=15"], ["1.link.0=off"], ["0.lost=1"], ["init=!9"], silent, []):
        fake_nvml.script(*machine, *fault)
        assert [static_fields(gpu) for gpu in fake_nvml.read()] == before, fault


def static_fields(gpu: GPUInfo) -> tuple[object, ...]:
    return (gpu.name, gpu.uuid, gpu.memory_total_bytes, gpu.capability, gpu.island, gpu.numa)


@pytest.mark.parametrize("number", [0, 1, 2])
def test_gpu_that_responds_late_joins_its_island(fake_nvml: FakeNvml, number: int) -> None:
    machine = ["count=4", *(f"{gpu}.link.0=switch" for gpu in range(3))]
    fake_nvml.script(*machine, f"{number}.lost=15")
    first = [gpu.island for gpu in fake_nvml.read()]
    fake_nvml.script(*machine)
    later = [gpu.island for gpu in fake_nvml.read()]
    assert first[number] == number, "alone, as far as is known"
    assert len(set(later[:3])) == 1
    assert later[3] == 3
    assert [later[gpu] for gpu in range(4) if gpu != number] == [
        first[gpu] for gpu in range(4) if gpu != number
    ]


def test_all_used_memory_of_a_gpu_without_a_job_is_outside(fake_nvml: FakeNvml) -> None:
    fake_nvml.script("count=1", f"0.memory_used={3 * GIB}")
    assert fake_nvml.read()[0].memory_outside_bytes == 3 * GIB


@pytest.mark.parametrize("kind", ["processes", "mps", "graphics"])
def test_memory_of_job_processes_is_not_outside(fake_nvml: FakeNvml, kind: str) -> None:
    used, ours, theirs = 30 * GIB, 20 * GIB, 9 * GIB
    listed = f"{fake_nvml.job_pid()}:{ours},{os.getpid()}:{theirs}"
    fake_nvml.script("count=1", f"0.memory_used={used}", f"0.{kind}={listed}")
    assert fake_nvml.read(held=[0])[0].memory_outside_bytes == 10 * GIB, "the driver's own counts, too"
    fake_nvml.script("count=1", f"0.memory_used={used}", f"0.{kind}={os.getpid()}:{theirs}")
    assert fake_nvml.read(held=[0])[0].memory_outside_bytes == 30 * GIB, "the job has not begun to use it"


def test_process_in_two_nvml_lists_is_counted_once(fake_nvml: FakeNvml) -> None:
    one = f"{fake_nvml.job_pid()}:{2 * GIB}"
    fake_nvml.script("count=1", f"0.memory_used={5 * GIB}", f"0.processes={one}", f"0.graphics={one}")
    assert fake_nvml.read(held=[0])[0].memory_outside_bytes == 3 * GIB


@pytest.mark.parametrize("listed", ["", "!3", "{job}:?", "{job}:1000,4194999:1000"])
def test_memory_of_a_held_gpu_without_process_figures_is_not_outside(
    fake_nvml: FakeNvml, listed: str
) -> None:
    """As in a container. The last PID is above the maximum of Linux."""
    lists = [
        f"0.{kind}={listed.format(job=fake_nvml.job_pid())}" for kind in ("processes", "mps", "graphics")
    ]
    fake_nvml.script("count=2", f"0.memory_used={3 * GIB}", f"1.memory_used={GIB}", *lists)
    assert [gpu.memory_outside_bytes for gpu in fake_nvml.read(held=[0])] == [0, GIB]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("0.clocks=64", "too hot"),
        ("0.clocks=72", "too hot"),
        ("0.clocks=128", "power supply"),
        ("0.clocks=9", "throttled by its hardware"),
        ("0.remapped=0,1,0,1", "row remapping failed"),
        ("0.remapped=0,1,1,0", "needs a reset"),
        ("0.retired_pending=1", "needs a reset"),
        ("0.recovery=1", "a reset of the GPU"),
        ("0.recovery=99", "recovery action 99"),
    ],
)
def test_faulty_gpu_is_unavailable_and_still_read(fake_nvml: FakeNvml, line: str, words: str) -> None:
    fake_nvml.script("count=2", "0.temperature=88", line)
    unwell, well = fake_nvml.read()
    assert (unwell.available, well.available) == (False, True)
    assert words in unwell.reason
    assert (unwell.temperature_c, unwell.memory_used_bytes) == (88.0, GIB)


@pytest.mark.parametrize(
    "line",
    [
        "0.clocks=0",
        "0.clocks=55",  # idle, set by hand, power cap, sync boost, driver temperature limit
        "0.clocks=!3",
        "0.remapped=3,1,0,0",
        "0.remapped=!3",
        "0.retired_pending=!3",
        "0.recovery=!3",
    ],
)
def test_gpu_without_reported_faults_is_available(fake_nvml: FakeNvml, line: str) -> None:
    fake_nvml.script("count=1", line)
    assert fake_nvml.read()[0].available


def test_throttle_reasons_of_an_older_driver_are_read(fake_nvml: FakeNvml) -> None:
    fake_nvml.script("count=1", "0.clocks_event=!13", "0.clocks=64")
    assert "too hot" in fake_nvml.read()[0].reason


def test_intermittently_throttled_gpu_stays_unavailable(fake_nvml: FakeNvml) -> None:
    for clocks in (64, 0, 0, 64, 0, 0):
        fake_nvml.script("count=1", f"0.clocks={clocks}")
        gpu = fake_nvml.read()[0]
        assert not gpu.available
    assert gpu.reason == "recovering from: throttled by its hardware: too hot"
    assert fake_nvml.read()[0].available


# --- loading of drivers -----------------------------------------------------------------------


def test_unloaded_driver_leaves_all_gpus_listed_as_unavailable(fake_nvml: FakeNvml) -> None:
    fake_nvml.script("count=2")
    uuids = [gpu.uuid for gpu in fake_nvml.read()]
    fake_nvml.script("count=2", "0.lost=1", "init=!9")
    for _ in range(2):
        lost = fake_nvml.read()
        assert [gpu.uuid for gpu in lost] == uuids
        assert not any(gpu.available for gpu in lost)
    assert "Driver Not Loaded" in lost[0].reason


def test_gpus_keep_their_ids_after_a_driver_reload(fake_nvml: FakeNvml) -> None:
    a, b, c = (f"GPU-0000000{letter}-0000-0000-0000-000000000000" for letter in "abc")
    fake_nvml.script("count=2", f"0.uuid={a}", f"1.uuid={b}")
    fake_nvml.read()
    fake_nvml.script("count=2", "0.lost=1")
    fake_nvml.read()
    fake_nvml.script("count=3", f"0.uuid={c}", f"1.uuid={a}", "2.handle=!15")
    for _ in range(RECOVERY_GOOD_READINGS_MIN):
        gpus = fake_nvml.read()
    assert [(gpu.gpu_id, gpu.uuid, gpu.available) for gpu in gpus] == [
        (0, a, True),
        (1, b, False),
        (2, c, True),
    ]
    assert gpus[1].reason == "the driver no longer lists this GPU"


def test_missing_driver_falls_back_to_the_cpu_with_the_reason(fake_nvml: FakeNvml) -> None:
    fake_nvml.script("count=2", "init=!9")
    (cpu,) = fake_nvml.read()
    assert cpu.vendor is Vendor.CPU
    assert "Driver Not Loaded" in fake_nvml.no_nvidia_gpu_reason()


def test_gpus_that_appear_later_do_not_replace_the_cpu(fake_nvml: FakeNvml) -> None:
    fake_nvml.script("count=0")
    assert fake_nvml.read()[0].vendor is Vendor.CPU
    assert fake_nvml.no_nvidia_gpu_reason() == "NVML lists no GPU"
    fake_nvml.script("count=1")
    assert fake_nvml.read()[0].vendor is Vendor.CPU


def test_failing_gpu_count_is_reported_as_reason_and_not_raised(fake_nvml: FakeNvml) -> None:
    fake_nvml.script("count=!999")
    assert fake_nvml.read()[0].vendor is Vendor.CPU
    assert "NVML" in fake_nvml.no_nvidia_gpu_reason()


def test_probe_names_the_gpus_and_the_lost_one(fake_nvml: FakeNvml) -> None:
    fake_nvml.script("count=2", "0.name=NVIDIA H200", "1.lost=15")
    nvidia = fake_nvml.probe()[0]
    assert (nvidia.vendor, nvidia.usable) == (Vendor.NVIDIA, True)
    assert "NVIDIA H200" in nvidia.reason
    assert "GPU 1" in nvidia.reason
    assert "lost" in nvidia.reason
    assert nvidia.fix


def test_probe_has_a_fix_for_a_driver_that_is_not_loaded(fake_nvml: FakeNvml) -> None:
    fake_nvml.script("init=!9")
    nvidia = fake_nvml.probe()[0]
    assert not nvidia.usable
    assert "Driver Not Loaded" in nvidia.reason
    assert "modprobe" in nvidia.fix
