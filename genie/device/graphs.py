"""Graphs: what a model does is written down once by its executor, and carried out again at a word.

`capture(model)` is for inference; torch.compile(model, backend="genie") is built on the same
(compiler.py). Weights stay where they are, and a change of them in place is seen by the next replay.
Not for: how a graph is kept and replayed (native/torch).
"""

from __future__ import annotations

import collections
import contextlib
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.nn.modules import module as every_module
from torch.utils import _pytree as pytree

from genie.device import backend, roster
from genie.errors import OpRefusedError, UsageError

GRAPHS_KEPT_MAX = 32
"""For each captured model: one for each combination of shapes. The one unused for longest goes."""
RECORDER_IDLE_S_MAX = 10.0
"""Other threads wait for a recording's end, and raise when its thread has not used the device for so long."""
_DESCRIBED_CHARACTERS_MAX = 100
_NAMED_MAX = 8
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.layout)
_SAME_IF_EQUAL = frozenset(_PLAIN) - {float, complex}


def capture(
    model: Callable[..., Any], *, inductor: bool = False, batch_sizes: Sequence[int] | None = None
) -> Captured:
    """The same model, replayed as a graph on the executor where its weights are.

    The first call with inputs of given shapes runs the model and writes it down; calls after that send
    the inputs and one word. Gradients are not recorded. What a call gives is the caller's to keep, each
    result with memory of its own. The model must do the same work for every input of one shape, and may
    change its own buffers (a KV cache) and the tensors that it is given, which may share memory with each
    other. Results are tensors and plain values, in tuples, lists and dicts.
    OpRefusedError names what cannot be written down: values that are needed here, copies to and fro; and, as
    the model has run up to there, which of its tensors it has changed.

    `inductor`: the executor compiles each graph at its first replay, which may take minutes; where it
    cannot, the graph is replayed as it is, and `report()` says why.

    `batch_sizes`: recordings are made for these sizes of the first dimension only, each for every combination
    of the other sizes and arguments. A batch between them is
    filled up to the next one by repeating its last row, in every tensor whose first size is that of the
    first tensor, and results whose first size is the larger one are cut back. Rows must not depend on each
    other. UsageError for a batch that is empty or larger than the last size.
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
        self._watch: Any = None  # Any: a class of the library
        self._modules: list[torch.nn.Module] = []
        self._graphs: collections.OrderedDict[Hashable, Graph] = collections.OrderedDict()
        """Made with the model as `_watch` has seen it."""
        self._last: tuple[Hashable, Graph] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        spec: pytree.TreeSpec | None = None
        keys: tuple[Hashable, ...] = ()
        leaves: Sequence[Any] = args
        if kwargs or not all(type(each) is torch.Tensor for each in args):
            leaves, spec = pytree.tree_flatten((args, kwargs))
            keys = tuple(_keys((args, kwargs)))
        looks = (spec, keys, torch.is_inference_mode_enabled(), *map(look, leaves))
        guessed = self._guess(looks)
        if guessed is not None:
            guessed.send(leaves)  # under way while the rest is looked at, which takes as long
        sharing = backend.library().sharing(leaves) if len(leaves) > 1 else None
        key = (looks, self._mode(), sharing)
        graph = self._graphs.get(key)
        if graph is None or graph.lost:
            self._last = None
            graph = self._graphs[key] = self._record(leaves, spec, [Sharing(*each) for each in sharing or ()])
            while len(self._graphs) > GRAPHS_KEPT_MAX:
                self._graphs.popitem(last=False)
            results = graph.results
            if self._watch.holds():
                self._last = looks, graph
        else:
            graph.check_apart(leaves)
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
        """Most calls are like the last one. Inputs sent to a graph that is then not replayed do no harm.

        They would if the model itself kept the graph's copy of an argument, as a buffer: but after a run that
        has left it with other weights and buffers than the watch has seen, nothing is guessed.
        """
        if self._last is None or self._last[0] != looks or self._last[1].lost:
            return None
        return self._last[1]

    def report(self) -> list[GraphReport]:
        """One for each recording, the one unused for longest first. Asks the executor."""
        if self._watch is None or not self._watch.holds():
            return []
        return [graph.report() for graph in self._graphs.values() if not graph.lost]

    def _mode(self) -> Hashable:
        """What else decides about the work: train or eval of every part, autocast, settings of torch.

        The model is looked over first. When it is not made of what it was, its recordings are let go.
        """
        if self._watch is None or not self._watch.holds():
            self._graphs.clear()
            self._last = None
            owner = _owner(self._model)
            self._modules = [] if owner is None else list(owner.modules())  # once: walking them takes long
            self._watch = backend.library().Watch(
                _weights(self._modules),
                _parts(self._modules),
                [(module.__dict__, "forward") for module in self._modules],
            )
        return (
            tuple([module.training for module in self._modules]),
            backend.library().settings(),
            torch.get_default_device() if torch._C._len_torch_function_stack() else None,
        )

    def _record(
        self, leaves: Sequence[Any], spec: pytree.TreeSpec | None, sharing: Sequence[Sharing]
    ) -> Graph:
        """Without a `spec` the leaves are the arguments."""
        index = self._index(leaves)

        def run(inputs: Sequence[Any]) -> Any:
            if spec is None:
                return self._model(*inputs)
            args, kwargs = pytree.tree_unflatten(list(inputs), spec)
            return self._model(*args, **kwargs)

        held = _named(self._model)
        with torch.no_grad():
            return Graph(run, leaves, index=index, sharing=sharing, held=held, inductor=self._inductor)

    def _index(self, leaves: Sequence[Any]) -> int:
        """Of the device that is worked on: a module's own, else that of the arguments, else the current."""
        weights = _devices(_weights(self._modules))
        if weights and isinstance(self._model, torch.nn.Module):
            return _only(weights, "weights", hint='move it there first: model.to("remote_accelerator:0")')
        arguments = {device for device in _devices(leaves) if device.type == roster.DEVICE_TYPE}
        if arguments:
            return _only(arguments, "arguments", hint="pass arguments that are on one, or on this machine")
        if weights:  # of the module that a method belongs to; it may have parts elsewhere
            hint = 'move the module there first, module.to("remote_accelerator:0"), or an argument'
            return _only(weights, "weights", hint=hint)
        return int(backend.library().current_device())


class Sharing(NamedTuple):
    """One of several inputs on the same memory."""

    position: int
    first: int
    """Position of the first of them."""
    same: int
    """Of the first that is the same object."""
    start_bytes: int
    """Where it begins in the memory that they take up together."""
    strides: tuple[int, ...]
    is_conj: bool
    is_neg: bool


class Graph:
    """One recording: its own copies of the inputs, and what the model gave. Made by running it once."""

    def __init__(
        self,
        run: Callable[[Sequence[Any]], Any],
        inputs: Sequence[Any],
        *,
        index: int,
        sharing: Sequence[Sharing] = (),
        baked: Sequence[int] = (),
        held: Sequence[tuple[str, torch.Tensor]] = (),
        inductor: bool = False,
    ) -> None:
        """`baked`: positions of inputs that are used where they are, not copied. `sharing`: of the others.

        `held`: tensors of the model, with names for messages.
        """
        self.index = index
        self._described = tuple(map(_described, inputs))
        self._inputs = list(inputs)
        self._copied = [
            i for i, each in enumerate(inputs) if isinstance(each, torch.Tensor) and i not in baked
        ]
        self._parts: dict[int, tuple[slice, ...]] = {}
        """Of copied inputs that repeat themselves in memory, what is in it once."""
        self._copy(inputs, sharing)
        self._places = [self._part(self._inputs, i) for i in self._copied]
        self._watch = backend.library().Watch([self._inputs[i] for i in baked], [], [])
        self._connection = roster.slot(index).connection(first_seed=torch.initial_seed())
        if sharing:
            self.send(inputs)
        self._number = self._connection.begin_graph(
            thread=threading.current_thread().name, idle_s_max=RECORDER_IDLE_S_MAX
        )
        whole = False
        try:
            copies = [self._inputs[i] for i in self._copied]
            stood = [(copy.untyped_storage(), _stand(copy)) for copy in copies]  # kept: addresses come again
            with _nothing_cast_before():
                self.results = run(self._inputs)
            if [_stand(copy) for copy in copies] != [how for _, how in stood]:
                raise OpRefusedError(
                    "a captured model may write to its arguments, but not give them other shapes or memory"
                )
            _check_results(self.results, index)
            uses = self._connection.graph_uses(self._number, self._places)
            self.written = [i for i, use in zip(self._copied, uses, strict=True) if use == _WRITTEN]
            """Positions of inputs that the model has changed."""
            self._writes = self._connection.graph_writes(self._number)
            self.check_apart(inputs)
            whole = True
        except OpRefusedError as refused:
            refused.message += self._left_behind(held)
            raise
        finally:
            self._connection.end_graph((_COMPILE if inductor else _KEEP) if whole else _FORGET)
            if not whole:
                self._number = None
        _alive.add(self)

    def _left_behind(self, held: Sequence[tuple[str, torch.Tensor]]) -> str:
        """What a model whose recording is refused has done all the same; for the message."""
        tensors = [*(tensor for _, tensor in held), *self._places]
        uses = self._connection.graph_uses(self._number, tensors)
        written = [i for i, use in enumerate(uses) if use == _WRITTEN]
        names = [held[i][0] for i in written if i < len(held)]
        known = {tensors[i].untyped_storage()._cdata for i in written}
        more = self._connection.graph_writes(self._number) - len(known) + len(names[_NAMED_MAX:])
        shown = [*names[:_NAMED_MAX], *([f"{more} other tensor{'s' * (more > 1)}"] if more else [])]
        kept = f"what it wrote to {', '.join(shown)} stays" if shown else "no tensor of before has changed"
        return f"; the model has run up to there: {kept}, and what its Python code did stays done"

    def _copy(self, inputs: Sequence[Any], sharing: Sequence[Sharing]) -> None:
        """Inputs that share memory have copies that do, and what is given twice is copied once."""
        shared = _shared_copies(inputs, sharing, self.index)
        for i in self._copied:
            self._inputs[i] = shared[i] if i in shared else _own_copy(inputs[i], self.index)
        again = {shown.position for shown in sharing if shown.same != shown.position}
        self._copied = [i for i in self._copied if i not in again]
        for i in shared.keys() - again:
            if 0 in shared[i].stride():
                once = zip(shared[i].shape, shared[i].stride(), strict=True)
                self._parts[i] = tuple(slice(0, size if stride else 1) for size, stride in once)

    def _part(self, inputs: Sequence[Any], i: int) -> torch.Tensor:
        part: torch.Tensor = inputs[i][self._parts[i]] if i in self._parts else inputs[i]
        return part

    def check_apart(self, inputs: Sequence[Any]) -> None:
        """OpRefusedError where the model would change an input, or what it holds itself, and not its copy."""
        if not self._writes:
            return
        uses = self._connection.graph_uses(self._number, [inputs[i] for i in self._copied])
        for i, use in zip(self._copied, uses, strict=True):
            if use == _WRITTEN or (use == _READ and i in self.written):
                raise OpRefusedError(
                    f"the argument {self._described[i]} shares memory with a tensor that the captured model "
                    "holds itself, and the model writes to it",
                    hint="pass a copy, or let the model take all of that memory as an argument",
                )

    def holds(self) -> bool:
        """Whether the executor is there and inputs that are not copied stand where they stood."""
        return not self.lost and bool(self._watch.holds())

    @property
    def lost(self) -> bool:
        """Whether the executor is gone, and the graph with it."""
        return bool(self._connection.lost)

    def send(self, inputs: Sequence[Any]) -> None:
        """What the next replay works on."""
        self._connection.send(self._places, [self._part(inputs, i) for i in self._copied])

    def replay(self) -> Any:
        """The results belong to the graph: the next replay overwrites them."""
        self._connection.replay_graph(self._number)
        return self.results

    def write_back(self, inputs: Sequence[Any]) -> None:
        """What the model has done to its copies of the inputs is done to them, too."""
        with torch.no_grad():
            for i in self.written:
                self._part(inputs, i).copy_(self._part(self._inputs, i))

    def report(self) -> GraphReport:
        how, replays, why = self._connection.graph_report(self._number)
        return GraphReport(inputs=self._described, how=how, why=why, replays=replays)

    def __del__(self) -> None:
        if getattr(self, "_number", None) is not None:
            self._connection.free_graph(self._number)


_FORGET, _KEEP, _COMPILE = range(3)  # wire.h: GraphEnd
_UNUSED, _READ, _WRITTEN = range(3)  # connection.h: Use
_alive: weakref.WeakSet[Graph] = weakref.WeakSet()


def look(leaf: Any) -> Hashable:
    """What two inputs must have in common to share a graph."""
    if isinstance(leaf, torch.Tensor):
        device = leaf.device
        if device.type == roster.DEVICE_TYPE:
            return leaf.shape, leaf.dtype, leaf.stride(), device.index
        return leaf.shape, leaf.dtype
    if type(leaf) in _SAME_IF_EQUAL:
        return type(leaf), leaf
    try:
        exact = _exact(leaf)
        hash(exact)
    except TypeError:
        raise UsageError(
            f"an argument of type {type(leaf).__name__} cannot be captured; pass tensors and plain values"
        ) from None
    return exact


def _exact(value: Any) -> Hashable:
    """Equal where plain values are the same: 0.0 is not -0.0, 1 is not 1.0, and nan is nan."""
    kind = type(value)
    if isinstance(value, float):
        return kind, value.hex()
    if isinstance(value, complex):
        return kind, value.real.hex(), value.imag.hex()
    if isinstance(value, (tuple, frozenset)):
        items = map(_exact, value)
        return kind, tuple(items) if isinstance(value, tuple) else frozenset(items)
    if isinstance(value, (slice, range)):
        return kind, _exact(value.start), _exact(value.stop), _exact(value.step)
    return kind, value


def _keys(tree: Any) -> list[Hashable]:
    """Of the dicts among arguments, those that are no texts. torch compares them as dicts do."""
    if isinstance(tree, dict):
        odd = [_exact(key) for key in tree if type(key) is not str]
        return odd + [key for each in tree.values() for key in _keys(each)]
    return [key for each in tree for key in _keys(each)] if isinstance(tree, (tuple, list)) else []


@contextlib.contextmanager
def _nothing_cast_before() -> Iterator[None]:
    """Autocast keeps the weights that it has cast. A recording must cast them itself, to see their changes.

    A model may turn that on again for a part of itself; then the casts of the recording are used there, and
    not left to anybody else.
    """
    kept = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        torch.clear_autocast_cache()
        torch.set_autocast_cache_enabled(kept)


def _described(leaf: Any) -> str:
    if isinstance(leaf, torch.Tensor):
        return f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}"
    return repr(leaf)[:_DESCRIBED_CHARACTERS_MAX]


def _own_copy(tensor: torch.Tensor, index: int) -> torch.Tensor:
    device = torch.device(roster.DEVICE_TYPE, index)
    if tensor.device.type == roster.DEVICE_TYPE:
        return tensor.detach().clone(memory_format=torch.preserve_format).to(device)
    return tensor.detach().to(device)


def _shared_copies(inputs: Sequence[Any], sharing: Sequence[Sharing], index: int) -> dict[int, torch.Tensor]:
    """By position; what they hold is not copied yet."""
    device = torch.device(roster.DEVICE_TYPE, index)
    sizes: collections.Counter[int] = collections.Counter()
    for shown in sharing:
        given = inputs[shown.position]
        spans = ((size - 1) * stride for size, stride in zip(given.shape, shown.strides, strict=True))
        end = shown.start_bytes + (1 + sum(spans)) * given.itemsize
        sizes[shown.first] = max(sizes[shown.first], end)
    memory = {
        first: torch.zeros(size, dtype=torch.uint8, device=device).untyped_storage()
        for first, size in sizes.items()
    }
    made: dict[int, torch.Tensor] = {}
    for shown in sharing:
        if shown.same in made:
            made[shown.position] = made[shown.same]
            continue
        given = inputs[shown.position]
        copy = torch.empty(0, dtype=given.dtype, device=device)
        copy.set_(memory[shown.first], shown.start_bytes // given.itemsize, given.shape, shown.strides)
        copy = copy.conj() if shown.is_conj else copy
        made[shown.position] = torch._neg_view(copy) if shown.is_neg else copy
    return made


def _stand(tensor: torch.Tensor) -> tuple[int, ...]:
    """On which memory a tensor is, and how."""
    memory = tensor.untyped_storage()._cdata
    return memory, tensor.storage_offset(), *tensor.shape, *tensor.stride()


def _owner(model: object) -> torch.nn.Module | None:
    """The module that is captured, itself or by one of its methods."""
    owner = model if isinstance(model, torch.nn.Module) else getattr(model, "__self__", None)
    return owner if isinstance(owner, torch.nn.Module) else None


def _weights(modules: Sequence[torch.nn.Module]) -> list[torch.Tensor]:
    return [
        tensor
        for module in modules
        for owner in (module._parameters, module._buffers)
        for tensor in owner.values()
        if tensor is not None
    ]


def _named(model: object) -> list[tuple[str, torch.Tensor]]:
    """The weights and buffers of a model, by their names in it."""
    owner = _owner(model)
    if owner is None:
        return []
    parameters = owner.named_parameters(remove_duplicate=False)
    return [*parameters, *owner.named_buffers(remove_duplicate=False)]


def _parts(modules: Sequence[torch.nn.Module]) -> list[dict[Any, Any]]:
    """What a model is made of: no other weights, modules and hooks than these, and in these places."""
    of_all = [every_module._global_forward_hooks, every_module._global_forward_pre_hooks]
    return of_all + [
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


def _devices(leaves: Sequence[Any]) -> set[torch.device]:
    """Without those of numbers on this machine, which every device takes."""
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    return {each.device for each in tensors if each.dim() > 0 or each.device.type == roster.DEVICE_TYPE}


def _only(devices: set[torch.device], what: str, *, hint: str) -> int:
    device = min(devices, key=str)
    if len(devices) > 1 or device.type != roster.DEVICE_TYPE:
        found = ", ".join(sorted(map(str, devices)))
        message = f"a captured model is on one remote accelerator; its {what} are on: {found}"
        raise OpRefusedError(message, hint=hint)
    return int(device.index)


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
