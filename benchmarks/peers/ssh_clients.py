"""One command on several nodes with paramiko or parallel-ssh, for bench_grid.py --peers.

    python ssh_clients.py paramiko|pssh SSH_CONFIG COMMAND NODE...

Runs in the environment that has those libraries, with as little around them as there can be: ten threads for
paramiko, the native client of parallel-ssh. Host keys are checked by paramiko, and not by parallel-ssh,
whose native client does not offer it for a pool of hosts. Not for: the grid.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor


def with_paramiko(config_file: str, command: str, names: Sequence[str]) -> None:
    import paramiko

    config = paramiko.SSHConfig.from_path(config_file)

    def one(name: str) -> int:
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
        assert not any(pool.map(one, names))


def with_pssh(config_file: str, command: str, names: Sequence[str]) -> None:
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
    answers = client.run_command(command)
    client.join(answers)
    for answer in answers:
        list(answer.stdout)
        assert answer.exit_code == 0


if __name__ == "__main__":
    {"paramiko": with_paramiko, "pssh": with_pssh}[sys.argv[1]](sys.argv[2], sys.argv[3], sys.argv[4:])
