"""Slurm as a peer: munged, slurmctld and a slurmd for each of 125 nodes; 1,000 files represent GPUs.

    python benchmarks/peers/slurm_peer.py FOLDER        in a sandbox (peer_sandbox.py)

Every node is a real slurmd with its own name and port. Eight empty files represent its GPUs. A job is an
allocation of one GPU and one core, like salloc --no-shell: no process is running for it. slurm_client.cpp
sends the requests.
"""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import peer_sandbox

NODE_COUNT = 125
GPUS_PER_NODE = 8
WORKER_COUNT = 8
"""Concurrent requests under load: more did not increase the rate."""
PROGRAMS = ("munged", "slurmctld", "slurmd", "sinfo", "g++")
SLURM_HEADER = Path("/usr/include/slurm/slurm.h")
INSTALL_COMMAND = "apt-get install slurmctld slurmd slurm-client munge libslurm-dev g++"
START_TIMEOUT_S = 60.0
POLL_INTERVAL_S = 0.2

# One core per GPU: the cost of a decision grows with the cores of a node. MinJobAge: ended jobs are purged
# soon, otherwise the controller would reject new ones at MaxJobCount.
_SLURM_CONF = """\
ClusterName=peers
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort=6817
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/spool/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/spool/%n.log
SlurmctldDebug=error
SlurmdDebug=error
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
MinJobAge=2
MaxJobCount=200000
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
GresTypes=gpu
NodeName=node[000-{last:03d}] NodeHostname={host} NodeAddr=127.0.0.1 Port=[7000-{last_port}] \
Sockets=2 CoresPerSocket=4 ThreadsPerCore=1 RealMemory=100000 Gres=gpu:{gpus}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
_GRES_CONF = "AutoDetect=off\nName=gpu File={folder}/gpu[0-{last_gpu}]\n"


def unavailable_reason() -> str | None:
    """Why Slurm cannot be measured, with a hint; None if it can."""
    absent = [name for name in PROGRAMS if shutil.which(name) is None]
    if not SLURM_HEADER.exists():
        absent.append("libslurm's headers")
    if not absent:
        # Root of a user namespace is not sufficient: the daemons drop supplementary groups.
        return None if os.geteuid() == 0 else "the daemons require root; run the benchmark as root"
    return f"{', '.join(absent)} not found on PATH (with /usr/sbin in it?); on Debian: {INSTALL_COMMAND}"


def count_idle_gpus(sinfo: str) -> int:
    """GPUs of idle nodes in the output of `sinfo -h -o "%T %D %G"` (a state with a suffix is not counted)."""
    total = 0
    for line in sinfo.splitlines():
        state, nodes, gres = line.split()
        if state == "idle" and gres.startswith("gpu:"):
            total += int(nodes) * int(gres.removeprefix("gpu:").split("(")[0])
    return total


def write_settings(folder: Path) -> None:
    for name in ("state", "spool"):
        (folder / name).mkdir()
    for gpu in range(GPUS_PER_NODE):
        (folder / f"gpu{gpu}").touch()
    host, last = socket.gethostname(), NODE_COUNT - 1
    conf = _SLURM_CONF.format(host=host, folder=folder, last=last, last_port=7000 + last, gpus=GPUS_PER_NODE)
    (folder / "slurm.conf").write_text(conf)
    (folder / "gres.conf").write_text(_GRES_CONF.format(folder=folder, last_gpu=GPUS_PER_NODE - 1))
    key = folder / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(secrets.token_bytes(1024))


@contextmanager
def run_daemons(commands: Iterable[Sequence[str]]) -> Iterator[None]:
    """Runs the commands concurrently for the duration of the block; their output goes to standard error."""
    processes = [
        subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sys.stderr.fileno())
        for command in commands
    ]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()


def make_munged_command(folder: Path) -> list[str]:
    files = {"socket": "munge.socket", "key-file": "munge.key", "pid-file": "munge.pid"}
    files |= {"log-file": "munge.log", "seed-file": "munge.seed"}
    # --force: munged rejects a folder that other users cannot enter.
    options = [f"--{option}={folder / name}" for option, name in files.items()]
    return ["munged", "--foreground", "--force", "--num-threads=4", *options]


def wait_until_nodes_are_idle() -> None:
    until_s = time.monotonic() + START_TIMEOUT_S
    output = ""
    while time.monotonic() < until_s:
        command = ["sinfo", "-h", "-o", "%T %D %G"]
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=START_TIMEOUT_S)
        output = done.stdout or done.stderr
        if done.returncode == 0 and count_idle_gpus(output) == NODE_COUNT * GPUS_PER_NODE:
            return
        time.sleep(POLL_INTERVAL_S)
    raise SystemExit(f"the nodes are not idle after {START_TIMEOUT_S:.0f} s: {output}")


def build_client(folder: Path) -> Path:
    source, program = Path(__file__).with_name("slurm_client.cpp"), folder / "slurm_client"
    subprocess.run(
        ["g++", "-std=c++20", "-O2", "-pthread", str(source), "-o", str(program), "-lslurm"],
        check=True,
        stdout=sys.stderr.fileno(),
    )
    return program


def main() -> int:
    folder = Path(sys.argv[1])
    peer_sandbox.bring_up_loopback()
    write_settings(folder)
    client = build_client(folder)
    os.environ["SLURM_CONF"] = str(folder / "slurm.conf")

    def measure(kind: str, count: int, time_s: float) -> list[str]:
        command = [str(client), kind, str(count), str(time_s)]
        return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()

    daemons = [["slurmctld", "-D", "-i"]]
    daemons += [["slurmd", "-D", "-N", f"node{number:03d}"] for number in range(NODE_COUNT)]
    with run_daemons([make_munged_command(folder)]):
        while not (folder / "munge.socket").exists():
            time.sleep(POLL_INTERVAL_S)
        with run_daemons(daemons):
            wait_until_nodes_are_idle()
            peer_sandbox.serve_requests(measure)
    return 0


if __name__ == "__main__":
    sys.exit(main())
