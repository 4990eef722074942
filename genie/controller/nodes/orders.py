"""Sends orders to agents in the background: bounded, with a log line for each that fails."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from genie.errors import GenieError

_log = logging.getLogger(__name__)

ORDERS_MAX = 1024


class AgentOrders:
    """Orders are sent only while `run` is running. Beyond ORDERS_MAX an order is dropped: launches are queued
    again, and kills are repeated with the next heartbeat."""

    def __init__(self) -> None:
        self._group: asyncio.TaskGroup | None = None
        self._orders_in_flight = 0

    @property
    def free_capacity(self) -> int:
        """Number of further orders that can be sent now."""
        return 0 if self._group is None else ORDERS_MAX - self._orders_in_flight

    async def run(self) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                await asyncio.get_running_loop().create_future()
        finally:
            self._group = None

    def send(self, order: Coroutine[Any, Any, None], *, name: str, order_count: int = 1) -> None:
        """Send an order that counts as `order_count` orders."""
        if self._group is None or self.free_capacity <= 0:
            order.close()
            _log.warning("dropped an order to an agent, too many in flight: %s", name)
            return
        self._orders_in_flight += order_count
        self._group.create_task(self._run_order(order, name, order_count), name=name)

    async def _run_order(self, order: Coroutine[Any, Any, None], name: str, order_count: int) -> None:
        try:
            await order
        except GenieError as error:
            _log.info("order to an agent failed: %s: %s", name, error)
        except Exception:  # a task boundary
            _log.exception("order to an agent failed: %s", name)
        finally:
            self._orders_in_flight -= order_count
