"""Tells torch about the device: its name, its module, and the library that carries its ops.

Registration is once per process and stays: torch cannot forget a device. `import genie` brings the
name and the module, which say what is missing without a session. The session brings the library: it is
loaded here when it is built already, else compiled when the device is first used.
Not for: what the ops do (native/torch/device).
"""

from __future__ import annotations

import logging
import sys
import threading
from types import ModuleType
from typing import Any

import torch
from torch.utils import backend_registration

from genie.device import accelerator, roster
from genie.runtime import native

_log = logging.getLogger(__name__)
_OWN_KINDS = ("cuda", "xpu", "mps")


def register() -> None:
    """What is due: the name without a session, all of it with one. Safe to call again, from any thread.

    torch has room for one device from outside. Where another package has taken it, ours is left out
    and the log says so; the rest of Genie works.
    """
    with _state.lock:
        taken_by = torch._C._get_privateuse1_backend_name()
        session = roster.is_attached()
        if taken_by not in ("privateuseone", roster.DEVICE_TYPE):
            level = logging.WARNING if session else logging.DEBUG
            _log.log(
                level, "there is no %s: torch's place for it is taken by %s", roster.DEVICE_TYPE, taken_by
            )
            return
        if taken_by != roster.DEVICE_TYPE:
            if not session and _has_own_accelerator():
                return  # the name alone would break backward passes on it: decision 0009
            _name_device()
        if not session:
            return
        _replace_engine()
        if _state.library is None and native.Workshop.of_this_installation().is_built("genie_device"):
            _load()
    follow_roster()


def library() -> Any:  # Any: what the compiled module has is not known to the checker
    """Loaded, and compiled before that if need be: NativeBuildError says what is missing for it."""
    if _state.library is None:
        with _state.lock:
            if _state.library is None:
                _load()
        follow_roster()
    return _state.library


def is_loaded() -> bool:
    return _state.library is not None


def follow_roster() -> None:
    """The library's indices become those of the roster."""
    if _state.library is None:
        return
    if roster.is_attached():
        _state.library.attach(len(roster.slots()), _connection)
    else:
        _state.library.detach()


def is_beside() -> bool:
    """Whether this process has an accelerator of its own, which stays torch's accelerator."""
    return _state.beside


class _State:
    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.library: ModuleType | None = None
        self.beside = False


_state = _State()


def _has_own_accelerator() -> bool:
    """Counts, which initialises none of them where their drivers can say: the program may want to fork."""
    return any(torch.get_device_module(kind).device_count() > 0 for kind in _OWN_KINDS)


def _name_device() -> None:
    backend_registration.rename_privateuse1_backend(roster.DEVICE_TYPE)
    torch._register_device_module(roster.DEVICE_TYPE, accelerator)  # type: ignore[no-untyped-call]
    backend_registration.generate_methods_for_privateuse1_backend(for_storage=True)
    if "torch._inductor.codegen.common" in sys.modules:
        from genie.device import compiler  # it imports this module

        compiler.tell_inductor()


def _replace_engine() -> None:
    from genie.device import autograd  # it imports this module

    if not isinstance(torch.autograd.Variable._execution_engine, autograd.Engine):
        torch.autograd.Variable._execution_engine = autograd.Engine()


def _load() -> None:
    loaded = native.load("genie_device")
    # What shapes ops give: torch's C++ meta functions know most, these the rest.
    import torch._meta_registrations

    loaded.register()
    if any(torch.get_device_module(kind).is_available() for kind in _OWN_KINDS):
        _state.beside = loaded.step_aside()
        if not _state.beside:
            _log.warning("backward passes on this machine's own GPU will fail while Genie is in use")
    _state.library = loaded


def _connection(index: int) -> Any:
    """Called by the library, at the first use of an index and after its executor was lost."""
    return roster.slot(index).connection(first_seed=torch.initial_seed())
