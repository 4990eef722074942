"""Many small tasks on a Ray cluster, in batches: one Ray task for each batch, results in order.

`BatchExecutor` cuts the tasks into batches and keeps a bounded number of them in flight. A task that
raises costs its own result only; a worker that dies costs its batch, and nothing is run again unless
that was asked for. What runs on the workers is sent by value: Genie need not be installed there.

Not for: starting Ray (ray_cluster.py). Ray itself is imported when it is first needed.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sized
from dataclasses import dataclass
from typing import Any, Protocol

from genie.errors import RayError, UsageError

_log = logging.getLogger(__name__)

BATCH_SIZE_MAX = 100_000
IN_FLIGHT_MAX = 4096
_BATCHES_PER_SLOT = 2
_WAIT_S = 0.5


@dataclass(frozen=True)
class TaskFailure:
    """Stands in the results where a task has none. `index` is the task's place among all tasks."""

    index: int
    error: str
    traceback: str = ""


class TaskMetrics(Protocol):
    """Where ended tasks are counted (genie/grid/metrics.py)."""

    def task_finished(self, status: str, duration_s: float) -> None: ...


class BatchExecutor:
    """Needs a program that is connected to Ray (`ray.init(address="auto")`)."""

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
        """`num_gpus` and `num_cpus` are for one batch; without `num_gpus`, 1 where the cluster has GPUs.

        `max_retries` is how often a batch is run again whose worker died: 0, since its tasks may have
        had effects already.
        """
        if not 1 <= batch_size <= BATCH_SIZE_MAX:
            raise UsageError(f"batch_size = {batch_size} must be 1 to {BATCH_SIZE_MAX}")
        if in_flight_max is not None and not 1 <= in_flight_max <= IN_FLIGHT_MAX:
            raise UsageError(f"in_flight_max = {in_flight_max} must be 1 to {IN_FLIGHT_MAX}")
        if max_retries < 0 or num_cpus < 0 or (num_gpus is not None and num_gpus < 0):
            raise UsageError("max_retries, num_cpus and num_gpus must not be below 0")
        self.batch_size = batch_size
        self._num_gpus = num_gpus
        self._num_cpus = num_cpus
        self._max_retries = max_retries
        self._in_flight_max = in_flight_max
        self._raise_on_error = raise_on_error
        self._metrics = metrics
        self._cancelled = threading.Event()

    def submit_batched_tasks(self, function: Callable[..., Any], tasks: Iterable[Any]) -> list[Any]:
        """One result for each task, in the order of the tasks; a TaskFailure for each that failed.

        A task that is a tuple becomes the arguments of `function`, anything else the only one. With
        `raise_on_error` the first failure is raised as RayError, after all tasks have ended. Ctrl-C
        cancels what is under way. Raises RayError when the program is not connected to Ray.
        """
        ray = _connected_ray()
        self._cancelled.clear()
        with _sent_by_value(ray):
            results = self._run(ray, getattr(function, "_function", function), tasks)
        failures = [each for each in results if isinstance(each, TaskFailure)]
        if failures and self._raise_on_error:
            first = failures[0]
            raise RayError(
                f"{len(failures)} of {len(results)} tasks failed; the first is task {first.index}: "
                f"{first.error}\n{first.traceback}".rstrip()
            )
        return results

    def cancel(self) -> None:
        """From another thread: what has not ended is cancelled, and fails with 'cancelled'.

        Of a generator, no further tasks are taken, and those have no result.
        """
        self._cancelled.set()

    def _run(self, ray: Any, function: Callable[..., Any], tasks: Iterable[Any]) -> list[Any]:
        num_gpus, in_flight_max = self._shares(ray)
        remote = ray.remote(run_batch).options(
            num_cpus=self._num_cpus,
            num_gpus=num_gpus,
            max_retries=self._max_retries,
            retry_exceptions=False,
            name=f"batch of {getattr(function, '__name__', 'tasks')}",
        )
        shared = ray.put(ray.cloudpickle.dumps(function))
        results: list[Any] = []
        pending: dict[Any, tuple[int, int]] = {}
        batches = _batches(tasks, self.batch_size)
        try:
            more = True
            while more or pending:
                while more and len(pending) < in_flight_max and not self._cancelled.is_set():
                    batch = next(batches, None)
                    if batch is None:
                        more = False
                        break
                    pending[remote.remote(shared, batch)] = (len(results), len(batch))
                    results.extend([None] * len(batch))
                if self._cancelled.is_set():
                    _cancel(ray, pending)
                    more = False
                    _fail_rest(results, tasks)
                self._collect(ray, pending, results)
        except BaseException:
            _cancel(ray, pending)
            raise
        return results

    def _shares(self, ray: Any) -> tuple[float, int]:
        """GPUs for each batch, and how many batches may be in flight."""
        total = ray.cluster_resources()
        gpus, cpus = float(total.get("GPU", 0)), float(total.get("CPU", 0))
        each = self._num_gpus if self._num_gpus is not None else float(min(gpus, 1))
        if each > gpus or self._num_cpus > cpus:
            raise RayError(
                f"a batch is to have {each:g} GPUs and {self._num_cpus:g} CPUs, and the whole cluster has "
                f"{gpus:g} and {cpus:g}: it would wait forever",
                hint="lower num_gpus or num_cpus of the BatchExecutor",
            )
        slots = gpus / each if each else cpus / self._num_cpus if self._num_cpus else cpus
        wanted = self._in_flight_max or max(2, int(slots * _BATCHES_PER_SLOT))
        return each, min(wanted, IN_FLIGHT_MAX)

    def _collect(self, ray: Any, pending: dict[Any, tuple[int, int]], results: list[Any]) -> None:
        """Waits a moment for any batch, and puts the results of those that ended into their places."""
        if not pending:
            return
        ended, _ = ray.wait(list(pending), num_returns=1, timeout=_WAIT_S)
        for reference in ended:
            start, count = pending.pop(reference)
            for index, outcome in enumerate(_outcomes(ray, reference, count), start):
                results[index] = self._result(ray, index, outcome)

    def _result(self, ray: Any, index: int, outcome: tuple[Any, ...]) -> Any:
        kind, value, trace, duration_s = outcome
        result: Any
        if kind == "ok":
            try:
                result = ray.cloudpickle.loads(value)
            except Exception as error:
                _log.warning("a result cannot be read", extra={"task": index}, exc_info=True)
                result = TaskFailure(index, f"its result cannot be read here: {error!r}")
        else:
            result = TaskFailure(index, value, trace)
        if self._metrics is not None:
            status = "failed" if isinstance(result, TaskFailure) else "succeeded"
            self._metrics.task_finished(status, duration_s)
        return result


def batch_gpu_task(task_id: int, size: int) -> dict[str, Any]:
    """The demonstration: multiplies two `size` x `size` matrices, on the GPU where there is one."""
    import time

    begun = time.perf_counter()
    try:
        import torch

        device = "cuda" if torch.cuda.is_available() else "cpu"
        made = torch.Generator(device=device).manual_seed(task_id)
        left = torch.randn(size, size, device=device, generator=made)
        total = float((left @ left).sum())
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
        "seconds": time.perf_counter() - begun,
    }


def run_batch(pickled: bytes, batch: list[Any]) -> list[tuple[str, Any, str, float]]:
    """On a worker: each task on its own, so that one cannot spoil the others. Stands alone: sent by value."""
    import time
    import traceback

    import ray

    cloudpickle: Any = ray.cloudpickle  # it carries no types
    function = cloudpickle.loads(pickled)
    outcomes = []
    for task in batch:
        begun = time.perf_counter()
        try:
            value = function(*task) if isinstance(task, tuple) else function(task)
            outcome: tuple[str, Any, str] = ("ok", cloudpickle.dumps(value), "")
        except (Exception, SystemExit) as error:
            text = f"{type(error).__name__}: {error}"[:4000]
            outcome = ("error", text, traceback.format_exc()[-16000:])
        outcomes.append((*outcome, time.perf_counter() - begun))
    return outcomes


def _connected_ray() -> Any:  # Any: Ray's functions carry no types
    try:
        import ray
    except ImportError:
        raise RayError("Ray is not installed here", hint="pip install 'genie[ray]'") from None
    if not ray.is_initialized():
        raise RayError(
            "this program is not connected to Ray",
            hint='call ray.init(address="auto") on a node of the cluster first',
        )
    return ray


@contextlib.contextmanager
def _sent_by_value(ray: Any) -> Iterator[None]:
    """Workers have no Genie, so what they run of this file goes along."""
    module = sys.modules[__name__]
    ray.cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        ray.cloudpickle.unregister_pickle_by_value(module)


def _batches(tasks: Iterable[Any], size: int) -> Iterator[list[Any]]:
    source = iter(tasks)
    while batch := list(itertools.islice(source, size)):
        yield batch


def _outcomes(ray: Any, reference: Any, count: int) -> list[tuple[Any, ...]]:
    try:
        found: list[tuple[Any, ...]] = ray.get(reference)
        return found
    except ray.exceptions.TaskCancelledError:
        text = "cancelled"
    except ray.exceptions.RayError as error:
        _log.warning("a batch was lost", extra={"why": str(error)[:500]})
        text = f"its batch was lost: {type(error).__name__}: {error}"[:4000]
    return [("error", text, "", 0.0)] * count


def _fail_rest(results: list[Any], tasks: Iterable[Any]) -> None:
    """Those of a list that nobody has begun; a generator, which may have no end, is asked for no more."""
    if isinstance(tasks, Sized):
        results.extend(TaskFailure(place, "cancelled") for place in range(len(results), len(tasks)))


def _cancel(ray: Any, pending: Iterable[Any]) -> None:
    for reference in pending:
        with contextlib.suppress(Exception):  # the connection to Ray may be what broke
            ray.cancel(reference)
