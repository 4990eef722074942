"""Which GPUs of one node: the tightest that will do, and among equals those that are near to each other.

Near is: in one NVLink island and on one NUMA node; else in one island; else on one NUMA node; else in as few
islands as can be. Of several such places the one with the least to spare is used, so that larger ones stay
whole. native/scheduler/gpus.cpp does the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from genie.scheduler.placement.state import Gpu, Node, Request

ROOM_MAX = 2**16 - 1

_SIDES: tuple[Callable[[Gpu], tuple[int, ...]], ...] = (
    lambda gpu: (gpu.island, gpu.numa),
    lambda gpu: (gpu.island,),
    lambda gpu: (gpu.numa,),
)


def tightest(node: Node, wanted: Request, tenant: int) -> tuple[int, ...] | None:
    """The GPUs that leave the least free; None when there are not enough."""
    usable = node.usable(wanted, tenant)
    if not wanted.one_island:
        return _tightest_of(node, usable, wanted.gpus)
    best: tuple[tuple[int, int, int], tuple[int, ...]] | None = None
    for island in sorted({node.gpus[number].island for number in usable}):
        members = [number for number in usable if node.gpus[number].island == island]
        found = _tightest_of(node, members, wanted.gpus)
        if found is None:
            continue
        key = (sum(node.gpus[number].free_milli for number in found), len(members), island)
        if best is None or key < best[0]:
            best = key, found
    return None if best is None else best[1]


def nearest_like(node: Node, alike: Sequence[int]) -> tuple[int, ...]:
    """One of GPUs that are equally good."""
    return tuple(_nearest(node, [], alike, 1))


def room(node: Node, wanted: Request, tenant: int) -> int:
    """So many such requests fit at most, if one does; fewer may be."""
    found = ROOM_MAX
    if wanted.cpu_milli:
        found = min(found, node.free_cpu_milli // wanted.cpu_milli)
    if wanted.memory_mib:
        found = min(found, node.free_memory_mib // wanted.memory_mib)
    if not wanted.gpus:
        return found
    by_island: dict[int, int] = {}
    for number in node.usable(wanted, tenant):
        gpu = node.gpus[number]
        times = gpu.free_milli // wanted.gpu_milli
        if wanted.gpu_memory_mib:
            times = min(times, gpu.usable_memory_mib // wanted.gpu_memory_mib)
        island = gpu.island if wanted.one_island else 0
        by_island[island] = by_island.get(island, 0) + times
    return min(found, sum(times // wanted.gpus for times in by_island.values()))


def _tightest_of(node: Node, usable: Sequence[int], count: int) -> tuple[int, ...] | None:
    if len(usable) < count or not count:
        return None if count else ()
    limit = sorted(node.gpus[number].free_milli for number in usable)[count - 1]
    sure = [number for number in usable if node.gpus[number].free_milli < limit]
    equal = [number for number in usable if node.gpus[number].free_milli == limit]
    return tuple(sorted(sure + _nearest(node, sure, equal, count - len(sure))))


def _nearest(node: Node, sure: Sequence[int], equal: Sequence[int], count: int) -> list[int]:
    """So many of the equal ones, near to each other and to those that are sure."""
    for side in _SIDES:
        groups: dict[tuple[int, ...], list[int]] = {}
        for number in equal:
            groups.setdefault(side(node.gpus[number]), []).append(number)
        fitting = [
            members
            for place, members in groups.items()
            if len(members) >= count and all(side(node.gpus[number]) == place for number in sure)
        ]
        if fitting:
            return _in_few_islands(node, sure, min(fitting, key=lambda group: (len(group), group[0])), count)
    return _in_few_islands(node, sure, equal, count)


def _in_few_islands(node: Node, sure: Sequence[int], equal: Sequence[int], count: int) -> list[int]:
    """Islands that are used anyway first, then the smallest that is enough, then the largest."""
    used = {node.gpus[number].island for number in sure}
    groups: dict[int, list[int]] = {}
    for number in equal:
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
