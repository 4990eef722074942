"""Small clusters and jobs for tests of the scheduler."""

from __future__ import annotations

import itertools
from dataclasses import replace

import msgspec

from genie.scheduler.book import Book
from genie.scheduler.placement.plain import PlainPlacer
from genie.scheduler.request import GpuFacts, NodeFacts, Request, Shape
from genie.scheduler.scheduler import Decision, Preempt, Rules, Scheduler, Start, Wait

H200 = GpuFacts("H200", "nvidia", 141_000, (9, 0))


def node(name: str, gpus: int = 4, *, kinds: tuple[GpuFacts, ...] = (), **facts: object) -> NodeFacts:
    """With so many H200, or with these GPUs."""
    made = NodeFacts(name, 64_000, 256_000, kinds or (H200,) * gpus)
    return replace(made, **facts)  # type: ignore[arg-type]


_STEPS_MAX = 1000


class Desk:
    """A scheduler with a clock that a test turns, and a word for each thing that one does."""

    def __init__(self, *nodes: NodeFacts, rules: Rules | None = None, policy: str = "bestfit") -> None:
        self.book = Book(PlainPlacer, policy=policy)
        self.scheduler = Scheduler(self.book, rules or Rules())
        self.now = 0.0
        self._numbers = itertools.count(1)
        self.log: list[Decision] = []
        for facts in nodes:
            self.scheduler.set_node(facts)

    def submit(self, name: str, gpus: int = 1, **wishes: object) -> Request:
        shape = wishes.pop("shape", Shape(gpus=gpus))
        assert isinstance(shape, Shape)
        request = Request(
            job_id=name,
            tenant="a",
            sequence=next(self._numbers),
            shape=shape,
            submitted_at=self.now,
            name=name,
        )
        request = msgspec.structs.replace(request, **wishes)
        self.scheduler.submit(request)
        return request

    def decide(self) -> list[Decision]:
        decisions = self.scheduler.decide(self.now)
        self.log += decisions
        return decisions

    def started(self) -> list[str]:
        """The jobs that start now."""
        return [each.job_id for each in self.decide() if isinstance(each, Start)]

    def preempted(self) -> list[str]:
        return [each.job_id for each in self.decide() if isinstance(each, Preempt)]

    def why(self, job_id: str) -> Wait:
        """What it waits for now."""
        self.decide()
        return next(each for each in self.scheduler.told if each.job_id == job_id)

    def pass_time(self, to: float) -> list[str]:
        """Jobs end when they must, and those that were told to go come back. Gives what starts meanwhile."""
        started = []
        for _ in range(_STEPS_MAX):
            ends = min((job.ends_at for job in self.scheduler.running), default=to + 1)
            if ends > to:
                break
            self.now = max(self.now, ends)
            for job in self.scheduler.running:
                if job.ends_at <= self.now:
                    self.scheduler.ended(job.request.job_id, again=job.is_leaving)
            started += self.started()
        else:
            raise AssertionError("the scheduler does not come to rest")
        self.now = to
        return started + self.started()
