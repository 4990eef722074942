"""Backward passes over remote tensors run on the thread that asks for them; all others are left alone.

torch's engine keeps a thread for each device index, made at the first backward pass of the process;
a device that was attached later would have none. Ops are only sent here, so there is nothing to win
from other threads either. Beside a local GPU, torch takes the remote device for its accelerator only
during such a pass (native/torch/device/beside.h). Not for: what the ops of a pass do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from genie.device import backend, roster
from genie.errors import OpRefusedError


class Engine(torch._C._ImperativeEngine):
    """Stands where torch keeps its engine; without remote devices in use it changes nothing."""

    def run_backward(self, tensors: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        if not roster.in_use() or (backend.is_beside() and not _is_remote(tensors)):
            return super().run_backward(tensors, *args, **kwargs)
        library = backend.library()
        library.enter_backward()
        try:
            with torch.autograd.set_multithreading_enabled(False):
                return super().run_backward(tensors, *args, **kwargs)
        finally:
            library.leave_backward()


def _is_remote(roots: Sequence[Any]) -> bool:
    """Any: torch also takes edges of the graph for roots; what is behind those is not looked into."""
    tensors = [root for root in roots if isinstance(root, torch.Tensor)]
    if len(tensors) < len(roots):
        return True
    remote, local = backend.library().reach(tensors)
    if remote and local:
        raise OpRefusedError(
            "a backward pass cannot run over a local GPU and a remote accelerator at once",
            hint="cut it in two: detach() where the devices meet, and pass the gradient on by hand",
        )
    return bool(remote)
