"""What `genie doctor` looks at: one function per part, each with what was found and what would help.

They look and change nothing; the port check listens for a moment. Each blocks for a few seconds
at most. Not for: how the report is printed (doctor.py).
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

import genie
from genie.cli.quantities import count_text, duration_text, size_text
from genie.config import Settings
from genie.errors import ConfigError, GenieError, NativeBuildError, UnreachableError
from genie.model.names import address_text, parse_endpoint

_COMMAND_S = 10.0
_CONNECT_S = 5.0
_DISK_BYTES_LOW = 1024**3
_DISK_BYTES_MIN = 64 * 1024**2
_TORCH = ((2, 11), (2, 14))
_CERTIFICATE_S_LOW = 3600.0


class Verdict(enum.StrEnum):
    """FAILED is something that Genie cannot do without; ABSENT is optional and not here."""

    OK = "ok"
    ABSENT = "absent"
    WARNING = "warning"
    FAILED = "failed"


@dataclass(frozen=True, kw_only=True)
class Check:
    name: str
    verdict: Verdict
    found: str
    fix: str = ""
    detail: str = ""
    """More about it, for --debug and --json."""


def python() -> Iterator[Check]:
    version = platform.python_version()
    good = sys.version_info >= (3, 11)
    yield Check(
        name="python",
        verdict=Verdict.OK if good else Verdict.FAILED,
        found=f"{version} at {sys.executable}",
        fix="" if good else "use Python 3.11 or newer",
    )
    system = platform.system()
    yield Check(
        name="system",
        verdict=Verdict.OK if system == "Linux" else Verdict.WARNING,
        found=f"{system} {platform.release()} on {platform.machine()}",
        fix="" if system == "Linux" else "use this machine as a client; clusters and agents run on Linux",
    )


def packages() -> Iterator[Check]:
    """By their metadata: importing torch alone takes seconds."""
    yield _torch()
    for name, use, fix in (
        ("cryptography", "certificates", "pip install cryptography"),
        ("uvloop", "a faster event loop", "pip install uvloop"),
        ("grpcio", "etcd as the store", "pip install 'genie-gpu[etcd]'"),
    ):
        version = _version(name)
        needed = name == "cryptography"
        missing = Verdict.FAILED if needed else Verdict.ABSENT
        yield Check(
            name=name,
            verdict=missing if version is None else Verdict.OK,
            found=f"not installed; it is for {use}" if version is None else version,
            fix=fix if version is None else "",
        )


def _torch() -> Check:
    low, high = (".".join(map(str, bound)) for bound in _TORCH)
    fix = f"pip install 'torch>={low},<{high}'"
    version = _version("torch")
    if version is None:
        found = "not installed; jobs run without it, the device remote_accelerator does not"
        return Check(name="torch", verdict=Verdict.ABSENT, found=found, fix=fix)
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if not _TORCH[0] <= numbers < _TORCH[1]:
        found = f"{version}; Genie is made for {low} and newer, before {high}"
        return Check(name="torch", verdict=Verdict.WARNING, found=found, fix=fix)
    return Check(name="torch", verdict=Verdict.OK, found=version)


def tools() -> Iterator[Check]:
    yield _compiler()
    yield _libraries()
    yield _scheduler_library()
    yield _etcd()


def _compiler() -> Check:
    """What native.py would use, and Python's headers, which distributions pack apart."""
    from genie.runtime import native

    name, use = "c++ compiler", "the device remote_accelerator is compiled with it, once"
    fix = "Debian, Ubuntu: apt install g++ python3-dev; Fedora: dnf install gcc-c++ python3-devel"
    compiler = native.find_compiler()
    if compiler is None:
        return Check(name=name, verdict=Verdict.ABSENT, found=f"{native.no_compiler()}; {use}", fix=fix)
    version = _first_line([*compiler, "--version"])
    found = f"{' '.join(compiler)}: {version}" if version else " ".join(compiler)
    if not (Path(sysconfig.get_path("include")) / "Python.h").is_file():
        found = f"{found}, but without the headers of Python; {use}"
        return Check(name=name, verdict=Verdict.ABSENT, found=found, fix=fix)
    return Check(name=name, verdict=Verdict.OK, found=found)


def _libraries() -> Check:
    """Whether the device's C++ part is there for the torch that is installed. Imports torch to know."""
    from genie.runtime import native

    name = "device library"
    try:
        workshop, torch = native.Workshop.of_this_installation(), native.Target.installed().torch_version
        missing = [library for library in native.TORCH_LIBRARIES if not workshop.is_built(library)]
    except NativeBuildError as error:
        return Check(name=name, verdict=Verdict.ABSENT, found=error.message, fix=error.hint)
    if missing:
        found = f"{' and '.join(missing)} not compiled for torch {torch} yet; the first use does that"
        return Check(name=name, verdict=Verdict.ABSENT, found=found, fix="python -m genie.runtime.native")
    return Check(name=name, verdict=Verdict.OK, found=f"compiled for torch {torch}, in {workshop.cache}")


def _scheduler_library() -> Check:
    """Whether decisions are made by compiled code."""
    from genie.runtime.placers import why_plain

    name, fix = "scheduler library", "python -m genie.runtime.native genie_scheduler"
    if why := why_plain():
        return Check(name=name, verdict=Verdict.ABSENT, found=why, fix=fix)
    return Check(name=name, verdict=Verdict.OK, found="compiled")


def _etcd() -> Check:
    path = shutil.which("etcd")
    if path is None:
        return Check(
            name="etcd",
            verdict=Verdict.ABSENT,
            found="not on PATH; only a cluster with several controllers needs it",
            fix="install etcd (Debian: etcd-server)",
        )
    line = _first_line([path, "--version"])
    try:
        from genie.controller.store.etcd_faults import check_version

        check_version(line.rpartition(" ")[2], endpoint=path)
    except ImportError:
        return Check(
            name="etcd",
            verdict=Verdict.ABSENT,
            found=f"{line}, but Python's gRPC packages are not installed",
            fix="pip install 'genie-gpu[etcd]'",
        )
    except GenieError as error:
        return Check(
            name="etcd", verdict=Verdict.WARNING, found=f"refused as a store: {error.message}", fix=error.hint
        )
    return Check(name="etcd", verdict=Verdict.OK, found=f"{line} at {path}")


def accelerators() -> Iterator[Check]:
    from genie.hardware import probe

    for result in probe():
        yield Check(
            name=f"accelerator {result.vendor}",
            verdict=Verdict.OK if result.usable else Verdict.ABSENT,
            found=result.reason,
            fix=result.fix,
        )


def network(settings: Settings) -> Iterator[Check]:
    """Which backends this machine has. Whether a cluster answers is another check."""
    from genie.runtime.backend_info import BACKENDS
    from genie.runtime.network_discovery import NetworkDiscovery, backend_probe

    host, port = _cluster_address(settings) or ("127.0.0.1", settings.cluster.master_port)
    result = asyncio.run(NetworkDiscovery().discover(host, port, timeout_s=_CONNECT_S))
    yield Check(name="network tcp", verdict=Verdict.OK, found="works everywhere")
    for name, info in BACKENDS.items():
        if name == "tcp":
            continue
        probe = backend_probe(name, result.probes)
        if not info.implemented:
            found = "this version of Genie has no transport for it"
            yield Check(name=f"network {name}", verdict=Verdict.ABSENT, found=found, detail=probe.reason)
            continue
        yield Check(
            name=f"network {name}",
            verdict=Verdict.OK if probe.available else Verdict.ABSENT,
            found=probe.reason,
            fix=probe.fix,
        )


def state_directory(settings: Settings) -> Iterator[Check]:
    path = settings.paths.state_dir
    there = next(folder for folder in (path, *path.parents) if folder.exists())
    if not os.access(there, os.W_OK | os.X_OK):
        yield Check(
            name="state directory",
            verdict=Verdict.FAILED,
            found=f"{there} cannot be written",
            fix="set GENIE_STATE_DIR to a place that you can write",
        )
        return
    mode = stat.S_IMODE(path.stat().st_mode) if path.exists() else 0o700
    open_to_others = bool(mode & 0o077)
    yield Check(
        name="state directory",
        verdict=Verdict.WARNING if open_to_others else Verdict.OK,
        found=f"{path} (mode {mode:o})" if path.exists() else f"{path}, not made yet",
        fix=f"chmod 700 {path}" if open_to_others else "",
    )
    free = shutil.disk_usage(there).free
    low, least = free < _DISK_BYTES_LOW, free < _DISK_BYTES_MIN
    yield Check(
        name="disk space",
        verdict=Verdict.FAILED if least else Verdict.WARNING if low else Verdict.OK,
        found=f"{size_text(free)} free under {there}",
        fix="make room, or move GENIE_STATE_DIR" if low else "",
    )


def clock() -> Iterator[Check]:
    """Certificates and tokens have an end: a clock that is far off makes good ones bad."""
    installed_at = Path(genie.__file__).stat().st_mtime
    behind_s = installed_at - time.time()
    wrong = behind_s > 86400
    yield Check(
        name="clock",
        verdict=Verdict.FAILED if wrong else Verdict.OK,
        found=f"{duration_text(behind_s)} before Genie was installed"
        if wrong
        else time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        fix="set the clock, for example with NTP" if wrong else "",
    )


def certificates(settings: Settings) -> Iterator[Check]:
    state = settings.paths.state_dir
    paths = [state / "controller" / "ca.pem", state / "controller" / "controller.pem"]
    paths += sorted((state / "agents").glob("*/node.pem"))
    for path in paths:
        if path.exists():
            yield _certificate(path)


def _certificate(path: Path) -> Check:
    from genie.runtime.tls import validity

    name = f"certificate {path.name if path.name != 'node.pem' else path.parent.name}"
    try:
        start, end = validity(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        return Check(
            name=name, verdict=Verdict.FAILED, found=f"{path}: {error}", fix="restore it from a backup"
        )
    left_s = end - time.time()
    if left_s <= 0 or start > time.time():
        found = f"{path} is not valid now"
        return Check(
            name=name, verdict=Verdict.WARNING, found=found, fix="check the clock; 'genie up' renews it"
        )
    low = left_s < _CERTIFICATE_S_LOW
    return Check(
        name=name,
        verdict=Verdict.WARNING if low else Verdict.OK,
        found=f"valid for {duration_text(left_s)}",
        fix="it is renewed at half of its life; see the controller's log why it was not" if low else "",
    )


def cluster(settings: Settings) -> Iterator[Check]:
    """Whether the port is free or ours, and whether the cluster answers to the token at hand."""
    answered, found, fix = asyncio.run(_ask_cluster(settings))
    where = _cluster_address(settings)
    local_port = settings.controller.port
    ours = answered and where is not None and where[1] == local_port
    yield _port(settings.controller.bind, local_port, ours=ours)
    if where is None:
        yield Check(
            name="cluster",
            verdict=Verdict.ABSENT,
            found="none here, and none was named",
            fix="start one: genie up",
        )
        return
    yield Check(name="cluster", verdict=Verdict.OK if answered else Verdict.FAILED, found=found, fix=fix)


def _port(host: str, port: int, *, ours: bool) -> Check:
    name = f"port {port}"
    if ours:
        return Check(name=name, verdict=Verdict.OK, found="used by this cluster")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            taken = error.errno == errno.EADDRINUSE
            return Check(
                name=name,
                verdict=Verdict.WARNING,
                found=f"{address_text(host, port)} is in use by another program" if taken else str(error),
                fix="start with 'genie up --port N', or set GENIE_CONTROLLER_PORT",
            )
    return Check(name=name, verdict=Verdict.OK, found="free")


async def _ask_cluster(settings: Settings) -> tuple[bool, str, str]:
    from genie.cluster.client import open_client

    try:
        async with asyncio.timeout(2 * _CONNECT_S), open_client(settings, timeout_s=_CONNECT_S) as client:
            status = await client.status()
    except TimeoutError:
        return False, f"no answer within {2 * _CONNECT_S:g} s", "see the log of the controller"
    except UnreachableError as error:
        return (
            False,
            error.message,
            "start it with 'genie up', or remove a stale local.json with 'genie down'",
        )
    except GenieError as error:
        return False, error.message, error.hint
    nodes = count_text(sum(status.nodes.values()), "node")
    return True, f"{client.where} answers: version {status.version}, {nodes}", ""


def _cluster_address(settings: Settings) -> tuple[str, int] | None:
    from genie.runtime.credentials import LocalCluster

    if settings.cluster.master_addr is not None:
        return parse_endpoint(
            settings.cluster.master_addr, what="GENIE_MASTER_ADDR", port=settings.cluster.master_port
        )
    try:
        local = LocalCluster.read(settings.paths.state_dir)
    except ConfigError:
        return None
    return None if local is None else (local.host, local.port)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _first_line(argv: list[str]) -> str:
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=_COMMAND_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return (done.stdout or done.stderr).strip().partition("\n")[0]
