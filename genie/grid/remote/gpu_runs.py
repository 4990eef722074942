"""Starts runs that request GPUs, on GPUs that no grid run holds and no other process uses.

Free GPUs are determined by health.py, so that a node that was chosen for its free GPUs has them.

Runs on nodes: standard library only, Python 3.8. Does not manage the runs themselves (runs.py).
"""

from __future__ import annotations

from typing import Any

from genie.grid.remote import health, runs
from genie.grid.remote.core import OpArgs, OpError, OpReply, register_op

_GPU_QUERY_TIMEOUT_S = 10.0


@register_op("gpu_runs.start")
def start_with_gpus(args: OpArgs, blob: bytes) -> OpReply:
    """Like runs.start_run, with `gpus` free GPUs."""
    return runs.start_run(args, blob, lambda held: _choose_gpus_and_environment(held, int(args["gpus"])))


def _choose_gpus_and_environment(held: OpArgs, count: int) -> tuple[list[int], OpArgs]:
    found = health.read_gpus(_GPU_QUERY_TIMEOUT_S)
    gpus = choose_free_gpus(found["gpus"], held, count)
    text = ",".join(map(str, gpus))
    # By default CUDA numbers GPUs from the fastest, unlike nvidia-smi.
    env = {"CUDA_VISIBLE_DEVICES": text, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    if found["vendor"] == "amd":
        env["HIP_VISIBLE_DEVICES"] = text
    return gpus, env


def choose_free_gpus(gpus: Any, held: OpArgs, count: int) -> list[int]:
    """Return the indexes of `count` free GPUs.

    `gpus` are readings; `held` maps the index of a GPU to the run that holds it. Raises OpError('busy').
    """
    free, reasons = [], []
    for gpu in sorted(gpus, key=lambda reading: int(reading["index"])):
        index, used, utilization = gpu["index"], gpu["memory_used_bytes"], gpu["utilization_pct"]
        if index in held:
            reasons.append(f"GPU {index} is held by run {held[index]}")
        elif not health.is_gpu_free(gpu["memory_total_bytes"], used, utilization):
            memory = "?" if used is None else used >> 20
            reasons.append(f"GPU {index} has {memory} MiB in use and {utilization or 0:.0f}% utilization")
        else:
            free.append(index)
    if len(free) < count:
        detail = "; ".join(reasons) if gpus else "the node has no GPUs"
        raise OpError(f"{len(free)} of {len(gpus)} GPUs are free, {count} requested: {detail}", reason="busy")
    return free[:count]
