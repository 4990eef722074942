"""What the network between this process and a host can do, and which backend follows from it.

`NetworkDiscovery.discover` looks: it connects over TCP and reads what the system says of RDMA, DPDK
and GPUDirect. It loads no library, configures no device and leaves nothing behind. `recommend` and
`select_backend` decide, from values alone. Not for: carrying anything (network.py).
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
from pathlib import Path
from typing import Any, TypeVar

from genie.errors import ConfigError, UnreachableError
from genie.runtime.backend_info import BACKENDS, PRIORITY, BackendInfo, get_backend_info

_T = TypeVar("_T")
_Address = tuple[int, Any]  # family and what the socket module takes for it
_Missing = tuple[str, str]  # what is not there, and what would help

CONNECTS = 3
_ADDRESSES_MAX = 8
_NO_SYS = ("this system has no /sys; only Linux is looked at", "")
_LIBRARY_FOLDERS = ("lib", "lib64", "usr/lib", "usr/lib64", "usr/local/lib", "usr/local/lib64")


@dataclass(frozen=True, kw_only=True)
class Probe:
    """One thing that was looked at: what was found or is missing, and what would help."""

    available: bool
    reason: str
    fix: str = ""
    duration_ms: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Recommendation:
    """The best backend of those that work here and that Genie has a transport for."""

    backend: str
    reason: str
    features: tuple[str, ...]
    est_bandwidth_gbps: float
    """Nominal for the technology; nothing was measured."""
    est_latency_ms: float
    """The measured round trip for TCP, otherwise nominal."""
    fallback_from: str | None = None
    """A better backend that this machine has but Genie cannot use yet."""


@dataclass(frozen=True, kw_only=True)
class DiscoveryResult:
    """`probes` by name: tcp, dpdk, gpu_direct, rdma. No recommendation where nothing answers."""

    host: str
    port: int
    tcp_rtt_ms: float | None
    probes: Mapping[str, Probe]
    recommendation: Recommendation | None
    duration_ms: float

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


@dataclass(frozen=True, kw_only=True)
class Selection:
    """The backend that is used, and why. `fallback_from` is what would have been better, if anything."""

    backend: str
    reason: str
    fallback_from: str | None = None


class NetworkDiscovery:
    """Looks at one host after the other. `root` is where /sys, /proc, /dev and libraries are looked for."""

    def __init__(self, *, root: Path = Path("/"), connects: int = CONNECTS) -> None:
        assert connects >= 1
        self._root = root
        self._connects = connects

    async def discover(self, host: str, port: int, *, timeout_s: float = 5.0) -> DiscoveryResult:
        """Takes `timeout_s` at most. A host that does not answer is a result, not an error."""
        start_s = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            tcp = group.create_task(_probe_tcp(host, port, connects=self._connects, timeout_s=timeout_s))
            local = group.create_task(_probe_local(self._root, timeout_s=timeout_s))
        tcp_probe, rtt_ms = tcp.result()
        probes = {"tcp": tcp_probe, **local.result()}
        return DiscoveryResult(
            host=host,
            port=port,
            tcp_rtt_ms=rtt_ms,
            probes=probes,
            recommendation=recommend(probes, tcp_rtt_ms=rtt_ms),
            duration_ms=_ms_since(start_s),
        )


# --- Deciding: values in, values out ------------------------------------------------------------


def recommend(
    probes: Mapping[str, Probe],
    *,
    tcp_rtt_ms: float | None,
    backends: Mapping[str, BackendInfo] = BACKENDS,
) -> Recommendation | None:
    """None when TCP does not get through: every backend needs it for control."""
    if not probes["tcp"].available:
        return None
    available = [name for name in PRIORITY if backend_probe(name, probes).available]
    usable = [name for name in available if backends[name].implemented]
    chosen = backends[usable[0] if usable else "tcp"]
    better = available[: available.index(chosen.name)]
    measured_ms = tcp_rtt_ms if chosen.name == "tcp" else None
    return Recommendation(
        backend=chosen.name,
        reason=_why(chosen.name, better, probes),
        features=chosen.features,
        est_bandwidth_gbps=chosen.bandwidth_gbps,
        est_latency_ms=chosen.latency_ms if measured_ms is None else measured_ms,
        fallback_from=better[0] if better else None,
    )


def select_backend(
    wish: str, result: DiscoveryResult, *, backends: Mapping[str, BackendInfo] = BACKENDS
) -> Selection:
    """The backend for `wish`: "auto" takes the recommendation, a name is taken or refused, never swapped.

    UnreachableError when the host does not answer, ConfigError for a name that does not work here.
    """
    if wish != "auto":
        get_backend_info(wish)
    if result.recommendation is None:
        tcp = result.probes["tcp"]
        raise UnreachableError(f"{result.host}:{result.port} cannot be reached: {tcp.reason}", hint=tcp.fix)
    if wish == "auto":
        advice = result.recommendation
        return Selection(backend=advice.backend, reason=advice.reason, fallback_from=advice.fallback_from)
    if not backends[wish].implemented:  # before what is missing here: nobody should install that in vain
        raise ConfigError(
            f"this version of Genie has no transport for backend {wish!r}", hint="use backend 'auto' or 'tcp'"
        )
    probe = backend_probe(wish, result.probes)
    if not probe.available:
        fix = f"{probe.fix}, or use" if probe.fix else "use"
        raise ConfigError(
            f"backend {wish!r} does not work on this machine: {probe.reason}", hint=f"{fix} backend 'auto'"
        )
    return Selection(backend=wish, reason=f"{wish} was asked for: {probe.reason}")


def backend_probe(name: str, probes: Mapping[str, Probe]) -> Probe:
    """What the probes say of one backend; dpdk_gpudev needs two of them."""
    if name != "dpdk_gpudev":
        return probes[name]
    needed = (probes["dpdk"], probes["gpu_direct"])
    told = [probe for probe in needed if not probe.available] or list(needed)
    return Probe(
        available=all(probe.available for probe in needed),
        reason="; ".join(probe.reason for probe in told),
        fix="; ".join(probe.fix for probe in told if probe.fix),
    )


def _why(chosen: str, better: list[str], probes: Mapping[str, Probe]) -> str:
    if better:
        return f"{', '.join(better)} would be better and is there, but Genie has no transport for it yet"
    absent = [
        f"{name}: {backend_probe(name, probes).reason.partition(';')[0]}"
        for name in PRIORITY[: PRIORITY.index(chosen)]
    ]
    return f"{chosen} is the best that works here" + (f" ({'; '.join(absent)})" if absent else "")


# --- TCP ----------------------------------------------------------------------------------------


async def _probe_tcp(host: str, port: int, *, connects: int, timeout_s: float) -> tuple[Probe, float | None]:
    start_s = time.perf_counter()
    rtts_ms: list[float] = []
    try:
        async with asyncio.timeout(timeout_s):
            addresses = await _resolve(host, port)
            address, rtt_ms = await _connect_any(addresses, each_s=timeout_s / len(addresses))
            rtts_ms.append(rtt_ms)
            while len(rtts_ms) < connects:
                rtts_ms.append(await _connect(address))
    except OSError as error:  # a TimeoutError and a failed lookup are OSErrors too
        if not rtts_ms:
            reason, fix = _tcp_trouble(error, host=host, port=port, timeout_s=timeout_s)
            return Probe(available=False, reason=reason, fix=fix, duration_ms=_ms_since(start_s)), None
    rtt_ms = statistics.median(rtts_ms)
    found = f"connected in {rtt_ms:.2f} ms"
    return Probe(available=True, reason=found, duration_ms=_ms_since(start_s)), rtt_ms


def _tcp_trouble(error: OSError, *, host: str, port: int, timeout_s: float) -> tuple[str, str]:
    """What came back, and what the reader can do."""
    if isinstance(error, socket.gaierror):
        return f"no such name ({error.strerror})", f"check the spelling of {host!r}"
    if isinstance(error, ConnectionRefusedError):
        return "connection refused", f"is 'genie up' running there, and on port {port}?"
    if isinstance(error, TimeoutError):
        hint = f"is {host} switched on, and does a firewall let port {port} through?"
        return f"timed out after {timeout_s:g} s", hint
    return error.strerror or str(error), "check the network between this machine and that one"


async def _resolve(host: str, port: int) -> list[_Address]:
    """Looking a name up can block for long and has a thread of its own; a number needs none."""
    try:
        found = _looked_up(host, port, numeric=True)
    except socket.gaierror:
        found = await _on_thread("genie-resolve", lambda: _looked_up(host, port, numeric=False))
    return found[:_ADDRESSES_MAX]


def _looked_up(host: str, port: int, *, numeric: bool) -> list[_Address]:
    flags = socket.AI_NUMERICHOST if numeric else 0
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
    except UnicodeError:
        raise socket.gaierror(socket.EAI_NONAME, "not a host name") from None
    return [(family, address) for family, _, _, _, address in found]


async def _connect_any(addresses: list[_Address], *, each_s: float) -> tuple[_Address, float]:
    """The first address that answers. One that swallows packets does not use up the others' time."""
    trouble: OSError | None = None
    for address in addresses:
        try:
            async with asyncio.timeout(each_s):
                return address, await _connect(address)
        except OSError as error:
            trouble = error
    assert trouble is not None, "getaddrinfo gives one address at least, or raises"
    raise trouble


async def _connect(address: _Address) -> float:
    """Milliseconds until connected, which is one round trip."""
    family, where = address
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        sock.setblocking(False)
        start_s = time.perf_counter()
        await asyncio.get_running_loop().sock_connect(sock, where)
        return _ms_since(start_s)


# --- What this machine has ----------------------------------------------------------------------


async def _probe_local(root: Path, *, timeout_s: float) -> dict[str, Probe]:
    done: dict[str, Probe] = {}

    def look() -> None:
        for name, probe in _LOCAL_PROBES.items():
            start_s = time.perf_counter()
            missing = probe(root) if (root / "sys").is_dir() else [_NO_SYS]
            done[name] = Probe(
                available=not missing,
                reason="; ".join(what for what, _ in missing) or "everything that it needs is there",
                fix="; ".join(fix for _, fix in missing if fix),
                duration_ms=_ms_since(start_s),
            )

    try:
        async with asyncio.timeout(timeout_s):
            await _on_thread("genie-discovery", look)
    except TimeoutError:
        pass  # what is not done by now is reported so below
    late = Probe(available=False, reason=f"the system did not answer within {timeout_s:g} s")
    return {name: done.get(name, late) for name in _LOCAL_PROBES}


def _dpdk_missing(root: Path) -> list[_Missing]:
    missing: list[_Missing] = []
    if not _has_library(root, "librte_eal.so"):
        missing.append(("the DPDK libraries (librte_eal) are not installed", "install dpdk"))
    pages = (root / "sys/kernel/mm/hugepages").glob("*/free_hugepages")
    if not any(_text(path) not in ("", "0") for path in pages):
        missing.append(("no free huge pages", "set vm.nr_hugepages"))
    if not _dpdk_cards(root):
        missing.append(("no network card that DPDK can drive", "bind a card to vfio-pci"))
    return missing


def _dpdk_cards(root: Path) -> list[str]:
    """Cards given to DPDK, and those that it shares with the kernel (which need no vfio)."""
    given = [
        path.name
        for driver in ("vfio-pci", "igb_uio", "uio_pci_generic")
        for path in (root / "sys/bus/pci/drivers" / driver).glob("*:*:*.*")
    ]
    drivers = (root / "sys/class/net").glob("*/device/driver")
    shared = [path.parts[-3] for path in drivers if path.resolve().name in ("mlx4_core", "mlx5_core")]
    return given + shared


def _gpu_direct_missing(root: Path) -> list[_Missing]:
    missing: list[_Missing] = []
    if not any((root / "proc/driver/nvidia/gpus").glob("*")):
        missing.append(("no CUDA GPU on this machine", ""))
    if not _has_library(root, "librte_gpudev.so"):
        missing.append(("the DPDK gpudev library is not installed", "install dpdk with gpudev"))
    if not (root / "sys/module/nvidia_peermem").is_dir():
        missing.append(("the kernel module nvidia_peermem is not loaded", "modprobe nvidia_peermem"))
    return missing


def _rdma_missing(root: Path) -> list[_Missing]:
    missing: list[_Missing] = []
    base = root / "sys/class/infiniband"
    devices = sorted(path.name for path in base.glob("*"))
    if not devices:
        missing.append(("no device in /sys/class/infiniband", "load the RDMA card's driver, or rdma_rxe"))
    elif not any("ACTIVE" in _text(path) for path in base.glob("*/ports/*/state")):
        missing.append((f"no active port on {', '.join(devices)}", "bring the link up"))
    if not any((root / "dev/infiniband").glob("uverbs*")):
        missing.append(("no /dev/infiniband/uverbs*", "modprobe ib_uverbs"))
    if not _has_library(root, "libibverbs.so.1"):
        missing.append(("libibverbs is not installed", "install libibverbs1"))
    return missing


_LOCAL_PROBES: dict[str, Callable[[Path], list[_Missing]]] = {
    "dpdk": _dpdk_missing,
    "gpu_direct": _gpu_direct_missing,
    "rdma": _rdma_missing,
}


def _has_library(root: Path, name: str) -> bool:
    """Looks for the file instead of loading it: loading runs foreign code in this process."""
    return any(
        next(folder.glob(pattern), None) is not None
        for folder in _library_folders(root)
        for pattern in (f"{name}*", f"*-linux-gnu/{name}*")
    )


def _library_folders(root: Path) -> list[Path]:
    listed = [
        line.strip()
        for path in sorted((root / "etc/ld.so.conf.d").glob("*.conf"))
        for line in _text(path).splitlines()
        if line.strip().startswith("/")
    ]
    return [root / folder.lstrip("/") for folder in (*_LIBRARY_FOLDERS, *listed)]


def _text(path: Path) -> str:
    """Empty when it cannot be read."""
    try:
        return path.read_text("utf-8", errors="replace").strip()
    except OSError:
        return ""


async def _on_thread(name: str, work: Callable[[], _T]) -> _T:
    """Runs `work` on a thread of its own, which is left to itself when the caller gives up waiting."""
    future: concurrent.futures.Future[_T] = concurrent.futures.Future()

    def run() -> None:
        try:
            future.set_result(work())
        except Exception as error:  # a thread's boundary: the waiting caller gets it
            future.set_exception(error)

    future.set_running_or_notify_cancel()  # from here on a caller's cancelling leaves the future alone
    threading.Thread(target=run, name=name, daemon=True).start()
    return await asyncio.wrap_future(future)


def _ms_since(start_s: float) -> float:
    return (time.perf_counter() - start_s) * 1000.0
