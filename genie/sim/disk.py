"""The disk of a simulated node: slow, full, or without power before a write was durable.

An agent reaches its disk only through an `Offload`, which this is. Files are real, in the directory of the
simulation, but fsync does nothing except to record that a file is durable.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from genie.errors import StoreFullError
from genie.hardware.host import DiskSpace
from genie.sim.world import World

_Result = TypeVar("_Result")

_SIM_DISK_BYTES = 1 << 40


class SimDisk:
    """The files below `directory`; those that exist at first are durable."""

    def __init__(self, world: World, host: str, directory: Path) -> None:
        self._world = world
        self._host = host
        self._directory = directory
        self.access_delay_s = 0.0
        """How long each access takes."""
        self.fill_causes: set[Hashable] = set()
        """The disk is full while this is not empty."""
        self._durable_files = {_file_identity(path) for path in self._list_files()}

    async def __call__(self, work: Callable[[], _Result], *, writes: bool = False) -> _Result:
        if self.access_delay_s:
            await asyncio.sleep(self.access_delay_s)
            await self._world.wait_unpaused(self._host)
        if self.fill_causes and writes:
            raise StoreFullError(f"the disk of {self._host} is full (injected fault)")
        with self.record_durable_files():
            return work()

    def measure_space(self, path: Path) -> DiskSpace:
        return DiskSpace(
            total_bytes=_SIM_DISK_BYTES, free_bytes=0 if self.fill_causes else _SIM_DISK_BYTES // 2
        )

    @contextmanager
    def record_durable_files(self) -> Iterator[None]:
        """Record which files are made durable in this block, instead of waiting for the real disk."""
        real_fsync, real_fdatasync = os.fsync, os.fdatasync
        os.fsync = os.fdatasync = self._record_durable_file  # type: ignore[assignment]
        try:
            yield
        finally:
            os.fsync, os.fdatasync = real_fsync, real_fdatasync

    def lose_power(self) -> None:
        """Cut off the end of all files that are not durable."""
        for path in self._list_files():
            if _file_identity(path) not in self._durable_files:
                size_bytes = path.stat().st_size
                os.truncate(path, self._world.random.randint(0, max(size_bytes - 1, 0)))

    def _record_durable_file(self, descriptor: int) -> None:
        found = os.fstat(descriptor)
        self._durable_files.add((found.st_dev, found.st_ino))

    def _list_files(self) -> list[Path]:
        return sorted(path for path in self._directory.rglob("*") if path.is_file() and not path.is_symlink())


def _file_identity(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_dev, found.st_ino
