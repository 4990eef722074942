"""torch.compile(model, backend="genie"): the graphs that torch makes of a model, replayed by its executor.

torch finds it by its entry point. Training works: torch gives the forward and the backward pass as
graphs of their own, with the weights among the inputs; those are used where they are, everything else
is copied in. Graphs without remote tensors run as they are. Not for: capturing without torch.compile
(graphs.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from functorch.compile import make_boxed_func  # type: ignore[import-untyped]
from torch._dynamo.backends.common import aot_autograd

from genie.device import roster
from genie.device.graphs import Graph


def genie(module: torch.fx.GraphModule, examples: Sequence[Any], **options: object) -> Callable[..., Any]:
    """The compiler that torch.compile calls."""
    if options:
        raise ValueError(f'backend "genie" takes no options, and was given {", ".join(options)}')
    compiled: Callable[..., Any] = aot_autograd(fw_compiler=_shipped, bw_compiler=_shipped)(module, examples)
    return compiled


def _shipped(module: torch.fx.GraphModule, examples: Sequence[Any]) -> Any:
    """Runs one graph of torch on the executor where its inputs are."""
    static = frozenset(_static_inputs())
    graph: Graph | None = None
    baked: list[torch.Tensor] = []

    def run(*inputs: Any) -> Any:
        nonlocal graph, baked
        tensors = [each for each in inputs if isinstance(each, torch.Tensor) and each.dim() > 0]
        devices = {tensor.device for tensor in tensors}
        if {device.type for device in devices} != {roster.DEVICE_TYPE} or len(devices) > 1:
            return module(*inputs)
        positions = [i for i in static if i < len(inputs) and isinstance(inputs[i], torch.Tensor)]
        same = graph is not None and all(inputs[i] is kept for i, kept in zip(positions, baked, strict=True))
        if graph is None or not same or not graph.holds():
            baked = [inputs[i] for i in positions]
            graph = Graph(
                lambda given: module(*given), inputs, index=int(devices.pop().index), baked=positions
            )
            results = graph.results
        else:
            results = graph.replay(inputs)
        return [each.clone() if isinstance(each, torch.Tensor) else each for each in results]

    return make_boxed_func(run)


def _static_inputs() -> Sequence[int]:
    """Which inputs keep their place from call to call: parameters and buffers."""
    context = torch._guards.TracingContext.try_get()
    metadata = getattr(context, "fw_metadata", None)
    return list(getattr(metadata, "static_input_indices", None) or ())
