"""Start of a controller with a large history: time and memory to load it, and whether the lease is renewed.

    python benchmarks/bench_load.py [--json] [--rounds N] [--jobs 300000] [--dir DIR]

Another process writes finished jobs into an embedded store. Then a controller is elected, loads all of them
and trims the history. Its settings are the defaults, except for the number of jobs to keep and a bound of the
history below what was written. Each round has its own store, in DIR (default: a temporary directory).

The lease must never expire meanwhile: `renewal_gap_max` is the longest time between two renewals in relation
to the lease, `terms_lost` the number of times that leadership was lost. The baseline of `load` is the lease.
"""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import resource
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import report

if TYPE_CHECKING:
    from genie.controller.controller import Controller
    from genie.controller.store.sqlite import SqliteStore
    from genie.model.job import Job

STEP_S = 0.05
START_S_MAX = 300.0
TRIM_S_MAX = 300.0
TENANTS = 10


@dataclass
class LoadSamples:
    load_s: list[float] = field(default_factory=list)
    gap_shares: list[float] = field(default_factory=list)
    blocked_ms: list[float] = field(default_factory=list)
    memory_mib: list[float] = field(default_factory=list)
    trim_s: list[float] = field(default_factory=list)
    history_shares: list[float] = field(default_factory=list)
    terms_lost: int = 0


# -- writing, in another process: its memory must not count ------------------------------------------


def write_jobs(path: Path, count: int) -> None:
    asyncio.run(_write_jobs(path, count))


async def _write_jobs(path: Path, count: int) -> None:
    import msgspec

    from genie.controller.rows import Counter
    from genie.controller.store import Put
    from genie.controller.store.sqlite import SqliteStore

    store = await SqliteStore.open(path)
    try:
        batch: list[Put] = [Put("counter/sequence", msgspec.json.encode(Counter(value=count)))]
        for number in range(1, count + 1):
            job = finished_job(number)
            batch.append(Put(f"job/{job.job_id}", msgspec.json.encode(job)))
            if len(batch) == 128 or number == count:
                await store.commit([], batch)
                batch = []
    finally:
        await store.close()


def finished_job(number: int) -> Job:
    """A job as a controller stores it: four transitions, an environment, one placement."""
    from genie.model.job import Job, JobSpec, JobState, Placement, Resources, Transition

    now = time.time()
    steps = {
        JobState.QUEUED: "submitted",
        JobState.PLACING: "fits: node-17 (best fit)",
        JobState.RUNNING: "started on node node-17",
        JobState.SUCCEEDED: "exit code 0",
    }
    spec = JobSpec(
        name=f"train-{number % 1000}",
        command=("python", "train.py", "--config", f"configs/experiment-{number}.yaml"),
        env={f"VARIABLE_{index}": "value" * 8 for index in range(12)},
        resources=Resources(gpus=1),
    )
    return Job(
        job_id=f"j-{number:08d}",
        tenant=f"team-{number % TENANTS}",
        owner="0123456789ab",
        spec=spec,
        state=JobState.SUCCEEDED,
        reason="exit code 0",
        submitted_at=now,
        started_at=now,
        ended_at=now,
        sequence=number,
        exit_code=0,
        placements=(Placement(node_id="node-17", incarnation=1, gpu_ids=(3,), epoch=number),),
        history=tuple(Transition(state=state, at=now, reason=reason) for state, reason in steps.items()),
        request_id=f"request-{number}",
    )


# -- loading -----------------------------------------------------------------------------------------


class LeaseRenewals:
    """The times at which the lease of a store was granted and renewed."""

    def __init__(self, store: SqliteStore) -> None:
        self.at_s: list[float] = []
        grant, keep_alive = store.grant_lease, store.keep_alive

        async def granting(*arguments: object, **more: object) -> int:
            lease_id = await grant(*arguments, **more)  # type: ignore[arg-type]
            self.at_s.append(time.monotonic())
            return lease_id

        async def keeping(*arguments: object, **more: object) -> None:
            await keep_alive(*arguments, **more)  # type: ignore[arg-type]
            self.at_s.append(time.monotonic())

        store.grant_lease = granting  # type: ignore[method-assign, assignment]
        store.keep_alive = keeping  # type: ignore[method-assign, assignment]

    def gap_max_s(self) -> float:
        """Until now: the longest time without a renewal."""
        times = [*self.at_s, time.monotonic()]
        return max(after - before for before, after in itertools.pairwise(times))


@asynccontextmanager
async def measure_loop_blocking(blocked_ms: list[float]) -> AsyncIterator[None]:
    """Appends the longest time for which the event loop ran nothing else."""
    longest_s = 0.0

    async def watch() -> None:
        nonlocal longest_s
        while True:
            before_s = time.monotonic()
            await asyncio.sleep(STEP_S / 10)
            longest_s = max(longest_s, time.monotonic() - before_s - STEP_S / 10)

    async with asyncio.TaskGroup() as group:
        watching = group.create_task(watch())
        try:
            yield
        finally:
            watching.cancel()
            blocked_ms.append(longest_s * 1000)


async def wait_until(is_true: Callable[[], bool], *, seconds: float, what: str) -> None:
    deadline_s = time.monotonic() + seconds
    while not is_true():
        if time.monotonic() > deadline_s:
            raise SystemExit(f"not within {seconds:g} s: {what}")
        await asyncio.sleep(STEP_S)


def history_bytes(controller: Controller) -> int:
    table = controller._ledger.jobs
    return sum(table.size_bytes(job_id) for job_id in table)


def memory_max_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


async def measure(folder: Path, samples: LoadSamples) -> None:
    from genie.config import ControllerConfig
    from genie.controller.controller import Controller
    from genie.controller.store.sqlite import SqliteStore
    from genie.processes.clock import SystemClock
    from genie.runtime.network import TcpNetwork

    path = folder / "store.sqlite3"
    written_bytes = path.stat().st_size
    bound = min(ControllerConfig().history_bytes_max, written_bytes // 4)
    config = ControllerConfig(port=0, jobs_kept=1_000_000, history_bytes_max=bound)
    before_mib = memory_max_mib()
    clock = SystemClock()
    store = await SqliteStore.open(path, clock=clock)
    renewals = LeaseRenewals(store)
    controller = Controller(
        config, state_dir=folder, store=store, network=TcpNetwork(), clock=clock, name="bench"
    )
    tokens: set[int] = set()

    def is_leading() -> bool:
        tokens.add(controller._election.fencing_token)
        return controller.is_leading

    def is_trimmed() -> bool:
        tokens.add(controller._election.fencing_token)
        return history_bytes(controller) <= bound

    try:
        async with asyncio.TaskGroup() as group, measure_loop_blocking(samples.blocked_ms):
            running = group.create_task(controller.run())
            await wait_until(lambda: bool(renewals.at_s), seconds=START_S_MAX, what="elected")
            began_s = renewals.at_s[0]
            await wait_until(is_leading, seconds=START_S_MAX, what="all jobs are loaded")
            loaded_s = time.monotonic()
            samples.load_s.append(loaded_s - began_s)
            await wait_until(is_trimmed, seconds=TRIM_S_MAX, what="the history is trimmed")
            samples.trim_s.append(time.monotonic() - loaded_s)
            samples.gap_shares.append(renewals.gap_max_s() / config.leader_ttl_s)
            samples.memory_mib.append(memory_max_mib() - before_mib)
            samples.history_shares.append(history_bytes(controller) / bound)
            samples.terms_lost += len(tokens - {0}) - 1
            running.cancel()
    finally:
        await store.close()


def main() -> int:
    parser = report.make_parser((__doc__ or "").splitlines()[0], rounds=1)
    parser.add_argument(
        "--jobs", type=report.parse_positive_int, default=300_000, help="finished jobs (default: 300000)"
    )
    parser.add_argument("--dir", type=Path, default=None, help="folder of the files (default: temporary)")
    given = parser.parse_args()
    samples = LoadSamples()
    for _ in range(given.rounds):
        with report.use_temporary_state(given.dir) as folder:
            spawn = multiprocessing.get_context("spawn")
            writer = spawn.Process(target=write_jobs, args=(folder / "store.sqlite3", given.jobs))
            writer.start()
            writer.join()
            if writer.exitcode != 0:
                raise SystemExit("could not write the jobs")
            asyncio.run(measure(folder, samples))
    return report.print_figures(make_figures(samples), as_json=given.json)


def make_figures(samples: LoadSamples) -> list[report.Figure]:
    from genie.config import ControllerConfig

    ttl_s = ControllerConfig().leader_ttl_s
    most = report.value_at_most
    return [
        report.make_figure("load", max(samples.load_s), unit="s", samples=samples.load_s, baseline=ttl_s),
        report.make_figure(
            "renewal_gap_max",
            max(samples.gap_shares),
            unit="of the lease",
            samples=samples.gap_shares,
            goal=most(1.0),
        ),
        report.make_figure("terms_lost", samples.terms_lost, unit="", samples=(), goal=most(0)),
        report.make_figure("loop_blocked_max", max(samples.blocked_ms), samples=samples.blocked_ms),
        report.make_figure("memory_growth", max(samples.memory_mib), unit="MiB", samples=samples.memory_mib),
        report.make_figure("trim", max(samples.trim_s), unit="s", samples=samples.trim_s),
        report.make_figure(
            "history",
            max(samples.history_shares),
            unit="of its bound",
            samples=samples.history_shares,
            goal=most(1.0),
        ),
    ]


if __name__ == "__main__":
    sys.exit(main())
