"""Two processes compete for a lock; storage rejects the one that was paused for longer than its lease.

python examples/coordination/distributed_locks.py      with the cluster on this machine, or GENIE_MASTER_ADDR

The first process gets the lock and is paused. Its lease expires, the second process gets the lock and writes.
Then the first one continues and writes, which no lock can prevent. Storage rejects it: its token is lower.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import sys
import tempfile
from pathlib import Path
from subprocess import PIPE, Popen

import genie
from genie.errors import GenieError, LockLostError


class StaleTokenError(Exception):
    """A write with a lower fencing token than that of the last write."""


def write_fenced(path: Path, text: str, fencing_token: int) -> None:
    """What storage must do: compare the token of each write with the highest one so far, atomically."""
    with path.open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        last_token = json.loads(file.read() or "{}").get("token", 0)
        if fencing_token < last_token:
            raise StaleTokenError(f"token {fencing_token} is lower than {last_token}")
        file.truncate(0)
        file.write(json.dumps({"token": fencing_token, "text": text}))


def work(name: str, path: Path) -> None:
    try:
        with genie.session(), genie.lock("distributed-locks-example", ttl_s=2.0) as lock:
            print(f"{name}: has the lock", flush=True)
            sys.stdin.readline()  # the first process is paused here
            try:
                write_fenced(path, f"written by {name}", lock.fencing_token)
                print(f"{name}: wrote", flush=True)
            except StaleTokenError as error:
                print(f"{name}: the write was rejected: {error}", flush=True)
    except LockLostError as error:
        print(f"{name}: {error.message}", flush=True)


def start_process(name: str, path: Path) -> Popen[str]:
    process = Popen([sys.executable, __file__, name, str(path)], stdin=PIPE, stdout=PIPE, text=True)
    print(process.stdout.readline(), end="")  # it has the lock
    return process


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "shared.json"
        first = start_process("first", path)
        os.kill(first.pid, signal.SIGSTOP)
        second = start_process("second", path)  # gets the lock when the lease of the first one has expired
        print(second.communicate("\n")[0], end="")
        os.kill(first.pid, signal.SIGCONT)
        print(first.communicate("\n")[0], end="")
        print("storage:", json.loads(path.read_text())["text"])


if __name__ == "__main__":
    try:
        if sys.argv[1:]:
            work(sys.argv[1], Path(sys.argv[2]))
        else:
            main()
    except GenieError as error:
        sys.exit(f"distributed_locks: {error}")
