"""A captured model for batches of any size up to a bound, with a few recordings: see graphs.capture.

Not for: how a recording is made and replayed (graphs.py).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree

from genie.device.graphs import GRAPHS_KEPT_MAX, Captured, Graph, Sharing
from genie.errors import OpRefusedError, UsageError


class Bucketed(Captured):
    """Each batch is filled up to the next of the sizes, and what it gives is cut back."""

    def __init__(
        self, model: Callable[..., Any], *, batch_sizes: Sequence[int], inductor: bool = False
    ) -> None:
        super().__init__(model, inductor=inductor)
        try:
            self._sizes = sorted({operator.index(size) for size in batch_sizes})
        except TypeError:
            self._sizes = []
        if not 0 < len(self._sizes) <= GRAPHS_KEPT_MAX or self._sizes[0] < 1:
            raise UsageError(
                f"batch_sizes are 1 to {GRAPHS_KEPT_MAX} positive whole numbers, not {batch_sizes!r:.80}"
            )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves, spec = pytree.tree_flatten((args, kwargs))
        rows = _rows(leaves)
        size = self._next_size(rows)
        filled = [_filled(leaf, rows, size) for leaf in leaves]
        args, kwargs = pytree.tree_unflatten(filled, spec)
        results = super().__call__(*args, **kwargs)
        if rows == size:
            return results
        return pytree.tree_map_only(torch.Tensor, lambda each: _cut(each, rows, size), results)

    def _record(
        self, leaves: Sequence[Any], spec: pytree.TreeSpec | None, sharing: Sequence[Sharing]
    ) -> Graph:
        if any(isinstance(each, _BatchNorm) and _looks_at_batch(each) for each in self._modules):
            raise OpRefusedError(
                "batch_sizes cannot be used with batch norm that takes its statistics from the batch: filled "
                "rows would count",
                hint="call model.eval() first, with running statistics, or capture without batch_sizes",
            )
        graph = super()._record(leaves, spec, sharing)
        if graph.written:
            raise OpRefusedError(
                "batch_sizes cannot be used with a model that writes to its arguments",
                hint="capture without batch_sizes, or keep what it writes in buffers of the model",
            )
        return graph

    def _next_size(self, rows: int) -> int:
        for size in self._sizes:
            if 0 < rows <= size:
                return size
        raise UsageError(
            f"a batch of {rows} rows fits none of the batch sizes {', '.join(map(str, self._sizes))}",
            hint="give capture() a larger size, or cut the batch in parts" if rows else "leave it out",
        )


def _looks_at_batch(norm: _BatchNorm) -> bool:
    """As torch decides it."""
    return norm.training or (norm.running_mean is None and norm.running_var is None)


def _rows(leaves: Sequence[Any]) -> int:
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor) and leaf.dim() > 0:
            return int(leaf.shape[0])
    raise UsageError("a model captured with batch_sizes takes a tensor whose first dimension is the batch")


def _filled(leaf: Any, rows: int, size: int) -> Any:
    """With its last row again: what the model makes of it is no other trouble than that row was."""
    if rows == size or not isinstance(leaf, torch.Tensor) or leaf.dim() == 0 or leaf.shape[0] != rows:
        return leaf
    return torch.cat([leaf, leaf[-1:].expand(size - rows, *leaf.shape[1:])])


def _cut(result: torch.Tensor, rows: int, size: int) -> torch.Tensor:
    if result.dim() == 0 or result.shape[0] != size:
        return result
    return result[:rows]
