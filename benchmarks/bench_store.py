"""Overhead of the stores over their engines: put latency, and puts per second with 32 in flight.

    python benchmarks/bench_store.py [--json] [--rounds N] [--dir DIR]

Store and baseline alternate round by round. The baseline is, for SQLite, plain `sqlite3` commits (WAL, full
sync, one row) in the same directory, one at a time; for etcd, the generated calls on a plain channel with the
same concurrency. The files of both are in DIR (default: a temporary directory), whose disk determines the
cost of a sync. The figures have no goals and depend on the machine.
"""

from __future__ import annotations

import asyncio
import shutil
import socket
import sqlite3
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import report

PUTS_IN_FLIGHT = 32
ETCD_START_S = 30.0
STORED_VALUE = b"x" * 512

PutOne = Callable[[int], Awaitable[object]]


@dataclass
class CommitSamples:
    """Results of the store or the baseline: latencies of sequential puts, and rates of concurrent puts."""

    latencies_ms: list[float] = field(default_factory=list)
    rates_per_s: list[float] = field(default_factory=list)

    def p50_ms(self) -> float:
        return statistics.median(self.latencies_ms)

    def rate_per_s(self) -> float:
        return statistics.median(self.rates_per_s)


async def sequential_latencies_ms(put: PutOne, count: int) -> list[float]:
    latencies_ms: list[float] = []
    for number in range(count):
        start_s = time.perf_counter()
        await put(number)
        latencies_ms.append((time.perf_counter() - start_s) * 1000)
    return latencies_ms


async def concurrent_rate_per_s(put: PutOne, count: int) -> float:
    numbers = iter(range(count))

    async def work() -> None:
        for number in numbers:
            await put(number)

    start_s = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(PUTS_IN_FLIGHT):
            group.create_task(work())
    return count / (time.perf_counter() - start_s)


async def measure_alternately(
    put: PutOne, baseline_put: PutOne, *, rounds: int, count: int
) -> tuple[CommitSamples, CommitSamples]:
    ours, baseline = CommitSamples(), CommitSamples()
    for one in (put, baseline_put):
        await sequential_latencies_ms(one, 20)
    for _ in range(rounds):
        for samples, one in ((ours, put), (baseline, baseline_put)):
            samples.latencies_ms.extend(await sequential_latencies_ms(one, count))
            samples.rates_per_s.append(await concurrent_rate_per_s(one, count * 4))
    return ours, baseline


def make_figures(name: str, ours: CommitSamples, baseline: CommitSamples) -> list[report.Figure]:
    """Without goals: Genie has no requirement for the overhead of a store."""
    return [
        report.make_figure(
            f"{name}_put_p50",
            ours.p50_ms(),
            samples=ours.latencies_ms,
            baseline=baseline.p50_ms(),
        ),
        report.make_figure(
            f"{name}_put_rate_{PUTS_IN_FLIGHT}_in_flight",
            ours.rate_per_s(),
            unit="1/s",
            samples=ours.rates_per_s,
            baseline=baseline.rate_per_s(),
        ),
    ]


async def bench_sqlite(folder: Path, rounds: int) -> list[report.Figure]:
    from genie.controller.store import Put
    from genie.controller.store.sqlite import SqliteStore

    store = await SqliteStore.open(folder / "store.sqlite3")
    plain = sqlite3.connect(folder / "plain.sqlite3", isolation_level=None)
    for setting in ("locking_mode = EXCLUSIVE", "journal_mode = WAL", "synchronous = FULL"):
        plain.execute(f"PRAGMA {setting}")
    plain.execute("CREATE TABLE kv (key BLOB PRIMARY KEY, value BLOB)")

    async def put(number: int) -> object:
        return await store.commit([], [Put(f"k/{number % 1000}", STORED_VALUE)])

    async def plain_put(number: int) -> object:
        return plain.execute(
            "INSERT OR REPLACE INTO kv VALUES (?, ?)", (b"k/%d" % (number % 1000), STORED_VALUE)
        )

    try:
        ours, baseline = await measure_alternately(put, plain_put, rounds=rounds, count=200)
    finally:
        await store.close()
        plain.close()
    # The store adds a switch to the writer thread and a history row; concurrent puts share one sync.
    return make_figures("sqlite", ours, baseline)


@contextmanager
def run_etcd_server(folder: Path) -> Iterator[str]:
    """Starts etcd and yields its host and port. Output goes to a file: a full pipe would block etcd."""
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as two:
        endpoint, peer = (f"127.0.0.1:{held.getsockname()[1]}" for held in (one, two))
    log = folder / "etcd.log"
    command = ["etcd", "--name", "one", "--data-dir", str(folder / "etcd")]
    command += ["--listen-client-urls", f"http://{endpoint}", "--advertise-client-urls", f"http://{endpoint}"]
    command += ["--listen-peer-urls", f"http://{peer}", "--initial-advertise-peer-urls", f"http://{peer}"]
    command += ["--initial-cluster", f"one=http://{peer}"]
    with log.open("wb") as output, subprocess.Popen(command, stdout=output, stderr=output) as process:
        try:
            deadline_s = time.monotonic() + ETCD_START_S
            while b"ready to serve client requests" not in log.read_bytes():
                if process.poll() is not None or time.monotonic() > deadline_s:
                    raise SystemExit(f"etcd did not start:\n{log.read_text()[-2000:]}")
                time.sleep(0.05)
            yield endpoint
        finally:
            process.terminate()


async def bench_etcd(endpoint: str, rounds: int) -> list[report.Figure]:
    import grpc.aio

    from genie.controller.store import Put
    from genie.controller.store.etcd import EtcdStore
    from genie.controller.store.etcd_proto import rpc_pb2, rpc_pb2_grpc

    store = await EtcdStore.open(f"etcd://{endpoint}")
    channel = grpc.aio.insecure_channel(endpoint)
    calls = rpc_pb2_grpc.KVStub(channel)

    async def put(number: int) -> object:
        return await store.commit([], [Put(f"k/{number % 1000}", STORED_VALUE)])

    async def plain_put(number: int) -> object:
        request = rpc_pb2.PutRequest(key=b"/raw/k/%d" % (number % 1000), value=STORED_VALUE)
        return await calls.Txn(
            rpc_pb2.TxnRequest(success=[rpc_pb2.RequestOp(request_put=request)]), timeout=5
        )

    try:
        ours, baseline = await measure_alternately(put, plain_put, rounds=rounds, count=200)
    finally:
        await store.close()
        await channel.close(None)
    return make_figures("etcd", ours, baseline)


def main() -> int:
    parser = report.make_parser((__doc__ or "").splitlines()[0], rounds=7)
    parser.add_argument("--dir", type=Path, default=None, help="folder of the files (default: temporary)")
    given = parser.parse_args()
    with report.use_temporary_state(given.dir) as folder:
        found = asyncio.run(bench_sqlite(folder, given.rounds))
        if shutil.which("etcd") is None:
            print("skipping etcd: not found on PATH (Debian: etcd-server)", file=sys.stderr)
        else:
            with run_etcd_server(folder) as endpoint:
                found += asyncio.run(bench_etcd(endpoint, given.rounds))
    return report.print_figures(found, as_json=given.json)


if __name__ == "__main__":
    sys.exit(main())
