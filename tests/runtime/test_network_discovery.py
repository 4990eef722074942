"""Network discovery: real TCP on loopback, and a fake file system for hardware."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from genie.errors import ConfigError, UnreachableError
from genie.runtime import network_discovery
from genie.runtime.backend_info import BACKENDS
from genie.runtime.network_discovery import (
    DiscoveryResult,
    NetworkDiscovery,
    Probe,
    recommend,
    select_backend,
)
from genie.runtime.network_interfaces import Interface
from tests.waiting import until

AVAILABLE = Probe(available=True, reason="there")
UNAVAILABLE = Probe(available=False, reason="no device; no library", fix="buy one")
ALL_BACKENDS_IMPLEMENTED = {
    name: dataclasses.replace(info, implemented=True) for name, info in BACKENDS.items()
}


def make_discovery_result(
    *,
    tcp: Probe = AVAILABLE,
    dpdk: Probe = UNAVAILABLE,
    gpu_direct: Probe = UNAVAILABLE,
    rdma: Probe = UNAVAILABLE,
) -> DiscoveryResult:
    probes = {"tcp": tcp, "dpdk": dpdk, "gpu_direct": gpu_direct, "rdma": rdma}
    rtt_ms = 0.4 if tcp.available else None
    return DiscoveryResult(
        host="box",
        port=5555,
        tcp_rtt_ms=rtt_ms,
        probes=probes,
        recommendation=recommend(probes, tcp_rtt_ms=rtt_ms),
        duration_ms=1.0,
    )


# --- TCP ----------------------------------------------------------------------------------------


@pytest.fixture
async def byte_counting_server() -> AsyncIterator[tuple[int, list[int]]]:
    """A port that accepts connections, and the number of bytes that each connection sent."""
    sent: list[int] = []

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        sent.append(len(await reader.read()))
        writer.close()

    listening = await asyncio.start_server(accept, "127.0.0.1", 0)
    async with listening:
        yield listening.sockets[0].getsockname()[1], sent


@pytest.fixture
def closed_port() -> Iterator[int]:
    """A port that is bound but does not listen: connections are refused."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        yield sock.getsockname()[1]


@pytest.fixture
def silent_port() -> Iterator[int]:
    """A port whose backlog is full, so that the system drops connections."""
    with ExitStack() as stack:
        sock = stack.enter_context(socket.socket())
        sock.bind(("127.0.0.1", 0))
        sock.listen(0)
        for _ in range(4):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(sock.getsockname())
        yield sock.getsockname()[1]


async def test_listening_port_is_reachable_with_a_round_trip_time(
    byte_counting_server: tuple[int, list[int]], tmp_path: Path
) -> None:
    port, sent = byte_counting_server
    result = await NetworkDiscovery(root=tmp_path, connects=3).discover("127.0.0.1", port, timeout_s=5)
    assert result.tcp_reachable
    assert result.tcp_rtt_ms is not None
    assert result.tcp_rtt_ms > 0
    assert result.recommendation is not None
    assert result.recommendation.backend == "tcp"
    assert result.recommendation.est_latency_ms == result.tcp_rtt_ms
    await until(lambda: len(sent) == 3)
    assert sent == [0, 0, 0], "the probe sends nothing"


async def test_result_contains_the_interface_of_the_connection(
    byte_counting_server: tuple[int, list[int]], tmp_path: Path
) -> None:
    (tmp_path / "sys/class/net/lo").mkdir(parents=True)
    (tmp_path / "sys/class/net/lo/speed").write_text("25000\n")
    (tmp_path / "proc/net").mkdir(parents=True)
    (tmp_path / "proc/net/dev").write_text("lo: 5 1 0 0 0 0 0 0 7 1 0 0 0 0 0 0\n")
    found = await NetworkDiscovery(root=tmp_path).discover("127.0.0.1", byte_counting_server[0])
    assert found.interface == Interface(name="lo", speed_gbps=25.0)
    assert found.throughput is not None
    assert (found.throughput.received_bytes_per_s, found.throughput.sent_bytes_per_s) == (0.0, 0.0)
    assert found.recommendation is not None
    assert found.recommendation.est_bandwidth_gbps == 25.0


async def test_result_contains_the_throughput_of_the_interface(
    byte_counting_server: tuple[int, list[int]],
) -> None:
    found = await NetworkDiscovery().discover("127.0.0.1", byte_counting_server[0])
    assert found.interface is not None
    assert found.interface.name == "lo"
    assert found.throughput is not None
    assert found.throughput.sent_bytes_per_s > 0.0


async def test_unreachable_host_has_no_interface(closed_port: int, tmp_path: Path) -> None:
    found = await NetworkDiscovery(root=tmp_path).discover("127.0.0.1", closed_port)
    assert (found.interface, found.throughput) == (None, None)


async def test_name_lookup_runs_on_a_thread(
    byte_counting_server: tuple[int, list[int]], tmp_path: Path
) -> None:
    port, sent = byte_counting_server
    result = await NetworkDiscovery(root=tmp_path, connects=1).discover("localhost", port, timeout_s=5)
    assert result.tcp_reachable
    await until(lambda: len(sent) == 1)


async def test_refused_connection_is_a_result(closed_port: int, tmp_path: Path) -> None:
    result = await NetworkDiscovery(root=tmp_path).discover("127.0.0.1", closed_port, timeout_s=5)
    assert not result.tcp_reachable
    assert (result.tcp_rtt_ms, result.recommendation) == (None, None)
    with pytest.raises(
        UnreachableError, match=f"127.0.0.1:{closed_port} cannot be reached: connection refused"
    ):
        select_backend("auto", result)


async def test_unresponsive_port_times_out(silent_port: int, tmp_path: Path) -> None:
    result = await NetworkDiscovery(root=tmp_path).discover("127.0.0.1", silent_port, timeout_s=0.2)
    with pytest.raises(UnreachableError, match=r"timed out after 0.2 s .*firewall"):
        select_backend("auto", result)


@pytest.mark.parametrize("host", ["no-such-host.invalid", "x" * 70, "exa mple", ".."])
async def test_unknown_name_is_reported(host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = socket.getaddrinfo

    def offline(host: str, port: int, **more: int) -> object:
        """Resolves only numeric addresses, without a name server."""
        return real(host, port, **{**more, "flags": socket.AI_NUMERICHOST})

    monkeypatch.setattr(socket, "getaddrinfo", offline)
    result = await NetworkDiscovery(root=tmp_path).discover(host, 5555, timeout_s=5)
    with pytest.raises(UnreachableError, match=r"no such name .*check the spelling"):
        select_backend("auto", result)


async def test_name_server_failure_is_reported_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    monkeypatch.setattr(socket, "getaddrinfo", failing)
    result = await NetworkDiscovery(root=tmp_path).discover("gpu-box", 5555, timeout_s=5)
    with pytest.raises(UnreachableError, match=r"the name lookup failed .*check the DNS server"):
        select_backend("auto", result)


async def test_unresponsive_address_leaves_time_for_the_next(
    byte_counting_server: tuple[int, list[int]],
    silent_port: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    port, sent = byte_counting_server
    both = [(socket.AF_INET, ("127.0.0.1", silent_port)), (socket.AF_INET, ("127.0.0.1", port))]
    monkeypatch.setattr(network_discovery, "_look_up_addresses", lambda *_, **__: both)
    result = await NetworkDiscovery(root=tmp_path, connects=1).discover("box", 5555, timeout_s=1.0)
    assert result.tcp_reachable
    await until(lambda: len(sent) == 1)


# --- Local probes -------------------------------------------------------------------------------


def write_system_files(root: Path, *files: str, links: dict[str, str] | None = None) -> Path:
    """An empty /sys and the given files below `root`; a name with '=' has its text after it."""
    (root / "sys").mkdir(exist_ok=True)
    for entry in files:
        name, _, text = entry.partition("=")
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for name, target in (links or {}).items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        (root / target).mkdir(parents=True, exist_ok=True)
        path.symlink_to(os.path.relpath(root / target, path.parent))
    return root


async def probe_local_system(root: Path) -> DiscoveryResult:
    """Probes port 9 of this host; the result of TCP is ignored."""
    return await NetworkDiscovery(root=root).discover("127.0.0.1", 9, timeout_s=10)


RDMA = (
    "sys/class/infiniband/mlx5_0/ports/1/state=4: ACTIVE",
    "dev/infiniband/uverbs0",
    "usr/lib/x86_64-linux-gnu/libibverbs.so.1",
)
DPDK = (
    "usr/local/lib/x86_64-linux-gnu/librte_eal.so.23",
    "sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages=64",
)
MLX5 = {"sys/class/net/eth0/device/driver": "sys/bus/pci/drivers/mlx5_core"}
GPU_DIRECT = (
    "proc/driver/nvidia/gpus/0000:01:00.0/information",
    "usr/lib64/librte_gpudev.so.23",
    "sys/module/nvidia_peermem/version",
)


async def test_empty_system_reports_what_is_missing(tmp_path: Path) -> None:
    result = await probe_local_system(write_system_files(tmp_path))
    found = (result.rdma_available, result.dpdk_available, result.gpu_direct_available)
    assert found == (False, False, False)
    assert "no device in /sys/class/infiniband" in result.probes["rdma"].reason
    assert "librte_eal" in result.probes["dpdk"].reason
    assert "no CUDA GPU" in result.probes["gpu_direct"].reason
    assert all(result.probes[name].fix for name in ("rdma", "dpdk", "gpu_direct"))
    assert all(probe.duration_ms > 0 for probe in result.probes.values())


async def test_system_without_sys_reports_that_only_linux_is_supported(tmp_path: Path) -> None:
    result = await probe_local_system(tmp_path)
    assert {result.probes[name].reason for name in ("rdma", "dpdk", "gpu_direct")} == {
        "this system has no /sys; only Linux is supported"
    }


async def test_rdma_needs_device_active_port_device_file_and_library(tmp_path: Path) -> None:
    assert (await probe_local_system(write_system_files(tmp_path, *RDMA))).rdma_available
    write_system_files(tmp_path, "sys/class/infiniband/mlx5_0/ports/1/state=1: DOWN")
    result = await probe_local_system(tmp_path)
    assert not result.rdma_available
    assert result.probes["rdma"].reason == "no active port on mlx5_0"


@pytest.mark.parametrize("missing", DPDK)
async def test_dpdk_needs_its_library_and_huge_pages(tmp_path: Path, missing: str) -> None:
    files = [name for name in DPDK if name != missing]
    assert not (await probe_local_system(write_system_files(tmp_path, *files, links=MLX5))).dpdk_available


async def test_card_shared_with_the_kernel_needs_no_vfio(tmp_path: Path) -> None:
    assert (await probe_local_system(write_system_files(tmp_path, *DPDK, links=MLX5))).dpdk_available


async def test_card_bound_to_vfio_is_usable_by_dpdk(tmp_path: Path) -> None:
    bound = {"sys/bus/pci/drivers/vfio-pci/0000:03:00.0": "sys/devices/pci/0000:03:00.0"}
    assert (await probe_local_system(write_system_files(tmp_path, *DPDK, links=bound))).dpdk_available


async def test_card_with_an_ordinary_driver_is_not_usable_by_dpdk(tmp_path: Path) -> None:
    plain = {"sys/class/net/eth0/device/driver": "sys/bus/pci/drivers/virtio-pci"}
    result = await probe_local_system(write_system_files(tmp_path, *DPDK, links=plain))
    assert result.probes["dpdk"].reason == "no network card that DPDK can drive"


async def test_gpu_direct_needs_gpu_library_and_kernel_module(tmp_path: Path) -> None:
    result = await probe_local_system(write_system_files(tmp_path, *GPU_DIRECT, *DPDK, links=MLX5))
    assert result.gpu_direct_available
    assert result.dpdk_available


async def test_rdma_library_in_a_folder_of_ld_so_conf_is_found(tmp_path: Path) -> None:
    conf, library = "etc/ld.so.conf.d/ofed.conf=/opt/ofed/lib", "opt/ofed/lib/libibverbs.so.1"
    assert (await probe_local_system(write_system_files(tmp_path, *RDMA[:2], conf, library))).rdma_available


async def test_slow_probe_is_reported_at_the_timeout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()

    def stuck(root: Path) -> list[tuple[str, str]]:
        gate.wait(30)
        return []

    monkeypatch.setitem(network_discovery._LOCAL_PROBES, "rdma", stuck)
    result = await NetworkDiscovery(root=write_system_files(tmp_path)).discover("127.0.0.1", 9, timeout_s=0.1)
    assert result.probes["rdma"].reason == "the probe timed out after 0.1 s"
    assert "librte_eal" in result.probes["dpdk"].reason, "what was done by then is kept"
    gate.set()
    await until(lambda: not [one for one in threading.enumerate() if one.name == "genie-discovery"])


async def test_failing_probe_fails_the_discovery(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(root: Path) -> list[tuple[str, str]]:
        raise KeyError("a fault of ours")

    monkeypatch.setitem(network_discovery._LOCAL_PROBES, "rdma", broken)
    with pytest.raises(ExceptionGroup) as caught:
        await NetworkDiscovery(root=write_system_files(tmp_path)).discover("127.0.0.1", 9, timeout_s=30)
    assert caught.group_contains(KeyError)


# --- Selection ----------------------------------------------------------------------------------


def test_auto_selects_tcp_and_reports_what_is_missing() -> None:
    selection = select_backend("auto", make_discovery_result())
    assert (selection.backend, selection.fallback_from) == ("tcp", None)
    assert "rdma: no device" in selection.reason


@pytest.mark.parametrize(
    ("there", "better"),
    [
        ({"rdma": AVAILABLE}, "rdma"),
        ({"dpdk": AVAILABLE}, "dpdk"),
        ({"dpdk": AVAILABLE, "gpu_direct": AVAILABLE}, "dpdk_gpudev"),
        ({"dpdk": AVAILABLE, "rdma": AVAILABLE}, "rdma"),
    ],
)
def test_auto_falls_back_to_tcp_from_a_better_backend_without_a_transport(
    there: dict[str, Probe], better: str
) -> None:
    selection = select_backend("auto", make_discovery_result(**there))
    assert (selection.backend, selection.fallback_from) == ("tcp", better)
    assert better in selection.reason
    assert "no transport" in selection.reason


def test_backends_with_a_transport_are_selected_in_the_documented_order() -> None:
    probes = make_discovery_result(dpdk=AVAILABLE, gpu_direct=AVAILABLE, rdma=AVAILABLE).probes
    advice = recommend(probes, tcp_rtt_ms=0.4, backends=ALL_BACKENDS_IMPLEMENTED)
    assert advice is not None
    assert (advice.backend, advice.fallback_from) == ("dpdk_gpudev", None)
    assert (advice.est_bandwidth_gbps, advice.est_latency_ms) == (95.0, 0.03)
    assert "GPU direct" in advice.features


@given(st.booleans(), st.booleans(), st.booleans())
def test_auto_always_selects_a_working_backend_with_a_transport(
    dpdk: bool, gpu_direct: bool, rdma: bool
) -> None:
    picked = {True: AVAILABLE, False: UNAVAILABLE}
    result = make_discovery_result(dpdk=picked[dpdk], gpu_direct=picked[gpu_direct], rdma=picked[rdma])
    selection = select_backend("auto", result)
    assert BACKENDS[selection.backend].implemented
    assert selection.reason


def test_requested_tcp_is_selected() -> None:
    selection = select_backend("tcp", make_discovery_result(rdma=AVAILABLE))
    assert (selection.backend, selection.fallback_from) == ("tcp", None)


def test_requested_backend_that_is_missing_is_an_error_with_reason_and_fix() -> None:
    with pytest.raises(ConfigError) as caught:
        select_backend("rdma", make_discovery_result(), backends=ALL_BACKENDS_IMPLEMENTED)
    assert caught.value.message == "backend 'rdma' does not work on this machine: no device; no library"
    assert caught.value.hint == "buy one, or use backend 'auto'"


def test_requested_backend_without_a_transport_is_an_error() -> None:
    for probe in (AVAILABLE, UNAVAILABLE):
        with pytest.raises(
            ConfigError, match=r"no transport for backend 'rdma' \(use backend 'auto' or 'tcp'\)"
        ):
            select_backend("rdma", make_discovery_result(rdma=probe))


def test_dpdk_gpudev_needs_both_probes() -> None:
    lacks_gpu = Probe(available=False, reason="no CUDA GPU")
    with pytest.raises(ConfigError, match=r"'dpdk_gpudev' does not work on this machine: no CUDA GPU"):
        select_backend(
            "dpdk_gpudev",
            make_discovery_result(dpdk=AVAILABLE, gpu_direct=lacks_gpu),
            backends=ALL_BACKENDS_IMPLEMENTED,
        )


def test_unknown_backend_is_an_error_with_the_allowed_names() -> None:
    with pytest.raises(ConfigError, match=r"no network backend 'smoke'"):
        select_backend("smoke", make_discovery_result())


@pytest.mark.parametrize("requested", ["auto", "tcp", "rdma"])
def test_every_selection_needs_a_reachable_host(requested: str) -> None:
    refused = Probe(available=False, reason="connection refused", fix="start it")
    with pytest.raises(UnreachableError) as caught:
        select_backend(requested, make_discovery_result(tcp=refused, rdma=AVAILABLE))
    assert caught.value.message == "box:5555 cannot be reached: connection refused"
    assert caught.value.hint == "start it"
