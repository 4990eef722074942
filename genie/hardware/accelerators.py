"""The inventory of accelerators of this machine.

GPUs if there are any, otherwise the configured number of CPU accelerators. The first reading decides which:
allocations refer to `gpu_id`, so a driver that is installed while an agent runs must not replace the hardware
behind an ID.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection
from functools import partial
from types import TracebackType
from typing import Protocol

from genie.errors import HardwareError
from genie.hardware.cpu import CpuReader
from genie.hardware.limits import RecoveryTracker, mark_unavailable_if_busy
from genie.hardware.nvidia import NvidiaReader
from genie.model.node import GPUInfo
from genie.processes.call_thread import CLOSE_TIMEOUT_S, CallThread

_log = logging.getLogger(__name__)

ACCELERATOR_READ_TIMEOUT_S = 10.0


def inventory(cpu_accelerators: int) -> tuple[GPUInfo, ...]:
    """Reads the accelerators once and closes the drivers. Blocks."""
    with Inventory(cpu_accelerators) as reader:
        return reader.read()


class Inventory:
    """Accelerators that are read repeatedly; the owner closes it. Thread-safe.

    The first read opens the drivers. A missing driver is not an error; `no_nvidia_gpu_reason` has the reason.
    """

    def __init__(self, cpu_accelerators: int) -> None:
        assert cpu_accelerators >= 0
        self.no_nvidia_gpu_reason = ""
        self._cpu_accelerators = cpu_accelerators
        self._lock = threading.Lock()
        self._reading_thread = CallThread("genie-hardware")
        self._reader: _AcceleratorReader | None = None
        self._recovery_tracker = RecoveryTracker()

    def read(self, held: Collection[int] = ()) -> tuple[GPUInfo, ...]:
        """All accelerators, by `gpu_id`. Blocks as long as the driver does; never raises.

        `held` are those with jobs of this process. The memory of these jobs is not outside memory, and the
        load of these accelerators does not make them unavailable.
        """
        with self._lock:
            if self._reader is None:
                self._reader = self._open_reader()
            readings = [
                self._recovery_tracker.mark_unavailable_if_recovering(gpu) for gpu in self._reader.read(held)
            ]
            return tuple(gpu if gpu.gpu_id in held else mark_unavailable_if_busy(gpu) for gpu in readings)

    async def read_async(
        self, held: Collection[int] = (), *, timeout_s: float = ACCELERATOR_READ_TIMEOUT_S
    ) -> tuple[GPUInfo, ...]:
        """read() on a separate thread. Raises HardwareError if the driver does not respond in time."""
        return await self._reading_thread.call(
            partial(self.read, held), what="reading the accelerators", timeout_s=timeout_s
        )

    def close(self) -> None:
        """Idempotent."""
        self._reading_thread.close()
        # A thread that is stuck in the driver holds the lock; then nothing can be closed.
        if self._lock.acquire(timeout=CLOSE_TIMEOUT_S):
            try:
                if self._reader is not None:
                    self._reader.close()
            finally:
                self._lock.release()

    def __enter__(self) -> Inventory:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open_reader(self) -> _AcceleratorReader:
        try:
            reader = NvidiaReader()
        except HardwareError as error:
            self.no_nvidia_gpu_reason = str(error)
        else:
            if reader.gpu_count:
                return reader
            self.no_nvidia_gpu_reason = "NVML lists no GPU"
            reader.close()
        _log.debug("no NVIDIA GPU: %s", self.no_nvidia_gpu_reason)
        return CpuReader(self._cpu_accelerators)


class _AcceleratorReader(Protocol):
    def read(self, held: Collection[int] = ()) -> tuple[GPUInfo, ...]: ...

    def close(self) -> None: ...
