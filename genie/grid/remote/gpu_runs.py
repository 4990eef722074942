"""Starts runs that request GPUs, on GPUs that no grid run holds and no other process uses.

Free GPUs are determined by health.py, so that a node that was chosen for its free GPUs has them.

Runs on nodes: standard library only, Python 3.8. Does not manage the runs themselves (runs.py).
"""

from __future__ import annotations

from typing import Any

from genie.grid.remote import health, runs
from genie.grid.remote.core import Answer, Args, OpError, op

_QUERY_S = 10.0


@op("gpu_runs.start")
def start(args: Args, blob: bytes) -> Answer:
    """Like runs.start, with `gpus` free GPUs."""
    return runs.start_run(args, blob, lambda held: _take(held, int(args["gpus"])))


def _take(held: Args, count: int) -> tuple[list[int], Args]:
    found = health.read_gpus(_QUERY_S)
    gpus = choose(found["gpus"], held, count)
    text = ",".join(map(str, gpus))
    # By default CUDA numbers GPUs from the fastest, unlike nvidia-smi.
    env = {"CUDA_VISIBLE_DEVICES": text, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    if found["vendor"] == "amd":
        env["HIP_VISIBLE_DEVICES"] = text
    return gpus, env


def choose(gpus: Any, held: Args, count: int) -> list[int]:
    """Return the indexes of `count` free GPUs.

    `gpus` are readings; `held` maps the index of a GPU to the run that holds it. Raises OpError('busy').
    """
    free, reasons = [], []
    for gpu in sorted(gpus, key=lambda reading: int(reading["index"])):
        index, used, utilization = gpu["index"], gpu["memory_used_bytes"], gpu["utilization_pct"]
        if index in held:
            reasons.append(f"GPU {index} is held by run {held[index]}")
        elif not health.is_free(gpu["memory_total_bytes"], used, utilization):
            memory = "?" if used is None else used >> 20
            reasons.append(f"GPU {index} has {memory} MiB in use and {utilization or 0:.0f}% utilization")
        else:
            free.append(index)
    if len(free) < count:
        detail = "; ".join(reasons) if gpus else "the node has no GPUs"
        raise OpError("busy", f"{len(free)} of {len(gpus)} GPUs are free, {count} requested: {detail}")
    return free[:count]
