"""`capture(model)`: records what a model does once, on its executor, and replays it for later calls.

For inference; torch.compile(model, backend="genie") supports training (compiler.py). Weights are used in
place, and a change of them in place is seen by the next replay. Does not implement recording and replay of
one graph (graphs.py).
"""

from __future__ import annotations

import collections
import operator
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch.nn.modules import module as module_globals
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree

from genie.device import library, registry
from genie.device.graphs import (
    GRAPHS_PER_MODEL_MAX,
    GraphReport,
    OverlappingInput,
    RecordedGraph,
    exact_value_key,
    input_cache_key,
)
from genie.errors import OpRefusedError, UsageError
from genie.native import genie_device


def capture(
    model: Callable[..., Any], *, inductor: bool = False, batch_sizes: Sequence[int] | None = None
) -> CapturedModel:
    """Return the same model, replayed as a graph on the executor that holds its weights.

    The first call with inputs of given shapes runs the model and records it; later calls send the inputs and
    a replay command. Gradients are not recorded. The caller owns the results, each with its own memory. The
    model must do the same work for all inputs of one shape, and may change its own buffers (a KV cache) and
    its arguments, which may share memory with each other. Results are tensors and plain values, in tuples,
    lists and dicts. OpRefusedError names what cannot be recorded (values that the client needs, copies
    between devices) and which tensors the model had changed by then.

    `inductor`: the executor compiles each graph at its first replay, which may take minutes; if it cannot,
    the graph is replayed without compilation, and `report()` gives the reason.

    `batch_sizes`: record only these sizes of the first dimension, each for every combination of the other
    sizes and arguments. A batch between two sizes is padded to the larger one by repeating its last row, in
    every tensor whose first dimension is that of the first tensor; results of the padded size are cut back.
    Rows must not depend on each other. UsageError for a batch that is empty or larger than the largest size.
    """
    if not callable(model):
        raise UsageError(f"capture() needs a module or a function, not {model!r:.80}")
    if not isinstance(inductor, bool):
        raise UsageError(f"inductor must be True or False, not {inductor!r:.80}")
    if batch_sizes is not None:
        return BatchPaddingModel(model, batch_sizes=batch_sizes, inductor=inductor)
    return CapturedModel(model, inductor=inductor)


class CapturedModel:
    """See `capture`. Not thread-safe."""

    def __init__(self, model: Callable[..., Any], *, inductor: bool = False) -> None:
        self._model = model
        self._inductor = inductor
        self._guard: genie_device.GraphGuard | None = None
        self._modules: list[torch.nn.Module] = []
        self._graphs: collections.OrderedDict[Hashable, RecordedGraph] = collections.OrderedDict()
        """Recorded with the model as `_guard` describes it."""
        self._last_used_graph: tuple[Hashable, RecordedGraph] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        spec: pytree.TreeSpec | None = None
        keys: tuple[Hashable, ...] = ()
        leaves: Sequence[Any] = args
        if kwargs or not all(type(each) is torch.Tensor for each in args):
            leaves, spec = pytree.tree_flatten((args, kwargs))
            keys = tuple(_non_string_dict_keys((args, kwargs)))
        inputs_key = (spec, keys, torch.is_inference_mode_enabled(), *map(input_cache_key, leaves))
        library.ensure_loaded()
        predicted = self._find_graph_of_last_call(inputs_key)
        if predicted is not None:
            predicted.copy_inputs_to_graph(leaves)  # sent while the checks below run, which take as long
        sharing = genie_device.find_overlapping_inputs(leaves) if len(leaves) > 1 else None
        key = (inputs_key, self._update_guard_and_get_model_key(), sharing)
        graph = self._graphs.get(key)
        if graph is None or graph.is_lost:
            self._last_used_graph = None
            shared = [OverlappingInput(*each) for each in sharing or ()]
            graph = self._graphs[key] = self._record_graph(leaves, spec, shared)
            while len(self._graphs) > GRAPHS_PER_MODEL_MAX:
                self._graphs.popitem(last=False)
            results = graph.results
            if self._guard is not None and self._guard.is_unchanged():
                self._last_used_graph = inputs_key, graph
        else:
            graph.check_no_aliasing_with_model(leaves)
            if graph is not predicted:
                graph.copy_inputs_to_graph(leaves)
            results = graph.replay()
            self._graphs.move_to_end(key)
            self._last_used_graph = inputs_key, graph
        if graph.written_positions:
            graph.copy_changes_to_inputs(leaves)
        if type(results) is torch.Tensor:
            return genie_device.copy_graph_result(results)
        return pytree.tree_map_only(torch.Tensor, genie_device.copy_graph_result, results)

    def _find_graph_of_last_call(self, inputs_key: Hashable) -> RecordedGraph | None:
        """The graph of the last call, if the inputs match: inputs sent to a graph that is not replayed do no
        harm.

        They would if the model kept the graph's copy of an argument as a buffer: but after a run that left it
        with other weights and buffers than the guard has recorded, nothing is predicted.
        """
        if (
            self._last_used_graph is None
            or self._last_used_graph[0] != inputs_key
            or self._last_used_graph[1].is_lost
        ):
            return None
        return self._last_used_graph[1]

    def report(self) -> list[GraphReport]:
        """One report per recording, least recently used first. Waits for the executor."""
        if self._guard is None or not self._guard.is_unchanged():
            return []
        return [graph.fetch_report() for graph in self._graphs.values() if not graph.is_lost]

    def _update_guard_and_get_model_key(self) -> Hashable:
        """State besides the inputs that a recording depends on: train or eval mode of every module, autocast,
        torch settings.

        Drops all recordings first if the model's tensors, modules or hooks are not those of the guard.
        """
        if self._guard is None or not self._guard.is_unchanged():
            self._graphs.clear()
            self._last_used_graph = None
            owner = _owning_module(self._model)
            self._modules = [] if owner is None else list(owner.modules())  # cached: slow for large models
            self._guard = genie_device.GraphGuard(
                _parameters_and_buffers(self._modules),
                _guarded_dicts(self._modules),
                [(module.__dict__, "forward") for module in self._modules],
            )
        return (
            tuple([module.training for module in self._modules]),
            genie_device.torch_settings_key(),
            torch.get_default_device() if torch._C._len_torch_function_stack() else None,
        )

    def _record_graph(
        self, leaves: Sequence[Any], spec: pytree.TreeSpec | None, shared: Sequence[OverlappingInput]
    ) -> RecordedGraph:
        """`spec` None: the leaves are the positional arguments."""
        index = self._choose_device_index(leaves)

        def run(inputs: Sequence[Any]) -> Any:
            if spec is None:
                return self._model(*inputs)
            args, kwargs = pytree.tree_unflatten(list(inputs), spec)
            return self._model(*args, **kwargs)

        model_tensors = _named_parameters_and_buffers(self._model)
        with torch.no_grad():
            return RecordedGraph(
                run,
                leaves,
                index=index,
                shared=shared,
                model_tensors=model_tensors,
                inductor=self._inductor,
            )

    def _choose_device_index(self, leaves: Sequence[Any]) -> int:
        """Index of the device of the module's weights, else of the arguments, else the current device."""
        weights = _devices_of_tensors(_parameters_and_buffers(self._modules))
        if weights and isinstance(self._model, torch.nn.Module):
            return _single_device_index(
                weights, "weights", hint='move the model first: model.to("remote_accelerator:0")'
            )
        arguments = {device for device in _devices_of_tensors(leaves) if device.type == registry.DEVICE_TYPE}
        if arguments:
            return _single_device_index(
                arguments, "arguments", hint="pass arguments that are on one device, or on the CPU"
            )
        if weights:  # of the module of a bound method, which may have parts elsewhere
            hint = 'move the module or an argument first: module.to("remote_accelerator:0")'
            return _single_device_index(weights, "weights", hint=hint)
        return genie_device.current_device()


class BatchPaddingModel(CapturedModel):
    """Pads each batch to the next of the batch sizes, and cuts the results back."""

    def __init__(
        self, model: Callable[..., Any], *, batch_sizes: Sequence[int], inductor: bool = False
    ) -> None:
        super().__init__(model, inductor=inductor)
        try:
            self._batch_sizes = sorted({operator.index(size) for size in batch_sizes})
        except TypeError:
            self._batch_sizes = []
        if not 0 < len(self._batch_sizes) <= GRAPHS_PER_MODEL_MAX or self._batch_sizes[0] < 1:
            raise UsageError(
                f"batch_sizes must be 1 to {GRAPHS_PER_MODEL_MAX} positive integers, not {batch_sizes!r:.80}"
            )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves, spec = pytree.tree_flatten((args, kwargs))
        rows = _read_batch_size(leaves)
        size = self._smallest_fitting_batch_size(rows)
        padded = [_pad_batch(leaf, rows, size) for leaf in leaves]
        args, kwargs = pytree.tree_unflatten(padded, spec)
        results = super().__call__(*args, **kwargs)
        if rows == size:
            return results
        return pytree.tree_map_only(torch.Tensor, lambda each: _remove_padding(each, rows, size), results)

    def _record_graph(
        self, leaves: Sequence[Any], spec: pytree.TreeSpec | None, shared: Sequence[OverlappingInput]
    ) -> RecordedGraph:
        if any(isinstance(each, _BatchNorm) and _uses_batch_statistics(each) for each in self._modules):
            raise OpRefusedError(
                "batch_sizes cannot be used with batch norm that computes statistics of the batch: padding "
                "would change them",
                hint="call model.eval() first, with running statistics, or capture without batch_sizes",
            )
        graph = super()._record_graph(leaves, spec, shared)
        if graph.written_positions:
            raise OpRefusedError(
                "batch_sizes cannot be used with a model that writes to its arguments",
                hint="capture without batch_sizes, or write to buffers of the model instead",
            )
        return graph

    def _smallest_fitting_batch_size(self, rows: int) -> int:
        for size in self._batch_sizes:
            if 0 < rows <= size:
                return size
        raise UsageError(
            f"a batch of {rows} rows fits none of the batch sizes {', '.join(map(str, self._batch_sizes))}",
            hint="pass a larger size to capture(), or split the batch" if rows else "skip empty batches",
        )


def _non_string_dict_keys(tree: Any) -> list[Hashable]:
    """Exact keys of the keys, other than strings, of dict arguments: pytree compares those by equality
    only."""
    if isinstance(tree, dict):
        other = [exact_value_key(key) for key in tree if type(key) is not str]
        return other + [key for each in tree.values() for key in _non_string_dict_keys(each)]
    return (
        [key for each in tree for key in _non_string_dict_keys(each)]
        if isinstance(tree, (tuple, list))
        else []
    )


def _owning_module(model: object) -> torch.nn.Module | None:
    """The captured module, or the module of the captured bound method."""
    owner = model if isinstance(model, torch.nn.Module) else getattr(model, "__self__", None)
    return owner if isinstance(owner, torch.nn.Module) else None


def _parameters_and_buffers(modules: Sequence[torch.nn.Module]) -> list[torch.Tensor]:
    return [
        tensor
        for module in modules
        for owner in (module._parameters, module._buffers)
        for tensor in owner.values()
        if tensor is not None
    ]


def _named_parameters_and_buffers(model: object) -> list[tuple[str, torch.Tensor]]:
    """Parameters and buffers of a model with their names."""
    owner = _owning_module(model)
    if owner is None:
        return []
    parameters = owner.named_parameters(remove_duplicate=False)
    return [*parameters, *owner.named_buffers(remove_duplicate=False)]


def _guarded_dicts(modules: Sequence[torch.nn.Module]) -> list[dict[Any, Any]]:
    """The dicts that define a model: parameters, buffers, submodules, hooks. Any: their types differ."""
    global_hooks = [module_globals._global_forward_hooks, module_globals._global_forward_pre_hooks]
    return global_hooks + [
        part
        for module in modules
        for part in (
            module._parameters,
            module._buffers,
            module._modules,
            module._forward_hooks,
            module._forward_pre_hooks,
        )
    ]


def _devices_of_tensors(leaves: Sequence[Any]) -> set[torch.device]:
    """Devices of the tensors, except those of CPU scalars, which every device accepts."""
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    return {each.device for each in tensors if each.dim() > 0 or each.device.type == registry.DEVICE_TYPE}


def _single_device_index(devices: set[torch.device], what: str, *, hint: str) -> int:
    device = min(devices, key=str)
    if len(devices) > 1 or device.type != registry.DEVICE_TYPE:
        found = ", ".join(sorted(map(str, devices)))
        message = f"a captured model must be on one remote accelerator; its {what} are on: {found}"
        raise OpRefusedError(message, hint=hint)
    return int(device.index)


def _uses_batch_statistics(norm: _BatchNorm) -> bool:
    """The same condition as in torch."""
    return norm.training or (norm.running_mean is None and norm.running_var is None)


def _read_batch_size(leaves: Sequence[Any]) -> int:
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor) and leaf.dim() > 0:
            return int(leaf.shape[0])
    raise UsageError(
        "a model captured with batch_sizes needs a tensor argument whose first dimension is the batch"
    )


def _pad_batch(leaf: Any, rows: int, size: int) -> Any:
    """Repeat the last row: padding with real data cannot cause an error that the batch itself does not."""
    if rows == size or not isinstance(leaf, torch.Tensor) or leaf.dim() == 0 or leaf.shape[0] != rows:
        return leaf
    return torch.cat([leaf, leaf[-1:].expand(size - rows, *leaf.shape[1:])])


def _remove_padding(result: torch.Tensor, rows: int, size: int) -> torch.Tensor:
    if result.dim() == 0 or result.shape[0] != size:
        return result
    return result[:rows]
