"""Generates synthetic clusters and workloads, for simulations without a trace.

`synthetic_workload` generates requests that never end (replay.py), `synthetic_jobs` jobs with durations
(events.py). The shapes are chosen to stress placement: fractions that do not add up to 1, CPU that is
exhausted before GPUs, multi-GPU requests and requests for one model. They do not represent real clusters.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from genie.errors import UsageError
from genie.scheduler.request import NodeFacts
from genie.sim.workloads.traces import TraceNode, TracePod, Workload
from genie.sim.workloads.workload import SimJob, add_time_limits, scale_arrivals_to_load, total_gpu_milli_of

_NODE_KINDS = (("small", 2, 48000, 200000), ("large", 8, 96000, 400000), ("wide", 8, 128000, 800000))
_REQUEST_SHAPES = (
    # weight, CPU, memory, GPUs, GPU share, models
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
    """Generate nodes of three kinds and requests of nine shapes. The seed determines the workload."""
    rng = random.Random(f"synthetic {seed}")
    machines = [
        TraceNode(name=f"{model}-{number}", cpu_milli=cpu, memory_mib=memory, gpus=gpus, model=model)
        for number in range(nodes)
        for model, gpus, cpu, memory in [_NODE_KINDS[number % len(_NODE_KINDS)]]
    ]
    shapes = [
        TracePod(cpu, memory, gpus, milli, models) for _, cpu, memory, gpus, milli, models in _REQUEST_SHAPES
    ]
    return Workload(machines, rng.choices(shapes, [weight for weight, *_ in _REQUEST_SHAPES], k=pods))


@dataclass(frozen=True)
class SyntheticJobMix:
    """Parameters of synthetic jobs. Shares are fractions of the jobs, from 0 to 1."""

    job_count: int = 2000
    load: float = 1.2
    """Requested / available GPU time while jobs arrive."""
    tenant_count: int = 8
    """The n-th tenant has a weight of 1/n."""
    duration_median_s: float = 1800.0
    duration_log_sigma: float = 1.2
    """Standard deviation of the logarithm of the duration."""
    duration_max_s: float = 86_400.0
    gpu_fraction_job_share: float = 0.25
    gang_job_share: float = 0.08
    preemptible_job_share: float = 0.5
    """Share of the jobs with the lowest priority; other jobs are not preemptible."""
    checkpoint_interval_s: float | None = 900.0
    time_limit_factor_max: float | None = 3.0
    """Time limits are the duration times 1 to this; None sets none."""

    def __post_init__(self) -> None:
        names = ("gpu_fraction_job_share", "gang_job_share", "preemptible_job_share")
        shares = {name: getattr(self, name) for name in names}
        if wrong := [name for name, share in shares.items() if not 0 <= share <= 1]:
            raise UsageError(
                f"{wrong[0]} is {shares[wrong[0]]:g}; it must be a share of the jobs, from 0 to 1"
            )
        if self.gpu_fraction_job_share + self.gang_job_share > 1:
            raise UsageError("gpu_fraction_job_share + gang_job_share must be at most 1")
        if (
            self.job_count < 1
            or self.tenant_count < 1
            or self.load <= 0
            or (self.time_limit_factor_max or 1) < 1
        ):
            raise UsageError(
                "job_count, tenant_count and time_limit_factor_max must be at least 1, and load more than 0"
            )

    def draw_duration_s(self, rng: random.Random) -> float:
        """Draw the duration of a job, in seconds."""
        drawn = rng.lognormvariate(math.log(self.duration_median_s), self.duration_log_sigma)
        return min(max(drawn, _DURATION_S_MIN), self.duration_max_s)


_DURATION_S_MIN = 30.0
_GPU_FRACTIONS_MILLI = (250, 300, 500, 700)
_GPU_COUNT_WEIGHTS = ((50, 1), (15, 2), (15, 4), (20, 8))
_GANG_SIZE_WEIGHTS = ((40, 2), (30, 4), (20, 8), (10, 16))
"""Weight and number of nodes with 8 GPUs."""
_PRIORITY_WEIGHTS = ((70, 0), (20, 1), (10, 2))
_CPU_MILLI_PER_GPU = (4_000, 8_000, 10_000)
_MEMORY_MIB_PER_GPU = 65_536


def synthetic_jobs(mix: SyntheticJobMix, nodes: Sequence[NodeFacts], *, seed: int) -> list[SimJob]:
    """Generate jobs, sorted by submission time. The load is relative to `nodes`; the seed determines all."""
    if not total_gpu_milli_of(nodes):
        raise UsageError("synthetic jobs need nodes with GPUs")
    rng = random.Random(f"jobs {seed}")
    weights = [1 / (number + 1) for number in range(mix.tenant_count)]
    times = sorted(rng.random() for _ in range(mix.job_count))
    jobs = [
        _random_job(mix, rng, number, at_s, rng.choices(range(mix.tenant_count), weights)[0])
        for number, at_s in enumerate(times, 1)
    ]
    if mix.time_limit_factor_max is not None:
        jobs = add_time_limits(jobs, factor=mix.time_limit_factor_max, seed=seed)
    return scale_arrivals_to_load(jobs, nodes, mix.load)


def _random_job(
    mix: SyntheticJobMix, rng: random.Random, number: int, submitted_s: float, tenant: int
) -> SimJob:
    workers, gpus, milli = _draw_workers_gpus_and_gpu_milli(mix, rng)
    priority = _weighted_choice(rng, _PRIORITY_WEIGHTS)
    share = max(gpus, 1) * milli / 1000
    return SimJob(
        job_id=f"job-{number}",
        submitted_s=submitted_s,
        duration_s=mix.draw_duration_s(rng),
        tenant=f"tenant-{tenant + 1}",
        workers=workers,
        gpus_per_worker=gpus,
        gpu_milli=milli,
        cpu_milli_per_worker=round(share * rng.choice(_CPU_MILLI_PER_GPU)),
        memory_mib_per_worker=round(share * _MEMORY_MIB_PER_GPU),
        priority=priority,
        preemptible=priority == 0 and rng.random() < mix.preemptible_job_share,
        checkpoint_interval_s=mix.checkpoint_interval_s,
    )


def _draw_workers_gpus_and_gpu_milli(mix: SyntheticJobMix, rng: random.Random) -> tuple[int, int, int]:
    """Draw the number of workers, GPUs per worker, and the share of each GPU."""
    kind = rng.random()
    if kind < mix.gpu_fraction_job_share:
        return 1, 1, rng.choice(_GPU_FRACTIONS_MILLI)
    if kind < mix.gpu_fraction_job_share + mix.gang_job_share:
        return _weighted_choice(rng, _GANG_SIZE_WEIGHTS), 8, 1000
    return 1, _weighted_choice(rng, _GPU_COUNT_WEIGHTS), 1000


def _weighted_choice(rng: random.Random, choices: Sequence[tuple[int, int]]) -> int:
    return rng.choices([value for _, value in choices], [weight for weight, _ in choices])[0]
