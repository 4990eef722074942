"""NVIDIA GPUs through NVML. The only file that knows pynvml.

The library and its handles stay open between reads: opening costs milliseconds, a reading
microseconds. A reading that a GPU does not give (MIG, older parts, no permission) is None. A GPU
that has fallen off the bus stays in the list as not available, with the reason; so does one that
its hardware slows down, or that needs a reset.

Not for: thresholds (limits.py), which memory is whose (outside.py) and threads (call_thread.py):
every call here blocks.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection
from functools import partial
from typing import Any, TypeVar

import msgspec

from genie.errors import HardwareError
from genie.hardware.outside import GpuProcess, descends, outside_bytes
from genie.hardware.topology import BusAddress, GpuLinks, islands
from genie.model.node import GPUInfo, Vendor

_log = logging.getLogger(__name__)

_T = TypeVar("_T")

# Numbers of NVML's own list in nvml.h, which never change.
_UNINITIALIZED = 1
_DRIVER_NOT_LOADED = 9
_LIBRARY_NOT_FOUND = 12
_GPU_IS_LOST = 15
_RESET_REQUIRED = 16
_VERSION_MISMATCH = 18
_GPU_NOT_FOUND = 28

_GPU_GONE = (_GPU_IS_LOST, _RESET_REQUIRED, _GPU_NOT_FOUND)
_SESSION_GONE = (_UNINITIALIZED, _DRIVER_NOT_LOADED, _VERSION_MISMATCH)

_FIXES = {
    _LIBRARY_NOT_FOUND: "install the NVIDIA driver if this machine has an NVIDIA GPU",
    _DRIVER_NOT_LOADED: "load the driver with 'modprobe nvidia', or install it",
    _VERSION_MISMATCH: "restart the machine: the loaded driver and its libraries differ in version",
}

_TEMPERATURE_GPU = 0
_AFFINITY_SCOPE_NODE = 0
_NUMA_WORDS, _NUMA_WORD_BITS = 16, 64
_LINKS_MAX = 36
_LINK_TO_NPU, _LINK_TO_SWITCH = 1, 2
_FIELD_RECOVERY_ACTION = 230

# Only what the hardware itself does against damage. That the driver holds a busy GPU within its power
# or its temperature is everyday, and no reason to send work elsewhere.
_SLOWED = {
    0x40: "slowed down by its hardware: too hot",
    0x80: "slowed down by its hardware: the power supply asks for it",
    0x08: "slowed down by its hardware",
}
_RECOVERY_ACTIONS = {
    1: "a reset of the GPU",
    2: "a restart of the machine",
    3: "an end to peer-to-peer traffic",
    4: "to be drained and reset",
    5: "its IMEX domain recovered",
    6: "a reset of its bus",
    7: "a restart of the system",
}


class NvidiaReader:
    """Reads every NVIDIA GPU of the machine. `gpu_id` belongs to a UUID for the life of the reader.

    So a driver that is reloaded, and counts its GPUs in another order, moves nobody's GPU. What a GPU is
    (its name, memory, capability, island, NUMA node) is what was read of it first or last, not what
    happens to be read while it is lost: who shares GPUs out relies on it.
    """

    def __init__(self) -> None:
        """Raises HardwareError where NVML does not open; `hint` says what would help."""
        self._session: _Session | None = _Session()
        self._known: dict[int, GPUInfo] = {}
        self._ids_by_index = list(range(self._session.count))
        self._islands: dict[int, int] = {}
        """Of those whose links have been looked at, which is done once: it takes dozens of calls."""

    @property
    def gpu_count(self) -> int:
        return len(self._ids_by_index)

    def read(self, held: Collection[int] = ()) -> tuple[GPUInfo, ...]:
        """Never raises: trouble is in the entries. `held` are those on which jobs of this process run."""
        try:
            seen = self._read_session(held)
            absent = "the driver no longer lists this GPU"
        except HardwareError as error:
            self.close()
            seen, absent = {}, str(error)
        for gpu_id, gpu in self._known.items():
            if gpu_id not in seen:
                seen[gpu_id] = _unavailable(gpu, absent)
        self._known = dict(sorted(seen.items()))
        return tuple(self._known.values())

    def close(self) -> None:
        """Idempotent; a later read opens NVML again."""
        session, self._session = self._session, None
        if session is not None:
            session.close()

    def _read_session(self, held: Collection[int]) -> dict[int, GPUInfo]:
        if self._session is None:
            self._session = _Session()
            self._ids_by_index = self._ids_after_reopening(self._session)
        seen: dict[int, GPUInfo] = {}
        for index, gpu_id in enumerate(self._ids_by_index):
            if gpu_id >= 0:
                seen[gpu_id] = self._session.read(
                    index, gpu_id=gpu_id, last=self._known.get(gpu_id), is_held=gpu_id in held
                )
        self._look_at_links(self._session)
        return {
            gpu_id: msgspec.structs.replace(gpu, island=self._islands.get(gpu_id, gpu_id))
            for gpu_id, gpu in seen.items()
        }

    def _look_at_links(self, session: _Session) -> None:
        """When a GPU answers for the first time. It joins the others, which stay where they are."""
        indices = {gpu_id: index for index, gpu_id in enumerate(self._ids_by_index) if gpu_id >= 0}
        found = {gpu_id: session.links(indices[gpu_id]) for gpu_id in indices.keys() - self._islands.keys()}
        if all(links is None for links in found.values()):
            return
        found |= {gpu_id: session.links(indices[gpu_id]) for gpu_id in indices.keys() & self._islands.keys()}
        fresh = islands({gpu_id: links for gpu_id, links in found.items() if links is not None})
        numbers = {
            island: self._islands[gpu_id] for gpu_id, island in fresh.items() if gpu_id in self._islands
        }
        for gpu_id, island in fresh.items():
            self._islands.setdefault(gpu_id, numbers.get(island, island))

    def _ids_after_reopening(self, session: _Session) -> list[int]:
        """-1 for one that cannot say who it is: it is among the known, which are listed anyway."""
        ids = {gpu.uuid: gpu.gpu_id for gpu in self._known.values() if gpu.uuid}
        found: list[int] = []
        for index in range(session.count):
            uuid = session.uuid(index)
            if uuid and uuid not in ids:
                ids[uuid] = max([*self._known, *ids.values()], default=-1) + 1
            found.append(ids.get(uuid, -1))
        return found


class _Session:
    """NVML between init and shutdown. Raises HardwareError when the whole library has gone bad."""

    def __init__(self) -> None:
        try:
            import pynvml
        except ImportError as error:
            raise HardwareError(
                f"the Python module pynvml does not load: {error}", hint="pip install nvidia-ml-py"
            ) from error
        self._nvml: Any = pynvml  # Any: the module has no types
        self._handles: dict[int, object] = {}
        self._whole(pynvml.nvmlInit)
        try:
            self.count = int(self._whole(pynvml.nvmlDeviceGetCount))
        except HardwareError:
            self.close()
            raise

    def uuid(self, index: int) -> str:
        """Empty when the GPU does not say."""
        try:
            return str(self._optional("nvmlDeviceGetUUID", self._handle(index)) or "")
        except self._nvml.NVMLError:
            return ""

    def read(self, index: int, *, gpu_id: int, last: GPUInfo | None, is_held: bool) -> GPUInfo:
        last = last or GPUInfo(gpu_id=gpu_id, name=f"NVIDIA GPU {index}", vendor=Vendor.NVIDIA)
        try:
            return self._reading(self._handle(index), last=last, is_held=is_held)
        except self._nvml.NVMLError as error:
            if error.value in _SESSION_GONE:
                raise self._broken(error) from error
            return _unavailable(last, f"NVML: {error}")

    def links(self, index: int) -> GpuLinks | None:
        """None of a GPU that does not answer."""
        try:
            return self._links(self._handle(index))
        except self._nvml.NVMLError:
            return None

    def close(self) -> None:
        try:
            self._nvml.nvmlShutdown()
        except self._nvml.NVMLError as error:
            _log.debug("NVML did not shut down cleanly: %s", error)

    def _reading(self, handle: object, *, last: GPUInfo, is_held: bool) -> GPUInfo:
        # Of NVML's two memory readings the older one: its "used" includes what the driver keeps for
        # itself, so that total minus used is what a process can have.
        memory = self._optional("nvmlDeviceGetMemoryInfo", handle)
        used_bytes = int(memory.used) if memory is not None else 0
        rates = self._optional("nvmlDeviceGetUtilizationRates", handle)
        power_mw = self._optional("nvmlDeviceGetPowerUsage", handle)
        fault = self._fault(handle)
        return msgspec.structs.replace(
            last,
            name=str(self._optional("nvmlDeviceGetName", handle) or last.name),
            uuid=str(self._optional("nvmlDeviceGetUUID", handle) or last.uuid),
            memory_total_bytes=int(memory.total) if memory is not None else last.memory_total_bytes,
            memory_used_bytes=used_bytes,
            memory_outside_bytes=outside_bytes(
                used_bytes,
                self._processes(handle) if is_held else None,
                is_held=is_held,
                is_ours=partial(descends, root_pid=os.getpid()),
            ),
            utilization_pct=float(rates.gpu) if rates is not None else None,
            temperature_c=self._temperature_c(handle),
            power_w=power_mw / 1000.0 if power_mw is not None else None,
            capability=self._optional("nvmlDeviceGetCudaComputeCapability", handle) or last.capability,
            numa=self._numa(handle, last=last.numa),
            available=not fault,
            reason=fault,
        )

    def _temperature_c(self, handle: object) -> float | None:
        # The first is gone from drivers before 560, the second will be gone from CUDA 14.
        for name in ("nvmlDeviceGetTemperatureV", "nvmlDeviceGetTemperature"):
            value = self._optional(name, handle, _TEMPERATURE_GPU)
            if value is not None:
                return float(value)
        return None

    def _fault(self, handle: object) -> str:
        """Why no work should be sent to it; empty when it is well, or does not say."""
        action = self._recovery_action(handle)
        if action:
            return f"the driver asks for {_RECOVERY_ACTIONS.get(action, f'recovery action {action}')}"
        _, _, is_pending, has_failed = self._optional("nvmlDeviceGetRemappedRows", handle) or (0, 0, 0, 0)
        if has_failed:
            return "memory errors that could not be repaired: a row was not remapped"
        # Before the Ampere generation pages were retired where rows are remapped now.
        if is_pending or self._optional("nvmlDeviceGetRetiredPagesPendingStatus", handle):
            return "memory errors that wait for a reset of the GPU to be repaired"
        slowed = self._clocks_reasons(handle)
        return next((reason for bit, reason in _SLOWED.items() if slowed & bit), "")

    def _clocks_reasons(self, handle: object) -> int:
        # The second is the name of drivers before 535.
        for name in ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"):
            value = self._optional(name, handle)
            if value is not None:
                return int(value)
        return 0

    def _recovery_action(self, handle: object) -> int:
        fields = self._optional("nvmlDeviceGetFieldValues", handle, [_FIELD_RECOVERY_ACTION])
        return int(fields[0].value.uiVal) if fields is not None and fields[0].nvmlReturn == 0 else 0

    def _numa(self, handle: object, *, last: int) -> int:
        """The lowest NUMA node that the GPU is near."""
        words = self._optional("nvmlDeviceGetMemoryAffinity", handle, _NUMA_WORDS, _AFFINITY_SCOPE_NODE)
        near = sum(int(word) << place * _NUMA_WORD_BITS for place, word in enumerate(words or ()))
        return (near & -near).bit_length() - 1 if near else last

    def _processes(self, handle: object) -> list[GpuProcess] | None:
        """Those that hold memory on it; None where the driver does not list them."""
        found: dict[int, GpuProcess] = {}
        listed = False
        for kind in ("Compute", "MPSCompute", "Graphics"):
            # By the name with its version: without, pynvml raises what is no NVMLError on older drivers.
            several = self._optional(f"nvmlDeviceGet{kind}RunningProcesses_v3", handle)
            listed |= several is not None
            # One that both computes and draws is in two lists with the same figure.
            found = {one.pid: GpuProcess(one.pid, one.usedGpuMemory) for one in several or ()} | found
        return list(found.values()) if listed else None

    def _links(self, handle: object) -> GpuLinks:
        own = self._optional("nvmlDeviceGetPciInfo_v3", handle)
        peers: set[BusAddress] = set()
        is_switched = False
        for link in range(_LINKS_MAX):
            if not self._optional("nvmlDeviceGetNvLinkState", handle, link):
                continue
            kind = self._optional("nvmlDeviceGetNvLinkRemoteDeviceType", handle, link)
            if kind == _LINK_TO_SWITCH:
                is_switched = True
            elif kind != _LINK_TO_NPU:
                other = self._optional("nvmlDeviceGetNvLinkRemotePciInfo", handle, link)
                # A virtual machine may be told of a link, and not where it leads.
                if other is not None and any(address := _address(other)):
                    peers.add(address)
        return GpuLinks(None if own is None else _address(own), frozenset(peers), is_switched)

    def _handle(self, index: int) -> object:
        if index not in self._handles:
            self._handles[index] = self._nvml.nvmlDeviceGetHandleByIndex(index)
        return self._handles[index]

    def _optional(self, name: str, *arguments: object) -> Any:  # Any: whatever pynvml returns
        """None for a reading that is not to be had; raises NVMLError when GPU or library are gone."""
        call = getattr(self._nvml, name, None)
        if call is None:
            return None
        try:
            return call(*arguments)
        except self._nvml.NVMLError as error:
            if error.value in _GPU_GONE or error.value in _SESSION_GONE:
                raise
            return None

    def _whole(self, call: Callable[[], _T]) -> _T:
        try:
            return call()
        except self._nvml.NVMLError as error:
            raise self._broken(error) from error

    def _broken(self, error: Any) -> HardwareError:
        return HardwareError(f"NVML: {error}", hint=_FIXES.get(error.value, ""))


def _address(pci: Any) -> BusAddress:
    return (int(pci.domain), int(pci.bus), int(pci.device))


def _unavailable(gpu: GPUInfo, reason: str) -> GPUInfo:
    """What is known for good stays; readings of a GPU that does not answer would be made up."""
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
