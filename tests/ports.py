"""Free TCP ports for servers that cannot choose their own.

The kernel may give a port that it has chosen (port 0) to another process as soon as it is closed. The ports
here are outside of its range, and each worker of a test run has its own.
"""

from __future__ import annotations

import errno
import itertools
import os
import socket
from pathlib import Path

_FIRST, _LAST = 20_000, 32_767  # Ray uses ports below
_WORKERS_MAX = 16
_KERNEL_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_COUNT_PER_WORKER = (_LAST - _FIRST + 1) // _WORKERS_MAX
# Different numbers for test runs at the same time.
_NUMBERS = itertools.count(os.getpid())


def free_port() -> int:
    """A port that is free on all addresses. Repeated calls return different ports."""
    if _first_ephemeral_port() <= _LAST:
        with socket.socket() as probe:
            probe.bind(("0.0.0.0", 0))
            return int(probe.getsockname()[1])
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % _WORKERS_MAX
    for number in itertools.islice(_NUMBERS, _COUNT_PER_WORKER):
        port = _FIRST + worker * _COUNT_PER_WORKER + number % _COUNT_PER_WORKER
        if _is_free(port):
            return port
    raise AssertionError("no port is free")


def free_ports(count: int) -> list[int]:
    return [free_port() for _ in range(count)]


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("0.0.0.0", port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            return False
    return True


def _first_ephemeral_port() -> int:
    """The first port that the kernel may choose."""
    try:
        return int(_KERNEL_RANGE.read_text().split()[0])
    except OSError:
        return 0  # unknown, on another system than Linux
