"""Makes up clusters and workloads, so that everything can be run without a trace.

`synthetic_workload` has requests that never leave (replay.py), `synthetic_jobs` jobs that come, run and go
(events.py). Not for: claims about real clusters. The shapes are round numbers that stress what placement is
about: fractions that do not add up, CPU that runs out before GPUs do, requests of several GPUs or for one
model.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from genie.errors import UsageError
from genie.scheduler.request import NodeFacts
from genie.sim.replay import Workload
from genie.sim.traces import TraceNode, TracePod
from genie.sim.workload import SimJob, gpu_milli_of, with_limits, with_load

_KINDS = (("small", 2, 48000, 200000), ("large", 8, 96000, 400000), ("wide", 8, 128000, 800000))
_SHAPES = (
    # how often, CPU, memory, GPUs, share, models
    (12, 10000, 30000, 0, 0, ()),
    (30, 10000, 30000, 1, 1000, ()),
    (15, 8000, 20000, 1, 810, ()),
    (15, 5000, 15000, 1, 470, ()),
    (10, 3000, 8000, 1, 190, ()),
    (8, 6000, 20000, 1, 500, ("small",)),
    (5, 11000, 30000, 2, 1000, ()),
    (3, 40000, 120000, 4, 1000, ("large", "wide")),
    (2, 88000, 300000, 8, 1000, ()),
)


def synthetic_workload(*, nodes: int, pods: int, seed: int) -> Workload:
    """Nodes of three kinds and requests of nine shapes. The same seed gives the same workload."""
    chance = random.Random(f"synthetic {seed}")
    machines = [
        TraceNode(name=f"{model}-{number}", cpu_milli=cpu, memory_mib=memory, gpus=gpus, model=model)
        for number in range(nodes)
        for model, gpus, cpu, memory in [_KINDS[number % len(_KINDS)]]
    ]
    shapes = [TracePod(cpu, memory, gpus, milli, models) for _, cpu, memory, gpus, milli, models in _SHAPES]
    return Workload(machines, chance.choices(shapes, [weight for weight, *_ in _SHAPES], k=pods))


@dataclass(frozen=True)
class Mix:
    """What a made-up workload of jobs is made of. Shares are of the jobs, from 0 to 1."""

    jobs: int = 2000
    load: float = 1.2
    """GPU time that is asked for, divided by what there is while jobs arrive."""
    tenants: int = 8
    """The first asks for most: the n-th has a weight of 1/n."""
    median_s: float = 1800.0
    sigma: float = 1.2
    """Of the logarithm of the duration."""
    longest_s: float = 86_400.0
    fractions: float = 0.25
    gangs: float = 0.08
    preemptible: float = 0.5
    """Of the jobs with the lowest priority; the others never are."""
    checkpoint_s: float | None = 900.0
    limit_factor: float | None = 3.0
    """A time limit is the duration times 1 to this; None for none."""

    def __post_init__(self) -> None:
        shares = {name: getattr(self, name) for name in ("fractions", "gangs", "preemptible")}
        if wrong := [name for name, share in shares.items() if not 0 <= share <= 1]:
            raise UsageError(f"{wrong[0]} is {shares[wrong[0]]:g}; it must be from 0 to 1")
        if self.fractions + self.gangs > 1:
            raise UsageError("fractions and gangs together are more than all jobs")
        if self.jobs < 1 or self.tenants < 1 or self.load <= 0 or (self.limit_factor or 1) < 1:
            raise UsageError(
                "jobs, tenants and the factor of time limits are from 1, the load is more than 0"
            )

    def draw_s(self, chance: random.Random) -> float:
        """How long a job takes."""
        drawn = chance.lognormvariate(math.log(self.median_s), self.sigma)
        return min(max(drawn, _SHORTEST_S), self.longest_s)


_SHORTEST_S = 30.0
_FRACTIONS_MILLI = (250, 300, 500, 700)
_WHOLE = ((50, 1), (15, 2), (15, 4), (20, 8))
_GANGS = ((40, 2), (30, 4), (20, 8), (10, 16))
"""How often, and how many nodes with 8 GPUs."""
_PRIORITIES = ((70, 0), (20, 1), (10, 2))
_CPU_OF_GPU_MILLI = (4_000, 8_000, 10_000)
_MEMORY_OF_GPU_MIB = 65_536


def synthetic_jobs(mix: Mix, nodes: Sequence[NodeFacts], *, seed: int) -> list[SimJob]:
    """By time of submission. The same seed gives the same jobs; `nodes` say what the load is measured by."""
    if not gpu_milli_of(nodes):
        raise UsageError("a load needs nodes with GPUs")
    chance = random.Random(f"jobs {seed}")
    weights = [1 / (number + 1) for number in range(mix.tenants)]
    times = sorted(chance.random() for _ in range(mix.jobs))
    jobs = [
        _made_up(mix, chance, number, at_s, chance.choices(range(mix.tenants), weights)[0])
        for number, at_s in enumerate(times, 1)
    ]
    if mix.limit_factor is not None:
        jobs = with_limits(jobs, factor=mix.limit_factor, seed=seed)
    return with_load(jobs, nodes, mix.load)


def _made_up(mix: Mix, chance: random.Random, number: int, at_s: float, tenant: int) -> SimJob:
    workers, gpus, milli = _size(mix, chance)
    priority = _drawn(chance, _PRIORITIES)
    share = max(gpus, 1) * milli / 1000
    return SimJob(
        job_id=f"job-{number}",
        submitted_s=at_s,
        duration_s=mix.draw_s(chance),
        tenant=f"tenant-{tenant + 1}",
        workers=workers,
        gpus=gpus,
        gpu_milli=milli,
        cpu_milli=round(share * chance.choice(_CPU_OF_GPU_MILLI)),
        memory_mib=round(share * _MEMORY_OF_GPU_MIB),
        priority=priority,
        preemptible=priority == 0 and chance.random() < mix.preemptible,
        checkpoint_s=mix.checkpoint_s,
    )


def _size(mix: Mix, chance: random.Random) -> tuple[int, int, int]:
    """Workers, GPUs of each, and the share of each GPU."""
    kind = chance.random()
    if kind < mix.fractions:
        return 1, 1, chance.choice(_FRACTIONS_MILLI)
    if kind < mix.fractions + mix.gangs:
        return _drawn(chance, _GANGS), 8, 1000
    return 1, _drawn(chance, _WHOLE), 1000


def _drawn(chance: random.Random, choices: Sequence[tuple[int, int]]) -> int:
    return chance.choices([value for _, value in choices], [weight for weight, _ in choices])[0]
