"""Free ports for the servers of tests (tests/ports.py)."""

from __future__ import annotations

import itertools
import socket
from pathlib import Path

import pytest

from tests import ports

KERNEL = Path("/proc/sys/net/ipv4/ip_local_port_range")


def test_ports_differ_and_are_free() -> None:
    found = ports.free_ports(20)
    assert len(set(found)) == 20
    for port in found:
        with socket.create_server(("127.0.0.1", port)):
            pass


@pytest.mark.skipif(not KERNEL.exists(), reason="needs Linux")
def test_ports_are_not_chosen_by_the_kernel_or_by_another_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    if ports._first_ephemeral_port() <= ports._LAST:
        pytest.skip("needs a default range of local ports")
    slices = []
    for worker in ("gw0", "gw1"):
        monkeypatch.setenv("PYTEST_XDIST_WORKER", worker)
        slices.append(range(min(found := ports.free_ports(50)), max(found) + 1))
    assert max(slices[0]) < min(slices[1]) < ports._first_ephemeral_port()


def test_port_in_use_is_not_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "_NUMBERS", itertools.cycle(range(5)))
    with socket.create_server(("127.0.0.1", ports.free_port())) as server:
        taken = server.getsockname()[1]
        assert taken not in ports.free_ports(10)


def test_kernel_chooses_if_its_range_is_unknown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(ports, "_KERNEL_RANGE", tmp_path / "missing")
    assert 1024 <= ports.free_port() <= 65535
