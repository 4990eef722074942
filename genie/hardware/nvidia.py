"""NVIDIA GPUs through NVML. The only module that uses pynvml. All calls block.

The library and its handles stay open between reads: opening takes milliseconds, a reading microseconds. An
unsupported reading (MIG, older GPUs, no permission) is None. A GPU that has fallen off the bus, is throttled
by its hardware or needs a reset stays in the list as unavailable, with the reason.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection
from functools import partial
from typing import Any, TypeVar

import msgspec

from genie.errors import HardwareError
from genie.hardware.memory_outside_cluster import GpuProcess, bytes_used_outside_cluster, is_descendant
from genie.hardware.topology import BusAddress, GpuLinks, group_into_islands
from genie.model.node import GPUInfo, Vendor

_log = logging.getLogger(__name__)

_T = TypeVar("_T")

# Return codes of nvml.h.
_NVML_UNINITIALIZED = 1
_NVML_DRIVER_NOT_LOADED = 9
_NVML_LIBRARY_NOT_FOUND = 12
_NVML_GPU_IS_LOST = 15
_NVML_RESET_REQUIRED = 16
_NVML_VERSION_MISMATCH = 18
_NVML_GPU_NOT_FOUND = 28

_NVML_GPU_LOST_CODES = (_NVML_GPU_IS_LOST, _NVML_RESET_REQUIRED, _NVML_GPU_NOT_FOUND)
_NVML_LIBRARY_LOST_CODES = (_NVML_UNINITIALIZED, _NVML_DRIVER_NOT_LOADED, _NVML_VERSION_MISMATCH)

_NVML_ERROR_HINTS = {
    _NVML_LIBRARY_NOT_FOUND: "install the NVIDIA driver if this machine has an NVIDIA GPU",
    _NVML_DRIVER_NOT_LOADED: "load the driver with 'modprobe nvidia', or install it",
    _NVML_VERSION_MISMATCH: "restart the machine: the loaded driver and its libraries differ in version",
}

_NVML_TEMPERATURE_GPU = 0
_NVML_AFFINITY_SCOPE_NODE = 0
_NUMA_MASK_WORDS, _NUMA_MASK_WORD_BITS = 16, 64
_NVLINKS_MAX = 36
_NVLINK_TO_NPU, _NVLINK_TO_SWITCH = 1, 2
_NVML_FIELD_RECOVERY_ACTION = 230

# Only protective throttling by the hardware. The driver keeping a busy GPU within its power and temperature
# limits is normal.
_THROTTLE_REASONS = {
    0x40: "throttled by its hardware: too hot",
    0x80: "throttled by its hardware: power brake of the power supply",
    0x08: "throttled by its hardware",
}
_RECOVERY_ACTIONS = {
    1: "a reset of the GPU",
    2: "a restart of the machine",
    3: "the end of peer-to-peer traffic",
    4: "draining and a reset of the GPU",
    5: "recovery of its IMEX domain",
    6: "a reset of its bus",
    7: "a restart of the system",
}


class NvidiaReader:
    """Reads all NVIDIA GPUs of the machine. A `gpu_id` belongs to one UUID as long as the reader exists.

    So IDs do not change if the driver is reloaded and enumerates the GPUs in another order. Static properties
    (name, memory, capability, island, NUMA node) are kept while a GPU is lost, because the scheduler relies
    on them.
    """

    def __init__(self) -> None:
        """Raises HardwareError if NVML cannot be opened, with a hint."""
        self._session: _NvmlSession | None = _NvmlSession()
        self._last_readings: dict[int, GPUInfo] = {}
        self._gpu_ids_by_index = list(range(self._session.gpu_count))
        self._island_by_gpu: dict[int, int] = {}
        """Of the GPUs whose links were read. They are read once, because it takes dozens of calls."""

    @property
    def gpu_count(self) -> int:
        return len(self._gpu_ids_by_index)

    def read(self, held: Collection[int] = ()) -> tuple[GPUInfo, ...]:
        """Never raises: errors are in the entries. `held` are the GPUs with jobs of this process."""
        try:
            seen = self._read_all_gpus(held)
            absent = "the driver no longer lists this GPU"
        except HardwareError as error:
            self.close()
            seen, absent = {}, str(error)
        for gpu_id, gpu in self._last_readings.items():
            if gpu_id not in seen:
                seen[gpu_id] = _mark_unavailable(gpu, absent)
        self._last_readings = dict(sorted(seen.items()))
        return tuple(self._last_readings.values())

    def close(self) -> None:
        """Idempotent; a later read opens NVML again."""
        session, self._session = self._session, None
        if session is not None:
            session.close()

    def _read_all_gpus(self, held: Collection[int]) -> dict[int, GPUInfo]:
        if self._session is None:
            self._session = _NvmlSession()
            self._gpu_ids_by_index = self._gpu_ids_after_reopening(self._session)
        seen: dict[int, GPUInfo] = {}
        for index, gpu_id in enumerate(self._gpu_ids_by_index):
            if gpu_id >= 0:
                seen[gpu_id] = self._session.read(
                    index, gpu_id=gpu_id, last=self._last_readings.get(gpu_id), is_allocated=gpu_id in held
                )
        self._update_islands(self._session)
        return {
            gpu_id: msgspec.structs.replace(gpu, island=self._island_by_gpu.get(gpu_id, gpu_id))
            for gpu_id, gpu in seen.items()
        }

    def _update_islands(self, session: _NvmlSession) -> None:
        """Reads the links of GPUs that respond for the first time. Other islands do not change."""
        indices = {gpu_id: index for index, gpu_id in enumerate(self._gpu_ids_by_index) if gpu_id >= 0}
        found = {
            gpu_id: session.try_read_links(indices[gpu_id])
            for gpu_id in indices.keys() - self._island_by_gpu.keys()
        }
        if all(links is None for links in found.values()):
            return
        found |= {
            gpu_id: session.try_read_links(indices[gpu_id])
            for gpu_id in indices.keys() & self._island_by_gpu.keys()
        }
        fresh = group_into_islands({gpu_id: links for gpu_id, links in found.items() if links is not None})
        numbers = {
            island: self._island_by_gpu[gpu_id]
            for gpu_id, island in fresh.items()
            if gpu_id in self._island_by_gpu
        }
        for gpu_id, island in fresh.items():
            self._island_by_gpu.setdefault(gpu_id, numbers.get(island, island))

    def _gpu_ids_after_reopening(self, session: _NvmlSession) -> list[int]:
        """IDs by index; -1 for a GPU without a readable UUID, which is among the known ones."""
        ids = {gpu.uuid: gpu.gpu_id for gpu in self._last_readings.values() if gpu.uuid}
        found: list[int] = []
        for index in range(session.gpu_count):
            uuid = session.read_uuid(index)
            if uuid and uuid not in ids:
                ids[uuid] = max([*self._last_readings, *ids.values()], default=-1) + 1
            found.append(ids.get(uuid, -1))
        return found


class _NvmlSession:
    """NVML between init and shutdown. Raises HardwareError if the library fails."""

    def __init__(self) -> None:
        try:
            import pynvml
        except ImportError as error:
            raise HardwareError(
                f"could not import the Python module pynvml: {error}", hint="pip install nvidia-ml-py"
            ) from error
        self._nvml: Any = pynvml  # Any: the module has no types
        self._handles: dict[int, object] = {}
        self._call_nvml(pynvml.nvmlInit)
        try:
            self.gpu_count = int(self._call_nvml(pynvml.nvmlDeviceGetCount))
        except HardwareError:
            self.close()
            raise

    def read_uuid(self, index: int) -> str:
        """Empty if it cannot be read."""
        try:
            return str(self._call_if_supported("nvmlDeviceGetUUID", self._device_handle(index)) or "")
        except self._nvml.NVMLError:
            return ""

    def read(self, index: int, *, gpu_id: int, last: GPUInfo | None, is_allocated: bool) -> GPUInfo:
        last = last or GPUInfo(gpu_id=gpu_id, name=f"NVIDIA GPU {index}", vendor=Vendor.NVIDIA)
        try:
            return self._read_gpu(self._device_handle(index), last=last, is_allocated=is_allocated)
        except self._nvml.NVMLError as error:
            if error.value in _NVML_LIBRARY_LOST_CODES:
                raise self._to_hardware_error(error) from error
            return _mark_unavailable(last, f"NVML: {error}")

    def try_read_links(self, index: int) -> GpuLinks | None:
        """None if the GPU does not respond."""
        try:
            return self._read_links(self._device_handle(index))
        except self._nvml.NVMLError:
            return None

    def close(self) -> None:
        try:
            self._nvml.nvmlShutdown()
        except self._nvml.NVMLError as error:
            _log.debug("NVML did not shut down cleanly: %s", error)

    def _read_gpu(self, handle: object, *, last: GPUInfo, is_allocated: bool) -> GPUInfo:
        # The first version of the memory info: its "used" includes memory reserved by the driver, so that
        # total minus used is available to processes.
        memory = self._call_if_supported("nvmlDeviceGetMemoryInfo", handle)
        used_bytes = int(memory.used) if memory is not None else 0
        rates = self._call_if_supported("nvmlDeviceGetUtilizationRates", handle)
        power_mw = self._call_if_supported("nvmlDeviceGetPowerUsage", handle)
        fault = self._why_unavailable(handle)
        return msgspec.structs.replace(
            last,
            name=str(self._call_if_supported("nvmlDeviceGetName", handle) or last.name),
            uuid=str(self._call_if_supported("nvmlDeviceGetUUID", handle) or last.uuid),
            memory_total_bytes=int(memory.total) if memory is not None else last.memory_total_bytes,
            memory_used_bytes=used_bytes,
            memory_outside_bytes=bytes_used_outside_cluster(
                used_bytes,
                self._read_processes(handle) if is_allocated else None,
                is_allocated=is_allocated,
                is_ours=partial(is_descendant, root_pid=os.getpid()),
            ),
            utilization_pct=float(rates.gpu) if rates is not None else None,
            temperature_c=self._read_temperature_c(handle),
            power_w=power_mw / 1000.0 if power_mw is not None else None,
            capability=self._call_if_supported("nvmlDeviceGetCudaComputeCapability", handle)
            or last.capability,
            numa=self._read_numa_node(handle, last=last.numa),
            available=not fault,
            reason=fault,
        )

    def _read_temperature_c(self, handle: object) -> float | None:
        # Drivers before 560 lack the first function, CUDA 14 will lack the second.
        for name in ("nvmlDeviceGetTemperatureV", "nvmlDeviceGetTemperature"):
            value = self._call_if_supported(name, handle, _NVML_TEMPERATURE_GPU)
            if value is not None:
                return float(value)
        return None

    def _why_unavailable(self, handle: object) -> str:
        """Why the GPU is unavailable; empty if no fault is reported."""
        action = self._read_recovery_action(handle)
        if action:
            return f"the driver requests {_RECOVERY_ACTIONS.get(action, f'recovery action {action}')}"
        _, _, is_pending, has_failed = self._call_if_supported("nvmlDeviceGetRemappedRows", handle) or (
            0,
            0,
            0,
            0,
        )
        if has_failed:
            return "uncorrectable memory errors: row remapping failed"
        # GPUs before Ampere retire pages instead of remapping rows.
        if is_pending or self._call_if_supported("nvmlDeviceGetRetiredPagesPendingStatus", handle):
            return "memory errors: the repair needs a reset of the GPU"
        throttled = self._read_throttle_reason_bits(handle)
        return next((reason for bit, reason in _THROTTLE_REASONS.items() if throttled & bit), "")

    def _read_throttle_reason_bits(self, handle: object) -> int:
        # The second name is that of drivers before 535.
        for name in ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"):
            value = self._call_if_supported(name, handle)
            if value is not None:
                return int(value)
        return 0

    def _read_recovery_action(self, handle: object) -> int:
        fields = self._call_if_supported("nvmlDeviceGetFieldValues", handle, [_NVML_FIELD_RECOVERY_ACTION])
        return int(fields[0].value.uiVal) if fields is not None and fields[0].nvmlReturn == 0 else 0

    def _read_numa_node(self, handle: object, *, last: int) -> int:
        """The lowest NUMA node close to the GPU."""
        words = self._call_if_supported(
            "nvmlDeviceGetMemoryAffinity", handle, _NUMA_MASK_WORDS, _NVML_AFFINITY_SCOPE_NODE
        )
        nodes = sum(int(word) << place * _NUMA_MASK_WORD_BITS for place, word in enumerate(words or ()))
        return (nodes & -nodes).bit_length() - 1 if nodes else last

    def _read_processes(self, handle: object) -> list[GpuProcess] | None:
        """The processes with memory on the GPU; None if the driver does not list them."""
        found: dict[int, GpuProcess] = {}
        listed = False
        for kind in ("Compute", "MPSCompute", "Graphics"):
            # The versioned name: the other one does not raise NVMLError on older drivers.
            several = self._call_if_supported(f"nvmlDeviceGet{kind}RunningProcesses_v3", handle)
            listed |= several is not None
            # A process may be in two lists with the same figure.
            found = {one.pid: GpuProcess(one.pid, one.usedGpuMemory) for one in several or ()} | found
        return list(found.values()) if listed else None

    def _read_links(self, handle: object) -> GpuLinks:
        own = self._call_if_supported("nvmlDeviceGetPciInfo_v3", handle)
        peers: set[BusAddress] = set()
        has_nvswitch_link = False
        for link in range(_NVLINKS_MAX):
            if not self._call_if_supported("nvmlDeviceGetNvLinkState", handle, link):
                continue
            kind = self._call_if_supported("nvmlDeviceGetNvLinkRemoteDeviceType", handle, link)
            if kind == _NVLINK_TO_SWITCH:
                has_nvswitch_link = True
            elif kind != _NVLINK_TO_NPU:
                other = self._call_if_supported("nvmlDeviceGetNvLinkRemotePciInfo", handle, link)
                # In a virtual machine the peer of a link may be hidden.
                if other is not None and any(address := _bus_address(other)):
                    peers.add(address)
        return GpuLinks(None if own is None else _bus_address(own), frozenset(peers), has_nvswitch_link)

    def _device_handle(self, index: int) -> object:
        if index not in self._handles:
            self._handles[index] = self._nvml.nvmlDeviceGetHandleByIndex(index)
        return self._handles[index]

    def _call_if_supported(self, name: str, *arguments: object) -> Any:  # Any: whatever pynvml returns
        """None for an unsupported reading. Raises NVMLError if the GPU or the library is lost."""
        call = getattr(self._nvml, name, None)
        if call is None:
            return None
        try:
            return call(*arguments)
        except self._nvml.NVMLError as error:
            if error.value in _NVML_GPU_LOST_CODES or error.value in _NVML_LIBRARY_LOST_CODES:
                raise
            return None

    def _call_nvml(self, call: Callable[[], _T]) -> _T:
        try:
            return call()
        except self._nvml.NVMLError as error:
            raise self._to_hardware_error(error) from error

    def _to_hardware_error(self, error: Any) -> HardwareError:
        return HardwareError(f"NVML: {error}", hint=_NVML_ERROR_HINTS.get(error.value, ""))


def _bus_address(pci: Any) -> BusAddress:
    return (int(pci.domain), int(pci.bus), int(pci.device))


def _mark_unavailable(gpu: GPUInfo, reason: str) -> GPUInfo:
    """Keeps the static properties and clears the readings."""
    return msgspec.structs.replace(
        gpu,
        available=False,
        reason=reason,
        memory_used_bytes=0,
        memory_outside_bytes=0,
        utilization_pct=None,
        temperature_c=None,
        power_w=None,
    )
