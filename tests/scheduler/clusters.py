"""Small clusters and jobs for tests of the scheduler."""

from __future__ import annotations

import itertools
from dataclasses import replace

import msgspec

from genie.scheduler.cluster.allocations import ClusterAllocations
from genie.scheduler.decisions import Decision, Preempt, Start, Wait
from genie.scheduler.placement.python_placer import PythonPlacer
from genie.scheduler.request import GpuFacts, JobRequest, NodeFacts, Shape
from genie.scheduler.rules import Rules
from genie.scheduler.scheduler import Scheduler

H200 = GpuFacts("H200", "nvidia", 141_000, (9, 0))


def node(name: str, gpus: int = 4, *, kinds: tuple[GpuFacts, ...] = (), **facts: object) -> NodeFacts:
    """A node with `gpus` H200, or with the GPUs in `kinds`."""
    default = NodeFacts(name, 64_000, 256_000, kinds or (H200,) * gpus)
    return replace(default, **facts)  # type: ignore[arg-type]


_STEPS_MAX = 1000


class SchedulerHarness:
    """A scheduler with a manual clock."""

    def __init__(self, *nodes: NodeFacts, rules: Rules | None = None, policy: str = "bestfit") -> None:
        self.allocations = ClusterAllocations(PythonPlacer, policy=policy)
        self.scheduler = Scheduler(self.allocations, rules or Rules())
        self.now = 0.0
        self._numbers = itertools.count(1)
        self.log: list[Decision] = []
        for facts in nodes:
            self.scheduler.set_node(facts)

    def submit(self, name: str, gpus: int = 1, **options: object) -> JobRequest:
        shape = options.pop("shape", Shape(gpus=gpus))
        assert isinstance(shape, Shape)
        request = JobRequest(
            job_id=name,
            tenant="a",
            sequence=next(self._numbers),
            shape=shape,
            submitted_at=self.now,
            name=name,
        )
        request = msgspec.structs.replace(request, **options)
        self.scheduler.submit(request)
        return request

    def decide(self) -> list[Decision]:
        decisions = self.scheduler.decide(self.now)
        self.log += decisions
        return decisions

    def started(self) -> list[str]:
        """Run a pass and return the jobs that start."""
        return [each.job_id for each in self.decide() if isinstance(each, Start)]

    def preempted(self) -> list[str]:
        return [each.job_id for each in self.decide() if isinstance(each, Preempt)]

    def pending(self, job_id: str) -> Wait:
        """Run a pass and return the pending reason of a job."""
        self.decide()
        return next(each for each in self.scheduler.last_wait_decisions if each.job_id == job_id)

    def advance(self, to: float) -> list[str]:
        """Advance the clock: jobs end at their limits, preempted ones are queued again. Return the starts."""
        started = []
        for _ in range(_STEPS_MAX):
            ends = min((job.ends_at for job in self.scheduler.running_jobs), default=to + 1)
            if ends > to:
                break
            self.now = max(self.now, ends)
            for job in self.scheduler.running_jobs:
                if job.ends_at <= self.now:
                    self.scheduler.record_end(job.request.job_id, requeue=job.is_stopping)
            started += self.started()
        else:
            raise AssertionError("the scheduler does not terminate")
        self.now = to
        return started + self.started()
