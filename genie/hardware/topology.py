"""Islands: the GPUs of a machine that are connected by direct links. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

BusAddress = tuple[int, int, int]
"""Domain, bus and device of the PCI bus."""


class GpuLinks(NamedTuple):
    """The bus address of one GPU, and the peers of its active links."""

    address: BusAddress | None = None
    peers: frozenset[BusAddress] = frozenset()
    """The peers: GPUs, or switches that are not reported as such."""
    has_nvswitch_link: bool = False
    """A link leads to an NVSwitch. All switches of a machine are one fabric."""


def group_into_islands(links: Mapping[int, GpuLinks]) -> dict[int, int]:
    """The island of each GPU, by `gpu_id`: the lowest `gpu_id` that is reachable over links.

    A GPU without links is its own island. GPUs with the same unlisted peer (lost, or a switch) are connected.
    """
    found = {gpu_id: gpu_id for gpu_id in links}
    # Each iteration propagates the lowest ID by one link, so there are fewer iterations than GPUs.
    while True:
        lowest: dict[BusAddress | None, int] = {}
        for gpu_id, own in links.items():
            for end in _addresses_linking_gpu(own):
                lowest[end] = min(found[gpu_id], lowest.get(end, found[gpu_id]))
        reached = {
            gpu_id: min((lowest[end] for end in _addresses_linking_gpu(own)), default=gpu_id)
            for gpu_id, own in links.items()
        }
        if reached == found:
            return found
        found = reached


def _addresses_linking_gpu(own: GpuLinks) -> set[BusAddress | None]:
    """The endpoints that connected GPUs have in common; None is the fabric of switches."""
    ends: set[BusAddress | None] = set(own.peers)
    if own.address is not None:
        ends.add(own.address)
    if own.has_nvswitch_link:
        ends.add(None)
    return ends
