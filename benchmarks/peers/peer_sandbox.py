"""Sandbox of a peer: network and PID namespaces (unshare) that isolate it and end all of its processes.

The loopback interface of the sandbox is not reachable from outside, although Ray listens on every address and
Slurm on fixed ports. When the first process of the PID namespace ends, the kernel ends the others. The peer
prints `ready`, then replies to each line of its input, `quiet JOBS GAP_S` or `busy WORKERS SECONDS`, and ends
at the end of input. A reply:

    began 47536.116409            time of the monotonic clock in seconds
    placed 47536.132341 9.819     time of a placement, and its latency in milliseconds
    end
"""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

SANDBOX_TIMEOUT_S = 240.0
END_TIMEOUT_S = 30.0
_LOG_TAIL_CHARS = 2000
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _SIOCSIFADDR = 0x8913, 0x8914, 0x8916
_IFF_UP = 0x1
_SECOND_ADDRESS = "192.0.2.1"


@dataclass(frozen=True)
class Placement:
    at_s: float
    latency_ms: float


@dataclass(frozen=True)
class MeasurementReply:
    began_s: float
    placements: tuple[Placement, ...]

    def placements_between(self, from_s: float, until_s: float) -> list[Placement]:
        """Placements in this interval, in seconds since the start of the measurement."""
        return [each for each in self.placements if from_s <= each.at_s - self.began_s < until_s]


def parse_reply(lines: Iterable[str]) -> MeasurementReply:
    """Parses lines up to `end`. Raises ValueError for any other line, or if `end` is missing."""
    began_s: float | None = None
    placements: list[Placement] = []
    for line in lines:
        match line.split():
            case ["began", at_s] if began_s is None:
                began_s = float(at_s)
            case ["placed", at_s, latency_ms] if began_s is not None:
                placements.append(Placement(float(at_s), float(latency_ms)))
            case ["end"] if began_s is not None:
                return MeasurementReply(began_s, tuple(placements))
            case _:
                raise ValueError(f"unexpected line from the peer: {line.strip()!r}")
    raise ValueError("the reply of the peer is incomplete")


def sandbox_command(*inside: str) -> list[str]:
    """Command that runs `inside` in a sandbox. An ordinary user is mapped to root in it."""
    user = [] if os.geteuid() == 0 else ["--map-root-user"]
    return ["unshare", *user, "--net", "--pid", "--fork", "--kill-child", "--mount-proc", *inside]


def namespaces_allowed() -> bool:
    """Whether this user is permitted to create namespaces."""
    try:
        return (
            subprocess.run(sandbox_command("true"), check=False, capture_output=True, timeout=20).returncode
            == 0
        )
    except (OSError, subprocess.TimeoutExpired):
        return False


class Sandbox:
    """Sends requests to a peer in its sandbox."""

    def __init__(self, requests: IO[str], replies: IO[str]) -> None:
        self._requests = requests
        self._replies = replies

    def request(self, *arguments: object) -> MeasurementReply:
        self._requests.write(" ".join(map(str, arguments)) + "\n")
        self._requests.flush()
        return parse_reply(self._replies)


@contextmanager
def open_sandbox(
    command: Sequence[str], *, name: str, folder: Path, limit_s: float = SANDBOX_TIMEOUT_S
) -> Iterator[Sandbox]:
    """Runs `command` for the duration of the block, at most `limit_s`. Raises SystemExit with the end of the
    log if the peer fails."""
    log = folder / f"{name}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=output, text=True, bufsize=1
        )
    assert process.stdin is not None and process.stdout is not None
    watchdog = threading.Timer(limit_s, _kill_sandbox, (process,))
    watchdog.start()
    try:
        if process.stdout.readline().strip() != "ready":
            raise ValueError("did not start")
        yield Sandbox(process.stdin, process.stdout)
    except (ValueError, BrokenPipeError) as error:
        _kill_sandbox(process)
        raise SystemExit(f"{name}: {error}\n{log.read_text(errors='replace')[-_LOG_TAIL_CHARS:]}") from error
    except BaseException:
        _kill_sandbox(process)
        raise
    finally:
        watchdog.cancel()
        _end_peer(process)


def _end_peer(process: subprocess.Popen[str]) -> None:
    """Closes the input of the peer and waits until it ends."""
    try:
        process.communicate(timeout=END_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        _kill_sandbox(process)
        process.communicate()


def _kill_sandbox(process: subprocess.Popen[str]) -> None:
    """Kills the first process of the sandbox if there is one: unshare then waits until all others have ended
    and no process writes to the folder."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    try:
        inside = [int(child) for child in children.read_text().split()]
    except OSError:
        inside = []
    for pid in inside or [process.pid]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


# -- inside the sandbox -----------------------------------------------------------------------------


def bring_up_loopback() -> None:
    """Brings the loopback interface of a new network namespace up and adds a second address: with 127.* only,
    libc resolves no name for Slurm, not even a numeric one."""
    with socket.socket() as any_socket:
        query = struct.pack("16sh14x", b"lo", 0)
        flags: int = struct.unpack("16sh14x", fcntl.ioctl(any_socket, _SIOCGIFFLAGS, query))[1]
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", flags | _IFF_UP))
        address = socket.inet_aton(_SECOND_ADDRESS)
        request = struct.pack("16sHH4s8x", b"lo:1", socket.AF_INET, 0, address)
        fcntl.ioctl(any_socket, _SIOCSIFADDR, request)


def serve_requests(measure: Callable[[str, int, float], Iterable[str]]) -> None:
    """Prints `ready` and replies to requests until the end of input."""
    print("ready", flush=True)
    for line in sys.stdin:
        kind, count, time_s = line.split()
        for reply in measure(kind, int(count), float(time_s)):
            print(reply)
        print("end", flush=True)
