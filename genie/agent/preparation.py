"""What a job needs before it starts: its directory's contents, its environment, its command line.

Sessions get the command of an executor with a key, a certificate and a file that tells it
what to do. Not for: whether it may start (jobs.py) and starting it (launcher.py).
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

from genie.agent import jobfiles
from genie.agent.executor import config as executor_config
from genie.agent.processes import JOB_DIR_VARIABLE
from genie.errors import LaunchError, WorkdirError
from genie.hardware import visible_devices_env
from genie.model.job import JobKind, Workdir, parse_unit
from genie.model.messages import GetBlob, Launch, Message, Request, SignExecutor
from genie.model.node import GPUInfo, NodeInfo, Vendor
from genie.runtime import files, tls, workdir
from genie.runtime.tasks import Offload

_Reply = TypeVar("_Reply", bound=Message)

ENDPOINT_FILE = "endpoint.json"
STATUS_FILE = "executor.status"
EXECUTOR_IDLE_S = 60.0
SPIN_US = 20_000
"""How long an executor with a GPU looks for its client's next frame before it sleeps."""
_EXECUTOR_KEY = "executor.key"
_EXECUTOR_CONFIG = "executor.json"


# Below those that Linux gives to outgoing connections.
_PORT_FIRST, _PORTS = 20_000, 10_000


class Call(Protocol):
    """One request to the controller, repeated while that can help."""

    async def __call__(self, request: Request[_Reply]) -> _Reply: ...


def job_environment(
    launch: Launch, *, base: Mapping[str, str], node: NodeInfo, directory: Path
) -> dict[str, str]:
    """The job's whole environment. What the node says about itself and its GPUs cannot be overridden."""
    env = dict(base)
    env["PATH"] = _path_with_interpreter(base.get("PATH", ""))
    env["TMPDIR"] = str(directory / "tmp")
    if len(launch.hosts) > 1:
        env |= _rendezvous(launch)
    env |= launch.spec.env
    env |= _visible(launch, node.gpus)
    env["GENIE_JOB_ID"] = parse_unit(launch.job_id)[0]
    env["GENIE_JOB_RANK"] = str(launch.rank)
    env["GENIE_JOB_WORKERS"] = str(max(len(launch.hosts), 1))
    env["GENIE_JOB_HOSTS"] = ",".join(launch.hosts)
    env["GENIE_JOB_NODE"] = node.node_id
    env["GENIE_JOB_GPUS"] = ",".join(str(gpu_id) for gpu_id in launch.placement.gpu_ids)
    env[JOB_DIR_VARIABLE] = str(directory)
    return env


def _rendezvous(launch: Launch) -> dict[str, str]:
    """What torch.distributed and the like look for. A worker sees its own accelerators only, so it is the
    first of its machine. The port is the same for all workers of a launch, and another for the next."""
    return {
        "MASTER_ADDR": launch.hosts[0],
        "MASTER_PORT": str(_PORT_FIRST + launch.placement.epoch % _PORTS),
        "WORLD_SIZE": str(len(launch.hosts)),
        "RANK": str(launch.rank),
        "LOCAL_RANK": "0",
    }


async def fetch_workdir(call: Call, wanted: Workdir, directory: Path, *, offload: Offload) -> None:
    """Brings the blob here, checks it against its digest, and unpacks it."""
    packed = directory / "workdir.tar"
    hasher = hashlib.sha256()
    got = 0
    with packed.open("wb") as file:
        while got < wanted.size_bytes:
            chunk = await call(GetBlob(digest=wanted.digest, offset=got))
            if not chunk.data or got + len(chunk.data) > wanted.size_bytes:
                raise WorkdirError(f"the directory that was sent along is not {wanted.size_bytes} bytes long")
            file.write(chunk.data)
            hasher.update(chunk.data)
            got += len(chunk.data)
    if hasher.hexdigest() != wanted.digest:
        raise WorkdirError("the directory that was sent along is damaged: its digest is another")
    try:
        await offload(lambda: workdir.unpack(packed, directory / "work"))
    finally:
        packed.unlink(missing_ok=True)


def command_of(launch: Launch) -> tuple[str, ...]:
    assert launch.spec.kind is JobKind.COMMAND
    if not launch.spec.command or any("\x00" in word for word in launch.spec.command):
        raise LaunchError(f"{launch.job_id} has no command that could be started")
    return launch.spec.command


async def prepare_executor(
    call: Call,
    launch: Launch,
    *,
    directory: Path,
    ca_path: Path | None,
    listen_host: str,
    memory_bytes_max: int,
    node: NodeInfo,
) -> tuple[str, ...]:
    """Writes what an executor needs and returns its command. `ca_path` is None where TLS is off."""
    certificate_path, key_path = directory / "executor.pem", directory / _EXECUTOR_KEY
    if ca_path is not None:
        key_pem, csr_pem = tls.new_key_and_csr()
        order = SignExecutor(job_id=launch.job_id, epoch=launch.placement.epoch, csr_pem=csr_pem)
        signed = await call(order)
        files.write_private(key_path, key_pem)
        files.write_private(certificate_path, signed.certificate_pem.encode())
    gpus = [gpu for gpu in node.gpus if gpu.gpu_id in launch.placement.gpu_ids]
    vendor = gpus[0].vendor if gpus else Vendor.CPU
    path = directory / _EXECUTOR_CONFIG
    executor_config.write(
        path,
        executor_config.ExecutorConfig(
            job_id=launch.job_id,
            endpoint_path=str(directory / ENDPOINT_FILE),
            status_path=str(directory / STATUS_FILE),
            ticket_sha256=launch.ticket_sha256,
            listen_host=listen_host,
            server_name=tls.executor_name(launch.job_id),
            certificate_path=str(certificate_path) if ca_path is not None else "",
            key_path=str(key_path) if ca_path is not None else "",
            ca_path=str(ca_path) if ca_path is not None else "",
            vendor=vendor.value,
            device_index=0,  # the first that it sees; its environment hides the others
            memory_bytes_max=memory_bytes_max,
            idle_s=EXECUTOR_IDLE_S,
            spin_us=_spin_us(node, vendor),
            threads=_threads(launch, node, vendor),
        ),
    )
    return (sys.executable, "-m", "genie.agent.executor", "--config", str(path))


def read_endpoint(directory: Path) -> int | None:
    """The port on which the executor listens, once it does."""
    try:
        port = json.loads(jobfiles.read(directory / ENDPOINT_FILE))["port"]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise LaunchError(f"the executor's endpoint file cannot be read: {error}") from error
    if not isinstance(port, int) or not 0 < port < 65536:
        raise LaunchError(f"the executor names the port {port!r}")
    return port


def read_status(directory: Path) -> str:
    """What the executor says of itself while it does not listen; empty when it says nothing."""
    try:
        return jobfiles.read(directory / STATUS_FILE).decode("utf-8", "replace")
    except OSError:
        return ""


def forget_secrets(directory: Path) -> None:
    """What an ended executor leaves that nobody needs any more."""
    for name in (_EXECUTOR_KEY, _EXECUTOR_CONFIG):
        jobfiles.try_unlink(directory / name)


def _visible(launch: Launch, infos: Sequence[GPUInfo]) -> dict[str, str]:
    held = [gpu for gpu in infos if gpu.gpu_id in launch.placement.gpu_ids]
    vendors = {gpu.vendor for gpu in held} or {Vendor.CPU}
    if len(held) != len(launch.placement.gpu_ids) or len(vendors) != 1:
        raise LaunchError(
            f"{launch.job_id} was given the accelerators {list(launch.placement.gpu_ids)}, "
            f"and this node has {[gpu.gpu_id for gpu in infos]}"
        )
    return visible_devices_env(vendors.pop(), launch.placement.gpu_ids, infos)


def _threads(launch: Launch, node: NodeInfo, vendor: Vendor) -> int:
    if launch.spec.resources.cpus >= 1:
        return int(launch.spec.resources.cpus)
    return max(1, int(node.cpus) // max(1, node.gpu_count)) if vendor is Vendor.CPU else 4


def _spin_us(node: NodeInfo, vendor: Vendor) -> int:
    """Waking up takes as long as a short step of a GPU. Only where that leaves cores to others."""
    return SPIN_US if vendor is not Vendor.CPU and node.cpus >= 2 * node.gpu_count + 2 else 0


def _path_with_interpreter(path: str) -> str:
    """`python` in a job is the agent's own environment first: that is where torch and Genie are."""
    own = str(Path(sys.executable).parent)
    rest = [part for part in (path or os.defpath).split(os.pathsep) if part and part != own]
    return os.pathsep.join([own, *rest])
