"""A room for a peer: a process tree of its own that reaches nobody and leaves nothing running.

A peer runs in namespaces of its own (unshare): a loopback interface that nobody else sees, though Ray
listens on every address and Slurm on fixed ports, and process ids that all end with the first one. The peer
says `ready`, then answers each line that it is sent, `quiet JOBS GAP_S` or `busy WORKERS SECONDS`, and ends
at the end of its input:

    began 47536.116409            seconds of the monotonic clock, which all processes share
    placed 47536.132341 9.819     when it was known, and after how many milliseconds
    end

Not for: what a peer is (slurm_peer.py, ray_peer.py), and figures (bench_peers.py).
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

LIMIT_S = 240.0
END_S = 30.0
_LOG_TAIL = 2000
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _SIOCSIFADDR = 0x8913, 0x8914, 0x8916
_IFF_UP = 0x1
_SECOND_ADDRESS = "192.0.2.1"


@dataclass(frozen=True)
class Placement:
    at_s: float
    taken_ms: float


@dataclass(frozen=True)
class Answer:
    began_s: float
    placements: tuple[Placement, ...]

    def within(self, from_s: float, until_s: float) -> list[Placement]:
        """Those that were known in that time, in seconds after it began."""
        return [each for each in self.placements if from_s <= each.at_s - self.began_s < until_s]


def parse_answer(lines: Iterable[str]) -> Answer:
    """Up to and with `end`; ValueError for anything else, and for lines that stop before it."""
    began_s: float | None = None
    placements: list[Placement] = []
    for line in lines:
        match line.split():
            case ["began", at_s] if began_s is None:
                began_s = float(at_s)
            case ["placed", at_s, taken_ms] if began_s is not None:
                placements.append(Placement(float(at_s), float(taken_ms)))
            case ["end"] if began_s is not None:
                return Answer(began_s, tuple(placements))
            case _:
                raise ValueError(f"a peer does not say {line.strip()!r} here")
    raise ValueError("the answer stops before its end")


def room_command(*inside: str) -> list[str]:
    """Runs that in a room. Who is not root outside is root inside, as far as that goes."""
    user = [] if os.geteuid() == 0 else ["--map-root-user"]
    return ["unshare", *user, "--net", "--pid", "--fork", "--kill-child", "--mount-proc", *inside]


def rooms_allowed() -> bool:
    """Whether this user may have namespaces on this machine."""
    try:
        return (
            subprocess.run(room_command("true"), check=False, capture_output=True, timeout=20).returncode == 0
        )
    except (OSError, subprocess.TimeoutExpired):
        return False


class Room:
    """The outer side of a peer that is ready."""

    def __init__(self, sent: IO[str], heard: IO[str]) -> None:
        self._sent = sent
        self._heard = heard

    def ask(self, *words: object) -> Answer:
        self._sent.write(" ".join(map(str, words)) + "\n")
        self._sent.flush()
        return parse_answer(self._heard)


@contextmanager
def open_room(command: Sequence[str], *, name: str, folder: Path, limit_s: float = LIMIT_S) -> Iterator[Room]:
    """Runs `command` until the block is left; after `limit_s` it is killed. What goes wrong in between is a
    SystemExit with the last words of its log."""
    log = folder / f"{name}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=output, text=True, bufsize=1
        )
    assert process.stdin is not None and process.stdout is not None
    watch = threading.Timer(limit_s, _kill, (process,))
    watch.start()
    try:
        if process.stdout.readline().strip() != "ready":
            raise ValueError("it did not start")
        yield Room(process.stdin, process.stdout)
    except (ValueError, BrokenPipeError) as error:
        _kill(process)
        raise SystemExit(f"{name}: {error}\n{log.read_text(errors='replace')[-_LOG_TAIL:]}") from error
    except BaseException:
        _kill(process)
        raise
    finally:
        watch.cancel()
        _end(process)


def _end(process: subprocess.Popen[str]) -> None:
    """The end of its input is its sign."""
    try:
        process.communicate(timeout=END_S)
    except subprocess.TimeoutExpired:
        _kill(process)
        process.communicate()


def _kill(process: subprocess.Popen[str]) -> None:
    """Its first process inside, where it has one: unshare then waits until all the others are gone, too, and
    nobody writes to the folder any more."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    try:
        inside = [int(child) for child in children.read_text().split()]
    except OSError:
        inside = []
    for pid in inside or [process.pid]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


# -- inside -----------------------------------------------------------------------------------------


def raise_loopback() -> None:
    """A new network namespace has its loopback interface down. It gets a second address there, since libc
    resolves no name, not even a numeric one, for a program (Slurm) that asks on a machine with 127.* only."""
    with socket.socket() as any_socket:
        asked = struct.pack("16sh14x", b"lo", 0)
        flags: int = struct.unpack("16sh14x", fcntl.ioctl(any_socket, _SIOCGIFFLAGS, asked))[1]
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", flags | _IFF_UP))
        address = socket.inet_aton(_SECOND_ADDRESS)
        named = struct.pack("16sHH4s8x", b"lo:1", socket.AF_INET, 0, address)
        fcntl.ioctl(any_socket, _SIOCSIFADDR, named)


def answer_all(measure: Callable[[str, int, float], Iterable[str]]) -> None:
    """Says ready and answers until the input ends."""
    print("ready", flush=True)
    for line in sys.stdin:
        kind, count, time_s = line.split()
        for said in measure(kind, int(count), float(time_s)):
            print(said)
        print("end", flush=True)
