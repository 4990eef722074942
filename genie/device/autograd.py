"""Backward passes over remote tensors run on the calling thread; all other backward passes are unchanged.

torch's engine starts one thread per device index at the first backward pass of the process; a device that is
attached later would have none. Ops are only sent from here, so other threads would not be faster either.
Next to a local GPU, torch treats the remote device as its accelerator only during such a pass
(native/torch/device/local_accelerator.h). Does not implement the ops of a pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from genie.device import library, registry
from genie.errors import OpRefusedError
from genie.native import genie_device


class RemoteEngine(torch._C._ImperativeEngine):
    """Replaces torch's engine; behaves the same while no remote device is in use."""

    # Any: the parameters are torch's.
    def run_backward(self, tensors: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        if not registry.is_any_device_used() or (
            library.keeps_local_torch_accelerator() and not _is_remote_backward(tensors)
        ):
            return super().run_backward(tensors, *args, **kwargs)
        library.ensure_loaded()
        genie_device.enter_remote_backward()
        try:
            with torch.autograd.set_multithreading_enabled(False):
                return super().run_backward(tensors, *args, **kwargs)
        finally:
            genie_device.leave_remote_backward()


def _is_remote_backward(roots: Sequence[Any]) -> bool:
    """Whether a backward pass from these roots has remote tensors. Any: torch also accepts graph edges as
    roots, which are not inspected and count as remote."""
    tensors = [root for root in roots if isinstance(root, torch.Tensor)]
    if len(tensors) < len(roots):
        return True
    library.ensure_loaded()
    remote, local = genie_device.find_backward_device_kinds(tensors)
    if remote and local:
        raise OpRefusedError(
            "a backward pass cannot include a local GPU and a remote accelerator",
            hint="split it: detach() at the device boundary and pass the gradient on explicitly",
        )
    return remote
