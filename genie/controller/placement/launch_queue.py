"""Jobs that are placed and whose launches are not sent yet, and how many more may be placed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from genie.controller.nodes.orders import AgentOrders
from genie.model.job import Job


class LaunchQueue:
    """Bounded by the orders that can be sent to agents: each worker of a job becomes one."""

    def __init__(self, orders: AgentOrders) -> None:
        self._orders = orders
        self._placed_jobs: list[Job] = []
        self._reserved_workers = 0

    @property
    def worker_capacity(self) -> int:
        """Number of further workers that may be placed now."""
        return self._orders.free_capacity - self._reserved_workers - len(self._placed_jobs)

    @contextmanager
    def reserve_capacity(self, workers: int) -> Iterator[None]:
        """Reserve capacity for workers whose placement is being written."""
        self._reserved_workers = workers
        try:
            yield
        finally:
            self._reserved_workers = 0

    @property
    def is_empty(self) -> bool:
        return not self._placed_jobs

    def add(self, jobs: Iterable[Job]) -> None:
        self._placed_jobs.extend(jobs)

    def take_all(self) -> list[Job]:
        jobs, self._placed_jobs = self._placed_jobs, []
        return jobs
