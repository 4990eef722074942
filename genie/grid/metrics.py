"""The grid's figures for Prometheus, added up over all processes of this user on this machine.

Each command is a process of its own, so the figures are in a file under the state directory, changed
under a lock. A figure that cannot be kept is logged and never fails the work that it counts. Waiting for
that lock is a thread's work wherever an event loop runs. `text()` is Prometheus' text format 0.0.4.

Not for: serving them (metrics_server.py), or reading health (health_check.py).
"""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from genie.errors import GenieError
from genie.runtime import files

_log = logging.getLogger(__name__)

TASK_BUCKETS_S = (0.1, 0.5, 1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 14400.0, 43200.0, 86400.0)
SYNC_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)
STATUSES_MAX = 32
_OTHER = "other"
_STATUSES = ("succeeded", "failed")
"""Counted from 0, so that the first failure is a rise and not the beginning of a series."""
_LOCK_S = 0.5
_LOCK_STEP_S = 0.005
_FILE_BYTES_MAX = 8 << 20
_WAITING_MAX = 10_000
_WAITING_S = 5.0


class Histogram(msgspec.Struct):
    """`counts` has one more than there are buckets: what is above the last of them."""

    counts: list[int]
    sum_s: float = 0.0

    @classmethod
    def empty(cls, buckets_s: Sequence[float]) -> Histogram:
        return cls(counts=[0] * (len(buckets_s) + 1))

    def add(self, duration_s: float, buckets_s: Sequence[float]) -> None:
        self.counts[bisect.bisect_left(buckets_s, duration_s)] += 1
        self.sum_s += duration_s


class Figures(msgspec.Struct):
    """What the file holds. `active` has for each process how many tasks it waits for."""

    completed: dict[str, int]
    tasks: Histogram
    syncs: Histogram
    scores: dict[str, float | None]
    active: dict[str, int]

    @classmethod
    def empty(cls) -> Figures:
        return cls(
            completed=dict.fromkeys(_STATUSES, 0),
            tasks=Histogram.empty(TASK_BUCKETS_S),
            syncs=Histogram.empty(SYNC_BUCKETS_S),
            scores={},
            active={},
        )

    @property
    def active_tasks(self) -> int:
        return sum(self.active.values())

    def fits(self) -> bool:
        """False for a file of a release with other buckets."""
        return (
            len(self.tasks.counts) == len(TASK_BUCKETS_S) + 1
            and len(self.syncs.counts) == len(SYNC_BUCKETS_S) + 1
        )


class _Writer:
    """What event loops of this process want to have done, in their order, by a thread that lives meanwhile.

    It is no daemon: a program that ends waits for its last figures.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: deque[Callable[[], None]] = deque()
        self._is_at_it = False

    def put(self, work: Callable[[], None]) -> None:
        with self._changed:
            if len(self._waiting) >= _WAITING_MAX:
                _log.warning("a figure could not be kept", extra={"why": "too many are waiting"})
                return
            self._waiting.append(work)
            if self._is_at_it:
                return
            self._is_at_it = True
        try:
            threading.Thread(target=self._work, name="genie-grid-figures").start()
        except RuntimeError:  # the interpreter is about to end
            self._work()

    def wait(self) -> None:
        """Until all that was put is done; not for ever."""
        with self._changed:
            self._changed.wait_for(lambda: not self._is_at_it, timeout=_WAITING_S)

    def _work(self) -> None:
        while True:
            with self._changed:
                if not self._waiting:
                    self._is_at_it = False
                    self._changed.notify_all()
                    return
                work = self._waiting.popleft()
            try:
                work()
            except Exception:  # a thread boundary: one figure must not cost those behind it
                _log.exception("a figure could not be kept")


_WRITER = _Writer()


class GridMetrics:
    """Every method is safe to call from several processes at once, and none raises.

    On an event loop, what changes a figure returns at once; what reads figures waits for that, so loops
    ask for it in a thread.
    """

    def __init__(self, state_dir: Path) -> None:
        self._path = state_dir / "grid" / "metrics.json"

    def task_started(self) -> None:
        """This process waits for one more task. One that ends without `task_ended` is no longer counted."""
        self._change(lambda figures: _add_active(figures, 1))

    def task_ended(self) -> None:
        self._change(lambda figures: _add_active(figures, -1))

    def task_finished(self, status: str, duration_s: float) -> None:
        """`status` is a short word, such as succeeded, failed or cancelled."""

        def change(figures: Figures) -> None:
            known = status in figures.completed or len(figures.completed) < STATUSES_MAX
            name = status if known else _OTHER
            figures.completed[name] = figures.completed.get(name, 0) + 1
            figures.tasks.add(max(0.0, duration_s), TASK_BUCKETS_S)

        self._change(change)

    def sync_finished(self, duration_s: float) -> None:
        self._change(lambda figures: figures.syncs.add(max(0.0, duration_s), SYNC_BUCKETS_S))

    def node_scores(self, scores: Mapping[str, float]) -> None:
        """Replaces all of them. Infinity is a node that is not to be chosen."""
        kept = {name: score if math.isfinite(score) else None for name, score in scores.items()}
        self._change(lambda figures: setattr(figures, "scores", kept))

    def figures(self) -> Figures:
        """As they are now, without the tasks of processes that are gone."""
        _WRITER.wait()
        figures = self._read()
        _drop_gone(figures)
        return figures

    def text(self) -> str:
        return prometheus_text(self.figures())

    def _change(self, change: Callable[[Figures], None]) -> None:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            _WRITER.wait()
            self._write(change)
        else:
            _WRITER.put(lambda: self._write(change))

    def _write(self, change: Callable[[Figures], None]) -> None:
        try:
            files.make_private_directory(self._path.parent)
            with self._locked():
                figures = self._read()
                _drop_gone(figures)
                change(figures)
                # Renamed, not synced: after a power cut counters may begin anew, which Prometheus knows.
                beside = self._path.with_name(".metrics.json.new")
                with os.fdopen(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as out:
                    os.fchmod(out.fileno(), 0o600)  # one that was left there may have other rights
                    out.write(msgspec.json.encode(figures))
                beside.replace(self._path)
        except (OSError, GenieError, TimeoutError) as error:
            _log.warning("a figure could not be kept", extra={"file": str(self._path), "why": str(error)})

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        deadline = time.monotonic() + _LOCK_S
        lock = self._path.with_suffix(".lock")
        while (taken := files.FileLock.try_take(lock)) is None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"process {files.lock_holder(lock)} holds {lock}")
            time.sleep(_LOCK_STEP_S)
        try:
            yield
        finally:
            taken.release()

    def _read(self) -> Figures:
        try:
            raw = self._path.read_bytes()
            figures = msgspec.json.decode(raw[:_FILE_BYTES_MAX], type=Figures)
        except FileNotFoundError:
            return Figures.empty()
        except (OSError, msgspec.DecodeError) as error:
            _log.warning("the figures begin anew", extra={"file": str(self._path), "why": str(error)})
            return Figures.empty()
        return figures if figures.fits() else Figures.empty()


def _add_active(figures: Figures, count: int) -> None:
    mine = _process_id(os.getpid())
    left = figures.active.pop(mine, 0) + count
    if left > 0:
        figures.active[mine] = left


def _drop_gone(figures: Figures) -> None:
    for name in list(figures.active):
        pid = name.partition("-")[0]
        if not pid.isdecimal() or _process_id(int(pid)) != name:
            del figures.active[name]


def _process_id(pid: int) -> str:
    """With the time of its start: numbers come again."""
    import psutil  # late: figures are written beside the work, which need not wait for it

    try:
        return f"{pid}-{psutil.Process(pid).create_time():.2f}"
    except psutil.Error:
        return f"{pid}-gone"


# --- the text format --------------------------------------------------------------------------


def prometheus_text(figures: Figures) -> str:
    """Text format 0.0.4, each name with its HELP and TYPE."""
    lines = [
        *_head("grid_node_health_score", "gauge", "Score of a node; lowest is best, +Inf is not chosen."),
        *(
            f"grid_node_health_score{_labels(node=name)} {'+Inf' if score is None else _number(score)}"
            for name, score in sorted(figures.scores.items())
        ),
        *_head("grid_tasks_completed_total", "counter", "Tasks that have ended, by how."),
        *(
            f"grid_tasks_completed_total{_labels(status=status)} {count}"
            for status, count in sorted(figures.completed.items())
        ),
        *_head("grid_task_duration_seconds", "histogram", "How long tasks took."),
        *_histogram("grid_task_duration_seconds", figures.tasks, TASK_BUCKETS_S),
        *_head("grid_sync_duration_seconds", "histogram", "How long bringing a tree to a node took."),
        *_histogram("grid_sync_duration_seconds", figures.syncs, SYNC_BUCKETS_S),
        *_head("grid_active_tasks", "gauge", "Tasks that a process on this machine waits for."),
        f"grid_active_tasks {figures.active_tasks}",
    ]
    return "\n".join([*lines, ""])


def _head(name: str, kind: str, help_text: str) -> list[str]:
    return [f"# HELP {name} {help_text}", f"# TYPE {name} {kind}"]


def _histogram(name: str, histogram: Histogram, buckets_s: Sequence[float]) -> list[str]:
    lines = []
    below = 0
    for bound, count in zip((*map(_number, buckets_s), "+Inf"), histogram.counts, strict=True):
        below += count
        lines.append(f"{name}_bucket{_labels(le=bound)} {below}")
    return [*lines, f"{name}_sum {_number(histogram.sum_s)}", f"{name}_count {below}"]


def _number(value: float) -> str:
    return repr(float(value))


def _labels(**labels: str) -> str:
    def escaped(text: str) -> str:
        return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")

    return "{" + ",".join(f'{name}="{escaped(value)}"' for name, value in labels.items()) + "}"
