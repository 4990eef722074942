"""Which ops may run, and with which arguments. Runs them through torch's own dispatcher.

Allowed are the ops of the aten namespace that allowed_ops.txt names, as far as they take and return
nothing but data. An op that a later torch adds is refused until someone has looked at it. Every
argument is held against the type that the op declares, so that no number can pass for a dtype. Not
for: keeping the results (tensors.py).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from genie.agent.executor.tensors import DTYPES, TensorTable, from_inline
from genie.errors import OpRefusedError
from genie.runtime import opwire

# One name a line, without overloads. Left out on purpose: files, pinned and shared memory, other devices,
# autograd's bookkeeping, sparse, nested and quantized layouts, and indexing that trusts its indices.
ALLOWED_OPS = frozenset(Path(__file__).with_name("allowed_ops.txt").read_text("ascii").split())
# It takes a flag that leaves its indices unchecked; autograd sets it, and here it is never heeded.
_UNCHECKED_FLAG = {"_index_put_impl_": "unsafe", "_index_put_impl": "unsafe"}

_NUMBER = (bool, int, float, complex)
# What may stand where an op declares this type. A generator cannot be sent: only None may stand there.
_ACCEPTED: dict[str, tuple[type, ...]] = {
    "Tensor": (torch.Tensor, *_NUMBER),
    "number": _NUMBER,
    "int": (int,),
    "bool": (bool,),
    "float": (float, int),
    "str": (str,),
    "ScalarType": (torch.dtype,),
    "Layout": (torch.layout,),
    "MemoryFormat": (torch.memory_format,),
    "Device": (torch.device,),
    "Generator": (),
}
_Look = tuple[torch.dtype, torch.Size, tuple[int, ...], int]
_RETURNED = re.compile(r"^(List\[)?(Tensor|int|bool|float|number)\]?$")


@dataclass(frozen=True)
class AllowedOp:
    """An op that may run. `call` is torch's own overload."""

    name: str
    call: Callable[..., Any]  # Any: what aten returns depends on the op
    arguments: dict[str, tuple[str, bool]]
    """Name -> (declared type without wrapping, may be a list), in order."""
    written: frozenset[str]
    single: bool
    """One return value, as against none or several."""
    sized: bool
    """Takes memory for an argument named `size`."""
    unchecked_flag: str = ""
    """An argument that must stay false."""


@dataclass
class OpRunner:
    """Turns a RunOp into a call and its outcome into a Result."""

    tensors: TensorTable
    device: torch.device
    count: int = 0
    latest: list[int] = field(default_factory=list)
    """What the last op made."""
    _known: dict[str, AllowedOp] = field(default_factory=dict)

    def run(self, request: opwire.RunOp) -> opwire.Result:
        self.count += 1
        op = self._known.get(request.op)
        if op is None:
            op = self._known[request.op] = allowed(request.op)
        given: dict[int, int] = {}
        args = [self._decoded(value, given) for value in request.args]
        kwargs = {name: self._decoded(value, given) for name, value in request.kwargs.items()}
        named = _check_arguments(op, args, kwargs)
        if op.unchecked_flag in named:
            named[op.unchecked_flag] = False
            args, kwargs = (
                [named[name] for name in list(op.arguments)[: len(args)]],
                {name: named[name] for name in kwargs},
            )
        if op.sized:
            self.tensors.check_room(_announced_bytes(named))
        before = self._shapes_of_written(op, named)
        peak_bytes = self.tensors.bytes_allocated_peak
        try:
            out = op.call(*args, **kwargs)
            changed = self._changed(before, given)
            outs = [out] if op.single else list(out or ())
            numbers = self._numbered(outs, given)
        except Exception:
            # What an op has resized before it failed, or beyond the quota, is what it was: the client is
            # not told of anything else.
            self._shrink_back(before, given)
            self.tensors.bytes_allocated_peak = peak_bytes
            raise
        values = [self._encoded(value, numbers) for value in outs]
        self.latest = [number for number in numbers.values() if number not in given.values()]
        return opwire.Result(values=values, changed=changed)

    def forget_latest(self) -> None:
        """Frees what the last op made, when the client cannot be told of it."""
        self.tensors.free(self.latest)
        self.latest = []

    def _decoded(self, value: opwire.Value, given: dict[int, int]) -> object:
        match value:
            case opwire.Handle():
                tensor = self.tensors.get(value.number)
                given.setdefault(id(tensor), value.number)
                return tensor
            case list():
                return [self._decoded(item, given) for item in value]
            case opwire.DType():
                return DTYPES[value.name]
            case opwire.OwnDevice():
                return self.device
            case opwire.Inline():
                return from_inline(value, self.device)
            case opwire.Complex():
                return complex(value.real, value.imag)
            case opwire.MemoryFormat():
                return getattr(torch, value.name)
            case opwire.Layout():
                return torch.strided
        return value

    def _shapes_of_written(self, op: AllowedOp, named: dict[str, object]) -> list[_Before]:
        found: list[_Before] = []
        for name in op.written:
            value = named.get(name)
            for tensor in value if isinstance(value, list) else [value]:
                if isinstance(tensor, torch.Tensor):
                    storage = tensor.untyped_storage()
                    found.append(_Before(tensor, _look(tensor), storage, storage.nbytes()))
        return found

    def _changed(self, before: list[_Before], given: dict[int, int]) -> list[opwire.TensorMeta]:
        changed: list[opwire.TensorMeta] = []
        for old in before:
            number = given.get(id(old.tensor))
            if number is not None and old.is_other_now:
                self.tensors.recount(old.tensor)
                changed.append(self.tensors.describe(number))
        self.tensors.check_room(0)
        return changed

    def _shrink_back(self, before: list[_Before], given: dict[int, int]) -> None:
        for old in before:
            if old.is_other_now:
                old.undo()
                if id(old.tensor) in given:
                    self.tensors.recount(old.tensor)

    def _numbered(self, outs: list[object], given: dict[int, int]) -> dict[int, int]:
        """Every tensor among the results by its identity; one that was given keeps its number."""
        flat = [item for out in outs for item in (out if isinstance(out, list | tuple) else [out])]
        if len(flat) > opwire.LIST_ITEMS_MAX:
            raise OpRefusedError(f"the op gives {len(flat)} results, too many to be sent")
        fresh = {id(t): t for t in flat if isinstance(t, torch.Tensor) and id(t) not in given}
        return dict(zip(fresh, self.tensors.add_all(fresh.values()), strict=True)) | given

    def _encoded(self, out: object, numbers: dict[int, int]) -> opwire.ResultValue:
        if isinstance(out, list | tuple):
            return [self._encoded_item(item, numbers) for item in out]
        return self._encoded_item(out, numbers)

    def _encoded_item(self, item: object, numbers: dict[int, int]) -> opwire.ResultItem:
        if isinstance(item, torch.Tensor):
            return self.tensors.describe(numbers[id(item)])
        if isinstance(item, complex):
            return opwire.Complex(item.real, item.imag)
        if item is None or isinstance(item, bool | int | float):
            return item
        raise OpRefusedError(f"the result is a {type(item).__name__}, which the wire does not carry")


@dataclass(frozen=True)
class _Before:
    tensor: torch.Tensor
    look: _Look
    storage: torch.UntypedStorage
    storage_bytes: int

    @property
    def is_other_now(self) -> bool:
        storage = self.tensor.untyped_storage()
        return (
            _look(self.tensor) != self.look
            or storage._cdata != self.storage._cdata
            or storage.nbytes() != self.storage_bytes
        )

    def undo(self) -> None:
        """Shape and memory; what an op has written into it stays."""
        _, shape, stride, offset = self.look
        if self.storage.nbytes() != self.storage_bytes:
            self.storage.resize_(self.storage_bytes)
        self.tensor.set_(self.storage, offset, shape, stride)


def allowed(name: str) -> AllowedOp:
    """OpRefusedError, with the reason, when it may not run."""
    packet, _, overload = name.removeprefix("aten::").partition(".")
    if packet not in ALLOWED_OPS:
        raise OpRefusedError(f"{name} is not allowed on an executor")
    # Without a schema in the dispatcher it is unknown, or one of TorchScript's helpers.
    if not name.startswith("aten::") or not torch._C._dispatch_has_kernel(name):
        raise OpRefusedError(f"{name} is not an op of torch {torch.__version__}")
    call = getattr(getattr(torch.ops.aten, packet), overload or "default")
    arguments: dict[str, tuple[str, bool]] = {}
    for argument in call._schema.arguments:
        base, is_list = _unwrapped(str(argument.real_type))
        if base not in _ACCEPTED:
            raise OpRefusedError(f"{name} takes a {argument.real_type}, which the wire does not carry")
        arguments[argument.name] = (base, is_list)
    returns = call._schema.returns
    for returned in returns:
        if not _RETURNED.match(str(returned.type)):
            raise OpRefusedError(f"{name} returns a {returned.type}, which the wire does not carry")
    is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in returns)
    return AllowedOp(
        name=name,
        call=call,
        arguments=arguments,
        written=frozenset(
            a.name for a in call._schema.arguments if a.alias_info is not None and a.alias_info.is_write
        ),
        single=len(returns) == 1,
        sized=arguments.get("size") == ("int", True) and not is_view,
        unchecked_flag=_UNCHECKED_FLAG.get(packet, ""),
    )


def _unwrapped(declared: str) -> tuple[str, bool]:
    is_list = "List[" in declared
    return declared.replace("Optional[", "").replace("List[", "").rstrip("]"), is_list


def _check_arguments(op: AllowedOp, args: Sequence[object], kwargs: dict[str, object]) -> dict[str, object]:
    """Every argument by its name, once its type is what the op declares."""
    if len(args) > len(op.arguments):
        raise OpRefusedError(f"{op.name} takes {len(op.arguments)} arguments, not {len(args)}")
    named = dict(zip(op.arguments, args, strict=False))
    for name, value in kwargs.items():
        if name in named or name not in op.arguments:
            raise OpRefusedError(f"{op.name} has no argument {name!r}, or was given it twice")
        named[name] = value
    for name, value in named.items():
        base, is_list = op.arguments[name]
        items = value if isinstance(value, list) and is_list else [value]
        for item in items:
            if item is not None and not isinstance(item, _ACCEPTED[base]):
                raise OpRefusedError(
                    f"{op.name}: argument {name!r} is a {base}; a {type(item).__name__} cannot stand there"
                )
    return named


def _announced_bytes(named: dict[str, object]) -> int:
    size, dtype, source = named.get("size"), named.get("dtype"), named.get("self")
    if not isinstance(size, list) or not all(isinstance(item, int) for item in size):
        return 0
    if not isinstance(dtype, torch.dtype):
        dtype = source.dtype if isinstance(source, torch.Tensor) else torch.get_default_dtype()
    return max(0, math.prod(size)) * dtype.itemsize


def _look(tensor: torch.Tensor) -> _Look:
    return (tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()))
