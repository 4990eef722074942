"""Converts a recorded graph into a torch.fx graph: the same ops on the same memory, in one function.

The steps (native/graph_steps.py) come from native/torch/executor/python_compiler.cpp. Ops and arguments have
been checked against the allowed ops and the schemas. Each op also runs on fake tensors, to check that its
outputs are those that the client predicted. inductor.py compiles the result.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.node import map_arg

from genie.errors import OpRefusedError
from genie.native.graph_steps import Step, StepArgument, StepOutput, TensorArgument, ViewFields

aten = torch.ops.aten
_SIMPLE_STRING = re.compile(r"[A-Za-z0-9_]{0,32}")
_DIVISION_OPS = frozenset(("div", "divide", "floor_divide", "fmod", "remainder"))


@dataclass(frozen=True)
class TensorMeta:
    """Dtype, sizes, strides and offset of a tensor, in elements."""

    dtype: torch.dtype
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    @property
    def end(self) -> int:
        """Offset after the last element."""
        if self.numel == 0:
            return self.offset
        return self.offset + 1 + sum((n - 1) * step for n, step in zip(self.sizes, self.strides, strict=True))

    @property
    def span_bytes(self) -> tuple[int, int]:
        return self.offset * self.dtype.itemsize, self.end * self.dtype.itemsize

    def dimensions(self) -> list[tuple[int, int, int]]:
        """Stride, size and index of the dimensions that are not trivial, outermost first."""
        real = [
            (step, n, i)
            for i, (n, step) in enumerate(zip(self.sizes, self.strides, strict=True))
            if n > 1 and step > 0
        ]
        return sorted(real, key=lambda each: (-each[0], each[2]))

    def is_dense(self) -> bool:
        """Whether each element of the span occurs exactly once."""
        expected = 1
        for step, n, _ in reversed(self.dimensions()):
            if step != expected:
                return False
            expected *= n
        return self.numel == expected > 0

    def same_as(self, other: TensorMeta) -> bool:
        """Ignores the strides of trivial dimensions."""
        return (self.dtype, self.sizes, self.offset, self.dimensions()) == (
            other.dtype, other.sizes, other.offset, other.dimensions()
        )  # fmt: skip


@dataclass(frozen=True)
class StorageView:
    storage: int
    meta: TensorMeta

    def as_tuple(self) -> ViewFields:
        return self.storage, self.meta.dtype, self.meta.sizes, self.meta.strides, self.meta.offset


@dataclass(frozen=True)
class Traced:
    """`module` takes tensors like `examples`, which are fake tensors, and returns the results in order."""

    module: GraphModule
    examples: list[torch.Tensor]
    inputs: list[StorageView]
    results: list[StorageView]


def trace(
    steps: Sequence[Step], wanted: Sequence[int], sizes: Mapping[int, int], device: torch.device
) -> Traced:
    """`wanted`: storages that must be results. OpRefusedError if the steps cannot be converted."""
    written = {each[1] for step in steps if step[0] == "op" for each in _tensors(step[3]) if each[6]}
    builder = _Builder(device, written)
    for group in _input_groups(steps, sizes):
        builder.add_input_group(group)
    for step in steps:
        builder.add(step)
    return builder.finish(wanted)


# --- inputs -------------------------------------------------------------------------------------


@dataclass
class _Group:
    """Views of one storage whose byte ranges overlap."""

    storage: int
    metas: dict[TensorMeta, bool] = field(default_factory=dict)
    """Whether each is written."""
    end_bytes: int = 0

    @property
    def written(self) -> bool:
        return any(self.metas.values())


def _input_groups(steps: Sequence[Step], sizes: Mapping[int, int]) -> list[_Group]:
    """Groups do not overlap: a write to one does not affect the others."""
    used: dict[int, dict[TensorMeta, bool]] = {number: {} for number in sizes}
    for step in steps:
        if step[0] != "op":
            continue
        for _, storage, dtype, size, stride, offset, written in _tensors(step[3]):
            meta = TensorMeta(dtype, size, stride, offset)
            if storage in used and meta.numel > 0:  # an empty tensor is not an input
                used[storage][meta] = used[storage].get(meta, False) or written
    groups: list[_Group] = []
    for storage, metas in used.items():
        last: _Group | None = None
        for meta in sorted(metas, key=lambda each: each.span_bytes):
            start, end = meta.span_bytes
            if last is None or start >= last.end_bytes:
                last = _Group(storage)
                groups.append(last)
            last.metas[meta] = metas[meta]
            last.end_bytes = max(last.end_bytes, end)
    return groups


def _tensors(arguments: Iterable[StepArgument]) -> Iterator[TensorArgument]:
    for argument in arguments:
        if argument[0] == "tensor":
            yield argument
        elif argument[0] == "list":
            yield from _tensors(argument[1])


# --- building -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Base:
    """A storage, or one group of its views, as one node of the graph."""

    storage: int
    node: Node
    meta: TensorMeta
    start_bytes: int = 0
    end_bytes: int = 2**63


class _Builder:
    def __init__(self, device: torch.device, written: set[int]) -> None:
        self._device = device
        self._written = written
        """Storages that some step writes to."""
        self._graph = Graph()
        self._mode = FakeTensorMode(shape_env=ShapeEnv())
        self._inputs: list[StorageView] = []
        self._examples: list[torch.Tensor] = []
        self._bases: dict[int, list[_Base]] = {}
        self._views: dict[StorageView, Node] = {}
        self._unusable: dict[int, str] = {}
        """Why storages cannot be used: their contents differ from the prediction."""
        self._allocated: dict[int, int] = {}
        """Bytes of storages whose dtype is not known yet."""

    # --- inputs

    def add_input_group(self, group: _Group) -> None:
        if not group.written:
            for meta in group.metas:
                self._views[StorageView(group.storage, meta)] = self._placeholder(group.storage, meta)
            return
        if len({meta.dtype for meta in group.metas}) > 1:
            raise OpRefusedError("memory that the graph writes to is read with another dtype")
        base = self._base_meta(group)
        node = self._placeholder(group.storage, base)
        start, end = base.span_bytes
        self._bases.setdefault(group.storage, []).append(_Base(group.storage, node, base, start, end))

    def _base_meta(self, group: _Group) -> TensorMeta:
        """A view that contains all others, preferably one that is written."""
        first = min(meta.offset for meta in group.metas)
        end = max(meta.end for meta in group.metas)
        for meta in sorted(group.metas, key=lambda each: not group.metas[each]):
            if meta.is_dense() and (meta.offset, meta.end) == (first, end):
                return meta
        (dtype,) = {meta.dtype for meta in group.metas}
        return TensorMeta(dtype, (end - first,), (1,), first)

    def _placeholder(self, storage: int, meta: TensorMeta) -> Node:
        node = self._graph.placeholder(f"input_{len(self._inputs)}")
        with self._mode:
            # Offset 0: the function gets the tensor as an argument, and does not see its offset.
            example = torch.empty_strided(meta.sizes, meta.strides, dtype=meta.dtype, device=self._device)
        node.meta["val"] = example
        self._examples.append(example)
        self._inputs.append(StorageView(storage, meta))
        return node

    # --- steps

    def add(self, step: Step) -> None:
        if step[0] == "allocate":
            self._allocated[step[1]] = step[2]
        elif step[0] == "free":
            self._drop_storage(step[1])
            self._views = {view: node for view, node in self._views.items() if view.storage != step[1]}
        else:
            self._add_op(*step[1:])

    def _drop_storage(self, storage: int) -> None:
        """Forget a storage whose number may be reused."""
        for mapping in (self._bases, self._allocated, self._unusable):
            mapping.pop(storage, None)

    def _add_op(
        self, name: str, overload: str, arguments: list[StepArgument], outputs: list[StepOutput]
    ) -> None:
        namespace, _, short = name.partition("::")
        op = getattr(getattr(getattr(torch.ops, namespace), short), overload or "default")
        self._check_random(op, name, arguments)
        values = [self._value(argument) for argument in arguments]
        node = self._call_with_schema(op, values)
        self._check_division(short, node)
        used_storages = {_storage_id(each.meta["val"]) for each in node.all_input_nodes}
        results = [node] if len(outputs) == 1 else [self._getitem(node, i) for i in range(len(outputs))]
        for result, output in zip(results, outputs, strict=True):
            self._add_output(name, result, output, used_storages)

    def _check_division(self, name: str, node: Node) -> None:
        """Integer division by zero raises in eager mode, but would kill the process in compiled CPU code."""
        found = node.meta["val"]
        if self._device.type != "cpu" or name.rstrip("_") not in _DIVISION_OPS:
            return
        if isinstance(found, torch.Tensor) and not (found.is_floating_point() or found.is_complex()):
            raise OpRefusedError(f"{name} of integers cannot be compiled for a CPU")

    def _add_output(self, name: str, node: Node, output: StepOutput, used_storages: set[int]) -> None:
        if output[0] == "list":
            for i, each in enumerate(output[1]):
                self._add_output(name, self._getitem(node, i), each, used_storages)
        elif output[0] == "new":
            _, storage, dtype, sizes, strides = output
            self._add_base(name, storage, node, TensorMeta(dtype, sizes, strides), used_storages)

    def _getitem(self, node: Node, index: int) -> Node:
        found = node.meta["val"][index]
        item = self._graph.call_function(operator.getitem, (node, index))
        item.meta["val"] = found
        return item

    def _add_base(
        self, name: str, storage: int, node: Node, meta: TensorMeta, used_storages: set[int]
    ) -> None:
        """Copy outputs with other strides than predicted, and outputs that are views, as ops.cpp does."""
        self._drop_storage(storage)
        found = node.meta["val"]
        if not isinstance(found, torch.Tensor) or (found.dtype, tuple(found.shape)) != (
            meta.dtype, meta.sizes
        ):  # fmt: skip
            self._unusable[storage] = f"{name} returns another dtype or shape for fake tensors than predicted"
            return
        unshared = found.device == self._device and _storage_id(found) not in used_storages
        if not unshared or not meta.same_as(_meta_of(found)):
            node = self._copy(node, meta)
        used_storages.add(_storage_id(node.meta["val"]))  # another output with this memory is shared
        self._bases[storage] = [_Base(storage, node, meta)]

    def _copy(self, node: Node, meta: TensorMeta) -> Node:
        new = self._empty(meta)
        self._call(aten.copy_.default, new, node)
        return new

    def _empty(self, meta: TensorMeta) -> Node:
        return self._call(
            aten.empty_strided.default, list(meta.sizes), list(meta.strides),
            dtype=meta.dtype, device=self._device,
        )  # fmt: skip

    def _check_random(self, op: OpOverload, name: str, arguments: list[StepArgument]) -> None:
        if torch.Tag.nondeterministic_seeded not in op.tags:
            return
        declared = [argument.name for argument in op._schema.arguments]
        # Attention is tagged as random, but is deterministic without dropout.
        if "dropout_p" in declared and arguments[declared.index("dropout_p")] in (
            ("value", 0.0), ("value", 0)
        ):  # fmt: skip
            return
        raise OpRefusedError(f"{name} uses random numbers, which would differ in compiled code")

    # --- values

    def _value(self, argument: StepArgument) -> Any:  # Any: an argument of a torch.fx node
        match argument:
            case ("tensor", storage, dtype, sizes, strides, offset, _):
                return self._tensor(StorageView(storage, TensorMeta(dtype, sizes, strides, offset)))
            case ("scalar", value, dtype, wrapped):
                return _Number(value, dtype, wrapped)
            case ("list", items):
                return [self._value(item) for item in items]
            case ("value", value):
                _check_strings(value)
                return value
        raise OpRefusedError("an op uses its own generator")

    def _tensor(self, view: StorageView) -> Node:
        if view in self._views:
            return self._views[view]
        if view.storage in self._unusable:
            raise OpRefusedError(self._unusable[view.storage])
        if view.meta.numel == 0:
            node = self._empty(view.meta)
        else:
            node = self._view(self._base(view), view.meta)
        self._views[view] = node
        return node

    def _base(self, view: StorageView) -> _Base:
        if view.storage in self._allocated:
            self._bases[view.storage] = [self._add_base_on_first_use(view)]
        start, end = view.meta.span_bytes
        for base in self._bases.get(view.storage, ()):
            if base.start_bytes <= start and end <= base.end_bytes:
                return base
        raise OpRefusedError("an op uses memory that does not exist")

    def _add_base_on_first_use(self, view: StorageView) -> _Base:
        size = self._allocated.pop(view.storage)
        meta = view.meta
        if not meta.is_dense() or meta.span_bytes != (0, size):
            meta = TensorMeta(meta.dtype, (size // meta.dtype.itemsize,), (1,))
        return _Base(view.storage, self._empty(meta), meta)

    def _view(self, base: _Base, meta: TensorMeta) -> Node:
        if meta.same_as(base.meta):
            return base.node
        node, found = base.node, base.meta
        if meta.dtype != found.dtype:
            if meta.dtype.itemsize != found.dtype.itemsize:
                raise OpRefusedError("memory is viewed with dtypes of different sizes")
            node = self._call(aten.view.dtype, node, meta.dtype)
            found = TensorMeta(meta.dtype, found.sizes, found.strides, found.offset)
        if not found.is_dense():
            raise OpRefusedError("memory with gaps is viewed with other strides")
        view = self._try_plain_views(node, found, meta)
        relative = TensorMeta(meta.dtype, meta.sizes, meta.strides, meta.offset - base.meta.offset)
        if base.storage in self._written:
            # It must be a view of the same memory, or writes would be lost.
            if view is None or not relative.same_as(_meta_of(view.meta["val"])):
                raise OpRefusedError(
                    "memory that the graph writes to is viewed in a way that cannot be compiled"
                )
        elif view is None:
            # The compiler may change strides, but not of a tensor with one dimension.
            flat = self._call(aten.clone.default, self._reshape(node, found, (found.numel,)))
            view = self._call(
                aten.as_strided.default, flat, list(meta.sizes), list(meta.strides), relative.offset
            )
        return view

    def _reshape(self, node: Node, found: TensorMeta, shape: tuple[int, ...]) -> Node:
        """View the elements in memory order."""
        order = [i for _, _, i in found.dimensions()]
        rest = [i for i in range(len(found.sizes)) if i not in order]
        if (order + rest) != list(range(len(found.sizes))):
            node = self._call(aten.permute.default, node, order + rest)
        if shape == tuple(node.meta["val"].shape):
            return node
        return self._call(aten.view.default, node, list(shape))

    def _try_plain_views(self, node: Node, found: TensorMeta, meta: TensorMeta) -> Node | None:
        """Use view, slice, select, permute and expand, which can be fused; None if as_strided is needed."""
        sliced = _find_slices(found, meta)
        if sliced is None:
            return None
        shape, slices, inner = sliced
        node = self._reshape(node, found, shape)
        if inner is not None:
            node = self._call(aten.select.int, node, len(shape) - 1, inner)
        for i, (start, end) in enumerate(slices):
            if end - start < shape[i]:
                node = self._call(aten.slice.Tensor, node, i, start, end)
        return self._permute(node, meta)

    def _permute(self, node: Node, meta: TensorMeta) -> Node:
        """Permute the dimensions, and insert the trivial ones."""
        placed = [i for _, _, i in meta.dimensions()]
        order = sorted(range(len(placed)), key=lambda each: placed[each])
        if order != list(range(len(placed))):
            node = self._call(aten.permute.default, node, order)
        for i in range(len(meta.sizes)):
            if i not in placed:
                node = self._call(aten.unsqueeze.default, node, i)
        if tuple(node.meta["val"].shape) != meta.sizes:
            node = self._call(aten.expand.default, node, list(meta.sizes))
        return node

    # --- nodes

    def _call_with_schema(self, op: OpOverload, values: list[Any]) -> Node:
        """Pass a wrapped number as a number if the op accepts that, else as a tensor."""
        declared = op._schema.arguments
        for as_number in (True, False):
            converted = [self._replace_numbers(value, as_number) for value in values]
            pairs = list(zip(declared, converted, strict=True))
            args = [value for argument, value in pairs if not argument.kwarg_only]
            kwargs = {argument.name: value for argument, value in pairs if argument.kwarg_only}
            try:
                return self._call(op, *args, **kwargs)
            except (TypeError, RuntimeError):
                if not as_number or not any(isinstance(value, _Number) for value in values):
                    raise
        raise AssertionError("unreachable")

    def _replace_numbers(self, value: Any, as_number: bool) -> Any:
        if isinstance(value, list):
            return [self._replace_numbers(each, as_number) for each in value]
        if not isinstance(value, _Number):
            return value
        if as_number and value.wrapped:
            return value.value
        return self._call(aten.full.default, [], value.value, dtype=value.dtype, device=self._device)

    def _call(self, target: OpOverload, *args: Any, **kwargs: Any) -> Node:
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
            if storage in self._unusable or not bases:
                raise OpRefusedError(self._unusable.get(storage, "a result is never created"))
            results.append(StorageView(storage, bases[0].meta))
            nodes.append(bases[0].node)
        self._graph.output(nodes)
        module = GraphModule(torch.nn.Module(), self._graph)
        return Traced(module, self._examples, self._inputs, results)


@dataclass(frozen=True)
class _Number:
    """A CPU tensor without dimensions; its value is a constant of the graph."""

    value: complex
    dtype: torch.dtype
    wrapped: bool


def _check_strings(value: object) -> None:
    """Inductor copies strings into generated source code: allow only letters, digits and _."""
    for each in value if isinstance(value, list) else [value]:
        if isinstance(each, str) and not _SIMPLE_STRING.fullmatch(each):
            raise OpRefusedError("a string argument has characters other than letters, digits and _")


def _meta_of(tensor: torch.Tensor) -> TensorMeta:
    return TensorMeta(tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset()))


def _storage_id(value: object) -> int:
    """Identity of the storage of a tensor; 0 for other values."""
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else 0


def _find_slices(
    found: TensorMeta, meta: TensorMeta
) -> tuple[tuple[int, ...], list[tuple[int, int]], int | None] | None:
    """How to express `meta` as slices of dense memory: the shape to view it in, the slice of each dimension,
    and the index to select in the last one, if any. None if it is not possible.
    """
    around, left = found.numel, meta.offset - found.offset
    shape: list[int] = []
    slices: list[tuple[int, int]] = []
    for step, n, _ in meta.dimensions():
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
