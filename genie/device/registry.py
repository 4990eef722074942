"""Maps device indices to remote accelerators, and holds the connection of each.

`attach` is cheap: it opens no connection and does not import torch. A connection is opened when its index is
first used, and again at the next use after its executor was lost.
There is one registry per process, because torch has one device type of this name per process.
Does not implement connections (connection.py).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from genie.device.connection import ExecutorAddress, ExecutorLink, open_connection
from genie.errors import (
    AlreadyInitializedError,
    DeviceLostError,
    DeviceUnavailableError,
    NotInitializedError,
    UsageError,
)

if TYPE_CHECKING:
    from genie.native.genie_device import Connection

__all__ = [
    "DEVICE_TYPE",
    "DeviceSlot",
    "ExecutorAddress",
    "RemoteDevice",
    "attach",
    "detach",
    "device_slot",
    "device_slots",
    "extend",
]

DEVICE_TYPE = "remote_accelerator"
DEVICES_MAX = 127
"""torch stores a device index in a signed 8-bit integer."""
DEFAULT_OP_TIMEOUT_S = 600.0
_SHUTDOWN_REASON = "the session was shut down"


@dataclass(frozen=True, kw_only=True)
class RemoteDevice:
    """One accelerator of the cluster. `start_executor` blocks until an executor is ready, and may raise."""

    node_id: str
    gpu_id: str
    name: str
    memory_bytes: int
    vendor: str
    start_executor: Callable[[], ExecutorAddress]


class DeviceSlot:
    """One device index. Thread-safe."""

    def __init__(
        self, index: int, device: RemoteDevice, *, op_timeout_s: float, launch_blocking: bool
    ) -> None:
        self.index = index
        self.device = device
        self._op_timeout_s = op_timeout_s
        self._launch_blocking = launch_blocking
        self._lock = threading.Lock()
        self._connection: Connection | None = None
        self._executor_link: ExecutorLink | None = None
        self._manual_seed: int | None = None
        self._closed = threading.Event()

    def get_or_open_connection(self, *, first_seed: int) -> Connection:
        """Return the open connection, or open one, seeded with the last manual seed or else with
        `first_seed`."""
        current = self._connection
        if current is not None and not current.is_lost:
            return current
        with self._lock:
            if self._closed.is_set():
                raise not_initialized_error()
            if self._connection is None or self._connection.is_lost:
                self._connection = self._open_connection(first_seed)
            if self._closed.is_set():  # closed while the connection was being opened
                self._connection.close(_SHUTDOWN_REASON)
                raise not_initialized_error()
            return self._connection

    def seed(self, value: int) -> None:
        """Seed the default generator; without a connection, the next one starts with this seed."""
        self._manual_seed = value
        current = self.connection_if_open
        if current is not None:
            try:
                current.seed(value)
            except DeviceLostError:
                pass  # the next use of the device opens a new connection, with this seed

    @property
    def was_used(self) -> bool:
        return self._connection is not None

    @property
    def connection_if_open(self) -> Connection | None:
        """None if there is no connection or it is lost."""
        current = self._connection
        return None if current is None or current.is_lost else current

    def close(self) -> None:
        self._closed.set()
        if self._executor_link is not None:
            self._executor_link.stop_reconnecting()
        if self._connection is not None:
            self._connection.close(_SHUTDOWN_REASON)

    def disconnect_lost_executor(self, reason: str) -> None:
        """Close the connection because the executor is known to be lost: a frozen machine does not reset its
        connections. The next use opens a new connection. May block for seconds."""
        with self._lock:
            link, connection = self._executor_link, self._connection
        if link is not None and connection is not None and not connection.is_lost:
            link.stop_reconnecting()
            connection.close(reason)

    def disable_in_forked_child(self) -> None:
        """In a forked child: opening connections is left to the parent. The library abandons the open
        ones."""
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._closed.set()

    def _open_connection(self, first_seed: int) -> Connection:
        self._executor_link = ExecutorLink(
            self.device.start_executor(), self.device.node_id, resume_reply_timeout_s=self._op_timeout_s
        )
        connection = open_connection(
            self._executor_link,
            index=self.index,
            device_name=f"{DEVICE_TYPE}:{self.index}",
            op_timeout_s=self._op_timeout_s,
            launch_blocking=self._launch_blocking,
        )
        connection.seed(first_seed if self._manual_seed is None else self._manual_seed)
        return connection


class _DeviceRegistry:
    """`slots` is None while nothing is attached."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.slots: tuple[DeviceSlot, ...] | None = None
        self.op_timeout_s = DEFAULT_OP_TIMEOUT_S
        self.launch_blocking = False
        self.attach_callbacks: list[Callable[[], None]] = []
        self.change_callbacks: list[Callable[[], None]] = []

    def add_devices(self, devices: Sequence[RemoteDevice]) -> None:
        existing = self.slots or ()
        count = len(existing) + len(devices)
        if count > DEVICES_MAX:
            raise UsageError(f"cannot attach {count} devices: torch supports at most {DEVICES_MAX}")
        added = (
            DeviceSlot(index, device, op_timeout_s=self.op_timeout_s, launch_blocking=self.launch_blocking)
            for index, device in enumerate(devices, start=len(existing))
        )
        self.slots = (*existing, *added)


_registry = _DeviceRegistry()


def attach(
    devices: Sequence[RemoteDevice],
    *,
    op_timeout_s: float = DEFAULT_OP_TIMEOUT_S,
    launch_blocking: bool = False,
) -> None:
    """Make devices[N] available as `remote_accelerator:N`. Registers with torch now or when it is imported.

    An executor that does not reply for `op_timeout_s` counts as lost.
    With `launch_blocking`, every op waits for completion, so that its error is raised at the call.
    UsageError for more than DEVICES_MAX devices.
    """
    with _registry.lock:
        if _registry.slots is not None:
            raise AlreadyInitializedError("remote devices are already attached", hint="call genie.shutdown()")
        _registry.op_timeout_s, _registry.launch_blocking = op_timeout_s, launch_blocking
        _registry.add_devices(devices)
    for callback in _registry.attach_callbacks:
        callback()


def extend(devices: Sequence[RemoteDevice]) -> None:
    """Add devices under the next indices; existing indices do not change. No effect without a session."""
    with _registry.lock:
        if _registry.slots is None or not devices:
            return
        _registry.add_devices(devices)
    _run_change_callbacks()


def detach() -> None:
    """Close every connection; remaining tensors raise DeviceLostError. Idempotent."""
    with _registry.lock:
        detached, _registry.slots = device_slots(), None
    _run_change_callbacks()
    for each in detached:
        each.close()


def device_slots() -> tuple[DeviceSlot, ...]:
    """The slot of every index; empty without a session."""
    return _registry.slots or ()


def is_attached() -> bool:
    """Whether there is a session, possibly with a cluster that has no accelerators."""
    return _registry.slots is not None


def is_any_device_used() -> bool:
    """Whether a tensor may exist on any device."""
    return any(each.was_used for each in device_slots())


def device_slot(index: int) -> DeviceSlot:
    """NotInitializedError without a session, DeviceUnavailableError for an unknown index."""
    current = _registry.slots
    if current is None:
        raise not_initialized_error()
    if not current:
        raise DeviceUnavailableError(
            f"{DEVICE_TYPE}:{index}: the cluster has no accelerators", hint="run `genie nodes` to see why"
        )
    if not 0 <= index < len(current):
        raise DeviceUnavailableError(
            f"{DEVICE_TYPE}:{index} does not exist: the cluster has {_format_devices(len(current))}",
            hint="'genie nodes' lists them",
        )
    return current[index]


def _format_devices(count: int) -> str:
    if count == 1:
        return f"one device: {DEVICE_TYPE}:0"
    return f"{count} devices: {DEVICE_TYPE}:0 to {DEVICE_TYPE}:{count - 1}"


def not_initialized_error() -> NotInitializedError:
    return NotInitializedError(
        f"{DEVICE_TYPE} needs a session with a cluster",
        hint="call 'await genie.init(...)' or 'genie.connect(...)' first",
    )


def on_attach(callback: Callable[[], None]) -> None:
    """Call `callback` after each attach()."""
    _registry.attach_callbacks.append(callback)


def on_change_after_attach(callback: Callable[[], None]) -> None:
    """Call `callback` when indices are added or removed after attach(), and in a forked child."""
    _registry.change_callbacks.append(callback)


def _run_change_callbacks() -> None:
    for callback in _registry.change_callbacks:
        callback()


def _detach_in_forked_child() -> None:
    """A child starts without devices, and may attach its own. Another thread may have held the lock."""
    _registry.lock = threading.Lock()
    inherited, _registry.slots = device_slots(), None
    for each in inherited:
        each.disable_in_forked_child()
    _run_change_callbacks()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_detach_in_forked_child)
