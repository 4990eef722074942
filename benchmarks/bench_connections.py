"""Memory of a controller after many connections, and access of the owner during a flood of TLS handshakes.

    python benchmarks/bench_connections.py [--json] [--connections 5000] [--seconds 15] [--quick]

memory: opens that number of authenticated connections with TLS at the same time and closes them, twice. The
controller must return their memory to the system (memory_after_connections), and the second time must add
nothing (memory_after_repetition, compared with the memory after the first time): otherwise connections leak.
CPython misses the first goal for thousands of connections. It returns its arenas of 1 MiB for small objects
only when they are empty, and a few objects that outlive the connections, such as the free lists of the event
loop, are in all of them.

flood: another process (this file with --flood) attempts RATE handshakes per second from 127.0.0.50, while the
owner connects again and again from 127.0.0.1, as commands of `genie` do. Every connection of the owner must
succeed within its timeout.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import report
from control_roles import FILES_MAX, controller_process
from process_readings import read_cpu_s, read_rss_bytes

from genie import config
from genie.cluster.client import open_client
from genie.errors import GenieError
from genie.model.messages import GetStatus
from genie.model.tenant import TokenKind
from genie.processes.file_limit import raise_open_file_limit
from genie.processes.tasks import loop_factory
from genie.runtime import tls
from genie.runtime.credentials import Access, LocalCluster, connect_authenticated, find_access
from genie.runtime.network import TcpNetwork

RETURNED = report.ratio_at_most(1.1)
ALL = report.value_at_least(1.0)
OF_TOKEN = 200
"""Connections per user token; the controller limits them to 256."""
CONNECTING_MAX = 64
OPEN_S = 180.0
CALL_S = 10.0
RETURN_S = 150.0
QUICK_RETURN_S = 15.0
REPEATED_RETURN_S = 90.0
"""The controller returns memory at most once a minute."""
RATE = 700
FLOOD_ADDRESS = "127.0.0.50"
STEP_S = 0.01
ATTEMPTS_OPEN_MAX = 1500
OWNER_INTERVAL_S = 0.1
MIB = 1024**2


async def find_controller_access(folder: Path, token: str = "") -> Access:
    given = {"paths.state_dir": str(folder)} | ({"cluster.token": token} if token else {})
    settings = config.load(given)
    return await find_access(settings.cluster, state_dir=folder, network=TcpNetwork(), timeout_s=CALL_S)


# --- memory -------------------------------------------------------------------------------------


async def rss_while_connections_are_open(folder: Path, count: int, pid: int) -> int:
    """Returns the memory of the controller while all connections were open."""
    raise_open_file_limit(FILES_MAX)
    settings = config.load({"paths.state_dir": str(folder)})
    async with open_client(settings, program="bench") as owner:
        tokens = [
            (await owner.create_token(TokenKind.USER, tenant="bench")).token
            for _ in range(-(-count // OF_TOKEN))
        ]
    accesses = [await find_controller_access(folder, token) for token in tokens]
    slots, network = asyncio.Semaphore(CONNECTING_MAX), TcpNetwork()
    async with AsyncExitStack() as stack, asyncio.timeout(OPEN_S):

        async def connect(access: Access) -> None:
            async with slots:
                connection = connect_authenticated(network, access, timeout_s=OPEN_S, program="bench")
                opened = await connection.__aenter__()
            stack.push_async_exit(connection.__aexit__)
            await opened[0].call(GetStatus(), timeout_s=OPEN_S)

        for number in range(count):
            await connect(accesses[number // OF_TOKEN])
        return read_rss_bytes(pid)


def measure_memory(folder: Path, count: int, *, timeout_s: float) -> list[report.Figure]:
    with (
        controller_process(folder) as controller,
        asyncio.Runner(loop_factory=loop_factory()) as runner,
    ):
        runner.run(
            rss_while_connections_are_open(folder, 10, controller.pid)
        )  # loads what a connection needs
        before = read_rss_bytes(controller.pid)
        largest = runner.run(rss_while_connections_are_open(folder, count, controller.pid))
        after = wait_for_memory_return(controller.pid, before, timeout_s=timeout_s)
        runner.run(rss_while_connections_are_open(folder, count, controller.pid))
        after_again = wait_for_memory_return(controller.pid, after, timeout_s=REPEATED_RETURN_S)

    def compare(name: str, rss_bytes: int, baseline_bytes: int) -> report.Figure:
        return report.make_figure(
            name, rss_bytes / MIB, unit="MiB", samples=[], baseline=baseline_bytes / MIB, goal=RETURNED
        )

    return [
        report.make_figure("connection_memory", (largest - before) / count, unit="B", samples=[]),
        compare("memory_after_connections", after, before),
        compare("memory_after_repetition", after_again, after),
    ]


def wait_for_memory_return(pid: int, baseline_bytes: int, *, timeout_s: float) -> int:
    """The memory of the process when it is close to the baseline again, or at the timeout."""
    deadline_s = time.monotonic() + timeout_s
    while (rss_bytes := read_rss_bytes(pid)) > RETURNED.limit * baseline_bytes:
        if time.monotonic() > deadline_s:
            break
        time.sleep(0.5)
    return rss_bytes


# --- flood --------------------------------------------------------------------------------------


async def flood_with_handshakes(folder: Path) -> None:
    """Attempts RATE handshakes per second until standard input is closed, then prints their number."""
    raise_open_file_limit(FILES_MAX)
    local = LocalCluster.read(folder)
    assert local is not None
    context = tls.unverified_context()
    counts = {"attempted": 0, "completed": 0, "skipped": 0}

    async def attempt() -> None:
        with contextlib.suppress(OSError, ssl.SSLError, TimeoutError):
            async with asyncio.timeout(CALL_S):
                _, writer = await asyncio.open_connection(
                    local.host,
                    local.port,
                    ssl=context,
                    server_hostname=tls.CONTROLLER_NAME,
                    local_addr=(FLOOD_ADDRESS, 0),
                )
            counts["completed"] += 1
            writer.transport.abort()

    ended = asyncio.ensure_future(asyncio.to_thread(sys.stdin.read))
    print("ready", flush=True)
    async with asyncio.TaskGroup() as group:
        due, at_s, open_now = 0.0, time.monotonic(), set[asyncio.Task[None]]()
        while not ended.done():
            now_s = time.monotonic()
            due, at_s = due + RATE * (now_s - at_s), now_s
            while due >= 1:
                due -= 1
                counts["attempted"] += 1
                if len(open_now) >= ATTEMPTS_OPEN_MAX:
                    counts["skipped"] += 1
                    continue
                task = group.create_task(attempt())
                open_now.add(task)
                task.add_done_callback(open_now.discard)
            await asyncio.sleep(STEP_S)
        for task in open_now:
            task.cancel()
    print(counts["attempted"] - counts["skipped"], counts["completed"], flush=True)


@contextlib.contextmanager
def flood_process(folder: Path) -> Iterator[list[int]]:
    """Yields a list that contains the numbers of attempted and completed handshakes after the block."""
    command = [sys.executable, __file__, "--flood", str(folder)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None and process.stdout is not None
    counts: list[int] = []
    try:
        if process.stdout.readline().strip() != "ready":
            raise SystemExit("the flood did not start")
        yield counts
        process.stdin.close()
        counts += map(int, process.stdout.readline().split())
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


async def connect_as_owner(folder: Path, *, seconds: float) -> list[float | None]:
    """The duration in milliseconds of each connection with one request; None if it failed."""
    access, took_ms = await find_controller_access(folder), list[float | None]()
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s:
        began_s = time.monotonic()
        try:
            async with connect_authenticated(TcpNetwork(), access, timeout_s=CALL_S, program="bench") as (
                peer,
                _,
            ):
                await peer.call(GetStatus(), timeout_s=CALL_S)
            took_ms.append((time.monotonic() - began_s) * 1000)
        except GenieError as error:
            print(f"the owner could not connect: {error}", file=sys.stderr)
            took_ms.append(None)
        await asyncio.sleep(OWNER_INTERVAL_S)
    return took_ms


def measure_flood(folder: Path, seconds: float) -> list[report.Figure]:
    with controller_process(folder) as controller:
        quiet = asyncio.run(connect_as_owner(folder, seconds=min(3.0, seconds)))
        with flood_process(folder) as counts:
            began_s, cpu_s = time.monotonic(), read_cpu_s(controller.pid)
            took_ms = asyncio.run(connect_as_owner(folder, seconds=seconds))
            elapsed_s, cpu_s = time.monotonic() - began_s, read_cpu_s(controller.pid) - cpu_s
    done_ms = [each for each in took_ms if each is not None]
    quiet_ms = [each for each in quiet if each is not None]
    if not done_ms or not quiet_ms:
        raise SystemExit("no connection of the owner has succeeded")
    figure = report.make_figure
    return [
        figure("flood_attempts", counts[0] / elapsed_s, unit="1/s", samples=[]),
        figure("flood_handshakes", counts[1] / elapsed_s, unit="1/s", samples=[]),
        figure("flood_controller_cpu", cpu_s / elapsed_s, unit="core", samples=[]),
        figure("flood_owner_connected", len(done_ms) / len(took_ms), unit="", samples=[], goal=ALL),
        figure(
            "flood_owner_p99",
            report.percentile(done_ms, 0.99),
            samples=report.p99_samples(done_ms),
            baseline=report.percentile(quiet_ms, 0.99),
        ),
    ]


def main() -> int:
    parser = report.make_parser((__doc__ or "").splitlines()[0], rounds=1)
    parser.add_argument("--connections", type=report.parse_positive_int, help="default: 5000; quick: 300")
    parser.add_argument(
        "--seconds", type=report.parse_positive_int, help="of the flood (default: 15; quick: 4)"
    )
    parser.add_argument("--quick", action="store_true", help="fewer connections, shorter")
    parser.add_argument("--flood", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.flood is not None:
        asyncio.run(flood_with_handshakes(given.flood))
        return 0
    connections = given.connections or (300 if given.quick else 5000)
    seconds = given.seconds or (4 if given.quick else 15)
    with report.use_temporary_state() as folder:
        (folder / "memory").mkdir()
        (folder / "flood").mkdir()
        timeout_s = QUICK_RETURN_S if given.quick else RETURN_S
        figures = measure_memory(folder / "memory", connections, timeout_s=timeout_s)
        figures += measure_flood(folder / "flood", float(seconds))
    return report.print_figures(figures, as_json=given.json)


if __name__ == "__main__":
    sys.exit(main())
