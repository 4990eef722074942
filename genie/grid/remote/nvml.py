"""Reads NVIDIA GPUs through the driver's library (NVML), without starting a process.

The library is opened at the first reading and stays open, because opening it costs more than many readings.
After an error it is closed and the next reading opens it again, as required after a GPU reset. A call may
hang in the driver, so callers run `read` in a thread with a timeout, one reading at a time (health.py).

Runs on nodes: standard library only, Python 3.8. Does not decide when nvidia-smi is used instead.
"""

from __future__ import annotations

from typing import Any, Dict  # noqa: UP035 - at run time, Python 3.8 needs this

LIBRARY = "libnvidia-ml.so.1"
_NOT_SUPPORTED = 3
_FUNCTION_NOT_FOUND = 13
_WRONG_VERSION = 25
_TEXT_BYTES = 96
_GPUS_MAX = 256
_GPU_SENSOR = 0
_UNCORRECTED, _VOLATILE = 1, 0

Reading = Dict[str, Any]  # noqa: UP006 - evaluated at run time


class NvmlError(Exception):
    """The library is missing or returned an error."""


def read() -> list[Reading]:
    """Return per GPU: index, name, uuid, total, used (bytes), utilization, temperature, ecc, throttle_mask.

    Unsupported values are None; `throttle_mask` is NVML's bit mask of throttle reasons. Raises NvmlError.
    """
    try:
        if not _OPEN:
            _OPEN.append(_Library(LIBRARY))
        return _OPEN[0].gpus()
    except NvmlError:
        close()
        raise


def close() -> None:
    while _OPEN:
        _OPEN.pop().close()


class _Library:
    def __init__(self, name: str) -> None:
        try:
            import ctypes

            self._c = ctypes
            self._functions = ctypes.CDLL(name)
        except (ImportError, OSError) as error:
            raise NvmlError(str(error)) from None
        self._require("nvmlInit_v2")
        self._memory_v1, self._memory_v2, self._rates = _structures(ctypes)

    def close(self) -> None:
        self._call("nvmlShutdown")

    def gpus(self) -> list[Reading]:
        count = self._c.c_uint()
        self._require("nvmlDeviceGetCount_v2", self._c.byref(count))
        return [self._gpu(index) for index in range(min(count.value, _GPUS_MAX))]

    def _gpu(self, index: int) -> Reading:
        c = self._c
        gpu = c.c_void_p()
        self._require("nvmlDeviceGetHandleByIndex_v2", c.c_uint(index), c.byref(gpu))
        rates = self._rates()
        has_rates = self._try("nvmlDeviceGetUtilizationRates", gpu, c.byref(rates))
        degrees, ecc, mask = c.c_uint(), c.c_ulonglong(), c.c_ulonglong()
        has_degrees = self._try("nvmlDeviceGetTemperature", gpu, c.c_int(_GPU_SENSOR), c.byref(degrees))
        kind = (c.c_int(_UNCORRECTED), c.c_int(_VOLATILE))
        has_ecc = self._try("nvmlDeviceGetTotalEccErrors", gpu, *kind, c.byref(ecc))
        has_mask = self._try("nvmlDeviceGetCurrentClocksThrottleReasons", gpu, c.byref(mask))
        total, used = self._memory(gpu)
        return {
            "index": index,
            "name": self._text("nvmlDeviceGetName", gpu),
            "uuid": self._text("nvmlDeviceGetUUID", gpu),
            "total": total,
            "used": used,
            "utilization": float(rates.gpu) if has_rates else None,
            "temperature": float(degrees.value) if has_degrees else None,
            "ecc": ecc.value if has_ecc else None,
            "throttle_mask": mask.value if has_mask else None,
        }

    def _memory(self, gpu: Any) -> tuple[int | None, int | None]:
        """Return total and used bytes, like nvidia-smi without the memory reserved by the driver if known."""
        memory = self._memory_v2()
        memory.version = self._c.sizeof(memory) | 2 << 24
        code = self._call("nvmlDeviceGetMemoryInfo_v2", gpu, self._c.byref(memory))
        if code in (_FUNCTION_NOT_FOUND, _WRONG_VERSION):  # drivers before 510
            memory = self._memory_v1()
            code = self._call("nvmlDeviceGetMemoryInfo", gpu, self._c.byref(memory))
        if _is_supported("nvmlDeviceGetMemoryInfo", code):
            return memory.total, memory.used
        return None, None

    def _text(self, function: str, gpu: Any) -> str:
        buffer = self._c.create_string_buffer(_TEXT_BYTES)
        is_supported = self._try(function, gpu, buffer, self._c.c_uint(_TEXT_BYTES))
        return buffer.value.decode("utf-8", "replace") if is_supported else ""

    def _require(self, function: str, *args: Any) -> None:
        if not self._try(function, *args):
            raise NvmlError(f"{function} is not supported")

    def _try(self, function: str, *args: Any) -> bool:
        """Call a function; False if this GPU does not support it. Raises NvmlError for other errors."""
        return _is_supported(function, self._call(function, *args))

    def _call(self, function: str, *args: Any) -> int:
        found = getattr(self._functions, function, None)
        return _FUNCTION_NOT_FOUND if found is None else int(found(*args))


_OPEN: list[_Library] = []


def _is_supported(function: str, code: int) -> bool:
    if code not in (0, _NOT_SUPPORTED):
        raise NvmlError(f"{function} returned error {code}")
    return code == 0


def _structures(c: Any) -> tuple[Any, Any, Any]:
    """Define nvmlMemory_t, nvmlMemory_v2_t and nvmlUtilization_t, after ctypes has been imported."""
    sizes = [(name, c.c_ulonglong) for name in ("total", "free", "used")]
    newer = [("version", c.c_uint), *((n, c.c_ulonglong) for n in ("total", "reserved", "free", "used"))]
    rates = [("gpu", c.c_uint), ("memory", c.c_uint)]
    named = (("Memory", sizes), ("MemoryWithReserved", newer), ("Rates", rates))
    first, second, third = (type(name, (c.Structure,), {"_fields_": fields}) for name, fields in named)
    return first, second, third
