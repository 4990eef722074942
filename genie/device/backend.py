"""Tells torch about the device: its name, its module, its factories, and where its ops go.

Registration is once per process and stays: torch cannot forget a device. Without a session the
device then says what is missing. Not for: what the ops do (calls.py, copies.py).
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch.utils import backend_registration

from genie.device import accelerator, autograd, calls, copies, roster
from genie.device.tensor import RemoteTensor
from genie.errors import OpRefusedError

_log = logging.getLogger(__name__)
_aten = torch.ops.aten

# They make tensors from nothing, so torch finds the device by their argument, not by a tensor.
_FACTORIES = (
    "arange", "bartlett_window", "blackman_window", "empty", "empty_permuted", "empty_strided", "eye", "full",
    "hamming_window", "hann_window", "kaiser_window", "linspace", "logspace", "ones", "rand", "randint",
    "randn", "randperm", "range", "scalar_tensor", "tril_indices", "triu_indices", "zeros",
)  # fmt: skip


def register() -> None:
    """Safe to call again, from any thread.

    torch has room for one device from outside. Where another package has taken it, ours is left out
    and the log says so; the rest of Genie works.
    """
    with _state.lock:
        taken_by = torch._C._get_privateuse1_backend_name()
        if taken_by == roster.DEVICE_TYPE:
            return
        if taken_by != "privateuseone":
            _log.warning("there is no %s: torch's place for it is taken by %s", roster.DEVICE_TYPE, taken_by)
            return
        _register_once()


class _State:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        # torch keeps no reference to these, and calls them for the life of the process.
        self.kept: list[object] = []


_state = _State()


def _register_once() -> None:
    backend_registration.rename_privateuse1_backend(roster.DEVICE_TYPE)
    torch._register_device_module(roster.DEVICE_TYPE, accelerator)  # type: ignore[no-untyped-call]
    backend_registration.generate_methods_for_privateuse1_backend()
    hooks, guard = autograd.Hooks(), autograd.Guard()
    torch._C._acc.register_python_privateuseone_hook(hooks)
    torch._C._acc.register_python_privateuseone_device_guard(guard)
    torch.autograd.Variable._execution_engine = autograd.Engine()
    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    for packet in _FACTORIES:
        for func in _factory_overloads(packet):
            library.impl(func, functools.partial(_make, func), "PrivateUse1")
    # Only ever a cheaper form of zeros.
    library.impl("_efficientzerotensor", torch.zeros, "PrivateUse1")
    # torch.tensor(..., device=) comes here past __torch_dispatch__.
    library.impl("copy_", copies.copy_, "PrivateUse1")
    _state.kept = [hooks, guard, library]
    RemoteTensor.dispatch = staticmethod(dispatch)


def dispatch(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Every op that has a remote tensor among its arguments, below autograd."""
    special = _SPECIAL.get(func)
    if special is not None:
        return special(*args, **kwargs)
    device = kwargs.get("device")
    if device is not None and device != _device_of(args, kwargs):
        return copies.made_elsewhere(func, args, kwargs)
    return calls.run(func, args, _without_pinning(func, kwargs))


def _make(func: Any, *args: Any, **kwargs: Any) -> Any:
    device = kwargs["device"]
    index = accelerator.current_device() if device.index is None else device.index
    home = roster.slot(index).connection(first_seed=torch.initial_seed())
    kwargs["device"] = torch.device(roster.DEVICE_TYPE, index)
    return calls.run(func, args, _without_pinning(func, kwargs), home=home)


def _device_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.device | None:
    return next((tensor.device for tensor in calls.remote_tensors(args, kwargs)), None)


def _without_pinning(func: Any, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    if kwargs.get("pin_memory"):
        raise OpRefusedError(f"{func.name()}: memory on a remote device cannot be pinned")
    return {name: value for name, value in kwargs.items() if name != "pin_memory"}


def _factory_overloads(packet: str) -> list[Any]:
    found = [getattr(getattr(_aten, packet), name) for name in getattr(_aten, packet).overloads()]
    return [
        func
        for func in found
        if any(argument.name == "device" for argument in func._schema.arguments)
        and not any("Tensor" in str(argument.type) for argument in func._schema.arguments)
    ]


def _refuse_pinning(tensor: torch.Tensor, device: object = None) -> NoReturn:
    raise OpRefusedError(f"a tensor on {tensor.device} cannot be pinned: it has no memory here")


_SPECIAL: dict[Any, Callable[..., Any]] = {
    _aten._to_copy.default: copies.to_copy,
    _aten.copy_.default: copies.copy_,
    _aten.is_pinned.default: lambda tensor, device=None: False,
    _aten._pin_memory.default: _refuse_pinning,
}
