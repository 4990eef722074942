"""Slurm as a peer: munged, slurmctld and a slurmd for each of 125 nodes, with 1,000 GPUs that are files.

    python benchmarks/peers/slurm_peer.py FOLDER        inside a room (peer_room.py)

Every node is a real slurmd with a name and a port of its own. Eight empty files stand in for its GPUs. A job
is an allocation of one GPU and one core, as salloc --no-shell asks for: no process is started for it.
Not for: measuring (slurm_client.cpp asks, bench_peers.py counts).
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

import peer_room

NODES = 125
GPUS_OF_NODE = 8
WORKERS = 8
"""Asked at once under load: more gave no higher rate."""
PROGRAMS = ("munged", "slurmctld", "slurmd", "sinfo", "g++")
HEADER = Path("/usr/include/slurm/slurm.h")
INSTALL = "apt-get install slurmctld slurmd slurm-client munge libslurm-dev g++"
START_S = 60.0
POLL_S = 0.2

# One core for each GPU: Slurm looks at each core of a node, so that nodes with more cost it more. MinJobAge:
# ended jobs are forgotten soon, or the controller would refuse new ones at MaxJobCount.
_CONF = """\
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
_GRES = "AutoDetect=off\nName=gpu File={folder}/gpu[0-{last_gpu}]\n"


def missing() -> str | None:
    """Why it cannot be measured and what to do about it; None when it can."""
    absent = [name for name in PROGRAMS if shutil.which(name) is None]
    if not HEADER.exists():
        absent.append("libslurm's headers")
    if not absent:
        # As root in a user namespace it would fail, too: it drops supplementary groups.
        return None if os.geteuid() == 0 else "its daemons need root; run this as root"
    return f"{', '.join(absent)} not found on PATH (with /usr/sbin in it?); on Debian: {INSTALL}"


def idle_gpus(sinfo: str) -> int:
    """Of `sinfo -h -o "%T %D %G"`: GPUs of nodes that are idle and in contact (no mark behind the state)."""
    total = 0
    for line in sinfo.splitlines():
        state, nodes, gres = line.split()
        if state == "idle" and gres.startswith("gpu:"):
            total += int(nodes) * int(gres.removeprefix("gpu:").split("(")[0])
    return total


def write_settings(folder: Path) -> None:
    for name in ("state", "spool"):
        (folder / name).mkdir()
    for gpu in range(GPUS_OF_NODE):
        (folder / f"gpu{gpu}").touch()
    host, last = socket.gethostname(), NODES - 1
    conf = _CONF.format(host=host, folder=folder, last=last, last_port=7000 + last, gpus=GPUS_OF_NODE)
    (folder / "slurm.conf").write_text(conf)
    (folder / "gres.conf").write_text(_GRES.format(folder=folder, last_gpu=GPUS_OF_NODE - 1))
    key = folder / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(secrets.token_bytes(1024))


@contextmanager
def started(commands: Iterable[Sequence[str]]) -> Iterator[None]:
    """Runs them side by side; what they say goes to standard error."""
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


def munged(folder: Path) -> list[str]:
    files = {"socket": "munge.socket", "key-file": "munge.key", "pid-file": "munge.pid"}
    files |= {"log-file": "munge.log", "seed-file": "munge.seed"}
    # --force: the folder is closed to other users, which munged dislikes.
    options = [f"--{option}={folder / name}" for option, name in files.items()]
    return ["munged", "--foreground", "--force", "--num-threads=4", *options]


def wait_until_idle() -> None:
    until_s = time.monotonic() + START_S
    said = ""
    while time.monotonic() < until_s:
        asked = ["sinfo", "-h", "-o", "%T %D %G"]
        done = subprocess.run(asked, check=False, capture_output=True, text=True, timeout=START_S)
        said = done.stdout or done.stderr
        if done.returncode == 0 and idle_gpus(said) == NODES * GPUS_OF_NODE:
            return
        time.sleep(POLL_S)
    raise SystemExit(f"the nodes are not idle after {START_S:.0f} s: {said}")


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
    peer_room.raise_loopback()
    write_settings(folder)
    client = build_client(folder)
    os.environ["SLURM_CONF"] = str(folder / "slurm.conf")

    def measure(kind: str, count: int, time_s: float) -> list[str]:
        asked = [str(client), kind, str(count), str(time_s)]
        return subprocess.run(asked, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()

    daemons = [["slurmctld", "-D", "-i"]]
    daemons += [["slurmd", "-D", "-N", f"node{number:03d}"] for number in range(NODES)]
    with started([munged(folder)]):
        while not (folder / "munge.socket").exists():
            time.sleep(POLL_S)
        with started(daemons):
            wait_until_idle()
            peer_room.answer_all(measure)
    return 0


if __name__ == "__main__":
    sys.exit(main())
