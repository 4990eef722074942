"""Which GPUs of a machine are joined by links of their own, from what each says of its links. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

BusAddress = tuple[int, int, int]
"""Domain, bus and device of the PCI bus."""


class GpuLinks(NamedTuple):
    """One GPU's place on the bus, and where its active links lead."""

    address: BusAddress | None = None
    peers: frozenset[BusAddress] = frozenset()
    """What is at the other ends: GPUs, or switches that do not say that they are."""
    is_switched: bool = False
    """A link leads to an NVSwitch. All switches of a machine are one fabric."""


def islands(links: Mapping[int, GpuLinks]) -> dict[int, int]:
    """Each GPU's island, by `gpu_id`: the lowest `gpu_id` that links lead to, directly or over others.

    One without links is alone. A peer that is not listed (lost, or a switch) joins those that name it.
    """
    found = {gpu_id: gpu_id for gpu_id in links}
    # Every step carries the lowest number one link further, so there are fewer steps than GPUs.
    while True:
        lowest: dict[BusAddress | None, int] = {}
        for gpu_id, own in links.items():
            for end in _ends(own):
                lowest[end] = min(found[gpu_id], lowest.get(end, found[gpu_id]))
        reached = {
            gpu_id: min((lowest[end] for end in _ends(own)), default=gpu_id) for gpu_id, own in links.items()
        }
        if reached == found:
            return found
        found = reached


def _ends(own: GpuLinks) -> set[BusAddress | None]:
    """Where two GPUs that are joined meet; None is the fabric of switches."""
    ends: set[BusAddress | None] = set(own.peers)
    if own.address is not None:
        ends.add(own.address)
    if own.is_switched:
        ends.add(None)
    return ends
