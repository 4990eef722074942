"""`torch.remote_accelerator`: what torch and users expect of a device's module, like torch.cuda.

A device is an index, "remote_accelerator:1" or a torch.device; None is the current one, which each
thread chooses for itself. Not for: tensors and ops.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from genie.device import roster
from genie.errors import UsageError

if TYPE_CHECKING:
    from genie.device.graphs import GraphReport

Device: TypeAlias = int | str | torch.device | None
_INDUCTOR_PARTS = ("Scheduling", "PythonWrapperCodegen", "CppWrapperCodegen", "WrapperFxCodegen")


@dataclass(frozen=True)
class DeviceProperties:
    name: str
    total_memory: int
    """Bytes."""
    vendor: str
    node_id: str
    gpu_id: str


def device_count() -> int:
    return len(roster.slots())


def is_available() -> bool:
    return device_count() > 0


def is_initialized() -> bool:
    """Whether the library is loaded; torch calls _lazy_init until it is."""
    return bool(_backend().is_loaded())


def current_device() -> int:
    return int(_library().current_device()) if is_initialized() else 0


def set_device(device: Device) -> None:
    """For this thread: where a tensor goes with device="remote_accelerator" and no index."""
    index = roster.slot(_index(device)).index
    _library().set_device(index)


class device:  # noqa: N801 - torch.cuda.device has this name
    """Within the block, another device is the current one of this thread."""

    def __init__(self, device: Device) -> None:
        self._inside = _index(device)
        self._outside = 0

    def __enter__(self) -> None:
        self._outside = current_device()
        set_device(self._inside)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _library().set_device_unchecked(self._outside)


def synchronize(device: Device = None) -> None:
    """Returns when everything asked of the device has been done."""
    _connection(device).synchronize()


def manual_seed(seed: int) -> None:
    roster.slot(current_device()).seed(seed % 2**64)


def manual_seed_all(seed: int) -> None:
    """torch.manual_seed calls this."""
    for slot in roster.slots():
        slot.seed(seed % 2**64)


def get_rng_state(device: Device = None) -> torch.Tensor:
    _connection(device)
    return _library().rng_state(_index(device))  # type: ignore[no-any-return]


def set_rng_state(new_state: torch.Tensor, device: Device = None) -> None:
    if new_state.dtype is not torch.uint8:
        raise UsageError(f"a state of random numbers is a uint8 tensor, not {new_state.dtype}")
    _connection(device)
    _library().set_rng_state(_index(device), new_state.cpu().contiguous())


def get_device_name(device: Device = None) -> str:
    return get_device_properties(device).name


def get_device_properties(device: Device = None) -> DeviceProperties:
    """As the cluster reports them; opens no connection."""
    found = roster.slot(_index(device)).device
    return DeviceProperties(
        name=found.name,
        total_memory=found.memory_bytes,
        vendor=found.vendor,
        node_id=found.node_id,
        gpu_id=found.gpu_id,
    )


def memory_stats(device: Device = None) -> dict[str, int]:
    """What the executor counts for this session: bytes of storages, tensors, ops, quota (0 for none)."""
    counters = _connection(device).executor_counters()
    return {
        "allocated_bytes.current": counters["bytes_allocated"],
        "allocated_bytes.peak": counters["bytes_allocated_peak"],
        "allocated_bytes.limit": counters["bytes_max"],
        "tensors": counters["tensors"],
        "ops": counters["ops"],
    }


def stream_stats(device: Device = None) -> dict[str, int]:
    """What this side has counted: ops, frames and bytes sent, templates known, cuts survived."""
    return dict(_connection(device).client_counters())


def graph_reports(device: Device = None) -> list[GraphReport]:
    """How the graphs of this process on the device are replayed: captured ones and those of torch.compile."""
    from genie.device import graphs  # it imports this module

    _connection(device)
    return graphs.reports(_index(device))


def memory_allocated(device: Device = None) -> int:
    return memory_stats(device)["allocated_bytes.current"]


def max_memory_allocated(device: Device = None) -> int:
    return memory_stats(device)["allocated_bytes.peak"]


def reset_peak_memory_stats(device: Device = None) -> None:
    """From now on max_memory_allocated counts anew."""
    _connection(device).executor_counters(forget_peak=True)


def empty_cache() -> None:
    """Sends the frees that are due, on every device that is in use."""
    for slot in roster.slots():
        connection = slot.open_connection
        if connection is not None:
            connection.synchronize()


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.float16, torch.bfloat16]


def __getattr__(name: str) -> Any:
    if name == "_initialized":  # torch's checkpointing asks before it keeps the state of random numbers
        return is_initialized()
    if name in _INDUCTOR_PARTS:
        from genie.device import compiler  # it imports this module

        return compiler.inductor_part()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _lazy_init() -> None:
    """torch calls this before the device's first use. Without a session nothing is compiled."""
    if not roster.is_attached():
        raise roster.not_initialized()
    _library()


def _is_in_bad_fork() -> bool:
    return False


def _exchange_device(index: int) -> int:
    """For torch: makes `index` current and gives the old one; a negative one changes nothing."""
    before = current_device()
    _library().set_device_unchecked(index)
    return before


_maybe_exchange_device = _exchange_device


class _utils:  # noqa: N801 - torch.load looks for this name
    @staticmethod
    def _get_device_index(device: Device, optional: bool = False) -> int:
        """For torch.load: where a tensor that was saved on `device` goes."""
        return roster.slot(_index(device)).index


def _backend() -> Any:  # Any: a module; imported late, because it imports this one
    from genie.device import backend

    return backend


def _library() -> Any:
    return _backend().library()


def _index(device: Device) -> int:
    if isinstance(device, int):
        return device
    if device is None:
        return current_device()
    parsed = torch.device(device)
    if parsed.type != roster.DEVICE_TYPE:
        raise UsageError(f"{parsed} is not a {roster.DEVICE_TYPE}")
    index: int | None = parsed.index
    return current_device() if index is None else index


def _connection(device: Device) -> Any:
    return roster.slot(_index(device)).connection(first_seed=torch.initial_seed())
