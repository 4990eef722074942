"""The environment variables that make only the allocated GPUs visible to a process. Pure.

The variables of all vendors are always set, so that those of the agent are not inherited.
"""

from __future__ import annotations

from collections.abc import Sequence

from genie.errors import HardwareError
from genie.model.node import GPUInfo, Vendor

# Empty hides all GPUs from CUDA and ROCr. HIP treats empty as unset and then reads the variable of CUDA, so
# it gets an invalid index. SYCL has a filter that discards all GPUs.
_ENV_HIDING_ALL_GPUS = {
    "CUDA_VISIBLE_DEVICES": "",
    "ROCR_VISIBLE_DEVICES": "",
    "HIP_VISIBLE_DEVICES": "-1",
    "ZE_AFFINITY_MASK": "",
    "ONEAPI_DEVICE_SELECTOR": "!*:gpu",
}


def visible_devices_env(vendor: Vendor, gpu_ids: Sequence[int], infos: Sequence[GPUInfo]) -> dict[str, str]:
    """The variables for a process with `gpu_ids` of `vendor`, described by `infos`.

    The process sees the GPUs in the order of `gpu_ids`. Without GPUs, or with CPU accelerators, all GPUs are
    hidden. Raises HardwareError for a GPU that is not in `infos`.
    """
    if vendor is Vendor.CPU or not gpu_ids:
        return dict(_ENV_HIDING_ALL_GPUS)
    known = {info.gpu_id: info for info in infos if info.vendor is vendor}
    missing = [gpu_id for gpu_id in gpu_ids if gpu_id not in known]
    if missing:
        raise HardwareError(
            f"GPU {missing[0]} ({vendor}) is not in the inventory of this machine",
            hint=f"its GPUs: {sorted(known) or 'none'}",
        )
    held = [known[gpu_id] for gpu_id in gpu_ids]
    return _ENV_HIDING_ALL_GPUS | _VARIABLES_BY_VENDOR[vendor](held)


def _cuda_variables(held: Sequence[GPUInfo]) -> dict[str, str]:
    if all(info.uuid for info in held):
        return {"CUDA_VISIBLE_DEVICES": ",".join(info.uuid for info in held)}
    # The default order of CUDA is fastest first, that of NVML is by bus.
    return {"CUDA_VISIBLE_DEVICES": _join_gpu_ids(held), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def _rocm_variables(held: Sequence[GPUInfo]) -> dict[str, str]:
    by_uuid = all(info.uuid for info in held)
    visible = ",".join(info.uuid for info in held) if by_uuid else _join_gpu_ids(held)
    # HIP indices refer to the GPUs that ROCr leaves visible.
    return {"ROCR_VISIBLE_DEVICES": visible, "HIP_VISIBLE_DEVICES": _join_visible_indices(held)}


def _oneapi_variables(held: Sequence[GPUInfo]) -> dict[str, str]:
    # SYCL indices refer to the GPUs that the Level Zero mask leaves visible.
    return {
        "ZE_AFFINITY_MASK": _join_gpu_ids(held),
        "ONEAPI_DEVICE_SELECTOR": f"level_zero:{_join_visible_indices(held)}",
    }


_VARIABLES_BY_VENDOR = {
    Vendor.NVIDIA: _cuda_variables,
    Vendor.AMD: _rocm_variables,
    Vendor.INTEL: _oneapi_variables,
}


def _join_gpu_ids(held: Sequence[GPUInfo]) -> str:
    return ",".join(str(info.gpu_id) for info in held)


def _join_visible_indices(held: Sequence[GPUInfo]) -> str:
    return ",".join(str(index) for index in range(len(held)))
