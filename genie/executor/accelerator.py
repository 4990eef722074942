"""Initializes the accelerator: threads, memory limits, and its description for the client.

Imports torch, so it is imported after the executor listens.
"""

from __future__ import annotations

import logging
import platform
import resource
from pathlib import Path

import psutil
import torch

from genie.errors import HardwareError
from genie.processes.executor_config import ExecutorConfig
from genie.runtime import device_protocol

_log = logging.getLogger(__name__)

# For stacks, scratch space of kernels and torch itself.
_RUNTIME_OVERHEAD_BYTES = 512 * 1024**2


def prepare_accelerator(config: ExecutorConfig) -> device_protocol.Opened:
    """HardwareError if torch cannot use the accelerator."""
    if config.threads:
        torch.set_num_threads(config.threads)
    device = torch.device(config.device)
    name, memory_bytes = (
        _cpu_name_and_memory_bytes() if device.type == "cpu" else _gpu_name_and_memory_bytes(device)
    )
    if config.memory_bytes_max:
        _limit_memory(device, config.memory_bytes_max, memory_bytes)
    return device_protocol.Opened(
        kind=device.type,
        name=name,
        memory_bytes=min(memory_bytes, config.memory_bytes_max or memory_bytes),
        job_id=config.job_id,
        torch_version=str(torch.__version__),
    )


def _cpu_name_and_memory_bytes() -> tuple[str, int]:
    return platform.processor() or platform.machine(), psutil.virtual_memory().total


def _gpu_name_and_memory_bytes(device: torch.device) -> tuple[str, int]:
    module = torch.get_device_module(device)
    count = module.device_count() if module.is_available() else 0
    if device.index >= count:
        raise HardwareError(
            f"torch {torch.__version__} sees {count} {device.type} devices; {device} is not one of them",
            hint="check the driver, and that torch is built for it",
        )
    module.set_device(device)
    properties = module.get_device_properties(device)
    return str(properties.name), int(properties.total_memory)


def _limit_memory(device: torch.device, limit_bytes: int, memory_bytes: int) -> None:
    """Limit the temporary memory of ops as well: the quota counts only tensors."""
    if device.type == "cuda":
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit_bytes / memory_bytes), device)
    elif device.type == "cpu":
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        soft = data_segment_bytes() + limit_bytes + _RUNTIME_OVERHEAD_BYTES
        resource.setrlimit(resource.RLIMIT_DATA, (soft if hard < 0 else min(soft, hard), hard))
    else:
        _log.warning(
            "temporary memory of ops on %s is not limited; the quota counts only tensors",
            device.type,
        )


def data_segment_bytes() -> int:
    """Memory that counts towards RLIMIT_DATA; the limit only has an effect on Linux."""
    status = Path("/proc/self/status")
    if not status.exists():
        return psutil.Process().memory_info().vms
    line = next(line for line in status.read_text().splitlines() if line.startswith("VmData:"))
    return int(line.split()[1]) * 1024
