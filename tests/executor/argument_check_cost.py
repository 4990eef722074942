"""Measures kernels and the checks of their indices (docs/decisions/0036-arguments-that-kernels-trust.md)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.benchmark import Timer


def _milliseconds(run: Callable[[], Any]) -> float:
    timer = Timer("run()", globals={"run": run}, num_threads=1)
    return float(timer.blocked_autorange(min_run_time=1.0).median) * 1e3


def main() -> None:
    aten = torch.ops.aten
    image = torch.randn(8, 64, 56, 56)
    pooled, positions = aten.max_pool2d_with_indices(image, [3, 3], [2, 2], [1, 1])
    window: list[Any] = [[3, 3], [2, 2], [1, 1], [1, 1], False]
    tokens = torch.randint(0, 32_000, (4096,))
    weight, gradient, offsets = torch.randn(32_000, 64), torch.randn(4096, 512), torch.arange(0, 4096, 8)
    rows: list[tuple[str, Callable[[], Any], Callable[[], Any]]] = [
        (
            "max_pool2d_with_indices_backward",
            lambda: aten.max_pool2d_with_indices_backward(pooled, image, *window, positions),
            lambda: torch.aminmax(positions),
        ),
        (
            "embedding_dense_backward",
            lambda: aten.embedding_dense_backward(gradient, tokens, 32_000, -1, False),
            lambda: torch.aminmax(tokens),
        ),
        (
            "_embedding_bag",
            lambda: aten._embedding_bag(weight, tokens, offsets),
            lambda: (torch.aminmax(tokens), torch.aminmax(offsets)),
        ),
    ]
    for name, kernel, check in rows:
        print(f"{name}: kernel {_milliseconds(kernel):.3f} ms, check {_milliseconds(check):.3f} ms")


if __name__ == "__main__":
    main()
