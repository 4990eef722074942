"""The variables that make only the allocated GPUs visible."""

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


def make_gpus(vendor: Vendor, *, with_uuid: bool) -> list[GPUInfo]:
    return [
        GPUInfo(gpu_id=index, name="x", vendor=vendor, uuid=f"GPU-{index}" if with_uuid else "")
        for index in range(4)
    ]


@pytest.mark.parametrize(("vendor", "held"), [(Vendor.NVIDIA, []), (Vendor.CPU, [0]), (Vendor.CPU, [])])
def test_process_without_gpus_sees_none_of_any_vendor(vendor: Vendor, held: list[int]) -> None:
    environment = visible_devices_env(vendor, held, make_gpus(vendor, with_uuid=False))
    assert environment == {
        "CUDA_VISIBLE_DEVICES": "",
        "ROCR_VISIBLE_DEVICES": "",
        "HIP_VISIBLE_DEVICES": "-1",
        "ZE_AFFINITY_MASK": "",
        "ONEAPI_DEVICE_SELECTOR": "!*:gpu",
    }


def test_nvidia_gpus_are_visible_by_uuid_in_the_given_order() -> None:
    environment = visible_devices_env(Vendor.NVIDIA, [2, 0], make_gpus(Vendor.NVIDIA, with_uuid=True))
    assert environment["CUDA_VISIBLE_DEVICES"] == "GPU-2,GPU-0"
    assert environment["HIP_VISIBLE_DEVICES"] == "-1"
    assert environment["ONEAPI_DEVICE_SELECTOR"] == "!*:gpu"


def test_nvidia_gpus_without_uuid_are_visible_by_nvml_index() -> None:
    environment = visible_devices_env(Vendor.NVIDIA, [1, 3], make_gpus(Vendor.NVIDIA, with_uuid=False))
    assert environment["CUDA_VISIBLE_DEVICES"] == "1,3"
    assert environment["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"


def test_hip_indices_start_at_zero_after_the_rocr_filter() -> None:
    environment = visible_devices_env(Vendor.AMD, [2, 3], make_gpus(Vendor.AMD, with_uuid=False))
    assert environment["ROCR_VISIBLE_DEVICES"] == "2,3"
    assert environment["HIP_VISIBLE_DEVICES"] == "0,1"
    assert environment["CUDA_VISIBLE_DEVICES"] == ""


def test_sycl_indices_start_at_zero_after_the_level_zero_filter() -> None:
    environment = visible_devices_env(Vendor.INTEL, [1, 2], make_gpus(Vendor.INTEL, with_uuid=False))
    assert environment["ZE_AFFINITY_MASK"] == "1,2"
    assert environment["ONEAPI_DEVICE_SELECTOR"] == "level_zero:0,1"


@pytest.mark.parametrize("vendor", list(Vendor))
def test_variables_of_all_vendors_are_always_set(vendor: Vendor) -> None:
    """The variables of the agent must not be inherited."""
    environment = visible_devices_env(vendor, [0], make_gpus(vendor, with_uuid=True))
    assert set(environment) >= VARIABLES


def test_unknown_gpu_is_rejected_by_name() -> None:
    with pytest.raises(HardwareError, match=r"GPU 7 \(nvidia\)"):
        visible_devices_env(Vendor.NVIDIA, [0, 7], make_gpus(Vendor.NVIDIA, with_uuid=True))
