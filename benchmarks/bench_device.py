"""Overhead of the remote device compared with the same work on a local device.

    python benchmarks/bench_device.py [--json] [--rounds 20] [--only NAME...]

Starts a cluster on loopback with TLS, opens a session, and alternates local and remote measurements. If the
cluster has a GPU, the local runs use the same GPU; captured models run there as CUDA graphs. Without a GPU
the models run on the CPU on both sides and have no goals. Exits with code 1 if a goal is missed.
"""

from __future__ import annotations

import argparse
import copy
import logging
import resource
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import device_models
import report
import torch

import genie
from genie import config
from genie.device import capture

REMOTE = "remote_accelerator:0"
MIB = 1024**2
OPS_PER_ROUND = 50_000
"""Operations per round of the growth measurement: one million with the default of 20 rounds."""

ADD = report.ratio_at_most(2.0)
FLAT = report.ratio_at_most(1.25)
COPY = report.ratio_at_least(0.8)
EAGER_LAST = report.ratio_at_most(1.1)
EAGER_ALL = report.ratio_at_most(1.2)
CAPTURED_LONG = report.ratio_at_most(1.05)
CAPTURED_SHORT = report.ratio_at_most(1.10)
PIPELINED = report.ratio_at_most(1.02)
LONG_MS = 3.0
MEMORY = report.value_at_most(16.0)
LEAKED = report.value_at_most(0.0)


@dataclass
class Bench:
    rounds: int
    ops: int
    local: str
    """Device of the local runs: `cuda` or `cpu`."""

    @property
    def has_gpu(self) -> bool:
        return self.local != "cpu"

    def wait_local(self) -> None:
        if self.has_gpu:
            torch.cuda.synchronize()


Measured = list[report.Figure]


def seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def alternate(rounds: int, *works: Callable[[], object]) -> list[list[float]]:
    """Alternates the functions and returns the duration of each call in milliseconds, by function."""
    for work in works:
        work()
    times_ms: list[list[float]] = [[] for _ in works]
    for _ in range(rounds):
        for work, times in zip(works, times_ms, strict=True):
            times.append(seconds(work) * 1000)
    return times_ms


def ratio_figure(
    name: str, remote: list[float], local: list[float], *, goal: report.Goal | None, unit: str = "ms"
) -> report.Figure:
    return report.figure(
        name,
        statistics.median(remote),
        samples=remote,
        baseline=statistics.median(local),
        unit=unit,
        goal=goal,
    )


# --- single ops ---------------------------------------------------------------------------------


def add_loop(tensor: torch.Tensor, count: int) -> Callable[[], None]:
    def work() -> None:
        for _ in range(count):
            torch.add(tensor, tensor)

    return work


def measure_ops(bench: Bench) -> Measured:
    """Client time per operation in microseconds."""
    count = 1000
    here, there = torch.ones(16, 16), torch.ones(16, 16, device=REMOTE)
    wait = torch.remote_accelerator.synchronize
    torch.set_num_threads(1)
    add_loop(there, 2000)()
    local: list[float] = []
    remote: list[float] = []
    whole: list[float] = []
    for _ in range(bench.rounds):
        local.append(seconds(add_loop(here, count)) / count * 1e6)
        wait()
        began = time.perf_counter()
        add_loop(there, count)()
        remote.append((time.perf_counter() - began) / count * 1e6)
        wait()
        whole.append((time.perf_counter() - began) / count * 1e6)
    one = there[0, 0]
    values = [seconds(one.item) * 1e6 for _ in range(100)]
    return [
        ratio_figure("add_16x16_client", remote, local, goal=ADD, unit="us"),
        ratio_figure("add_16x16_done", whole, local, goal=None, unit="us"),
        report.figure("item_round_trip", statistics.median(values), samples=values, unit="us"),
    ]


def measure_growth(bench: Bench) -> Measured:
    """Cost of an operation at the start and after many operations; memory growth of client and executor."""
    there = torch.ones(16, 16, device=REMOTE)
    accelerator = torch.remote_accelerator

    def cost_us() -> float:
        accelerator.synchronize()
        return seconds(add_loop(there, 100)) / 100 * 1e6

    add_loop(there, 1000)()
    held = accelerator.memory_stats()["allocated_bytes.current"]
    few = [cost_us() for _ in range(100)]
    growth_mib: list[float] = []
    start = _resident_mib()
    for _ in range(10):
        add_loop(there, bench.ops // 10)()
        growth_mib.append(_resident_mib() - start)
    many = [cost_us() for _ in range(100)]
    accelerator.synchronize()
    left = accelerator.memory_stats()["allocated_bytes.current"] - held
    return [
        ratio_figure("op_after_many", many, few, goal=FLAT, unit="us"),
        report.figure("client_memory_grown", growth_mib[-1], samples=growth_mib, unit="MiB", goal=MEMORY),
        report.figure("server_memory_left", left / MIB, samples=[left / MIB], unit="MiB", goal=LEAKED),
    ]


def _resident_mib() -> float:
    with open("/proc/self/statm") as file:  # noqa: PTH123
        return int(file.read().split()[1]) * resource.getpagesize() / MIB


# --- copies -------------------------------------------------------------------------------------


class SocketCopy:
    """Copies bytes between two threads over a blocking socket on loopback."""

    def __init__(self, size: int) -> None:
        self._size = size
        with socket.create_server(("127.0.0.1", 0)) as server:
            self._ours = socket.create_connection(server.getsockname())
            self._theirs, _ = server.accept()
        self._from = memoryview(bytearray(b"\1" * size))
        self._into = memoryview(bytearray(size))

    def run(self) -> None:
        sender = threading.Thread(target=self._ours.sendall, args=(self._from,))
        sender.start()
        received = 0
        while received < self._size:
            received += self._theirs.recv_into(self._into[received:])
        sender.join()

    def close(self) -> None:
        self._ours.close()
        self._theirs.close()


def measure_copies(bench: Bench) -> Measured:
    """Throughput in GiB/s. The baseline copies the same number of bytes over a loopback socket."""
    size = min(1024, 64 * bench.rounds) * MIB
    here = torch.ones(size // 4)
    there = here.to(REMOTE)
    into = torch.empty_like(here)
    plain = SocketCopy(size)

    def up() -> None:
        there.copy_(here)
        torch.remote_accelerator.synchronize()

    try:
        times = alternate(max(1, bench.rounds // 4), up, lambda: into.copy_(there), plain.run)
    finally:
        plain.close()
    ups, downs, plains = ([size / 1024**3 / (ms / 1000) for ms in each] for each in times)
    assert torch.equal(into, here)
    return [
        ratio_figure(f"copy_{size // MIB}_mib_up", ups, plains, goal=COPY, unit="GiB/s"),
        ratio_figure(f"copy_{size // MIB}_mib_down", downs, plains, goal=COPY, unit="GiB/s"),
    ]


# --- models -------------------------------------------------------------------------------------


def local_and_remote(bench: Bench, model: torch.nn.Module) -> tuple[torch.nn.Module, torch.nn.Module]:
    model = model.eval()
    return copy.deepcopy(model).to(bench.local), model.to(REMOTE)


def forward(model: Any, ids: torch.Tensor, where: str) -> Callable[[], torch.Tensor]:
    def step() -> torch.Tensor:
        result: torch.Tensor = model(ids.to(where)).cpu()
        return result

    return step


def measure_eager(bench: Bench) -> Measured:
    """Eager forward pass with input and output in host memory."""
    figures = []
    width, layers = (1024, 12) if bench.has_gpu else (128, 12)
    for name, last, batch, length, goal in (
        ("eager_last_token", True, 1, 128, EAGER_LAST),
        ("eager_all_logits", False, 8, 512 if bench.has_gpu else 32, EAGER_ALL),
    ):
        torch.manual_seed(0)
        dtype = torch.float16 if bench.has_gpu else torch.float32
        local, remote = local_and_remote(
            bench, device_models.Transformer(width, layers, last_only=last).to(dtype)
        )
        ids = torch.randint(0, device_models.VOCABULARY, (batch, length))
        with torch.no_grad():
            expected, actual = local(ids.to(bench.local)).cpu(), remote(ids.to(REMOTE)).cpu()
            torch.testing.assert_close(actual, expected, rtol=2e-2, atol=2e-2)
            theirs, ours = alternate(
                bench.rounds, forward(local, ids, bench.local), forward(remote, ids, REMOTE)
            )
        figures.append(ratio_figure(name, ours, theirs, goal=goal if bench.has_gpu else None))
    return figures


def direct_graph(
    model: Any, inputs: tuple[torch.Tensor, ...]
) -> tuple[Callable[[], torch.Tensor], Callable[[], None]]:
    """Captures the model as a local CUDA graph. Returns a step with input and output in host memory, and a
    replay without the output copy."""
    pinned = [each.pin_memory() for each in inputs]
    static = [each.cuda() for each in pinned]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), torch.no_grad():
        for _ in range(3):
            model(*static)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        output = model(*static)
    host = torch.empty(output.shape, dtype=output.dtype, pin_memory=True)

    def feed() -> None:
        for into, each in zip(static, pinned, strict=True):
            into.copy_(each, non_blocking=True)
        graph.replay()

    def step() -> torch.Tensor:
        feed()
        host.copy_(output, non_blocking=True)
        torch.cuda.synchronize()
        return host

    return step, feed


def measure_captured(bench: Bench) -> Measured:
    figures: Measured = []
    for name, model, inputs in device_models.captured_models(bench.has_gpu):
        torch.manual_seed(0)
        local, remote = local_and_remote(bench, model)
        captured = capture(remote)
        if bench.has_gpu:
            direct, feed = direct_graph(local, inputs)
        else:
            direct = feed = _plain_step(local, inputs)
        for _ in range(3):
            torch.testing.assert_close(captured(*inputs).cpu(), direct().cpu(), rtol=2e-2, atol=2e-2)
        theirs, ours = alternate(bench.rounds, direct, lambda c=captured, i=inputs: c(*i).cpu())
        goal = CAPTURED_LONG if statistics.median(theirs) >= LONG_MS else CAPTURED_SHORT
        figures.append(ratio_figure(f"captured_{name}", ours, theirs, goal=goal if bench.has_gpu else None))
        many = 100 if bench.has_gpu else 2  # enough steps that throughput dominates the first step
        theirs, ours = alternate(
            max(1, bench.rounds // 4),
            repeat(feed, many, bench.wait_local),
            repeat(lambda c=captured, i=inputs: c(*i), many, torch.remote_accelerator.synchronize),
        )
        figures.append(
            ratio_figure(
                f"pipelined_{name}",
                [ms / many for ms in ours],
                [ms / many for ms in theirs],
                goal=PIPELINED if bench.has_gpu else None,
            )
        )
    return figures


def repeat(step: Callable[[], object], count: int, wait: Callable[[], None]) -> Callable[[], None]:
    """Runs `count` steps and waits once at the end."""

    def work() -> None:
        for _ in range(count):
            step()
        wait()

    return work


def _plain_step(model: Any, inputs: tuple[torch.Tensor, ...]) -> Callable[[], torch.Tensor]:
    def step() -> torch.Tensor:
        with torch.no_grad():
            result: torch.Tensor = model(*inputs)
        return result

    return step


MEASURES: dict[str, Callable[[Bench], Measured]] = {
    "ops": measure_ops,
    "growth": measure_growth,
    "copies": measure_copies,
    "eager": measure_eager,
    "captured": measure_captured,
}


def main() -> int:
    parser = report.options((__doc__ or "").splitlines()[0], rounds=20)
    parser.add_argument("--only", nargs="+", choices=sorted(MEASURES), default=sorted(MEASURES))
    given: argparse.Namespace = parser.parse_args()
    logging.disable(logging.WARNING)
    figures: Measured = []
    with (
        report.temporary_state(),
        device_models.cluster(config.load({"controller.port": 0})),
        genie.session(),
    ):
        local = "cuda" if torch.cuda.is_available() else "cpu"
        if local == "cpu":
            torch.set_num_threads(1)  # both sides share the cores
        bench = Bench(rounds=given.rounds, ops=OPS_PER_ROUND * given.rounds, local=local)
        for name in given.only:
            print(f"measuring {name}", file=sys.stderr)
            figures += MEASURES[name](bench)
    return report.conclude(figures, as_json=given.json)


if __name__ == "__main__":
    sys.exit(main())
