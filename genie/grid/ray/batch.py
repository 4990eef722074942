"""Runs many small tasks on a Ray cluster in batches: one Ray task per batch, results in order.

`BatchExecutor` splits the tasks into batches and keeps a bounded number of them in flight. A task that raises
loses only its own result; a worker that dies loses its batch, and nothing is retried unless requested. The
code that runs on workers is pickled by value, so Genie need not be installed there.

Does not start Ray (cluster.py). Ray is imported when it is first needed.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass
from typing import Any, Protocol

from genie.errors import GenieError, RayError, UsageError

_log = logging.getLogger(__name__)

BATCH_SIZE_MAX = 100_000
BATCHES_IN_FLIGHT_MAX = 4096
_BATCHES_IN_FLIGHT_PER_SLOT = 2
_BATCH_END_WAIT_S = 0.5
_METRICS_FLUSH_INTERVAL_S = 0.5
_CANCELLED_ERROR = "cancelled"


@dataclass(frozen=True)
class TaskFailure:
    """Replaces the result of a failed task. `index` is the index of the task among all tasks."""

    index: int
    error: str
    traceback: str = ""


class TaskMetrics(Protocol):
    """Counts tasks (genie/grid/metrics.py). `ended` has status and duration in seconds of each ended task."""

    def record_task_changes(self, *, started: int = 0, ended: Sequence[tuple[str, float]] = ()) -> None: ...


class NoTaskMetrics:
    """Counts nothing: BatchExecutor(metrics=NoTaskMetrics())."""

    def record_task_changes(self, *, started: int = 0, ended: Sequence[tuple[str, float]] = ()) -> None: ...


class _BufferedTaskMetrics:
    """Buffers counts, because writing the metrics file takes longer than a small batch."""

    def __init__(self, metrics: TaskMetrics) -> None:
        self._metrics = metrics
        self._started_count = 0
        self._ended_tasks: list[tuple[str, float]] = []
        self._last_flush_at_s = time.monotonic()

    def add_started(self, count: int) -> None:
        self._started_count += count

    def add_ended(self, outcomes: Sequence[tuple[str, float]]) -> None:
        self._ended_tasks += outcomes

    def flush(self, *, force: bool = False) -> None:
        """Write the buffered counts, at most every _METRICS_FLUSH_INTERVAL_S unless `force`."""
        if not self._started_count and not self._ended_tasks:
            return
        if force or time.monotonic() - self._last_flush_at_s >= _METRICS_FLUSH_INTERVAL_S:
            self._metrics.record_task_changes(started=self._started_count, ended=self._ended_tasks)
            self._started_count, self._ended_tasks, self._last_flush_at_s = 0, [], time.monotonic()


class BatchExecutor:
    """Runs tasks in batches. The program must be connected to Ray (`ray.init(address="auto")`)."""

    def __init__(
        self,
        batch_size: int = 10,
        *,
        num_gpus: float | None = None,
        num_cpus: float = 1,
        max_retries: int = 0,
        in_flight_max: int | None = None,
        raise_on_error: bool = False,
        metrics: TaskMetrics | None = None,
    ) -> None:
        """`num_gpus` and `num_cpus` are per batch; `num_gpus` defaults to 1 if the cluster has GPUs.

        Tasks are counted in the metrics of the machine on which this program runs, unless `metrics` is given.

        `max_retries` is how often a batch is retried after its worker died; the default is 0, because its
        tasks may already have had side effects.
        """
        if not 1 <= batch_size <= BATCH_SIZE_MAX:
            raise UsageError(f"batch_size = {batch_size} must be 1 to {BATCH_SIZE_MAX}")
        if in_flight_max is not None and not 1 <= in_flight_max <= BATCHES_IN_FLIGHT_MAX:
            raise UsageError(f"in_flight_max = {in_flight_max} must be 1 to {BATCHES_IN_FLIGHT_MAX}")
        if max_retries < 0 or num_cpus < 0 or (num_gpus is not None and num_gpus < 0):
            raise UsageError("max_retries, num_cpus and num_gpus must not be negative")
        self.batch_size = batch_size
        self._num_gpus = num_gpus
        self._num_cpus = num_cpus
        self._max_retries = max_retries
        self._in_flight_max = in_flight_max
        self._raise_on_error = raise_on_error
        self._metrics: TaskMetrics = metrics if metrics is not None else _default_metrics()
        self._cancelled = threading.Event()

    def submit_batched_tasks(self, function: Callable[..., Any], tasks: Iterable[Any]) -> list[Any]:
        """Return one result per task, in order; a TaskFailure for each task that failed.

        A tuple is passed as the arguments of `function`, anything else as its only argument. With
        `raise_on_error`, the first failure is raised as RayError after all tasks have ended. Ctrl-C cancels
        all tasks. Raises RayError if the program is not connected to Ray.
        """
        ray = _import_connected_ray()
        self._cancelled.clear()
        with _pickle_module_by_value(ray):
            results = self._run_batches(ray, getattr(function, "_function", function), tasks)
        failures = [each for each in results if isinstance(each, TaskFailure)]
        if failures and self._raise_on_error:
            first = failures[0]
            raise RayError(
                f"{len(failures)} of {len(results)} tasks failed; the first is task {first.index}: "
                f"{first.error}\n{first.traceback}".rstrip()
            )
        return results

    def cancel(self) -> None:
        """Cancel all unfinished tasks, from another thread; they fail with 'cancelled'.

        If the tasks come from a generator, it is not read any further, and the rest has no results.
        """
        self._cancelled.set()

    def _run_batches(self, ray: Any, function: Callable[..., Any], tasks: Iterable[Any]) -> list[Any]:
        total = ray.cluster_resources()
        gpus, cpus = float(total.get("GPU", 0)), float(total.get("CPU", 0))
        self._check_batch_fits(cluster_gpus=gpus, cluster_cpus=cpus)
        in_flight_max = self._batches_in_flight_max(cluster_gpus=gpus, cluster_cpus=cpus)
        remote = ray.remote(run_batch).options(
            num_cpus=self._num_cpus,
            num_gpus=self._gpus_per_batch(gpus),
            max_retries=self._max_retries,
            retry_exceptions=False,
            scheduling_strategy="SPREAD",  # batch 0 to the first node, batch 1 to the second, ...
            name=f"batch of {getattr(function, '__name__', 'tasks')}",
        )
        shared = ray.put(ray.cloudpickle.dumps(function))
        results: list[Any] = []
        pending: dict[Any, tuple[int, int]] = {}
        batches = _split_into_batches(tasks, self.batch_size)
        tally = _BufferedTaskMetrics(self._metrics)
        try:
            more = True
            while more or pending:
                while more and len(pending) < in_flight_max and not self._cancelled.is_set():
                    batch = next(batches, None)
                    if batch is None:
                        more = False
                        break
                    pending[remote.remote(shared, batch)] = (len(results), len(batch))
                    tally.add_started(len(batch))
                    results.extend([None] * len(batch))
                if self._cancelled.is_set():
                    _cancel_batches(ray, pending)
                    more = False
                    _fail_unsubmitted_tasks(results, tasks)
                tally.flush()
                tally.add_ended(self._collect_results(ray, pending, results))
        except BaseException:
            _cancel_batches(ray, pending)
            tally.add_ended([(_CANCELLED_ERROR, 0.0)] * sum(count for _, count in pending.values()))
            raise
        finally:
            tally.flush(force=True)
        return results

    def _gpus_per_batch(self, cluster_gpus: float) -> float:
        return self._num_gpus if self._num_gpus is not None else float(min(cluster_gpus, 1))

    def _check_batch_fits(self, *, cluster_gpus: float, cluster_cpus: float) -> None:
        """Raise RayError if the whole cluster is too small for one batch."""
        gpus_per_batch = self._gpus_per_batch(cluster_gpus)
        if gpus_per_batch > cluster_gpus or self._num_cpus > cluster_cpus:
            raise RayError(
                f"a batch requests {gpus_per_batch:g} GPUs and {self._num_cpus:g} CPUs, but the whole "
                f"cluster has {cluster_gpus:g} and {cluster_cpus:g}: it would be pending forever",
                hint="lower num_gpus or num_cpus of the BatchExecutor",
            )

    def _batches_in_flight_max(self, *, cluster_gpus: float, cluster_cpus: float) -> int:
        gpus_per_batch = self._gpus_per_batch(cluster_gpus)
        if gpus_per_batch:
            slots = cluster_gpus / gpus_per_batch
        else:
            slots = cluster_cpus / self._num_cpus if self._num_cpus else cluster_cpus
        wanted = self._in_flight_max or max(2, int(slots * _BATCHES_IN_FLIGHT_PER_SLOT))
        return min(wanted, BATCHES_IN_FLIGHT_MAX)

    def _collect_results(
        self, ray: Any, pending: dict[Any, tuple[int, int]], results: list[Any]
    ) -> list[tuple[str, float]]:
        """Wait up to _BATCH_END_WAIT_S for a batch to end, and store the results of ended batches.

        Returns status and duration in seconds of each ended task.
        """
        outcomes: list[tuple[str, float]] = []
        if not pending:
            return outcomes
        ended, _ = ray.wait(list(pending), num_returns=1, timeout=_BATCH_END_WAIT_S)
        for reference in ended:
            start, count = pending[reference]
            found = _fetch_batch_outcomes(ray, reference, count)
            del pending[reference]
            for index, outcome in enumerate(found, start):
                results[index] = self._unpickle_result(ray, index, outcome)
                outcomes.append((_task_status(results[index]), outcome[-1]))
        return outcomes

    def _unpickle_result(self, ray: Any, task_index: int, outcome: tuple[Any, ...]) -> Any:
        kind, value, trace, _ = outcome
        result: Any
        if kind == "ok":
            try:
                result = ray.cloudpickle.loads(value)
            except Exception as error:
                _log.warning(
                    "could not unpickle the result of a task", extra={"task": task_index}, exc_info=True
                )
                result = TaskFailure(task_index, f"could not unpickle the result: {error!r}")
        else:
            result = TaskFailure(task_index, value, trace)
        return result


def batch_gpu_task(task_id: int, size: int) -> dict[str, Any]:
    """Example task: multiply two `size` x `size` matrices, on a GPU if available."""
    import time

    started_at = time.perf_counter()
    try:
        import torch

        device = "cuda" if torch.cuda.is_available() else "cpu"
        generator = torch.Generator(device=device).manual_seed(task_id)
        values = torch.randn(size, size, device=device, generator=generator)
        total = float((values @ values).sum())
    except ImportError:
        import numpy

        device = "cpu"
        matrix = numpy.random.default_rng(task_id).standard_normal((size, size), dtype=numpy.float32)
        total = float((matrix @ matrix).sum())
    return {
        "task_id": task_id,
        "size": size,
        "device": device,
        "sum": total,
        "seconds": time.perf_counter() - started_at,
    }


def run_batch(pickled: bytes, batch: list[Any]) -> list[tuple[str, Any, str, float]]:
    """Run the tasks of a batch on a worker, each with its own outcome. Self-contained: pickled by value."""
    import asyncio
    import time
    import traceback

    import ray

    cloudpickle: Any = ray.cloudpickle  # untyped
    function = cloudpickle.loads(pickled)
    outcomes = []
    for task in batch:
        started_at = time.perf_counter()
        try:
            value = function(*task) if isinstance(task, tuple) else function(task)
            outcome: tuple[str, Any, str] = ("ok", cloudpickle.dumps(value), "")
        except (
            Exception,
            SystemExit,
            asyncio.CancelledError,
        ) as error:  # not KeyboardInterrupt: Ray cancels with it
            try:
                text = f"{type(error).__name__}: {error}"[:4000]
            except Exception:  # __str__ of the task's exception class failed
                text = f"{type(error).__name__}: could not format the error"
            outcome = ("error", text, traceback.format_exc()[-16000:])
        outcomes.append((*outcome, time.perf_counter() - started_at))
    return outcomes


def _import_connected_ray() -> Any:  # Any: Ray's functions are untyped
    try:
        import ray
    except ImportError:
        raise RayError("Ray is not installed", hint="pip install 'genie-gpu[ray]'") from None
    if not ray.is_initialized():
        raise RayError(
            "this program is not connected to Ray",
            hint='call ray.init(address="auto") on a node of the cluster first',
        )
    return ray


@contextlib.contextmanager
def _pickle_module_by_value(ray: Any) -> Iterator[None]:
    """Pickle functions of this module by value, because workers need not have Genie installed."""
    module = sys.modules[__name__]
    ray.cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        ray.cloudpickle.unregister_pickle_by_value(module)


def _split_into_batches(tasks: Iterable[Any], size: int) -> Iterator[list[Any]]:
    source = iter(tasks)
    while batch := list(itertools.islice(source, size)):
        yield batch


def _fetch_batch_outcomes(ray: Any, reference: Any, count: int) -> list[tuple[Any, ...]]:
    try:
        found: list[tuple[Any, ...]] = ray.get(reference)
        return found
    except ray.exceptions.TaskCancelledError:
        text = _CANCELLED_ERROR
    except ray.exceptions.RayError as error:
        _log.warning("lost a batch of tasks", extra={"why": str(error)[:500]})
        text = f"the batch was lost: {type(error).__name__}: {error}"[:4000]
    return [("error", text, "", 0.0)] * count


def _fail_unsubmitted_tasks(results: list[Any], tasks: Iterable[Any]) -> None:
    """Fail all tasks that were not submitted; not of a generator, which may be infinite."""
    if isinstance(tasks, Sized):
        results.extend(TaskFailure(index, _CANCELLED_ERROR) for index in range(len(results), len(tasks)))


def _task_status(result: Any) -> str:
    if not isinstance(result, TaskFailure):
        return "succeeded"
    return _CANCELLED_ERROR if result.error == _CANCELLED_ERROR else "failed"


def _default_metrics() -> TaskMetrics:
    """Return the metrics of this machine, or NoTaskMetrics if they are not available."""
    try:
        if sys.platform != "linux":
            import psutil  # noqa: F401 - GridMetrics imports it late

        from genie.config import load
        from genie.grid.metrics import GridMetrics

        return GridMetrics(load().paths.state_dir.expanduser())
    except (ImportError, GenieError) as error:
        _log.info("metrics are disabled", extra={"why": str(error)})
        return NoTaskMetrics()


def _cancel_batches(ray: Any, pending: Iterable[Any]) -> None:
    for reference in pending:
        with contextlib.suppress(Exception):  # the connection to Ray may be lost
            ray.cancel(reference)
