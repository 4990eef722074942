"""Reads NVIDIA GPUs through the driver's library (NVML), without starting a process.

The library is opened at the first reading and stays open, because opening it costs more than many readings.
After an error it is closed and the next reading opens it again, as required after a GPU reset. A call may
hang in the driver, so callers run `read_gpus` in a thread with a timeout, one reading at a time (health.py).

Runs on nodes: standard library only, Python 3.8. Does not decide when nvidia-smi is used instead.
"""

from __future__ import annotations

from typing import Any, Dict  # noqa: UP035 - at run time, Python 3.8 needs this

NVML_LIBRARY_NAME = "libnvidia-ml.so.1"
_NOT_SUPPORTED_ERROR_CODE = 3
_FUNCTION_NOT_FOUND_ERROR_CODE = 13
_WRONG_VERSION_ERROR_CODE = 25
_TEXT_BUFFER_BYTES = 96
_GPUS_MAX = 256
_GPU_TEMPERATURE_SENSOR = 0
_UNCORRECTED, _VOLATILE = 1, 0

Reading = Dict[str, Any]  # noqa: UP006 - evaluated at run time


class NvmlError(Exception):
    """The library is missing or returned an error."""


def read_gpus() -> list[Reading]:
    """Return per GPU: index, name, uuid, total, used (bytes), utilization, temperature, ecc, throttle_mask.

    Unsupported values are None; `throttle_mask` is NVML's bit mask of throttle reasons. Raises NvmlError.
    """
    try:
        if not _OPEN_LIBRARY:
            _OPEN_LIBRARY.append(_NvmlLibrary(NVML_LIBRARY_NAME))
        return _OPEN_LIBRARY[0].read_gpus()
    except NvmlError:
        close_library()
        raise


def close_library() -> None:
    while _OPEN_LIBRARY:
        _OPEN_LIBRARY.pop().close()


class _NvmlLibrary:
    def __init__(self, name: str) -> None:
        try:
            import ctypes

            self._ctypes = ctypes
            self._library = ctypes.CDLL(name)
        except (ImportError, OSError) as error:
            raise NvmlError(str(error)) from None
        self._call_or_raise("nvmlInit_v2")
        self._memory_v1_type, self._memory_v2_type, self._utilization_type = _define_nvml_structures(ctypes)

    def close(self) -> None:
        self._call_and_get_error_code("nvmlShutdown")

    def read_gpus(self) -> list[Reading]:
        count = self._ctypes.c_uint()
        self._call_or_raise("nvmlDeviceGetCount_v2", self._ctypes.byref(count))
        return [self._read_gpu(index) for index in range(min(count.value, _GPUS_MAX))]

    def _read_gpu(self, index: int) -> Reading:
        c = self._ctypes
        gpu = c.c_void_p()
        self._call_or_raise("nvmlDeviceGetHandleByIndex_v2", c.c_uint(index), c.byref(gpu))
        rates = self._utilization_type()
        has_rates = self._call_if_supported("nvmlDeviceGetUtilizationRates", gpu, c.byref(rates))
        degrees, ecc, mask = c.c_uint(), c.c_ulonglong(), c.c_ulonglong()
        has_degrees = self._call_if_supported(
            "nvmlDeviceGetTemperature", gpu, c.c_int(_GPU_TEMPERATURE_SENSOR), c.byref(degrees)
        )
        kind = (c.c_int(_UNCORRECTED), c.c_int(_VOLATILE))
        has_ecc = self._call_if_supported("nvmlDeviceGetTotalEccErrors", gpu, *kind, c.byref(ecc))
        has_mask = self._call_if_supported("nvmlDeviceGetCurrentClocksThrottleReasons", gpu, c.byref(mask))
        total, used = self._read_memory(gpu)
        return {
            "index": index,
            "name": self._read_text("nvmlDeviceGetName", gpu),
            "uuid": self._read_text("nvmlDeviceGetUUID", gpu),
            "total": total,
            "used": used,
            "utilization": float(rates.gpu) if has_rates else None,
            "temperature": float(degrees.value) if has_degrees else None,
            "ecc": ecc.value if has_ecc else None,
            "throttle_mask": mask.value if has_mask else None,
        }

    def _read_memory(self, gpu: Any) -> tuple[int | None, int | None]:
        """Return total and used bytes, like nvidia-smi without the memory reserved by the driver if known."""
        memory = self._memory_v2_type()
        memory.version = self._ctypes.sizeof(memory) | 2 << 24
        code = self._call_and_get_error_code("nvmlDeviceGetMemoryInfo_v2", gpu, self._ctypes.byref(memory))
        if code in (_FUNCTION_NOT_FOUND_ERROR_CODE, _WRONG_VERSION_ERROR_CODE):  # drivers before 510
            memory = self._memory_v1_type()
            code = self._call_and_get_error_code("nvmlDeviceGetMemoryInfo", gpu, self._ctypes.byref(memory))
        if _is_supported_or_raise("nvmlDeviceGetMemoryInfo", code):
            return memory.total, memory.used
        return None, None

    def _read_text(self, function: str, gpu: Any) -> str:
        buffer = self._ctypes.create_string_buffer(_TEXT_BUFFER_BYTES)
        is_supported = self._call_if_supported(function, gpu, buffer, self._ctypes.c_uint(_TEXT_BUFFER_BYTES))
        return buffer.value.decode("utf-8", "replace") if is_supported else ""

    def _call_or_raise(self, function: str, *args: Any) -> None:
        if not self._call_if_supported(function, *args):
            raise NvmlError(f"{function} is not supported")

    def _call_if_supported(self, function: str, *args: Any) -> bool:
        """Call a function; False if this GPU does not support it. Raises NvmlError for other errors."""
        return _is_supported_or_raise(function, self._call_and_get_error_code(function, *args))

    def _call_and_get_error_code(self, function: str, *args: Any) -> int:
        found = getattr(self._library, function, None)
        return _FUNCTION_NOT_FOUND_ERROR_CODE if found is None else int(found(*args))


_OPEN_LIBRARY: list[_NvmlLibrary] = []


def _is_supported_or_raise(function: str, code: int) -> bool:
    if code not in (0, _NOT_SUPPORTED_ERROR_CODE):
        raise NvmlError(f"{function} returned error {code}")
    return code == 0


def _define_nvml_structures(c: Any) -> tuple[Any, Any, Any]:
    """Define nvmlMemory_t, nvmlMemory_v2_t and nvmlUtilization_t, after ctypes has been imported."""
    sizes = [(name, c.c_ulonglong) for name in ("total", "free", "used")]
    newer = [("version", c.c_uint), *((n, c.c_ulonglong) for n in ("total", "reserved", "free", "used"))]
    rates = [("gpu", c.c_uint), ("memory", c.c_uint)]
    named = (("Memory", sizes), ("MemoryWithReserved", newer), ("Rates", rates))
    first, second, third = (type(name, (c.Structure,), {"_fields_": fields}) for name, fields in named)
    return first, second, third
