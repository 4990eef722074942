"""The types of what a compiled executor passes to the compiler and the capture of graphs, and gets back.

native/torch/executor/python_compiler.cpp builds the steps as plain tuples; genie/executor/fxgraph.py reads
them. Types only: importing this loads neither torch nor a library.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

if TYPE_CHECKING:
    import torch

SizesOrStrides: TypeAlias = tuple[int, ...]
"""SizesOrStrides or strides, in elements."""

TensorArgument: TypeAlias = (
    "tuple[Literal['tensor'], int, torch.dtype, SizesOrStrides, SizesOrStrides, int, bool]"
)
"""Storage, dtype, sizes, strides, offset, and whether the op writes to it."""
ScalarArgument: TypeAlias = "tuple[Literal['scalar'], complex, torch.dtype, bool]"
"""A CPU tensor without dimensions: value, dtype, and whether it wraps a Python number."""
ValueArgument: TypeAlias = tuple[Literal["value"], object]
ListArgument: TypeAlias = "tuple[Literal['list'], list[StepArgument]]"
GeneratorArgument: TypeAlias = tuple[Literal["generator"]]
StepArgument: TypeAlias = "TensorArgument | ScalarArgument | ValueArgument | ListArgument | GeneratorArgument"

NewStorageOutput: TypeAlias = "tuple[Literal['new'], int, torch.dtype, SizesOrStrides, SizesOrStrides]"
"""Storage, dtype, sizes and strides."""
ListOutput: TypeAlias = "tuple[Literal['list'], list[StepOutput]]"
NoOutput: TypeAlias = tuple[Literal["nothing"]]
StepOutput: TypeAlias = "NewStorageOutput | ListOutput | NoOutput"

OpStep: TypeAlias = "tuple[Literal['op'], str, str, list[StepArgument], list[StepOutput]]"
"""Name, overload, arguments and outputs. Checked against the allowed ops and the schemas."""
AllocateStep: TypeAlias = tuple[Literal["allocate"], int, int]
"""Storage and bytes."""
FreeStep: TypeAlias = tuple[Literal["free"], int]
Step: TypeAlias = "OpStep | AllocateStep | FreeStep"

ViewFields: TypeAlias = "tuple[int, torch.dtype, SizesOrStrides, SizesOrStrides, int]"
"""Storage, dtype, sizes, strides and offset."""


class CompiledFunction(Protocol):
    """Takes a tensor for each of `inputs` and returns one for each of `results`."""

    @property
    def inputs(self) -> Sequence[ViewFields]: ...

    @property
    def results(self) -> Sequence[ViewFields]: ...

    def __call__(self, inputs: list[torch.Tensor], /) -> Sequence[torch.Tensor]: ...


class GraphCompiler(Protocol):
    def compile(
        self,
        steps: Sequence[Step],
        result_storages: Sequence[int],
        existing_storage_bytes: Mapping[int, int],
        keep_alive: Callable[[], None],
        /,
    ) -> CompiledFunction:
        """Compile the steps. `existing_storage_bytes`: the bytes of the storages that exist before.

        An error means that the graph is replayed step by step."""
        ...


class GraphCapture(Protocol):
    """Captures what the executor does between `begin` and `end` as a graph of the accelerator."""

    def begin(self) -> None: ...

    def end(self) -> tuple[object, int]:
        """Return the graph and the size of its memory pool."""
        ...

    def abort(self) -> None: ...

    def replay(self, graph: object, /) -> None: ...
