"""Published policies for comparison: dot product, clustering, packing, best fit, FGD.

Scores are integers from 0 to 100, and the node's rank breaks ties: the published results depend on both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from genie.scheduler.placement.gpus import closest_of_equal, tightest_gpus
from genie.scheduler.placement.protocol import FULL_MILLI, TypicalShape
from genie.scheduler.placement.state import Cost, Node, PlacementRequest, Policy

# The published scores divide by the largest node of their cluster.
_CPU_MILLI_MAX = 128000.0
_GPU_MILLI_MAX = 8000.0

# Why a typical request cannot use the free GPUs of a node, in the order of summation.
_LACKS_BOTH, _LACKS_GPU, _LACKS_CPU, _NO_GPU, _NO_GPU_LACKS_CPU, _WRONG_MODEL = range(6)

Candidate = tuple[Cost, tuple[int, ...]] | None
Score = Callable[[Node, PlacementRequest, tuple[int, ...]], int]


class ScoredPolicy(Policy):
    """Scores nodes and uses the tightest GPUs."""

    def __init__(self, score: Score) -> None:
        self._score = score

    def evaluate(self, node: Node, request: PlacementRequest, tenant: int) -> Candidate:
        gpus = tightest_gpus(node, request, tenant) if node.fits_except_gpus(request) else None
        if gpus is None:
            return None
        return (-float(self._score(node, request, gpus)), node.rank), gpus


def dotprod(node: Node, request: PlacementRequest, gpus: tuple[int, ...]) -> int:
    cpu = node.free_cpu_milli / _CPU_MILLI_MAX * (request.cpu_milli / _CPU_MILLI_MAX)
    gpu = node.free_gpu_milli / _GPU_MILLI_MAX * (request.gpu_volume / _GPU_MILLI_MAX)
    return int(100 * (1 - (cpu + gpu) / 2))


def clustering(node: Node, request: PlacementRequest, gpus: tuple[int, ...]) -> int:
    if request.gpus == 0:
        return 0
    full = int(25 * (8000 - node.free_gpu_milli) / 8000)
    kinds = [kind for kind, count in node.held.items() if count > 0]
    if (0 if request.is_fraction else request.gpus) in kinds:
        return full + (75 if len(kinds) == 1 else 50)
    return full + (0 if kinds else 25)


def packing(node: Node, request: PlacementRequest, gpus: tuple[int, ...]) -> int:
    if request.gpus == 0:
        return 0
    whole = sum(gpu.free_milli == FULL_MILLI for gpu in node.gpus if gpu.is_open)
    if whole == len(node.gpus):
        return max(33 - whole, whole)
    free = [node.gpus[number].free_milli for number in gpus]
    whole_used = free.count(FULL_MILLI)
    if whole_used:
        return max(50 - whole_used, 33)
    return max(100 - sum(milli * 100 // FULL_MILLI for milli in free) // 10, 50)


def bestfit(node: Node, request: PlacementRequest, gpus: tuple[int, ...]) -> int:
    cpu = (node.free_cpu_milli - request.cpu_milli) / _CPU_MILLI_MAX * 0.5
    gpu = (node.free_gpu_milli - request.gpu_volume) / _GPU_MILLI_MAX * 0.5
    return int((1.0 - (cpu + gpu)) * 100)


class FgdPolicy(Policy):
    """Fragmentation gradient descent: minimizes the free GPU share that typical requests cannot use."""

    def __init__(self, typical: Sequence[TypicalShape]) -> None:
        self._typical = typical

    def evaluate(self, node: Node, request: PlacementRequest, tenant: int) -> Candidate:
        if not node.fits_except_gpus(request):
            return None
        places: list[tuple[int, ...] | None] = [tightest_gpus(node, request, tenant)]
        usable = node.usable(request, tenant)
        if is_single_fraction := request.gpus == 1 and request.is_fraction:
            places = [(number,) for number in usable]
        best: Candidate = None
        seen = set()
        free = [gpu.free_milli if gpu.is_open else 0 for gpu in node.gpus]
        before = self._fragmentation(node.model, node.free_cpu_milli, free)
        for gpus in places:
            if gpus is None or (len(gpus) == 1 and free[gpus[0]] in seen):
                continue
            seen |= {free[number] for number in gpus}
            after = [milli - request.gpu_milli * (number in gpus) for number, milli in enumerate(free)]
            left = self._fragmentation(node.model, node.free_cpu_milli - request.cpu_milli, after)
            score = int(1.0 / (1.0 + math.exp(-((before - left) / 1000))) * 100)
            if best is None or -score < best[0][0]:
                best = (-float(score), node.rank), gpus
        if best is None or not is_single_fraction:
            return best
        return best[0], closest_of_equal(
            node, [number for number in usable if free[number] == free[best[1][0]]]
        )

    def _fragmentation(self, model: int, cpu_milli: int, free: list[int]) -> float:
        """Return the free GPU thousandths that a typical request cannot use, on average.

        The last bit decides whether a score is 49 or 50, so parts are summed in the published order.
        """
        sums = [0.0] * 6
        total = sum(free)
        for shape in self._typical:
            reason = _unusable_reason(model, cpu_milli, free, shape)
            if reason is None:
                too_small = sum(milli for milli in free if milli < shape.gpu_milli)
                sums[_LACKS_GPU] += shape.share * too_small
            else:
                sums[reason] += shape.share * total
        result = 0.0
        for part in sums:
            result += part
        return result


def _unusable_reason(model: int, cpu_milli: int, free: list[int], shape: TypicalShape) -> int | None:
    cpu = cpu_milli >= shape.cpu_milli
    if shape.gpu_milli == 0:
        return _NO_GPU if cpu else _NO_GPU_LACKS_CPU
    if not shape.models >> model & 1:
        return _WRONG_MODEL
    if sum(milli >= shape.gpu_milli for milli in free) >= shape.gpus:
        return None if cpu else _LACKS_CPU
    return _LACKS_GPU if cpu else _LACKS_BOTH


POLICIES: dict[str, Callable[[Sequence[TypicalShape]], Policy]] = {
    "dotprod": lambda _: ScoredPolicy(dotprod),
    "clustering": lambda _: ScoredPolicy(clustering),
    "packing": lambda _: ScoredPolicy(packing),
    "bestfit": lambda _: ScoredPolicy(bestfit),
    "fgd": FgdPolicy,
}
