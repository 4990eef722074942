"""Graphs: what a model does is written down once by its executor, and carried out again at a word.

`capture(model)` is for inference; torch.compile(model, backend="genie") is built on the same
(compiler.py). Weights stay where they are, and a change of them in place is seen by the next replay.
Not for: how a graph is kept and replayed (native/torch).
"""

from __future__ import annotations

import collections
import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from genie.device import backend, roster
from genie.errors import OpRefusedError, UsageError

GRAPHS_KEPT_MAX = 32
"""For each captured model: one for each combination of shapes. The one unused for longest goes."""
_DESCRIBED_CHARACTERS_MAX = 100
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.layout)


def capture(
    model: Callable[..., Any], *, inductor: bool = False, batch_sizes: Sequence[int] | None = None
) -> Captured:
    """The same model, replayed as a graph on the executor where its weights are.

    The first call with inputs of given shapes runs the model and writes it down; calls after that send
    the inputs and one word. Gradients are not recorded. What a call gives is the caller's to keep. The
    model must do the same work for every input of one shape, and may change its own buffers (a KV cache) and
    the tensors that it is given. Results are tensors and plain values, in tuples, lists and dicts.
    OpRefusedError names what cannot be written down: values that are needed here, copies to and fro.

    `inductor`: the executor compiles each graph at its first replay, which may take minutes; where it
    cannot, the graph is replayed as it is, and `report()` says why.

    `batch_sizes`: recordings are made for these sizes of the first dimension only. A batch between them is
    filled up to the next one by repeating its last row, in every tensor whose first size is that of the
    first tensor, and results whose first size is the larger one are cut back. Rows must not depend on each
    other. UsageError for a batch that is larger than the last size.
    """
    if not callable(model):
        raise UsageError(f"capture takes a module or a function, not {model!r:.80}")
    if not isinstance(inductor, bool):
        raise UsageError(f"inductor is True or False, not {inductor!r:.80}")
    if batch_sizes is not None:
        from genie.device.buckets import Bucketed  # it imports this module

        return Bucketed(model, batch_sizes=batch_sizes, inductor=inductor)
    return Captured(model, inductor=inductor)


@dataclass(frozen=True)
class GraphReport:
    """One recording, as its executor replays it."""

    inputs: tuple[str, ...]
    """Like "float32[8, 512]"; other values as they are."""
    how: str
    """"steps", "cuda graph", "inductor" or "inductor in a cuda graph"."""
    why: str
    """What kept the executor from a better way; empty when nothing did."""
    replays: int


def reports(index: int) -> list[GraphReport]:
    """Of all graphs of this process on a device, those of torch.compile too."""
    return [graph.report() for graph in list(_alive) if graph.index == index and not graph.lost]


class Captured:
    """See `capture`. One thread at a time."""

    def __init__(self, model: Callable[..., Any], *, inductor: bool = False) -> None:
        self._model = model
        self._inductor = inductor
        self._modules: list[torch.nn.Module] = []
        self._graphs: collections.OrderedDict[Hashable, Graph] = collections.OrderedDict()
        self._last: tuple[Hashable, Graph] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        spec: pytree.TreeSpec | None = None
        leaves: Sequence[Any] = args
        if kwargs or not all(type(each) is torch.Tensor for each in args):
            leaves, spec = pytree.tree_flatten((args, kwargs))
        looks = (spec, *map(look, leaves))
        guessed = self._guess(looks)
        if guessed is not None:
            guessed.send(leaves)  # under way while the rest is looked at, which takes as long
        key = (looks, self._mode())
        graph = self._graphs.get(key)
        if graph is None or not graph.holds():
            graph = self._graphs[key] = self._record(leaves, spec)
            while len(self._graphs) > GRAPHS_KEPT_MAX:
                self._graphs.popitem(last=False)
            results = graph.results
        else:
            if graph is not guessed:
                graph.send(leaves)
            results = graph.replay()
            self._graphs.move_to_end(key)
        self._last = looks, graph
        if graph.written:
            graph.write_back(leaves)
        take = backend.library().take_result
        if type(results) is torch.Tensor:
            return take(results)
        return pytree.tree_map_only(torch.Tensor, take, results)

    def _guess(self, looks: Hashable) -> Graph | None:
        """Most calls are like the last one. Inputs sent to a graph that is then not replayed do no harm."""
        if self._last is None or self._last[0] != looks or self._last[1].lost:
            return None
        return self._last[1]

    def report(self) -> list[GraphReport]:
        """One for each recording, the one unused for longest first. Asks the executor."""
        return [graph.report() for graph in self._graphs.values() if graph.holds()]

    def _mode(self) -> Hashable:
        """What else decides about the work: train or eval of every part, and autocast."""
        if not self._modules and isinstance(self._model, torch.nn.Module):
            self._modules = list(self._model.modules())  # once: walking them takes longer than a short replay
        cast = torch.is_autocast_enabled(roster.DEVICE_TYPE)
        return (
            tuple([module.training for module in self._modules]),
            torch.get_autocast_dtype(roster.DEVICE_TYPE) if cast else None,
        )

    def _record(self, leaves: Sequence[Any], spec: pytree.TreeSpec | None) -> Graph:
        """Without a `spec` the leaves are the arguments."""
        self._modules = []  # there may be others by now
        weights = _weights(self._model)
        index = _index_of(weights or leaves)

        def run(inputs: Sequence[Any]) -> Any:
            if spec is None:
                return self._model(*inputs)
            args, kwargs = pytree.tree_unflatten(list(inputs), spec)
            return self._model(*args, **kwargs)

        with torch.no_grad():
            return Graph(
                run, leaves, index=index, weights=weights, parts=_parts(self._model), inductor=self._inductor
            )


class Graph:
    """One recording: its own copies of the inputs, and what the model gave. Made by running it once."""

    def __init__(
        self,
        run: Callable[[Sequence[Any]], Any],
        inputs: Sequence[Any],
        *,
        index: int,
        weights: Sequence[torch.Tensor] = (),
        parts: Sequence[dict[Any, Any]] = (),
        baked: Sequence[int] = (),
        inductor: bool = False,
    ) -> None:
        """`baked`: positions of inputs that are used where they are, not copied. `parts`: of the model."""
        library = backend.library()
        self.index = index
        self._described = tuple(map(_described, inputs))
        self._copied = [
            i for i, each in enumerate(inputs) if isinstance(each, torch.Tensor) and i not in baked
        ]
        self._inputs = list(inputs)
        for i in self._copied:
            self._inputs[i] = _own_copy(inputs[i], index)
        self._places = [self._inputs[i] for i in self._copied]
        self._watch = library.Watch([*weights, *(self._inputs[i] for i in baked)], list(parts))
        self._connection = roster.slot(index).connection(first_seed=torch.initial_seed())
        self._number = self._connection.begin_graph()
        whole = False
        try:
            before = [_version(place) for place in self._places]
            self.results = run(self._inputs)
            _check_results(self.results, index)
            self.written = [
                i for i, old in zip(self._copied, before, strict=True) if _version(self._inputs[i]) != old
            ]
            """Positions of inputs that the model has changed."""
            whole = True
        finally:
            self._connection.end_graph((_COMPILE if inductor else _KEEP) if whole else _FORGET)
            if not whole:
                self._number = None
        _alive.add(self)

    def holds(self) -> bool:
        """Whether the executor is there and the weights are those that it was recorded with."""
        return not self.lost and bool(self._watch.holds())

    @property
    def lost(self) -> bool:
        """Whether the executor is gone, and the graph with it."""
        return bool(self._connection.lost)

    def send(self, inputs: Sequence[Any]) -> None:
        """What the next replay works on."""
        self._connection.send(self._places, [inputs[i] for i in self._copied])

    def replay(self) -> Any:
        """The results belong to the graph: the next replay overwrites them."""
        self._connection.replay_graph(self._number)
        return self.results

    def write_back(self, inputs: Sequence[Any]) -> None:
        """What the model has done to its copies of the inputs is done to them, too."""
        with torch.no_grad():
            for i in self.written:
                inputs[i].copy_(self._inputs[i])

    def report(self) -> GraphReport:
        how, replays, why = self._connection.graph_report(self._number)
        return GraphReport(inputs=self._described, how=how, why=why, replays=replays)

    def __del__(self) -> None:
        if getattr(self, "_number", None) is not None:
            self._connection.free_graph(self._number)


_FORGET, _KEEP, _COMPILE = range(3)  # wire.h: GraphEnd
_alive: weakref.WeakSet[Graph] = weakref.WeakSet()


def look(leaf: Any) -> Hashable:
    """What two inputs must have in common to share a graph."""
    if isinstance(leaf, torch.Tensor):
        return leaf.shape, leaf.dtype, leaf.stride() if leaf.device.type == roster.DEVICE_TYPE else None
    try:
        hash(leaf)
    except TypeError:
        raise UsageError(
            f"an argument of type {type(leaf).__name__} cannot be captured; pass tensors and plain values"
        ) from None
    return type(leaf), leaf


def _described(leaf: Any) -> str:
    if isinstance(leaf, torch.Tensor):
        return f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}"
    return repr(leaf)[:_DESCRIBED_CHARACTERS_MAX]


def _own_copy(tensor: torch.Tensor, index: int) -> torch.Tensor:
    device = torch.device(roster.DEVICE_TYPE, index)
    if tensor.device.type == roster.DEVICE_TYPE:
        return tensor.detach().clone(memory_format=torch.preserve_format).to(device)
    return tensor.detach().to(device)


def _weights(model: object) -> list[torch.Tensor]:
    if not isinstance(model, torch.nn.Module):
        return []
    return [
        tensor
        for module in model.modules()
        for owner in (module._parameters, module._buffers)
        for tensor in owner.values()
        if tensor is not None
    ]


def _parts(model: object) -> list[dict[Any, Any]]:
    """What a model is made of: no other weights, modules and hooks than these, and in these places."""
    if not isinstance(model, torch.nn.Module):
        return []
    return [
        part
        for module in model.modules()
        for part in (
            module._parameters,
            module._buffers,
            module._modules,
            module._forward_hooks,
            module._forward_pre_hooks,
        )
    ]


def _version(tensor: torch.Tensor) -> int:
    """Grows when it is written to; not under torch.inference_mode."""
    return 0 if tensor.is_inference() else tensor._version


def _index_of(leaves: Sequence[Any]) -> int:
    """Of the one device that all of them are on."""
    devices = {leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim() > 0}
    remote = [device for device in devices if device.type == roster.DEVICE_TYPE]
    if len(remote) != 1 or len(devices) > 1:
        found = ", ".join(sorted(map(str, devices))) or "none"
        raise OpRefusedError(
            f"a captured model is on one remote accelerator; its tensors are on: {found}",
            hint='move it there first: model.to("remote_accelerator:0")',
        )
    return int(remote[0].index)


def _check_results(results: Any, index: int) -> None:
    for leaf in pytree.tree_leaves(results):
        if not isinstance(leaf, (torch.Tensor, *_PLAIN)):
            raise OpRefusedError(
                f"a captured model gives tensors in tuples, lists and dicts, not a {_name(leaf)}",
                hint="return its parts as a tuple or a dict, or register the class with torch's pytree",
            )
        if isinstance(leaf, torch.Tensor) and leaf.device != torch.device(roster.DEVICE_TYPE, index):
            raise OpRefusedError(f"a captured model gives tensors on its own device, not on {leaf.device}")


def _name(value: object) -> str:
    return type(value).__qualname__
