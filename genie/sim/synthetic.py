"""Makes up a cluster and a workload, so that everything can be run without a trace.

Not for: claims about real clusters. The shapes are round numbers that stress what placement is about:
fractions that do not add up, CPU that runs out before GPUs do, requests of several GPUs or for one model.
"""

from __future__ import annotations

import random

from genie.sim.replay import Workload
from genie.sim.traces import TraceNode, TracePod

_KINDS = (("small", 2, 48000, 200000), ("large", 8, 96000, 400000), ("wide", 8, 128000, 800000))
_SHAPES = (
    # how often, CPU, memory, GPUs, share, models
    (12, 10000, 30000, 0, 0, ()),
    (30, 10000, 30000, 1, 1000, ()),
    (15, 8000, 20000, 1, 810, ()),
    (15, 5000, 15000, 1, 470, ()),
    (10, 3000, 8000, 1, 190, ()),
    (8, 6000, 20000, 1, 500, ("small",)),
    (5, 11000, 30000, 2, 1000, ()),
    (3, 40000, 120000, 4, 1000, ("large", "wide")),
    (2, 88000, 300000, 8, 1000, ()),
)


def synthetic_workload(*, nodes: int, pods: int, seed: int) -> Workload:
    """Nodes of three kinds and requests of nine shapes. The same seed gives the same workload."""
    chance = random.Random(f"synthetic {seed}")
    machines = [
        TraceNode(name=f"{model}-{number}", cpu_milli=cpu, memory_mib=memory, gpus=gpus, model=model)
        for number in range(nodes)
        for model, gpus, cpu, memory in [_KINDS[number % len(_KINDS)]]
    ]
    shapes = [TracePod(cpu, memory, gpus, milli, models) for _, cpu, memory, gpus, milli, models in _SHAPES]
    return Workload(machines, chance.choices(shapes, [weight for weight, *_ in _SHAPES], k=pods))
