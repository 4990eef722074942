"""A recorded graph as a graph of torch.fx: the same ops on the same memory, in one function.

The steps come from native/torch/executor/python_compiler.cpp as plain values:
  ("op", name, overload, arguments, outputs), ("allocate", storage, bytes), ("free", storage)
  an argument: ("tensor", storage, dtype, sizes, strides, offset, written), ("scalar", value, dtype,
  wrapped), ("value", value), ("list", arguments), ("generator",)
  an output: ("new", storage, dtype, sizes, strides), ("list", outputs), ("nothing",)
Every op has been checked against the executor's list and its own declaration before; nothing is looked up
here but its name. Each op is also run without data, so that what it gives is known to be what the client
takes it for. Not for: compiling (inductor.py).
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.node import map_arg

from genie.errors import OpRefusedError

aten = torch.ops.aten
_WORD = re.compile(r"[A-Za-z0-9_]{0,32}")
_DIVISIONS = frozenset(("div", "divide", "floor_divide", "fmod", "remainder"))
# Any: a step is a tuple of the forms above.
Step: TypeAlias = tuple[Any, ...]


@dataclass(frozen=True)
class Look:
    """A tensor on a storage; counted in elements."""

    dtype: torch.dtype
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    @property
    def end(self) -> int:
        """Past the last element."""
        if self.numel == 0:
            return self.offset
        return self.offset + 1 + sum((n - 1) * step for n, step in zip(self.sizes, self.strides, strict=True))

    @property
    def span_bytes(self) -> tuple[int, int]:
        return self.offset * self.dtype.itemsize, self.end * self.dtype.itemsize

    def steps(self) -> list[tuple[int, int, int]]:
        """Stride, size and position of the dimensions that lead anywhere, outermost first."""
        real = [
            (step, n, i)
            for i, (n, step) in enumerate(zip(self.sizes, self.strides, strict=True))
            if n > 1 and step > 0
        ]
        return sorted(real, key=lambda each: (-each[0], each[2]))

    def is_dense(self) -> bool:
        """Every element of its span once."""
        due = 1
        for step, n, _ in reversed(self.steps()):
            if step != due:
                return False
            due *= n
        return self.numel == due > 0

    def same_as(self, other: Look) -> bool:
        """But for strides that lead nowhere."""
        return (self.dtype, self.sizes, self.offset, self.steps()) == (
            other.dtype, other.sizes, other.offset, other.steps()
        )  # fmt: skip


@dataclass(frozen=True)
class Place:
    storage: int
    look: Look

    def told(self) -> tuple[int, torch.dtype, tuple[int, ...], tuple[int, ...], int]:
        return self.storage, self.look.dtype, self.look.sizes, self.look.strides, self.look.offset


@dataclass(frozen=True)
class Traced:
    """`module` takes tensors like `examples`, which are without data, and gives the results in order."""

    module: GraphModule
    examples: list[torch.Tensor]
    inputs: list[Place]
    results: list[Place]


def trace(
    steps: Sequence[Step], wanted: Sequence[int], sizes: Mapping[int, int], device: torch.device
) -> Traced:
    """`wanted`: storages that must be results. OpRefusedError says what cannot be in such a graph."""
    written = {each[1] for step in steps if step[0] == "op" for each in _tensors(step[3]) if each[6]}
    builder = _Builder(device, written)
    for group in _input_groups(steps, sizes):
        builder.add_input_group(group)
    for step in steps:
        builder.add(step)
    return builder.finish(wanted)


# --- what is there before -----------------------------------------------------------------------


@dataclass
class _Group:
    """Looks on one storage whose stretches of memory touch."""

    storage: int
    looks: dict[Look, bool] = field(default_factory=dict)
    """Whether it is written."""
    end_bytes: int = 0

    @property
    def written(self) -> bool:
        return any(self.looks.values())


def _input_groups(steps: Sequence[Step], sizes: Mapping[int, int]) -> list[_Group]:
    """Groups that do not touch are as good as different storages: a write to one leaves the others alone."""
    used: dict[int, dict[Look, bool]] = {number: {} for number in sizes}
    for step in steps:
        if step[0] != "op":
            continue
        for _, storage, dtype, size, stride, offset, written in _tensors(step[3]):
            look = Look(dtype, size, stride, offset)
            if storage in used and look.numel > 0:  # nothing is read or written where nothing is
                used[storage][look] = used[storage].get(look, False) or written
    groups: list[_Group] = []
    for storage, looks in used.items():
        last: _Group | None = None
        for look in sorted(looks, key=lambda each: each.span_bytes):
            start, end = look.span_bytes
            if last is None or start >= last.end_bytes:
                last = _Group(storage)
                groups.append(last)
            last.looks[look] = looks[look]
            last.end_bytes = max(last.end_bytes, end)
    return groups


def _tensors(arguments: Iterable[Step]) -> Iterator[Step]:
    for argument in arguments:
        if argument[0] == "tensor":
            yield argument
        elif argument[0] == "list":
            yield from _tensors(argument[1])


# --- building -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Base:
    """All of a storage, or of one group of it, as one value of the graph."""

    storage: int
    node: Node
    look: Look
    start_bytes: int = 0
    end_bytes: int = 2**63


class _Builder:
    def __init__(self, device: torch.device, written: set[int]) -> None:
        self._device = device
        self._written = written
        """Storages that some step writes to."""
        self._graph = Graph()
        self._mode = FakeTensorMode(shape_env=ShapeEnv())
        self._inputs: list[Place] = []
        self._examples: list[torch.Tensor] = []
        self._bases: dict[int, list[_Base]] = {}
        self._views: dict[Place, Node] = {}
        self._unfit: dict[int, str] = {}
        """Storages whose contents are not what the client takes them for; nobody may look at them."""
        self._allocated: dict[int, int] = {}
        """Bytes; what they hold is not known yet."""

    # --- inputs

    def add_input_group(self, group: _Group) -> None:
        if not group.written:
            for look in group.looks:
                self._views[Place(group.storage, look)] = self._placeholder(group.storage, look)
            return
        if len({look.dtype for look in group.looks}) > 1:
            raise OpRefusedError("memory that it writes to is read as another dtype")
        base = self._base_look(group)
        node = self._placeholder(group.storage, base)
        start, end = base.span_bytes
        self._bases.setdefault(group.storage, []).append(_Base(group.storage, node, base, start, end))

    def _base_look(self, group: _Group) -> Look:
        """One that has all of the others in it, and best the one that is written."""
        first = min(look.offset for look in group.looks)
        end = max(look.end for look in group.looks)
        for look in sorted(group.looks, key=lambda each: not group.looks[each]):
            if look.is_dense() and (look.offset, look.end) == (first, end):
                return look
        (dtype,) = {look.dtype for look in group.looks}
        return Look(dtype, (end - first,), (1,), first)

    def _placeholder(self, storage: int, look: Look) -> Node:
        node = self._graph.placeholder(f"input_{len(self._inputs)}")
        with self._mode:
            # At the start of its own memory: the function is given the tensor, and never sees its offset.
            example = torch.empty_strided(look.sizes, look.strides, dtype=look.dtype, device=self._device)
        node.meta["val"] = example
        self._examples.append(example)
        self._inputs.append(Place(storage, look))
        return node

    # --- steps

    def add(self, step: Step) -> None:
        if step[0] == "allocate":
            self._allocated[step[1]] = step[2]
        elif step[0] == "free":
            self._forget(step[1])
            self._views = {place: node for place, node in self._views.items() if place.storage != step[1]}
        else:
            self._add_op(*step[1:])

    def _forget(self, storage: int) -> None:
        """Its number may stand for something else from here on."""
        for known in (self._bases, self._allocated, self._unfit):
            known.pop(storage, None)

    def _add_op(self, name: str, overload: str, arguments: list[Step], outputs: list[Step]) -> None:
        namespace, _, short = name.partition("::")
        op = getattr(getattr(getattr(torch.ops, namespace), short), overload or "default")
        self._check_random(op, name, arguments)
        values = [self._value(argument) for argument in arguments]
        node = self._call_declared(op, values)
        self._check_division(short, node)
        given = {_memory(each.meta["val"]) for each in node.all_input_nodes}
        results = [node] if len(outputs) == 1 else [self._item(node, i) for i in range(len(outputs))]
        for result, output in zip(results, outputs, strict=True):
            self._take(name, result, output, given)

    def _check_division(self, name: str, node: Node) -> None:
        """Eagerly a division of whole numbers by zero raises; what is compiled for a CPU would die of it."""
        found = node.meta["val"]
        if self._device.type != "cpu" or name.rstrip("_") not in _DIVISIONS:
            return
        if isinstance(found, torch.Tensor) and not (found.is_floating_point() or found.is_complex()):
            raise OpRefusedError(f"{name} of whole numbers is not compiled for a CPU")

    def _take(self, name: str, node: Node, output: Step, given: set[int]) -> None:
        if output[0] == "list":
            for i, each in enumerate(output[1]):
                self._take(name, self._item(node, i), each, given)
        elif output[0] == "new":
            _, storage, dtype, sizes, strides = output
            self._make(name, storage, node, Look(dtype, sizes, strides), given)

    def _item(self, node: Node, index: int) -> Node:
        found = node.meta["val"][index]
        item = self._graph.call_function(operator.getitem, (node, index))
        item.meta["val"] = found
        return item

    def _make(self, name: str, storage: int, node: Node, look: Look, given: set[int]) -> None:
        """The executor copies what is not as predicted or not the op's own (ops.cpp); so does the graph."""
        self._forget(storage)
        found = node.meta["val"]
        if not isinstance(found, torch.Tensor) or (found.dtype, tuple(found.shape)) != (
            look.dtype, look.sizes
        ):  # fmt: skip
            self._unfit[storage] = f"{name} gives something else without data than with it"
            return
        own = found.device == self._device and _memory(found) not in given
        if not own or not look.same_as(_look_of(found)):
            node = self._copied(node, look)
        given.add(_memory(node.meta["val"]))  # what another output has is not its own
        self._bases[storage] = [_Base(storage, node, look)]

    def _copied(self, node: Node, look: Look) -> Node:
        new = self._empty(look)
        self._call(aten.copy_.default, new, node)
        return new

    def _empty(self, look: Look) -> Node:
        return self._call(
            aten.empty_strided.default, list(look.sizes), list(look.strides),
            dtype=look.dtype, device=self._device,
        )  # fmt: skip

    def _check_random(self, op: Any, name: str, arguments: list[Step]) -> None:
        if torch.Tag.nondeterministic_seeded not in op.tags:
            return
        declared = [argument.name for argument in op._schema.arguments]
        # Attention says that it may draw numbers, and does not when nothing is dropped.
        if "dropout_p" in declared and arguments[declared.index("dropout_p")] in (
            ("value", 0.0), ("value", 0)
        ):  # fmt: skip
            return
        raise OpRefusedError(f"{name} draws random numbers, which compiled code would draw otherwise")

    # --- values

    def _value(self, argument: Step) -> Any:
        match argument:
            case ("tensor", storage, dtype, sizes, strides, offset, _):
                return self._tensor(Place(storage, Look(dtype, sizes, strides, offset)))
            case ("scalar", value, dtype, wrapped):
                return _Number(value, dtype, wrapped)
            case ("list", items):
                return [self._value(item) for item in items]
            case ("value", value):
                _check_texts(value)
                return value
        raise OpRefusedError("an op in it has a generator of its own")

    def _tensor(self, place: Place) -> Node:
        if place in self._views:
            return self._views[place]
        if place.storage in self._unfit:
            raise OpRefusedError(self._unfit[place.storage])
        if place.look.numel == 0:
            node = self._empty(place.look)
        else:
            node = self._view(self._base(place), place.look)
        self._views[place] = node
        return node

    def _base(self, place: Place) -> _Base:
        if place.storage in self._allocated:
            self._bases[place.storage] = [self._first_use(place)]
        start, end = place.look.span_bytes
        for base in self._bases.get(place.storage, ()):
            if base.start_bytes <= start and end <= base.end_bytes:
                return base
        raise OpRefusedError("it uses memory that is not there")

    def _first_use(self, place: Place) -> _Base:
        size = self._allocated.pop(place.storage)
        look = place.look
        if not look.is_dense() or look.span_bytes != (0, size):
            look = Look(look.dtype, (size // look.dtype.itemsize,), (1,))
        return _Base(place.storage, self._empty(look), look)

    def _view(self, base: _Base, look: Look) -> Node:
        if look.same_as(base.look):
            return base.node
        node, found = base.node, base.look
        if look.dtype != found.dtype:
            if look.dtype.itemsize != found.dtype.itemsize:
                raise OpRefusedError("memory in it is seen as dtypes of different sizes")
            node = self._call(aten.view.dtype, node, look.dtype)
            found = Look(look.dtype, found.sizes, found.strides, found.offset)
        if not found.is_dense():
            raise OpRefusedError("memory in it has gaps, and is seen in another way")
        made = self._as_plain_views(node, found, look)
        moved = Look(look.dtype, look.sizes, look.strides, look.offset - base.look.offset)
        if base.storage in self._written:
            # A view of the very memory, or a write through it would be lost.
            if made is None or not moved.same_as(_look_of(made.meta["val"])):
                raise OpRefusedError("memory that it writes to is seen in a way that cannot be compiled")
        elif made is None:
            # The strides of a value may change on the way through a compiler; one of one dimension has none.
            flat = self._call(aten.clone.default, self._seen_as(node, found, (found.numel,)))
            made = self._call(
                aten.as_strided.default, flat, list(look.sizes), list(look.strides), moved.offset
            )
        return made

    def _seen_as(self, node: Node, found: Look, shape: tuple[int, ...]) -> Node:
        """The elements in the order of memory."""
        order = [i for _, _, i in found.steps()]
        rest = [i for i in range(len(found.sizes)) if i not in order]
        if (order + rest) != list(range(len(found.sizes))):
            node = self._call(aten.permute.default, node, order + rest)
        if shape == tuple(node.meta["val"].shape):
            return node
        return self._call(aten.view.default, node, list(shape))

    def _as_plain_views(self, node: Node, found: Look, look: Look) -> Node | None:
        """view, slice, select, permute and expand, which can be fused; None where only strides will do."""
        cut = _cut(found, look)
        if cut is None:
            return None
        shape, slices, inner = cut
        node = self._seen_as(node, found, shape)
        if inner is not None:
            node = self._call(aten.select.int, node, len(shape) - 1, inner)
        for i, (start, end) in enumerate(slices):
            if end - start < shape[i]:
                node = self._call(aten.slice.Tensor, node, i, start, end)
        return self._arranged(node, look)

    def _arranged(self, node: Node, look: Look) -> Node:
        """The dimensions in their order, and those that lead nowhere in between."""
        placed = [i for _, _, i in look.steps()]
        order = sorted(range(len(placed)), key=lambda each: placed[each])
        if order != list(range(len(placed))):
            node = self._call(aten.permute.default, node, order)
        for i in range(len(look.sizes)):
            if i not in placed:
                node = self._call(aten.unsqueeze.default, node, i)
        if tuple(node.meta["val"].shape) != look.sizes:
            node = self._call(aten.expand.default, node, list(look.sizes))
        return node

    # --- nodes

    def _call_declared(self, op: Any, values: list[Any]) -> Node:
        """A number that stands for a tensor stays one where the op takes it, else it becomes a tensor."""
        declared = op._schema.arguments
        for as_number in (True, False):
            made = [self._numbers(value, as_number) for value in values]
            pairs = list(zip(declared, made, strict=True))
            args = [value for argument, value in pairs if not argument.kwarg_only]
            kwargs = {argument.name: value for argument, value in pairs if argument.kwarg_only}
            try:
                return self._call(op, *args, **kwargs)
            except (TypeError, RuntimeError):
                if not as_number or not any(isinstance(value, _Number) for value in values):
                    raise
        raise AssertionError("one of the two has returned or raised")

    def _numbers(self, value: Any, as_number: bool) -> Any:
        if isinstance(value, list):
            return [self._numbers(each, as_number) for each in value]
        if not isinstance(value, _Number):
            return value
        if as_number and value.wrapped:
            return value.value
        return self._call(aten.full.default, [], value.value, dtype=value.dtype, device=self._device)

    def _call(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        fakes = map_arg((args, kwargs), lambda node: node.meta["val"])
        with self._mode:
            value = target(*fakes[0], **fakes[1])
        node = self._graph.call_function(target, args, kwargs)
        node.meta["val"] = value
        return node

    def finish(self, wanted: Sequence[int]) -> Traced:
        results, nodes = [], []
        for storage in wanted:
            bases = self._bases.get(storage)
            if storage in self._unfit or not bases:
                raise OpRefusedError(self._unfit.get(storage, "a result of it is never made"))
            results.append(Place(storage, bases[0].look))
            nodes.append(bases[0].node)
        self._graph.output(nodes)
        module = GraphModule(torch.nn.Module(), self._graph)
        return Traced(module, self._examples, self._inputs, results)


@dataclass(frozen=True)
class _Number:
    """A CPU tensor without dimensions, whose value is part of the graph."""

    value: Any
    dtype: torch.dtype
    wrapped: bool


def _check_texts(value: Any) -> None:
    """Inductor writes arguments into sources, and into comments there as they are: no line may end in one."""
    for each in value if isinstance(value, list) else [value]:
        if isinstance(each, str) and not _WORD.fullmatch(each):
            raise OpRefusedError("a text in it is not a plain word")


def _look_of(tensor: torch.Tensor) -> Look:
    return Look(tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset()))


def _memory(value: Any) -> int:
    """What two tensors of one storage have in common; 0 for what is no tensor."""
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else 0


def _cut(found: Look, look: Look) -> tuple[tuple[int, ...], list[tuple[int, int]], int | None] | None:
    """How to cut `look` out of dense memory: the shape to see it in, the part of each dimension, and the
    place in the last one where that is not wanted. None where it cannot be done.
    """
    around, left = found.numel, look.offset - found.offset
    shape: list[int] = []
    slices: list[tuple[int, int]] = []
    for step, n, _ in look.steps():
        if around % step:
            return None
        shape.append(around // step)
        start, left = divmod(left, step)
        if start + n > shape[-1]:
            return None
        slices.append((start, start + n))
        around = step
    if left >= around:
        return None
    if around == 1:
        return tuple(shape), slices, None
    return (*shape, around), slices, left
