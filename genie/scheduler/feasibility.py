"""Whether a request could start on the registered nodes if all were healthy and free."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from genie.model.job import Spread, Within
from genie.scheduler.quota import UNBOUNDED
from genie.scheduler.request import (
    WHOLE_GPU_MILLI,
    JobRequest,
    NodeFacts,
    Shape,
    format_count,
    format_memory,
    why_unsuitable,
)

_NAMES_SHOWN_MAX = 3


def why_infeasible(
    request: JobRequest, nodes: Sequence[NodeFacts], *, workers_per_node_max: int = UNBOUNDED
) -> str:
    """Return why it could not start; empty if it could, or if there are no nodes yet. `workers_per_node_max`
    is the maximum number of workers per node."""
    if not nodes:
        return ""
    open_nodes = [replace(node, blocked_reason="") for node in nodes]
    if missing := request.shape.nodes - {node.node_id for node in nodes}:
        return f"requests node {min(missing)}, which is not registered"
    reasons = {node.node_id: why_unsuitable(request.shape, node) for node in open_nodes}
    capacities = [
        (node, min(worker_capacity_of_empty_node(request, node), workers_per_node_max))
        for node in open_nodes
        if not reasons[node.node_id]
    ]
    if not capacities:
        present = {node.node_id: reasons[node.node_id] for node in open_nodes if not node.has_left}
        requested, grouped = format_request(request.shape), format_grouped_reasons(present or reasons)
        return f"requests {requested} on one node; {grouped}" if requested else grouped
    most, scope = _max_workers_and_topology_text(request, capacities)
    if most < request.workers_required:
        return f"requests {request.workers_required} workers {scope}; {most} fit"
    return ""


def worker_capacity_of_empty_node(request: JobRequest, node: NodeFacts) -> int:
    """Return how many of its workers fit on the node when it is free."""
    shape = request.shape
    limits = [1 if request.spread is Spread.SPREAD else request.workers]
    if shape.gpus:
        limits.append(_worker_capacity_by_gpus(request, node))
    if shape.cpu_milli:
        limits.append(node.cpu_milli // shape.cpu_milli)
    if shape.memory_mib:
        limits.append(node.memory_mib // shape.memory_mib)
    return min(limits)


def _worker_capacity_by_gpus(request: JobRequest, node: NodeFacts) -> int:
    shape = request.shape
    islands = Counter(gpu.island for gpu in node.gpus)
    count = max(islands.values(), default=0) if request.within is Within.ISLAND else len(node.gpus)
    if shape.gpus > 1:
        return count // shape.gpus
    per_gpu = WHOLE_GPU_MILLI // shape.gpu_milli
    if shape.gpu_memory_mib:
        per_gpu = min(per_gpu, min(gpu.memory_mib for gpu in node.gpus) // shape.gpu_memory_mib)
    return count * per_gpu


def format_request(shape: Shape) -> str:
    """The request of one worker as `1 GPU, 2 CPUs, 4 GiB of memory`; empty without resources."""
    parts = [
        _format_gpus(shape) if shape.gpus else "",
        format_count(shape.cpu_milli / 1000, "CPU") if shape.cpu_milli else "",
        f"{format_memory(shape.memory_mib)} of memory" if shape.memory_mib else "",
    ]
    return ", ".join(part for part in parts if part)


def _format_gpus(shape: Shape) -> str:
    major, minor = shape.capability_min
    constraints = [
        f"fraction {shape.gpu_milli / WHOLE_GPU_MILLI:g}" if shape.gpu_milli != WHOLE_GPU_MILLI else "",
        f"model {' or '.join(sorted(shape.models))}" if shape.models else "",
        f"compute capability {major}.{minor} or newer" if (major, minor) > (0, 0) else "",
    ]
    text = ", ".join(filter(None, constraints))
    # Without GPUs in the cluster, CPU accelerators count; but a request for a model is one for a GPU.
    is_cpu = shape.accelerator_kind == "cpu" and not shape.models and (major, minor) == (0, 0)
    return format_count(shape.gpus, "CPU accelerator" if is_cpu else "GPU") + (f" ({text})" if text else "")


def _max_workers_and_topology_text(
    request: JobRequest, capacities: Sequence[tuple[NodeFacts, int]]
) -> tuple[int, str]:
    """Return the maximum number of workers under its topology constraint, and the constraint in words."""
    if request.within in (Within.NODE, Within.ISLAND):
        return max(count for _, count in capacities), f"in one {request.within}"
    if request.within is Within.ANYWHERE:
        return sum(count for _, count in capacities), "in total"
    racks: Counter[str] = Counter()
    for node, count in capacities:
        racks[node.rack] += count
    return max(racks.values()), "in one rack"


def format_grouped_reasons(reasons: dict[str, str], *, nodes_first: frozenset[str] = frozenset()) -> str:
    """Format as `a, b: has 2 GPUs; c: missing label x=y`: nodes in `nodes_first` first, then the most
    frequent."""
    nodes: dict[str, list[str]] = {}
    for node_id, why in reasons.items():
        nodes.setdefault(why, []).append(node_id)
    groups = sorted(nodes.items(), key=lambda item: (nodes_first.isdisjoint(item[1]), -len(item[1])))[
        :_NAMES_SHOWN_MAX
    ]
    return "; ".join(f"{_format_names(names)}: {why}" for why, names in groups)


def _format_names(names: Sequence[str]) -> str:
    more = len(names) - _NAMES_SHOWN_MAX
    return ", ".join(names[:_NAMES_SHOWN_MAX]) + (f" and {more} more" if more > 0 else "")
