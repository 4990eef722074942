"""One op: its arguments become a message, the answer becomes tensors.

All tensors of a call live on one executor. A CPU tensor may come along where CUDA takes one:
without dimensions, or as an index. Not for: ops that move data between devices (copies.py).
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from genie.device.connection import ExecutorConnection
from genie.device.tensor import DTYPES, RemoteTensor
from genie.errors import OpRefusedError, ProtocolError
from genie.runtime import opwire

DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

_MEMORY_FORMATS: dict[torch.memory_format, opwire.MemoryFormat] = {
    torch.contiguous_format: opwire.MemoryFormat("contiguous_format"),
    torch.preserve_format: opwire.MemoryFormat("preserve_format"),
    torch.channels_last: opwire.MemoryFormat("channels_last"),
    torch.channels_last_3d: opwire.MemoryFormat("channels_last_3d"),
}
_TAKES_CPU_INDEX = frozenset(
    ("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put")
)


@dataclass
class Call:
    """Encodes the arguments of one op for one executor, and remembers which tensors it was given."""

    op: str
    home: ExecutorConnection
    takes_cpu: bool = False
    given: dict[int, RemoteTensor] = field(default_factory=dict)
    kept: list[RemoteTensor] = field(default_factory=list)
    """Uploaded for this call only: alive until it is answered."""

    def encode(self, value: Any) -> opwire.Value:
        """OpRefusedError for what the wire does not carry."""
        if isinstance(value, list | tuple):
            if len(value) > opwire.LIST_ITEMS_MAX:
                raise OpRefusedError(f"{self.op}: a list of {len(value)} is too long to be sent")
            return [self._item(item) for item in value]
        return self._item(value)

    def _item(self, value: Any) -> opwire.Item:
        match value:
            case RemoteTensor():
                self.given.setdefault(value.remote_handle.number, value)
                return opwire.Handle(value.remote_handle.number)
            case None | bool() | int() | float():
                return value
            case str() if len(value) <= opwire.TEXT_CHARACTERS_MAX:
                return value
            case torch.Tensor():
                return self._local(value)
            case complex():
                return opwire.Complex(value.real, value.imag)
            case torch.dtype() if value in DTYPE_NAMES:
                return opwire.DType(DTYPE_NAMES[value])
            case torch.device() if str(value) == self.home.device_name:
                return opwire.OwnDevice()
            case torch.layout() if value is torch.strided:
                return opwire.Layout("strided")
            case torch.memory_format():
                return _MEMORY_FORMATS[value]
        shown = repr(value) if isinstance(value, torch.dtype | torch.layout) else type(value).__name__
        raise OpRefusedError(f"{self.op}: {shown} cannot be sent to {self.home.device_name}")

    def _local(self, tensor: torch.Tensor) -> opwire.Item:
        if tensor.device.type != "cpu" or not (tensor.dim() == 0 or self.takes_cpu):
            raise _two_devices(self.op, self.home.device_name, str(tensor.device))
        plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
        memory = memory_of(plain)
        if len(memory) <= opwire.INLINE_BYTES_MAX:
            return opwire.Inline(dtype=dtype_name(plain), shape=tuple(plain.shape), data=bytes(memory))
        self.kept.append(send(plain, self.home))
        return opwire.Handle(self.kept[-1].remote_handle.number)


def run(
    func: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    home: ExecutorConnection | None = None,
) -> Any:
    """Runs an op where its tensors live, or at `home` for an op that is given none."""
    op: str = func.name()
    if not op.startswith("aten::"):
        raise OpRefusedError(f"{op} is not an op of torch itself, and executors run no others")
    call = Call(op, home or _home_of(op, args, kwargs))
    if func._schema.is_mutable:
        _check_written(func, args, kwargs, call.home)
    call.takes_cpu = op.removeprefix("aten::").partition(".")[0] in _TAKES_CPU_INDEX
    request = opwire.RunOp(
        op=op,
        args=[call.encode(value) for value in args],
        kwargs={name: call.encode(value) for name, value in kwargs.items()},
    )
    result = call.home.run(request)
    for meta in result.changed:
        if meta.handle in call.given:
            call.given[meta.handle].reshape_shell(meta)
    returns = len(func._schema.returns)
    if len(result.values) != returns:
        raise ProtocolError(f"{op} returns {returns} values; the executor sent {len(result.values)}")
    values = tuple(_decoded(value, call) for value in result.values)
    return values if returns > 1 else values[0] if values else None


def send(plain: torch.Tensor, home: ExecutorConnection) -> RemoteTensor:
    """A contiguous CPU tensor, as a new tensor at `home`."""
    options = {"dtype": plain.dtype, "device": torch.device(home.device_name)}
    made: RemoteTensor = run(torch.ops.aten.empty.memory_format, [list(plain.shape)], options, home=home)
    fill(made, plain)
    return made


def fill(target: RemoteTensor, plain: torch.Tensor) -> None:
    """Writes a contiguous CPU tensor over a remote one of the same dtype and shape."""
    handle = target.remote_handle
    request = opwire.Upload(handle=handle.number, dtype=dtype_name(plain), shape=tuple(plain.shape))
    handle.connection.upload(request, memory_of(plain))


def memory_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, not copied. The tensor must outlive the view."""
    size = tensor.numel() * tensor.element_size()
    if size == 0:
        return memoryview(b"")
    return memoryview((ctypes.c_ubyte * size).from_address(tensor.data_ptr())).cast("B")


def dtype_name(tensor: torch.Tensor) -> opwire.DTypeName:
    """OpRefusedError for a dtype that the wire does not carry."""
    try:
        return DTYPE_NAMES[tensor.dtype]
    except KeyError:
        raise OpRefusedError(f"tensors of {tensor.dtype} cannot be sent to a remote device") from None


def _decoded(value: opwire.ResultValue, call: Call) -> Any:
    match value:
        case opwire.TensorMeta():
            given = call.given.get(value.handle)
            return RemoteTensor.wrap(value, call.home) if given is None else given
        case opwire.Complex():
            return complex(value.real, value.imag)
        case list():
            return [_decoded(item, call) for item in value]
    return value


def remote_tensors(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[RemoteTensor]:
    for value in (*args, *kwargs.values()):
        for item in value if isinstance(value, list | tuple) else (value,):
            if isinstance(item, RemoteTensor):
                yield item


def _home_of(op: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> ExecutorConnection:
    home: ExecutorConnection | None = None
    for tensor in remote_tensors(args, kwargs):
        connection = tensor.remote_handle.connection
        connection.check_alive()
        if home is None:
            home = connection
        elif connection is not home:
            raise _two_devices(op, home.device_name, connection.device_name)
    assert home is not None, "dispatched without a remote tensor"
    return home


def _check_written(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], home: ExecutorConnection
) -> None:
    """A local tensor may be read, but what is written over there would never come back into it."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        for item in value if isinstance(value, list | tuple) else (value,):
            if isinstance(item, torch.Tensor) and not isinstance(item, RemoteTensor):
                raise _two_devices(func.name(), home.device_name, str(item.device))


def _two_devices(op: str, one: str, other: str) -> OpRefusedError:
    return OpRefusedError(
        f"{op}: expected all tensors to be on one device, but found {one} and {other}",
        hint="move them together with .to(device)",
    )
