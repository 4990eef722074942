"""What the remote device costs beside the same work done directly.

    python benchmarks/bench_device.py [--json] [--rounds 20] [--only NAME...]

Starts a cluster on loopback with TLS and a session with it, and measures local and remote in turn. Where the
cluster has a GPU, this process uses that GPU, too: the models are run directly on it, as CUDA graphs for the
captured ones, and remotely. Without one the models run on the CPU of both sides, and have no goals. Ends
with 1 when a goal is missed.
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
"""For the cost of growth: a million with the usual twenty rounds."""

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
LEFT_BEHIND = report.value_at_most(0.0)


@dataclass
class Bench:
    rounds: int
    ops: int
    local: str
    """Where this process runs the models: the same GPU, or the CPU."""

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


def in_turn(rounds: int, *works: Callable[[], object]) -> list[list[float]]:
    """Milliseconds of each, measured one after the other in every round."""
    for work in works:
        work()
    taken: list[list[float]] = [[] for _ in works]
    for _ in range(rounds):
        for work, times in zip(works, taken, strict=True):
            times.append(seconds(work) * 1000)
    return taken


def compared(
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


def adds(tensor: torch.Tensor, count: int) -> Callable[[], None]:
    def work() -> None:
        for _ in range(count):
            torch.add(tensor, tensor)

    return work


def measure_ops(bench: Bench) -> Measured:
    """Microseconds of this process for one op."""
    count = 1000
    here, there = torch.ones(16, 16), torch.ones(16, 16, device=REMOTE)
    wait = torch.remote_accelerator.synchronize
    torch.set_num_threads(1)
    adds(there, 2000)()
    local: list[float] = []
    remote: list[float] = []
    whole: list[float] = []
    for _ in range(bench.rounds):
        local.append(seconds(adds(here, count)) / count * 1e6)
        wait()
        began = time.perf_counter()
        adds(there, count)()
        remote.append((time.perf_counter() - began) / count * 1e6)
        wait()
        whole.append((time.perf_counter() - began) / count * 1e6)
    one = there[0, 0]
    values = [seconds(one.item) * 1e6 for _ in range(100)]
    return [
        compared("add_16x16_client", remote, local, goal=ADD, unit="us"),
        compared("add_16x16_done", whole, local, goal=None, unit="us"),
        report.figure("item_round_trip", statistics.median(values), samples=values, unit="us"),
    ]


def measure_growth(bench: Bench) -> Measured:
    """An op of the first hundreds against one after all the others; memory here and there."""
    there = torch.ones(16, 16, device=REMOTE)
    accelerator = torch.remote_accelerator

    def cost_us() -> float:
        accelerator.synchronize()
        return seconds(adds(there, 100)) / 100 * 1e6

    adds(there, 1000)()
    held = accelerator.memory_stats()["allocated_bytes.current"]
    few = [cost_us() for _ in range(100)]
    grown: list[float] = []
    start = _resident_mib()
    for _ in range(10):
        adds(there, bench.ops // 10)()
        grown.append(_resident_mib() - start)
    many = [cost_us() for _ in range(100)]
    accelerator.synchronize()
    left = accelerator.memory_stats()["allocated_bytes.current"] - held
    return [
        compared("op_after_many", many, few, goal=FLAT, unit="us"),
        report.figure("client_memory_grown", grown[-1], samples=grown, unit="MiB", goal=MEMORY),
        report.figure("server_memory_left", left / MIB, samples=[left / MIB], unit="MiB", goal=LEFT_BEHIND),
    ]


def _resident_mib() -> float:
    with open("/proc/self/statm") as file:  # noqa: PTH123
        return int(file.read().split()[1]) * resource.getpagesize() / MIB


# --- copies -------------------------------------------------------------------------------------


class PlainCopy:
    """The same bytes over a bare blocking socket on loopback, between two threads."""

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
        got = 0
        while got < self._size:
            got += self._theirs.recv_into(self._into[got:])
        sender.join()

    def close(self) -> None:
        self._ours.close()
        self._theirs.close()


def measure_copies(bench: Bench) -> Measured:
    """GiB a second. The baseline moves the same bytes between two sockets of this process."""
    size = min(1024, 64 * bench.rounds) * MIB
    here = torch.ones(size // 4)
    there = here.to(REMOTE)
    into = torch.empty_like(here)
    plain = PlainCopy(size)

    def up() -> None:
        there.copy_(here)
        torch.remote_accelerator.synchronize()

    try:
        times = in_turn(max(1, bench.rounds // 4), up, lambda: into.copy_(there), plain.run)
    finally:
        plain.close()
    ups, downs, plains = ([size / 1024**3 / (ms / 1000) for ms in each] for each in times)
    assert torch.equal(into, here)
    return [
        compared(f"copy_{size // MIB}_mib_up", ups, plains, goal=COPY, unit="GiB/s"),
        compared(f"copy_{size // MIB}_mib_down", downs, plains, goal=COPY, unit="GiB/s"),
    ]


# --- models -------------------------------------------------------------------------------------


def twins(bench: Bench, model: torch.nn.Module) -> tuple[torch.nn.Module, torch.nn.Module]:
    model = model.eval()
    return copy.deepcopy(model).to(bench.local), model.to(REMOTE)


def forward(model: Any, ids: torch.Tensor, where: str) -> Callable[[], torch.Tensor]:
    def step() -> torch.Tensor:
        result: torch.Tensor = model(ids.to(where)).cpu()
        return result

    return step


def measure_eager(bench: Bench) -> Measured:
    """A forward pass, input from host memory and output to it, op by op."""
    figures = []
    width, layers = (1024, 12) if bench.has_gpu else (128, 12)
    for name, last, batch, length, goal in (
        ("eager_last_token", True, 1, 128, EAGER_LAST),
        ("eager_all_logits", False, 8, 512 if bench.has_gpu else 32, EAGER_ALL),
    ):
        torch.manual_seed(0)
        dtype = torch.float16 if bench.has_gpu else torch.float32
        local, remote = twins(bench, device_models.Transformer(width, layers, last_only=last).to(dtype))
        ids = torch.randint(0, device_models.VOCABULARY, (batch, length))
        with torch.no_grad():
            expected, got = local(ids.to(bench.local)).cpu(), remote(ids.to(REMOTE)).cpu()
            torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-2)
            theirs, ours = in_turn(
                bench.rounds, forward(local, ids, bench.local), forward(remote, ids, REMOTE)
            )
        figures.append(compared(name, ours, theirs, goal=goal if bench.has_gpu else None))
    return figures


def direct_graph(
    model: Any, inputs: tuple[torch.Tensor, ...]
) -> tuple[Callable[[], torch.Tensor], Callable[[], None]]:
    """The model as a CUDA graph of this process: a step with host memory at both ends, and a bare replay."""
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
    for name, model, inputs in device_models.captured(bench.has_gpu):
        torch.manual_seed(0)
        local, remote = twins(bench, model)
        captured = capture(remote)
        if bench.has_gpu:
            direct, feed = direct_graph(local, inputs)
        else:
            direct = feed = _plain_step(local, inputs)
        for _ in range(3):
            torch.testing.assert_close(captured(*inputs).cpu(), direct().cpu(), rtol=2e-2, atol=2e-2)
        theirs, ours = in_turn(bench.rounds, direct, lambda c=captured, i=inputs: c(*i).cpu())
        goal = CAPTURED_LONG if statistics.median(theirs) >= LONG_MS else CAPTURED_SHORT
        figures.append(compared(f"captured_{name}", ours, theirs, goal=goal if bench.has_gpu else None))
        many = 100 if bench.has_gpu else 2  # so that it is the pace, not the start, which is measured
        theirs, ours = in_turn(
            max(1, bench.rounds // 4),
            repeated(feed, many, bench.wait_local),
            repeated(lambda c=captured, i=inputs: c(*i), many, torch.remote_accelerator.synchronize),
        )
        figures.append(
            compared(
                f"pipelined_{name}",
                [ms / many for ms in ours],
                [ms / many for ms in theirs],
                goal=PIPELINED if bench.has_gpu else None,
            )
        )
    return figures


def repeated(step: Callable[[], object], count: int, wait: Callable[[], None]) -> Callable[[], None]:
    """One after the other, waited for at the end."""

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
    with report.own_place(), device_models.cluster(config.load({"controller.port": 0})), genie.session():
        local = "cuda" if torch.cuda.is_available() else "cpu"
        if local == "cpu":
            torch.set_num_threads(1)  # both sides share the processors
        bench = Bench(rounds=given.rounds, ops=OPS_PER_ROUND * given.rounds, local=local)
        for name in given.only:
            print(f"measuring {name}", file=sys.stderr)
            figures += MEASURES[name](bench)
    return report.conclude(figures, as_json=given.json)


if __name__ == "__main__":
    sys.exit(main())
