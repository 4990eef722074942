"""The disk of a simulated node: slow, full, or without power before a write was durable.

An agent reaches its disk only through an `Offload`, which this is. Files are real, in the directory of the
simulation, but fsync does nothing except to record that a file is durable. A power outage interrupts the
write that is in progress, after some of its file operations.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

from genie.errors import StoreFullError
from genie.hardware.host import DiskSpace
from genie.sim.world import World

_Result = TypeVar("_Result")

_SIM_DISK_BYTES = 1 << 40
_COUNTED_OPERATIONS = ("mkdir", "rename", "replace", "rmdir", "unlink")
_INTERRUPTED_OPERATIONS_MAX = 16


class _PowerLost(BaseException):
    """Ends a write in progress; the code that runs must not handle it."""


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
        self._writes_in_progress: list[Callable[[], object]] = []
        self._durable_files = {_file_identity(path) for path in self._list_files()}

    async def __call__(self, work: Callable[[], _Result], *, writes: bool = False) -> _Result:
        if self.access_delay_s:
            with self._record_write_in_progress(work) if writes else nullcontext():
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
        """Interrupt the write in progress, and cut off the end of all files that are not durable."""
        if self._writes_in_progress and not self.fill_causes:
            self._do_in_part(self._writes_in_progress[0])
        for path in self._list_files():
            if _file_identity(path) not in self._durable_files:
                size_bytes = path.stat().st_size
                os.truncate(path, self._world.random.randint(0, max(size_bytes - 1, 0)))

    @contextmanager
    def _record_write_in_progress(self, work: Callable[[], object]) -> Iterator[None]:
        self._writes_in_progress.append(work)
        try:
            yield
        finally:
            self._writes_in_progress.remove(work)

    def _do_in_part(self, work: Callable[[], object]) -> None:
        """Do a random number of its file operations."""
        left = self._world.random.randint(0, _INTERRUPTED_OPERATIONS_MAX)

        def count_and_call(operation: Callable[..., object], *arguments: object, **options: object) -> object:
            nonlocal left
            if not left:
                raise _PowerLost
            left -= 1
            return operation(*arguments, **options)

        with self.record_durable_files(), ExitStack() as patches:
            for name in (*_COUNTED_OPERATIONS, "fsync", "fdatasync"):
                real = getattr(os, name)
                patches.callback(setattr, os, name, real)
                setattr(os, name, partial(count_and_call, real))
            with suppress(_PowerLost, Exception):
                work()

    def _record_durable_file(self, descriptor: int) -> None:
        found = os.fstat(descriptor)
        self._durable_files.add((found.st_dev, found.st_ino))

    def _list_files(self) -> list[Path]:
        return sorted(path for path in self._directory.rglob("*") if path.is_file() and not path.is_symlink())


def _file_identity(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_dev, found.st_ino
