"""Makes libraries that choose devices by name accept remote_accelerator.

Each adapter is installed when its library has been imported: torch.compile's backends, device meshes,
safetensors and accelerate. It changes nothing for other devices. Does not redirect code that names another
device (cuda_redirection.py).
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import torch

from genie.device import import_hook, registry

ACCELERATE_DEVICE_VARIABLE = "ACCELERATE_TORCH_DEVICE"
"""accelerate, and the Trainer of transformers, read the device from it."""


def install() -> None:
    """Call once, after the name of the device has been registered with torch."""
    _compile_remote_graphs_by_default()
    import_hook.call_after_import("torch._dynamo.backends.registry", _register_compile_backend)
    import_hook.call_after_import("torch.distributed.device_mesh", _accept_device_in_meshes)
    import_hook.call_after_import("safetensors", _load_safetensors_to_device)
    import_hook.call_after_import("accelerate.state", _warn_if_accelerate_selects_cpu)


def is_remote_device(device: object) -> bool:
    """Whether it is a device of this type, or its name."""
    if isinstance(device, torch.device):
        return device.type == registry.DEVICE_TYPE
    return isinstance(device, str) and device.partition(":")[0] == registry.DEVICE_TYPE


# --- torch.compile --------------------------------------------------------------------------------


def _register_compile_backend() -> None:
    """For backend="genie". Not by an entry point, which exists only where Genie is installed as a package."""
    from torch._dynamo.backends import registry as backends

    def genie(module: torch.fx.GraphModule, examples: Sequence[Any], **options: Any) -> Callable[..., Any]:
        from genie.device import compiler  # late: it imports torch._dynamo, which is being imported

        return compiler.genie(module, examples, **options)

    backends.register_backend(genie)


def _compile_remote_graphs_by_default() -> None:
    """torch.compile(model) compiles graphs with remote tensors on their executor."""
    wrapper: Any = torch._TorchCompileInductorWrapper
    compile_locally = wrapper.__call__

    @functools.wraps(compile_locally)
    def compile_graph(
        self: Any, module: torch.fx.GraphModule, examples: Sequence[Any], **options: Any
    ) -> Any:
        from genie.device import compiler

        if compiler.has_remote_tensors(module, examples):
            return compiler.compile_by_default(module, examples, self.config)
        return compile_locally(self, module, examples, **options)

    wrapper.__call__ = compile_graph


# --- device meshes --------------------------------------------------------------------------------


class _MeshDeviceType(str):
    """The name of the device, which has an underscore; torch requires letters, to reject an index."""

    __slots__ = ()

    def isalpha(self) -> bool:
        return True


def _accept_device_in_meshes() -> None:
    from torch.distributed import device_mesh

    make_mesh = device_mesh.init_device_mesh

    @functools.wraps(make_mesh)
    def init_device_mesh(device_type: str, *args: Any, **kwargs: Any) -> Any:
        if device_type == registry.DEVICE_TYPE:
            device_type = _MeshDeviceType(device_type)
        return make_mesh(device_type, *args, **kwargs)

    for name in ("torch.distributed.device_mesh", "torch.distributed", "torch.distributed.tensor"):
        module = sys.modules.get(name)
        if getattr(module, "init_device_mesh", None) is make_mesh:
            setattr(module, "init_device_mesh", init_device_mesh)  # noqa: B010 - mypy: a module


# --- safetensors ----------------------------------------------------------------------------------


class RemoteSafeOpen:
    """As safetensors.safe_open: reads tensors in host memory, and copies them to a remote device."""

    # Any: the file is an object of safetensors, which Genie does not depend on.
    def __init__(self, file: Any, device: str | torch.device) -> None:
        self._file = file
        self._device = torch.device(device)

    def __enter__(self) -> RemoteSafeOpen:
        self._file.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.__exit__(kind, error, trace)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def get_tensor(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._file.get_tensor(name)
        return tensor.to(self._device)

    def get_slice(self, name: str) -> RemoteSlice:
        return RemoteSlice(self._file.get_slice(name), self._device)


class RemoteSlice:
    """A part of a tensor in a file: indexing reads it and copies it to the device."""

    def __init__(self, file_slice: Any, device: torch.device) -> None:
        self._slice = file_slice
        self._device = device

    def __getitem__(self, index: Any) -> torch.Tensor:
        tensor: torch.Tensor = self._slice[index]
        return tensor.to(self._device)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._slice, name)


def _load_safetensors_to_device() -> None:
    """safetensors has a fixed list of device names; its other functions call safe_open."""
    open_file = sys.modules["safetensors"].safe_open

    @functools.wraps(open_file, updated=())
    def safe_open(
        filename: Any, framework: str = "pt", device: str | int | torch.device | None = "cpu", **options: Any
    ) -> Any:
        if device is not None and not isinstance(device, int) and is_remote_device(device):
            return RemoteSafeOpen(open_file(filename, framework=framework, device="cpu", **options), device)
        return open_file(filename, framework=framework, device=device, **options)

    for name in ("safetensors", "safetensors.torch"):
        module = sys.modules.get(name)
        if getattr(module, "safe_open", None) is open_file:
            setattr(module, "safe_open", safe_open)  # noqa: B010


# --- accelerate and transformers --------------------------------------------------------------------


def _warn_if_accelerate_selects_cpu() -> None:
    """accelerate has a fixed list of devices, and silently selects the CPU if none is present."""
    state = sys.modules["accelerate.state"].PartialState
    select = state.default_device.fget

    @functools.wraps(select)
    def default_device(self: Any) -> torch.device:
        selected: torch.device = select(self)
        if selected.type == "cpu" and registry.device_slots():
            warnings.warn(
                f"accelerate selects the CPU although the session has {registry.DEVICE_TYPE}:0; to use it, "
                f"set {ACCELERATE_DEVICE_VARIABLE}={registry.DEVICE_TYPE}:0 before accelerate is used, or "
                "run the program within genie.device.as_cuda()",
                stacklevel=2,
            )
        return selected

    state.default_device = property(default_device)
