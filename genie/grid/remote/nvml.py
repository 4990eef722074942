"""NVIDIA GPUs by the driver's own library (NVML), so that no reading starts a program.

The library is opened at the first reading and stays open while this process lives: opening it costs
more than many readings. After an error it is closed, and the next reading opens it again, which is
what a GPU that was reset needs. A call may hang in the driver for good, so `read` belongs into a
thread that somebody else gives its time, one reading at a time (health.py).

Runs on nodes, so: standard library only, Python 3.8. Not for: deciding when nvidia-smi is asked instead.
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
    """The library is missing, or has answered with an error. nvidia-smi has words for it."""


def read() -> list[Reading]:
    """One for each GPU: index, name, uuid, total, used (bytes), utilization, temperature, ecc, held_down.

    What a GPU does not have is None; `held_down` is NVML's mask of why clocks are low. Raises NvmlError.
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
        self._must("nvmlInit_v2")
        self._memory_v1, self._memory_v2, self._rates = _structures(ctypes)

    def close(self) -> None:
        self._call("nvmlShutdown")

    def gpus(self) -> list[Reading]:
        count = self._c.c_uint()
        self._must("nvmlDeviceGetCount_v2", self._c.byref(count))
        return [self._gpu(index) for index in range(min(count.value, _GPUS_MAX))]

    def _gpu(self, index: int) -> Reading:
        c = self._c
        gpu = c.c_void_p()
        self._must("nvmlDeviceGetHandleByIndex_v2", c.c_uint(index), c.byref(gpu))
        rates = self._rates()
        has_rates = self._has("nvmlDeviceGetUtilizationRates", gpu, c.byref(rates))
        heat, ecc, mask = c.c_uint(), c.c_ulonglong(), c.c_ulonglong()
        has_heat = self._has("nvmlDeviceGetTemperature", gpu, c.c_int(_GPU_SENSOR), c.byref(heat))
        kind = (c.c_int(_UNCORRECTED), c.c_int(_VOLATILE))
        has_ecc = self._has("nvmlDeviceGetTotalEccErrors", gpu, *kind, c.byref(ecc))
        has_mask = self._has("nvmlDeviceGetCurrentClocksThrottleReasons", gpu, c.byref(mask))
        total, used = self._memory(gpu)
        return {
            "index": index,
            "name": self._text("nvmlDeviceGetName", gpu),
            "uuid": self._text("nvmlDeviceGetUUID", gpu),
            "total": total,
            "used": used,
            "utilization": float(rates.gpu) if has_rates else None,
            "temperature": float(heat.value) if has_heat else None,
            "ecc": ecc.value if has_ecc else None,
            "held_down": mask.value if has_mask else None,
        }

    def _memory(self, gpu: Any) -> tuple[int | None, int | None]:
        """In use without what the driver keeps for itself, as nvidia-smi has it, where the driver tells."""
        memory = self._memory_v2()
        memory.version = self._c.sizeof(memory) | 2 << 24
        code = self._call("nvmlDeviceGetMemoryInfo_v2", gpu, self._c.byref(memory))
        if code in (_FUNCTION_NOT_FOUND, _WRONG_VERSION):  # drivers before 510
            memory = self._memory_v1()
            code = self._call("nvmlDeviceGetMemoryInfo", gpu, self._c.byref(memory))
        if _is_there("nvmlDeviceGetMemoryInfo", code):
            return memory.total, memory.used
        return None, None

    def _text(self, function: str, gpu: Any) -> str:
        buffer = self._c.create_string_buffer(_TEXT_BYTES)
        there = self._has(function, gpu, buffer, self._c.c_uint(_TEXT_BYTES))
        return buffer.value.decode("utf-8", "replace") if there else ""

    def _must(self, function: str, *args: Any) -> None:
        if not self._has(function, *args):
            raise NvmlError(f"{function} is not supported")

    def _has(self, function: str, *args: Any) -> bool:
        """False for what this GPU does not have. Raises NvmlError for every other error."""
        return _is_there(function, self._call(function, *args))

    def _call(self, function: str, *args: Any) -> int:
        found = getattr(self._functions, function, None)
        return _FUNCTION_NOT_FOUND if found is None else int(found(*args))


_OPEN: list[_Library] = []


def _is_there(function: str, code: int) -> bool:
    if code not in (0, _NOT_SUPPORTED):
        raise NvmlError(f"{function} gave error {code}")
    return code == 0


def _structures(c: Any) -> tuple[Any, Any, Any]:
    """nvmlMemory_t, nvmlMemory_v2_t and nvmlUtilization_t. Here, because ctypes is imported late."""
    sizes = [(name, c.c_ulonglong) for name in ("total", "free", "used")]
    newer = [("version", c.c_uint), *((n, c.c_ulonglong) for n in ("total", "reserved", "free", "used"))]
    rates = [("gpu", c.c_uint), ("memory", c.c_uint)]
    named = (("Memory", sizes), ("MemoryWithReserved", newer), ("Rates", rates))
    first, second, third = (type(name, (c.Structure,), {"_fields_": fields}) for name, fields in named)
    return first, second, third
