"""Network interfaces of this machine: which one a connection uses, its speed, and its throughput.

The speed comes from /sys/class/net, the throughput is computed from /proc/net/dev. Linux only; on other
systems all results are None or empty.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

_ROOT = Path("/")
_LOOPBACK = "lo"
_COUNT_DIGITS_MAX = 20  # of 64 bits
_SPEED_UNKNOWN_MBPS = 0xFFFFFFFF


@dataclass(frozen=True, kw_only=True)
class Interface:
    """`speed_gbps` is None if the driver reports none: loopback, virtual interfaces, a link that is down."""

    name: str
    speed_gbps: float | None = None


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Counters of one interface since it came up, and when they were read (monotonic seconds)."""

    received_bytes: int
    sent_bytes: int
    measured_at_s: float


@dataclass(frozen=True, kw_only=True)
class Throughput:
    """Throughput of an interface, all programs of this machine included, averaged over `over_s`."""

    received_bytes_per_s: float
    sent_bytes_per_s: float
    over_s: float

    @property
    def gbps_max(self) -> float:
        """The busier direction, in gigabits per second."""
        return max(self.received_bytes_per_s, self.sent_bytes_per_s) * 8 / 1e9


def find_interface(*, source: str, destination: str, root: Path = _ROOT) -> Interface | None:
    """The interface of a connection between these two addresses. Blocks: a driver may be slow."""
    name = _LOOPBACK if source == destination else _interface_with_address(source)
    return None if name is None else Interface(name=name, speed_gbps=_speed_gbps(root, name))


def read_traffic(*, now_s: float, root: Path = _ROOT) -> dict[str, Traffic]:
    """The counters of every interface, by name."""
    try:
        lines = (root / "proc/net/dev").read_text("utf-8", errors="replace").splitlines()
    except OSError:
        return {}
    found: dict[str, Traffic] = {}
    for line in lines:
        name, colon, rest = line.partition(":")
        numbers = rest.split()
        if colon and len(numbers) >= 16 and _is_counter_value(numbers[0]) and _is_counter_value(numbers[8]):
            found[name.strip()] = Traffic(
                received_bytes=int(numbers[0]), sent_bytes=int(numbers[8]), measured_at_s=now_s
            )
    return found


def compute_throughput(before: Traffic | None, after: Traffic | None) -> Throughput | None:
    """None without two readings, or if the counters were reset in between."""
    if before is None or after is None:
        return None
    over_s = after.measured_at_s - before.measured_at_s
    received, sent = after.received_bytes - before.received_bytes, after.sent_bytes - before.sent_bytes
    if over_s <= 0 or received < 0 or sent < 0:
        return None
    return Throughput(received_bytes_per_s=received / over_s, sent_bytes_per_s=sent / over_s, over_s=over_s)


class InterfaceMeter:
    """Measures one interface. A reading covers the time since the previous one, or since the construction."""

    def __init__(
        self, name: str, *, root: Path = _ROOT, monotonic_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._name = name
        self._root = root
        self._monotonic_s = monotonic_s
        self._previous_traffic = self._read_counters()

    def read(self) -> Throughput | None:
        """The throughput since the last reading."""
        before, self._previous_traffic = self._previous_traffic, self._read_counters()
        return compute_throughput(before, self._previous_traffic)

    def _read_counters(self) -> Traffic | None:
        return read_traffic(now_s=self._monotonic_s(), root=self._root).get(self._name)


def _is_counter_value(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= _COUNT_DIGITS_MAX


def _interface_with_address(address: str) -> str | None:
    """Name of the interface with this address; zones of IPv6 addresses are ignored."""
    bare = address.partition("%")[0]
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address.partition("%")[0] == bare for each in addresses):
            return name
    return None


def _speed_gbps(root: Path, name: str) -> float | None:
    try:
        megabits = int((root / "sys/class/net" / name / "speed").read_text("utf-8"))
    except (OSError, ValueError):
        return None
    # Unknown speed is -1, on some kernels as an unsigned number.
    return megabits / 1000 if 0 < megabits < _SPEED_UNKNOWN_MBPS else None
