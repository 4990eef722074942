"""The checks of `genie doctor`: one function per part; each yields results with a suggested fix.

Checks are read-only, except that the port check binds the port and the check of control groups creates one
briefly. Each blocks for a few seconds at most. doctor.py prints the results.
"""

from __future__ import annotations

import asyncio
import enum
import errno
import importlib.metadata
import os
import platform
import re
import shutil
import socket
import stat
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import genie
from genie.cli.quantities import format_count, format_duration, format_size
from genie.cli.reply_age import is_without_leader
from genie.config import Settings
from genie.errors import ConfigError, GenieError, NativeBuildError, UnreachableError
from genie.model.names import address_text
from genie.processes import cgroups

if TYPE_CHECKING:
    from genie.supervisor.machine_role import JoinedNode

_VERSION_COMMAND_TIMEOUT_S = 10.0
_CONNECT_TIMEOUT_S = 5.0
_DISK_FREE_BYTES_WARNING_BELOW = 1024**3
_DISK_FREE_BYTES_FAILURE_BELOW = 64 * 1024**2
_TORCH_VERSION_RANGE = ((2, 11), (2, 14))
_NO_LEADER_FIX = "start the other servers with 'genie up' there; 'genie etcd status' shows which respond"
_CERTIFICATE_REMAINING_S_WARNING_BELOW = 3600.0


class CheckVerdict(enum.StrEnum):
    """FAILED: a required part is missing or broken. ABSENT: an optional part is missing."""

    OK = "ok"
    ABSENT = "absent"
    WARNING = "warning"
    FAILED = "failed"


@dataclass(frozen=True, kw_only=True)
class CheckOutcome:
    name: str
    verdict: CheckVerdict
    found: str
    fix: str = ""
    detail: str = ""
    """Shown with --debug and --json."""


def check_python_and_system() -> Iterator[CheckOutcome]:
    version = platform.python_version()
    good = sys.version_info >= (3, 11)
    yield CheckOutcome(
        name="python",
        verdict=CheckVerdict.OK if good else CheckVerdict.FAILED,
        found=f"{version} at {sys.executable}",
        fix="" if good else "use Python 3.11 or newer",
    )
    system = platform.system()
    yield CheckOutcome(
        name="system",
        verdict=CheckVerdict.OK if system == "Linux" else CheckVerdict.WARNING,
        found=f"{system} {platform.release()} on {platform.machine()}",
        fix=""
        if system == "Linux"
        else "use this machine as a client only; controllers and agents require Linux",
    )


def check_packages() -> Iterator[CheckOutcome]:
    """Reads package metadata, because importing torch takes seconds."""
    yield _check_torch()
    for name, use, fix in (
        ("cryptography", "certificates", "pip install cryptography"),
        ("uvloop", "a faster event loop", "pip install uvloop"),
        ("grpcio", "etcd as the store", "pip install 'genie-gpu[etcd]'"),
    ):
        version = _find_installed_version(name)
        needed = name == "cryptography"
        missing = CheckVerdict.FAILED if needed else CheckVerdict.ABSENT
        yield CheckOutcome(
            name=name,
            verdict=missing if version is None else CheckVerdict.OK,
            found=f"not installed; needed for {use}" if version is None else version,
            fix=fix if version is None else "",
        )


def _check_torch() -> CheckOutcome:
    low, high = (".".join(map(str, bound)) for bound in _TORCH_VERSION_RANGE)
    fix = f"pip install 'torch>={low},<{high}'"
    version = _find_installed_version("torch")
    if version is None:
        found = "not installed; needed for the device remote_accelerator, not for jobs"
        return CheckOutcome(name="torch", verdict=CheckVerdict.ABSENT, found=found, fix=fix)
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if not _TORCH_VERSION_RANGE[0] <= numbers < _TORCH_VERSION_RANGE[1]:
        found = f"{version} is not supported; supported versions: >={low}, <{high}"
        return CheckOutcome(name="torch", verdict=CheckVerdict.WARNING, found=found, fix=fix)
    return CheckOutcome(name="torch", verdict=CheckVerdict.OK, found=version)


def check_libraries_and_system_tools() -> Iterator[CheckOutcome]:
    yield _check_compiler()
    yield _check_device_library()
    yield _check_scheduler_library()
    yield _check_etcd()
    yield _check_control_groups()


def _check_compiler() -> CheckOutcome:
    """Checks the compiler and the Python headers, which distributions package separately."""
    from genie.native import libraries

    name, use = "c++ compiler", "needed once, to compile the device remote_accelerator"
    fix = "Debian, Ubuntu: apt install g++ python3-dev; Fedora: dnf install gcc-c++ python3-devel"
    compiler = libraries.find_compiler()
    if compiler is None:
        return CheckOutcome(
            name=name,
            verdict=CheckVerdict.ABSENT,
            found=f"{libraries.missing_compiler_reason()}; {use}",
            fix=fix,
        )
    version = _run_and_get_first_output_line([*compiler, "--version"])
    found = f"{' '.join(compiler)}: {version}" if version else " ".join(compiler)
    if not (Path(sysconfig.get_path("include")) / "Python.h").is_file():
        found = f"{found}, but the Python headers are missing; {use}"
        return CheckOutcome(name=name, verdict=CheckVerdict.ABSENT, found=found, fix=fix)
    return CheckOutcome(name=name, verdict=CheckVerdict.OK, found=found)


def _check_device_library() -> CheckOutcome:
    """Checks that the device library is compiled for the installed torch. Imports torch."""
    from genie.native import libraries

    name = "device library"
    try:
        build_cache, torch = (
            libraries.BuildCache.of_this_installation(),
            libraries.TorchPlatform.from_installation().torch_version,
        )
        missing = [library for library in libraries.TORCH_LIBRARIES if not build_cache.is_built(library)]
    except NativeBuildError as error:
        return CheckOutcome(name=name, verdict=CheckVerdict.ABSENT, found=error.message, fix=error.hint)
    if missing:
        found = f"{' and '.join(missing)} not compiled for torch {torch} yet; compiled on first use"
        return CheckOutcome(name=name, verdict=CheckVerdict.ABSENT, found=found, fix="python -m genie.native")
    found = f"compiled for torch {torch}, in {build_cache.cache_folder}"
    return CheckOutcome(name=name, verdict=CheckVerdict.OK, found=found)


def _check_scheduler_library() -> CheckOutcome:
    """Checks that the native scheduler library is compiled."""
    from genie.controller.placement.placers import why_scheduler_not_compiled

    name, fix = "scheduler library", "python -m genie.native genie_scheduler"
    if why := why_scheduler_not_compiled():
        return CheckOutcome(name=name, verdict=CheckVerdict.ABSENT, found=why, fix=fix)
    return CheckOutcome(name=name, verdict=CheckVerdict.OK, found="compiled")


def _check_control_groups() -> CheckOutcome:
    group = cgroups.find_usable(f"genie-doctor-{os.getpid()}", cgroups.own_control_groups())
    if group is None:
        return CheckOutcome(
            name="control groups",
            verdict=CheckVerdict.ABSENT,
            found="none can be created; jobs on this node are tracked by parent and environment only",
            fix="run the agent as root, or as a systemd service with Delegate=yes",
        )
    return CheckOutcome(name="control groups", verdict=CheckVerdict.OK, found=f"below {Path(group).parent}")


def _check_etcd() -> CheckOutcome:
    path = shutil.which("etcd")
    if path is None:
        return CheckOutcome(
            name="etcd",
            verdict=CheckVerdict.ABSENT,
            found="not on PATH; needed only for several controllers",
            fix="install etcd (Debian: etcd-server)",
        )
    line = _run_and_get_first_output_line([path, "--version"])
    try:
        from genie.controller.store.etcd_errors import check_etcd_version

        check_etcd_version(line.rpartition(" ")[2], endpoint=path)
    except ImportError:
        return CheckOutcome(
            name="etcd",
            verdict=CheckVerdict.ABSENT,
            found=f"{line}, but Python's gRPC packages are not installed",
            fix="pip install 'genie-gpu[etcd]'",
        )
    except GenieError as error:
        return CheckOutcome(
            name="etcd",
            verdict=CheckVerdict.WARNING,
            found=f"not usable as the store: {error.message}",
            fix=error.hint,
        )
    return CheckOutcome(name="etcd", verdict=CheckVerdict.OK, found=f"{line} at {path}")


def check_accelerators() -> Iterator[CheckOutcome]:
    from genie.hardware import probe_accelerators

    for result in probe_accelerators():
        yield CheckOutcome(
            name=f"accelerator {result.vendor}",
            verdict=CheckVerdict.OK if result.usable else CheckVerdict.ABSENT,
            found=result.reason,
            fix=result.fix,
        )


def check_network_backends(settings: Settings) -> Iterator[CheckOutcome]:
    """Checks which network backends this machine supports; `check_port_and_cluster` checks the connection."""
    from genie.runtime.backend_info import BACKENDS
    from genie.runtime.network_discovery import NetworkDiscovery, probe_of_backend

    host, port = _find_cluster_address(settings) or ("127.0.0.1", settings.cluster.master_port)
    result = asyncio.run(NetworkDiscovery().discover(host, port, timeout_s=_CONNECT_TIMEOUT_S))
    yield CheckOutcome(name="network tcp", verdict=CheckVerdict.OK, found="always available")
    for name, info in BACKENDS.items():
        if name == "tcp":
            continue
        probe = probe_of_backend(name, result.probes)
        if not info.implemented:
            found = "not implemented in this version"
            yield CheckOutcome(
                name=f"network {name}", verdict=CheckVerdict.ABSENT, found=found, detail=probe.reason
            )
            continue
        yield CheckOutcome(
            name=f"network {name}",
            verdict=CheckVerdict.OK if probe.available else CheckVerdict.ABSENT,
            found=probe.reason,
            fix=probe.fix,
        )


def check_state_directory(settings: Settings) -> Iterator[CheckOutcome]:
    path = settings.paths.state_dir
    existing = next(folder for folder in (path, *path.parents) if folder.exists())
    if not os.access(existing, os.W_OK | os.X_OK):
        yield CheckOutcome(
            name="state directory",
            verdict=CheckVerdict.FAILED,
            found=f"no write permission for {existing}",
            fix="set GENIE_STATE_DIR to a writable directory",
        )
        return
    mode = stat.S_IMODE(path.stat().st_mode) if path.exists() else 0o700
    open_to_others = bool(mode & 0o077)
    yield CheckOutcome(
        name="state directory",
        verdict=CheckVerdict.WARNING if open_to_others else CheckVerdict.OK,
        found=f"{path} (mode {mode:o})" if path.exists() else f"{path}, not created yet",
        fix=f"chmod 700 {path}" if open_to_others else "",
    )
    yield from _check_server_join(path)
    free = shutil.disk_usage(existing).free
    low, least = free < _DISK_FREE_BYTES_WARNING_BELOW, free < _DISK_FREE_BYTES_FAILURE_BELOW
    yield CheckOutcome(
        name="disk space",
        verdict=CheckVerdict.FAILED if least else CheckVerdict.WARNING if low else CheckVerdict.OK,
        found=f"{format_size(free)} free in {existing}",
        fix="free disk space, or set GENIE_STATE_DIR to another disk" if low else "",
    )


def _check_server_join(state_dir: Path) -> Iterator[CheckOutcome]:
    from genie.supervisor.incomplete_join import IncompleteJoin
    from genie.supervisor.process_records import SUPERVISOR, read_process_record

    incomplete = IncompleteJoin.read(state_dir)
    if incomplete is None or read_process_record(state_dir, SUPERVISOR) is not None:
        return  # with a supervisor, it goes on
    yield CheckOutcome(
        name="server join",
        verdict=CheckVerdict.FAILED,
        found=f"a join of this machine as a server was interrupted; {state_dir} has the key of the CA",
        fix="run 'genie up', which continues the join: etcd already has this machine as a member"
        if incomplete.may_vote(state_dir)
        else "repeat 'genie join --server' with a new token, or run 'genie up': both remove what it left",
    )


def check_clock() -> Iterator[CheckOutcome]:
    """Checks the clock: a wrong clock makes valid certificates and tokens appear invalid."""
    installed_at = Path(genie.__file__).stat().st_mtime
    behind_s = installed_at - time.time()
    wrong = behind_s > 86400
    yield CheckOutcome(
        name="clock",
        verdict=CheckVerdict.FAILED if wrong else CheckVerdict.OK,
        found=f"at least {format_duration(behind_s)} slow: earlier than the installation of Genie"
        if wrong
        else time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        fix="synchronize the clock, for example with NTP" if wrong else "",
    )


def check_certificate_expiry(settings: Settings) -> Iterator[CheckOutcome]:
    state = settings.paths.state_dir
    paths = [state / "controller" / "ca.pem", state / "controller" / "controller.pem"]
    paths += sorted((state / "agents").glob("*/node.pem"))
    for path in paths:
        if path.exists():
            yield _check_certificate_file_expiry(path)


def _check_certificate_file_expiry(path: Path) -> CheckOutcome:
    from genie.runtime.tls import validity_period

    name = f"certificate {path.name if path.name != 'node.pem' else path.parent.name}"
    try:
        start, end = validity_period(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        return CheckOutcome(
            name=name,
            verdict=CheckVerdict.FAILED,
            found=f"could not read {path}: {error}",
            fix="restore the file from a backup",
        )
    left_s = end - time.time()
    if left_s <= 0 or start > time.time():
        found = f"{path} has expired or is not valid yet"
        return CheckOutcome(
            name=name,
            verdict=CheckVerdict.WARNING,
            found=found,
            fix="check the clock; 'genie up' renews the certificate",
        )
    low = left_s < _CERTIFICATE_REMAINING_S_WARNING_BELOW
    return CheckOutcome(
        name=name,
        verdict=CheckVerdict.WARNING if low else CheckVerdict.OK,
        found=f"valid for {format_duration(left_s)}",
        fix="renewal is overdue; read the controller's log" if low else "",
    )


def check_port_and_cluster(settings: Settings) -> Iterator[CheckOutcome]:
    """Checks that the port is free or used by the local cluster, and that the cluster accepts the token."""
    from genie.supervisor.local_server import find_local_server_problem
    from genie.supervisor.machine_role import find_joined_nodes
    from genie.supervisor.this_machine import is_own_address

    problem = find_local_server_problem(settings.paths.state_dir)
    if problem is not None:
        yield CheckOutcome(
            name="local server", verdict=CheckVerdict.FAILED, found=problem.message, fix=problem.hint
        )
    answered, found, fix = asyncio.run(_fetch_cluster_reachable_found_and_fix(settings))
    where = _find_cluster_address(settings)
    local_port = settings.controller.port
    is_used_by_local_cluster = (
        answered and where is not None and where[1] == local_port and is_own_address(where[0])
    )
    yield _check_port_is_usable(
        settings.controller.bind, local_port, is_used_by_local_cluster=is_used_by_local_cluster
    )
    if where is None and problem is not None:
        return
    if where is None:
        if nodes := find_joined_nodes(settings.paths.state_dir):
            yield _check_joined_nodes(nodes, settings.paths.state_dir)
            return
        yield CheckOutcome(
            name="cluster",
            verdict=CheckVerdict.ABSENT,
            found="no local cluster, and no address configured",
            fix="genie up",
        )
        return
    yield CheckOutcome(
        name="cluster", verdict=CheckVerdict.OK if answered else CheckVerdict.FAILED, found=found, fix=fix
    )


def _check_joined_nodes(nodes: list[JoinedNode], state_dir: Path) -> CheckOutcome:
    from genie.supervisor.local_cluster import find_running_cluster

    found = ", ".join(f"node {node.node_id} of {address_text(node.host, node.port)}" for node in nodes)
    if find_running_cluster(state_dir) is not None:
        return CheckOutcome(name="cluster", verdict=CheckVerdict.OK, found=found)
    return CheckOutcome(
        name="cluster",
        verdict=CheckVerdict.WARNING,
        found=f"{found}; its agent is not running",
        fix=" or ".join(node.start_command for node in nodes),
    )


def _check_port_is_usable(host: str, port: int, *, is_used_by_local_cluster: bool) -> CheckOutcome:
    name = f"port {port}"
    if is_used_by_local_cluster:
        return CheckOutcome(name=name, verdict=CheckVerdict.OK, found="in use by the local cluster")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            in_use = error.errno == errno.EADDRINUSE
            return CheckOutcome(
                name=name,
                verdict=CheckVerdict.WARNING,
                found=f"{address_text(host, port)} is in use by another program" if in_use else str(error),
                fix="use another port: genie up --port N, or GENIE_CONTROLLER_PORT",
            )
    return CheckOutcome(name=name, verdict=CheckVerdict.OK, found="free")


async def _fetch_cluster_reachable_found_and_fix(settings: Settings) -> tuple[bool, str, str]:
    from genie.cluster.client import open_client

    try:
        async with (
            asyncio.timeout(2 * _CONNECT_TIMEOUT_S),
            open_client(settings, timeout_s=_CONNECT_TIMEOUT_S) as client,
        ):
            status = await client.status()
    except TimeoutError:
        return False, f"no reply within {2 * _CONNECT_TIMEOUT_S:g} s", "read the controller's log"
    except UnreachableError as error:
        return (
            False,
            error.message,
            "start the cluster: genie up; or remove a stale local.json: genie down",
        )
    except GenieError as error:
        return False, error.message, error.hint
    if is_without_leader(status):
        why = next(iter(status.alarms), "no leader: the store does not respond")
        return False, f"{client.where} is reachable, but there is {why}", _NO_LEADER_FIX
    nodes = format_count(sum(status.nodes.values()), "node")
    return True, f"{client.where} is reachable: version {status.version}, {nodes}", ""


def _find_cluster_address(settings: Settings) -> tuple[str, int] | None:
    from genie.runtime.credentials import find_address

    try:
        return find_address(settings.cluster, settings.paths.state_dir)
    except ConfigError:
        return None


def _find_installed_version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _run_and_get_first_output_line(argv: list[str]) -> str:
    try:
        done = subprocess.run(
            argv, capture_output=True, text=True, timeout=_VERSION_COMMAND_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return (done.stdout or done.stderr).strip().partition("\n")[0]
