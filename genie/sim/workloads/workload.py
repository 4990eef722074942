"""Jobs of the event-driven simulator, read from our CSV format or from a trace.

Our CSV format has one line per job; the first line names the columns, in any order:

    submitted_s            submission time, in seconds from 0 (required)
    duration_s             run time without interruption, in seconds (required)
    job_id                 unique name (default: job-1, job-2, ...)
    tenant                 tenant (default: `default`)
    workers                number of workers; a gang starts as a whole (default: 1)
    gpus_per_worker        from 0 to 16 (default: 1)
    gpu_share              fraction of each GPU, above 0 up to 1; below 1 only with one GPU (default: 1)
    cpus_per_worker        (default: 0)
    memory_mib_per_worker  (default: 0)
    gpu_models             allowed GPU models, separated by | (default: all)
    placed_within          topology constraint: anywhere, rack or node (default: anywhere)
    priority               integer from 0; higher starts first (default: 0)
    preemptible            yes or no (default: no)
    grace_s                grace period on preemption, in seconds (default: 30)
    checkpoint_interval_s  checkpoint interval, in seconds of run time (default: no checkpoints)
    time_limit_s           time limit, in seconds (default: none)

All columns except the first two are optional, and their values may be empty. Former column
names are read too.
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
from genie.sim.workloads.traces import CsvRow, TraceNode, read_csv, read_openb_pod_runs, read_philly_trace

DEFAULT_GRACE_S = 30.0
DEFAULT_GPUS_PER_NODE = 8
_WORKERS_MAX = 100_000
_BOOLEAN_BY_TEXT = {"": False, "no": False, "yes": True}
WORKLOAD_COLUMNS = (
    "job_id", "submitted_s", "duration_s", "tenant", "workers", "gpus_per_worker", "gpu_share",
    "cpus_per_worker", "memory_mib_per_worker", "gpu_models", "placed_within", "priority", "preemptible",
    "grace_s", "checkpoint_interval_s", "time_limit_s",
)  # fmt: skip
_NEW_NAME_BY_OLD_COLUMN = {
    "gpus": "gpus_per_worker",
    "cpus": "cpus_per_worker",
    "memory_mib": "memory_mib_per_worker",
    "models": "gpu_models",
    "within": "placed_within",
    "checkpoint_s": "checkpoint_interval_s",
}
"""Former names of columns, which are still read."""


@dataclass(frozen=True)
class SimJob:
    """One job. Resources are per worker; times are in seconds."""

    job_id: str
    submitted_s: float
    duration_s: float
    tenant: str = "default"
    workers: int = 1
    gpus_per_worker: int = 1
    gpu_milli: int = WHOLE_GPU_MILLI
    cpu_milli_per_worker: int = 0
    memory_mib_per_worker: int = 0
    gpu_models: frozenset[str] = frozenset()
    within: Within = Within.ANYWHERE
    priority: int = 0
    preemptible: bool = False
    grace_s: float = DEFAULT_GRACE_S
    checkpoint_interval_s: float | None = None
    time_limit_s: float | None = None

    @property
    def total_gpu_milli(self) -> int:
        """Total of all workers."""
        return self.workers * self.gpus_per_worker * self.gpu_milli

    @property
    def limited_duration_s(self) -> float:
        """Run time without interruption, limited by the time limit."""
        return self.duration_s if self.time_limit_s is None else min(self.duration_s, self.time_limit_s)

    @property
    def shape(self) -> Shape:
        return _make_shape(
            self.gpus_per_worker,
            self.gpu_milli,
            self.cpu_milli_per_worker,
            self.memory_mib_per_worker,
            self.gpu_models,
        )

    def to_job_request(self, sequence: int) -> JobRequest:
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
def _make_shape(gpus: int, gpu_milli: int, cpu_milli: int, memory_mib: int, models: frozenset[str]) -> Shape:
    """Cached, so that equal jobs share one shape: the scheduler looks up shapes often."""
    return Shape(gpus=gpus, gpu_milli=gpu_milli, cpu_milli=cpu_milli, memory_mib=memory_mib, models=models)


# -- CSV format ------------------------------------------------------------------------------------


def read_workload(path: Path) -> list[SimJob]:
    """Read jobs, sorted by submission time. Raises UsageError with file, line, column and allowed values."""
    numbers = itertools.count(1)
    seen: set[str] = set()

    def parse(row: CsvRow) -> SimJob:
        job = _parse_job(row, f"job-{next(numbers)}")
        if job.job_id in seen:
            raise UsageError(f"{row.file_and_line}: job_id is {job.job_id!r}; it must be unique")
        seen.add(job.job_id)
        return job

    jobs = read_csv(
        path,
        {"submitted_s", "duration_s"},
        parse,
        known_columns=frozenset(WORKLOAD_COLUMNS),
        new_column_names=_NEW_NAME_BY_OLD_COLUMN,
    )
    return sorted(jobs, key=lambda job: job.submitted_s)


def write_workload(path: Path, jobs: Iterable[SimJob]) -> None:
    """Write jobs in the format of `read_workload`. Raises UsageError if the file cannot be written."""
    try:
        with path.open("w", encoding="utf-8", newline="") as file:
            write_workload_csv(file, jobs)
    except OSError as error:
        raise UsageError(f"could not write {path}: {error.strerror}", hint="give another path") from error


def write_workload_csv(file: TextIO, jobs: Iterable[SimJob]) -> None:
    lines = csv.writer(file, lineterminator="\n")
    lines.writerow(WORKLOAD_COLUMNS)
    lines.writerows(map(_format_csv_cells, jobs))


def _format_csv_cells(job: SimJob) -> list[str]:
    values = {
        **{name: str(getattr(job, name)) for name in WORKLOAD_COLUMNS if hasattr(job, name)},
        "submitted_s": f"{job.submitted_s:.3f}",
        "duration_s": f"{job.duration_s:.3f}",
        "gpu_share": f"{job.gpu_milli / WHOLE_GPU_MILLI:g}",
        "cpus_per_worker": f"{job.cpu_milli_per_worker / 1000:g}",
        "placed_within": str(job.within),
        "gpu_models": "|".join(sorted(job.gpu_models)),
        "preemptible": "yes" if job.preemptible else "no",
        "grace_s": f"{job.grace_s:g}",
        "checkpoint_interval_s": (
            "" if job.checkpoint_interval_s is None else f"{job.checkpoint_interval_s:g}"
        ),
        "time_limit_s": "" if job.time_limit_s is None else f"{job.time_limit_s:.3f}",
    }
    return [values[name] for name in WORKLOAD_COLUMNS]


def _parse_job(row: CsvRow, name: str) -> SimJob:
    within, preemptible = row.get_text("placed_within") or Within.ANYWHERE, row.get_text("preemptible")
    if within not in list(Within):
        raise row.invalid_value_error("placed_within", f"one of {', '.join(Within)}")
    if preemptible not in _BOOLEAN_BY_TEXT:
        raise UsageError(f"{row.file_and_line}: preemptible is {preemptible!r}; it must be yes or no")
    gpus = (
        row.parse_integer("gpus_per_worker", maximum=NODE_GPUS_MAX) if row.get_text("gpus_per_worker") else 1
    )
    return SimJob(
        job_id=row.get_text("job_id") or name,
        submitted_s=row.parse_seconds("submitted_s"),
        duration_s=_parse_positive(row, "duration_s"),
        tenant=row.get_text("tenant") or "default",
        workers=_parse_workers(row),
        gpus_per_worker=gpus,
        gpu_milli=_parse_gpu_share(row, gpus),
        cpu_milli_per_worker=round(1000 * row.parse_number("cpus_per_worker"))
        if row.get_text("cpus_per_worker")
        else 0,
        memory_mib_per_worker=row.parse_integer("memory_mib_per_worker")
        if row.get_text("memory_mib_per_worker")
        else 0,
        gpu_models=frozenset(model for model in row.get_text("gpu_models").split("|") if model),
        within=Within(within),
        priority=row.parse_integer("priority") if row.get_text("priority") else 0,
        preemptible=_BOOLEAN_BY_TEXT[preemptible],
        grace_s=row.parse_seconds("grace_s") if row.get_text("grace_s") else DEFAULT_GRACE_S,
        checkpoint_interval_s=_parse_positive(row, "checkpoint_interval_s")
        if row.get_text("checkpoint_interval_s")
        else None,
        time_limit_s=_parse_positive(row, "time_limit_s") if row.get_text("time_limit_s") else None,
    )


def _parse_workers(row: CsvRow) -> int:
    workers = row.parse_integer("workers", maximum=_WORKERS_MAX) if row.get_text("workers") else 1
    if not workers:
        raise UsageError(
            f"{row.file_and_line}: workers is '0'; it must be an integer from 1 to {_WORKERS_MAX}"
        )
    return workers


def _parse_gpu_share(row: CsvRow, gpus: int) -> int:
    if not row.get_text("gpu_share"):
        return WHOLE_GPU_MILLI
    allowed = "more than 0 and at most 1, or 1 for several GPUs"
    milli = round(WHOLE_GPU_MILLI * row.parse_number("gpu_share", allowed))
    if not 0 < milli <= WHOLE_GPU_MILLI or (gpus > 1 and milli < WHOLE_GPU_MILLI):
        raise UsageError(
            f"{row.file_and_line}: gpu_share is {row.get_text('gpu_share')!r}; it must be {allowed}"
        )
    return milli


def _parse_positive(row: CsvRow, name: str) -> float:
    allowed = "a number of seconds > 0"
    if not (value := row.parse_number(name, allowed)):
        raise row.invalid_value_error(name, allowed)
    return value


# -- traces -----------------------------------------------------------------------------------------


def read_philly_jobs(path: Path, *, gpus_per_node: int = DEFAULT_GPUS_PER_NODE) -> list[SimJob]:
    """Read a Philly job list. Jobs larger than a node become gangs; virtual clusters become tenants."""
    jobs = read_philly_trace(path)
    first_s = min((job.submitted_s for job in jobs), default=0.0)
    made = []
    for number, job in enumerate(jobs, 1):
        workers = max(1, -(-job.gpus // gpus_per_node))
        while job.gpus % workers:  # 12 GPUs on nodes with 8 GPUs: two workers with 6
            workers += 1
        made.append(
            SimJob(
                job_id=f"job-{number}",
                submitted_s=job.submitted_s - first_s,
                duration_s=max(job.duration_s, 1.0),
                tenant=job.virtual_cluster or "default",
                workers=workers,
                gpus_per_worker=job.gpus // workers,
            )
        )
    return sorted(made, key=lambda job: job.submitted_s)


def read_openb_jobs(
    path: Path, *, draw_duration_s: Callable[[random.Random], float], seed: int
) -> list[SimJob]:
    """Read an openb pod list. Missing durations and submission times are drawn at random."""
    runs, rng = read_openb_pod_runs(path), random.Random(f"openb {seed}")
    durations = [draw_duration_s(rng) if run.duration_s is None else run.duration_s for run in runs]
    span_s = sum(durations) / max(len(runs), 1)
    made = [
        SimJob(
            job_id=f"job-{number}",
            submitted_s=rng.uniform(0, span_s) if run.submitted_s is None else run.submitted_s,
            duration_s=duration,
            gpus_per_worker=run.pod.gpus,
            gpu_milli=run.pod.gpu_milli if run.pod.gpus else WHOLE_GPU_MILLI,
            cpu_milli_per_worker=run.pod.cpu_milli,
            memory_mib_per_worker=run.pod.memory_mib,
            gpu_models=frozenset(run.pod.models),
        )
        for number, (run, duration) in enumerate(zip(runs, durations, strict=True), 1)
    ]
    first_s = min((job.submitted_s for job in made), default=0.0)
    moved = [replace(job, submitted_s=job.submitted_s - first_s) for job in made]
    return sorted(moved, key=lambda job: job.submitted_s)


# -- nodes, load, limits ----------------------------------------------------------------------------


def to_node_facts(nodes: Iterable[TraceNode]) -> list[NodeFacts]:
    return [
        NodeFacts(node.name, node.cpu_milli, node.memory_mib, (GpuFacts(model=node.model),) * node.gpus)
        for node in nodes
    ]


def uniform_nodes(
    count: int, *, gpus: int = DEFAULT_GPUS_PER_NODE, nodes_per_rack: int = 16
) -> list[NodeFacts]:
    """Return `count` equal nodes with 12 CPUs and 96 GiB of memory per GPU."""
    return [
        NodeFacts(
            f"node-{number}",
            12_000 * gpus,
            98_304 * gpus,
            (GpuFacts(),) * gpus,
            rack=f"rack-{number // nodes_per_rack}",
        )
        for number in range(count)
    ]


def total_gpu_milli_of(nodes: Iterable[NodeFacts]) -> int:
    return sum(node.amounts.gpu_milli for node in nodes)


def offered_load(jobs: Sequence[SimJob], nodes: Iterable[NodeFacts]) -> float:
    """Return requested / available GPU time until the last submission."""
    span_s = max((job.submitted_s for job in jobs), default=0.0)
    requested = sum(job.limited_duration_s * job.total_gpu_milli for job in jobs)
    return requested / (total_gpu_milli_of(nodes) * span_s) if span_s else 0.0


def scale_arrivals_to_load(jobs: Sequence[SimJob], nodes: Sequence[NodeFacts], load: float) -> list[SimJob]:
    """Scale the submission times so that the jobs have this load."""
    factor = offered_load(jobs, nodes) / load
    return [replace(job, submitted_s=job.submitted_s * factor) for job in jobs]


def add_time_limits(jobs: Iterable[SimJob], *, factor: float, seed: int) -> list[SimJob]:
    """Set missing time limits to the duration times 1 to `factor`."""
    rng = random.Random(f"limits {seed}")
    drawn = [(job, rng.uniform(1.0, factor)) for job in jobs]
    return [
        job if job.time_limit_s is not None else replace(job, time_limit_s=job.duration_s * times)
        for job, times in drawn
    ]
