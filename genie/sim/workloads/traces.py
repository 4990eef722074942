"""Workloads, and traces of real clusters: openb node and pod lists, and Philly job lists.

An invalid line raises a UsageError that names the file, the line and the allowed values.
"""

from __future__ import annotations

import csv
import datetime
import difflib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import TypeVar

from genie.errors import UsageError
from genie.scheduler.conversion import RESOURCE_AMOUNT_MAX
from genie.scheduler.placement.protocol import ANY_MODEL, NODE_GPUS_MAX, TypicalShape
from genie.scheduler.request import WHOLE_GPU_MILLI

NODE_LIST = "openb_node_list_gpu_node.csv"
POD_LIST_PREFIX = "openb_pod_list_"
TYPICAL_PCT = 95


_Read = TypeVar("_Read")


@dataclass(frozen=True)
class TraceNode:
    """One machine."""

    name: str
    cpu_milli: int
    memory_mib: int
    gpus: int
    model: str


@dataclass(frozen=True)
class TracePod:
    """One request. `models` is as written in the trace; empty means any GPU model."""

    cpu_milli: int
    memory_mib: int
    gpus: int
    gpu_milli: int
    models: tuple[str, ...]

    @property
    def gpu_volume_milli(self) -> int:
        return self.gpus * self.gpu_milli


@dataclass(frozen=True)
class Workload:
    """Nodes and requests."""

    nodes: Sequence[TraceNode]
    pods: Sequence[TracePod]
    model_ids: dict[str, int] = field(init=False)

    def __post_init__(self) -> None:
        if not any(node.gpus for node in self.nodes) or not any(pod.gpus for pod in self.pods):
            raise UsageError("a workload needs nodes with GPUs and requests for them")
        models = sorted({node.model for node in self.nodes})
        object.__setattr__(self, "model_ids", {model: number for number, model in enumerate(models)})

    @property
    def gpu_milli(self) -> int:
        return 1000 * sum(node.gpus for node in self.nodes)

    def model_set(self, pod: TracePod) -> int:
        """Return the allowed models as a bit mask; models that no node has are ignored."""
        if not pod.models:
            return ANY_MODEL
        return sum(1 << self.model_ids[model] for model in set(pod.models) if model in self.model_ids)

    def typical(self, percent: int = TYPICAL_PCT) -> list[TypicalShape]:
        """Return the most frequent shapes that together cover `percent` of the workload, with their shares.

        Some scores of FGD depend on the last bit of a share and on the order of summation, so both are as
        published: differently written model lists are different shapes.
        """
        counts = Counter(
            (pod.cpu_milli, pod.gpu_milli, pod.gpus, "|".join(pod.models), self.model_set(pod))
            for pod in self.pods
        )
        order = sorted(counts, key=lambda shape: (counts[shape], shape), reverse=True)
        sums = list(accumulate(counts[shape] for shape in order))
        needed = sum(1 for total in sums if total * 100 < percent * len(self.pods)) + 1
        covered = sums[min(needed, len(sums)) - 1] / len(self.pods)
        return [
            TypicalShape(
                gpus=shape[2],
                gpu_milli=shape[1],
                cpu_milli=shape[0],
                models=shape[4],
                share=counts[shape] / len(self.pods) / covered,
            )
            for shape in order[:needed]
        ]


@dataclass(frozen=True)
class TraceJob:
    """One finished job. Times are in seconds, `submitted_s` since the epoch."""

    submitted_s: float
    duration_s: float
    gpus: int
    cluster: str


@dataclass(frozen=True)
class TraceRun:
    """A request with its times in seconds; None if the trace does not have them."""

    pod: TracePod
    submitted_s: float | None
    duration_s: float | None


def read_nodes(path: Path) -> list[TraceNode]:
    """Read an openb node list: `sn, cpu_milli, memory_mib, gpu, model`."""
    return read_table(path, {"sn", "cpu_milli", "memory_mib", "gpu", "model"}, _node)


def read_pods(path: Path) -> list[TracePod]:
    """Read an openb pod list: `cpu_milli, memory_mib, num_gpu, gpu_milli`, optionally `gpu_spec`."""
    return read_table(path, {"cpu_milli", "memory_mib", "num_gpu", "gpu_milli"}, _pod)


def read_runs(path: Path) -> list[TraceRun]:
    """Read an openb pod list with `creation_time`, `scheduled_time` and `deletion_time`, all optional.

    The duration is from `scheduled_time` to `deletion_time`.
    """
    return read_table(path, {"cpu_milli", "memory_mib", "num_gpu", "gpu_milli"}, _run)


def read_jobs(path: Path) -> list[TraceJob]:
    """Read a Philly job list: `timestamp, duration, num_gpus, cluster`. Timestamps are UTC."""
    return read_table(path, {"timestamp", "duration", "num_gpus", "cluster"}, _job)


def workloads_in(folder: Path) -> dict[str, Path]:
    """Return the openb pod lists of a directory, by workload name."""
    found = sorted(folder.glob(f"{POD_LIST_PREFIX}*.csv"))
    return {path.stem.removeprefix(POD_LIST_PREFIX): path for path in found}


class Row:
    """One line of a CSV file. Its methods parse a column and raise errors that name line and column."""

    def __init__(self, where: str, values: dict[str, str]) -> None:
        self.where = where
        self._values = values

    def text(self, name: str) -> str:
        return (self._values.get(name) or "").strip()

    def integer(self, name: str, *, most: int = RESOURCE_AMOUNT_MAX) -> int:
        text = self.text(name)
        if not text.isascii() or not text.isdecimal() or int(text) > most:
            raise self.error(name, f"an integer from 0 to {most}")
        return int(text)

    def seconds(self, name: str) -> float:
        return self.number(name, "a number of seconds >= 0")

    def number(self, name: str, allowed: str = "a number >= 0") -> float:
        try:
            value = float(self.text(name))
        except ValueError:
            value = -1.0
        if not 0 <= value < float("inf"):
            raise self.error(name, allowed)
        return value

    def time_s(self, name: str) -> float:
        try:
            sample = datetime.datetime.fromisoformat(self.text(name))
        except ValueError:
            raise self.error(name, "a time like 2017-09-04 10:30:41") from None
        return sample.replace(tzinfo=sample.tzinfo or datetime.UTC).timestamp()

    def error(self, name: str, allowed: str) -> UsageError:
        return UsageError(f"{self.where}: {name} is {self.text(name)!r}; it must be {allowed}")


def read_table(
    path: Path, columns: set[str], parse: Callable[[Row], _Read], *, known: frozenset[str] = frozenset()
) -> list[_Read]:
    """Parse each line of a CSV file that has at least `columns`, and only `known` ones if given."""
    try:
        with path.open(encoding="utf-8", newline="") as lines:
            reader = csv.DictReader(lines)
            unknown = [name for name in reader.fieldnames or () if known and name not in known]
            if unknown:
                raise UsageError(
                    f"{path}:1: unknown column {unknown[0]!r}", hint=_suggestion(unknown[0], known)
                )
            return [parse(row) for row in _rows(path, reader, columns)]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise _unreadable(path, error) from error


def _suggestion(name: str, known: frozenset[str]) -> str:
    near = difflib.get_close_matches(name, sorted(known), n=1)
    return f"did you mean {near[0]}?" if near else f"known columns: {', '.join(sorted(known))}"


def _unreadable(path: Path, error: Exception) -> UsageError:
    match error:
        case FileNotFoundError() | NotADirectoryError():
            hint = "check the path; without --trace, jobs are synthetic"
            return UsageError(f"no such trace file: {str(path)!r}", hint=hint)
        case IsADirectoryError():
            return UsageError(f"trace {str(path)!r} is a directory", hint="give one of its CSV files")
        case OSError():
            why, hint = (error.strerror or str(error)).lower(), "give a readable file"
        case UnicodeDecodeError():
            why, hint = "not UTF-8 text", "give an uncompressed CSV file"
        case _:
            why, hint = str(error), "give a CSV file"
    return UsageError(f"could not read trace {str(path)!r}: {why}", hint=hint)


def _rows(path: Path, reader: csv.DictReader[str], columns: set[str]) -> Iterator[Row]:
    missing = columns - set(reader.fieldnames or ())
    if missing:
        raise UsageError(f"{path}:1: missing column {min(missing)!r}; required: {', '.join(sorted(columns))}")
    for values in reader:
        row = Row(f"{path}:{reader.line_num}", values)
        if None in values or None in values.values():
            raise UsageError(f"{row.where}: wrong number of columns; expected {len(reader.fieldnames or ())}")
        yield row


def _node(row: Row) -> TraceNode:
    return TraceNode(
        name=row.text("sn"),
        cpu_milli=row.integer("cpu_milli"),
        memory_mib=row.integer("memory_mib"),
        gpus=row.integer("gpu", most=NODE_GPUS_MAX),
        model=row.text("model"),
    )


def _pod(row: Row) -> TracePod:
    gpus, milli = row.integer("num_gpu", most=NODE_GPUS_MAX), row.integer("gpu_milli", most=WHOLE_GPU_MILLI)
    if gpus == 0:
        milli = 0
    elif milli == 0 or (gpus > 1 and milli < WHOLE_GPU_MILLI):
        raise row.error("gpu_milli", "1 to 1000 for one GPU, or 1000 for several")
    return TracePod(
        cpu_milli=row.integer("cpu_milli"),
        memory_mib=row.integer("memory_mib"),
        gpus=gpus,
        gpu_milli=milli,
        models=tuple(model for model in row.text("gpu_spec").split("|") if model) if gpus else (),
    )


def _run(row: Row) -> TraceRun:
    submitted, began, ended = (
        row.seconds(name) if row.text(name) else None
        for name in ("creation_time", "scheduled_time", "deletion_time")
    )
    duration = None if began is None or ended is None or ended <= began else ended - began
    return TraceRun(_pod(row), submitted, duration)


def _job(row: Row) -> TraceJob:
    return TraceJob(
        submitted_s=row.time_s("timestamp"),
        duration_s=row.seconds("duration"),
        gpus=row.integer("num_gpus"),
        cluster=row.text("cluster"),
    )
