"""Reads a command per line and replies with a line of JSON, until the end of input. Used by fake_nvml.py."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from genie.hardware import Inventory, probe_accelerators


def main() -> None:
    with Inventory(cpu_accelerators=1) as inventory, run_job_process() as job_pid:
        for line in sys.stdin:
            command, *held = line.split()
            match command:
                case "read":
                    reply: object = inventory.read([int(gpu_id) for gpu_id in held])
                case "probe":
                    reply = probe_accelerators()
                case "no_nvidia_gpu_reason":
                    reply = inventory.no_nvidia_gpu_reason
                case "job_pid":
                    reply = job_pid
                case _:
                    raise AssertionError(line)
            sys.stdout.write(msgspec.json.encode(reply).decode() + "\n")
            sys.stdout.flush()


@contextmanager
def run_job_process() -> Iterator[int]:
    """A process of a job below a shim below this process. Ends at the end of its input."""
    shim = ["/bin/sh", "-c", "exec 3<&0; cat <&3 & echo $!; exec 3<&-; wait"]
    with subprocess.Popen(shim, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        yield int(process.stdout.readline())
        process.stdin.close()


if __name__ == "__main__":
    main()
