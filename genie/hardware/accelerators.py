"""The list of accelerators of this machine, read once or again and again.

GPUs where there are any, otherwise as many CPU accelerators as configured. Which of the two is
decided by the first reading and stays: allocations refer to `gpu_id`, and a driver that is
installed under a running agent must not put other hardware under the same number.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection
from functools import partial
from types import TracebackType
from typing import Protocol

from genie.errors import HardwareError
from genie.hardware.call_thread import CLOSE_TIMEOUT_S, CallThread
from genie.hardware.cpu import CpuReader
from genie.hardware.limits import Convalescence, with_verdict
from genie.hardware.nvidia import NvidiaReader
from genie.model.node import GPUInfo

_log = logging.getLogger(__name__)

READ_TIMEOUT_S = 10.0


def inventory(cpu_accelerators: int) -> tuple[GPUInfo, ...]:
    """One reading, with everything closed again afterwards. Blocks."""
    with Inventory(cpu_accelerators) as opened:
        return opened.read()


class Inventory:
    """Accelerators to be read repeatedly; the owner closes it. Safe to use from several threads.

    Drivers are opened by the first read. A missing driver is not an error: `absent_reason` keeps why.
    """

    def __init__(self, cpu_accelerators: int) -> None:
        assert cpu_accelerators >= 0
        self.absent_reason = ""
        self._cpu_accelerators = cpu_accelerators
        self._lock = threading.Lock()
        self._thread = CallThread("genie-hardware")
        self._reader: _Reader | None = None
        self._convalescence = Convalescence()

    def read(self, held: Collection[int] = ()) -> tuple[GPUInfo, ...]:
        """Every accelerator, by `gpu_id`. Blocks for as long as the driver does; never raises.

        `held` are those on which jobs of this process run. What those use is not outside memory, and
        one that they keep busy is as available as who shares it out says.
        """
        with self._lock:
            if self._reader is None:
                self._reader = self._opened()
            judged = [self._convalescence.judged(gpu) for gpu in self._reader.read(held)]
            return tuple(gpu if gpu.gpu_id in held else with_verdict(gpu) for gpu in judged)

    async def read_async(
        self, held: Collection[int] = (), *, timeout_s: float = READ_TIMEOUT_S
    ) -> tuple[GPUInfo, ...]:
        """The same on a thread of its own; HardwareError when the driver does not answer in time."""
        return await self._thread.call(
            partial(self.read, held), what="reading the accelerators", timeout_s=timeout_s
        )

    def close(self) -> None:
        """Idempotent."""
        self._thread.close()
        # A thread that is stuck in the driver holds the lock for good: then there is nothing to close.
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

    def _opened(self) -> _Reader:
        try:
            reader = NvidiaReader()
        except HardwareError as error:
            self.absent_reason = str(error)
        else:
            if reader.gpu_count:
                return reader
            self.absent_reason = "NVML lists no GPU"
            reader.close()
        _log.debug("no NVIDIA GPU: %s", self.absent_reason)
        return CpuReader(self._cpu_accelerators)


class _Reader(Protocol):
    def read(self, held: Collection[int] = ()) -> tuple[GPUInfo, ...]: ...

    def close(self) -> None: ...
