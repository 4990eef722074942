"""Network discovery: probes the network between this process and a host, and selects the backend.

`NetworkDiscovery.discover` connects over TCP and reads the speed and throughput of the interface, and the
state of RDMA, DPDK and GPUDirect on this system. It loads no library and configures no device. `recommend`
and `select_backend` are pure functions of the result.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import socket
import statistics
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from genie.errors import ConfigError, UnreachableError
from genie.model.names import address_text
from genie.runtime.backend_info import BACKEND_PRIORITY, BACKENDS, BackendInfo, get_backend_info
from genie.runtime.network import connect_failure_reason, name_lookup_hint
from genie.runtime.network_interfaces import (
    Interface,
    Throughput,
    compute_throughput,
    find_interface,
    read_traffic,
)

_T = TypeVar("_T")
_SocketAddress = tuple[int, Any]  # address family, and the address for the socket module
_MissingRequirement = tuple[str, str]  # what is missing, and how to fix it

CONNECT_ATTEMPTS = 3
_RESOLVED_ADDRESSES_MAX = 8
_NO_SYSFS = ("this system has no /sys; only Linux is supported", "")
_LIBRARY_FOLDERS = ("lib", "lib64", "usr/lib", "usr/lib64", "usr/local/lib", "usr/local/lib64")


@dataclass(frozen=True, kw_only=True)
class Probe:
    """The result of one probe: what was found or is missing, and how to fix it."""

    available: bool
    reason: str
    fix: str = ""
    duration_ms: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Recommendation:
    """The best backend that works on this machine and that Genie has a transport for."""

    backend: str
    reason: str
    features: tuple[str, ...]
    est_bandwidth_gbps: float
    """For TCP the speed of the interface, if it is known; otherwise nominal."""
    est_latency_ms: float
    """For TCP the measured round trip; otherwise nominal."""
    fallback_from: str | None = None
    """A better backend that this machine supports and Genie does not."""


@dataclass(frozen=True, kw_only=True)
class DiscoveryResult:
    """`probes` by name: tcp, dpdk, gpu_direct, rdma. No recommendation if the host is unreachable."""

    host: str
    port: int
    tcp_rtt_ms: float | None
    probes: Mapping[str, Probe]
    recommendation: Recommendation | None
    duration_ms: float
    interface: Interface | None = None
    """The interface of the connection to the host, with its speed; None if it was not found."""
    throughput: Throughput | None = None
    """Throughput of that interface during the discovery."""

    @property
    def tcp_reachable(self) -> bool:
        return self.probes["tcp"].available

    @property
    def dpdk_available(self) -> bool:
        return self.probes["dpdk"].available

    @property
    def gpu_direct_available(self) -> bool:
        return self.probes["gpu_direct"].available

    @property
    def rdma_available(self) -> bool:
        return self.probes["rdma"].available

    def check_reachable(self) -> None:
        """Raises UnreachableError if the host is unreachable over TCP."""
        tcp = self.probes["tcp"]
        if not tcp.available:
            where = address_text(self.host, self.port)
            raise UnreachableError(f"{where} cannot be reached: {tcp.reason}", hint=tcp.fix)


@dataclass(frozen=True, kw_only=True)
class Selection:
    """The backend that is used, and why. `fallback_from` is what would have been better, if anything."""

    backend: str
    reason: str
    fallback_from: str | None = None


class NetworkDiscovery:
    """Probes hosts. `root` is the directory of /sys, /proc, /dev and libraries."""

    def __init__(self, *, root: Path = Path("/"), connects: int = CONNECT_ATTEMPTS) -> None:
        assert connects >= 1
        self._root = root
        self._connect_attempts = connects

    async def discover(self, host: str, port: int, *, timeout_s: float = 5.0) -> DiscoveryResult:
        """Takes at most `timeout_s`. An unreachable host is a result, not an error."""
        start_s = time.perf_counter()
        before = read_traffic(now_s=time.monotonic(), root=self._root)
        async with asyncio.TaskGroup() as group:
            tcp = group.create_task(
                _probe_tcp(host, port, connects=self._connect_attempts, timeout_s=timeout_s)
            )
            local = group.create_task(_probe_local(self._root, timeout_s=timeout_s))
        found, probes = tcp.result(), {"tcp": tcp.result().probe, **local.result()}
        left_s = max(timeout_s - (time.perf_counter() - start_s), 0.0)
        interface = await self._find_interface_of_connection(found, timeout_s=left_s)
        after = read_traffic(now_s=time.monotonic(), root=self._root)
        name, speed_gbps = (interface.name, interface.speed_gbps) if interface else ("", None)
        return DiscoveryResult(
            host=host,
            port=port,
            tcp_rtt_ms=found.rtt_ms,
            probes=probes,
            recommendation=recommend(probes, tcp_rtt_ms=found.rtt_ms, link_gbps=speed_gbps),
            duration_ms=_ms_since(start_s),
            interface=interface,
            throughput=compute_throughput(before.get(name), after.get(name)),
        )

    async def _find_interface_of_connection(self, found: _TcpResult, *, timeout_s: float) -> Interface | None:
        """Runs on a thread, because a driver may be slow to report the speed."""
        if not found.source:
            return None
        find = partial(find_interface, source=found.source, destination=found.destination, root=self._root)
        try:
            async with asyncio.timeout(timeout_s):
                return await _run_on_thread("genie-interface", find)
        except (OSError, RuntimeError):  # a TimeoutError is an OSError; psutil raises either
            return None


# --- Selection: pure functions --------------------------------------------------------------------


def recommend(
    probes: Mapping[str, Probe],
    *,
    tcp_rtt_ms: float | None,
    link_gbps: float | None = None,
    backends: Mapping[str, BackendInfo] = BACKENDS,
) -> Recommendation | None:
    """None if TCP does not work: every backend needs it for control."""
    if not probes["tcp"].available:
        return None
    available = [name for name in BACKEND_PRIORITY if probe_of_backend(name, probes).available]
    usable = [name for name in available if backends[name].implemented]
    chosen = backends[usable[0] if usable else "tcp"]
    better = available[: available.index(chosen.name)]
    is_tcp = chosen.name == "tcp"
    measured_ms, link_gbps = (tcp_rtt_ms, link_gbps) if is_tcp else (None, None)
    return Recommendation(
        backend=chosen.name,
        reason=_selection_reason(chosen.name, better, probes),
        features=chosen.features,
        est_bandwidth_gbps=chosen.bandwidth_gbps if link_gbps is None else link_gbps,
        est_latency_ms=chosen.latency_ms if measured_ms is None else measured_ms,
        fallback_from=better[0] if better else None,
    )


def select_backend(
    requested: str, result: DiscoveryResult, *, backends: Mapping[str, BackendInfo] = BACKENDS
) -> Selection:
    """The backend for the setting `requested`: "auto" uses the recommendation; a name is used or rejected.

    Raises UnreachableError if the host is unreachable, ConfigError if the named backend does not work here.
    """
    if requested != "auto":
        get_backend_info(requested)
    result.check_reachable()
    if requested == "auto":
        recommended = result.recommendation
        assert recommended is not None
        return Selection(
            backend=recommended.backend, reason=recommended.reason, fallback_from=recommended.fallback_from
        )
    if not backends[requested].implemented:  # before the probe: installing what is missing would not help
        raise ConfigError(
            f"this version of Genie has no transport for backend {requested!r}",
            hint="use backend 'auto' or 'tcp'",
        )
    probe = probe_of_backend(requested, result.probes)
    if not probe.available:
        fix = f"{probe.fix}, or use" if probe.fix else "use"
        raise ConfigError(
            f"backend {requested!r} does not work on this machine: {probe.reason}",
            hint=f"{fix} backend 'auto'",
        )
    return Selection(backend=requested, reason=f"{requested} was requested: {probe.reason}")


def probe_of_backend(name: str, probes: Mapping[str, Probe]) -> Probe:
    """The probe of one backend; dpdk_gpudev combines two."""
    if name != "dpdk_gpudev":
        return probes[name]
    needed = (probes["dpdk"], probes["gpu_direct"])
    relevant = [probe for probe in needed if not probe.available] or list(needed)
    return Probe(
        available=all(probe.available for probe in needed),
        reason="; ".join(probe.reason for probe in relevant),
        fix="; ".join(probe.fix for probe in relevant if probe.fix),
    )


def _selection_reason(chosen: str, better: list[str], probes: Mapping[str, Probe]) -> str:
    if better:
        return f"{', '.join(better)} is available and better, but Genie has no transport for it yet"
    absent = [
        f"{name}: {probe_of_backend(name, probes).reason.partition(';')[0]}"
        for name in BACKEND_PRIORITY[: BACKEND_PRIORITY.index(chosen)]
    ]
    return f"{chosen} is the best backend that works here" + (f" ({'; '.join(absent)})" if absent else "")


# --- TCP ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _TcpResult:
    """`source` and `destination` are the IP addresses of the connection."""

    probe: Probe
    rtt_ms: float | None = None
    source: str = ""
    destination: str = ""


async def _probe_tcp(host: str, port: int, *, connects: int, timeout_s: float) -> _TcpResult:
    start_s = time.perf_counter()
    rtts_ms: list[float] = []
    source, destination = "", ""
    try:
        async with asyncio.timeout(timeout_s):
            addresses = await _resolve_host(host, port)
            address, (rtt_ms, source) = await _connect_to_first_reachable(
                addresses, timeout_each_s=timeout_s / len(addresses)
            )
            destination = str(address[1][0])
            rtts_ms.append(rtt_ms)
            while len(rtts_ms) < connects:
                rtts_ms.append((await _connect_ms_and_local_ip(address))[0])
    except OSError as error:  # includes TimeoutError and failed lookups
        if not rtts_ms:
            reason, fix = _reason_and_hint_of_tcp_error(error, host=host, port=port, timeout_s=timeout_s)
            return _TcpResult(Probe(available=False, reason=reason, fix=fix, duration_ms=_ms_since(start_s)))
    rtt_ms = statistics.median(rtts_ms)
    found = f"connected in {rtt_ms:.2f} ms"
    probe = Probe(available=True, reason=found, duration_ms=_ms_since(start_s))
    return _TcpResult(probe, rtt_ms, source, destination)


def _reason_and_hint_of_tcp_error(
    error: OSError, *, host: str, port: int, timeout_s: float
) -> tuple[str, str]:
    """Reason and hint for a failed connection."""
    if isinstance(error, socket.gaierror):
        return connect_failure_reason(error), name_lookup_hint(error)
    if isinstance(error, ConnectionRefusedError):
        hint = f"is 'genie up' running there on port {port}, on another machine with --bind ADDRESS?"
        return "connection refused", hint
    if isinstance(error, TimeoutError):
        hint = f"is {host} up, and does a firewall block port {port}?"
        return f"timed out after {timeout_s:g} s", hint
    return connect_failure_reason(error), "check the network between the two machines"


async def _resolve_host(host: str, port: int) -> list[_SocketAddress]:
    """Name lookups run on a thread, because they can block; numeric addresses need none."""
    try:
        found = _look_up_addresses(host, port, numeric=True)
    except socket.gaierror:
        found = await _run_on_thread("genie-resolve", lambda: _look_up_addresses(host, port, numeric=False))
    return found[:_RESOLVED_ADDRESSES_MAX]


def _look_up_addresses(host: str, port: int, *, numeric: bool) -> list[_SocketAddress]:
    flags = socket.AI_NUMERICHOST if numeric else 0
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
    except UnicodeError:
        raise socket.gaierror(socket.EAI_NONAME, "not a host name") from None
    return [(family, address) for family, _, _, _, address in found]


async def _connect_to_first_reachable(
    addresses: list[_SocketAddress], *, timeout_each_s: float
) -> tuple[_SocketAddress, tuple[float, str]]:
    """Connects to the first address that responds, with a timeout for each."""
    last_error: OSError | None = None
    for address in addresses:
        try:
            async with asyncio.timeout(timeout_each_s):
                return address, await _connect_ms_and_local_ip(address)
        except OSError as error:
            last_error = error
    assert last_error is not None, "getaddrinfo returns at least one address, or raises"
    raise last_error


async def _connect_ms_and_local_ip(address: _SocketAddress) -> tuple[float, str]:
    """Connect time in milliseconds, which is one round trip, and the local IP address."""
    family, where = address
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        sock.setblocking(False)
        start_s = time.perf_counter()
        await asyncio.get_running_loop().sock_connect(sock, where)
        return _ms_since(start_s), str(sock.getsockname()[0])


# --- Local probes -------------------------------------------------------------------------------


async def _probe_local(root: Path, *, timeout_s: float) -> dict[str, Probe]:
    done: dict[str, Probe] = {}

    def probe_all() -> None:
        for name, probe in _LOCAL_PROBES.items():
            start_s = time.perf_counter()
            missing = probe(root) if (root / "sys").is_dir() else [_NO_SYSFS]
            done[name] = Probe(
                available=not missing,
                reason="; ".join(what for what, _ in missing) or "all requirements are met",
                fix="; ".join(fix for _, fix in missing if fix),
                duration_ms=_ms_since(start_s),
            )

    try:
        async with asyncio.timeout(timeout_s):
            await _run_on_thread("genie-discovery", probe_all)
    except TimeoutError:
        pass  # probes that are not done are reported below
    timed_out = Probe(available=False, reason=f"the probe timed out after {timeout_s:g} s")
    return {name: done.get(name, timed_out) for name in _LOCAL_PROBES}


def _missing_for_dpdk(root: Path) -> list[_MissingRequirement]:
    missing: list[_MissingRequirement] = []
    if not _has_library(root, "librte_eal.so"):
        missing.append(("the DPDK libraries (librte_eal) are not installed", "install dpdk"))
    pages = (root / "sys/kernel/mm/hugepages").glob("*/free_hugepages")
    if not any(_read_text(path) not in ("", "0") for path in pages):
        missing.append(("no free huge pages", "set vm.nr_hugepages"))
    if not _dpdk_bound_network_cards(root):
        missing.append(("no network card that DPDK can drive", "bind a card to vfio-pci"))
    return missing


def _dpdk_bound_network_cards(root: Path) -> list[str]:
    """Cards bound to DPDK drivers, and those that DPDK shares with the kernel (which need no vfio)."""
    given = [
        path.name
        for driver in ("vfio-pci", "igb_uio", "uio_pci_generic")
        for path in (root / "sys/bus/pci/drivers" / driver).glob("*:*:*.*")
    ]
    drivers = (root / "sys/class/net").glob("*/device/driver")
    shared = [path.parts[-3] for path in drivers if path.resolve().name in ("mlx4_core", "mlx5_core")]
    return given + shared


def _missing_for_gpu_direct(root: Path) -> list[_MissingRequirement]:
    missing: list[_MissingRequirement] = []
    if not any((root / "proc/driver/nvidia/gpus").glob("*")):
        missing.append(("no CUDA GPU on this machine", ""))
    if not _has_library(root, "librte_gpudev.so"):
        missing.append(("the DPDK gpudev library is not installed", "install dpdk with gpudev"))
    if not (root / "sys/module/nvidia_peermem").is_dir():
        missing.append(("the kernel module nvidia_peermem is not loaded", "modprobe nvidia_peermem"))
    return missing


def _missing_for_rdma(root: Path) -> list[_MissingRequirement]:
    missing: list[_MissingRequirement] = []
    base = root / "sys/class/infiniband"
    devices = sorted(path.name for path in base.glob("*"))
    if not devices:
        missing.append(("no device in /sys/class/infiniband", "load the RDMA card's driver, or rdma_rxe"))
    elif not any("ACTIVE" in _read_text(path) for path in base.glob("*/ports/*/state")):
        missing.append((f"no active port on {', '.join(devices)}", "bring the link up"))
    if not any((root / "dev/infiniband").glob("uverbs*")):
        missing.append(("no /dev/infiniband/uverbs*", "modprobe ib_uverbs"))
    if not _has_library(root, "libibverbs.so.1"):
        missing.append(("libibverbs is not installed", "install libibverbs1"))
    return missing


_LOCAL_PROBES: dict[str, Callable[[Path], list[_MissingRequirement]]] = {
    "dpdk": _missing_for_dpdk,
    "gpu_direct": _missing_for_gpu_direct,
    "rdma": _missing_for_rdma,
}


def _has_library(root: Path, name: str) -> bool:
    """Searches for the file; loading the library would run its code in this process."""
    return any(
        next(folder.glob(pattern), None) is not None
        for folder in _library_folders(root)
        for pattern in (f"{name}*", f"*-linux-gnu/{name}*")
    )


def _library_folders(root: Path) -> list[Path]:
    configured = [
        line.strip()
        for path in sorted((root / "etc/ld.so.conf.d").glob("*.conf"))
        for line in _read_text(path).splitlines()
        if line.strip().startswith("/")
    ]
    return [root / folder.lstrip("/") for folder in (*_LIBRARY_FOLDERS, *configured)]


def _read_text(path: Path) -> str:
    """The content of a file; empty if it cannot be read."""
    try:
        return path.read_text("utf-8", errors="replace").strip()
    except OSError:
        return ""


async def _run_on_thread(name: str, work: Callable[[], _T]) -> _T:
    """Runs `work` on a new thread, which continues if the caller stops waiting."""
    future: concurrent.futures.Future[_T] = concurrent.futures.Future()

    def run() -> None:
        try:
            future.set_result(work())
        except Exception as error:  # passed to the waiting caller
            future.set_exception(error)

    future.set_running_or_notify_cancel()  # so that a cancelled caller does not cancel the future
    threading.Thread(target=run, name=name, daemon=True).start()
    return await asyncio.wrap_future(future)


def _ms_since(start_s: float) -> float:
    return (time.perf_counter() - start_s) * 1000.0
