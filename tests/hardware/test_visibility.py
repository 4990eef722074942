"""Which variables show a process its GPUs and hide the rest."""

from __future__ import annotations

import pytest

from genie.errors import HardwareError
from genie.hardware import visible_devices_env
from genie.model.node import GPUInfo, Vendor

VARIABLES = {
    "CUDA_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "ZE_AFFINITY_MASK",
    "ONEAPI_DEVICE_SELECTOR",
}


def gpus(vendor: Vendor, *, with_uuid: bool) -> list[GPUInfo]:
    return [
        GPUInfo(gpu_id=index, name="x", vendor=vendor, uuid=f"GPU-{index}" if with_uuid else "")
        for index in range(4)
    ]


@pytest.mark.parametrize(("vendor", "held"), [(Vendor.NVIDIA, []), (Vendor.CPU, [0]), (Vendor.CPU, [])])
def test_who_holds_no_gpu_sees_none_of_any_vendor(vendor: Vendor, held: list[int]) -> None:
    environment = visible_devices_env(vendor, held, gpus(vendor, with_uuid=False))
    assert environment == {
        "CUDA_VISIBLE_DEVICES": "",
        "ROCR_VISIBLE_DEVICES": "",
        "HIP_VISIBLE_DEVICES": "-1",
        "ZE_AFFINITY_MASK": "",
        "ONEAPI_DEVICE_SELECTOR": "!*:gpu",
    }


def test_nvidia_gpus_are_shown_by_uuid_in_the_order_asked_for() -> None:
    environment = visible_devices_env(Vendor.NVIDIA, [2, 0], gpus(Vendor.NVIDIA, with_uuid=True))
    assert environment["CUDA_VISIBLE_DEVICES"] == "GPU-2,GPU-0"
    assert environment["HIP_VISIBLE_DEVICES"] == "-1"
    assert environment["ONEAPI_DEVICE_SELECTOR"] == "!*:gpu"


def test_nvidia_gpus_without_uuid_are_shown_by_number_counted_as_nvml_does() -> None:
    environment = visible_devices_env(Vendor.NVIDIA, [1, 3], gpus(Vendor.NVIDIA, with_uuid=False))
    assert environment["CUDA_VISIBLE_DEVICES"] == "1,3"
    assert environment["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"


def test_hip_counts_from_zero_what_rocr_has_left_over() -> None:
    environment = visible_devices_env(Vendor.AMD, [2, 3], gpus(Vendor.AMD, with_uuid=False))
    assert environment["ROCR_VISIBLE_DEVICES"] == "2,3"
    assert environment["HIP_VISIBLE_DEVICES"] == "0,1"
    assert environment["CUDA_VISIBLE_DEVICES"] == ""


def test_sycl_counts_from_zero_what_level_zero_has_left_over() -> None:
    environment = visible_devices_env(Vendor.INTEL, [1, 2], gpus(Vendor.INTEL, with_uuid=False))
    assert environment["ZE_AFFINITY_MASK"] == "1,2"
    assert environment["ONEAPI_DEVICE_SELECTOR"] == "level_zero:0,1"


@pytest.mark.parametrize("vendor", list(Vendor))
def test_every_vendors_variables_are_always_set(vendor: Vendor) -> None:
    """What the agent inherited must not shine through."""
    environment = visible_devices_env(vendor, [0], gpus(vendor, with_uuid=True))
    assert set(environment) >= VARIABLES


def test_a_gpu_that_the_machine_does_not_have_is_refused_by_name() -> None:
    with pytest.raises(HardwareError, match=r"GPU 7 \(nvidia\)"):
        visible_devices_env(Vendor.NVIDIA, [0, 7], gpus(Vendor.NVIDIA, with_uuid=True))
