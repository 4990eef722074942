"""Grid metrics for Prometheus, summed over all processes of this user on this machine.

Each command is a process of its own, so the metrics are stored in a file under the state directory, updated
under a lock. An update that fails is logged and never fails the work that it counts. Where an event loop
runs, a thread waits for the lock. `text()` returns Prometheus text format 0.0.4. Counting needs only the
standard library (on Linux), because programs with a BatchExecutor count tasks on nodes without Genie's
packages.

Does not serve metrics (metrics_server.py) or read health (health/check.py).
"""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import itertools
import json
import logging
import math
import os
import stat
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from genie.errors import GenieError
from genie.processes import files

if TYPE_CHECKING:
    from prometheus_client.core import Metric

_log = logging.getLogger(__name__)

TASK_DURATION_BUCKETS_S = (0.1, 0.5, 1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 14400.0, 43200.0, 86400.0)
SYNC_DURATION_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)
TASK_STATUSES_MAX = 32
_OTHER_STATUS = "other"
_INITIAL_STATUSES = ("succeeded", "failed")
"""Initialised to 0, so that rate() sees the first failure."""
_FILE_LOCK_TIMEOUT_S = 2.0
_FILE_LOCK_RETRY_INTERVAL_S = 0.005
_METRICS_FILE_BYTES_MAX = 8 << 20
_COUNT_MAX = 2**63 - 1
_METRICS_FILE_OPEN_FLAGS = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOFOLLOW", 0)  # not on Windows
ACTIVE_RUNS_MAX = 10_000
_PID_DIGITS_MAX = 10
_ENDED_PROCESS_START_TIME = "gone"
_PENDING_UPDATES_MAX = 10_000
_PENDING_UPDATES_TIMEOUT_S = 5.0
_DECODE_ERRORS = (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError)
"""Raised while decoding a file that is not JSON or has the wrong structure."""


@dataclass
class Histogram:
    """`counts` has one entry per bucket and a last one for values above all buckets."""

    counts: list[int]
    sum_s: float = 0.0

    @classmethod
    def empty(cls, buckets_s: Sequence[float]) -> Histogram:
        return cls(counts=[0] * (len(buckets_s) + 1))

    def add(self, duration_s: float, buckets_s: Sequence[float]) -> None:
        self.counts[bisect.bisect_left(buckets_s, duration_s)] += 1
        self.sum_s += duration_s


@dataclass(frozen=True)
class ActiveRun:
    """A run that has not completed. `grid_file` is the file that lists `node`; `started` is Unix time."""

    node: str
    grid_file: str
    started: float


@dataclass
class MetricsSnapshot:
    """The contents of the file. `active` is the number of unfinished batch tasks by process; `runs` are the
    active runs by ID, attached and detached."""

    completed: dict[str, int]
    tasks: Histogram
    syncs: Histogram
    scores: dict[str, float | None]
    active: dict[str, int]
    runs: dict[str, ActiveRun] = field(default_factory=dict)

    @classmethod
    def empty(cls) -> MetricsSnapshot:
        return cls(
            completed=dict.fromkeys(_INITIAL_STATUSES, 0),
            tasks=Histogram.empty(TASK_DURATION_BUCKETS_S),
            syncs=Histogram.empty(SYNC_DURATION_BUCKETS_S),
            scores={},
            active={},
        )

    @property
    def active_tasks(self) -> int:
        return sum(self.active.values()) + len(self.runs)

    def count_completed_task(self, status: str, duration_s: float) -> None:
        """Add one completed task. Beyond TASK_STATUSES_MAX distinct statuses, it counts as 'other'."""
        known = status in self.completed or len(self.completed) < TASK_STATUSES_MAX
        name = status if known else _OTHER_STATUS
        self.completed[name] = self.completed.get(name, 0) + 1
        self.tasks.add(_finite_duration_s(duration_s), TASK_DURATION_BUCKETS_S)

    def has_current_buckets(self) -> bool:
        """False for a file written by a release with different buckets."""
        return (
            len(self.tasks.counts) == len(TASK_DURATION_BUCKETS_S) + 1
            and len(self.syncs.counts) == len(SYNC_DURATION_BUCKETS_S) + 1
        )


class _UpdateWriter:
    """Applies updates from event loops in order, in a thread that runs only while updates are pending.

    The thread is not a daemon, so the interpreter waits for the last updates at exit.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Discard all state in a forked child: the parent's thread applies the pending updates."""
        self._changed = threading.Condition()
        self._pending_updates: deque[Callable[[], None]] = deque()
        self._is_running = False

    def enqueue(self, work: Callable[[], None]) -> None:
        with self._changed:
            if len(self._pending_updates) >= _PENDING_UPDATES_MAX:
                _log.warning(
                    "dropped a metrics update", extra={"why": f"{_PENDING_UPDATES_MAX} updates are pending"}
                )
                return
            self._pending_updates.append(work)
            if self._is_running:
                return
            self._is_running = True
        try:
            threading.Thread(target=self._apply_pending_updates, name="genie-grid-snapshot").start()
        except RuntimeError:  # the interpreter is shutting down
            self._apply_pending_updates()

    def wait_until_applied(self) -> None:
        """Wait until all pending updates are applied, at most _PENDING_UPDATES_TIMEOUT_S."""
        with self._changed:
            self._changed.wait_for(lambda: not self._is_running, timeout=_PENDING_UPDATES_TIMEOUT_S)

    def _apply_pending_updates(self) -> None:
        while True:
            with self._changed:
                if not self._pending_updates:
                    self._is_running = False
                    self._changed.notify_all()
                    return
                work = self._pending_updates.popleft()
            try:
                work()
            except Exception:  # a thread boundary: a failed update must not lose the following ones
                _log.exception("could not update the metrics")


_UPDATE_WRITER = _UpdateWriter()
_FORK_LOCK = threading.RLock()
"""Held while this process holds the file lock, which a child forked at that time would inherit."""


def _after_fork_in_child() -> None:
    _FORK_LOCK.release()
    _UPDATE_WRITER.reset()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_FORK_LOCK.acquire, after_in_parent=_FORK_LOCK.release, after_in_child=_after_fork_in_child
    )


class GridMetrics:
    """Every method is safe to call from several processes at once, and none raises.

    On an event loop, updates return immediately. `snapshot` and `text` block until pending updates are
    applied, so event loops call them in a thread.
    """

    def __init__(self, state_dir: Path) -> None:
        self._metrics_file = state_dir / "grid" / "metrics.json"

    def record_run_started(self, run_id: str, run: ActiveRun) -> None:
        """Count the run as active until `record_run_ended`, whether or not a process waits for it. At most
        ACTIVE_RUNS_MAX are stored; the oldest is dropped first."""

        def change(snapshot: MetricsSnapshot) -> None:
            snapshot.runs[run_id] = run
            while len(snapshot.runs) > ACTIVE_RUNS_MAX:
                del snapshot.runs[next(iter(snapshot.runs))]

        self._apply_or_enqueue(change)

    def record_run_ended(self, run_id: str, status: str, duration_s: float) -> None:
        """Count an active run as completed. A run that is not active is ignored."""

        def change(snapshot: MetricsSnapshot) -> None:
            if snapshot.runs.pop(run_id, None) is not None:
                snapshot.count_completed_task(status, duration_s)

        self._apply_or_enqueue(change)

    def record_task_changes(self, *, started: int = 0, ended: Sequence[tuple[str, float]] = ()) -> None:
        """Add `started` active tasks of this process; `ended` has status and duration in seconds of others.

        The active tasks of a process that has ended are dropped.
        """

        def change(snapshot: MetricsSnapshot) -> None:
            _add_active_tasks(snapshot, started - len(ended))
            for status, duration_s in ended:
                snapshot.count_completed_task(status, duration_s)

        self._apply_or_enqueue(change)

    def record_sync(self, duration_s: float) -> None:
        self._apply_or_enqueue(
            lambda snapshot: snapshot.syncs.add(_finite_duration_s(duration_s), SYNC_DURATION_BUCKETS_S)
        )

    def record_node_scores(self, scores: Mapping[str, float]) -> None:
        """Replace all scores. Infinity marks a node that must not be chosen."""
        stored = {name: score if math.isfinite(score) else None for name, score in scores.items()}

        def change(snapshot: MetricsSnapshot) -> None:
            snapshot.scores = stored

        self._apply_or_enqueue(change)

    def read_snapshot(self) -> MetricsSnapshot:
        """Return the current metrics, without the tasks of processes that have ended."""
        _UPDATE_WRITER.wait_until_applied()
        snapshot = self._read_metrics_file()
        _drop_tasks_of_ended_processes(snapshot)
        return snapshot

    def text(self) -> str:
        return prometheus_text(self.read_snapshot())

    def _apply_or_enqueue(self, change: Callable[[MetricsSnapshot], None]) -> None:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            _UPDATE_WRITER.wait_until_applied()
            self._apply_to_file(change)
        else:
            _UPDATE_WRITER.enqueue(lambda: self._apply_to_file(change))

    def _apply_to_file(self, change: Callable[[MetricsSnapshot], None]) -> None:
        try:
            files.make_private_directory(self._metrics_file.parent)
            with self._hold_file_lock():
                snapshot = self._read_metrics_file()
                _drop_tasks_of_ended_processes(snapshot)
                change(snapshot)
                data = _encode_snapshot(snapshot)
                # Renamed without fsync: a power cut may reset counters, which Prometheus handles.
                temporary = self._metrics_file.with_name(".metrics.json.new")
                temporary.unlink(missing_ok=True)  # a leftover may have any type and mode
                with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as out:
                    out.write(data)
                temporary.replace(self._metrics_file)
        except (OSError, GenieError, TimeoutError, ValueError) as error:
            _log.warning(
                "could not update the metrics", extra={"file": str(self._metrics_file), "why": str(error)}
            )

    @contextlib.contextmanager
    def _hold_file_lock(self) -> Iterator[None]:
        deadline = time.monotonic() + _FILE_LOCK_TIMEOUT_S
        lock = self._metrics_file.with_suffix(".lock")
        while True:
            with _FORK_LOCK:
                if (taken := files.FileLock.try_acquire(lock)) is not None:
                    try:
                        yield
                    finally:
                        taken.release()
                    return
            if time.monotonic() > deadline:
                raise TimeoutError(f"process {files.read_lock_holder_pid(lock)} holds the lock {lock}")
            time.sleep(_FILE_LOCK_RETRY_INTERVAL_S)

    def _read_metrics_file(self) -> MetricsSnapshot:
        try:
            with os.fdopen(os.open(self._metrics_file, os.O_RDONLY | _METRICS_FILE_OPEN_FLAGS), "rb") as file:
                if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                    raise ValueError("the metrics file is not a regular file")
                data = file.read(_METRICS_FILE_BYTES_MAX + 1)
            if len(data) > _METRICS_FILE_BYTES_MAX:
                raise ValueError(f"the metrics file is larger than {_METRICS_FILE_BYTES_MAX} bytes")
            snapshot = _decode_snapshot(data)
        except FileNotFoundError:
            return MetricsSnapshot.empty()
        except (OSError, *_DECODE_ERRORS) as error:
            _log.warning(
                "reset the metrics: the metrics file was unreadable",
                extra={"file": str(self._metrics_file), "why": str(error)},
            )
            return MetricsSnapshot.empty()
        return snapshot if snapshot.has_current_buckets() else MetricsSnapshot.empty()


def _encode_snapshot(snapshot: MetricsSnapshot) -> bytes:
    """Encode as JSON of at most _METRICS_FILE_BYTES_MAX; the oldest runs are dropped to fit.

    Raises ValueError if it still does not fit, or for a number that JSON cannot represent.
    """
    data = json.dumps(snapshot, default=vars, allow_nan=False)
    excess = len(data) - _METRICS_FILE_BYTES_MAX
    if excess > 0:
        while excess > 0 and snapshot.runs:
            oldest = next(iter(snapshot.runs))
            excess -= len(json.dumps({oldest: vars(snapshot.runs.pop(oldest))}))
        data = json.dumps(snapshot, default=vars, allow_nan=False)
    if len(data) > _METRICS_FILE_BYTES_MAX:
        raise ValueError(f"the metrics file would be larger than {_METRICS_FILE_BYTES_MAX} bytes")
    return data.encode()


def _decode_snapshot(data: bytes) -> MetricsSnapshot:
    """Raises one of _DECODE_ERRORS; a file with one invalid value is rejected as a whole."""
    found = json.loads(data)
    return MetricsSnapshot(
        completed={
            _validate_label(each): _require_count(count) for each, count in found["completed"].items()
        },
        tasks=_decode_histogram(found["tasks"]),
        syncs=_decode_histogram(found["syncs"]),
        scores={
            _validate_label(node): None if score is None else _require_float(score)
            for node, score in found["scores"].items()
        },
        active={process: _require_count(count) for process, count in found["active"].items()},
        runs={
            run_id: ActiveRun(
                _require_type(run["node"], str),
                _require_type(run["grid_file"], str),
                _require_float(run["started"]),
            )
            for run_id, run in found.get("runs", {}).items()
        },
    )


def _decode_histogram(found: Any) -> Histogram:
    return Histogram([_require_count(count) for count in found["counts"]], _require_float(found["sum_s"]))


def _require_type(value: Any, *kinds: type) -> Any:  # Any: it is of one of `kinds`
    if type(value) not in kinds:  # not isinstance: a bool is not accepted as an int
        raise TypeError(f"{value!r:.80} is not of type {kinds[-1].__name__}")
    return value


def _require_count(value: Any) -> int:
    count: int = _require_type(value, int)
    if not 0 <= count <= _COUNT_MAX:
        raise ValueError(f"invalid count in the metrics file: not between 0 and {_COUNT_MAX}")
    return count


def _require_float(value: Any) -> float:
    number = float(_require_type(value, int, float))
    if not math.isfinite(number):
        raise ValueError(f"invalid number in the metrics file: {number} is not finite")
    return number


def _validate_label(text: str) -> str:
    text.encode()  # raises UnicodeEncodeError for a lone surrogate
    return text


def _finite_duration_s(reported_s: float) -> float:
    """Return 0 for invalid durations: JSON has no infinity, so the file could not be read again."""
    return max(0.0, reported_s) if math.isfinite(reported_s) else 0.0


def _add_active_tasks(snapshot: MetricsSnapshot, count: int) -> None:
    own = _process_identity(os.getpid())
    remaining = snapshot.active.pop(own, 0) + count
    if remaining > 0:
        snapshot.active[own] = remaining


def _drop_tasks_of_ended_processes(snapshot: MetricsSnapshot) -> None:
    for name in list(snapshot.active):
        pid = name.partition("-")[0]
        is_pid = (
            pid.isdecimal()
            and len(pid) <= _PID_DIGITS_MAX
            and not name.endswith(f"-{_ENDED_PROCESS_START_TIME}")
        )
        if not is_pid or _process_identity(int(pid)) != name:
            del snapshot.active[name]


def _process_identity(pid: int) -> str:
    """Return the PID with the start time, because PIDs are reused."""
    return f"{pid}-{_process_start_time(pid) or _ENDED_PROCESS_START_TIME}"


def _process_start_time(pid: int) -> str:
    """In clock ticks since boot on Linux, else in Unix time; '' if the process has ended."""
    if sys.platform != "linux":
        import psutil

        try:
            return f"{psutil.Process(pid).create_time():.2f}"
        except psutil.Error:
            return ""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


# --- the Prometheus text format ---------------------------------------------------------------


def prometheus_text(snapshot: MetricsSnapshot) -> str:
    """Return the metrics in Prometheus text format 0.0.4."""
    # Imported late: it takes 60 ms, and nodes that only count tasks do not have it.
    from prometheus_client import generate_latest

    return generate_latest(_SnapshotCollector(snapshot)).decode()


class _SnapshotCollector:
    """A prometheus_client collector of one snapshot."""

    def __init__(self, snapshot: MetricsSnapshot) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterator[Metric]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        snapshot = self._snapshot
        scores = GaugeMetricFamily(
            "grid_node_health_score",
            "Score of a node; the lowest is the best, +Inf is never chosen.",
            labels=["node"],
        )
        for node, score in sorted(snapshot.scores.items()):
            scores.add_metric([node], math.inf if score is None else score)
        yield scores
        completed = CounterMetricFamily(
            "grid_tasks_completed", "Completed tasks by final status.", labels=["status"]
        )
        for status, count in sorted(snapshot.completed.items()):
            completed.add_metric([status], count)
        yield completed
        yield _histogram_metric(
            "grid_task_duration_seconds",
            "Duration of completed tasks.",
            snapshot.tasks,
            TASK_DURATION_BUCKETS_S,
        )
        yield _histogram_metric(
            "grid_sync_duration_seconds",
            "Duration of a sync to one node.",
            snapshot.syncs,
            SYNC_DURATION_BUCKETS_S,
        )
        yield GaugeMetricFamily(
            "grid_active_tasks", "Runs and batch tasks that have not completed.", value=snapshot.active_tasks
        )


def _histogram_metric(name: str, help_text: str, histogram: Histogram, buckets_s: Sequence[float]) -> Metric:
    from prometheus_client.core import HistogramMetricFamily

    bounds = (*(repr(float(bound)) for bound in buckets_s), "+Inf")
    counts = itertools.accumulate(histogram.counts)
    return HistogramMetricFamily(
        name, help_text, buckets=list(zip(bounds, counts, strict=True)), sum_value=histogram.sum_s
    )
