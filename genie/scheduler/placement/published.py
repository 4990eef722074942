"""Policies as published, for comparison: dot product, clustering, packing, best fit, FGD.

Scores are integers from 0 to 100, and the node's rank decides ties: the published figures depend on both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from genie.scheduler.placement.gpus import nearest_like, tightest
from genie.scheduler.placement.protocol import FULL_MILLI, TypicalShape
from genie.scheduler.placement.state import Cost, Node, Policy, Request

# The published scores divide by the largest node of their cluster.
_CPU_MILLI_MAX = 128000.0
_GPU_MILLI_MAX = 8000.0

# Why a typical request cannot use what is free on a node, in the order in which the parts are added.
_LACKS_BOTH, _LACKS_GPU, _LACKS_CPU, _NO_GPU, _NO_GPU_LACKS_CPU, _WRONG_MODEL = range(6)

Found = tuple[Cost, tuple[int, ...]] | None
Score = Callable[[Node, Request, tuple[int, ...]], int]


class ByNode(Policy):
    """Scores nodes and takes the tightest GPUs."""

    def __init__(self, score: Score) -> None:
        self._score = score

    def judge(self, node: Node, wanted: Request, tenant: int) -> Found:
        gpus = tightest(node, wanted, tenant) if node.fits_beside_gpus(wanted) else None
        if gpus is None:
            return None
        return (-float(self._score(node, wanted, gpus)), node.rank), gpus


def dotprod(node: Node, wanted: Request, gpus: tuple[int, ...]) -> int:
    cpu = node.free_cpu_milli / _CPU_MILLI_MAX * (wanted.cpu_milli / _CPU_MILLI_MAX)
    gpu = node.free_gpu_milli / _GPU_MILLI_MAX * (wanted.gpu_volume / _GPU_MILLI_MAX)
    return int(100 * (1 - (cpu + gpu) / 2))


def clustering(node: Node, wanted: Request, gpus: tuple[int, ...]) -> int:
    if wanted.gpus == 0:
        return 0
    full = int(25 * (8000 - node.free_gpu_milli) / 8000)
    kinds = [kind for kind, count in node.held.items() if count > 0]
    if (0 if wanted.is_fraction else wanted.gpus) in kinds:
        return full + (75 if len(kinds) == 1 else 50)
    return full + (0 if kinds else 25)


def packing(node: Node, wanted: Request, gpus: tuple[int, ...]) -> int:
    if wanted.gpus == 0:
        return 0
    whole = sum(gpu.free_milli == FULL_MILLI for gpu in node.gpus if gpu.is_open)
    if whole == len(node.gpus):
        return max(33 - whole, whole)
    free = [node.gpus[number].free_milli for number in gpus]
    whole_used = free.count(FULL_MILLI)
    if whole_used:
        return max(50 - whole_used, 33)
    return max(100 - sum(milli * 100 // FULL_MILLI for milli in free) // 10, 50)


def bestfit(node: Node, wanted: Request, gpus: tuple[int, ...]) -> int:
    cpu = (node.free_cpu_milli - wanted.cpu_milli) / _CPU_MILLI_MAX * 0.5
    gpu = (node.free_gpu_milli - wanted.gpu_volume) / _GPU_MILLI_MAX * 0.5
    return int((1.0 - (cpu + gpu)) * 100)


class Fgd(Policy):
    """Fragmentation gradient descent: the place after which typical requests can use most of what is free."""

    def __init__(self, typical: Sequence[TypicalShape]) -> None:
        self._typical = typical

    def judge(self, node: Node, wanted: Request, tenant: int) -> Found:
        if not node.fits_beside_gpus(wanted):
            return None
        places: list[tuple[int, ...] | None] = [tightest(node, wanted, tenant)]
        usable = node.usable(wanted, tenant)
        if is_one_share := wanted.gpus == 1 and wanted.is_fraction:
            places = [(number,) for number in usable]
        best: Found = None
        seen = set()
        free = [gpu.free_milli if gpu.is_open else 0 for gpu in node.gpus]
        before = self._fragments(node.model, node.free_cpu_milli, free)
        for gpus in places:
            if gpus is None or (len(gpus) == 1 and free[gpus[0]] in seen):
                continue
            seen |= {free[number] for number in gpus}
            after = [milli - wanted.gpu_milli * (number in gpus) for number, milli in enumerate(free)]
            left = self._fragments(node.model, node.free_cpu_milli - wanted.cpu_milli, after)
            score = int(1.0 / (1.0 + math.exp(-((before - left) / 1000))) * 100)
            if best is None or -score < best[0][0]:
                best = (-float(score), node.rank), gpus
        if best is None or not is_one_share:
            return best
        return best[0], nearest_like(node, [number for number in usable if free[number] == free[best[1][0]]])

    def _fragments(self, model: int, cpu_milli: int, free: list[int]) -> float:
        """The free GPU thousandths that a typical request could not use, on average.

        Its last bit decides whether a score is 49 or 50, so parts are added in the published order.
        """
        sums = [0.0] * 6
        total = sum(free)
        for shape in self._typical:
            reason = _reason(model, cpu_milli, free, shape)
            if reason is None:
                too_small = sum(milli for milli in free if milli < shape.gpu_milli)
                sums[_LACKS_GPU] += shape.share * too_small
            else:
                sums[reason] += shape.share * total
        result = 0.0
        for part in sums:
            result += part
        return result


def _reason(model: int, cpu_milli: int, free: list[int], shape: TypicalShape) -> int | None:
    cpu = cpu_milli >= shape.cpu_milli
    if shape.gpu_milli == 0:
        return _NO_GPU if cpu else _NO_GPU_LACKS_CPU
    if not shape.models >> model & 1:
        return _WRONG_MODEL
    if sum(milli >= shape.gpu_milli for milli in free) >= shape.gpus:
        return None if cpu else _LACKS_CPU
    return _LACKS_GPU if cpu else _LACKS_BOTH


POLICIES: dict[str, Callable[[Sequence[TypicalShape]], Policy]] = {
    "dotprod": lambda _: ByNode(dotprod),
    "clustering": lambda _: ByNode(clustering),
    "packing": lambda _: ByNode(packing),
    "bestfit": lambda _: ByNode(bestfit),
    "fgd": Fgd,
}
