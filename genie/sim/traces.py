"""Reads traces of real clusters: the openb node and pod lists, and Philly's jobs.

A line that is not as the format says is a UsageError that names the file, the line and what is allowed.
Not for: what is done with a trace (replay.py, workload.py).
"""

from __future__ import annotations

import csv
import datetime
import difflib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from genie.errors import UsageError

NODE_LIST = "openb_node_list_gpu_node.csv"
POD_LIST_PREFIX = "openb_pod_list_"

_GPUS_MAX = 16
_FULL_MILLI = 1000
_AMOUNT_MAX = 2**31 - 1

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
    """One request. `models` is as the trace writes it, and empty when any GPU model will do."""

    cpu_milli: int
    memory_mib: int
    gpus: int
    gpu_milli: int
    models: tuple[str, ...]

    @property
    def gpu_volume_milli(self) -> int:
        return self.gpus * self.gpu_milli


@dataclass(frozen=True)
class TraceJob:
    """One job that came, ran and went. Times are in seconds, `submitted_s` since the epoch."""

    submitted_s: float
    duration_s: float
    gpus: int
    cluster: str


@dataclass(frozen=True)
class TraceRun:
    """A request with its times in seconds, where the trace has them. `duration_s` None: nobody knows."""

    pod: TracePod
    submitted_s: float | None
    duration_s: float | None


def read_nodes(path: Path) -> list[TraceNode]:
    """An openb node list: `sn, cpu_milli, memory_mib, gpu, model`."""
    return read_table(path, {"sn", "cpu_milli", "memory_mib", "gpu", "model"}, _node)


def read_pods(path: Path) -> list[TracePod]:
    """An openb pod list: `cpu_milli, memory_mib, num_gpu, gpu_milli`, and perhaps `gpu_spec`."""
    return read_table(path, {"cpu_milli", "memory_mib", "num_gpu", "gpu_milli"}, _pod)


def read_runs(path: Path) -> list[TraceRun]:
    """An openb pod list with times: `creation_time`, `scheduled_time` and `deletion_time`, any of them empty.

    A request ran from when it was scheduled until it was deleted. Some lists have no such columns.
    """
    return read_table(path, {"cpu_milli", "memory_mib", "num_gpu", "gpu_milli"}, _run)


def read_jobs(path: Path) -> list[TraceJob]:
    """A Philly list: `timestamp, duration, num_gpus, cluster`. Timestamps are taken as UTC."""
    return read_table(path, {"timestamp", "duration", "num_gpus", "cluster"}, _job)


def workloads_in(folder: Path) -> dict[str, Path]:
    """Every openb pod list of the folder, by the workload's name."""
    found = sorted(folder.glob(f"{POD_LIST_PREFIX}*.csv"))
    return {path.stem.removeprefix(POD_LIST_PREFIX): path for path in found}


class Row:
    """One line, with the words for what is wrong in it."""

    def __init__(self, where: str, values: dict[str, str]) -> None:
        self.where = where
        self._values = values

    def text(self, name: str) -> str:
        return (self._values.get(name) or "").strip()

    def whole(self, name: str, *, most: int = _AMOUNT_MAX) -> int:
        text = self.text(name)
        if not text.isascii() or not text.isdecimal() or int(text) > most:
            raise self.wrong(name, f"a whole number from 0 to {most}")
        return int(text)

    def seconds(self, name: str) -> float:
        return self.number(name, "a number of seconds from 0")

    def number(self, name: str, allowed: str = "a number from 0") -> float:
        try:
            value = float(self.text(name))
        except ValueError:
            value = -1.0
        if not 0 <= value < float("inf"):
            raise self.wrong(name, allowed)
        return value

    def time_s(self, name: str) -> float:
        try:
            moment = datetime.datetime.fromisoformat(self.text(name))
        except ValueError:
            raise self.wrong(name, "a time like 2017-09-04 10:30:41") from None
        return moment.replace(tzinfo=moment.tzinfo or datetime.UTC).timestamp()

    def wrong(self, name: str, allowed: str) -> UsageError:
        return UsageError(f"{self.where}: {name} is {self.text(name)!r}; it must be {allowed}")


def read_table(
    path: Path, columns: set[str], parse: Callable[[Row], _Read], *, known: frozenset[str] = frozenset()
) -> list[_Read]:
    """A CSV file with these columns at least, and what `parse` makes of each. `known`: and no others."""
    try:
        with path.open(encoding="utf-8", newline="") as lines:
            reader = csv.DictReader(lines)
            unknown = [name for name in reader.fieldnames or () if known and name not in known]
            if unknown:
                raise UsageError(
                    f"{path}:1: there is no such column as {unknown[0]!r}", hint=_like(unknown[0], known)
                )
            return [parse(row) for row in _rows(path, reader, columns)]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise _unreadable(path, error) from error


def _like(name: str, known: frozenset[str]) -> str:
    near = difflib.get_close_matches(name, sorted(known), n=1)
    return f"did you mean {near[0]}?" if near else f"there are {', '.join(sorted(known))}"


def _unreadable(path: Path, error: Exception) -> UsageError:
    match error:
        case FileNotFoundError() | NotADirectoryError():
            hint = "check the path; without a trace, jobs are made up"
            return UsageError(f"there is no trace {str(path)!r}", hint=hint)
        case IsADirectoryError():
            return UsageError(f"the trace {str(path)!r} is a folder", hint="give one of the CSV files in it")
        case OSError():
            why, hint = (error.strerror or str(error)).lower(), "give a file that you can read"
        case UnicodeDecodeError():
            why, hint = "it is not text in UTF-8", "give a CSV file that is not compressed"
        case _:
            why, hint = str(error), "give a CSV file"
    return UsageError(f"the trace {str(path)!r} cannot be read: {why}", hint=hint)


def _rows(path: Path, reader: csv.DictReader[str], columns: set[str]) -> Iterator[Row]:
    missing = columns - set(reader.fieldnames or ())
    if missing:
        raise UsageError(
            f"{path}:1: there is no column {min(missing)!r}; {', '.join(sorted(columns))} are needed"
        )
    for values in reader:
        row = Row(f"{path}:{reader.line_num}", values)
        if None in values or None in values.values():
            raise UsageError(
                f"{row.where}: it must have {len(reader.fieldnames or ())} columns, as the first line"
            )
        yield row


def _node(row: Row) -> TraceNode:
    return TraceNode(
        name=row.text("sn"),
        cpu_milli=row.whole("cpu_milli"),
        memory_mib=row.whole("memory_mib"),
        gpus=row.whole("gpu", most=_GPUS_MAX),
        model=row.text("model"),
    )


def _pod(row: Row) -> TracePod:
    gpus, milli = row.whole("num_gpu", most=_GPUS_MAX), row.whole("gpu_milli", most=_FULL_MILLI)
    if gpus == 0:
        milli = 0
    elif milli == 0 or (gpus > 1 and milli < _FULL_MILLI):
        raise row.wrong("gpu_milli", "1 to 1000 for one GPU, and 1000 for several")
    return TracePod(
        cpu_milli=row.whole("cpu_milli"),
        memory_mib=row.whole("memory_mib"),
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
        gpus=row.whole("num_gpus"),
        cluster=row.text("cluster"),
    )
