"""What torch's autograd engine needs to run backward on a device whose backend is written in Python.

Two things stand in its way. It keeps one thread per device index, and believes that a Python
backend has one index: so backward runs on the calling thread. And while an exception travels
through it, it asks the device guard for its type; that is a Python call, made with an error pending,
which would end the process: so the guard puts the error away, and the engine brings it back.
Not for: what the ops of a backward pass do (calls.py).
"""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import torch

from genie.device import roster

_fetch_error = ctypes.pythonapi.PyErr_Fetch
_fetch_error.restype = None
_restore_error = ctypes.pythonapi.PyErr_Restore
_restore_error.restype = None
_DEVICE_TYPE = torch._C._autograd.DeviceType.PrivateUse1


class _PutAway:
    """An error that was pending in this thread: three owned references, as PyErr_Fetch gives them."""

    __slots__ = ("caught", "kind", "out", "trace", "value")

    def __init__(self) -> None:
        self.kind, self.value, self.trace = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
        self.out = (ctypes.byref(self.kind), ctypes.byref(self.value), ctypes.byref(self.trace))
        self.caught: tuple[int | None, ...] | None = None


_here = threading.local()


class Guard(torch._C._acc.DeviceGuard):
    """torch's view of the current device of this backend."""

    def type_(self) -> Any:
        try:
            mine = _here.put_away
        except AttributeError:
            mine = _here.put_away = _PutAway()
        # The first call of all: with an error pending, any other would fail.
        _fetch_error(*mine.out)
        if mine.kind.value is not None:
            mine.caught = (mine.kind.value, mine.value.value, mine.trace.value)
        return _DEVICE_TYPE


class Engine(torch._C._ImperativeEngine):
    """Stands where torch keeps its engine; without remote devices in use it changes nothing."""

    def run_backward(self, *args: Any, **kwargs: Any) -> Any:
        if not roster.in_use():
            return super().run_backward(*args, **kwargs)
        if not hasattr(_here, "put_away"):
            _here.put_away = _PutAway()
        try:
            with torch.autograd.set_multithreading_enabled(False):
                return super().run_backward(*args, **kwargs)
        except SystemError:
            caught, _here.put_away.caught = _here.put_away.caught, None
            if caught is not None:
                _restore_error(*map(ctypes.c_void_p, caught))  # raises it
            raise


class Hooks(torch._C._acc.PrivateUse1Hooks):
    """torch asks these before it runs autograd on the device."""

    def is_available(self) -> bool:
        return bool(roster.slots())

    def has_primary_context(self, device_index: int) -> bool:
        return True

    def is_built(self) -> bool:
        return True
