"""A real controller on a thread of its own, for tests of locks that block their thread."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

from genie.cluster.lifecycle.loop_thread import LoopThread
from genie.model.messages.locks import AcquireLock, BreakLock, ListLocks, LockView
from tests.controller.running_controller import RunningController, running_controller
from tests.waiting import TIMEOUT_S

_T = TypeVar("_T")


class LockingController:
    """The controller, and another client of it. Calls block the thread of the test."""

    def __init__(self, folder: Path, **settings: object) -> None:
        self._folder = folder
        self._settings = settings
        self._thread = LoopThread(name="test-controller")
        self._is_running = threading.Event()
        self._stop: asyncio.Event | None = None
        self.running: RunningController | None = None

    def __enter__(self) -> LockingController:
        self._thread.start(self._serve)
        assert self._is_running.wait(TIMEOUT_S)
        return self

    def __exit__(self, *ignored: object) -> None:
        self._thread.cancel_main_task()
        assert self._thread.join(timeout_s=TIMEOUT_S)

    async def _serve(self) -> None:
        async with running_controller(self._folder, **self._settings) as self.running:
            self._is_running.set()
            await asyncio.Event().wait()

    def run(self, work: Callable[[RunningController], Coroutine[Any, Any, _T]]) -> _T:
        assert self.running is not None
        running = self.running
        return self._thread.submit(lambda: work(running)).result(TIMEOUT_S)

    def list_locks(self) -> list[LockView]:
        async def ask(running: RunningController) -> list[LockView]:
            async with running.client() as client:
                return list((await client.ask(ListLocks())).locks)

        return self.run(ask)

    def break_lock(self, name: str) -> None:
        async def ask(running: RunningController) -> None:
            async with running.client() as client:
                await client.ask(BreakLock(tenant="default", name=name))

        self.run(ask)

    def hold_as_another_client(self, name: str, *, ttl_s: float = 60.0) -> int:
        """Return the fencing token; 0 if another client holds the lock."""

        async def ask(running: RunningController) -> int:
            async with running.client() as client:
                request = AcquireLock(
                    name=name, acquisition_id=os.urandom(8).hex(), holder="another client", ttl_s=ttl_s
                )
                return (await client.ask(request)).fencing_token

        return self.run(ask)
