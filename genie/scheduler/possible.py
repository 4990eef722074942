"""Whether a request could ever start, were all nodes well and free; and if not, why not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from genie.model.job import Spread, Within
from genie.scheduler.quota import UNBOUNDED
from genie.scheduler.request import FULL_MILLI, NodeFacts, Request, Shape, counted, why_not

_NAMED = 3


def why_never(request: Request, nodes: Sequence[NodeFacts], *, workers_max: int = UNBOUNDED) -> str:
    """Empty when it could. `workers_max` is the most on one node, whatever they hold. A cluster without nodes
    refuses nothing: they may be about to join."""
    if not nodes:
        return ""
    open_nodes = [replace(node, closed="") for node in nodes]
    if missing := request.shape.nodes - {node.node_id for node in nodes}:
        return f"it asks for node {min(missing)}, and no such node is registered"
    reasons = {node.node_id: why_not(request.shape, node) for node in open_nodes}
    rooms = [
        (node, min(room(request, node), workers_max)) for node in open_nodes if not reasons[node.node_id]
    ]
    if not rooms:
        asked = asked_text(request.shape)
        return f"it asks for {asked} on one node; {grouped(reasons)}" if asked else grouped(reasons)
    most, what = _most_together(request, rooms)
    if most < request.least_workers:
        return f"it asks for {request.least_workers} workers {what}; there is room for {most}"
    return ""


def room(request: Request, node: NodeFacts) -> int:
    """How many of its workers the node holds when it is free."""
    shape = request.shape
    limits = [1 if request.spread is Spread.SPREAD else request.workers]
    if shape.gpus:
        limits.append(_room_on_gpus(request, node))
    if shape.cpu_milli:
        limits.append(node.cpu_milli // shape.cpu_milli)
    if shape.memory_mib:
        limits.append(node.memory_mib // shape.memory_mib)
    return min(limits)


def _room_on_gpus(request: Request, node: NodeFacts) -> int:
    shape = request.shape
    islands = Counter(gpu.island for gpu in node.gpus)
    count = max(islands.values(), default=0) if request.within is Within.ISLAND else len(node.gpus)
    if shape.gpus > 1:
        return count // shape.gpus
    beside = FULL_MILLI // shape.gpu_milli
    if shape.gpu_memory_mib:
        beside = min(beside, min(gpu.memory_mib for gpu in node.gpus) // shape.gpu_memory_mib)
    return count * beside


def asked_text(shape: Shape) -> str:
    """What one worker asks for, in words: `1 GPU, 2 CPUs, 4.0 GiB of memory`; empty for nothing."""
    word = "CPU accelerator" if shape.kind == "cpu" else "GPU"
    share = "" if shape.gpu_milli == FULL_MILLI else f" (share {shape.gpu_milli / FULL_MILLI:g})"
    parts = [
        counted(shape.gpus, word) + share if shape.gpus else "",
        counted(shape.cpu_milli / 1000, "CPU") if shape.cpu_milli else "",
        f"{shape.memory_mib / 1024:.1f} GiB of memory" if shape.memory_mib else "",
    ]
    return ", ".join(part for part in parts if part)


def _most_together(request: Request, rooms: Sequence[tuple[NodeFacts, int]]) -> tuple[int, str]:
    """The most workers that are as near to each other as they must be, and how near that is."""
    if request.within in (Within.NODE, Within.ISLAND):
        return max(count for _, count in rooms), f"in one {request.within}"
    if request.within is Within.ANYWHERE:
        return sum(count for _, count in rooms), "in all"
    racks: Counter[str] = Counter()
    for node, count in rooms:
        racks[node.rack] += count
    return max(racks.values()), "in one rack"


def grouped(reasons: dict[str, str], *, first: frozenset[str] = frozenset()) -> str:
    """`a, b: has 2 GPUs; c: no label zone=x`: that of the nodes in `first` first, then the most frequent."""
    nodes: dict[str, list[str]] = {}
    for node_id, why in reasons.items():
        nodes.setdefault(why, []).append(node_id)
    several = sorted(nodes.items(), key=lambda item: (first.isdisjoint(item[1]), -len(item[1])))[:_NAMED]
    return "; ".join(f"{_names(names)}: {why}" for why, names in several)


def _names(names: Sequence[str]) -> str:
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")
