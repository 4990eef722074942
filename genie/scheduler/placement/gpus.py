"""Chooses GPUs of one node: the tightest fit, and among equals those that are close to each other.

Close means: in one NVLink island and on one NUMA node; else in one island; else on one NUMA node; else in as
few islands as possible. Of several such groups the smallest is used, so that larger ones stay whole.
native/scheduler/gpu_selection.cpp is the native version.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from genie.scheduler.placement.state import Gpu, Node, PlacementRequest

REQUEST_CAPACITY_MAX = 2**16 - 1

_LOCALITY_KEYS: tuple[Callable[[Gpu], tuple[int, ...]], ...] = (
    lambda gpu: (gpu.island, gpu.numa),
    lambda gpu: (gpu.island,),
    lambda gpu: (gpu.numa,),
)


def choose_tightest_gpus(node: Node, request: PlacementRequest, tenant: int) -> tuple[int, ...] | None:
    """Return the GPUs with the least free share; None if too few fit."""
    usable = node.usable_gpus(request, tenant)
    if not request.one_island:
        return _choose_tightest_among(node, usable, request.gpus)
    best: tuple[tuple[int, int, int], tuple[int, ...]] | None = None
    for island in sorted({node.gpus[number].island for number in usable}):
        members = [number for number in usable if node.gpus[number].island == island]
        found = _choose_tightest_among(node, members, request.gpus)
        if found is None:
            continue
        key = (sum(node.gpus[number].free_milli for number in found), len(members), island)
        if best is None or key < best[0]:
            best = key, found
    return None if best is None else best[1]


def choose_one_of_equal_gpus(node: Node, equal_gpus: Sequence[int]) -> tuple[int, ...]:
    """Return one of several equal GPUs."""
    return tuple(_choose_closest(node, [], equal_gpus, 1))


def request_capacity_bound(node: Node, request: PlacementRequest, tenant: int) -> int:
    """Return an upper bound of the number of such requests that fit on the node, given that one fits."""
    found = REQUEST_CAPACITY_MAX
    if request.cpu_milli:
        found = min(found, node.free_cpu_milli // request.cpu_milli)
    if request.memory_mib:
        found = min(found, node.free_memory_mib // request.memory_mib)
    if not request.gpus:
        return found
    by_island: dict[int, int] = {}
    for number in node.usable_gpus(request, tenant):
        gpu = node.gpus[number]
        times = gpu.free_milli // request.gpu_milli
        if request.gpu_memory_mib:
            times = min(times, gpu.usable_memory_mib // request.gpu_memory_mib)
        island = gpu.island if request.one_island else 0
        by_island[island] = by_island.get(island, 0) + times
    return min(found, sum(times // request.gpus for times in by_island.values()))


def _choose_tightest_among(node: Node, usable: Sequence[int], count: int) -> tuple[int, ...] | None:
    if len(usable) < count or not count:
        return None if count else ()
    limit = sorted(node.gpus[number].free_milli for number in usable)[count - 1]
    fixed = [number for number in usable if node.gpus[number].free_milli < limit]
    equal = [number for number in usable if node.gpus[number].free_milli == limit]
    return tuple(sorted(fixed + _choose_closest(node, fixed, equal, count - len(fixed))))


def _choose_closest(
    node: Node, chosen_gpus: Sequence[int], equal_gpus: Sequence[int], count: int
) -> list[int]:
    """Choose `count` of the equal GPUs, close to each other and to the `chosen_gpus` ones."""
    for locality in _LOCALITY_KEYS:
        groups: dict[tuple[int, ...], list[int]] = {}
        for number in equal_gpus:
            groups.setdefault(locality(node.gpus[number]), []).append(number)
        fitting = [
            members
            for place, members in groups.items()
            if len(members) >= count and all(locality(node.gpus[number]) == place for number in chosen_gpus)
        ]
        if fitting:
            return _choose_in_fewest_islands(
                node, chosen_gpus, min(fitting, key=lambda group: (len(group), group[0])), count
            )
    return _choose_in_fewest_islands(node, chosen_gpus, equal_gpus, count)


def _choose_in_fewest_islands(
    node: Node, chosen_gpus: Sequence[int], equal_gpus: Sequence[int], count: int
) -> list[int]:
    """Islands of `chosen_gpus` first, then the smallest sufficient one, then the largest."""
    used = {node.gpus[number].island for number in chosen_gpus}
    groups: dict[int, list[int]] = {}
    for number in equal_gpus:
        groups.setdefault(node.gpus[number].island, []).append(number)

    def key(island: int) -> tuple[int, int, int]:
        members = groups[island]
        if island in used:
            return (0, 0, members[0])
        is_enough = len(members) >= count - len(chosen)
        return (1, len(members), members[0]) if is_enough else (2, -len(members), members[0])

    chosen: list[int] = []
    while len(chosen) < count:
        members = groups.pop(min(groups, key=key))
        chosen += members[: count - len(chosen)]
    return chosen
