"""NVIDIA GPUs through NVML. The only file that knows pynvml.

The library and its handles stay open between reads: opening costs milliseconds, a reading
microseconds. A reading that a GPU does not give (MIG, older parts, no permission) is None. A GPU
that has fallen off the bus stays in the list as not available, with the reason.

Not for: thresholds (limits.py) and threads (call_thread.py): every call here blocks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from genie.errors import HardwareError
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


class NvidiaReader:
    """Reads every NVIDIA GPU of the machine. `gpu_id` belongs to a UUID for the life of the reader.

    So a driver that is reloaded, and counts its GPUs in another order, moves nobody's GPU.
    """

    def __init__(self) -> None:
        """Raises HardwareError where NVML does not open; `hint` says what would help."""
        self._session: _Session | None = _Session()
        self._known: dict[int, GPUInfo] = {}
        self._ids_by_index = list(range(self._session.count))

    @property
    def gpu_count(self) -> int:
        return len(self._ids_by_index)

    def read(self) -> tuple[GPUInfo, ...]:
        """Never raises: trouble is in the entries."""
        try:
            seen = self._read_session()
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

    def _read_session(self) -> dict[int, GPUInfo]:
        if self._session is None:
            self._session = _Session()
            self._ids_by_index = self._ids_after_reopening(self._session)
        seen: dict[int, GPUInfo] = {}
        for index, gpu_id in enumerate(self._ids_by_index):
            if gpu_id >= 0:
                seen[gpu_id] = self._session.read(index, gpu_id=gpu_id, last=self._known.get(gpu_id))
        return seen

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
            return str(self._optional(self._nvml.nvmlDeviceGetUUID, self._handle(index)) or "")
        except self._nvml.NVMLError:
            return ""

    def read(self, index: int, *, gpu_id: int, last: GPUInfo | None) -> GPUInfo:
        try:
            return self._reading(self._handle(index), gpu_id=gpu_id)
        except self._nvml.NVMLError as error:
            if error.value in _SESSION_GONE:
                raise self._broken(error) from error
            unnamed = GPUInfo(gpu_id=gpu_id, name=f"NVIDIA GPU {index}", vendor=Vendor.NVIDIA)
            return _unavailable(last or unnamed, f"NVML: {error}")

    def close(self) -> None:
        try:
            self._nvml.nvmlShutdown()
        except self._nvml.NVMLError as error:
            _log.debug("NVML did not shut down cleanly: %s", error)

    def _reading(self, handle: object, *, gpu_id: int) -> GPUInfo:
        nvml = self._nvml
        # Of NVML's two memory readings the older one: its "used" includes what the driver keeps for
        # itself, so that total minus used is what a process can have.
        memory = self._optional(nvml.nvmlDeviceGetMemoryInfo, handle)
        rates = self._optional(nvml.nvmlDeviceGetUtilizationRates, handle)
        power_mw = self._optional(nvml.nvmlDeviceGetPowerUsage, handle)
        return GPUInfo(
            gpu_id=gpu_id,
            name=str(self._optional(nvml.nvmlDeviceGetName, handle) or "NVIDIA GPU"),
            vendor=Vendor.NVIDIA,
            uuid=str(self._optional(nvml.nvmlDeviceGetUUID, handle) or ""),
            memory_total_bytes=int(memory.total) if memory is not None else 0,
            memory_used_bytes=int(memory.used) if memory is not None else 0,
            utilization_pct=float(rates.gpu) if rates is not None else None,
            temperature_c=self._temperature_c(handle),
            power_w=power_mw / 1000.0 if power_mw is not None else None,
        )

    def _temperature_c(self, handle: object) -> float | None:
        # The first is gone from drivers before 560, the second will be gone from CUDA 14.
        for name in ("nvmlDeviceGetTemperatureV", "nvmlDeviceGetTemperature"):
            call = getattr(self._nvml, name, None)
            value = self._optional(call, handle, _TEMPERATURE_GPU) if call is not None else None
            if value is not None:
                return float(value)
        return None

    def _handle(self, index: int) -> object:
        if index not in self._handles:
            self._handles[index] = self._nvml.nvmlDeviceGetHandleByIndex(index)
        return self._handles[index]

    def _optional(self, call: Callable[..., _T], *arguments: object) -> _T | None:
        """None for a reading that is not to be had; raises NVMLError when GPU or library are gone."""
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


def _unavailable(gpu: GPUInfo, reason: str) -> GPUInfo:
    """What is known for good stays; readings of a GPU that does not answer would be made up."""
    return msgspec.structs.replace(
        gpu,
        available=False,
        reason=reason,
        memory_used_bytes=0,
        utilization_pct=None,
        temperature_c=None,
        power_w=None,
    )
