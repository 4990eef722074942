"""Runs that want GPUs: those that no run of ours holds and that nobody else computes on.

What is free is decided as health does it (health.py), and with the same tools, so that a node that was
chosen for its free GPUs has them.

Runs on nodes, so: standard library only, Python 3.8. Not for: runs themselves (runs.py).
"""

from __future__ import annotations

from typing import Any

from genie.grid.remote import health, runs
from genie.grid.remote.core import Answer, Args, OpError, op

_QUERY_S = 10.0


@op("gpu_runs.start")
def start(args: Args, blob: bytes) -> Answer:
    """As runs.start does, with `gpus` of them."""
    return runs.start_run(args, blob, lambda held: _take(held, int(args["gpus"])))


def _take(held: Args, count: int) -> tuple[list[int], Args]:
    found = health.read_gpus(_QUERY_S)
    gpus = choose(found["gpus"], held, count)
    text = ",".join(map(str, gpus))
    # Without the order, CUDA counts from the fastest, and not as nvidia-smi does.
    env = {"CUDA_VISIBLE_DEVICES": text, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    if found["vendor"] == "amd":
        env["HIP_VISIBLE_DEVICES"] = text
    return gpus, env


def choose(gpus: Any, held: Args, count: int) -> list[int]:
    """`gpus` are readings, `held` has the run that has one by its number. Raises OpError('busy')."""
    free, why = [], []
    for gpu in sorted(gpus, key=lambda one: int(one["index"])):
        number, used, busy = gpu["index"], gpu["memory_used_bytes"], gpu["utilization_pct"]
        if number in held:
            why.append(f"GPU {number} is held by run {held[number]}")
        elif not health.is_free(gpu["memory_total_bytes"], used, busy):
            memory = "?" if used is None else used >> 20
            why.append(f"GPU {number} has {memory} MiB in use and is {busy or 0:.0f}% busy")
        else:
            free.append(number)
    if len(free) < count:
        told = "; ".join(why) if gpus else "the node shows no GPU"
        raise OpError("busy", f"{len(free)} of {len(gpus)} GPUs are free and {count} wanted: {told}")
    return free[:count]
