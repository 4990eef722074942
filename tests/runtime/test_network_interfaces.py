"""Interfaces: which one a connection uses, its speed and its throughput."""

from __future__ import annotations

from pathlib import Path

import pytest

from genie.runtime.network_interfaces import (
    Interface,
    InterfaceMeter,
    Throughput,
    Traffic,
    compute_throughput,
    find_interface,
    read_traffic,
)

HEAD = "Inter-|   Receive  |  Transmit\n face |bytes packets errs |bytes packets\n"


def write_counters(root: Path, name: str, *, received: int, sent: int) -> None:
    path = root / "proc/net/dev"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{HEAD}  {name}: {received} 1 0 0 0 0 0 0 {sent} 1 0 0 0 0 0 0\n")


def write_speed(root: Path, name: str, text: str) -> None:
    path = root / "sys/class/net" / name / "speed"
    path.parent.mkdir(parents=True)
    path.write_text(text)


@pytest.mark.parametrize(
    ("text", "gbps"), [("10000\n", 10.0), ("2500", 2.5), ("-1\n", None), ("4294967295\n", None), ("", None)]
)
def test_speed_is_read_from_the_driver(tmp_path: Path, text: str, gbps: float | None) -> None:
    write_speed(tmp_path, "lo", text)
    found = find_interface(source="127.0.0.1", destination="127.0.0.2", root=tmp_path)
    assert found == Interface(name="lo", speed_gbps=gbps)


def test_unknown_speed_and_foreign_address_give_none(tmp_path: Path) -> None:
    found = find_interface(source="127.0.0.1", destination="127.0.0.1", root=tmp_path)
    assert found == Interface(name="lo")
    assert find_interface(source="192.0.2.7", destination="192.0.2.8", root=tmp_path) is None


def test_connection_to_a_local_address_uses_loopback(tmp_path: Path) -> None:
    assert find_interface(source="192.0.2.7", destination="192.0.2.7", root=tmp_path) == Interface(name="lo")


def test_counters_are_read_by_interface_and_invalid_lines_are_skipped(tmp_path: Path) -> None:
    assert read_traffic(now_s=1.0, root=tmp_path) == {}
    write_counters(tmp_path, "eth0", received=100, sent=7)
    assert read_traffic(now_s=1.0, root=tmp_path) == {
        "eth0": Traffic(received_bytes=100, sent_bytes=7, measured_at_s=1.0)
    }
    (tmp_path / "proc/net/dev").write_text("eth0: many 1\nwlan0: 1 2 3\n")
    assert read_traffic(now_s=1.0, root=tmp_path) == {}
    for odd in ("\u00b2", "9" * 5000, "-1"):
        (tmp_path / "proc/net/dev").write_text("eth0: " + " ".join([odd] * 16))
        assert read_traffic(now_s=1.0, root=tmp_path) == {}


def test_throughput_is_bytes_per_second() -> None:
    before = Traffic(received_bytes=1000, sent_bytes=0, measured_at_s=10.0)
    after = Traffic(received_bytes=5000, sent_bytes=250_000_000, measured_at_s=12.0)
    carried = compute_throughput(before, after)
    assert carried == Throughput(received_bytes_per_s=2000.0, sent_bytes_per_s=125e6, over_s=2.0)
    assert carried.gbps_max == pytest.approx(1.0)
    assert compute_throughput(after, before) is None, "a reset, or no time"
    assert compute_throughput(None, after) is None
    assert compute_throughput(before, None) is None


def test_meter_measures_since_the_previous_reading(tmp_path: Path) -> None:
    times = iter((0.0, 2.0, 4.0, 5.0))
    write_counters(tmp_path, "eth0", received=0, sent=0)
    meter = InterfaceMeter("eth0", root=tmp_path, monotonic_s=lambda: next(times))
    write_counters(tmp_path, "eth0", received=200, sent=20)
    assert meter.read() == Throughput(received_bytes_per_s=100.0, sent_bytes_per_s=10.0, over_s=2.0)
    assert meter.read() == Throughput(received_bytes_per_s=0.0, sent_bytes_per_s=0.0, over_s=2.0)
    (tmp_path / "proc/net/dev").unlink()
    assert meter.read() is None
