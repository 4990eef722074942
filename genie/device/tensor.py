"""What the user holds: a tensor without local memory that stands for one on an executor.

Autograd, shapes and modules are torch's own; what reaches `__torch_dispatch__` are the ops below
them. Not for: carrying those out (calls.py, copies.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NoReturn

import torch

from genie.device.connection import ExecutorConnection
from genie.errors import OpRefusedError, ProtocolError
from genie.runtime import opwire

DTYPES: dict[opwire.DTypeName, torch.dtype] = {name: getattr(torch, name) for name in opwire.DTYPE_NAMES}
Dispatch = Callable[[Any, Sequence[Any], Mapping[str, Any]], Any]  # Any: whatever an op takes and gives


class RemoteHandle:
    """Keeps one tensor alive on its executor, for as long as this object lives here."""

    __slots__ = ("connection", "number")

    def __init__(self, connection: ExecutorConnection, number: int) -> None:
        self.connection = connection
        self.number = number

    def __del__(self) -> None:
        self.connection.free_later(self.number)


class RemoteTensor(torch.Tensor):
    """Made by `wrap` only. `remote_handle` may be shared by tensors that are the same on the executor."""

    remote_handle: RemoteHandle
    dispatch: ClassVar[Dispatch]
    """Set when the backend is registered."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def wrap(meta: opwire.TensorMeta, connection: ExecutorConnection) -> RemoteTensor:
        tensor = _shell(meta, connection.device_name)
        tensor.remote_handle = RemoteHandle(connection, meta.handle)
        return tensor

    def reshape_shell(self, meta: opwire.TensorMeta) -> None:
        """The executor has changed the tensor in place; this side follows."""
        assert meta.handle == self.remote_handle.number
        shell = _shell(meta, str(self.device))
        shell.remote_handle = self.remote_handle
        torch.Tensor.data.__set__(self, shell)  # type: ignore[attr-defined]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: object, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return cls.dispatch(func, args, kwargs or {})

    @property
    def data(self) -> torch.Tensor:
        return torch.Tensor.data.__get__(self)  # type: ignore[attr-defined,no-any-return]

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        torch.Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        if isinstance(value, RemoteTensor):
            self.remote_handle = value.remote_handle

    def tolist(self) -> Any:
        return self.detach().cpu().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        if not force:
            raise TypeError(f"a tensor on {self.device} cannot be a numpy array; call .cpu() first")
        return self.detach().cpu().numpy()

    def __dlpack__(self, **options: object) -> NoReturn:
        raise OpRefusedError(f"a tensor on {self.device} has no memory to share", hint="share tensor.cpu()")

    def __repr__(self) -> str:  # type: ignore[override]
        shown = repr(self.detach().cpu()).removesuffix(")")
        extra = f", device='{self.device}'"
        if self.grad_fn is not None:
            extra += f", grad_fn=<{type(self.grad_fn).__name__}>"
        elif self.requires_grad:
            extra += ", requires_grad=True"
        prefix = "Parameter containing:\n" if getattr(self, "_is_param", False) else ""
        return f"{prefix}{shown}{extra})"

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if self.dim() == 0 else object.__format__(self, spec)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        if not self.is_leaf:
            raise RuntimeError("only tensors that are graph leaves can be copied deeply; detach() it first")
        if id(self) in memo:
            return memo[id(self)]  # type: ignore[no-any-return]
        copied: torch.Tensor = self.detach().clone()
        if getattr(self, "_is_param", False):
            copied = torch.nn.Parameter(copied, requires_grad=self.requires_grad)
        copied.requires_grad_(self.requires_grad)
        if self.grad is not None:
            copied.grad = self.grad.detach().clone()
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise OpRefusedError(
            f"a tensor on {self.device} cannot be pickled or saved", hint="save a copy: tensor.cpu()"
        )


def _shell(meta: opwire.TensorMeta, device_name: str) -> RemoteTensor:
    if len(meta.shape) != len(meta.strides):
        raise ProtocolError(f"the executor described a tensor with {meta.shape} and {meta.strides}")
    shell: RemoteTensor = torch.Tensor._make_wrapper_subclass(
        RemoteTensor,
        meta.shape,
        strides=meta.strides,
        storage_offset=meta.offset,
        dtype=DTYPES[meta.dtype],
        device=torch.device(device_name),
    )
    if meta.conj:
        torch._C._set_conj(shell, True)
    if meta.neg:
        torch._C._set_neg(shell, True)
    return shell
