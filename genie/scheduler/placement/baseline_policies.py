"""Published policies for comparison: dot product, clustering, packing, best fit, FGD.

Scores are integers from 0 to 100, and the node's rank breaks ties: the published results depend on both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from genie.scheduler.placement.gpus import choose_one_of_equal_gpus, choose_tightest_gpus
from genie.scheduler.placement.protocol import WHOLE_GPU_MILLI, TypicalShape
from genie.scheduler.placement.state import Node, PlacementCost, PlacementPolicy, PlacementRequest

# The published scores divide by the largest node of their cluster.
_LARGEST_NODE_CPU_MILLI = 128000.0
_LARGEST_NODE_GPU_MILLI = 8000.0

# Why a typical request cannot use the free GPUs of a node, in the order of summation.
_LACKS_BOTH, _LACKS_GPU, _LACKS_CPU, _NO_GPU, _NO_GPU_LACKS_CPU, _WRONG_MODEL = range(6)

NodeEvaluation = tuple[PlacementCost, tuple[int, ...]] | None
ScoreFunction = Callable[[Node, PlacementRequest, tuple[int, ...]], int]


class ScoredPolicy(PlacementPolicy):
    """Scores nodes and uses the tightest GPUs."""

    def __init__(self, score: ScoreFunction) -> None:
        self._score = score

    def evaluate(self, node: Node, request: PlacementRequest, tenant: int) -> NodeEvaluation:
        gpus = choose_tightest_gpus(node, request, tenant) if node.fits_except_gpus(request) else None
        if gpus is None:
            return None
        return (-float(self._score(node, request, gpus)), node.tie_break_rank), gpus


def score_dot_product(node: Node, request: PlacementRequest, gpus: tuple[int, ...]) -> int:
    cpu = node.free_cpu_milli / _LARGEST_NODE_CPU_MILLI * (request.cpu_milli / _LARGEST_NODE_CPU_MILLI)
    gpu = node.free_gpu_milli / _LARGEST_NODE_GPU_MILLI * (request.total_gpu_milli / _LARGEST_NODE_GPU_MILLI)
    return int(100 * (1 - (cpu + gpu) / 2))


def score_clustering(node: Node, request: PlacementRequest, gpus: tuple[int, ...]) -> int:
    if request.gpus == 0:
        return 0
    full = int(25 * (8000 - node.free_gpu_milli) / 8000)
    kinds = [kind for kind, count in node.held_requests_by_gpu_count.items() if count > 0]
    if (0 if request.requests_gpu_fraction else request.gpus) in kinds:
        return full + (75 if len(kinds) == 1 else 50)
    return full + (0 if kinds else 25)


def score_packing(node: Node, request: PlacementRequest, gpus: tuple[int, ...]) -> int:
    if request.gpus == 0:
        return 0
    whole = sum(gpu.free_milli == WHOLE_GPU_MILLI for gpu in node.gpus if gpu.is_open)
    if whole == len(node.gpus):
        return max(33 - whole, whole)
    free = [node.gpus[number].free_milli for number in gpus]
    whole_used = free.count(WHOLE_GPU_MILLI)
    if whole_used:
        return max(50 - whole_used, 33)
    return max(100 - sum(milli * 100 // WHOLE_GPU_MILLI for milli in free) // 10, 50)


def score_best_fit(node: Node, request: PlacementRequest, gpus: tuple[int, ...]) -> int:
    cpu = (node.free_cpu_milli - request.cpu_milli) / _LARGEST_NODE_CPU_MILLI * 0.5
    gpu = (node.free_gpu_milli - request.total_gpu_milli) / _LARGEST_NODE_GPU_MILLI * 0.5
    return int((1.0 - (cpu + gpu)) * 100)


class FgdPolicy(PlacementPolicy):
    """Fragmentation gradient descent: minimizes the free GPU share that typical requests cannot use."""

    def __init__(self, typical: Sequence[TypicalShape]) -> None:
        self._typical_shapes = typical

    def evaluate(self, node: Node, request: PlacementRequest, tenant: int) -> NodeEvaluation:
        if not node.fits_except_gpus(request):
            return None
        places: list[tuple[int, ...] | None] = [choose_tightest_gpus(node, request, tenant)]
        usable = node.usable_gpus(request, tenant)
        if is_single_fraction := request.gpus == 1 and request.requests_gpu_fraction:
            places = [(number,) for number in usable]
        best: NodeEvaluation = None
        seen = set()
        free = [gpu.free_milli if gpu.is_open else 0 for gpu in node.gpus]
        before = self._mean_unusable_gpu_milli(node.model, node.free_cpu_milli, free)
        for gpus in places:
            if gpus is None or (len(gpus) == 1 and free[gpus[0]] in seen):
                continue
            seen |= {free[number] for number in gpus}
            after = [milli - request.gpu_milli * (number in gpus) for number, milli in enumerate(free)]
            left = self._mean_unusable_gpu_milli(node.model, node.free_cpu_milli - request.cpu_milli, after)
            score = int(1.0 / (1.0 + math.exp(-((before - left) / 1000))) * 100)
            if best is None or -score < best[0][0]:
                best = (-float(score), node.tie_break_rank), gpus
        if best is None or not is_single_fraction:
            return best
        return best[0], choose_one_of_equal_gpus(
            node, [number for number in usable if free[number] == free[best[1][0]]]
        )

    def _mean_unusable_gpu_milli(self, model: int, cpu_milli: int, free_gpu_milli: list[int]) -> float:
        """Return the free GPU thousandths that a typical request cannot use, on average.

        The last bit decides whether a score is 49 or 50, so parts are summed in the published order.
        """
        sums = [0.0] * 6
        total = sum(free_gpu_milli)
        for shape in self._typical_shapes:
            reason = _unusable_reason(model, cpu_milli, free_gpu_milli, shape)
            if reason is None:
                too_small = sum(milli for milli in free_gpu_milli if milli < shape.gpu_milli)
                sums[_LACKS_GPU] += shape.share * too_small
            else:
                sums[reason] += shape.share * total
        result = 0.0
        for part in sums:
            result += part
        return result


def _unusable_reason(
    model: int, cpu_milli: int, free_gpu_milli: list[int], shape: TypicalShape
) -> int | None:
    cpu = cpu_milli >= shape.cpu_milli
    if shape.gpu_milli == 0:
        return _NO_GPU if cpu else _NO_GPU_LACKS_CPU
    if not shape.models_mask >> model & 1:
        return _WRONG_MODEL
    if sum(milli >= shape.gpu_milli for milli in free_gpu_milli) >= shape.gpus:
        return None if cpu else _LACKS_CPU
    return _LACKS_GPU if cpu else _LACKS_BOTH


POLICY_FACTORIES: dict[str, Callable[[Sequence[TypicalShape]], PlacementPolicy]] = {
    "dotprod": lambda _: ScoredPolicy(score_dot_product),
    "clustering": lambda _: ScoredPolicy(score_clustering),
    "packing": lambda _: ScoredPolicy(score_packing),
    "bestfit": lambda _: ScoredPolicy(score_best_fit),
    "fgd": FgdPolicy,
}
