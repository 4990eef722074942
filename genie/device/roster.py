"""Which remote accelerator is behind which device index, and the connection to each.

`attach` is cheap: it opens nothing and does not import torch. A connection is opened when its
index is used for the first time, and again when it is used after its executor was lost.
One roster per process, because torch has one device type of this name per process.
Not for: what travels over a connection (connection.py).
"""

from __future__ import annotations

import os
import ssl
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from genie.device import import_hook
from genie.device.connection import ExecutorConnection
from genie.errors import (
    AlreadyInitializedError,
    DeviceLostError,
    DeviceUnavailableError,
    NotInitializedError,
)

DEVICE_TYPE = "remote_accelerator"
OP_TIMEOUT_S = 600.0


@dataclass(frozen=True, kw_only=True)
class ExecutorAddress:
    """Where an executor listens and what to show it. `server_name` is checked against its certificate."""

    host: str
    port: int
    server_name: str
    ticket: str
    ssl_context: ssl.SSLContext | None = None
    """None: without TLS, on loopback only."""


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

    def __init__(self, index: int, device: RemoteDevice, *, op_timeout_s: float) -> None:
        self.index = index
        self.device = device
        self._op_timeout_s = op_timeout_s
        self._lock = threading.Lock()
        self._connection: ExecutorConnection | None = None
        self._seed: int | None = None
        self._closed = threading.Event()

    def connection(self, *, first_seed: int) -> ExecutorConnection:
        """The open connection. A new one is seeded with the last manual seed, or with `first_seed`."""
        current = self._connection
        if current is not None and not current.lost:
            return current
        with self._lock:
            if self._closed.is_set():
                raise _not_initialized()
            if self._connection is None or self._connection.lost:
                self._connection = self._open(first_seed)
            if self._closed.is_set():  # while it was being opened
                self._connection.close("the session was shut down")
                raise _not_initialized()
            return self._connection

    def seed(self, value: int) -> None:
        """Takes effect now when connected, else with the next connection."""
        self._seed = value
        current = self._connection
        if current is not None and not current.lost:
            try:
                current.seed(value)
            except DeviceLostError:
                pass  # the next use of the device opens a new connection, with this seed

    @property
    def used(self) -> bool:
        return self._connection is not None

    def synchronize_if_open(self) -> None:
        current = self._connection
        if current is not None and not current.lost:
            current.synchronize()

    def close(self) -> None:
        self._closed.set()
        if self._connection is not None:
            self._connection.close("the session was shut down")

    def forget_after_fork(self) -> None:
        """In the child: the connection belongs to the parent, and so does whoever could open another."""
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._closed.set()
        if self._connection is not None:
            self._connection.abandon("it was opened before this process was forked")

    def _open(self, first_seed: int) -> ExecutorConnection:
        address = self.device.open()
        where = f"{DEVICE_TYPE}:{self.index}"
        connection = ExecutorConnection.open(
            host=address.host,
            port=address.port,
            server_name=address.server_name,
            ticket=address.ticket,
            ssl_context=address.ssl_context,
            device_name=where,
            node_id=self.device.node_id,
            op_timeout_s=self._op_timeout_s,
        )
        connection.seed(first_seed if self._seed is None else self._seed)
        return connection


class _Roster:
    """None instead of slots: nothing is attached."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.slots: tuple[Slot, ...] | None = None


_roster = _Roster()


def attach(devices: Sequence[RemoteDevice], *, op_timeout_s: float = OP_TIMEOUT_S) -> None:
    """Makes `remote_accelerator:N` stand for devices[N]. Registers with torch now or when it is imported.

    `op_timeout_s` is how long one op may take before its executor counts as lost.
    """
    with _roster.lock:
        if _roster.slots is not None:
            raise AlreadyInitializedError("remote devices are attached already", hint="call genie.shutdown()")
        _roster.slots = tuple(Slot(i, device, op_timeout_s=op_timeout_s) for i, device in enumerate(devices))
    import_hook.install(_register)
    if "torch" in sys.modules:
        _register()


def detach() -> None:
    """Closes every connection; tensors that are left raise DeviceLostError. Safe to call again."""
    with _roster.lock:
        left, _roster.slots = slots(), None
    for each in left:
        each.close()


def slots() -> tuple[Slot, ...]:
    """Of every index; none without a session."""
    return _roster.slots or ()


def in_use() -> bool:
    """Whether a tensor may live on any of them."""
    return any(each.used for each in slots())


def slot(index: int) -> Slot:
    """NotInitializedError without a session, DeviceUnavailableError for an index that is not there."""
    current = _roster.slots
    if current is None:
        raise _not_initialized()
    if not current:
        raise DeviceUnavailableError(
            f"{DEVICE_TYPE}:{index}: the cluster has no accelerators", hint="see `genie nodes`"
        )
    if not 0 <= index < len(current):
        raise DeviceUnavailableError(
            f"{DEVICE_TYPE}:{index} does not exist: the cluster has {len(current)}, 0 to {len(current) - 1}"
        )
    return current[index]


def _not_initialized() -> NotInitializedError:
    return NotInitializedError(
        f"{DEVICE_TYPE} needs a session with a cluster", hint="call `await genie.init(...)` first"
    )


def _register() -> None:
    from genie.device import backend  # imports torch

    backend.register()


def _after_fork_in_child() -> None:
    """The child starts without devices, and may attach its own. Another thread may have held the lock."""
    _roster.lock = threading.Lock()
    left, _roster.slots = slots(), None
    for each in left:
        each.forget_after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
