"""Duration of genie.init(), `import genie` and the start of a command.

    python benchmarks/bench_init.py [--json] [--rounds 50]

Starts a cluster on loopback with TLS. Each round opens and closes a session and, as the baseline, a plain TLS
connection to the same port. The import time is the duration of a new interpreter with the import minus one
without. The start of a command is its CPU time, with that of an idle interpreter as the baseline:
`--version`, and a run on a node that refuses the connection. Measurement and baseline alternate, so that
other load affects both. Exits with code 1 if a goal is missed.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
import ssl
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import report

import genie
from genie import config
from genie.runtime import tls
from genie.runtime.credentials import LocalCluster
from genie.supervisor import local_cluster

INIT_P50_GOAL = report.value_at_most(150.0)
INIT_P99_GOAL = report.value_at_most(5000.0)
IMPORT_GOAL = report.value_at_most(150.0)
IMPORT_ROUNDS_MAX = 20
FIRST_ROUNDS_MAX = 10
GRID_CLI_CODE = "import sys; from genie.cli import grid_main; sys.exit(grid_main())"
UNREACHABLE_EXIT_CODE = 255

FIRST_INIT_CODE = """
import asyncio, time, genie
start = time.perf_counter()
asyncio.run(genie.init())
print((time.perf_counter() - start) * 1000)
"""


async def time_ms(work: Callable[[], Awaitable[object]]) -> float:
    start = time.perf_counter()
    await work()
    return (time.perf_counter() - start) * 1000


async def connect_with_bare_tls(cluster: LocalCluster, context: ssl.SSLContext) -> None:
    _, writer = await asyncio.open_connection(
        cluster.host, cluster.port, ssl=context, server_hostname=tls.CONTROLLER_NAME
    )
    writer.transport.abort()
    await asyncio.sleep(0)


async def measure_sessions(rounds: int, state_dir: Path) -> list[report.Figure]:
    settings = config.load({"controller.port": 0})
    inits: list[float] = []
    ends: list[float] = []
    bares: list[float] = []
    async with local_cluster.run_local_cluster(
        settings, progress=lambda text: print(text, file=sys.stderr)
    ) as running:
        assert running.cluster is not None
        cluster = running.cluster
        context = tls.client_context((state_dir / "controller" / "ca.pem").read_text())
        for number in range(rounds + 1):
            bare = await time_ms(lambda: connect_with_bare_tls(cluster, context))
            init = await time_ms(genie.init)
            end = await time_ms(genie.shutdown)
            if number > 0:  # the first round imports modules
                bares.append(bare)
                inits.append(init)
                ends.append(end)
        first = [measure_first_init_ms() for _ in range(min(rounds, FIRST_ROUNDS_MAX))]
    bare, bare_p99 = statistics.median(bares), report.percentile(bares, 0.99)
    median = statistics.median
    return [
        report.make_figure("init_p50", median(inits), samples=inits, baseline=bare, goal=INIT_P50_GOAL),
        report.make_figure(
            "init_p99",
            report.percentile(inits, 0.99),
            samples=report.p99_samples(inits),
            baseline=bare_p99,
            goal=INIT_P99_GOAL,
        ),
        report.make_figure("init_first_in_process_p50", median(first), samples=first, baseline=bare),
        report.make_figure("shutdown_p50", median(ends), samples=ends, baseline=bare),
    ]


def measure_first_init_ms() -> float:
    """Milliseconds of the first init() of a process, including the imports it triggers."""
    done = subprocess.run([sys.executable, "-c", FIRST_INIT_CODE], capture_output=True, text=True, check=True)
    return float(done.stdout)


def measure_process_ms(code: str) -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True)
    return (time.perf_counter() - start) * 1000


def measure_imports(rounds: int) -> list[report.Figure]:
    loaded = "import sys, genie; sys.exit('torch' in sys.modules)"
    ready = "import sys, genie; genie.init; sys.exit('torch' in sys.modules)"
    times: dict[str, list[float]] = {code: [] for code in ("pass", loaded, ready)}
    for number in range(min(rounds, IMPORT_ROUNDS_MAX) + 1):
        for code, taken in times.items():
            ms = measure_process_ms(code)
            if number > 0:  # the first round fills the file cache
                taken.append(ms)
    bares = times["pass"]
    bare = statistics.median(bares)
    figures = []
    for name, code, goal in (("import_genie", loaded, IMPORT_GOAL), ("import_genie_and_init", ready, None)):
        costs = [max(taken - without, 0.0) for taken, without in zip(times[code], bares, strict=True)]
        figures.append(
            report.make_figure(name, statistics.median(costs), samples=costs, baseline=bare, goal=goal)
        )
    return figures


def measure_starts(rounds: int, folder: Path) -> list[report.Figure]:
    with socket.socket() as refusing:  # bound but not listening: connections are refused
        refusing.bind(("127.0.0.1", 0))
        file = folder / "grid.yaml"
        file.write_text(f"nodes:\n  - name: 127.0.0.1\n    port: {refusing.getsockname()[1]}\n", "utf-8")
        run = [GRID_CLI_CODE, "--config", str(file), "run", "--node", "127.0.0.1", "true"]
        commands = {
            "pass": (["pass"], 0),
            "version": ([GRID_CLI_CODE, "--version"], 0),
            "run": (run, UNREACHABLE_EXIT_CODE),
        }
        times: dict[str, list[float]] = {name: [] for name in commands}
        for number in range(min(rounds, IMPORT_ROUNDS_MAX) + 1):
            for name, (arguments, code) in commands.items():
                ms = measure_cpu_ms(arguments, code=code)
                if number > 0:  # the first round fills the file cache
                    times[name].append(ms)
    bare = statistics.median(times["pass"])
    return [
        report.make_figure(f"start_{name}_cpu", statistics.median(taken), samples=taken, baseline=bare)
        for name, taken in times.items()
        if name != "pass"
    ]


def measure_cpu_ms(arguments: list[str], *, code: int) -> float:
    """CPU time of a Python process and its children in milliseconds. The process must exit with `code`."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-c", *arguments], check=False, capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == code, done.stderr
    return (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) * 1000


def main() -> int:
    given = report.make_parser((__doc__ or "").splitlines()[0], rounds=50).parse_args()
    logging.disable(logging.WARNING)
    with report.use_temporary_state() as folder:
        figures = measure_imports(given.rounds) + measure_starts(given.rounds, folder)
        figures += asyncio.run(measure_sessions(given.rounds, folder))
    return report.print_figures(figures, as_json=given.json)


if __name__ == "__main__":
    sys.exit(main())
