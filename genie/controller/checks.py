"""What may come off the wire: counts, sizes and texts. Everything a peer sends is checked here first.

Shapes are checked by the decoder, names by model/names.py. Not for: who may ask (tenancy/).
"""

from __future__ import annotations

import re

from genie.errors import UsageError
from genie.model.allocation import FULL_MILLI
from genie.model.job import JobKind, JobSpec, Resources, Spread, Wishes, Within
from genie.model.messages import WAIT_S_MAX, Endpoint
from genie.model.names import (
    checked_env_key,
    checked_label,
    checked_labels,
    checked_name,
    checked_node_id,
)
from genie.model.node import GPUInfo, NodeInfo, Vendor
from genie.model.tenant import QuotaRecord

ARGUMENTS_MAX = 1024
ENTRIES_MAX = 256
TEXT_BYTES_MAX = 128 * 1024
GPUS_MAX = 1024
MEMORY_BYTES_MAX = 1 << 60
CPUS_MAX = 1_000_000.0
WORKERS_MAX = 1024
NAMED_MAX = 64
"""Of each thing that a job names: labels, GPU models, other jobs."""
PRIORITY_MAX = 1000
GRACE_S_MAX = 86400.0
TIME_LIMIT_S_MAX = 10 * 365 * 86400.0
WEIGHT_MIN, WEIGHT_MAX = 0.01, 1000.0
QUOTA_GPUS_MAX = 1_000_000.0
_LABEL_MAX = 1024
_NUMA_MAX = 1023
_CAPABILITY_MAX = 999
_DIGEST = re.compile(r"[0-9a-f]{64}")


def check_job(spec: JobSpec) -> None:
    """UsageError or NameInvalidError that names the part of a submitted job that is not allowed."""
    checked_name(spec.name, what="job name")
    if spec.kind is not JobKind.COMMAND:
        raise UsageError("a session is opened with OpenDevice, not submitted")
    _check_command(spec.command)
    _check_env(spec.env)
    _check_resources(spec.resources)
    _check_wishes(spec.wishes)
    _check_together(spec)
    if spec.node_id:
        checked_node_id(spec.node_id)
    if spec.gpu_ids:
        _check_pins(spec)
    if spec.workdir is not None:
        check_digest(spec.workdir.digest)
        _check_range(spec.workdir.size_bytes, "workdir size", 0, MEMORY_BYTES_MAX)


def check_quota(quota: QuotaRecord) -> None:
    """What the owner says that a tenant may hold."""
    checked_name(quota.tenant, what="tenant")
    for what, gpus in (("gpus", quota.gpus), ("borrow_gpus", quota.borrow_gpus)):
        if gpus is not None:
            _check_number(gpus, what, 0.0, QUOTA_GPUS_MAX)
    _check_number(quota.weight, "weight", WEIGHT_MIN, WEIGHT_MAX)


def check_digest(digest: str) -> str:
    if not _DIGEST.fullmatch(digest):
        raise UsageError("a digest is 64 lower-case hexadecimal digits", hint="send the SHA-256 of the bytes")
    return digest


def check_node(info: NodeInfo) -> None:
    """What an agent or a client says of its machine."""
    checked_node_id(info.node_id)
    _check_number(info.cpus, "cpus", 0.0, CPUS_MAX)
    _check_number(info.last_heartbeat, "last_heartbeat", 0.0, 1e12)
    _check_range(info.memory_total_bytes, "memory_total_bytes", 0, MEMORY_BYTES_MAX)
    _check_range(info.memory_used_bytes, "memory_used_bytes", 0, MEMORY_BYTES_MAX)
    _check_range(info.incarnation, "incarnation", 0, 1 << 62)
    _check_range(info.control_port, "control_port", 0, 65535)
    _check_range(len(info.gpus), "number of accelerators", 0, GPUS_MAX)
    if len({gpu.gpu_id for gpu in info.gpus}) != len(info.gpus):
        raise UsageError(f"node {info.node_id} names an accelerator twice")
    checked_labels(info.labels, what=f"a label of node {info.node_id}")
    if info.rack:
        checked_label(info.rack, what=f"the rack of node {info.node_id}")
    texts = [info.hostname, info.host, info.network_backend, info.status_reason, info.version]
    for gpu in info.gpus:
        _check_gpu(gpu)
        texts += [gpu.name, gpu.uuid, gpu.reason]
    for text in texts:
        check_label(text, what=f"a text of node {info.node_id}")


def _check_gpu(gpu: GPUInfo) -> None:
    _check_range(gpu.gpu_id, "accelerator id", 0, 1 << 20)
    _check_range(gpu.memory_total_bytes, "accelerator memory", 0, MEMORY_BYTES_MAX)
    _check_range(gpu.memory_used_bytes, "accelerator memory in use", 0, MEMORY_BYTES_MAX)
    _check_range(gpu.memory_outside_bytes, "accelerator memory in use outside", 0, MEMORY_BYTES_MAX)
    _check_range(gpu.island, "an accelerator's island", 0, 1 << 20)
    _check_range(gpu.numa, "an accelerator's NUMA node", 0, _NUMA_MAX)
    for part in gpu.capability:
        _check_range(part, "a part of an accelerator's capability", 0, _CAPABILITY_MAX)
    for reading in (gpu.utilization_pct, gpu.temperature_c, gpu.power_w):
        _check_number(reading or 0.0, "an accelerator's reading", -1e6, 1e6)


def check_endpoint(endpoint: Endpoint) -> None:
    """Where an agent says that an executor listens."""
    check_label(endpoint.host, what="the executor's host")
    check_label(endpoint.server_name, what="the executor's name")
    _check_range(endpoint.port, "the executor's port", 1, 65535)


def check_label(text: str, *, what: str) -> str:
    if len(text) > _LABEL_MAX or "\0" in text:
        raise UsageError(f"{what} has a NUL or more than {_LABEL_MAX} characters")
    return text


def checked_wait_s(wait_s: float) -> float:
    """The time that a bounded wait takes at most; asking for more is no error."""
    return min(wait_s, WAIT_S_MAX) if wait_s > 0 else 0.0


def _check_command(command: tuple[str, ...]) -> None:
    if not command or not command[0]:
        raise UsageError("the command is empty", hint="name a program to run")
    if len(command) > ARGUMENTS_MAX:
        raise UsageError(f"the command has {len(command)} arguments; the most is {ARGUMENTS_MAX}")
    _check_texts(command, "the command")


def _check_env(env: dict[str, str]) -> None:
    if len(env) > ENTRIES_MAX:
        raise UsageError(f"env has {len(env)} entries; the most is {ENTRIES_MAX}")
    for key in env:
        checked_env_key(key)
    _check_texts((*env.keys(), *env.values()), "env")


def _check_texts(texts: tuple[str, ...], what: str) -> None:
    try:
        size_bytes = sum(len(text.encode()) for text in texts)
    except UnicodeEncodeError:
        raise UsageError(f"{what} is not valid UTF-8") from None
    if size_bytes > TEXT_BYTES_MAX:
        raise UsageError(
            f"{what} has {size_bytes} bytes; the most is {TEXT_BYTES_MAX}", hint="send files as a workdir"
        )
    if any("\0" in text for text in texts):
        raise UsageError(f"{what} contains a NUL byte")


def _check_resources(wish: Resources) -> None:
    _check_range(wish.gpus, "gpus", 0, GPUS_MAX)
    _check_range(wish.gpu_milli, "gpu_milli", 1, FULL_MILLI)
    _check_range(wish.gpu_memory_bytes, "gpu_memory_bytes", 0, MEMORY_BYTES_MAX)
    _check_number(wish.cpus, "cpus", 0.0, CPUS_MAX)
    _check_range(wish.memory_bytes, "memory_bytes", 0, MEMORY_BYTES_MAX)


def _check_wishes(wishes: Wishes) -> None:
    _check_range(wishes.workers, "workers", 1, WORKERS_MAX)
    _check_range(wishes.workers_min, "workers_min", 0, wishes.workers)
    _check_range(wishes.priority, "priority", -PRIORITY_MAX, PRIORITY_MAX)
    _check_number(wishes.grace_s, "grace_s", 0.0, GRACE_S_MAX)
    limit_s = wishes.time_limit_s
    if limit_s is not None and not 0 < limit_s <= TIME_LIMIT_S_MAX:
        allowed = f"allowed: above 0 to {TIME_LIMIT_S_MAX:g}"
        raise UsageError(f"time_limit_s = {limit_s} is not allowed", hint=allowed)
    if wishes.deadline_at is not None:
        _check_number(wishes.deadline_at, "deadline_at", 0.0, 1e12)
    _check_range(wishes.gpu_memory_min_bytes, "gpu_memory_min_bytes", 0, MEMORY_BYTES_MAX)
    for part in wishes.capability_min:
        _check_range(part, "capability_min", 0, 99)
    _check_named(wishes)


def _check_named(wishes: Wishes) -> None:
    for what, names in (("near", wishes.near), ("apart", wishes.apart)):
        _check_range(len(names), f"number of jobs in {what}", 0, NAMED_MAX)
        for name in names:
            checked_name(name, what=what)
    _check_range(len(wishes.gpu_models), "number of gpu_models", 0, NAMED_MAX)
    _check_range(len(wishes.labels), "number of labels", 0, NAMED_MAX)
    checked_labels(wishes.labels, what="a label")
    for text in wishes.gpu_models:
        if not text:
            raise UsageError("a GPU model or the key of a label is empty", hint="leave it out, or name it")
    texts = (*wishes.gpu_models, *wishes.labels.keys(), *wishes.labels.values())
    for text in texts:
        check_label(text, what="a GPU model or a label")
    _check_texts(texts, "gpu_models and labels")
    if wishes.vendor and wishes.vendor not in set(Vendor):
        raise UsageError(
            f"vendor {wishes.vendor[:80]!r} is not known", hint=f"allowed: {', '.join(Vendor)}, or empty"
        )


def _check_together(spec: JobSpec) -> None:
    """Wishes that exclude each other, so that nothing waits for what cannot be."""
    wishes = spec.wishes
    if wishes.within is Within.ISLAND and not spec.resources.gpus:
        raise UsageError("within one island without gpus", hint="say how many gpus, or ask for one node")
    of_gpus = (wishes.gpu_models, wishes.vendor, wishes.gpu_memory_min_bytes, spec.resources.gpu_memory_bytes)
    if not spec.resources.gpus and (any(of_gpus) or wishes.capability_min != (0, 0)):
        raise UsageError("it says what gpus must be like, and not how many", hint="say how many gpus")
    if wishes.near and set(wishes.near) <= set(wishes.apart):
        raise UsageError(
            f"near to and apart from jobs named {' or '.join(wishes.near)}", hint="leave one of them out"
        )
    if wishes.workers > 1 and spec.gpu_ids:
        raise UsageError(
            f"gpu_ids with {wishes.workers} workers", hint="name accelerators for a job of one worker only"
        )
    on_one_node = wishes.within in (Within.NODE, Within.ISLAND)
    if wishes.workers > 1 and on_one_node and wishes.spread is Spread.SPREAD:
        raise UsageError(
            f"spread over nodes, and within one {wishes.within}", hint="ask for one of them only"
        )


def _check_pins(spec: JobSpec) -> None:
    if not spec.node_id:
        raise UsageError("gpu_ids without node_id", hint="say on which node these accelerators are")
    if len(set(spec.gpu_ids)) != len(spec.gpu_ids) or len(spec.gpu_ids) != spec.resources.gpus:
        raise UsageError(f"gpu_ids names {len(spec.gpu_ids)} accelerators, gpus says {spec.resources.gpus}")


def _check_range(value: int, what: str, low: int, high: int) -> None:
    if not low <= value <= high:
        raise UsageError(f"{what} = {value} is not allowed", hint=f"allowed: {low} to {high}")


def _check_number(value: float, what: str, low: float, high: float) -> None:
    # Written so that NaN is refused too.
    if not low <= value <= high:
        raise UsageError(f"{what} = {value} is not allowed", hint=f"allowed: {low:g} to {high:g}")
