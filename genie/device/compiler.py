"""torch.compile(model, backend="genie"): the FX graphs of a model, recorded and replayed by its executor.

Without a backend, graphs with remote tensors are compiled with inductor by the executor (adapters.py).
Training works: torch passes the forward and the backward pass as separate graphs, with the weights among the
inputs; weights are used in place, all other inputs are copied. Graphs without remote tensors run unchanged.
Inductor itself, if called directly, gets an error that names this backend. Does not capture models without
torch.compile (model_capture.py).
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from functorch.compile import make_boxed_func  # type: ignore[import-untyped]
from torch._dynamo.backends.common import aot_autograd

from genie.device import library, registry
from genie.device.graphs import GRAPHS_PER_MODEL_MAX, RecordedGraph, input_cache_key
from genie.errors import OpRefusedError
from genie.native import genie_device


def genie(
    module: torch.fx.GraphModule,
    examples: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """The backend that torch.compile calls. Its only option is "inductor": see `capture`."""
    if mode is not None:
        raise ValueError(f'backend "genie" does not support mode={mode!r}; leave it out')
    unknown = dict(options or {})
    inductor = unknown.pop("inductor", False)
    if unknown or not isinstance(inductor, bool):
        wrong = ", ".join(unknown) or f"inductor={inductor!r}"
        raise ValueError(f'backend "genie" has one option, "inductor" (True or False); got {wrong}')
    compile_graphs = aot_autograd(
        fw_compiler=functools.partial(_compile_forward, inductor=inductor),
        bw_compiler=functools.partial(_compile_backward, inductor=inductor),
    )
    compiled: Callable[..., Any] = compile_graphs(module, examples)
    return compiled


def has_remote_tensors(module: torch.fx.GraphModule, examples: Sequence[Any]) -> bool:
    """Whether an input or a value of the graph is on a remote device."""
    values = [*examples, *(node.meta.get("example_value") for node in module.graph.nodes)]
    return any(isinstance(each, torch.Tensor) and each.device.type == registry.DEVICE_TYPE for each in values)


def compile_by_default(
    module: torch.fx.GraphModule, examples: Sequence[Any], config: Mapping[str, Any]
) -> Callable[..., Any]:
    """For torch.compile without a backend. `config`: settings of inductor, from its mode and options."""
    unsupported = sorted(set(config) - {"triton.cudagraphs"})  # of "reduce-overhead": graphs are always used
    if unsupported:
        raise OpRefusedError(
            f"torch.compile on {registry.DEVICE_TYPE} does not support these settings of inductor: "
            f"{', '.join(unsupported)}",
            hint='leave out options, and use no mode, mode="default" or mode="reduce-overhead"',
        )
    return genie(module, examples, options={"inductor": True})


def _compile_forward(module: torch.fx.GraphModule, examples: Sequence[Any], *, inductor: bool) -> Any:
    """Parameters and buffers keep their memory from call to call; torch's metadata lists those inputs."""
    context = torch._guards.TracingContext.try_get()
    metadata = getattr(context, "fw_metadata", None)
    static = getattr(metadata, "static_input_indices", None) or ()
    return make_boxed_func(RemoteGraphModule(module, static, inductor=inductor))


def _compile_backward(module: torch.fx.GraphModule, examples: Sequence[Any], *, inductor: bool) -> Any:
    return make_boxed_func(RemoteGraphModule(module, (), inductor=inductor))


class RemoteGraphModule:
    """Runs one FX graph on the executor that holds its inputs; one recording per combination of input
    keys."""

    def __init__(self, module: torch.fx.GraphModule, static: Sequence[int], *, inductor: bool) -> None:
        self._module = module
        self._inductor = inductor
        self._static_input_positions = frozenset(static)
        self._graphs: collections.OrderedDict[Hashable, RecordedGraph] = collections.OrderedDict()

    def __call__(self, *inputs: Any) -> Any:
        index = _remote_device_index(inputs)
        if index is None:
            return self._module(*inputs)
        in_place = [
            i for i in self._static_input_positions if i < len(inputs) and isinstance(inputs[i], torch.Tensor)
        ]
        # torch calls one graph with different numbers, shapes and weights.
        key = tuple(id(each) if i in in_place else input_cache_key(each) for i, each in enumerate(inputs))
        graph = self._graphs.get(key)
        if graph is None or not graph.is_valid():
            graph = RecordedGraph(
                self._run_module, inputs, index=index, in_place=in_place, inductor=self._inductor
            )
            self._graphs[key] = graph
            while len(self._graphs) > GRAPHS_PER_MODEL_MAX:
                self._graphs.popitem(last=False)
            results = graph.results
        else:
            self._graphs.move_to_end(key)
            graph.copy_inputs_to_graph(inputs)
            results = graph.replay()
        library.ensure_loaded()
        take = genie_device.copy_graph_result
        return [take(each) if isinstance(each, torch.Tensor) else each for each in results]

    def _run_module(self, inputs: Sequence[Any]) -> Any:
        return self._module(*inputs)


def _remote_device_index(inputs: Sequence[Any]) -> int | None:
    """Index of the remote device that holds all inputs; None if they are elsewhere, or on several devices."""
    tensors = [each for each in inputs if isinstance(each, torch.Tensor)]
    devices = {each.device for each in tensors if each.dim() > 0 or each.device.type == registry.DEVICE_TYPE}
    if len(devices) != 1:
        return None
    (device,) = devices
    return int(device.index) if device.type == registry.DEVICE_TYPE else None


class _UnsupportedCodegenMeta(type):
    @property
    def supports_caching(cls) -> bool:
        """Inductor reads this first, before it lowers the model; later it would wrap the error in its own."""
        raise _inductor_unsupported_error()


class UnsupportedCodegen(metaclass=_UnsupportedCodegenMeta):
    """Registered as inductor's code generator for this device: raises an error that names the right
    backend."""

    def __init__(self, *args: object) -> None:
        raise _inductor_unsupported_error()

    @classmethod
    def create(cls, *args: object) -> UnsupportedCodegen:
        return cls(*args)


def unsupported_inductor_codegen() -> Any:  # Any: it replaces several classes of torch
    """The class for inductor, which requests it after its import and reads its op overrides first."""
    from torch._inductor.codegen import common

    common.get_device_op_overrides("cpu")  # an older torch registers its own only while there are none
    common.register_device_op_overrides(registry.DEVICE_TYPE, common.DeviceOpOverrides())
    return UnsupportedCodegen


def register_unsupported_codegen() -> None:
    """For a process that used inductor before the device was registered: inductor looks up devices once."""
    from torch._inductor.codegen import common

    part = unsupported_inductor_codegen()
    common.register_backend_for_device(registry.DEVICE_TYPE, part, part, part, part)


def _inductor_unsupported_error() -> OpRefusedError:
    return OpRefusedError(
        f"inductor cannot generate code for {registry.DEVICE_TYPE} in this process",
        hint="use torch.compile(model), which lets the executor compile the graphs with inductor",
    )
