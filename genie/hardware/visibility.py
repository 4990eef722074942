"""The environment that shows a process the GPUs it was given and hides all others. Pure.

Every vendor's variables are set each time: what a process was not given it must not see, and what
the agent itself inherited must not shine through.
"""

from __future__ import annotations

from collections.abc import Sequence

from genie.errors import HardwareError
from genie.model.node import GPUInfo, Vendor

# Empty hides everything from CUDA and from ROCr. HIP takes empty for "not set" and then looks at
# CUDA's variable, so it gets a number that no GPU has. SYCL has a filter that discards all GPUs.
_HIDDEN = {
    "CUDA_VISIBLE_DEVICES": "",
    "ROCR_VISIBLE_DEVICES": "",
    "HIP_VISIBLE_DEVICES": "-1",
    "ZE_AFFINITY_MASK": "",
    "ONEAPI_DEVICE_SELECTOR": "!*:gpu",
}


def visible_devices_env(vendor: Vendor, gpu_ids: Sequence[int], infos: Sequence[GPUInfo]) -> dict[str, str]:
    """What to set for a process that holds `gpu_ids` of `vendor`, described by `infos`.

    The order of `gpu_ids` is the order in which the process counts them. Without GPUs, or with CPU
    accelerators only, every GPU is hidden. HardwareError for a GPU that `infos` does not list.
    """
    if vendor is Vendor.CPU or not gpu_ids:
        return dict(_HIDDEN)
    known = {info.gpu_id: info for info in infos if info.vendor is vendor}
    missing = [gpu_id for gpu_id in gpu_ids if gpu_id not in known]
    if missing:
        raise HardwareError(
            f"GPU {missing[0]} ({vendor}) is not in this machine's inventory",
            hint=f"it has {sorted(known) or 'none'}",
        )
    held = [known[gpu_id] for gpu_id in gpu_ids]
    return _HIDDEN | _SHOWN[vendor](held)


def _cuda(held: Sequence[GPUInfo]) -> dict[str, str]:
    if all(info.uuid for info in held):
        return {"CUDA_VISIBLE_DEVICES": ",".join(info.uuid for info in held)}
    # CUDA counts the fastest first unless told to count as NVML does.
    return {"CUDA_VISIBLE_DEVICES": _indices(held), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def _rocm(held: Sequence[GPUInfo]) -> dict[str, str]:
    by_uuid = all(info.uuid for info in held)
    shown = ",".join(info.uuid for info in held) if by_uuid else _indices(held)
    # HIP counts what ROCr has left over, from zero again.
    return {"ROCR_VISIBLE_DEVICES": shown, "HIP_VISIBLE_DEVICES": _renumbered(held)}


def _oneapi(held: Sequence[GPUInfo]) -> dict[str, str]:
    # SYCL counts what the Level Zero mask has left over, from zero again.
    return {
        "ZE_AFFINITY_MASK": _indices(held),
        "ONEAPI_DEVICE_SELECTOR": f"level_zero:{_renumbered(held)}",
    }


_SHOWN = {Vendor.NVIDIA: _cuda, Vendor.AMD: _rocm, Vendor.INTEL: _oneapi}


def _indices(held: Sequence[GPUInfo]) -> str:
    return ",".join(str(info.gpu_id) for info in held)


def _renumbered(held: Sequence[GPUInfo]) -> str:
    return ",".join(str(index) for index in range(len(held)))
