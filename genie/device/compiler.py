"""torch.compile(model, backend="genie"): the graphs that torch makes of a model, replayed by its executor.

torch finds it by its entry point. Training works: torch gives the forward and the backward pass as
graphs of their own, with the weights among the inputs; those are used where they are, everything else
is copied in. Graphs without remote tensors run as they are. Without backend="genie" torch's own compiler
is told that it has no part here. Not for: capturing without torch.compile (graphs.py).
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from functorch.compile import make_boxed_func  # type: ignore[import-untyped]
from torch._dynamo.backends.common import aot_autograd

from genie.device import backend, roster
from genie.device.graphs import GRAPHS_KEPT_MAX, Graph, look
from genie.errors import OpRefusedError


def genie(
    module: torch.fx.GraphModule,
    examples: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """The compiler that torch.compile calls. The one option is "inductor": see graphs.capture."""
    if mode is not None:
        raise ValueError(f'backend "genie" has no modes, and was given {mode!r}')
    given = dict(options or {})
    inductor = given.pop("inductor", False)
    if given or not isinstance(inductor, bool):
        wrong = ", ".join(given) or f"inductor={inductor!r}"
        raise ValueError(f'backend "genie" takes the option "inductor", True or False; it was given {wrong}')
    both = aot_autograd(
        fw_compiler=functools.partial(_forward, inductor=inductor),
        bw_compiler=functools.partial(_backward, inductor=inductor),
    )
    compiled: Callable[..., Any] = both(module, examples)
    return compiled


def _forward(module: torch.fx.GraphModule, examples: Sequence[Any], *, inductor: bool) -> Any:
    """Parameters and buffers keep their place from call to call, and torch says which inputs those are."""
    context = torch._guards.TracingContext.try_get()
    metadata = getattr(context, "fw_metadata", None)
    static = getattr(metadata, "static_input_indices", None) or ()
    return make_boxed_func(Shipped(module, static, inductor=inductor))


def _backward(module: torch.fx.GraphModule, examples: Sequence[Any], *, inductor: bool) -> Any:
    return make_boxed_func(Shipped(module, (), inductor=inductor))


class Shipped:
    """Runs one graph of torch on the executor where its inputs are; one recording for each look of them."""

    def __init__(self, module: torch.fx.GraphModule, static: Sequence[int], *, inductor: bool) -> None:
        self._module = module
        self._inductor = inductor
        self._static = frozenset(static)
        self._graphs: collections.OrderedDict[Hashable, Graph] = collections.OrderedDict()

    def __call__(self, *inputs: Any) -> Any:
        index = _remote_index(inputs)
        if index is None:
            return self._module(*inputs)
        baked = [i for i in self._static if i < len(inputs) and isinstance(inputs[i], torch.Tensor)]
        # torch gives the same graph other numbers and shapes, and may be given other weights.
        key = tuple(id(each) if i in baked else look(each) for i, each in enumerate(inputs))
        graph = self._graphs.get(key)
        if graph is None or not graph.holds():
            graph = Graph(self._run, inputs, index=index, baked=baked, inductor=self._inductor)
            self._graphs[key] = graph
            while len(self._graphs) > GRAPHS_KEPT_MAX:
                self._graphs.popitem(last=False)
            results = graph.results
        else:
            self._graphs.move_to_end(key)
            graph.send(inputs)
            results = graph.replay()
        take = backend.library().take_result
        return [take(each) if isinstance(each, torch.Tensor) else each for each in results]

    def _run(self, inputs: Sequence[Any]) -> Any:
        return self._module(*inputs)


def _remote_index(inputs: Sequence[Any]) -> int | None:
    """Of the one remote device that all inputs are on."""
    tensors = [each for each in inputs if isinstance(each, torch.Tensor)]
    devices = {each.device for each in tensors if each.dim() > 0 or each.device.type == roster.DEVICE_TYPE}
    if len(devices) != 1:
        return None
    (device,) = devices
    return int(device.index) if device.type == roster.DEVICE_TYPE else None


class _Refusing(type):
    @property
    def supports_caching(cls) -> bool:
        """What inductor asks first, before it takes the model apart; later its own errors are around this."""
        raise _no_inductor()


class NoInductor(metaclass=_Refusing):
    """Stands where torch's inductor, its default backend, looks for what makes code for this device."""

    def __init__(self, *args: object) -> None:
        raise _no_inductor()

    @classmethod
    def create(cls, *args: object) -> NoInductor:
        return cls(*args)


def inductor_part() -> Any:  # Any: it stands for several classes of torch
    """For inductor, which asks once it is imported, and looks among its overrides before it gets here."""
    from torch._inductor.codegen import common

    common.get_device_op_overrides("cpu")  # an older torch makes its own only where there are none yet
    common.register_device_op_overrides(roster.DEVICE_TYPE, common.DeviceOpOverrides())
    return NoInductor


def tell_inductor() -> None:
    """Where inductor was in use before the device had its name: it asks once in a process."""
    from torch._inductor.codegen import common

    part = inductor_part()
    common.register_backend_for_device(roster.DEVICE_TYPE, part, part, part, part)


def _no_inductor() -> OpRefusedError:
    return OpRefusedError(
        "torch.compile without a backend makes code for devices of this machine (inductor), not for "
        + roster.DEVICE_TYPE,
        hint='say torch.compile(model, backend="genie"); with options={"inductor": True} the executor '
        "compiles the graphs with inductor itself",
    )
