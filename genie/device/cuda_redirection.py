"""Redirects code that names "cuda" to a remote accelerator: `with genie.device.as_cuda(): ...`.

Covers device names in calls of torch, `.cuda()`, the functions of torch.cuda that programs call around their
work, autocast, gradient scalers and torch.load. Tensors keep their real device: `x.device.type` is
"remote_accelerator", while `x.is_cuda` is true. Not covered: libraries that call CUDA themselves, CUDA
streams and graphs.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from genie.device import accelerator, registry
from genie.errors import UsageError

_CUDA = "cuda"
# Functions of torch.cuda that torch.remote_accelerator also has.
_SAME_FUNCTIONS = (
    "is_available",
    "is_initialized",
    "device_count",
    "current_device",
    "set_device",
    "synchronize",
    "manual_seed",
    "manual_seed_all",
    "get_rng_state",
    "set_rng_state",
    "get_device_name",
    "get_device_properties",
    "memory_allocated",
    "max_memory_allocated",
    "memory_stats",
    "reset_peak_memory_stats",
    "empty_cache",
)
_MODE_CLASSES = (torch.amp.autocast_mode.autocast, torch.amp.grad_scaler.GradScaler)
_IS_CUDA = torch.Tensor.is_cuda.__get__  # type: ignore[attr-defined]
_TORCH_GENERATOR = torch.Generator
_active: list[CudaRedirection] = []


class CudaRedirection:
    """Active from its creation until `stop()`, or the end of its `with` block. For this thread and, as far as
    functions of torch are replaced, for the process."""

    def __init__(self) -> None:
        if _active:
            raise UsageError("as_cuda() is active already")
        if torch.cuda.is_available():
            raise UsageError(
                "as_cuda() would hide the GPU of this machine",
                hint="hide it with CUDA_VISIBLE_DEVICES= if the program should use the remote accelerator",
            )
        self._undo = contextlib.ExitStack()
        with self._undo:
            self._undo.enter_context(_DeviceNames())
            self._undo.enter_context(_replaced_functions())
            self._undo = self._undo.pop_all()
        _active.append(self)

    def stop(self) -> None:
        """Undo the redirection. Safe to call again."""
        if self in _active:
            _active.remove(self)
            self._undo.close()

    def __enter__(self) -> CudaRedirection:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def as_cuda() -> CudaRedirection:
    """Redirect "cuda" and "cuda:N" to "remote_accelerator" and "remote_accelerator:N".

    Use it as a context manager, or call it once at the start of a program. UsageError if this process has a
    GPU of its own, or if the redirection is active already.
    """
    return CudaRedirection()


def redirect_name(name: str) -> str:
    """ "cuda:1" becomes "remote_accelerator:1"; all other names stay."""
    kind, colon, index = name.partition(":")
    return registry.DEVICE_TYPE + colon + index if kind == _CUDA else name


class _DeviceNames(TorchFunctionMode):
    """Replaces devices and their names in the arguments of every call of torch."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function is torch.Tensor.cuda:
            return _move_tensor(*args, **(kwargs or {}))
        if function == _IS_CUDA:  # another object with every access
            return args[0].device.type == registry.DEVICE_TYPE
        args = tuple(_redirect_argument(each) for each in args)
        kwargs = {name: _redirect_argument(each) for name, each in (kwargs or {}).items()}
        return function(*args, **kwargs)


def _redirect_argument(value: Any) -> Any:
    if isinstance(value, str):
        return redirect_name(value)
    if isinstance(value, torch.device) and value.type == _CUDA:
        return torch.device(redirect_name(str(value)))
    return value


def _remote_device(device: Any) -> torch.device:
    """The remote device that stands for an argument of `.cuda()`: an index, a device, its name or None."""
    if device is None:
        return torch.device(registry.DEVICE_TYPE, accelerator.current_device())
    if isinstance(device, int):
        return torch.device(registry.DEVICE_TYPE, device)
    return torch.device(_redirect_argument(device))


def _move_tensor(tensor: torch.Tensor, device: Any = None, non_blocking: bool = False, **options: Any) -> Any:
    return tensor.to(_remote_device(device), non_blocking=non_blocking, **options)


def _move_module(module: torch.nn.Module, device: Any = None) -> torch.nn.Module:
    return module.to(_remote_device(device))


@contextlib.contextmanager
def _replaced_functions() -> Iterator[None]:
    """What torch does not pass through a TorchFunctionMode."""
    with contextlib.ExitStack() as stack:

        def replace(owner: Any, name: str, value: Any) -> None:
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)

        for name in _SAME_FUNCTIONS:
            replace(torch.cuda, name, _with_redirected_arguments(getattr(accelerator, name)))
        replace(torch.cuda, "device", _CurrentDevice)
        replace(torch.cuda, "is_bf16_supported", lambda *_args, **_kwargs: True)
        replace(torch.nn.Module, "cuda", _move_module)
        replace(torch, "Generator", _Generator)
        replace(torch, "load", _with_redirected_arguments(torch.load))
        for mode in _MODE_CLASSES:
            replace(mode, "__init__", _with_redirected_arguments(mode.__init__))
        yield


class _CurrentDevice(accelerator.device):
    def __init__(self, device: Any) -> None:
        super().__init__(_redirect_argument(device))


class _GeneratorMeta(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _TORCH_GENERATOR)


class _Generator(metaclass=_GeneratorMeta):
    """Stands for torch.Generator, which is a class of C: creates generators of that class."""

    def __new__(cls, device: Any = "cpu") -> Any:
        return _TORCH_GENERATOR(_redirect_argument(device))


def _with_redirected_arguments(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function, updated=())
    def redirected(*args: Any, **kwargs: Any) -> Any:
        return function(
            *(_redirect_argument(each) for each in args),
            **{name: _redirect_argument(each) for name, each in kwargs.items()},
        )

    return redirected
