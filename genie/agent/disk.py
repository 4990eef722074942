"""How an agent uses the disk of its node: always off the event loop, and not for new work while it is low.

Heartbeats never wait for it. All changes of the journal go through one queue, so that a job's exit is settled
before its directory is used for the next run.
"""

from __future__ import annotations

import asyncio
import errno
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from genie.errors import GenieError, NodeUnfitError, StoreFullError
from genie.hardware import DiskSpace, disk_space
from genie.processes.clock import Clock
from genie.processes.tasks import Offload, run_inline

_log = logging.getLogger(__name__)
_Result = TypeVar("_Result")

PENDING_JOURNAL_CHANGES_MAX = 4096
STALLED_WRITE_S_MIN = 5.0
"""Below the timeout after which the controller gives up a launch."""
DISK_SIZE_TO_REQUIRED_FREE_RATIO_MIN = 20
"""The free space needed is at most the size of the disk divided by this."""
_NODE_FAULT_ERRNOS = frozenset(
    {
        errno.ENOSPC,
        errno.EDQUOT,
        errno.EROFS,
        errno.EIO,
        errno.EMFILE,
        errno.ENFILE,
        errno.ENOMEM,
        errno.EAGAIN,
    }
)


@dataclass(frozen=True, kw_only=True)
class DiskAccess:
    """`run_journal_call` runs one call at a time, in order. `run_job_file_call` reads and writes the files of
    jobs, which may take long: logs, working directories, removals."""

    run_journal_call: Offload = run_inline
    run_job_file_call: Offload = run_inline
    measure_space: Callable[[Path], DiskSpace] = disk_space


class DiskMonitor:
    """Decides whether the disk has room for new work. Pure."""

    def __init__(self, free_min_bytes: int) -> None:
        self._free_min_bytes = free_min_bytes
        self._is_space_low = False
        self.last_reading = DiskSpace(total_bytes=0, free_bytes=0)
        """The last reading; zeros before the first one."""

    def record_reading(self, space: DiskSpace) -> None:
        self.last_reading = space
        self._is_space_low = self.last_reading.free_bytes < (
            self._free_bytes_to_unblock if self._is_space_low else self._free_bytes_needed
        )

    @property
    def _free_bytes_needed(self) -> int:
        return min(
            self._free_min_bytes, self.last_reading.total_bytes // DISK_SIZE_TO_REQUIRED_FREE_RATIO_MIN
        )

    @property
    def _free_bytes_to_unblock(self) -> int:
        """More than the minimum, so that the node does not open and close all the time."""
        return self._free_bytes_needed * 3 // 2

    @property
    def bytes_to_free(self) -> int:
        """How much must be freed until the node accepts work again."""
        return max(self._free_bytes_to_unblock - self.last_reading.free_bytes, 0) if self._is_space_low else 0

    def why_node_is_blocked(self, current_write_s: float) -> str:
        """Why the node accepts no work; empty if it does. `current_write_s`: duration of the current
        write."""
        if self._is_space_low:
            free, needed = self.last_reading.free_bytes / 2**30, self._free_bytes_to_unblock / 2**30
            return f"low disk space: {free:.2f} GiB free, {needed:.2f} GiB needed"
        if current_write_s >= STALLED_WRITE_S_MIN:
            return f"the disk does not respond: a write has taken {current_write_s:.0f} s"
        return ""


def is_caused_by_node(error: BaseException | None) -> bool:
    """Whether the node is the cause of this error: its disk is full or broken, it has no memory or files."""
    while error is not None:
        if isinstance(error, StoreFullError | NodeUnfitError):
            return True
        if isinstance(error, OSError) and error.errno in _NODE_FAULT_ERRNOS:
            return True
        error = error.__cause__
    return False


def is_caused_by_full_disk(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        error = error.__cause__
    return False


class JournalWriteQueue:
    """`run` must run concurrently; `run_pending_work` replaces it after it was cancelled."""

    def __init__(self, offload: Offload, clock: Clock) -> None:
        self._offload = offload
        self._clock = clock
        self._pending_work: deque[Callable[[], Awaitable[None]]] = deque()
        self._has_pending_work = asyncio.Event()
        self._current_work_started_s: float | None = None

    def add_work(self, work: Callable[[], object], *, action: str, writes: bool = True) -> None:
        """Adds work whose result is not needed. An error is logged; `action` completes "could not"."""

        async def do() -> None:
            try:
                await self._offload(work, writes=writes)
            except (GenieError, OSError) as error:
                _log.error("disk write failed: could not %s: %s", action, error)
            except Exception:
                _log.exception("disk write failed: could not %s", action)

        if len(self._pending_work) >= PENDING_JOURNAL_CHANGES_MAX:
            _log.error(
                "disk write dropped: could not %s: %d changes of the journal are pending",
                action,
                PENDING_JOURNAL_CHANGES_MAX,
            )
        else:
            self._append_work(do)

    async def run_work(self, work: Callable[[], _Result], *, writes: bool = True) -> _Result:
        """Does the work after everything added before; returns its result or raises its error.

        Raises StoreFullError if the queue is full. Work of a cancelled call that has not begun is skipped.
        """
        if len(self._pending_work) >= PENDING_JOURNAL_CHANGES_MAX:
            raise StoreFullError(
                f"the disk is too slow: {PENDING_JOURNAL_CHANGES_MAX} changes of the journal are pending"
            )
        result: asyncio.Future[_Result] = asyncio.get_running_loop().create_future()

        async def do() -> None:
            if result.cancelled():
                return
            try:
                value = await self._offload(work, writes=writes)
            except Exception as error:
                if not result.cancelled():
                    result.set_exception(error)
            else:
                if not result.cancelled():
                    result.set_result(value)

        self._append_work(do)
        return await result

    def current_write_elapsed_s(self) -> float:
        """How long the current change has taken so far; 0 if there is none."""
        return (
            0.0
            if self._current_work_started_s is None
            else self._clock.monotonic_s() - self._current_work_started_s
        )

    async def run(self) -> None:
        """Does the work until cancelled."""
        while True:
            await self._has_pending_work.wait()
            await self.run_pending_work()

    async def run_pending_work(self) -> None:
        """Does the work that is pending."""
        while self._pending_work:
            self._current_work_started_s = self._clock.monotonic_s()
            try:
                await self._pending_work.popleft()()
            finally:
                self._current_work_started_s = None
        self._has_pending_work.clear()

    def _append_work(self, run: Callable[[], Awaitable[None]]) -> None:
        self._pending_work.append(run)
        self._has_pending_work.set()
