"""One recorded graph: ops recorded by an executor while they run once, and replayed by number.

Used by model_capture.py and compiler.py. Does not implement recording in the executor
(native/torch/executor).
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
from torch.utils import _pytree as pytree

from genie.device import library, registry
from genie.errors import OpRefusedError, UsageError
from genie.native import genie_device

GRAPHS_PER_MODEL_MAX = 32
"""Per captured model, one for each combination of shapes. The least recently used one is dropped."""
RECORDING_THREAD_IDLE_S_MAX = 10.0
"""Other threads wait for a recording to end; they raise once its thread has not used the device for this
long."""
_INPUT_DESCRIPTION_CHARACTERS_MAX = 100
_TENSOR_NAMES_IN_ERROR_MAX = 8
_PLAIN_VALUE_TYPES = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type(None),
    torch.dtype,
    torch.device,
    torch.layout,
)
_TYPES_COMPARED_BY_VALUE = frozenset(_PLAIN_VALUE_TYPES) - {float, complex}


@dataclass(frozen=True)
class GraphReport:
    """How an executor replays one recording."""

    inputs: tuple[str, ...]
    """Tensors like "float32[8, 512]"; other values as their repr."""
    how: str
    """"steps", "cuda graph", "inductor" or "inductor in a cuda graph"."""
    why: str
    """Why the executor does not use a faster mode; empty if it uses the fastest."""
    replays: int


def fetch_graph_reports_of_device(index: int) -> list[GraphReport]:
    """Reports of all graphs of this process on a device, including those of torch.compile."""
    return [
        graph.fetch_report()
        for graph in list(_live_graphs)
        if graph.device_index == index and not graph.is_lost
    ]


class OverlappingInput(NamedTuple):
    """One of several inputs that share memory."""

    position: int
    group_first_position: int
    """Position of the first input of the group."""
    same_object_position: int
    """Position of the first input that is the same object."""
    offset_in_group_bytes: int
    """Offset in the memory of the group."""
    strides: tuple[int, ...]
    is_conj: bool
    is_neg: bool


class RecordedGraph:
    """One recording, made by running the function once: its own copies of the inputs, and the results."""

    def __init__(
        self,
        run: Callable[[Sequence[Any]], Any],
        inputs: Sequence[Any],
        *,
        index: int,
        shared: Sequence[OverlappingInput] = (),
        in_place: Sequence[int] = (),
        model_tensors: Sequence[tuple[str, torch.Tensor]] = (),
        inductor: bool = False,
    ) -> None:
        """`in_place`: positions of inputs that are used without a copy. `shared`: those of the others that
        share memory. `model_tensors`: tensors of the model, with names for error messages.
        """
        self.device_index = index
        self._input_descriptions = tuple(map(_describe_input, inputs))
        self._inputs = list(inputs)
        self._copied_positions = [
            i for i, each in enumerate(inputs) if isinstance(each, torch.Tensor) and i not in in_place
        ]
        self._copied_slices: dict[int, tuple[slice, ...]] = {}
        """For copied inputs with stride 0: the slices that cover each element once."""
        library.ensure_loaded()
        self._copy_inputs_to_device(inputs, shared)
        self._input_copies = [self._copied_slice_of_input(self._inputs, i) for i in self._copied_positions]
        self._guard = genie_device.GraphGuard([self._inputs[i] for i in in_place], [], [])
        self._connection = registry.device_slot(index).get_or_open_connection(first_seed=torch.initial_seed())
        if shared:
            self.copy_inputs_to_graph(inputs)
        self._graph_number: int | None = self._connection.begin_graph(
            thread=threading.current_thread().name, idle_s_max=RECORDING_THREAD_IDLE_S_MAX
        )
        is_complete = False
        try:
            copies = [self._inputs[i] for i in self._copied_positions]
            # The storages are held, because addresses are reused.
            before = [(copy.untyped_storage(), _memory_layout(copy)) for copy in copies]
            with _autocast_cache_disabled():
                self.results = run(self._inputs)
            if [_memory_layout(copy) for copy in copies] != [layout for _, layout in before]:
                raise OpRefusedError(
                    "a captured model may write to its arguments, but not change their shape or memory"
                )
            _check_result_types_and_devices(self.results, index)
            self.written_positions = self._find_written_positions()
            """Positions of inputs that the model has changed."""
            self._written_storage_count = self._connection.graph_written_storage_count(self._graph_number)
            self.check_no_aliasing_with_model(inputs)
            is_complete = True
        except OpRefusedError as error:
            error.message += self._describe_side_effects(model_tensors)
            raise
        finally:
            keep = genie_device.GRAPH_COMPILE if inductor else genie_device.GRAPH_KEEP
            self._connection.end_graph(keep if is_complete else genie_device.GRAPH_DISCARD)
            if not is_complete:
                self._graph_number = None
        _live_graphs.add(self)

    def _find_written_positions(self) -> list[int]:
        assert self._graph_number is not None
        accesses = self._connection.storage_accesses_in_graph(self._graph_number, self._input_copies)
        written = genie_device.STORAGE_WRITTEN
        return [i for i, access in zip(self._copied_positions, accesses, strict=True) if access == written]

    def _describe_side_effects(self, model_tensors: Sequence[tuple[str, torch.Tensor]]) -> str:
        """For the error message: what the model changed before its recording failed."""
        assert self._graph_number is not None
        tensors = [*(tensor for _, tensor in model_tensors), *self._input_copies]
        accesses = self._connection.storage_accesses_in_graph(self._graph_number, tensors)
        written = [i for i, access in enumerate(accesses) if access == genie_device.STORAGE_WRITTEN]
        names = [model_tensors[i][0] for i in written if i < len(model_tensors)]
        known = {tensors[i].untyped_storage()._cdata for i in written}
        more = (
            self._connection.graph_written_storage_count(self._graph_number)
            - len(known)
            + len(names[_TENSOR_NAMES_IN_ERROR_MAX:])
        )
        listed = [
            *names[:_TENSOR_NAMES_IN_ERROR_MAX],
            *([f"{more} other tensor{'s' * (more > 1)}"] if more else []),
        ]
        changes = f"it has written to {', '.join(listed)}" if listed else "it has changed no existing tensor"
        return f"; the model ran up to this point: {changes}, and side effects of its Python code remain"

    def _copy_inputs_to_device(self, inputs: Sequence[Any], shared: Sequence[OverlappingInput]) -> None:
        """Copies share memory where the inputs do, and an input that is passed twice is copied once."""
        copies = _allocate_overlapping_copies(inputs, shared, self.device_index)
        for i in self._copied_positions:
            self._inputs[i] = copies[i] if i in copies else _copy_to_device(inputs[i], self.device_index)
        duplicates = {each.position for each in shared if each.same_object_position != each.position}
        self._copied_positions = [i for i in self._copied_positions if i not in duplicates]
        for i in copies.keys() - duplicates:
            if 0 in copies[i].stride():
                dimensions = zip(copies[i].shape, copies[i].stride(), strict=True)
                self._copied_slices[i] = tuple(slice(0, size if stride else 1) for size, stride in dimensions)

    def _copied_slice_of_input(self, inputs: Sequence[Any], i: int) -> torch.Tensor:
        part: torch.Tensor = inputs[i][self._copied_slices[i]] if i in self._copied_slices else inputs[i]
        return part

    def check_no_aliasing_with_model(self, inputs: Sequence[Any]) -> None:
        """OpRefusedError if an input shares memory with a tensor of the model, and the model writes to it."""
        if not self._written_storage_count:
            return
        assert self._graph_number is not None
        accesses = self._connection.storage_accesses_in_graph(
            self._graph_number, [inputs[i] for i in self._copied_positions]
        )
        for i, access in zip(self._copied_positions, accesses, strict=True):
            if access == genie_device.STORAGE_WRITTEN or (
                access == genie_device.STORAGE_READ and i in self.written_positions
            ):
                raise OpRefusedError(
                    f"the argument {self._input_descriptions[i]} shares memory with a tensor that the "
                    "captured model holds itself, and the model writes to it",
                    hint="pass a copy, or pass all tensors on that memory as arguments",
                )

    def is_valid(self) -> bool:
        """Whether the executor is alive and the inputs that are used in place have the same memory."""
        return not self.is_lost and self._guard.is_unchanged()

    @property
    def is_lost(self) -> bool:
        """Whether the executor was lost, and the graph with it."""
        return self._connection.is_lost

    def copy_inputs_to_graph(self, inputs: Sequence[Any]) -> None:
        """Copy the inputs to the graph's own copies, for the next replay."""
        self._connection.copy_inputs(
            self._input_copies, [self._copied_slice_of_input(inputs, i) for i in self._copied_positions]
        )

    def replay(self) -> Any:
        """Run the graph. The results belong to it: the next replay overwrites them."""
        assert self._graph_number is not None
        self._connection.replay_graph(self._graph_number)
        return self.results

    def copy_changes_to_inputs(self, inputs: Sequence[Any]) -> None:
        """Copy the changes of the graph's own copies to the inputs."""
        with torch.no_grad():
            for i in self.written_positions:
                self._copied_slice_of_input(inputs, i).copy_(self._copied_slice_of_input(self._inputs, i))

    def fetch_report(self) -> GraphReport:
        assert self._graph_number is not None
        how, replays, why = self._connection.fetch_graph_report(self._graph_number)
        return GraphReport(inputs=self._input_descriptions, how=how, why=why, replays=replays)

    def __del__(self) -> None:
        number = getattr(self, "_graph_number", None)
        if number is not None:
            self._connection.free_graph(number)


_live_graphs: weakref.WeakSet[RecordedGraph] = weakref.WeakSet()


def input_cache_key(leaf: Any) -> Hashable:
    """The cache key of one input: inputs with equal keys can use the same graph."""
    if isinstance(leaf, torch.Tensor):
        device = leaf.device
        if device.type == registry.DEVICE_TYPE:
            return leaf.shape, leaf.dtype, leaf.stride(), device.index
        return leaf.shape, leaf.dtype
    if type(leaf) in _TYPES_COMPARED_BY_VALUE:
        return type(leaf), leaf
    try:
        exact = exact_value_key(leaf)
        hash(exact)
    except TypeError:
        raise UsageError(
            f"an argument of type {type(leaf).__name__} cannot be captured; pass tensors and plain values"
        ) from None
    return exact


def exact_value_key(value: Any) -> Hashable:
    """A key that is equal for identical values only: 0.0 differs from -0.0, 1 from 1.0; nan equals nan."""
    kind = type(value)
    if isinstance(value, float):
        return kind, value.hex()
    if isinstance(value, complex):
        return kind, value.real.hex(), value.imag.hex()
    if isinstance(value, (tuple, frozenset)):
        items = map(exact_value_key, value)
        return kind, tuple(items) if isinstance(value, tuple) else frozenset(items)
    if isinstance(value, (slice, range)):
        return kind, exact_value_key(value.start), exact_value_key(value.stop), exact_value_key(value.step)
    return kind, value


@contextlib.contextmanager
def _autocast_cache_disabled() -> Iterator[None]:
    """Autocast caches cast weights. A recording must contain the casts, so that replays see changed weights.

    A model may enable the cache for a part of itself; that part then uses casts of the recording, which are
    cleared afterwards.
    """
    was_enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        torch.clear_autocast_cache()
        torch.set_autocast_cache_enabled(was_enabled)


def _describe_input(leaf: Any) -> str:
    if isinstance(leaf, torch.Tensor):
        return f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}"
    return repr(leaf)[:_INPUT_DESCRIPTION_CHARACTERS_MAX]


def _copy_to_device(tensor: torch.Tensor, index: int) -> torch.Tensor:
    device = torch.device(registry.DEVICE_TYPE, index)
    if tensor.device.type == registry.DEVICE_TYPE:
        return tensor.detach().clone(memory_format=torch.preserve_format).to(device)
    return tensor.detach().to(device)


def _allocate_overlapping_copies(
    inputs: Sequence[Any], shared: Sequence[OverlappingInput], index: int
) -> dict[int, torch.Tensor]:
    """Tensors that share memory as the inputs do, by position; their contents are not copied yet."""
    device = torch.device(registry.DEVICE_TYPE, index)
    sizes: collections.Counter[int] = collections.Counter()
    for each in shared:
        source = inputs[each.position]
        spans = ((size - 1) * stride for size, stride in zip(source.shape, each.strides, strict=True))
        end = each.offset_in_group_bytes + (1 + sum(spans)) * source.itemsize
        sizes[each.group_first_position] = max(sizes[each.group_first_position], end)
    memory = {
        first: torch.zeros(size, dtype=torch.uint8, device=device).untyped_storage()
        for first, size in sizes.items()
    }
    copies: dict[int, torch.Tensor] = {}
    for each in shared:
        if each.same_object_position in copies:
            copies[each.position] = copies[each.same_object_position]
            continue
        source = inputs[each.position]
        copy = torch.empty(0, dtype=source.dtype, device=device)
        copy.set_(
            memory[each.group_first_position],
            each.offset_in_group_bytes // source.itemsize,
            source.shape,
            each.strides,
        )
        copy = copy.conj() if each.is_conj else copy
        copies[each.position] = torch._neg_view(copy) if each.is_neg else copy
    return copies


def _memory_layout(tensor: torch.Tensor) -> tuple[int, ...]:
    """Storage, offset, shape and strides of a tensor."""
    memory = tensor.untyped_storage()._cdata
    return memory, tensor.storage_offset(), *tensor.shape, *tensor.stride()


def _check_result_types_and_devices(results: Any, index: int) -> None:
    for leaf in pytree.tree_leaves(results):
        if not isinstance(leaf, (torch.Tensor, *_PLAIN_VALUE_TYPES)):
            raise OpRefusedError(
                f"a captured model must return tensors in tuples, lists and dicts, not a {_type_name(leaf)}",
                hint="return a tuple or a dict, or register the class with torch's pytree",
            )
        if isinstance(leaf, torch.Tensor) and leaf.device != torch.device(registry.DEVICE_TYPE, index):
            raise OpRefusedError(
                f"a captured model must return tensors on its own device, not on {leaf.device}"
            )


def _type_name(value: object) -> str:
    return type(value).__qualname__
