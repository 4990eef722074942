"""Which remote accelerator is behind which device index, and the connection to each.

`attach` is cheap: it opens nothing and does not import torch. A connection is opened when its
index is used for the first time, and again when it is used after its executor was lost.
One roster per process, because torch has one device type of this name per process.
Not for: what travels over a connection (connection.py).
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from genie.device.connection import ExecutorAddress, ExecutorLink, open_connection
from genie.errors import (
    AlreadyInitializedError,
    DeviceLostError,
    DeviceUnavailableError,
    NotInitializedError,
    UsageError,
)

__all__ = [
    "DEVICE_TYPE",
    "ExecutorAddress",
    "RemoteDevice",
    "Slot",
    "attach",
    "detach",
    "extend",
    "slot",
    "slots",
]

DEVICE_TYPE = "remote_accelerator"
DEVICES_MAX = 127
"""torch keeps their number, like an index, in eight bits with a sign."""
OP_TIMEOUT_S = 600.0
_SHUT_DOWN = "the session was shut down"


@dataclass(frozen=True, kw_only=True)
class RemoteDevice:
    """One accelerator of the cluster. `open` blocks until an executor on it is ready, and may raise."""

    node_id: str
    gpu_id: str
    name: str
    memory_bytes: int
    vendor: str
    open: Callable[[], ExecutorAddress]


class Slot:
    """One device index. Safe for several threads."""

    def __init__(
        self, index: int, device: RemoteDevice, *, op_timeout_s: float, launch_blocking: bool
    ) -> None:
        self.index = index
        self.device = device
        self._op_timeout_s = op_timeout_s
        self._launch_blocking = launch_blocking
        self._lock = threading.Lock()
        self._connection: Any = None  # Any: of the library, which is compiled
        self._link: ExecutorLink | None = None
        self._seed: int | None = None
        self._closed = threading.Event()

    def connection(self, *, first_seed: int) -> Any:
        """The open connection. A new one is seeded with the last manual seed, or with `first_seed`."""
        current = self._connection
        if current is not None and not current.lost:
            return current
        with self._lock:
            if self._closed.is_set():
                raise not_initialized()
            if self._connection is None or self._connection.lost:
                self._connection = self._open(first_seed)
            if self._closed.is_set():  # while it was being opened
                self._connection.close(_SHUT_DOWN)
                raise not_initialized()
            return self._connection

    def seed(self, value: int) -> None:
        """Takes effect now when connected, else with the next connection."""
        self._seed = value
        current = self.open_connection
        if current is not None:
            try:
                current.seed(value)
            except DeviceLostError:
                pass  # the next use of the device opens a new connection, with this seed

    @property
    def used(self) -> bool:
        return self._connection is not None

    @property
    def open_connection(self) -> Any:
        """None when there is none, or it is lost."""
        current = self._connection
        return None if current is None or current.lost else current

    def close(self) -> None:
        self._closed.set()
        if self._link is not None:
            self._link.stop()
        if self._connection is not None:
            self._connection.close(_SHUT_DOWN)

    def lose(self, reason: str) -> None:
        """Its executor is gone for good, though its connection may not show that: a machine that stands still
        says nothing. The next use opens another. May take seconds."""
        with self._lock:
            link, connection = self._link, self._connection
        if link is not None and connection is not None and not connection.lost:
            link.stop()
            connection.close(reason)

    def forget_after_fork(self) -> None:
        """In the child: whoever could open a connection is the parent's. So are the connections that are
        open, which the library has seen to."""
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._closed.set()

    def _open(self, first_seed: int) -> Any:
        self._link = ExecutorLink(self.device.open(), self.device.node_id, busy_s=self._op_timeout_s)
        connection = open_connection(
            self._link,
            index=self.index,
            device_name=f"{DEVICE_TYPE}:{self.index}",
            op_timeout_s=self._op_timeout_s,
            launch_blocking=self._launch_blocking,
        )
        connection.seed(first_seed if self._seed is None else self._seed)
        return connection


class _Roster:
    """None instead of slots: nothing is attached."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.slots: tuple[Slot, ...] | None = None
        self.op_timeout_s = OP_TIMEOUT_S
        self.launch_blocking = False

    def add(self, devices: Sequence[RemoteDevice]) -> None:
        there = self.slots or ()
        if len(there) + len(devices) > DEVICES_MAX:
            raise UsageError(f"{len(there) + len(devices)} devices: torch counts {DEVICES_MAX} at most")
        more = (
            Slot(index, device, op_timeout_s=self.op_timeout_s, launch_blocking=self.launch_blocking)
            for index, device in enumerate(devices, start=len(there))
        )
        self.slots = (*there, *more)


_roster = _Roster()


def attach(
    devices: Sequence[RemoteDevice], *, op_timeout_s: float = OP_TIMEOUT_S, launch_blocking: bool = False
) -> None:
    """Makes `remote_accelerator:N` stand for devices[N]. Registers with torch now or when it is imported.

    `op_timeout_s` is how long an executor may be silent while its answer is due before it counts as lost.
    With `launch_blocking` every op is waited for, and its error raised where it was called.
    UsageError for more than DEVICES_MAX of them.
    """
    with _roster.lock:
        if _roster.slots is not None:
            raise AlreadyInitializedError("remote devices are attached already", hint="call genie.shutdown()")
        _roster.op_timeout_s, _roster.launch_blocking = op_timeout_s, launch_blocking
        _roster.add(devices)
    if sys.modules.get("torch") is not None:  # else genie/__init__.py has seen to it
        from genie.device import backend

        backend.register()


def extend(devices: Sequence[RemoteDevice]) -> None:
    """More of them, under the next indices; those that are there stay. Nothing without a session."""
    with _roster.lock:
        if _roster.slots is None or not devices:
            return
        _roster.add(devices)
    _tell_library()


def detach() -> None:
    """Closes every connection; tensors that are left raise DeviceLostError. Safe to call again."""
    with _roster.lock:
        left, _roster.slots = slots(), None
    _tell_library()
    for each in left:
        each.close()


def slots() -> tuple[Slot, ...]:
    """Of every index; none without a session."""
    return _roster.slots or ()


def is_attached() -> bool:
    """Whether there is a session, be it with a cluster that has no accelerators."""
    return _roster.slots is not None


def in_use() -> bool:
    """Whether a tensor may live on any of them."""
    return any(each.used for each in slots())


def slot(index: int) -> Slot:
    """NotInitializedError without a session, DeviceUnavailableError for an index that is not there."""
    current = _roster.slots
    if current is None:
        raise not_initialized()
    if not current:
        raise DeviceUnavailableError(
            f"{DEVICE_TYPE}:{index}: the cluster has no accelerators", hint="see `genie nodes`"
        )
    if not 0 <= index < len(current):
        raise DeviceUnavailableError(
            f"{DEVICE_TYPE}:{index} does not exist: the cluster has {len(current)}, 0 to {len(current) - 1}"
        )
    return current[index]


def not_initialized() -> NotInitializedError:
    return NotInitializedError(
        f"{DEVICE_TYPE} needs a session with a cluster", hint="call `await genie.init(...)` first"
    )


def _tell_library() -> None:
    """Which indices there are now. Nothing to do before torch is there, or while it comes: the last thing
    that does is to look here."""
    follow = getattr(sys.modules.get("genie.device.backend"), "follow_roster", None)
    if follow is not None:
        follow()


def _after_fork_in_child() -> None:
    """The child starts without devices, and may attach its own. Another thread may have held the lock."""
    _roster.lock = threading.Lock()
    left, _roster.slots = slots(), None
    for each in left:
        each.forget_after_fork()
    _tell_library()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
