"""What the store engines cost over what is under them: put latency, and puts a second with 32 in flight.

    python benchmarks/bench_store.py [--json] [--rounds N] [--dir DIR]

The baseline runs in turns with the store, round by round, so that a busy machine hurts both:
for sqlite plain `sqlite3` commits (log, full sync, one row) in the same directory, one at a
time; for etcd the generated calls on a bare channel, as many in flight. Both servers' files
are in DIR, a temporary directory unless given: it decides what a sync costs.

A line for each figure: name, value, unit, baseline, ratio (value / baseline), spread (lowest
and highest round), goal, ok. Not for: comparing machines.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import sqlite3
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

IN_FLIGHT = 32
VALUE = b"x" * 512

PutOne = Callable[[int], Awaitable[object]]


@dataclass(frozen=True)
class Line:
    name: str
    value: float
    unit: str
    baseline: float
    ratio: float
    spread: tuple[float, float]
    goal: str
    ok: bool


@dataclass
class Samples:
    """One side's rounds: latencies of puts one at a time, and rates with many in flight."""

    latencies_ms: list[list[float]] = field(default_factory=list)
    rates_per_s: list[float] = field(default_factory=list)

    def p50_ms(self) -> float:
        return statistics.median(latency for latencies in self.latencies_ms for latency in latencies)

    def rate_per_s(self) -> float:
        return statistics.median(self.rates_per_s)


async def one_at_a_time(put: PutOne, count: int) -> list[float]:
    latencies_ms: list[float] = []
    for number in range(count):
        start_s = time.perf_counter()
        await put(number)
        latencies_ms.append((time.perf_counter() - start_s) * 1000)
    return latencies_ms


async def many_at_once(put: PutOne, count: int) -> float:
    numbers = iter(range(count))

    async def work() -> None:
        for number in numbers:
            await put(number)

    start_s = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(IN_FLIGHT):
            group.create_task(work())
    return count / (time.perf_counter() - start_s)


async def compare(put: PutOne, baseline_put: PutOne, *, rounds: int, count: int) -> tuple[Samples, Samples]:
    ours, baseline = Samples(), Samples()
    for one in (put, baseline_put):
        await one_at_a_time(one, 20)
    for _ in range(rounds):
        for samples, one in ((ours, put), (baseline, baseline_put)):
            samples.latencies_ms.append(await one_at_a_time(one, count))
            samples.rates_per_s.append(await many_at_once(one, count * 4))
    return ours, baseline


def lines(name: str, ours: Samples, baseline: Samples, *, slower_max: float, rate_min: float) -> list[Line]:
    medians_ms = [statistics.median(latencies) for latencies in ours.latencies_ms]
    slower = ours.p50_ms() / baseline.p50_ms()
    faster = ours.rate_per_s() / baseline.rate_per_s()
    return [
        Line(
            name=f"{name}_put_p50",
            value=round(ours.p50_ms(), 3),
            unit="ms",
            baseline=round(baseline.p50_ms(), 3),
            ratio=round(slower, 2),
            spread=(round(min(medians_ms), 3), round(max(medians_ms), 3)),
            goal=f"ratio <= {slower_max}",
            ok=slower <= slower_max,
        ),
        Line(
            name=f"{name}_put_rate_{IN_FLIGHT}_in_flight",
            value=round(ours.rate_per_s()),
            unit="1/s",
            baseline=round(baseline.rate_per_s()),
            ratio=round(faster, 2),
            spread=(round(min(ours.rates_per_s)), round(max(ours.rates_per_s))),
            goal=f"ratio >= {rate_min}",
            ok=faster >= rate_min,
        ),
    ]


async def bench_sqlite(folder: Path, rounds: int) -> list[Line]:
    from genie.controller.store import Put
    from genie.controller.store.sqlite import SqliteStore

    store = await SqliteStore.open(folder / "store.sqlite3")
    plain = sqlite3.connect(folder / "plain.sqlite3", isolation_level=None)
    for setting in ("locking_mode = EXCLUSIVE", "journal_mode = WAL", "synchronous = FULL"):
        plain.execute(f"PRAGMA {setting}")
    plain.execute("CREATE TABLE kv (key BLOB PRIMARY KEY, value BLOB)")

    async def put(number: int) -> object:
        return await store.commit([], [Put(f"k/{number % 1000}", VALUE)])

    async def plain_put(number: int) -> object:
        return plain.execute("INSERT OR REPLACE INTO kv VALUES (?, ?)", (b"k/%d" % (number % 1000), VALUE))

    try:
        ours, baseline = await compare(put, plain_put, rounds=rounds, count=200)
    finally:
        await store.close()
        plain.close()
    # A hop to the writer thread and back, and the history row, on top of the sync. With many in
    # flight one sync serves them all, which a plain commit for each cannot have.
    return lines("sqlite", ours, baseline, slower_max=3.0, rate_min=3.0)


async def bench_etcd(folder: Path, rounds: int) -> list[Line]:
    import grpc.aio

    from genie.controller.store import Put
    from genie.controller.store.etcd import EtcdStore
    from genie.controller.store.etcd_proto import rpc_pb2, rpc_pb2_grpc
    from tests.controller.store.etcd_server import EtcdServer

    server = EtcdServer(folder)
    server.start()
    store = await EtcdStore.open(server.url)
    channel = grpc.aio.insecure_channel(server.endpoint)
    calls = rpc_pb2_grpc.KVStub(channel)

    async def put(number: int) -> object:
        return await store.commit([], [Put(f"k/{number % 1000}", VALUE)])

    async def raw_put(number: int) -> object:
        request = rpc_pb2.PutRequest(key=b"/raw/k/%d" % (number % 1000), value=VALUE)
        return await calls.Txn(
            rpc_pb2.TxnRequest(success=[rpc_pb2.RequestOp(request_put=request)]), timeout=5
        )

    try:
        ours, baseline = await compare(put, raw_put, rounds=rounds, count=200)
    finally:
        await store.close()
        await channel.close(None)
        server.stop()
    return lines("etcd", ours, baseline, slower_max=1.25, rate_min=0.75)


async def run(folder: Path, rounds: int) -> list[Line]:
    found = await bench_sqlite(folder, rounds)
    if shutil.which("etcd") is None:
        print("etcd is not on PATH and was left out (Debian: etcd-server)", file=sys.stderr)
        return found
    return found + await bench_etcd(folder, rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description="Put latency and rate of the store engines.")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dir", type=Path, default=None, help="where the files go; a temporary directory")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.dir, prefix="bench-store-") as folder:
        for line in asyncio.run(run(Path(folder), options.rounds)):
            if options.json:
                print(json.dumps(asdict(line)))
            else:
                print(
                    f"{line.name:32} {line.value:10} {line.unit:4} baseline {line.baseline:10} "
                    f"ratio {line.ratio:5}  {line.goal:14} {'ok' if line.ok else 'MISSED'}"
                )


if __name__ == "__main__":
    main()
