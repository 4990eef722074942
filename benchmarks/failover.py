"""Failover for bench_control.py: two controllers on three etcd members, and many agents; leaders are killed.

All processes are on loopback. etcd runs without TLS and with its default timeouts, as under `genie up`.
"""

from __future__ import annotations

import asyncio
import http.client
import itertools
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from control_roles import agents_process

from genie import config
from genie.cluster.client import open_client
from genie.config import Settings
from genie.errors import GenieError
from genie.model.job import JobSpec
from genie.model.messages import StatusReply
from genie.model.node import NodeStatus
from genie.runtime.credentials import OWNER_TOKEN_FILE, LocalCluster
from genie.supervisor.local_cluster import make_owner_access

_Found = TypeVar("_Found")

TIMEOUT_S = 60.0
SETTLE_S = 2.0
_POLL_S = 0.02
_ETCD_ATTEMPT_S = 0.3
"""A write that a member has forwarded to the killed leader is never answered."""


@dataclass
class FailoverRun:
    """Times in ms since the kill, by round."""

    election_ms: list[float] = field(default_factory=list)
    """Until etcd accepted a write after the loss of its leader alone."""
    controller_ms: list[float] = field(default_factory=list)
    """Until a submission was accepted after the loss of the leading controller alone."""
    controller_recovery_ms: list[float] = field(default_factory=list)
    """Until all agents were registered and healthy after that."""
    both_ms: list[float] = field(default_factory=list)
    """Until a submission was accepted after the loss of the controller and of the leader of etcd."""
    both_recovery_ms: list[float] = field(default_factory=list)


class KillableProcess:
    """Starts with the same arguments each time. Output goes to a file."""

    def __init__(self, command: list[str], *, log: Path, environ: dict[str, str]) -> None:
        self._command = command
        self._log = log
        self._environ = environ
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self._log.open("ab") as output:
            self._process = subprocess.Popen(self._command, stdout=output, stderr=output, env=self._environ)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def check_running(self) -> None:
        if self._process is None or self._process.poll() is not None:
            raise SystemExit(f"{self._command[:3]} has ended:\n{self._log.read_text('utf-8')[-2000:]}")


class EtcdMembers:
    """Three members."""

    def __init__(self, folder: Path) -> None:
        names = ("a", "b", "c")
        with ExitStack() as held:
            ports = [
                held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(2 * len(names))
            ]
            addresses = [f"127.0.0.1:{port.getsockname()[1]}" for port in ports]
        self.endpoints, peers = addresses[: len(names)], addresses[len(names) :]
        cluster = ",".join(f"{name}=http://{peer}" for name, peer in zip(names, peers, strict=True))
        self.processes = [
            KillableProcess(
                [
                    *(shutil.which("etcd") or "etcd", "--name", name, "--data-dir", str(folder / name)),
                    *(
                        "--listen-client-urls",
                        f"http://{client}",
                        "--advertise-client-urls",
                        f"http://{client}",
                    ),
                    *(
                        "--listen-peer-urls",
                        f"http://{peer}",
                        "--initial-advertise-peer-urls",
                        f"http://{peer}",
                    ),
                    *("--initial-cluster", cluster),
                ],
                log=folder / f"{name}.log",
                environ={},
            )
            for name, client, peer in zip(names, self.endpoints, peers, strict=True)
        ]

    @property
    def url(self) -> str:
        return f"etcd://{','.join(self.endpoints)}"

    def find_leader(self) -> int:
        """Number of the member that leads; waits until there is one."""

        def find() -> int | None:
            for number, endpoint in enumerate(self.endpoints):
                status = call_etcd(endpoint, "maintenance/status", {})
                if status and status.get("leader") == status["header"]["member_id"]:
                    return number
            return None

        return wait_for(find, what="etcd to have a leader")

    def wait_until_writable(self) -> None:
        """Writes through one member after the other until one of them acknowledges."""
        endpoints = itertools.cycle(self.endpoints)
        body = {"key": "YmVuY2g=", "value": "YmVuY2g="}
        wait_until(lambda: call_etcd(next(endpoints), "kv/put", body), what="etcd to accept a write")


def call_etcd(endpoint: str, path: str, body: object) -> dict[str, Any]:
    """The reply of etcd's JSON API; empty if there is none in time, or an error."""
    connection = http.client.HTTPConnection(endpoint, timeout=_ETCD_ATTEMPT_S)
    try:
        connection.request("POST", f"/v3/{path}", json.dumps(body))
        reply = json.loads(connection.getresponse().read())
    except (OSError, http.client.HTTPException, ValueError):
        return {}
    finally:
        connection.close()
    return {} if "error" in reply else dict(reply)


class Controllers:
    """A leader and a standby, which take turns."""

    def __init__(self, folder: Path, *, store: str) -> None:
        self.state_dirs = [folder / "first", folder / "second"]
        self.processes = [
            KillableProcess(
                [
                    *(sys.executable, "-m", "genie.controller", "--state-dir", str(state_dir)),
                    *("--bind", "127.0.0.1", "--port", str(port), "--store", store),
                ],
                log=folder / f"{state_dir.name}.log",
                environ=dict(os.environ),
            )
            for state_dir, port in zip(self.state_dirs, _free_ports(2), strict=True)
        ]

    def start(self) -> None:
        """Starts the first, and then the second with the certificate authority of the first."""
        first, second = self.state_dirs
        first.mkdir()
        self.processes[0].start()
        wait_until(
            lambda: self._is_listening(0) and (first / OWNER_TOKEN_FILE).exists(), what="the controller"
        )
        (second / "controller").mkdir(parents=True)
        for name in ("controller/ca.pem", "controller/ca.key", OWNER_TOKEN_FILE):
            shutil.copy2(first / name, second / name)
        self.processes[1].start()
        wait_until(lambda: self._is_listening(1), what="the standby")

    def restart(self, number: int) -> None:
        (self.state_dirs[number] / "local.json").unlink(missing_ok=True)
        self.processes[number].start()
        wait_until(lambda: self._is_listening(number), what="the killed controller")

    def settings(self, number: int) -> Settings:
        """Those of a client whose first connection is to this controller."""
        local = LocalCluster.read(self.state_dirs[number])
        assert local is not None
        settings = config.load({"paths.state_dir": str(self.state_dirs[number])})
        return replace(settings, cluster=make_owner_access(self.state_dirs[number], local))

    def find_leader(self) -> int:
        """Number of the controller that leads; waits until there is one."""

        async def fetch_status(number: int) -> StatusReply:
            async with asyncio.timeout(TIMEOUT_S), open_client(self.settings(number)) as client:
                return await client.status()

        def find() -> int | None:
            for number in range(len(self.processes)):
                try:
                    if asyncio.run(fetch_status(number)).leading:
                        return number
                except (GenieError, TimeoutError):
                    continue
            return None

        return wait_for(find, what="a controller to lead")

    def _is_listening(self, number: int) -> bool:
        self.processes[number].check_running()
        return (self.state_dirs[number] / "local.json").exists()


def measure_failover(folder: Path, *, nodes: int, gpus: int, rounds: int) -> FailoverRun:
    run = FailoverRun()
    (folder / "etcd").mkdir()
    etcd = EtcdMembers(folder / "etcd")
    controllers = Controllers(folder, store=etcd.url)
    with ExitStack() as stack:
        for process in [*etcd.processes, *controllers.processes]:
            stack.callback(process.kill)
        for process in etcd.processes:
            process.start()
        etcd.wait_until_writable()
        controllers.start()
        stack.enter_context(agents_process(controllers.state_dirs[0], nodes=nodes, gpus=gpus))
        _wait_for_healthy_nodes(controllers, 0, nodes)
        for _ in range(rounds):
            _measure_round(run, etcd, controllers, nodes=nodes)
    return run


def _measure_round(run: FailoverRun, etcd: EtcdMembers, controllers: Controllers, *, nodes: int) -> None:
    with _killed_etcd_leader(etcd):
        began_s = time.monotonic()
        etcd.wait_until_writable()
        run.election_ms.append((time.monotonic() - began_s) * 1e3)
    for with_etcd, accepted_ms, recovered_ms in (
        (False, run.controller_ms, run.controller_recovery_ms),
        (True, run.both_ms, run.both_recovery_ms),
    ):
        leading = controllers.find_leader()
        _wait_for_healthy_nodes(controllers, leading, nodes)
        time.sleep(SETTLE_S)  # heartbeats and leases are in their usual rhythm
        with ExitStack() as stack:
            began_s = time.monotonic()
            controllers.processes[leading].kill()
            if with_etcd:
                stack.enter_context(_killed_etcd_leader(etcd))
            asyncio.run(_submit(controllers.settings(1 - leading)))
            accepted_ms.append((time.monotonic() - began_s) * 1e3)
            _wait_for_healthy_nodes(controllers, 1 - leading, nodes)
            recovered_ms.append((time.monotonic() - began_s) * 1e3)
        controllers.restart(leading)


@contextmanager
def _killed_etcd_leader(etcd: EtcdMembers) -> Iterator[None]:
    """Kills the leader of etcd, and starts it again at the end."""
    killed = etcd.processes[etcd.find_leader()]
    killed.kill()
    yield
    killed.start()
    wait_until(
        lambda: all(call_etcd(endpoint, "maintenance/status", {}) for endpoint in etcd.endpoints),
        what="all members of etcd",
    )


async def _submit(settings: Settings) -> None:
    async with asyncio.timeout(TIMEOUT_S), open_client(settings, program="bench") as client:
        await client.submit(JobSpec(name="bench", command=("true",)))


def _wait_for_healthy_nodes(controllers: Controllers, number: int, nodes: int) -> None:
    async def wait() -> None:
        async with (
            asyncio.timeout(TIMEOUT_S),
            open_client(controllers.settings(number), program="bench") as client,
        ):
            while True:
                statuses = [view.info.status for view in await client.nodes()]
                if statuses.count(NodeStatus.HEALTHY) == nodes:
                    return
                await asyncio.sleep(_POLL_S)

    asyncio.run(wait())


def wait_for(find: Callable[[], _Found | None], *, what: str) -> _Found:
    """Polls until the result is not None, and returns it."""
    deadline_s = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline_s:
        found = find()
        if found is not None:
            return found
        time.sleep(_POLL_S)
    raise SystemExit(f"timed out after {TIMEOUT_S:g} s waiting for {what}")


def wait_until(predicate: Callable[[], object], *, what: str) -> None:
    wait_for(lambda: True if predicate() else None, what=what)


def _free_ports(count: int) -> list[int]:
    with ExitStack() as held:
        made = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in made]
