"""How long genie.init() and `import genie` take.

    python benchmarks/bench_init.py [--json] [--rounds 50]

Starts a cluster on loopback with TLS, and measures against it from this process: each round opens and
ends a session, and beside it makes a bare TLS connection to the same port, the baseline. The cost of the
import is that of a fresh interpreter with it, less one without. Every pair is measured in turn, so that a
busy machine is busy for both. Ends with 1 when a goal is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import platform
import ssl
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import genie
from genie import config
from genie.cluster import local
from genie.runtime import tls
from genie.runtime.credentials import LocalCluster

INIT_P50_MS = 150.0
INIT_P99_MS = 5000.0
IMPORT_MS = 150.0
IMPORT_ROUNDS_MAX = 20
FIRST_ROUNDS_MAX = 10

FIRST = """
import asyncio, time, genie
began = time.perf_counter()
asyncio.run(genie.init())
print((time.perf_counter() - began) * 1000)
"""


def line(
    name: str, value: float, *, unit: str = "ms", baseline: float | None, goal: float | None
) -> dict[str, object]:
    return {
        "name": name,
        "value": round(value, 3),
        "unit": unit,
        "baseline": None if baseline is None else round(baseline, 3),
        "ratio": round(value / baseline, 2) if baseline else None,
        "goal": goal,
        "ok": goal is None or value <= goal,
    }


def percentile(values: list[float], share: float) -> float:
    """The nearest value from above: with 50 rounds, the 99th is the worst."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


async def timed_ms(work: Callable[[], Awaitable[object]]) -> float:
    began = time.perf_counter()
    await work()
    return (time.perf_counter() - began) * 1000


async def bare_tls(cluster: LocalCluster, context: ssl.SSLContext) -> None:
    _, writer = await asyncio.open_connection(
        cluster.host, cluster.port, ssl=context, server_hostname=tls.CONTROLLER_NAME
    )
    writer.transport.abort()
    await asyncio.sleep(0)


async def measure_sessions(rounds: int, state_dir: Path) -> list[dict[str, object]]:
    settings = config.load({"controller.port": 0})
    inits: list[float] = []
    ends: list[float] = []
    bares: list[float] = []
    async with local.up(settings, progress=lambda text: print(text, file=sys.stderr)) as running:
        assert running.cluster is not None
        cluster = running.cluster
        context = tls.client_context((state_dir / "controller" / "ca.pem").read_text())
        for number in range(rounds + 1):
            bare = await timed_ms(lambda: bare_tls(cluster, context))
            init = await timed_ms(genie.init)
            end = await timed_ms(genie.shutdown)
            if number > 0:  # the first one imports what the others find
                bares.append(bare)
                inits.append(init)
                ends.append(end)
        first = [first_in_a_process() for _ in range(min(rounds, FIRST_ROUNDS_MAX))]
    bare = statistics.median(bares)
    return [
        line("init_p50", statistics.median(inits), baseline=bare, goal=INIT_P50_MS),
        line("init_p99", percentile(inits, 0.99), baseline=percentile(bares, 0.99), goal=INIT_P99_MS),
        line("init_first_in_process_p50", statistics.median(first), baseline=bare, goal=None),
        line("shutdown_p50", statistics.median(ends), baseline=bare, goal=None),
    ]


def first_in_a_process() -> float:
    """What a script sees that calls init() once: with the loading of what init() needs."""
    done = subprocess.run([sys.executable, "-c", FIRST], capture_output=True, text=True, check=True)
    return float(done.stdout)


def process_ms(code: str) -> float:
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True)
    return (time.perf_counter() - began) * 1000


def measure_imports(rounds: int) -> list[dict[str, object]]:
    loaded = "import sys, genie; sys.exit('torch' in sys.modules)"
    ready = "import sys, genie; genie.init; sys.exit('torch' in sys.modules)"
    times: dict[str, list[float]] = {code: [] for code in ("pass", loaded, ready)}
    for number in range(min(rounds, IMPORT_ROUNDS_MAX) + 1):
        for code, taken in times.items():
            ms = process_ms(code)
            if number > 0:  # the first one fills the file cache
                taken.append(ms)
    bare, plain, whole = (statistics.median(taken) for taken in times.values())
    return [
        line("import_genie", max(plain - bare, 0.0), baseline=bare, goal=IMPORT_MS),
        line("import_genie_and_init", max(whole - bare, 0.0), baseline=bare, goal=None),
    ]


def show(lines: list[dict[str, object]], *, as_json: bool) -> None:
    for item in lines:
        if as_json:
            print(json.dumps(item))
            continue
        goal = "" if item["goal"] is None else f"  goal {item['goal']} {'ok' if item['ok'] else 'MISSED'}"
        print(f"{item['name']:<28}{item['value']:>10} {item['unit']}  baseline {item['baseline']}{goal}")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--rounds", type=int, default=50)
    given = parser.parse_args()
    logging.disable(logging.WARNING)
    print(
        f"{platform.platform()}, {os.cpu_count()} cores, Python {platform.python_version()}", file=sys.stderr
    )
    with tempfile.TemporaryDirectory(prefix="genie-bench-") as folder:
        for name in [name for name in os.environ if name.startswith("GENIE_")]:
            del os.environ[name]
        os.environ["GENIE_STATE_DIR"] = folder
        lines = measure_imports(given.rounds) + asyncio.run(measure_sessions(given.rounds, Path(folder)))
    show(lines, as_json=given.json)
    return 0 if all(item["ok"] for item in lines) else 1


if __name__ == "__main__":
    sys.exit(main())
