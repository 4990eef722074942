"""Ops that move data between this process and an executor, or between two executors.

Between two executors the data goes through this process. Not for: ops inside one executor (calls.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from genie.device import calls
from genie.device.connection import ExecutorConnection
from genie.device.tensor import RemoteTensor
from genie.runtime import opwire

_aten = torch.ops.aten


def to_copy(source: torch.Tensor, **options: Any) -> torch.Tensor:
    """aten::_to_copy of a remote tensor: another dtype, another device, or both."""
    device = options.pop("device", None)
    options.pop("non_blocking", None)
    options.pop("pin_memory", None)
    wanted = {name: value for name, value in options.items() if value is not None}
    if device is None or device == source.device:
        result: torch.Tensor = calls.run(_aten._to_copy.default, [source], wanted)
        return result
    wanted.pop("layout", None)
    return download(source).to(device=device, **wanted)


def copy_(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """aten::copy_ where at least one side is remote."""
    if isinstance(source, RemoteTensor):
        if isinstance(target, RemoteTensor) and _connection(source) is _connection(target):
            calls.run(_aten.copy_.default, [target, source], {})
            return target
        source = download(source)
    if isinstance(target, RemoteTensor):
        _write(target, source)
    else:
        target.copy_(source)
    return target


def download(source: torch.Tensor) -> torch.Tensor:
    """A CPU tensor of the same values, with the strides that a copy to the CPU has elsewhere in torch."""
    assert isinstance(source, RemoteTensor)
    result = torch.empty_like(skeleton(source), device="cpu")
    handle = source.remote_handle
    handle.connection.check_alive()
    if result.numel() == 0:
        return result
    plain = result if result.is_contiguous() else torch.empty(source.shape, dtype=source.dtype)
    content = opwire.Content(dtype=calls.dtype_name(source), shape=tuple(source.shape))
    handle.connection.download(handle.number, content, calls.memory_of(plain))
    return result if plain is result else result.copy_(plain)


def skeleton(tensor: torch.Tensor) -> torch.Tensor:
    """The shape and strides of a tensor without its data."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def made_elsewhere(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """An op that only takes a tensor's looks (zeros_like, new_empty) and makes another on another device."""

    def bare(value: Any) -> Any:
        return skeleton(value) if isinstance(value, RemoteTensor) else value

    return func(*[bare(value) for value in args], **{name: bare(value) for name, value in kwargs.items()})


def _write(target: RemoteTensor, source: torch.Tensor) -> None:
    plain = source.detach().to(device="cpu", dtype=target.dtype)
    plain = plain.resolve_conj().resolve_neg().contiguous()
    home = _connection(target)
    home.check_alive()
    if plain.shape == target.shape and plain.numel() > 0:
        calls.fill(target, plain)
    elif plain.shape != target.shape:  # broadcast over there, not before sending
        calls.run(_aten.copy_.default, [target, calls.send(plain, home)], {})


def _connection(tensor: RemoteTensor) -> ExecutorConnection:
    return tensor.remote_handle.connection
