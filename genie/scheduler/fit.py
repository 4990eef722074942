"""Whether one job fits on one node, on which accelerators, and if not, why not."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from genie.model.allocation import FULL_MILLI, Hold
from genie.model.job import Accelerator, Job, JobSpec
from genie.model.node import GPUInfo, Vendor
from genie.scheduler.decision import ClusterView, NodeState

# Shares of a core add up with rounding errors; this much too much is none.
_CPU_SLACK = 1e-6
_GIB = 1024**3


@dataclass(frozen=True)
class Fit:
    """A place on one node. `rank` orders the places that fit: the lowest leaves the least unused."""

    gpu_ids: tuple[int, ...]
    rank: tuple[float, float, int, str]


def find_fit(job: Job, node: NodeState, cluster: ClusterView) -> Fit | str:
    """Where the job fits on this node as it stands, or in words why it does not."""
    wish, spec = job.spec.resources, job.spec
    if spec.node_id and spec.node_id != node.node_id:
        return f"only {spec.node_id} will do"
    if node.closed:
        return node.closed
    free_cpus = node.info.cpus - node.ledger.cpus_used
    if wish.cpus > 0 and wish.cpus > free_cpus + _CPU_SLACK:
        return f"{cpus_text(max(free_cpus, 0.0))} free of {node.info.cpus:g}"
    free_bytes = node.info.memory_total_bytes - node.ledger.memory_used_bytes
    if wish.memory_bytes > 0 and wish.memory_bytes > free_bytes:
        return f"{memory_text(max(free_bytes, 0))} free"
    chosen = _choose_gpus(job, node, cluster)
    if isinstance(chosen, str):
        return chosen
    free_milli = sum(FULL_MILLI - node.ledger.gpu_used_milli(gpu.gpu_id) for gpu in node.info.gpus)
    left_milli = free_milli - len(chosen) * wish.gpu_milli
    return Fit(chosen, (left_milli, free_cpus - wish.cpus, len(node.ledger.holds), node.node_id))


def check_possible(spec: JobSpec, cluster: ClusterView) -> str | None:
    """Why this can never run on the registered nodes, even if all were well and free; None if it can.

    A cluster without nodes refuses nothing: they may be about to join.
    """
    if not cluster.nodes:
        return None
    if spec.node_id and spec.node_id not in cluster.nodes:
        return f"it asks for node {spec.node_id}, and no such node is registered"
    nodes = [cluster.nodes[spec.node_id]] if spec.node_id else list(cluster.nodes.values())
    if any(_could_hold(spec, node, cluster) for node in nodes):
        return None
    if spec.gpu_ids and (missing := set(spec.gpu_ids) - {gpu.gpu_id for gpu in nodes[0].info.gpus}):
        return f"node {spec.node_id} has no accelerator {min(missing)}"
    short = _too_much(spec, nodes, cluster)
    if not short:
        asked = ", ".join(wish_texts(spec, cluster))
        return f"it asks for {asked} on one node; there is enough of each, but no node has all of it"
    asked = ", ".join(part for part, _ in short)
    largest = "; ".join(has for _, has in short)
    return f"it asks for {asked} on one node; {largest}"


def wish_texts(spec: JobSpec, cluster: ClusterView) -> list[str]:
    """What the job asks for, in words: `1 GPU`, `2 CPUs`, `4.0 GiB of memory`."""
    wish = spec.resources
    texts = [
        accelerators_text(wish.gpus, spec, cluster) if wish.gpus else "",
        cpus_text(wish.cpus) if wish.cpus else "",
        memory_text(wish.memory_bytes) if wish.memory_bytes else "",
    ]
    return [text for text in texts if text]


def accelerators_text(count: int, spec: JobSpec, cluster: ClusterView) -> str:
    """So many of the accelerators that count for this job, by what they are called."""
    word = "GPU" if _wants_gpu(spec, cluster) else "CPU accelerator"
    return f"{count} {word}{'' if count == 1 else 's'}"


def cpus_text(cpus: float) -> str:
    return f"{cpus:g} CPU{'' if cpus == 1 else 's'}"


def memory_text(size_bytes: int) -> str:
    return f"{size_bytes / _GIB:.1f} GiB of memory"


def hold_of(job: Job, gpu_ids: tuple[int, ...], *, epoch: int, incarnation: int) -> Hold:
    """What this job takes on these accelerators."""
    wish = job.spec.resources
    return Hold(
        job_id=job.job_id,
        tenant=job.tenant,
        epoch=epoch,
        incarnation=incarnation,
        gpu_ids=gpu_ids,
        gpu_milli=wish.gpu_milli,
        cpus=wish.cpus,
        memory_bytes=wish.memory_bytes,
    )


def _choose_gpus(job: Job, node: NodeState, cluster: ClusterView) -> tuple[int, ...] | str:
    wish = job.spec.resources
    if wish.gpus == 0:
        return ()
    candidates = _of_kind(job.spec, node, cluster)
    if job.spec.gpu_ids:
        candidates = [gpu for gpu in candidates if gpu.gpu_id in job.spec.gpu_ids]
    free = [gpu for gpu in candidates if _is_free(gpu, job, node)]
    if len(free) < wish.gpus:
        share = "" if wish.gpu_milli == FULL_MILLI else f" (share {wish.gpu_milli / FULL_MILLI:g})"
        return f"{accelerators_text(len(free), job.spec, cluster)}{share} free of {len(candidates)}"
    # The fullest that still has room: whole ones stay whole.
    free.sort(key=lambda gpu: (-node.ledger.gpu_used_milli(gpu.gpu_id), gpu.gpu_id))
    return tuple(sorted(gpu.gpu_id for gpu in free[: wish.gpus]))


def _is_free(gpu: GPUInfo, job: Job, node: NodeState) -> bool:
    """Tenants never share an accelerator: memory on it is not wiped between processes of two."""
    others = any(
        hold.tenant != job.tenant and hold.gpu_milli > 0
        for hold in node.ledger.holds
        if gpu.gpu_id in hold.gpu_ids
    )
    room_milli = FULL_MILLI - node.ledger.gpu_used_milli(gpu.gpu_id)
    return gpu.available and not others and job.spec.resources.gpu_milli <= room_milli


def _could_hold(spec: JobSpec, node: NodeState, cluster: ClusterView) -> bool:
    wish = spec.resources
    gpu_ids = {gpu.gpu_id for gpu in _of_kind(spec, node, cluster)}
    return (
        wish.gpus <= len(gpu_ids)
        and set(spec.gpu_ids) <= gpu_ids
        and wish.cpus <= node.info.cpus + _CPU_SLACK
        and wish.memory_bytes <= node.info.memory_total_bytes
    )


def _too_much(spec: JobSpec, nodes: list[NodeState], cluster: ClusterView) -> list[tuple[str, str]]:
    """Each thing that no node has enough of: what is asked for, and what the node with the most has."""
    wish = spec.resources
    found = []

    def compare(asked: float, amount: Callable[[NodeState], float], text: Callable[[float], str]) -> None:
        best = max(nodes, key=amount)
        if asked > amount(best) + _CPU_SLACK:
            which = f"node {best.node_id}" if spec.node_id else f"the largest node for that, {best.node_id},"
            found.append((text(asked), f"{which} has {text(amount(best))}"))

    compare(
        wish.gpus,
        lambda node: len(_of_kind(spec, node, cluster)),
        lambda count: accelerators_text(int(count), spec, cluster),
    )
    compare(wish.cpus, lambda node: node.info.cpus, cpus_text)
    compare(
        wish.memory_bytes,
        lambda node: node.info.memory_total_bytes,
        lambda size_bytes: memory_text(int(size_bytes)),
    )
    return found


def _of_kind(spec: JobSpec, node: NodeState, cluster: ClusterView) -> list[GPUInfo]:
    return list(_matching(node.info.gpus, gpu=_wants_gpu(spec, cluster)))


def _matching(gpus: Iterable[GPUInfo], *, gpu: bool) -> Iterable[GPUInfo]:
    return (item for item in gpus if (item.vendor is not Vendor.CPU) == gpu)


def _wants_gpu(spec: JobSpec, cluster: ClusterView) -> bool:
    kind = spec.resources.accelerator
    return cluster.has_gpus if kind is Accelerator.AUTO else kind is Accelerator.GPU
