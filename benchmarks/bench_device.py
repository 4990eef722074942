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

REMOTE_DEVICE = "remote_accelerator:0"
MIB = 1024**2
OPS_PER_ROUND = 50_000
"""Operations per round of the growth measurement: one million with the default of 20 rounds."""

ADD_GOAL = report.ratio_at_most(2.0)
FLAT_COST_GOAL = report.ratio_at_most(1.25)
COPY_GOAL = report.ratio_at_least(0.8)
EAGER_LAST_GOAL = report.ratio_at_most(1.1)
EAGER_ALL_GOAL = report.ratio_at_most(1.2)
CAPTURED_LONG_GOAL = report.ratio_at_most(1.05)
CAPTURED_SHORT_GOAL = report.ratio_at_most(1.10)
PIPELINED_GOAL = report.ratio_at_most(1.02)
LONG_STEP_MS_MIN = 3.0
MEMORY_GROWTH_GOAL = report.value_at_most(16.0)
LEAK_GOAL = report.value_at_most(0.0)


@dataclass
class DeviceBenchmark:
    rounds: int
    ops: int
    local: str
    """Device of the local runs: `cuda` or `cpu`."""

    @property
    def has_gpu(self) -> bool:
        return self.local != "cpu"

    def synchronize_local_gpu(self) -> None:
        if self.has_gpu:
            torch.cuda.synchronize()


Figures = list[report.Figure]


def time_call_s(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def time_alternately(rounds: int, *works: Callable[[], object]) -> list[list[float]]:
    """Alternates the functions and returns the duration of each call in milliseconds, by function."""
    for work in works:
        work()
    times_ms: list[list[float]] = [[] for _ in works]
    for _ in range(rounds):
        for work, times in zip(works, times_ms, strict=True):
            times.append(time_call_s(work) * 1000)
    return times_ms


def ratio_figure(
    name: str, remote: list[float], local: list[float], *, goal: report.Goal | None, unit: str = "ms"
) -> report.Figure:
    return report.make_figure(
        name,
        statistics.median(remote),
        samples=remote,
        baseline=statistics.median(local),
        unit=unit,
        goal=goal,
    )


# --- single ops ---------------------------------------------------------------------------------


def make_add_loop(tensor: torch.Tensor, count: int) -> Callable[[], None]:
    def work() -> None:
        for _ in range(count):
            torch.add(tensor, tensor)

    return work


def measure_ops(bench: DeviceBenchmark) -> Figures:
    """Client time per operation in microseconds."""
    count = 1000
    here, there = torch.ones(16, 16), torch.ones(16, 16, device=REMOTE_DEVICE)
    wait = torch.remote_accelerator.synchronize
    torch.set_num_threads(1)
    make_add_loop(there, 2000)()
    local: list[float] = []
    remote: list[float] = []
    whole: list[float] = []
    for _ in range(bench.rounds):
        local.append(time_call_s(make_add_loop(here, count)) / count * 1e6)
        wait()
        began = time.perf_counter()
        make_add_loop(there, count)()
        remote.append((time.perf_counter() - began) / count * 1e6)
        wait()
        whole.append((time.perf_counter() - began) / count * 1e6)
    one = there[0, 0]
    values = [time_call_s(one.item) * 1e6 for _ in range(100)]
    return [
        ratio_figure("add_16x16_client", remote, local, goal=ADD_GOAL, unit="us"),
        ratio_figure("add_16x16_done", whole, local, goal=None, unit="us"),
        report.make_figure("item_round_trip", statistics.median(values), samples=values, unit="us"),
    ]


def measure_growth(bench: DeviceBenchmark) -> Figures:
    """Cost of an operation at the start and after many operations; memory growth of client and executor."""
    there = torch.ones(16, 16, device=REMOTE_DEVICE)
    accelerator = torch.remote_accelerator

    def cost_us() -> float:
        accelerator.synchronize()
        return time_call_s(make_add_loop(there, 100)) / 100 * 1e6

    make_add_loop(there, 1000)()
    held = accelerator.memory_stats()["allocated_bytes.current"]
    few = [cost_us() for _ in range(100)]
    growth_mib: list[float] = []
    start = _resident_mib()
    for _ in range(10):
        make_add_loop(there, bench.ops // 10)()
        growth_mib.append(_resident_mib() - start)
    many = [cost_us() for _ in range(100)]
    accelerator.synchronize()
    left = accelerator.memory_stats()["allocated_bytes.current"] - held
    return [
        ratio_figure("op_after_many", many, few, goal=FLAT_COST_GOAL, unit="us"),
        report.make_figure(
            "client_memory_grown", growth_mib[-1], samples=growth_mib, unit="MiB", goal=MEMORY_GROWTH_GOAL
        ),
        report.make_figure(
            "server_memory_left", left / MIB, samples=[left / MIB], unit="MiB", goal=LEAK_GOAL
        ),
    ]


def _resident_mib() -> float:
    with open("/proc/self/statm") as file:  # noqa: PTH123
        return int(file.read().split()[1]) * resource.getpagesize() / MIB


# --- copies -------------------------------------------------------------------------------------


class SocketCopy:
    """Copies bytes between two threads over a blocking socket on loopback."""

    def __init__(self, size: int) -> None:
        self._size_bytes = size
        with socket.create_server(("127.0.0.1", 0)) as server:
            self._sender = socket.create_connection(server.getsockname())
            self._receiver, _ = server.accept()
        self._source = memoryview(bytearray(b"\1" * size))
        self._destination = memoryview(bytearray(size))

    def run(self) -> None:
        sender = threading.Thread(target=self._sender.sendall, args=(self._source,))
        sender.start()
        received = 0
        while received < self._size_bytes:
            received += self._receiver.recv_into(self._destination[received:])
        sender.join()

    def close(self) -> None:
        self._sender.close()
        self._receiver.close()


def measure_copies(bench: DeviceBenchmark) -> Figures:
    """Throughput in GiB/s. The baseline copies the same number of bytes over a loopback socket."""
    size = min(1024, 64 * bench.rounds) * MIB
    here = torch.ones(size // 4)
    there = here.to(REMOTE_DEVICE)
    into = torch.empty_like(here)
    plain = SocketCopy(size)

    def copy_to_device() -> None:
        there.copy_(here)
        torch.remote_accelerator.synchronize()

    try:
        times = time_alternately(
            max(1, bench.rounds // 4), copy_to_device, lambda: into.copy_(there), plain.run
        )
    finally:
        plain.close()
    ups, downs, plains = ([size / 1024**3 / (ms / 1000) for ms in each] for each in times)
    assert torch.equal(into, here)
    return [
        ratio_figure(f"copy_{size // MIB}_mib_up", ups, plains, goal=COPY_GOAL, unit="GiB/s"),
        ratio_figure(f"copy_{size // MIB}_mib_down", downs, plains, goal=COPY_GOAL, unit="GiB/s"),
    ]


# --- models -------------------------------------------------------------------------------------


def copy_model_to_both(
    bench: DeviceBenchmark, model: torch.nn.Module
) -> tuple[torch.nn.Module, torch.nn.Module]:
    model = model.eval()
    return copy.deepcopy(model).to(bench.local), model.to(REMOTE_DEVICE)


def make_forward_step(model: Any, ids: torch.Tensor, where: str) -> Callable[[], torch.Tensor]:
    def step() -> torch.Tensor:
        result: torch.Tensor = model(ids.to(where)).cpu()
        return result

    return step


def measure_eager(bench: DeviceBenchmark) -> Figures:
    """Eager forward pass with input and output in host memory."""
    figures = []
    width, layers = (1024, 12) if bench.has_gpu else (128, 12)
    for name, last, batch, length, goal in (
        ("eager_last_token", True, 1, 128, EAGER_LAST_GOAL),
        ("eager_all_logits", False, 8, 512 if bench.has_gpu else 32, EAGER_ALL_GOAL),
    ):
        torch.manual_seed(0)
        dtype = torch.float16 if bench.has_gpu else torch.float32
        local, remote = copy_model_to_both(
            bench, device_models.Transformer(width, layers, last_only=last).to(dtype)
        )
        ids = torch.randint(0, device_models.VOCABULARY_SIZE, (batch, length))
        with torch.no_grad():
            expected, actual = local(ids.to(bench.local)).cpu(), remote(ids.to(REMOTE_DEVICE)).cpu()
            torch.testing.assert_close(actual, expected, rtol=2e-2, atol=2e-2)
            theirs, ours = time_alternately(
                bench.rounds,
                make_forward_step(local, ids, bench.local),
                make_forward_step(remote, ids, REMOTE_DEVICE),
            )
        figures.append(ratio_figure(name, ours, theirs, goal=goal if bench.has_gpu else None))
    return figures


def capture_local_cuda_graph(
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

    def copy_inputs() -> None:
        for into, each in zip(static, pinned, strict=True):
            into.copy_(each, non_blocking=True)
        graph.replay()

    def step() -> torch.Tensor:
        copy_inputs()
        host.copy_(output, non_blocking=True)
        torch.cuda.synchronize()
        return host

    return step, copy_inputs


def measure_captured(bench: DeviceBenchmark) -> Figures:
    figures: Figures = []
    for name, model, inputs in device_models.make_captured_models(bench.has_gpu):
        torch.manual_seed(0)
        local, remote = copy_model_to_both(bench, model)
        captured = capture(remote)
        if bench.has_gpu:
            direct, feed = capture_local_cuda_graph(local, inputs)
        else:
            direct = feed = _make_eager_step(local, inputs)
        for _ in range(3):
            torch.testing.assert_close(captured(*inputs).cpu(), direct().cpu(), rtol=2e-2, atol=2e-2)
        theirs, ours = time_alternately(bench.rounds, direct, lambda c=captured, i=inputs: c(*i).cpu())
        goal = CAPTURED_LONG_GOAL if statistics.median(theirs) >= LONG_STEP_MS_MIN else CAPTURED_SHORT_GOAL
        figures.append(ratio_figure(f"captured_{name}", ours, theirs, goal=goal if bench.has_gpu else None))
        many = 100 if bench.has_gpu else 2  # enough steps that throughput dominates the first step
        theirs, ours = time_alternately(
            max(1, bench.rounds // 4),
            make_repeated_step(feed, many, bench.synchronize_local_gpu),
            make_repeated_step(
                lambda c=captured, i=inputs: c(*i), many, torch.remote_accelerator.synchronize
            ),
        )
        figures.append(
            ratio_figure(
                f"pipelined_{name}",
                [ms / many for ms in ours],
                [ms / many for ms in theirs],
                goal=PIPELINED_GOAL if bench.has_gpu else None,
            )
        )
    return figures


def make_repeated_step(
    step: Callable[[], object], count: int, wait: Callable[[], None]
) -> Callable[[], None]:
    """Runs `count` steps and waits once at the end."""

    def work() -> None:
        for _ in range(count):
            step()
        wait()

    return work


def _make_eager_step(model: Any, inputs: tuple[torch.Tensor, ...]) -> Callable[[], torch.Tensor]:
    def step() -> torch.Tensor:
        with torch.no_grad():
            result: torch.Tensor = model(*inputs)
        return result

    return step


MEASUREMENTS: dict[str, Callable[[DeviceBenchmark], Figures]] = {
    "ops": measure_ops,
    "growth": measure_growth,
    "copies": measure_copies,
    "eager": measure_eager,
    "captured": measure_captured,
}


def main() -> int:
    parser = report.make_parser((__doc__ or "").splitlines()[0], rounds=20)
    parser.add_argument("--only", nargs="+", choices=sorted(MEASUREMENTS), default=sorted(MEASUREMENTS))
    given: argparse.Namespace = parser.parse_args()
    logging.disable(logging.WARNING)
    figures: Figures = []
    with (
        report.use_temporary_state(),
        device_models.run_cluster(config.load({"controller.port": 0})),
        genie.session(),
    ):
        local = "cuda" if torch.cuda.is_available() else "cpu"
        if local == "cpu":
            torch.set_num_threads(1)  # both sides share the cores
        bench = DeviceBenchmark(rounds=given.rounds, ops=OPS_PER_ROUND * given.rounds, local=local)
        for name in given.only:
            print(f"measuring {name}", file=sys.stderr)
            figures += MEASUREMENTS[name](bench)
    return report.print_figures(figures, as_json=given.json)


if __name__ == "__main__":
    sys.exit(main())
