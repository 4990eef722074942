"""Two runs of the same work, one local and one remote, on copies of the same values.

`DeviceCopier` makes the inputs of one run, `fetch_to_cpu` brings its results back, `assert_same` compares
them. Used by the tests that compare the device with torch's databases.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.testing._comparison import get_tolerances
from torch.utils import _pytree as pytree

SEED = 20240229


class MismatchError(AssertionError):
    """The two runs differ; the message describes how."""


class NondeterministicError(AssertionError):
    """Local runs differ from each other; the remote run does not differ more."""


@dataclass(frozen=True)
class Tolerance:
    """Minimum tolerance for floating point numbers; torch's default if that is larger."""

    rtol: float = 0.0
    atol: float = 0.0


DEFAULT = Tolerance()


class DeviceCopier:
    """Copies nested values to another device, or to the same one.

    Tensors keep strides, offsets and shared storages. Names of the source device become those of the target.
    """

    def __init__(self, source: str, target: str) -> None:
        self._source = torch.device(source)
        self._target = torch.device(target)
        self._done: dict[int, torch.Tensor] = {}
        self._bases: dict[tuple[int, torch.dtype], torch.Tensor] = {}
        self._originals: list[object] = []
        """Kept alive, so that their ids are not reused."""

    def __call__(self, value: Any) -> Any:
        with torch.no_grad():
            return pytree.tree_map(self._leaf, value)

    def _leaf(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, torch.device) and value.type == self._source.type:
            return self._target
        if isinstance(value, str) and value in (self._source.type, str(self._source)):
            return str(self._target)
        return value

    def _tensor(self, value: torch.Tensor) -> torch.Tensor:
        if id(value) not in self._done:
            self._originals.append(value)
            copied = self._strided(value.detach()) if value.layout is torch.strided else self._plain(value)
            # as_strided views are detached, so that leaves stay leaves
            self._done[id(value)] = copied.detach().requires_grad_(value.requires_grad)
        return self._done[id(value)]

    def _plain(self, value: torch.Tensor) -> torch.Tensor:
        target = self._target if value.device.type == self._source.type else value.device
        # through host memory: copies between accelerators are not under test
        return value.detach().cpu().clone().to(target)

    def _strided(self, value: torch.Tensor) -> torch.Tensor:
        if value.is_conj():
            return self._strided(value.conj()).conj()
        if value.is_neg():
            return torch._neg_view(self._strided(torch._neg_view(value)))
        storage = value.untyped_storage()
        self._originals.append(storage)
        key = storage._cdata, value.dtype
        if key in self._bases:
            return self._bases[key].as_strided(value.shape, value.stride(), value.storage_offset())
        if value.is_contiguous() and storage.nbytes() == value.numel() * value.itemsize:
            return self._bases.setdefault(key, self._plain(value))
        whole = torch.empty(0, dtype=value.dtype, device=value.device).set_(
            storage, 0, (storage.nbytes() // value.itemsize,), (1,)
        )
        base = self._bases.setdefault(key, self._plain(whole))
        return base.as_strided(value.shape, value.stride(), value.storage_offset())


def tensors_of(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def fetch_to_cpu(value: Any) -> Any:
    """The same nested values with tensors in host memory; waits for pending work."""
    return pytree.tree_map(lambda x: x.detach().cpu() if isinstance(x, torch.Tensor) else x, value)


def assert_same(
    found: Any, expected: Any, *, what: str, tolerance: Tolerance = DEFAULT, values: bool = True
) -> None:
    """MismatchError if nested values in host memory differ in structure, shapes, dtypes or values.

    Without `values`, the values of tensors are ignored: for uninitialized memory.
    """
    mine, my_shape = pytree.tree_flatten(found)
    theirs, their_shape = pytree.tree_flatten(expected)
    if my_shape != their_shape:
        raise MismatchError(f"{what}: {my_shape} instead of {their_shape}")
    for one, other in zip(mine, theirs, strict=True):
        if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
            _assert_same_tensor(one, other, what, tolerance, values)
        elif type(one) is not type(other):
            raise MismatchError(f"{what}: a {type(one).__name__} instead of a {type(other).__name__}")
        elif not _same_number(one, other):
            raise MismatchError(f"{what}: {one!r} instead of {other!r}")


def assert_same_placement(found: Any, expected: Any, *, local: str, remote: str, what: str) -> None:
    """MismatchError unless everything that is on `local` in one run is on `remote` in the other."""
    for one, other in zip(tensors_of(found), tensors_of(expected), strict=False):
        wanted = remote if other.device.type == torch.device(local).type else str(other.device)
        if str(one.device) != wanted:
            raise MismatchError(f"{what}: is on {one.device}, not on {wanted}")


def _assert_same_tensor(
    one: torch.Tensor, other: torch.Tensor, what: str, tolerance: Tolerance, values: bool
) -> None:
    for name in ("shape", "dtype", "layout"):
        if getattr(one, name) != getattr(other, name):
            raise MismatchError(f"{what}: {name} is {getattr(one, name)}, not {getattr(other, name)}")
    if not values:
        return
    rtol, atol = get_tolerances(other, rtol=None, atol=None)
    if other.dtype.is_floating_point or other.dtype.is_complex:
        rtol, atol = max(rtol, tolerance.rtol), max(atol, tolerance.atol)
    try:
        torch.testing.assert_close(one, other, rtol=rtol, atol=atol, equal_nan=True)
    except AssertionError as error:
        raise MismatchError(f"{what}: {error}") from error


def _same_number(one: Any, other: Any) -> bool:
    if isinstance(one, float):
        return one == other or math.isclose(one, other, rel_tol=1e-6) or (one != one and other != other)
    if isinstance(one, complex):
        return _same_number(one.real, other.real) and _same_number(one.imag, other.imag)
    return bool(one == other)


def seed_generators(device: str) -> None:
    """Every generator that a run on `device` may use. torch.manual_seed is slow where CUDA is not in use."""
    torch.default_generator.manual_seed(SEED)
    if device != "cpu":
        torch.get_device_module(device).manual_seed_all(SEED)


def gradients(outputs: Any, inputs: Any, *, drawn: torch.dtype | None = None) -> tuple[Any, ...] | None:
    """Gradients of every input that requires one, for a fixed cotangent; None if no output depends on any.

    With `drawn`, the cotangent is that of a run in this dtype.
    """
    ends = [x for x in tensors_of(outputs) if x.requires_grad]
    starts = list({id(x): x for x in tensors_of(inputs) if x.requires_grad}.values())
    if not ends or not starts:
        return None
    generator = torch.Generator().manual_seed(SEED)
    cotangents = [
        torch.randn(x.shape, dtype=drawn or x.dtype, generator=generator).to(x.device, x.dtype) for x in ends
    ]
    return torch.autograd.grad(ends, starts, cotangents, allow_unused=True)


def select_evenly(make: Callable[[], Iterable[Any]], count_max: int | None) -> list[Any]:
    """The items of `make`, deterministic; if there are too many, an even selection."""
    torch.default_generator.manual_seed(SEED)
    random.seed(SEED)
    np.random.seed(SEED)  # used by torch's sample generators
    found = list(make())
    if count_max is None or len(found) <= count_max:
        return found
    if count_max == 1:
        return found[:1]
    return [found[number * (len(found) - 1) // (count_max - 1)] for number in range(count_max)]
