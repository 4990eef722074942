"""A server and a client on two machines, simulated by two network namespaces with a veth pair.

The server is reachable by a host name. The client logs in once and runs the documented sample verbatim. A
machine joins with the commands that the server prints.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests import needs

HOST = "gpu-server.example.com"
READY_S = 90
SERVER = f"""
    import asyncio, sys, genie

    async def main():
        await genie.init(node_role='server', master_addr='{HOST}')
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.read)
        await genie.shutdown()

    asyncio.run(main())
"""
SAMPLE = f"""
    import asyncio

    async def main():
        import genie

        # Initialize connection to GPU cluster
        await genie.init(master_addr='{HOST}')

        # Use remote accelerators transparently
        import torch
        x = torch.randn(1000, 1000, device='remote_accelerator:0')
        result = (x @ x).cpu()

        state = genie.get_cluster_state()
        print(torch.allclose(result, x.cpu() @ x.cpu(), atol=1e-2), tuple(result.shape))
        print(state.discovery.interface, state.health.report.check("network").reason)
        # Clean shutdown
        await genie.shutdown()

    asyncio.run(main())
"""
# In the mount namespace of `ip netns exec`, so that /etc/hosts of the machine is not changed.
ENTER = 'mount --bind "$1" /etc/hosts && shift && exec "$@"'


@dataclass(frozen=True)
class SimulatedMachine:
    """A simulated machine: its network namespace, address and home folder."""

    namespace: str
    address: str
    folder: Path

    def argv(self, *command: str) -> list[str]:
        hosts = str(self.folder.parent / "hosts")
        program = needs.require_program("ip", package="iproute2")
        return [program, "netns", "exec", self.namespace, "sh", "-c", ENTER, "sh", hosts, *command]

    @property
    def environ(self) -> dict[str, str]:
        own = {"HOME": str(self.folder), "GENIE_STATE_DIR": str(self.folder / "state")}
        return {**os.environ, **own}

    def genie(self, *argv: str, text: str = "") -> subprocess.CompletedProcess[str]:
        return self._run(self.argv(sys.executable, "-m", "genie", *argv), text)

    def python(self, code: str) -> subprocess.CompletedProcess[str]:
        return self._run(self.argv(sys.executable, "-c", textwrap.dedent(code)), "")

    def _run(self, argv: list[str], text: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            argv, env=self.environ, input=text, capture_output=True, text=True, timeout=READY_S
        )


def run_ip_command(*argv: str) -> None:
    program = needs.require_program("ip", package="iproute2")
    subprocess.run([program, *argv], check=True, capture_output=True, timeout=30)


def remove_leftover_namespaces() -> None:
    """Deletes the namespaces of killed test runs."""
    for name in Path("/run/netns").glob("genie-*-*"):
        if not psutil.pid_exists(int(name.name.split("-")[1])):
            run_ip_command("netns", "delete", name.name)


@pytest.fixture(scope="module")
def server_and_client_machine(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[SimulatedMachine, SimulatedMachine]]:
    """Two machines on one network that resolve the host name of the server."""
    needs.require_program("ip", package="iproute2")  # checked before namespaces
    needs.require_namespaces("net", "mount")
    remove_leftover_namespaces()
    folder = tmp_path_factory.mktemp("m")
    created = []
    with ExitStack() as stack:
        for number, name in enumerate(("server", "client"), 1):
            machine = SimulatedMachine(f"genie-{os.getpid()}-{name}", f"10.213.77.{number}", folder / name)
            machine.folder.mkdir()
            run_ip_command("netns", "add", machine.namespace)
            stack.callback(run_ip_command, "netns", "delete", machine.namespace)
            created.append(machine)
        server, client = created
        run_ip_command(
            "-n",
            server.namespace,
            "link",
            "add",
            "eth0",
            "type",
            "veth",
            "peer",
            "eth0",
            "netns",
            client.namespace,
        )
        for machine in created:
            run_ip_command("-n", machine.namespace, "address", "add", f"{machine.address}/24", "dev", "eth0")
            for link in ("lo", "eth0"):
                run_ip_command("-n", machine.namespace, "link", "set", link, "up")
        (folder / "hosts").write_text(f"127.0.0.1 localhost\n{server.address} {HOST}\n")
        yield server, client


@pytest.fixture(scope="module")
def running_server_log(server_and_client_machine: tuple[SimulatedMachine, SimulatedMachine]) -> Iterator[str]:
    """Starts a session with the role server and yields its standard error."""
    server, _ = server_and_client_machine
    log = server.folder / "log"
    with log.open("w") as file:
        process = subprocess.Popen(
            server.argv(sys.executable, "-c", textwrap.dedent(SERVER)),
            env=server.environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=file,
            text=True,
        )
    assert process.stdin is not None and process.stdout is not None
    try:
        assert process.stdout.readline() == "ready\n", log.read_text()
        yield log.read_text()
    finally:
        process.stdin.close()
        process.stdout.close()
        assert process.wait(READY_S) == 0, log.read_text()


def test_server_listens_on_its_address_and_prints_commands_for_others(
    server_and_client_machine: tuple[SimulatedMachine, SimulatedMachine], running_server_log: str
) -> None:
    server, _ = server_and_client_machine
    status = server.genie("status").stdout.split()
    assert status[:2] == ["address", f"{server.address}:5555"]
    assert "other machines can connect with a token" in running_server_log
    assert f"genie join {HOST}:5555 --token-file join.token" in running_server_log
    assert f"genie login {HOST}:5555" in running_server_log


def test_client_on_another_machine_logs_in_and_runs_the_documented_sample(
    server_and_client_machine: tuple[SimulatedMachine, SimulatedMachine], running_server_log: str
) -> None:
    server, client = server_and_client_machine
    without = client.python(SAMPLE)
    assert without.returncode == 1
    last = without.stderr.strip().splitlines()[-1]
    assert last.endswith(
        f"no token for {HOST}:5555 (run 'genie token create' on {HOST}, then 'genie login {HOST}' here "
        "and paste the token)"
    )
    token = server.genie("token", "create", "--name", "alice").stdout
    done = client.genie("login", HOST, "--token-file", "-", text=token)
    assert done.stdout == f"logged in to {HOST}:5555 with a user token of tenant default\n", done.stderr
    done = client.python(SAMPLE)
    assert done.returncode == 0, done.stderr
    result, network = done.stdout.splitlines()
    assert result == "True (1000, 1000)"
    assert "Interface(name='eth0', speed_gbps=10.0) connected through eth0, 10 Gbit/s" in network
    nodes = client.genie("nodes")
    assert nodes.returncode == 0, nodes.stderr
    assert server.address in nodes.stdout
    job = client.genie("submit", "--wait", "--", "echo", "from afar")
    assert job.stdout == "from afar\n", job.stderr
    assert client.genie("logout").returncode == 0
    assert client.genie("nodes").returncode == 2


def test_machine_joins_with_the_printed_commands(
    server_and_client_machine: tuple[SimulatedMachine, SimulatedMachine], running_server_log: str
) -> None:
    server, client = server_and_client_machine
    (command,) = re.findall(r"genie (join \S+ --token-file) join\.token", running_server_log)
    token = server.genie("token", "create", "--join").stdout
    done = client.genie(*command.split(), "-", "--node-id", "second", "--detach", text=token)
    try:
        assert done.stdout == f"joined {HOST}:5555 as second\n", done.stderr
        assert "second" in server.genie("nodes").stdout
    finally:
        assert client.genie("down").returncode == 0


def test_join_token_cannot_log_in(
    server_and_client_machine: tuple[SimulatedMachine, SimulatedMachine], running_server_log: str
) -> None:
    server, client = server_and_client_machine
    token = server.genie("token", "create", "--join").stdout
    done = client.genie("login", HOST, "--token-file", "-", text=token)
    assert done.returncode == 1
    assert "a join token" in done.stderr and "without --join" in done.stderr
