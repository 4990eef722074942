"""Validation of everything that clients and agents send: jobs, quotas, nodes, endpoints, waiting times.

The limits are in model/limits.py, rules for names in model/names.py. The decoder checks types, and the
numbers of the requests themselves (model/messages/numbers.py). Not responsible for permissions (tenancy/).
"""

from __future__ import annotations

import msgspec

from genie.config.labels import validate_label, validate_labels
from genie.errors import RowTooLargeError, UsageError
from genie.model.allocation import FULL_MILLI
from genie.model.job import JobKind, JobSpec, PlacementConstraints, Resources, Spread, Within
from genie.model.limits import (
    CAPABILITY_MAX,
    CPUS_MAX,
    ENV_ENTRIES_MAX,
    GPUS_MAX,
    GPUS_OF_JOB_MAX,
    GRACE_S_MAX,
    JOB_LIST_ENTRIES_MAX,
    MEMORY_BYTES_MAX,
    PRIORITY_MAX,
    QUOTA_GPUS_MAX,
    SPEC_BYTES_MAX,
    UNIX_TIME_S_MAX,
    WEIGHT_MAX,
    WEIGHT_MIN,
    WORKERS_MAX,
    check_command,
    check_digest,
    check_number,
    check_range,
    check_text,
    check_texts,
    check_time_limit,
)
from genie.model.messages import WAIT_S_MAX, Endpoint
from genie.model.names import validate_env_key, validate_job_name, validate_name, validate_node_id
from genie.model.node import GPUInfo, NodeInfo, Vendor
from genie.model.tenant import QuotaRecord

_NUMA_NODE_MAX = 1023
_COMPUTE_CAPABILITY_MAX = 999


def check_job(spec: JobSpec) -> None:
    """Raise UsageError or NameInvalidError naming the field of a submitted job that is not allowed."""
    validate_job_name(spec.name)
    if spec.kind is not JobKind.COMMAND:
        raise UsageError("a session is opened with OpenDevice, not submitted")
    check_command(spec.command)
    _check_env(spec.env)
    _check_resources(spec.resources)
    _check_constraints(spec.constraints)
    _check_contradictions(spec)
    if spec.node_id:
        validate_node_id(spec.node_id)
    if spec.gpu_ids:
        _check_gpu_ids(spec)
    if spec.workdir is not None:
        check_digest(spec.workdir.digest)
        check_range(spec.workdir.size_bytes, "workdir size", 0, MEMORY_BYTES_MAX)
    check_range(spec.constraints.workers * spec.resources.gpus, "workers * gpus", 0, GPUS_OF_JOB_MAX)
    _check_stored_size(spec)


def _check_stored_size(spec: JobSpec) -> None:
    """A row that is too large could not be changed later: the job could never end."""
    size_bytes = len(msgspec.json.encode(spec))
    if size_bytes > SPEC_BYTES_MAX:
        raise RowTooLargeError(
            f"job {spec.name!r} has {size_bytes} bytes as stored, where a control character counts as six; "
            f"the maximum is {SPEC_BYTES_MAX}",
            hint="send files as a working directory",
        )


def check_quota(quota: QuotaRecord) -> None:
    """Raise UsageError or NameInvalidError naming the field of a quota that is not allowed."""
    validate_name(quota.tenant, what="tenant")
    for what, gpus in (("gpus", quota.gpus), ("borrow_gpus", quota.borrow_gpus)):
        if gpus is not None:
            check_number(gpus, what, 0.0, QUOTA_GPUS_MAX)
    check_number(quota.weight, "weight", WEIGHT_MIN, WEIGHT_MAX)


def check_node(info: NodeInfo) -> None:
    """Raise UsageError or NameInvalidError for a description of a machine that is not allowed."""
    validate_node_id(info.node_id)
    check_number(info.cpus, "cpus", 0.0, CPUS_MAX)
    check_number(info.last_heartbeat, "last_heartbeat", 0.0, UNIX_TIME_S_MAX)
    check_range(info.memory_total_bytes, "memory_total_bytes", 0, MEMORY_BYTES_MAX)
    check_range(info.memory_used_bytes, "memory_used_bytes", 0, MEMORY_BYTES_MAX)
    check_range(info.disk_total_bytes, "disk_total_bytes", 0, MEMORY_BYTES_MAX)
    check_range(info.disk_free_bytes, "disk_free_bytes", 0, MEMORY_BYTES_MAX)
    check_range(info.incarnation, "incarnation", 0, 1 << 62)
    check_range(info.control_port, "control_port", 0, 65535)
    check_range(len(info.gpus), "number of accelerators", 0, GPUS_MAX)
    if len({gpu.gpu_id for gpu in info.gpus}) != len(info.gpus):
        raise UsageError(f"node {info.node_id} lists an accelerator twice")
    validate_labels(info.labels, what=f"a label of node {info.node_id}")
    if info.rack:
        validate_label(info.rack, what=f"the rack of node {info.node_id}")
    texts = [info.hostname, info.host, info.network_backend, info.status_reason, info.version, info.closed]
    for gpu in info.gpus:
        _check_gpu(gpu)
        texts += [gpu.name, gpu.uuid, gpu.reason]
    for text in texts:
        check_text(text, what=f"a text of node {info.node_id}")


def _check_gpu(gpu: GPUInfo) -> None:
    check_range(gpu.gpu_id, "accelerator id", 0, 1 << 20)
    check_range(gpu.memory_total_bytes, "accelerator memory", 0, MEMORY_BYTES_MAX)
    check_range(gpu.memory_used_bytes, "accelerator memory in use", 0, MEMORY_BYTES_MAX)
    check_range(gpu.memory_outside_bytes, "accelerator memory in use outside", 0, MEMORY_BYTES_MAX)
    check_range(gpu.island, "an accelerator's island", 0, 1 << 20)
    check_range(gpu.numa, "an accelerator's NUMA node", 0, _NUMA_NODE_MAX)
    for part in gpu.capability:
        check_range(part, "a part of an accelerator's capability", 0, _COMPUTE_CAPABILITY_MAX)
    for reading in (gpu.utilization_pct, gpu.temperature_c, gpu.power_w):
        check_number(reading or 0.0, "an accelerator's reading", -1e6, 1e6)


def check_endpoint(endpoint: Endpoint) -> None:
    """Raise UsageError for an executor address that is not allowed."""
    check_text(endpoint.host, what="the executor's host")
    check_text(endpoint.server_name, what="the executor's name")
    check_range(endpoint.port, "the executor's port", 1, 65535)


def clamp_wait_s(wait_s: float) -> float:
    """Limit a requested waiting time to WAIT_S_MAX seconds; a longer one is not an error."""
    return min(wait_s, WAIT_S_MAX)


def _check_env(env: dict[str, str]) -> None:
    if len(env) > ENV_ENTRIES_MAX:
        raise UsageError(f"env has {len(env)} entries; the maximum is {ENV_ENTRIES_MAX}")
    for key in env:
        validate_env_key(key)
    check_texts((*env.keys(), *env.values()), "env")


def _check_resources(resources: Resources) -> None:
    check_range(resources.gpus, "gpus", 0, GPUS_MAX)
    check_range(resources.gpu_milli, "gpu_milli", 1, FULL_MILLI)
    check_range(resources.gpu_memory_bytes, "gpu_memory_bytes", 0, MEMORY_BYTES_MAX)
    check_number(resources.cpus, "cpus", 0.0, CPUS_MAX)
    check_range(resources.memory_bytes, "memory_bytes", 0, MEMORY_BYTES_MAX)


def _check_constraints(constraints: PlacementConstraints) -> None:
    check_range(constraints.workers, "workers", 1, WORKERS_MAX)
    check_range(constraints.workers_min, "workers_min", 0, constraints.workers)
    check_range(constraints.priority, "priority", -PRIORITY_MAX, PRIORITY_MAX)
    check_number(constraints.grace_s, "grace_s", 0.0, GRACE_S_MAX)
    check_time_limit(constraints.time_limit_s)
    if constraints.deadline_at is not None:
        check_number(constraints.deadline_at, "deadline_at", 0.0, UNIX_TIME_S_MAX)
    check_range(constraints.gpu_memory_min_bytes, "gpu_memory_min_bytes", 0, MEMORY_BYTES_MAX)
    for part in constraints.capability_min:
        check_range(part, "capability_min", 0, CAPABILITY_MAX)
    _check_list_lengths(constraints)


def _check_list_lengths(constraints: PlacementConstraints) -> None:
    for what, names in (("near", constraints.near), ("apart", constraints.apart)):
        check_range(len(names), f"number of jobs in {what}", 0, JOB_LIST_ENTRIES_MAX)
        for name in names:
            validate_name(name, what=what)
    check_range(len(constraints.gpu_models), "number of gpu_models", 0, JOB_LIST_ENTRIES_MAX)
    validate_labels(constraints.labels, what="a label")
    if not all(constraints.gpu_models):
        raise UsageError("a GPU model in gpu_models is empty", hint="remove the empty name")
    for model in constraints.gpu_models:
        check_text(model, what="a GPU model")
    check_texts(constraints.gpu_models, "gpu_models")
    if constraints.vendor and constraints.vendor not in set(Vendor):
        raise UsageError(
            f"unknown vendor {constraints.vendor[:80]!r}", hint=f"allowed: {', '.join(Vendor)}, or empty"
        )


def _check_contradictions(spec: JobSpec) -> None:
    """Reject constraints that exclude each other: such a job would stay pending forever."""
    constraints = spec.constraints
    if constraints.within is Within.ISLAND and not spec.resources.gpus:
        raise UsageError(
            "within = island requires GPUs, but gpus is 0", hint="set gpus, or use within = node"
        )
    of_gpus = (
        constraints.gpu_models,
        constraints.vendor,
        constraints.gpu_memory_min_bytes,
        spec.resources.gpu_memory_bytes,
    )
    if not spec.resources.gpus and (any(of_gpus) or constraints.capability_min != (0, 0)):
        raise UsageError("GPU constraints require GPUs, but gpus is 0", hint="set gpus")
    if constraints.near and set(constraints.near) <= set(constraints.apart):
        raise UsageError(
            f"near and apart both name job {' or '.join(constraints.near)}", hint="remove one of them"
        )
    if constraints.workers > 1 and spec.gpu_ids:
        raise UsageError(
            f"gpu_ids requires a job with one worker, not {constraints.workers}",
            hint="remove gpu_ids, or set workers to 1",
        )
    on_one_node = constraints.within in (Within.NODE, Within.ISLAND)
    if constraints.workers > 1 and on_one_node and constraints.spread is Spread.SPREAD:
        raise UsageError(
            f"spread and within = {constraints.within} are mutually exclusive", hint="remove one of them"
        )


def _check_gpu_ids(spec: JobSpec) -> None:
    if not spec.node_id:
        raise UsageError("gpu_ids requires node_id", hint="set the node of these accelerators")
    if len(set(spec.gpu_ids)) != len(spec.gpu_ids) or len(spec.gpu_ids) != spec.resources.gpus:
        raise UsageError(f"gpu_ids lists {len(spec.gpu_ids)} accelerators, but gpus is {spec.resources.gpus}")
