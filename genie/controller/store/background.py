"""A TaskGroup that lives from an engine's open() to its close().

A TaskGroup must be entered and left by one task, while open() and close() may be called by
two. So one root task holds the group; everything an engine runs beside its callers is a child
of it. Not for: work that ends with the call that started it (use a TaskGroup there).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine

log = logging.getLogger(__name__)


class Background:
    """Children run until they end or `close`. One that fails ends them all, and the log says so."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._group = asyncio.TaskGroup()
        self._started = asyncio.Event()
        self._root: asyncio.Task[None] | None = None

    @classmethod
    async def open(cls, name: str) -> Background:
        background = cls(name)
        # The one task without a group: it holds the group and is awaited in close().
        background._root = asyncio.get_running_loop().create_task(background._hold(), name=name)
        await background._started.wait()
        return background

    def start(self, work: Coroutine[object, object, None], *, name: str) -> asyncio.Task[None]:
        return self._group.create_task(work, name=f"{self._name}:{name}")

    @property
    def is_over(self) -> bool:
        """Closed, or ended by a child that failed."""
        return self._root is None or self._root.done()

    async def close(self) -> None:
        """Cancels the children and returns when they are gone. Idempotent."""
        if self._root is None:
            return
        self._root.cancel()
        await asyncio.wait([self._root])

    async def _hold(self) -> None:
        try:
            async with self._group:
                self._started.set()
                await asyncio.Event().wait()
        except BaseExceptionGroup:  # a task boundary: nobody awaits this task before close()
            log.exception("%s: a background task failed", self._name)
