"""A TaskGroup that is open from an engine's open() to its close().

A TaskGroup must be entered and exited by the same task, while open() and close() may be called by
different ones. So one root task holds the group; all background tasks of an engine are its
children. Work that ends with the call that started it uses a TaskGroup of its own.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine

log = logging.getLogger(__name__)


class BackgroundTasks:
    """Child tasks run until they end or `close`. If one fails, all are cancelled and the error is logged."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._group = asyncio.TaskGroup()
        self._started = asyncio.Event()
        self._group_task: asyncio.Task[None] | None = None

    @classmethod
    async def open(cls, name: str) -> BackgroundTasks:
        background = cls(name)
        # The only task outside of a group: it holds the group and is awaited in close().
        background._group_task = asyncio.get_running_loop().create_task(
            background._keep_group_open(), name=name
        )
        await background._started.wait()
        return background

    def start_task(self, coroutine: Coroutine[object, object, None], *, name: str) -> asyncio.Task[None]:
        return self._group.create_task(coroutine, name=f"{self._name}:{name}")

    @property
    def has_ended(self) -> bool:
        """True after close(), or after a child task failed."""
        return self._group_task is None or self._group_task.done()

    async def close(self) -> None:
        """Cancels the child tasks and waits for them. Idempotent."""
        if self._group_task is None:
            return
        self._group_task.cancel()
        await asyncio.wait([self._group_task])

    async def _keep_group_open(self) -> None:
        try:
            async with self._group:
                self._started.set()
                await asyncio.Event().wait()
        except BaseExceptionGroup:  # a task boundary: this task is not awaited before close()
            log.exception("%s: a background task failed", self._name)
