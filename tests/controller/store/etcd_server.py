"""A real etcd for tests: on loopback, free ports, its own folder; ends with the test process."""

from __future__ import annotations

import itertools
import shutil
import signal
import subprocess
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from tests.needs import require_program
from tests.ports import free_ports
from tests.waiting import wait_until

_STARTS_MAX = 3


class EtcdCluster:
    """Three members. `find_leader` is for faults that the leader of etcd must have."""

    def __init__(self, folder: Path) -> None:
        self.members = [EtcdServer(folder / name) for name in ("a", "b", "c")]
        names = [member.folder.name for member in self.members]
        peers = ",".join(f"{name}={one.peer_url}" for name, one in zip(names, self.members, strict=True))
        for name, member in zip(names, self.members, strict=True):
            member.options = ("--name", name, "--initial-cluster", peers)

    @property
    def url(self) -> str:
        return "etcd://" + ",".join(member.endpoint for member in self.members)

    def start(self) -> None:
        logs = [member.launch() for member in self.members]
        for member, log in zip(self.members, logs, strict=True):  # ready once there is a majority
            member.wait_ready(log)

    def stop(self) -> None:
        for member in self.members:
            member.stop()

    def find_leader(self) -> EtcdServer:
        for member in self.members:
            with urllib.request.urlopen(f"http://{member.endpoint}/metrics", timeout=10) as reply:
                if b"\netcd_server_is_leader 1\n" in reply.read():
                    return member
        raise AssertionError("etcd has no leader")


class EtcdServer:
    """Can be killed and restarted on the same data and ports. Logs to a file: a pipe could block it."""

    def __init__(self, folder: Path, *, scheme: str = "http", options: Sequence[str] = ()) -> None:
        self._program = require_program("etcd", package="etcd-server")
        self.folder = folder
        self._scheme = scheme
        self.options = tuple(options)
        self._process: subprocess.Popen[bytes] | None = None
        self._log_numbers = itertools.count()
        self._choose_ports()

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self._client_port}"

    @property
    def peer_url(self) -> str:
        return f"http://127.0.0.1:{self._peer_port}"

    @property
    def url(self) -> str:
        return f"{'etcds' if self._scheme == 'https' else 'etcd'}://{self.endpoint}"

    def start(self) -> None:
        fresh = not (self.folder / "data").exists()
        for attempt in range(_STARTS_MAX):
            log = self.launch()
            if self.wait_ready(log):
                return
            self._process = None
            # A port was taken between our choice and etcd's bind. Only a new server may use another one.
            if not fresh or attempt == _STARTS_MAX - 1:
                raise AssertionError(f"etcd did not start:\n{log.read_text()[-3000:]}")
            shutil.rmtree(self.folder / "data", ignore_errors=True)
            self._choose_ports()

    def kill(self) -> None:
        """Sends SIGKILL, like a crash."""
        self._end(signal.SIGKILL)

    def suspend(self) -> None:
        """Sends SIGSTOP: connections stay open, but no request is answered. Waits until all threads stop."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        threads = Path(f"/proc/{self._process.pid}/task")
        wait_until(lambda: all(_read_thread_state(thread) == "T" for thread in threads.iterdir()))

    def resume(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        """Idempotent."""
        self._end(signal.SIGTERM)

    def _end(self, how: signal.Signals) -> None:
        if self._process is None:
            return
        self._process.send_signal(how)
        self._process.send_signal(signal.SIGCONT)
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(timeout=10)
        self._process = None

    def wait_ready(self, log: Path) -> bool:
        """Waits until it is ready or has ended; returns whether it runs."""
        wait_until(lambda: self._is_decided(log), timeout_s=30, what="etcd to be ready")
        return self._process is not None and self._process.poll() is None

    def launch(self) -> Path:
        """Starts the process; returns its log."""
        self.folder.mkdir(parents=True, exist_ok=True)
        log = self.folder / f"etcd-{next(self._log_numbers)}.log"
        client, peer = f"{self._scheme}://{self.endpoint}", self.peer_url
        command = [
            *(["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []),
            *(self._program, "--name", "one", "--data-dir", str(self.folder / "data")),
            *("--listen-client-urls", client, "--advertise-client-urls", client),
            *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
            *("--initial-cluster", f"one={peer}"),
            *self.options,
        ]
        with log.open("wb") as output:
            # HOME lets the cleanup after an interrupted test run find it.
            env = {"PATH": "/usr/bin:/bin", "HOME": str(self.folder)}
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=env
            )
        return log

    def _is_decided(self, log: Path) -> bool:
        assert self._process is not None
        return self._process.poll() is not None or b"ready to serve client requests" in log.read_bytes()

    def _choose_ports(self) -> None:
        self._client_port, self._peer_port = free_ports(2)


def _read_thread_state(folder: Path) -> str:
    """The letter of the state of a thread, such as R, S or T, from its folder in /proc."""
    return (folder / "stat").read_text().rpartition(") ")[2][0]
