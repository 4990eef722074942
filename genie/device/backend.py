"""Registers the device with torch: its name, its Python module, its autograd engine and its C++ library.

Registration happens once per process and stays: torch cannot unregister a device. `import genie` registers
the name and the module, which report what is missing without a session. A session adds the library: it is
loaded here if it is built already, otherwise compiled when the device is first used. Does not implement ops
(native/torch/device).
"""

from __future__ import annotations

import logging
import sys
import threading

import torch
from torch.utils import backend_registration

from genie.device import accelerator, adapters, autograd, library, registry, storages

_log = logging.getLogger(__name__)
_registration_lock = threading.RLock()


def register() -> None:
    """Register the name, and with a session everything else. Safe to call again, from any thread.

    torch has one slot for an out-of-tree device. If another package has taken it, this logs that and
    registers nothing; the rest of Genie works.
    """
    with _registration_lock:
        taken_by = torch._C._get_privateuse1_backend_name()
        session = registry.is_attached()
        if taken_by not in ("privateuseone", registry.DEVICE_TYPE):
            level = logging.WARNING if session else logging.DEBUG
            _log.log(
                level,
                "%s is not available: torch's slot for out-of-tree devices is taken by %s",
                registry.DEVICE_TYPE,
                taken_by,
            )
            return
        if taken_by != registry.DEVICE_TYPE:
            if not session and library.has_local_accelerator():
                return  # the name alone would break backward passes on it: decision 0009
            _register_backend_name()
        if not session:
            return
        _replace_autograd_engine()
        library.load_if_built()
    library.update_devices_from_registry()


def _register_backend_name() -> None:
    backend_registration.rename_privateuse1_backend(registry.DEVICE_TYPE)
    torch._register_device_module(registry.DEVICE_TYPE, accelerator)  # type: ignore[no-untyped-call]
    backend_registration.generate_methods_for_privateuse1_backend(for_storage=True)
    adapters.install()
    storages.support_byteswap()
    if "torch._inductor.codegen.common" in sys.modules:
        from genie.device import compiler  # late: it imports torch._dynamo

        compiler.register_unsupported_codegen()


def _replace_autograd_engine() -> None:
    if not isinstance(torch.autograd.Variable._execution_engine, autograd.RemoteEngine):
        torch.autograd.Variable._execution_engine = autograd.RemoteEngine()


registry.on_attach(register)
