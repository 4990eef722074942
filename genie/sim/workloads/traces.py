"""Workloads, and traces of real clusters: openb node and pod lists, and Philly job lists.

An invalid line raises a UsageError that names the file, the line and the allowed values.
"""

from __future__ import annotations

import csv
import datetime
import difflib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

from genie.errors import UsageError
from genie.scheduler.conversion import RESOURCE_AMOUNT_MAX
from genie.scheduler.placement.protocol import ANY_MODEL, NODE_GPUS_MAX, TypicalShape
from genie.scheduler.request import WHOLE_GPU_MILLI

NODE_LIST_FILE = "openb_node_list_gpu_node.csv"
POD_LIST_FILE_PREFIX = "openb_pod_list_"
TYPICAL_SHAPES_COVERED_PCT = 95


_ParsedRow = TypeVar("_ParsedRow")


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
    def total_gpu_milli(self) -> int:
        return self.gpus * self.gpu_milli


@dataclass(frozen=True)
class Workload:
    """Nodes and requests."""

    nodes: Sequence[TraceNode]
    pods: Sequence[TracePod]
    model_numbers: dict[str, int] = field(init=False)

    def __post_init__(self) -> None:
        if not any(node.gpus for node in self.nodes) or not any(pod.gpus for pod in self.pods):
            raise UsageError("a workload needs nodes with GPUs and requests for them")
        models = sorted({node.model for node in self.nodes})
        object.__setattr__(self, "model_numbers", {model: number for number, model in enumerate(models)})

    @property
    def total_gpu_milli(self) -> int:
        return 1000 * sum(node.gpus for node in self.nodes)

    def allowed_models_mask(self, pod: TracePod) -> int:
        """Return the allowed models as a bit mask; models that no node has are ignored."""
        if not pod.models:
            return ANY_MODEL
        return sum(1 << self.model_numbers[model] for model in set(pod.models) if model in self.model_numbers)

    def typical_shapes(self, covered_pct: int = TYPICAL_SHAPES_COVERED_PCT) -> list[TypicalShape]:
        """Return the most frequent shapes that together cover `covered_pct` of the workload, with their
        shares.

        Some scores of FGD depend on the last bit of a share and on the order of summation, so both are as
        published: differently written model lists are different shapes.
        """
        counts = Counter(
            (pod.cpu_milli, pod.gpu_milli, pod.gpus, "|".join(pod.models), self.allowed_models_mask(pod))
            for pod in self.pods
        )
        order = sorted(counts, key=lambda shape: (counts[shape], shape), reverse=True)
        sums = list(accumulate(counts[shape] for shape in order))
        needed = sum(1 for total in sums if total * 100 < covered_pct * len(self.pods)) + 1
        covered = sums[min(needed, len(sums)) - 1] / len(self.pods)
        return [
            TypicalShape(
                gpus=shape[2],
                gpu_milli=shape[1],
                cpu_milli=shape[0],
                models_mask=shape[4],
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
    virtual_cluster: str


@dataclass(frozen=True)
class TracePodRun:
    """A request with its times in seconds; None if the trace does not have them."""

    pod: TracePod
    submitted_s: float | None
    duration_s: float | None


def read_openb_nodes(path: Path) -> list[TraceNode]:
    """Read an openb node list: `sn, cpu_milli, memory_mib, gpu, model`."""
    return read_csv(path, {"sn", "cpu_milli", "memory_mib", "gpu", "model"}, _parse_node)


def read_openb_pods(path: Path) -> list[TracePod]:
    """Read an openb pod list: `cpu_milli, memory_mib, num_gpu, gpu_milli`, optionally `gpu_spec`."""
    return read_csv(path, {"cpu_milli", "memory_mib", "num_gpu", "gpu_milli"}, _parse_pod)


def read_openb_pod_runs(path: Path) -> list[TracePodRun]:
    """Read an openb pod list with `creation_time`, `scheduled_time` and `deletion_time`, all optional.

    The duration is from `scheduled_time` to `deletion_time`.
    """
    return read_csv(path, {"cpu_milli", "memory_mib", "num_gpu", "gpu_milli"}, _parse_pod_run)


def read_philly_trace(path: Path) -> list[TraceJob]:
    """Read a Philly job list: `timestamp, duration, num_gpus, cluster`. Timestamps are UTC."""
    return read_csv(path, {"timestamp", "duration", "num_gpus", "cluster"}, _parse_job)


def find_openb_pod_lists(folder: Path) -> dict[str, Path]:
    """Return the openb pod lists of a directory, by workload name."""
    found = sorted(folder.glob(f"{POD_LIST_FILE_PREFIX}*.csv"))
    return {path.stem.removeprefix(POD_LIST_FILE_PREFIX): path for path in found}


class CsvRow:
    """One line of a CSV file. Its methods parse a column and raise errors that name line and column."""

    def __init__(
        self,
        file_and_line: str,
        values: dict[str, str],
        names_in_file: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """`names_in_file`: columns that have a former name in the file, with that name."""
        self.file_and_line = file_and_line
        self._values = values
        self._names_in_file = names_in_file

    def get_text(self, name: str) -> str:
        return (self._values.get(name) or "").strip()

    def parse_integer(self, name: str, *, maximum: int = RESOURCE_AMOUNT_MAX) -> int:
        text = self.get_text(name)
        if not text.isascii() or not text.isdecimal() or int(text) > maximum:
            raise self.invalid_value_error(name, f"an integer from 0 to {maximum}")
        return int(text)

    def parse_seconds(self, name: str) -> float:
        return self.parse_number(name, "a number of seconds >= 0")

    def parse_number(self, name: str, allowed: str = "a number >= 0") -> float:
        try:
            value = float(self.get_text(name))
        except ValueError:
            value = -1.0
        if not 0 <= value < float("inf"):
            raise self.invalid_value_error(name, allowed)
        return value

    def parse_time_s(self, name: str) -> float:
        try:
            sample = datetime.datetime.fromisoformat(self.get_text(name))
        except ValueError:
            raise self.invalid_value_error(name, "a time like 2017-09-04 10:30:41") from None
        return sample.replace(tzinfo=sample.tzinfo or datetime.UTC).timestamp()

    def invalid_value_error(self, name: str, allowed: str) -> UsageError:
        shown = self._names_in_file.get(name, name)
        return UsageError(f"{self.file_and_line}: {shown} is {self.get_text(name)!r}; it must be {allowed}")


def read_csv(
    path: Path,
    required_columns: set[str],
    parse: Callable[[CsvRow], _ParsedRow],
    *,
    known_columns: frozenset[str] = frozenset(),
    new_column_names: Mapping[str, str] = MappingProxyType({}),
) -> list[_ParsedRow]:
    """Parse each line of a CSV file that has at least `required_columns`, and only `known_columns` ones if
    given. Columns with a former name get the one in `new_column_names`."""
    try:
        with path.open(encoding="utf-8", newline="") as lines:
            reader = csv.DictReader(lines)
            names_in_file = _rename_columns(path, reader, new_column_names)
            unknown = [
                name for name in reader.fieldnames or () if known_columns and name not in known_columns
            ]
            if unknown:
                raise UsageError(
                    f"{path}:1: unknown column {unknown[0]!r}",
                    hint=_suggest_column(unknown[0], known_columns),
                )
            return [parse(row) for row in _iterate_rows(path, reader, required_columns, names_in_file)]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise _unreadable_file_error(path, error) from error


def _rename_columns(path: Path, reader: csv.DictReader[str], new_names: Mapping[str, str]) -> dict[str, str]:
    """Rename the columns of the reader. Return the former names by new name."""
    names = list(reader.fieldnames or ())
    for old in set(names) & set(new_names):
        if new_names[old] in names:
            raise UsageError(
                f"{path}:1: columns {old!r} and {new_names[old]!r} are the same; give one of them"
            )
    if names:
        reader.fieldnames = [new_names.get(name, name) for name in names]
    return {new_names[old]: old for old in names if old in new_names}


def _suggest_column(name: str, known_columns: frozenset[str]) -> str:
    near = difflib.get_close_matches(name, sorted(known_columns), n=1)
    return f"did you mean {near[0]}?" if near else f"known columns: {', '.join(sorted(known_columns))}"


def _unreadable_file_error(path: Path, error: Exception) -> UsageError:
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


def _iterate_rows(
    path: Path, reader: csv.DictReader[str], columns: set[str], names_in_file: Mapping[str, str]
) -> Iterator[CsvRow]:
    missing = columns - set(reader.fieldnames or ())
    if missing:
        raise UsageError(f"{path}:1: missing column {min(missing)!r}; required: {', '.join(sorted(columns))}")
    for values in reader:
        row = CsvRow(f"{path}:{reader.line_num}", values, names_in_file)
        if None in values or None in values.values():
            raise UsageError(
                f"{row.file_and_line}: wrong number of columns; expected {len(reader.fieldnames or ())}"
            )
        yield row


def _parse_node(row: CsvRow) -> TraceNode:
    return TraceNode(
        name=row.get_text("sn"),
        cpu_milli=row.parse_integer("cpu_milli"),
        memory_mib=row.parse_integer("memory_mib"),
        gpus=row.parse_integer("gpu", maximum=NODE_GPUS_MAX),
        model=row.get_text("model"),
    )


def _parse_pod(row: CsvRow) -> TracePod:
    gpus, milli = (
        row.parse_integer("num_gpu", maximum=NODE_GPUS_MAX),
        row.parse_integer("gpu_milli", maximum=WHOLE_GPU_MILLI),
    )
    if gpus == 0:
        milli = 0
    elif milli == 0 or (gpus > 1 and milli < WHOLE_GPU_MILLI):
        raise UsageError(
            f"{row.file_and_line}: gpu_milli is '{milli}'; it must be 1 to 1000 for one GPU, "
            "or 1000 for several"
        )
    return TracePod(
        cpu_milli=row.parse_integer("cpu_milli"),
        memory_mib=row.parse_integer("memory_mib"),
        gpus=gpus,
        gpu_milli=milli,
        models=tuple(model for model in row.get_text("gpu_spec").split("|") if model) if gpus else (),
    )


def _parse_pod_run(row: CsvRow) -> TracePodRun:
    submitted, began, ended = (
        row.parse_seconds(name) if row.get_text(name) else None
        for name in ("creation_time", "scheduled_time", "deletion_time")
    )
    duration = None if began is None or ended is None or ended <= began else ended - began
    return TracePodRun(_parse_pod(row), submitted, duration)


def _parse_job(row: CsvRow) -> TraceJob:
    return TraceJob(
        submitted_s=row.parse_time_s("timestamp"),
        duration_s=row.parse_seconds("duration"),
        gpus=row.parse_integer("num_gpus"),
        virtual_cluster=row.get_text("cluster"),
    )
