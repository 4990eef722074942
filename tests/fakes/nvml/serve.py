"""Answers one command a line with one line of JSON, until its input ends. Started by fake.py."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from genie.hardware import Inventory, probe


def main() -> None:
    with Inventory(cpu_accelerators=1) as inventory, job() as job_pid:
        for line in sys.stdin:
            command, *held = line.split()
            match command:
                case "read":
                    answer: object = inventory.read([int(gpu_id) for gpu_id in held])
                case "probe":
                    answer = probe()
                case "absent_reason":
                    answer = inventory.absent_reason
                case "job_pid":
                    answer = job_pid
                case _:
                    raise AssertionError(line)
            sys.stdout.write(msgspec.json.encode(answer).decode() + "\n")
            sys.stdout.flush()


@contextmanager
def job() -> Iterator[int]:
    """A process below a process below this one, as a job's is below its shim. Ends with its input."""
    shim = ["/bin/sh", "-c", "exec 3<&0; cat <&3 & echo $!; exec 3<&-; wait"]
    with subprocess.Popen(shim, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as started:
        assert started.stdin is not None
        assert started.stdout is not None
        yield int(started.stdout.readline())
        started.stdin.close()


if __name__ == "__main__":
    main()
