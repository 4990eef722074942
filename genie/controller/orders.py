"""Orders to agents that nobody waits for: tasks with a parent, a bound and a log line when they fail."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from genie.errors import GenieError

_log = logging.getLogger(__name__)

ORDERS_MAX = 1024


class Orders:
    """`run` must be running. At the bound an order is dropped: each is given again later by other means
    (a launch is queued again, a kill rides on the next heartbeat)."""

    def __init__(self) -> None:
        self._group: asyncio.TaskGroup | None = None
        self._under_way = 0

    @property
    def room(self) -> int:
        """How many more can be given now."""
        return 0 if self._group is None else ORDERS_MAX - self._under_way

    @property
    def has_room(self) -> bool:
        return self.room > 0

    async def run(self) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                await asyncio.get_running_loop().create_future()
        finally:
            self._group = None

    def send(self, order: Coroutine[Any, Any, None], *, name: str, count: int = 1) -> None:
        """`count` says for how many it stands."""
        if self._group is None or not self.has_room:
            order.close()
            _log.warning("not sent now: %s", name)
            return
        self._under_way += count
        self._group.create_task(self._carry_out(order, name, count), name=name)

    async def _carry_out(self, order: Coroutine[Any, Any, None], name: str, count: int) -> None:
        try:
            await order
        except GenieError as error:
            _log.info("%s: %s", name, error)
        except Exception:  # a task boundary
            _log.exception("%s failed", name)
        finally:
            self._under_way -= count
