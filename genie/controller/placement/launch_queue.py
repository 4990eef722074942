"""Jobs that are placed and whose launches are not sent yet, and how many more may be placed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from genie.controller.nodes.orders import Orders
from genie.model.job import Job


class LaunchQueue:
    """Bounded by the orders that can be sent to agents: each worker of a job becomes one."""

    def __init__(self, orders: Orders) -> None:
        self._orders = orders
        self._jobs: list[Job] = []
        self._reserved = 0

    @property
    def capacity(self) -> int:
        """Number of further workers that may be placed now."""
        return self._orders.capacity - self._reserved - len(self._jobs)

    @contextmanager
    def reserve(self, workers: int) -> Iterator[None]:
        """Reserve capacity for workers whose placement is being written."""
        self._reserved = workers
        try:
            yield
        finally:
            self._reserved = 0

    @property
    def is_empty(self) -> bool:
        return not self._jobs

    def add(self, jobs: Iterable[Job]) -> None:
        self._jobs.extend(jobs)

    def take_all(self) -> list[Job]:
        jobs, self._jobs = self._jobs, []
        return jobs
