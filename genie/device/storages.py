"""Methods of torch's storages that read memory by its address, for remote storages.

Does not implement storages (native/torch/device/storage.cpp).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from genie.device import registry

_storage_class: Any = torch.UntypedStorage  # torch does not declare the types of its methods
_byteswap_in_host_memory: Callable[[Any, int], None] = _storage_class._byteswap


def support_byteswap() -> None:
    """Replace the method that would crash the process for a remote storage. Safe to call again."""
    _storage_class._byteswap = _byteswap


def _byteswap(storage: Any, item_bytes: int) -> None:
    if storage.device.type != registry.DEVICE_TYPE:
        _byteswap_in_host_memory(storage, item_bytes)
        return
    fetched = storage.cpu()
    _byteswap_in_host_memory(fetched, item_bytes)
    storage.copy_(fetched)
