"""Prepares a job for its start: working directory, environment, command line.

For a session this is the command of an executor with its key, certificate and configuration file.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

from genie.agent import job_files
from genie.agent.leftovers import JOB_DIR_VARIABLE
from genie.errors import LaunchError, WorkdirError
from genie.hardware import visible_devices_env
from genie.model.job import JobKind, Workdir, parse_worker_name
from genie.model.messages import GetBlob, Launch, Message, Request
from genie.model.messages.handshake import SignExecutor
from genie.model.node import GPUInfo, NodeInfo, Vendor
from genie.processes import executor_config, files, workdir
from genie.processes.tasks import Offload
from genie.runtime import tls

_Reply = TypeVar("_Reply", bound=Message)

EXECUTOR_ENDPOINT_FILE = "endpoint.json"
EXECUTOR_STATUS_FILE = "executor.status"
EXECUTOR_IDLE_TIMEOUT_S = 60.0
EXECUTOR_BUSY_WAIT_US = 20_000
"""How long an executor with a GPU busy-waits for the next frame of its client."""
_EXECUTOR_KEY_FILE = "executor.key"
_EXECUTOR_CONFIG_FILE = "executor.json"

# Below the ephemeral port range of Linux.
_RENDEZVOUS_PORT_FIRST, _RENDEZVOUS_PORT_COUNT = 20_000, 10_000


class CallLeaderWithRetries(Protocol):
    """Sends a request to the controller, with retries."""

    async def __call__(self, request: Request[_Reply]) -> _Reply: ...


def job_environment(
    launch: Launch, *, base: Mapping[str, str], node: NodeInfo, directory: Path
) -> dict[str, str]:
    """Returns the environment of the job, which cannot override the variables set for it below."""
    env = dict(base)
    env["PATH"] = _path_variable_for_jobs(base.get("PATH", ""))
    env["TMPDIR"] = str(directory / "tmp")
    if len(launch.hosts) > 1:
        env |= _rendezvous_variables(launch)
    env |= launch.spec.env
    env |= _visible_device_variables(launch, node.gpus)
    env["GENIE_JOB_ID"] = parse_worker_name(launch.job_id)[0]
    env["GENIE_JOB_RANK"] = str(launch.rank)
    env["GENIE_JOB_WORKERS"] = str(max(len(launch.hosts), 1))
    env["GENIE_JOB_HOSTS"] = ",".join(launch.hosts)
    env["GENIE_JOB_NODE"] = node.node_id
    env["GENIE_JOB_GPUS"] = ",".join(str(gpu_id) for gpu_id in launch.placement.gpu_ids)
    env[JOB_DIR_VARIABLE] = str(directory)
    return env


def _rendezvous_variables(launch: Launch) -> dict[str, str]:
    """Variables of torch.distributed. A worker sees only its own accelerators, so its local rank is 0. All
    workers of a launch use the same port, the next launch another one."""
    return {
        "MASTER_ADDR": launch.hosts[0],
        "MASTER_PORT": str(_RENDEZVOUS_PORT_FIRST + launch.placement.epoch % _RENDEZVOUS_PORT_COUNT),
        "WORLD_SIZE": str(len(launch.hosts)),
        "RANK": str(launch.rank),
        "LOCAL_RANK": "0",
    }


async def fetch_and_unpack_workdir(
    call: CallLeaderWithRetries, workdir: Workdir, directory: Path, *, offload: Offload
) -> None:
    """Downloads the working directory, verifies its digest and unpacks it."""
    packed = directory / "workdir.tar"
    hasher = hashlib.sha256()
    received_bytes = 0
    while received_bytes < workdir.size_bytes:
        chunk = await call(GetBlob(digest=workdir.digest, offset=received_bytes))
        if not chunk.data or received_bytes + len(chunk.data) > workdir.size_bytes:
            raise WorkdirError(f"the uploaded working directory does not have {workdir.size_bytes} bytes")
        await offload(partial(_append_to_file, packed, chunk.data), writes=True)
        hasher.update(chunk.data)
        received_bytes += len(chunk.data)
    if hasher.hexdigest() != workdir.digest:
        raise WorkdirError("the uploaded working directory is damaged: its digest does not match")
    await offload(partial(_unpack_and_remove_archive, packed, directory / "work"), writes=True)


def _append_to_file(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


def _unpack_and_remove_archive(archive: Path, directory: Path) -> None:
    try:
        workdir.unpack(archive, directory)
    finally:
        archive.unlink(missing_ok=True)


def job_command(launch: Launch) -> tuple[str, ...]:
    assert launch.spec.kind is JobKind.COMMAND
    if not launch.spec.command or any("\x00" in word for word in launch.spec.command):
        raise LaunchError(f"{launch.job_id} has no valid command")
    return launch.spec.command


async def prepare_executor(
    call: CallLeaderWithRetries,
    launch: Launch,
    *,
    directory: Path,
    ca_path: Path | None,
    listen_host: str,
    memory_bytes_max: int,
    op_libraries: Mapping[str, str],
    node: NodeInfo,
    offload: Offload,
) -> tuple[str, ...]:
    """Writes the files of an executor and returns its command. `ca_path` is None without TLS."""
    certificate_path, key_path = directory / "executor.pem", directory / _EXECUTOR_KEY_FILE
    if ca_path is not None:
        key_pem, csr_pem = tls.new_key_and_csr()
        order = SignExecutor(job_id=launch.job_id, epoch=launch.placement.epoch, csr_pem=csr_pem)
        signed = await call(order)
        certificate_pem = signed.certificate_pem.encode()
        await offload(partial(files.write_private, key_path, key_pem), writes=True)
        await offload(partial(files.write_private, certificate_path, certificate_pem), writes=True)
    gpus = [gpu for gpu in node.gpus if gpu.gpu_id in launch.placement.gpu_ids]
    vendor = gpus[0].vendor if gpus else Vendor.CPU
    path = directory / _EXECUTOR_CONFIG_FILE
    config = executor_config.ExecutorConfig(
        job_id=launch.job_id,
        endpoint_path=str(directory / EXECUTOR_ENDPOINT_FILE),
        status_path=str(directory / EXECUTOR_STATUS_FILE),
        ticket_sha256=launch.ticket_sha256,
        listen_host=listen_host,
        server_name=tls.executor_certificate_name(launch.job_id),
        certificate_path=str(certificate_path) if ca_path is not None else "",
        key_path=str(key_path) if ca_path is not None else "",
        ca_path=str(ca_path) if ca_path is not None else "",
        vendor=vendor.value,
        device_index=0,  # the first visible one; its environment hides the others
        memory_bytes_max=memory_bytes_max,
        op_libraries=dict(op_libraries),
        idle_s=EXECUTOR_IDLE_TIMEOUT_S,
        spin_us=_executor_busy_wait_us(node, vendor),
        threads=_executor_thread_count(launch, node, vendor),
    )
    await offload(partial(executor_config.write, path, config), writes=True)
    return (sys.executable, "-m", "genie.executor", "--config", str(path))


def read_executor_port(directory: Path) -> int | None:
    """Returns the port of the executor; None until it listens. Blocks."""
    try:
        port = json.loads(job_files.read_small_file(directory / EXECUTOR_ENDPOINT_FILE))["port"]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise LaunchError(f"could not read the endpoint file of the executor: {error}") from error
    if not isinstance(port, int) or not 0 < port < 65536:
        raise LaunchError(f"the executor reported the invalid port {port!r}")
    return port


def read_executor_status(directory: Path) -> str:
    """Returns the status that an executor writes before it listens; empty if there is none. Blocks."""
    try:
        return job_files.read_small_file(directory / EXECUTOR_STATUS_FILE).decode("utf-8", "replace")
    except OSError:
        return ""


def remove_executor_secrets(directory: Path) -> None:
    """Removes the key and configuration of an ended executor. Blocks."""
    for name in (_EXECUTOR_KEY_FILE, _EXECUTOR_CONFIG_FILE):
        job_files.try_remove_any(directory / name)


def _visible_device_variables(launch: Launch, infos: Sequence[GPUInfo]) -> dict[str, str]:
    held = [gpu for gpu in infos if gpu.gpu_id in launch.placement.gpu_ids]
    vendors = {gpu.vendor for gpu in held} or {Vendor.CPU}
    if len(held) != len(launch.placement.gpu_ids) or len(vendors) != 1:
        raise LaunchError(
            f"{launch.job_id} is placed on accelerators {list(launch.placement.gpu_ids)}, "
            f"but this node has {[gpu.gpu_id for gpu in infos]}"
        )
    return visible_devices_env(vendors.pop(), launch.placement.gpu_ids, infos)


def _executor_thread_count(launch: Launch, node: NodeInfo, vendor: Vendor) -> int:
    if launch.spec.resources.cpus >= 1:
        return int(launch.spec.resources.cpus)
    return max(1, int(node.cpus) // max(1, node.gpu_count)) if vendor is Vendor.CPU else 4


def _executor_busy_wait_us(node: NodeInfo, vendor: Vendor) -> int:
    """Busy-waits only if enough cores remain: waking up takes as long as a short GPU step."""
    return EXECUTOR_BUSY_WAIT_US if vendor is not Vendor.CPU and node.cpus >= 2 * node.gpu_count + 2 else 0


def _path_variable_for_jobs(path: str) -> str:
    """Puts the agent's Python environment, which has torch and Genie, first in PATH."""
    own = str(Path(sys.executable).parent)
    rest = [part for part in (path or os.defpath).split(os.pathsep) if part and part != own]
    return os.pathsep.join([own, *rest])
