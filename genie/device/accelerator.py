"""`torch.remote_accelerator`: the module that torch and users expect of a device, like torch.cuda.

A device is an index, "remote_accelerator:1" or a torch.device; None is the current device, which is per
thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from genie.device import library, registry
from genie.errors import UsageError
from genie.native import genie_device

if TYPE_CHECKING:
    from genie.device.graphs import GraphReport
    from genie.native.genie_device import Connection

Device: TypeAlias = int | str | torch.device | None
_INDUCTOR_CODEGEN_NAMES = ("Scheduling", "PythonWrapperCodegen", "CppWrapperCodegen", "WrapperFxCodegen")


@dataclass(frozen=True)
class DeviceProperties:
    name: str
    total_memory: int
    """Bytes."""
    vendor: str
    node_id: str
    gpu_id: str


def device_count() -> int:
    return len(registry.device_slots())


def is_available() -> bool:
    return device_count() > 0


def is_initialized() -> bool:
    """Whether the C++ library is loaded; torch calls _lazy_init until it is."""
    return library.is_loaded()


def current_device() -> int:
    return genie_device.current_device() if is_initialized() else 0


def set_device(device: Device) -> None:
    """Set the current device of this thread, which device="remote_accelerator" without an index refers to."""
    index = registry.device_slot(_device_index(device)).index
    library.ensure_loaded()
    genie_device.set_device(index)


class device:  # noqa: N801 - torch.cuda.device has this name
    """Context manager that changes the current device of this thread."""

    def __init__(self, device: Device) -> None:
        self._index = _device_index(device)
        self._previous_index = 0

    def __enter__(self) -> None:
        self._previous_index = current_device()
        set_device(self._index)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        library.ensure_loaded()
        genie_device.set_device_unchecked(self._previous_index)


def synchronize(device: Device = None) -> None:
    """Wait until all ops sent to the device have completed."""
    _get_or_open_connection(device).synchronize()


def manual_seed(seed: int) -> None:
    registry.device_slot(current_device()).seed(seed % 2**64)


def manual_seed_all(seed: int) -> None:
    """torch.manual_seed calls this."""
    for slot in registry.device_slots():
        slot.seed(seed % 2**64)


def get_rng_state(device: Device = None) -> torch.Tensor:
    _get_or_open_connection(device)
    library.ensure_loaded()
    return genie_device.rng_state(_device_index(device))


def set_rng_state(new_state: torch.Tensor, device: Device = None) -> None:
    if new_state.dtype is not torch.uint8:
        raise UsageError(f"a generator state is a uint8 tensor, not {new_state.dtype}")
    _get_or_open_connection(device)
    library.ensure_loaded()
    genie_device.set_rng_state(_device_index(device), new_state.cpu().contiguous())


def get_device_name(device: Device = None) -> str:
    return get_device_properties(device).name


def get_device_properties(device: Device = None) -> DeviceProperties:
    """The properties that the cluster reports; opens no connection."""
    found = registry.device_slot(_device_index(device)).device
    return DeviceProperties(
        name=found.name,
        total_memory=found.memory_bytes,
        vendor=found.vendor,
        node_id=found.node_id,
        gpu_id=found.gpu_id,
    )


def memory_stats(device: Device = None) -> dict[str, int]:
    """The executor's counters of this session: bytes of storages, tensors, ops, quota (0: none)."""
    counters = _get_or_open_connection(device).fetch_executor_counters()
    return {
        "allocated_bytes.current": counters["bytes_allocated"],
        "allocated_bytes.peak": counters["bytes_allocated_peak"],
        "allocated_bytes.limit": counters["bytes_max"],
        "tensors": counters["tensors"],
        "ops": counters["ops"],
    }


def stream_stats(device: Device = None) -> dict[str, int]:
    """The client's counters: ops, frames and bytes sent, cached templates, resumed connections."""
    return _get_or_open_connection(device).client_counters()


def graph_reports(device: Device = None) -> list[GraphReport]:
    """How the graphs of this process on the device are replayed: captured ones and those of torch.compile."""
    from genie.device import graphs  # late: most programs have none

    _get_or_open_connection(device)
    return graphs.fetch_graph_reports_of_device(_device_index(device))


def memory_allocated(device: Device = None) -> int:
    return memory_stats(device)["allocated_bytes.current"]


def max_memory_allocated(device: Device = None) -> int:
    return memory_stats(device)["allocated_bytes.peak"]


def reset_peak_memory_stats(device: Device = None) -> None:
    """Reset what max_memory_allocated returns to the current value."""
    _get_or_open_connection(device).fetch_executor_counters(reset_peak=True)


def empty_cache() -> None:
    """Send pending frees, on every device in use."""
    for slot in registry.device_slots():
        connection = slot.connection_if_open
        if connection is not None:
            connection.synchronize()


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.float16, torch.bfloat16]


def __getattr__(name: str) -> Any:
    if name == "_initialized":  # torch.utils.checkpoint reads it before it saves RNG states
        return is_initialized()
    if name in _INDUCTOR_CODEGEN_NAMES:
        from genie.device import compiler  # late: it imports torch._dynamo

        return compiler.unsupported_inductor_codegen()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _lazy_init() -> None:
    """torch calls this before the first use of the device. Compiles nothing without a session."""
    if not registry.is_attached():
        raise registry.not_initialized_error()
    library.ensure_loaded()


def _is_in_bad_fork() -> bool:
    return False


def _exchange_device(index: int) -> int:
    """For torch: set the current device and return the previous one; a negative index changes nothing."""
    previous = current_device()
    library.ensure_loaded()
    genie_device.set_device_unchecked(index)
    return previous


_maybe_exchange_device = _exchange_device


class _utils:  # noqa: N801 - torch.load uses this name
    @staticmethod
    def _get_device_index(device: Device, optional: bool = False) -> int:
        """For torch.load: the device of a tensor that was saved on `device`."""
        return registry.device_slot(_device_index(device)).index


def _device_index(device: Device) -> int:
    if isinstance(device, int):
        return device
    if device is None:
        return current_device()
    parsed = torch.device(device)
    if parsed.type != registry.DEVICE_TYPE:
        raise UsageError(f"{parsed} is not a {registry.DEVICE_TYPE}")
    index: int | None = parsed.index
    return current_device() if index is None else index


def _get_or_open_connection(device: Device) -> Connection:
    return registry.device_slot(_device_index(device)).get_or_open_connection(first_seed=torch.initial_seed())
