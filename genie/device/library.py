"""Loads the C++ library of the device (genie_device), and passes it the device indices of the registry.

It is loaded at the first use of a device, or at registration if it is compiled already.
Does not register the device's name with torch (backend.py).
"""

from __future__ import annotations

import logging
import threading

import torch

from genie.device import registry
from genie.native import genie_device, libraries

_log = logging.getLogger(__name__)
_LOCAL_ACCELERATOR_TYPES = ("cuda", "xpu", "mps")


def ensure_loaded() -> None:
    """Load the library, and compile it first if needed. NativeBuildError states what is missing for that."""
    if not _state.is_loaded:
        with _state.lock:
            if not _state.is_loaded:
                _load()
        update_devices_from_registry()


def load_if_built() -> None:
    """Load the library unless it would have to be compiled."""
    with _state.lock:
        if not _state.is_loaded and libraries.BuildCache.of_this_installation().is_built("genie_device"):
            _load()


def is_loaded() -> bool:
    return _state.is_loaded


def update_devices_from_registry() -> None:
    """Make the library's device indices those of the registry."""
    if not _state.is_loaded:
        return
    if registry.is_attached():
        genie_device.attach_devices(len(registry.device_slots()), get_or_open_connection)
    else:
        genie_device.detach_devices()


def has_local_accelerator() -> bool:
    """Whether this process has a local accelerator. Counts devices only, which does not initialise a driver
    where the driver allows that: the program may want to fork."""
    return any(torch.get_device_module(kind).device_count() > 0 for kind in _LOCAL_ACCELERATOR_TYPES)


def keeps_local_torch_accelerator() -> bool:
    """Whether a local accelerator remains `torch.accelerator` in addition to the remote device."""
    return _state.keeps_local_torch_accelerator


def get_or_open_connection(index: int) -> genie_device.Connection:
    """The library calls this at the first use of an index, and after its executor was lost."""
    return registry.device_slot(index).get_or_open_connection(first_seed=torch.initial_seed())


class _LibraryState:
    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.is_loaded = False
        self.keeps_local_torch_accelerator = False


_state = _LibraryState()


def _load() -> None:
    libraries.load("genie_device")
    # Shape inference: torch's C++ meta functions cover most ops, these Python ones the rest.
    import torch._meta_registrations

    genie_device.register_kernels()
    if any(torch.get_device_module(kind).is_available() for kind in _LOCAL_ACCELERATOR_TYPES):
        _state.keeps_local_torch_accelerator = genie_device.try_keep_local_torch_accelerator()
        if not _state.keeps_local_torch_accelerator:
            _log.warning("backward passes on this machine's own GPU will fail while Genie is in use")
    _state.is_loaded = True


registry.on_change_after_attach(update_devices_from_registry)
