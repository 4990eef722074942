"""Spreads a model over several devices: `genie.device.spread(model)`.

The children of the model, its branches, are placed whole, largest first, on the device that holds least. A
child is split into its own children only while there are fewer parts than devices, or a part exceeds the
memory of a device; the layers of a chain stay in order. Hooks copy the inputs of a part to its device, and
the outputs to the device of the module that combines them, which also has that module's own weights. Does not
split a single layer, and does not schedule: devices overlap because ops are sent without waiting.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from genie.device import registry
from genie.errors import UsageError


@dataclass(frozen=True)
class ModelPlacement:
    """Where the modules of a model are: names of modules, as in named_modules(), to devices."""

    device_by_module: Mapping[str, torch.device]
    output_device: torch.device
    """The device of the results of the model."""


@dataclass(frozen=True)
class _Part:
    name: str
    module: nn.Module
    chain: str | None
    """Name of the Sequential or ModuleList that it is a layer of."""

    @property
    def bytes(self) -> int:
        return size_bytes(self.module)


def spread(model: nn.Module, devices: Iterable[str | torch.device] | None = None) -> ModelPlacement:
    """Move the modules of the model to the devices, in place, and return where each one is.

    `devices`: all remote devices of the session by default. The model can then be called with inputs on any
    device; its results are on `output_device`. UsageError if there is no device, or if modules of different
    devices would share a weight. Call it once per model.
    """
    chosen = [torch.device(each) for each in devices] if devices is not None else _all_devices()
    if not chosen:
        raise UsageError(
            "there is no device to spread the model over", hint="genie nodes lists the accelerators"
        )
    if _is_spread(model):
        raise UsageError(
            "the model has been spread already", hint="spread a new model, or a deepcopy made before"
        )
    parts = _select_parts(model, chosen)
    placed = _assign_devices(parts, chosen)
    _check_shared_weights(model, placed)
    output_device = _Mover(placed, chosen[0]).place(model)
    return ModelPlacement(placed, output_device)


def size_bytes(module: nn.Module) -> int:
    """Memory of the weights and buffers; shared ones count once."""
    tensors = {id(each): each for each in (*module.parameters(), *module.buffers())}
    return sum(each.numel() * each.element_size() for each in tensors.values())


def _all_devices() -> list[torch.device]:
    return [torch.device(registry.DEVICE_TYPE, slot.index) for slot in registry.device_slots()]


# --- what is placed where -------------------------------------------------------------------------


def _select_parts(model: nn.Module, devices: Sequence[torch.device]) -> list[_Part]:
    """The parts that are placed whole; each has weights."""
    limit_bytes = min(map(_memory_bytes, devices))
    parts = _split(_Part("", model, None)) or [_Part("", model, None)]
    while len(parts) < len(devices) or max(part.bytes for part in parts) > limit_bytes:
        divisible = [part for part in parts if _split(part)]
        if not divisible:
            break
        largest = max(divisible, key=lambda part: part.bytes)
        at = parts.index(largest)
        parts[at : at + 1] = _split(largest)
    return parts


def _split(part: _Part) -> list[_Part]:
    """Its children that have weights; empty if it cannot be split."""
    if not _can_be_split(part.module):
        return []
    chain = part.name if isinstance(part.module, nn.Sequential | nn.ModuleList) else None
    prefix = f"{part.name}." if part.name else ""
    children = [_Part(prefix + key, child, chain) for key, child in part.module.named_children()]
    return [child for child in children if child.bytes]


def _can_be_split(module: nn.Module) -> bool:
    """torch's own layers pass the weights of their children to fused ops."""
    is_layer_of_torch = type(module).__module__.startswith("torch.nn.")
    return not is_layer_of_torch or isinstance(module, nn.Sequential | _UNCALLED)


def _assign_devices(parts: Sequence[_Part], devices: Sequence[torch.device]) -> dict[str, torch.device]:
    total = sum(part.bytes for part in parts)
    placed: dict[str, torch.device] = {}
    if total and parts[0].chain is not None and len({part.chain for part in parts}) == 1:
        before = 0
        for part in parts:  # the device in whose share the middle of the layer is
            placed[part.name] = devices[(2 * before + part.bytes) * len(devices) // (2 * total)]
            before += part.bytes
        return placed
    used = dict.fromkeys(devices, 0)
    for part in sorted(parts, key=lambda part: -part.bytes):
        device = min(devices, key=lambda each: used[each])
        placed[part.name] = device
        used[device] += part.bytes
    return placed


def _memory_bytes(device: torch.device) -> float:
    if device.type != registry.DEVICE_TYPE:
        return math.inf
    return registry.device_slot(device.index or 0).device.memory_bytes


def _check_shared_weights(model: nn.Module, placed: Mapping[str, torch.device]) -> None:
    owners: dict[int, tuple[str, torch.device]] = {}
    for name, device in placed.items():
        for key, tensor in model.get_submodule(name).named_parameters():
            first_name, first_device = owners.setdefault(id(tensor), (name, device))
            if first_device != device:
                raise UsageError(
                    f"the modules {first_name!r} and {name!r} share the weight {key!r}, but would be on two "
                    "devices",
                    hint="place the model with .to(), or spread its branches one by one",
                )


# --- moving ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Mover:
    """Moves the parts to their devices, and installs the hooks."""

    device_by_module: Mapping[str, torch.device]
    default_device: torch.device
    """Of modules without placed parts."""

    def place(self, module: nn.Module, name: str = "") -> torch.device:
        """Returns the device of the results of this module."""
        device = self._find_device(name)
        if device is not None:
            module.to(device)
            for _, called in _called_modules(name, module):
                _copy_inputs(called, device)
            return device
        children = [
            (self.place(child, key), child)
            for key, child in _called_children(name, module)
            if size_bytes(child)
        ]
        # What combines the results of the children runs where the last one is, usually a head.
        combined_on = children[-1][0] if children else self.default_device
        _move_own_weights(module, combined_on)
        if not isinstance(module, nn.Sequential):  # in a chain, each module copies its own inputs
            _copy_inputs(module, combined_on)
            for device, child in children:
                if device != combined_on:
                    child.register_forward_hook(_OutputMover(combined_on))
        return combined_on

    def _find_device(self, name: str) -> torch.device | None:
        """The device of the module, or of the placed container that it is called from."""
        while name not in self.device_by_module and name:
            name = name.rpartition(".")[0]
        return self.device_by_module.get(name)


_UNCALLED = nn.ModuleList | nn.ModuleDict
"""Containers whose modules are called by the module that holds the container."""


def _called_children(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    prefix = f"{name}." if name else ""
    for key, child in module.named_children():
        yield from _called_modules(prefix + key, child)


def _called_modules(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    if isinstance(module, _UNCALLED):
        yield from _called_children(name, module)
    else:
        yield name, module


def _copy_inputs(module: nn.Module, device: torch.device) -> None:
    module.register_forward_pre_hook(_InputMover(device), with_kwargs=True)


def _move_own_weights(module: nn.Module, device: torch.device) -> None:
    for parameter in module.parameters(recurse=False):
        parameter.data = parameter.data.to(device)
    for key, buffer in module.named_buffers(recurse=False):
        setattr(module, key, buffer.to(device))


def _is_spread(model: nn.Module) -> bool:
    return any(
        isinstance(hook, _InputMover)
        for module in model.modules()
        for hook in module._forward_pre_hooks.values()
    )


def _move(values: Any, device: torch.device) -> Any:
    return pytree.tree_map_only(torch.Tensor, lambda each: each.to(device), values)


@dataclass(frozen=True)
class _InputMover:
    device: torch.device

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return _move(args, self.device), _move(kwargs, self.device)


@dataclass(frozen=True)
class _OutputMover:
    device: torch.device

    def __call__(self, module: nn.Module, args: Any, results: Any) -> Any:
        return _move(results, self.device)
