"""Jobs of the event-driven simulator, read from our CSV format or from a trace.

Our CSV format has one line per job; the first line names the columns, in any order:

    submitted_s   submission time, in seconds from 0 (required)
    duration_s    run time without interruption, in seconds (required)
    job_id        unique name (default: job-1, job-2, ...)
    tenant        tenant (default: `default`)
    workers       number of workers; a gang starts as a whole (default: 1)
    gpus          GPUs per worker, from 0 to 16 (default: 1)
    gpu_share     fraction of each GPU, above 0 up to 1; below 1 only with one GPU (default: 1)
    cpus          CPUs per worker (default: 0)
    memory_mib    memory per worker (default: 0)
    models        allowed GPU models, separated by | (default: all)
    within        topology constraint: anywhere, rack or node (default: anywhere)
    priority      integer from 0; higher starts first (default: 0)
    preemptible   yes or no (default: no)
    grace_s       grace period on preemption, in seconds (default: 30)
    checkpoint_s  checkpoint interval, in seconds of run time (default: no checkpoints)
    time_limit_s  time limit, in seconds (default: none)

All columns except the first two are optional, and their values may be empty.
"""

from __future__ import annotations

import csv
import itertools
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TextIO

from genie.errors import UsageError
from genie.model.job import Within
from genie.scheduler.placement.protocol import NODE_GPUS_MAX
from genie.scheduler.request import WHOLE_GPU_MILLI, GpuFacts, JobRequest, NodeFacts, Shape
from genie.sim.workloads.traces import Row, TraceNode, read_jobs, read_runs, read_table

GRACE_S = 30.0
GPUS_OF_NODE = 8
_WORKERS_MAX = 100_000
_YES_NO = {"": False, "no": False, "yes": True}
COLUMNS = (
    "job_id", "submitted_s", "duration_s", "tenant", "workers", "gpus", "gpu_share", "cpus", "memory_mib",
    "models", "within", "priority", "preemptible", "grace_s", "checkpoint_s", "time_limit_s",
)  # fmt: skip


@dataclass(frozen=True)
class SimJob:
    """One job. Resources are per worker; times are in seconds."""

    job_id: str
    submitted_s: float
    duration_s: float
    tenant: str = "default"
    workers: int = 1
    gpus: int = 1
    gpu_milli: int = WHOLE_GPU_MILLI
    cpu_milli: int = 0
    memory_mib: int = 0
    models: frozenset[str] = frozenset()
    within: Within = Within.ANYWHERE
    priority: int = 0
    preemptible: bool = False
    grace_s: float = GRACE_S
    checkpoint_s: float | None = None
    time_limit_s: float | None = None

    @property
    def gpu_milli_all(self) -> int:
        """Total of all workers."""
        return self.workers * self.gpus * self.gpu_milli

    @property
    def runs_s(self) -> float:
        """Run time without interruption, limited by the time limit."""
        return self.duration_s if self.time_limit_s is None else min(self.duration_s, self.time_limit_s)

    @property
    def shape(self) -> Shape:
        return _shape(self.gpus, self.gpu_milli, self.cpu_milli, self.memory_mib, self.models)

    def request(self, sequence: int) -> JobRequest:
        """Return the request for the scheduler, which does not contain the duration."""
        return JobRequest(
            job_id=self.job_id,
            tenant=self.tenant,
            sequence=sequence,
            shape=self.shape,
            submitted_at=self.submitted_s,
            workers=self.workers,
            within=self.within,
            name=self.job_id,
            priority=self.priority,
            preemptible=self.preemptible,
            grace_s=self.grace_s,
            time_limit_s=self.time_limit_s,
        )


@lru_cache(maxsize=4096)
def _shape(gpus: int, gpu_milli: int, cpu_milli: int, memory_mib: int, models: frozenset[str]) -> Shape:
    """Cached, so that equal jobs share one shape: the scheduler looks up shapes often."""
    return Shape(gpus=gpus, gpu_milli=gpu_milli, cpu_milli=cpu_milli, memory_mib=memory_mib, models=models)


# -- CSV format ------------------------------------------------------------------------------------


def read_workload(path: Path) -> list[SimJob]:
    """Read jobs, sorted by submission time. Raises UsageError with file, line, column and allowed values."""
    numbers = itertools.count(1)
    seen: set[str] = set()

    def parse(row: Row) -> SimJob:
        job = _job(row, f"job-{next(numbers)}")
        if job.job_id in seen:
            raise row.error("job_id", "unique")
        seen.add(job.job_id)
        return job

    jobs = read_table(path, {"submitted_s", "duration_s"}, parse, known=frozenset(COLUMNS))
    return sorted(jobs, key=lambda job: job.submitted_s)


def write_workload(path: Path, jobs: Iterable[SimJob]) -> None:
    """Write jobs in the format of `read_workload`. Raises UsageError if the file cannot be written."""
    try:
        with path.open("w", encoding="utf-8", newline="") as file:
            write_lines(file, jobs)
    except OSError as error:
        raise UsageError(f"could not write {path}: {error.strerror}", hint="give another path") from error


def write_lines(file: TextIO, jobs: Iterable[SimJob]) -> None:
    lines = csv.writer(file, lineterminator="\n")
    lines.writerow(COLUMNS)
    lines.writerows(map(_cells, jobs))


def _cells(job: SimJob) -> list[str]:
    values = {
        **{name: str(getattr(job, name)) for name in COLUMNS if hasattr(job, name)},
        "submitted_s": f"{job.submitted_s:.3f}",
        "duration_s": f"{job.duration_s:.3f}",
        "gpu_share": f"{job.gpu_milli / WHOLE_GPU_MILLI:g}",
        "cpus": f"{job.cpu_milli / 1000:g}",
        "models": "|".join(sorted(job.models)),
        "preemptible": "yes" if job.preemptible else "no",
        "grace_s": f"{job.grace_s:g}",
        "checkpoint_s": "" if job.checkpoint_s is None else f"{job.checkpoint_s:g}",
        "time_limit_s": "" if job.time_limit_s is None else f"{job.time_limit_s:.3f}",
    }
    return [values[name] for name in COLUMNS]


def _job(row: Row, name: str) -> SimJob:
    within, preemptible = row.text("within") or Within.ANYWHERE, row.text("preemptible")
    if within not in list(Within):
        raise row.error("within", "one of " + ", ".join(Within))
    if preemptible not in _YES_NO:
        raise row.error("preemptible", "yes or no")
    gpus = row.integer("gpus", most=NODE_GPUS_MAX) if row.text("gpus") else 1
    return SimJob(
        job_id=row.text("job_id") or name,
        submitted_s=row.seconds("submitted_s"),
        duration_s=_positive(row, "duration_s"),
        tenant=row.text("tenant") or "default",
        workers=_workers(row),
        gpus=gpus,
        gpu_milli=_share(row, gpus),
        cpu_milli=round(1000 * row.number("cpus")) if row.text("cpus") else 0,
        memory_mib=row.integer("memory_mib") if row.text("memory_mib") else 0,
        models=frozenset(model for model in row.text("models").split("|") if model),
        within=Within(within),
        priority=row.integer("priority") if row.text("priority") else 0,
        preemptible=_YES_NO[preemptible],
        grace_s=row.seconds("grace_s") if row.text("grace_s") else GRACE_S,
        checkpoint_s=_positive(row, "checkpoint_s") if row.text("checkpoint_s") else None,
        time_limit_s=_positive(row, "time_limit_s") if row.text("time_limit_s") else None,
    )


def _workers(row: Row) -> int:
    workers = row.integer("workers", most=_WORKERS_MAX) if row.text("workers") else 1
    if not workers:
        raise row.error("workers", f"an integer from 1 to {_WORKERS_MAX}")
    return workers


def _share(row: Row, gpus: int) -> int:
    if not row.text("gpu_share"):
        return WHOLE_GPU_MILLI
    milli = round(
        WHOLE_GPU_MILLI
        * row.number("gpu_share", allowed := "more than 0 and at most 1, or 1 for several GPUs")
    )
    if not 0 < milli <= WHOLE_GPU_MILLI or (gpus > 1 and milli < WHOLE_GPU_MILLI):
        raise row.error("gpu_share", allowed)
    return milli


def _positive(row: Row, name: str) -> float:
    if not (value := row.seconds(name)):
        raise row.error(name, "a number of seconds > 0")
    return value


# -- traces -----------------------------------------------------------------------------------------


def philly_jobs(path: Path, *, gpus_of_node: int = GPUS_OF_NODE) -> list[SimJob]:
    """Read a Philly job list. Jobs larger than a node become gangs; virtual clusters become tenants."""
    jobs = read_jobs(path)
    first_s = min((job.submitted_s for job in jobs), default=0.0)
    made = []
    for number, job in enumerate(jobs, 1):
        workers = max(1, -(-job.gpus // gpus_of_node))
        while job.gpus % workers:  # 12 GPUs on nodes with 8 GPUs: two workers with 6
            workers += 1
        made.append(
            SimJob(
                job_id=f"job-{number}",
                submitted_s=job.submitted_s - first_s,
                duration_s=max(job.duration_s, 1.0),
                tenant=job.cluster or "default",
                workers=workers,
                gpus=job.gpus // workers,
            )
        )
    return sorted(made, key=lambda job: job.submitted_s)


def openb_jobs(path: Path, *, draw_s: Callable[[random.Random], float], seed: int) -> list[SimJob]:
    """Read an openb pod list. Missing durations and submission times are drawn at random."""
    runs, rng = read_runs(path), random.Random(f"openb {seed}")
    durations = [draw_s(rng) if run.duration_s is None else run.duration_s for run in runs]
    span_s = sum(durations) / max(len(runs), 1)
    made = [
        SimJob(
            job_id=f"job-{number}",
            submitted_s=rng.uniform(0, span_s) if run.submitted_s is None else run.submitted_s,
            duration_s=duration,
            gpus=run.pod.gpus,
            gpu_milli=run.pod.gpu_milli if run.pod.gpus else WHOLE_GPU_MILLI,
            cpu_milli=run.pod.cpu_milli,
            memory_mib=run.pod.memory_mib,
            models=frozenset(run.pod.models),
        )
        for number, (run, duration) in enumerate(zip(runs, durations, strict=True), 1)
    ]
    first_s = min((job.submitted_s for job in made), default=0.0)
    moved = [replace(job, submitted_s=job.submitted_s - first_s) for job in made]
    return sorted(moved, key=lambda job: job.submitted_s)


# -- nodes, load, limits ----------------------------------------------------------------------------


def to_node_facts(trace: Iterable[TraceNode]) -> list[NodeFacts]:
    return [
        NodeFacts(node.name, node.cpu_milli, node.memory_mib, (GpuFacts(model=node.model),) * node.gpus)
        for node in trace
    ]


def uniform_nodes(count: int, *, gpus: int = GPUS_OF_NODE, of_rack: int = 16) -> list[NodeFacts]:
    """Return `count` equal nodes with 12 CPUs and 96 GiB of memory per GPU."""
    return [
        NodeFacts(
            f"node-{number}",
            12_000 * gpus,
            98_304 * gpus,
            (GpuFacts(),) * gpus,
            rack=f"rack-{number // of_rack}",
        )
        for number in range(count)
    ]


def gpu_milli_of(nodes: Iterable[NodeFacts]) -> int:
    return sum(node.amounts.gpu_milli for node in nodes)


def offered_load(jobs: Sequence[SimJob], nodes: Iterable[NodeFacts]) -> float:
    """Return requested / available GPU time until the last submission."""
    span_s = max((job.submitted_s for job in jobs), default=0.0)
    requested = sum(job.runs_s * job.gpu_milli_all for job in jobs)
    return requested / (gpu_milli_of(nodes) * span_s) if span_s else 0.0


def with_load(jobs: Sequence[SimJob], nodes: Sequence[NodeFacts], load: float) -> list[SimJob]:
    """Scale the submission times so that the jobs have this load."""
    factor = offered_load(jobs, nodes) / load
    return [replace(job, submitted_s=job.submitted_s * factor) for job in jobs]


def with_limits(jobs: Iterable[SimJob], *, factor: float, seed: int) -> list[SimJob]:
    """Set missing time limits to the duration times 1 to `factor`."""
    rng = random.Random(f"limits {seed}")
    drawn = [(job, rng.uniform(1.0, factor)) for job in jobs]
    return [
        job if job.time_limit_s is not None else replace(job, time_limit_s=job.duration_s * times)
        for job, times in drawn
    ]
