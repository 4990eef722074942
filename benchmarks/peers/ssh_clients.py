"""Runs one command on several nodes with paramiko or parallel-ssh, for bench_grid.py --peers.

    python ssh_clients.py paramiko|pssh SSH_CONFIG COMMAND NODE...

Runs in the environment of those libraries with minimal code: one thread per node for paramiko, the native
client for parallel-ssh. paramiko verifies host keys; the native client of parallel-ssh does not support that
for a pool of hosts.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor


def run_with_paramiko(config_file: str, command: str, names: Sequence[str]) -> None:
    import paramiko

    config = paramiko.SSHConfig.from_path(config_file)

    def run_on(name: str) -> int:
        found = config.lookup(name)
        client = paramiko.SSHClient()
        client.load_host_keys(found["userknownhostsfile"])
        client.connect(
            found["hostname"],
            port=int(found["port"]),
            username=found["user"],
            key_filename=found["identityfile"],
            allow_agent=False,
            look_for_keys=False,
        )
        with client:
            _, out, _ = client.exec_command(command)
            out.read()
            return int(out.channel.recv_exit_status())

    with ThreadPoolExecutor(len(names)) as pool:
        assert not any(pool.map(run_on, names))


def run_with_pssh(config_file: str, command: str, names: Sequence[str]) -> None:
    import paramiko
    from pssh.clients import ParallelSSHClient
    from pssh.config import HostConfig

    config = paramiko.SSHConfig.from_path(config_file)
    found = [config.lookup(name) for name in names]
    hosts = [
        HostConfig(user=each["user"], port=int(each["port"]), private_key=each["identityfile"][0])
        for each in found
    ]
    client = ParallelSSHClient([each["hostname"] for each in found], host_config=hosts, pool_size=len(names))
    outputs = client.run_command(command)
    client.join(outputs)
    for output in outputs:
        list(output.stdout)
        assert output.exit_code == 0


if __name__ == "__main__":
    {"paramiko": run_with_paramiko, "pssh": run_with_pssh}[sys.argv[1]](
        sys.argv[2], sys.argv[3], sys.argv[4:]
    )
