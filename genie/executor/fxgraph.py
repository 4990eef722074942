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
_SAFE_STRING_ARGUMENT = re.compile(r"[A-Za-z0-9_]{0,32}")
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
    def end_offset(self) -> int:
        """Offset after the last element."""
        if self.numel == 0:
            return self.offset
        return self.offset + 1 + sum((n - 1) * step for n, step in zip(self.sizes, self.strides, strict=True))

    @property
    def byte_range(self) -> tuple[int, int]:
        return self.offset * self.dtype.itemsize, self.end_offset * self.dtype.itemsize

    def nontrivial_dimensions(self) -> list[tuple[int, int, int]]:
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
        for step, n, _ in reversed(self.nontrivial_dimensions()):
            if step != expected:
                return False
            expected *= n
        return self.numel == expected > 0

    def has_same_layout(self, other: TensorMeta) -> bool:
        """Ignores the strides of trivial dimensions."""
        return (self.dtype, self.sizes, self.offset, self.nontrivial_dimensions()) == (
            other.dtype, other.sizes, other.offset, other.nontrivial_dimensions()
        )  # fmt: skip


@dataclass(frozen=True)
class StorageView:
    storage: int
    meta: TensorMeta

    def as_tuple(self) -> ViewFields:
        return self.storage, self.meta.dtype, self.meta.sizes, self.meta.strides, self.meta.offset


@dataclass(frozen=True)
class TracedGraph:
    """`module` takes tensors like the fake `example_inputs`, and returns the results in order."""

    module: GraphModule
    example_inputs: list[torch.Tensor]
    inputs: list[StorageView]
    results: list[StorageView]


def trace_steps(
    steps: Sequence[Step],
    result_storages: Sequence[int],
    existing_storage_bytes: Mapping[int, int],
    device: torch.device,
) -> TracedGraph:
    """`result_storages`: storages that must be results. OpRefusedError if the steps cannot be converted."""
    written = {
        each[1] for step in steps if step[0] == "op" for each in _iterate_tensor_arguments(step[3]) if each[6]
    }
    builder = _FxGraphBuilder(device, written)
    for group in _group_overlapping_inputs(steps, existing_storage_bytes):
        builder.add_overlapping_inputs(group)
    for step in steps:
        builder.add_step(step)
    return builder.finish(result_storages)


# --- inputs -------------------------------------------------------------------------------------


@dataclass
class _OverlappingInputs:
    """Views of one storage whose byte ranges overlap."""

    storage: int
    view_is_written: dict[TensorMeta, bool] = field(default_factory=dict)
    end_bytes: int = 0

    @property
    def is_written(self) -> bool:
        return any(self.view_is_written.values())


def _group_overlapping_inputs(
    steps: Sequence[Step], existing_storage_bytes: Mapping[int, int]
) -> list[_OverlappingInputs]:
    """Groups do not overlap: a write to one does not affect the others."""
    used: dict[int, dict[TensorMeta, bool]] = {number: {} for number in existing_storage_bytes}
    for step in steps:
        if step[0] != "op":
            continue
        for _, storage, dtype, size, stride, offset, written in _iterate_tensor_arguments(step[3]):
            meta = TensorMeta(dtype, size, stride, offset)
            if storage in used and meta.numel > 0:  # an empty tensor is not an input
                used[storage][meta] = used[storage].get(meta, False) or written
    groups: list[_OverlappingInputs] = []
    for storage, metas in used.items():
        last: _OverlappingInputs | None = None
        for meta in sorted(metas, key=lambda each: each.byte_range):
            start, end = meta.byte_range
            if last is None or start >= last.end_bytes:
                last = _OverlappingInputs(storage)
                groups.append(last)
            last.view_is_written[meta] = metas[meta]
            last.end_bytes = max(last.end_bytes, end)
    return groups


def _iterate_tensor_arguments(arguments: Iterable[StepArgument]) -> Iterator[TensorArgument]:
    for argument in arguments:
        if argument[0] == "tensor":
            yield argument
        elif argument[0] == "list":
            yield from _iterate_tensor_arguments(argument[1])


# --- building -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _BaseTensor:
    """A storage, or one group of its views, as one node of the graph."""

    storage: int
    node: Node
    meta: TensorMeta
    start_bytes: int = 0
    end_bytes: int = 2**63


class _FxGraphBuilder:
    def __init__(self, device: torch.device, written: set[int]) -> None:
        self._device = device
        self._written_storages = written
        """Storages that some step writes to."""
        self._graph = Graph()
        self._fake_tensor_mode = FakeTensorMode(shape_env=ShapeEnv())
        self._inputs: list[StorageView] = []
        self._example_inputs: list[torch.Tensor] = []
        self._base_tensors: dict[int, list[_BaseTensor]] = {}
        self._view_nodes: dict[StorageView, Node] = {}
        self._unusable_storage_reasons: dict[int, str] = {}
        """Why storages cannot be used: their contents differ from the prediction."""
        self._bytes_of_untyped_storages: dict[int, int] = {}
        """Bytes of storages whose dtype is not known yet."""

    # --- inputs

    def add_overlapping_inputs(self, group: _OverlappingInputs) -> None:
        if not group.is_written:
            for meta in group.view_is_written:
                self._view_nodes[StorageView(group.storage, meta)] = self._add_placeholder(
                    group.storage, meta
                )
            return
        if len({meta.dtype for meta in group.view_is_written}) > 1:
            raise OpRefusedError("memory that the graph writes to is read with another dtype")
        base = self._meta_covering_group(group)
        node = self._add_placeholder(group.storage, base)
        start, end = base.byte_range
        self._base_tensors.setdefault(group.storage, []).append(
            _BaseTensor(group.storage, node, base, start, end)
        )

    def _meta_covering_group(self, group: _OverlappingInputs) -> TensorMeta:
        """A view that contains all others, preferably one that is written."""
        first = min(meta.offset for meta in group.view_is_written)
        end = max(meta.end_offset for meta in group.view_is_written)
        for meta in sorted(group.view_is_written, key=lambda each: not group.view_is_written[each]):
            if meta.is_dense() and (meta.offset, meta.end_offset) == (first, end):
                return meta
        (dtype,) = {meta.dtype for meta in group.view_is_written}
        return TensorMeta(dtype, (end - first,), (1,), first)

    def _add_placeholder(self, storage: int, meta: TensorMeta) -> Node:
        node = self._graph.placeholder(f"input_{len(self._inputs)}")
        with self._fake_tensor_mode:
            # Offset 0: the function gets the tensor as an argument, and does not see its offset.
            example = torch.empty_strided(meta.sizes, meta.strides, dtype=meta.dtype, device=self._device)
        node.meta["val"] = example
        self._example_inputs.append(example)
        self._inputs.append(StorageView(storage, meta))
        return node

    # --- steps

    def add_step(self, step: Step) -> None:
        if step[0] == "allocate":
            self._bytes_of_untyped_storages[step[1]] = step[2]
        elif step[0] == "free":
            self._forget_storage(step[1])
            self._view_nodes = {
                view: node for view, node in self._view_nodes.items() if view.storage != step[1]
            }
        else:
            self._add_op(*step[1:])

    def _forget_storage(self, storage: int) -> None:
        """Forget a storage whose number may be reused."""
        for mapping in (self._base_tensors, self._bytes_of_untyped_storages, self._unusable_storage_reasons):
            mapping.pop(storage, None)

    def _add_op(
        self, name: str, overload: str, arguments: list[StepArgument], outputs: list[StepOutput]
    ) -> None:
        namespace, _, short = name.partition("::")
        op = getattr(getattr(getattr(torch.ops, namespace), short), overload or "default")
        self._check_not_random(op, name, arguments)
        values = [self._to_fx_argument(argument) for argument in arguments]
        node = self._add_call_with_schema(op, values)
        self._check_no_integer_division(short, node)
        used_storages = {_storage_id(each.meta["val"]) for each in node.all_input_nodes}
        results = [node] if len(outputs) == 1 else [self._add_getitem(node, i) for i in range(len(outputs))]
        for result, output in zip(results, outputs, strict=True):
            self._add_output(name, result, output, used_storages)

    def _check_no_integer_division(self, name: str, node: Node) -> None:
        """Integer division by zero raises in eager mode, but would kill the process in compiled CPU code."""
        found = node.meta["val"]
        if self._device.type != "cpu" or name.rstrip("_") not in _DIVISION_OPS:
            return
        if isinstance(found, torch.Tensor) and not (found.is_floating_point() or found.is_complex()):
            raise OpRefusedError(f"{name} of integers cannot be compiled for a CPU")

    def _add_output(self, name: str, node: Node, output: StepOutput, used_storages: set[int]) -> None:
        if output[0] == "list":
            for i, each in enumerate(output[1]):
                self._add_output(name, self._add_getitem(node, i), each, used_storages)
        elif output[0] == "new":
            _, storage, dtype, sizes, strides = output
            self._set_base_from_output(name, storage, node, TensorMeta(dtype, sizes, strides), used_storages)

    def _add_getitem(self, node: Node, index: int) -> Node:
        found = node.meta["val"][index]
        item = self._graph.call_function(operator.getitem, (node, index))
        item.meta["val"] = found
        return item

    def _set_base_from_output(
        self, name: str, storage: int, node: Node, meta: TensorMeta, used_storages: set[int]
    ) -> None:
        """Copy outputs that are views or have other strides than predicted, as op_runner.cpp does."""
        self._forget_storage(storage)
        found = node.meta["val"]
        if not isinstance(found, torch.Tensor) or (found.dtype, tuple(found.shape)) != (
            meta.dtype, meta.sizes
        ):  # fmt: skip
            self._unusable_storage_reasons[storage] = (
                f"{name} returns another dtype or shape for fake tensors than predicted"
            )
            return
        unshared = found.device == self._device and _storage_id(found) not in used_storages
        if not unshared or not meta.has_same_layout(_tensor_meta(found)):
            node = self._add_strided_copy(node, meta)
        used_storages.add(_storage_id(node.meta["val"]))  # another output with this memory is shared
        self._base_tensors[storage] = [_BaseTensor(storage, node, meta)]

    def _add_strided_copy(self, node: Node, meta: TensorMeta) -> Node:
        new = self._add_empty_tensor(meta)
        self._add_call(aten.copy_.default, new, node)
        return new

    def _add_empty_tensor(self, meta: TensorMeta) -> Node:
        return self._add_call(
            aten.empty_strided.default, list(meta.sizes), list(meta.strides),
            dtype=meta.dtype, device=self._device,
        )  # fmt: skip

    def _check_not_random(self, op: OpOverload, name: str, arguments: list[StepArgument]) -> None:
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

    def _to_fx_argument(self, argument: StepArgument) -> Any:  # Any: an argument of a torch.fx node
        match argument:
            case ("tensor", storage, dtype, sizes, strides, offset, _):
                return self._get_or_add_view_node(
                    StorageView(storage, TensorMeta(dtype, sizes, strides, offset))
                )
            case ("scalar", value, dtype, wrapped):
                return _ScalarConstant(value, dtype, wrapped)
            case ("list", items):
                return [self._to_fx_argument(item) for item in items]
            case ("value", value):
                _check_strings_can_be_compiled(value)
                return value
        raise OpRefusedError("an op uses its own generator")

    def _get_or_add_view_node(self, view: StorageView) -> Node:
        if view in self._view_nodes:
            return self._view_nodes[view]
        if view.storage in self._unusable_storage_reasons:
            raise OpRefusedError(self._unusable_storage_reasons[view.storage])
        if view.meta.numel == 0:
            node = self._add_empty_tensor(view.meta)
        else:
            node = self._add_view_of_base(self._get_base(view), view.meta)
        self._view_nodes[view] = node
        return node

    def _get_base(self, view: StorageView) -> _BaseTensor:
        if view.storage in self._bytes_of_untyped_storages:
            self._base_tensors[view.storage] = [self._make_base_on_first_use(view)]
        start, end = view.meta.byte_range
        for base in self._base_tensors.get(view.storage, ()):
            if base.start_bytes <= start and end <= base.end_bytes:
                return base
        raise OpRefusedError("an op uses memory that does not exist")

    def _make_base_on_first_use(self, view: StorageView) -> _BaseTensor:
        size = self._bytes_of_untyped_storages.pop(view.storage)
        meta = view.meta
        if not meta.is_dense() or meta.byte_range != (0, size):
            meta = TensorMeta(meta.dtype, (size // meta.dtype.itemsize,), (1,))
        return _BaseTensor(view.storage, self._add_empty_tensor(meta), meta)

    def _add_view_of_base(self, base: _BaseTensor, meta: TensorMeta) -> Node:
        if meta.has_same_layout(base.meta):
            return base.node
        node, found = base.node, base.meta
        if meta.dtype != found.dtype:
            if meta.dtype.itemsize != found.dtype.itemsize:
                raise OpRefusedError("memory is viewed with dtypes of different sizes")
            node = self._add_call(aten.view.dtype, node, meta.dtype)
            found = TensorMeta(meta.dtype, found.sizes, found.strides, found.offset)
        if not found.is_dense():
            raise OpRefusedError("memory with gaps is viewed with other strides")
        view = self._try_add_slices_and_permute(node, found, meta)
        relative = TensorMeta(meta.dtype, meta.sizes, meta.strides, meta.offset - base.meta.offset)
        if base.storage in self._written_storages:
            # It must be a view of the same memory, or writes would be lost.
            if view is None or not relative.has_same_layout(_tensor_meta(view.meta["val"])):
                raise OpRefusedError(
                    "memory that the graph writes to is viewed in a way that cannot be compiled"
                )
        elif view is None:
            # The compiler may change strides, but not of a tensor with one dimension.
            flat = self._add_call(aten.clone.default, self._add_reshape(node, found, (found.numel,)))
            view = self._add_call(
                aten.as_strided.default, flat, list(meta.sizes), list(meta.strides), relative.offset
            )
        return view

    def _add_reshape(self, node: Node, found: TensorMeta, shape: tuple[int, ...]) -> Node:
        """View the elements in memory order."""
        order = [i for _, _, i in found.nontrivial_dimensions()]
        rest = [i for i in range(len(found.sizes)) if i not in order]
        if (order + rest) != list(range(len(found.sizes))):
            node = self._add_call(aten.permute.default, node, order + rest)
        if shape == tuple(node.meta["val"].shape):
            return node
        return self._add_call(aten.view.default, node, list(shape))

    def _try_add_slices_and_permute(self, node: Node, found: TensorMeta, meta: TensorMeta) -> Node | None:
        """Use view, slice, select, permute and expand, which can be fused; None if as_strided is needed."""
        sliced = _express_as_slices(found, meta)
        if sliced is None:
            return None
        shape, slices, inner = sliced
        node = self._add_reshape(node, found, shape)
        if inner is not None:
            node = self._add_call(aten.select.int, node, len(shape) - 1, inner)
        for i, (start, end) in enumerate(slices):
            if end - start < shape[i]:
                node = self._add_call(aten.slice.Tensor, node, i, start, end)
        return self._add_permute(node, meta)

    def _add_permute(self, node: Node, meta: TensorMeta) -> Node:
        """Permute the dimensions, and insert the trivial ones."""
        placed = [i for _, _, i in meta.nontrivial_dimensions()]
        order = sorted(range(len(placed)), key=lambda each: placed[each])
        if order != list(range(len(placed))):
            node = self._add_call(aten.permute.default, node, order)
        for i in range(len(meta.sizes)):
            if i not in placed:
                node = self._add_call(aten.unsqueeze.default, node, i)
        if tuple(node.meta["val"].shape) != meta.sizes:
            node = self._add_call(aten.expand.default, node, list(meta.sizes))
        return node

    # --- nodes

    def _add_call_with_schema(self, op: OpOverload, values: list[Any]) -> Node:
        """Pass a wrapped number as a number if the op accepts that, else as a tensor."""
        declared = op._schema.arguments
        for as_number in (True, False):
            converted = [self._replace_scalar_constants(value, as_number) for value in values]
            pairs = list(zip(declared, converted, strict=True))
            args = [value for argument, value in pairs if not argument.kwarg_only]
            kwargs = {argument.name: value for argument, value in pairs if argument.kwarg_only}
            try:
                return self._add_call(op, *args, **kwargs)
            except (TypeError, RuntimeError):
                if not as_number or not any(isinstance(value, _ScalarConstant) for value in values):
                    raise
        raise AssertionError("unreachable")

    def _replace_scalar_constants(self, value: Any, as_number: bool) -> Any:
        if isinstance(value, list):
            return [self._replace_scalar_constants(each, as_number) for each in value]
        if not isinstance(value, _ScalarConstant):
            return value
        if as_number and value.is_wrapped_number:
            return value.value
        return self._add_call(aten.full.default, [], value.value, dtype=value.dtype, device=self._device)

    def _add_call(self, target: OpOverload, *args: Any, **kwargs: Any) -> Node:
        fakes = map_arg((args, kwargs), lambda node: node.meta["val"])
        with self._fake_tensor_mode:
            value = target(*fakes[0], **fakes[1])
        node = self._graph.call_function(target, args, kwargs)
        node.meta["val"] = value
        return node

    def finish(self, result_storages: Sequence[int]) -> TracedGraph:
        results, nodes = [], []
        for storage in result_storages:
            bases = self._base_tensors.get(storage)
            if storage in self._unusable_storage_reasons or not bases:
                raise OpRefusedError(self._unusable_storage_reasons.get(storage, "a result is never created"))
            results.append(StorageView(storage, bases[0].meta))
            nodes.append(bases[0].node)
        self._graph.output(nodes)
        module = GraphModule(torch.nn.Module(), self._graph)
        return TracedGraph(module, self._example_inputs, self._inputs, results)


@dataclass(frozen=True)
class _ScalarConstant:
    """A CPU tensor without dimensions; its value is a constant of the graph."""

    value: complex
    dtype: torch.dtype
    is_wrapped_number: bool


def _check_strings_can_be_compiled(value: object) -> None:
    """Inductor copies strings into generated source code: allow only letters, digits and _."""
    for each in value if isinstance(value, list) else [value]:
        if isinstance(each, str) and not _SAFE_STRING_ARGUMENT.fullmatch(each):
            raise OpRefusedError(
                "cannot compile an op with this string argument: it may have up to 32 letters, digits and _"
            )


def _tensor_meta(tensor: torch.Tensor) -> TensorMeta:
    return TensorMeta(tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset()))


def _storage_id(value: object) -> int:
    """Identity of the storage of a tensor; 0 for other values."""
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else 0


def _express_as_slices(
    found: TensorMeta, meta: TensorMeta
) -> tuple[tuple[int, ...], list[tuple[int, int]], int | None] | None:
    """How to express `meta` as slices of dense memory: the shape to view it in, the slice of each dimension,
    and the index to select in the last one, if any. None if it is not possible.
    """
    around, left = found.numel, meta.offset - found.offset
    shape: list[int] = []
    slices: list[tuple[int, int]] = []
    for step, n, _ in meta.nontrivial_dimensions():
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
