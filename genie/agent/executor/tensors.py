"""The tensors of one session: numbered, counted once per storage, held under the quota.

Not for: running ops on them (ops.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from genie.errors import OpRefusedError, ProtocolError
from genie.runtime import opwire

TENSORS_MAX = 1_000_000
DTYPES: dict[opwire.DTypeName, torch.dtype] = {name: getattr(torch, name) for name in opwire.DTYPE_NAMES}
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class TensorTable:
    """`bytes_max` of 0 means no quota. Raises torch.OutOfMemoryError where the quota is passed."""

    def __init__(self, device: torch.device, *, bytes_max: int) -> None:
        self._device = device
        self._tensors: dict[int, torch.Tensor] = {}
        self._storages: dict[int, list[int]] = {}
        """Storage -> [tensors that share it, bytes]."""
        self._storage_of: dict[int, int] = {}
        """A tensor's identity -> the storage under which it is counted."""
        self._next = 1
        self.bytes_max = bytes_max
        self.bytes_allocated = 0
        self.bytes_allocated_peak = 0

    def __len__(self) -> int:
        return len(self._tensors)

    def get(self, number: int) -> torch.Tensor:
        tensor = self._tensors.get(number)
        if tensor is None:
            raise OpRefusedError(f"tensor {number} is not known to this session")
        return tensor

    def check_room(self, more_bytes: int) -> None:
        """Before memory is taken. Not counted until the tensor is added."""
        if self.bytes_max and self.bytes_allocated + more_bytes > self.bytes_max:
            raise torch.OutOfMemoryError(
                f"tried to take {more_bytes} bytes; {self.bytes_allocated} of this session's "
                f"{self.bytes_max} bytes are in use"
            )

    def add_all(self, tensors: Iterable[torch.Tensor]) -> list[int]:
        """Numbers for new tensors. When the quota would be passed, none of them is kept."""
        numbers: list[int] = []
        try:
            for tensor in tensors:
                self._check_kind(tensor)
                numbers.append(self._add(tensor))
            self.check_room(0)
        except (torch.OutOfMemoryError, OpRefusedError):
            self.free(numbers)
            raise
        self.bytes_allocated_peak = max(self.bytes_allocated_peak, self.bytes_allocated)
        return numbers

    def free(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            tensor = self._tensors.pop(number, None)
            if tensor is None:
                raise ProtocolError(f"tensor {number} was freed but is not known to this session")
            self._drop_share(self._storage_of.pop(id(tensor)))

    def recount(self, tensor: torch.Tensor) -> None:
        """After an op has changed the shape of a tensor in place: its storage may have grown or changed."""
        storage = tensor.untyped_storage()
        counted = self._storage_of[id(tensor)]
        if storage._cdata != counted:
            self._storages.setdefault(storage._cdata, [0, 0])[0] += 1
            self._storage_of[id(tensor)] = storage._cdata
            self._drop_share(counted)
        share = self._storages[storage._cdata]
        self.bytes_allocated += storage.nbytes() - share[1]
        share[1] = storage.nbytes()
        self.bytes_allocated_peak = max(self.bytes_allocated_peak, self.bytes_allocated)

    def describe(self, number: int) -> opwire.TensorMeta:
        tensor = self._tensors[number]
        return opwire.TensorMeta(
            handle=number,
            dtype=_DTYPE_NAMES[tensor.dtype],
            shape=tuple(tensor.shape),
            strides=tensor.stride(),
            offset=int(tensor.storage_offset()),
            conj=tensor.is_conj(),
            neg=tensor.is_neg(),
        )

    def clear(self) -> None:
        self._tensors.clear()
        self._storages.clear()
        self._storage_of.clear()
        self.bytes_allocated = 0

    def _check_kind(self, tensor: torch.Tensor) -> None:
        if tensor.layout is not torch.strided or tensor.dtype not in _DTYPE_NAMES:
            raise OpRefusedError(
                f"the result is a {tensor.layout} tensor of {tensor.dtype}, which the wire does not carry"
            )
        if _extent(tensor) * tensor.element_size() > tensor.untyped_storage().nbytes():
            raise OpRefusedError("the result reaches beyond the memory that it stands on")
        if tensor.dim() > opwire.DIMENSIONS_MAX:
            raise OpRefusedError(f"the result has {tensor.dim()} dimensions; the wire carries at most 64")
        if tensor.device != self._device:
            raise OpRefusedError(f"the result is on {tensor.device}; only {self._device} is carried")
        if len(self._tensors) >= TENSORS_MAX:
            raise OpRefusedError(f"this session already holds {TENSORS_MAX} tensors")

    def _add(self, tensor: torch.Tensor) -> int:
        number = self._next
        self._next += 1
        self._tensors[number] = tensor
        storage = tensor.untyped_storage()
        self._storage_of[id(tensor)] = storage._cdata
        share = self._storages.get(storage._cdata)
        if share is None:
            self._storages[storage._cdata] = [1, storage.nbytes()]
            self.bytes_allocated += storage.nbytes()
        else:
            share[0] += 1
        return number

    def _drop_share(self, storage: int) -> None:
        share = self._storages[storage]
        share[0] -= 1
        if share[0] == 0:
            self.bytes_allocated -= share[1]
            del self._storages[storage]


def _extent(tensor: torch.Tensor) -> int:
    """Elements from the start of its storage up to and including its last one; 0 when it has none."""
    if tensor.numel() == 0:
        return 0
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return int(tensor.storage_offset()) + steps + 1


def from_inline(value: opwire.Inline, device: torch.device) -> torch.Tensor:
    if opwire.size_bytes(value.dtype, value.shape) != len(value.data):
        raise OpRefusedError(f"{len(value.data)} bytes do not make a {value.dtype} tensor of {value.shape}")
    dtype = DTYPES[value.dtype]
    if math.prod(value.shape) == 0:
        return torch.empty(value.shape, dtype=dtype, device=device)
    return torch.frombuffer(bytearray(value.data), dtype=dtype).reshape(value.shape).to(device)
