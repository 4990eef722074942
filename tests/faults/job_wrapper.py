"""The program of each job of a fault run: records its start and end, and who else uses its accelerators.

    python -I -S job_wrapper.py EVENTS_DIRECTORY SECONDS EXIT_CODE

Appends one JSON object per event to EVENTS_DIRECTORY/events.jsonl. While it runs, it locks one file per
accelerator and one for its job; the kernel releases the locks when the process ends, however that happens. A
lock that another process holds is recorded as a conflict. It runs for SECONDS, or until the file `stop`
exists there if that is 0, and ends with EXIT_CODE. In a working directory it checks the file `input`.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import sys
import time

_POLL_S = 0.2
_TERMINATED_EXIT_CODE = 128 + signal.SIGTERM
_WRONG_INPUT_EXIT_CODE = 9


def record_event(directory: str, kind: str, **more: object) -> None:
    environ = os.environ
    event = {
        "kind": kind,
        "job_id": environ["GENIE_JOB_ID"],
        "node_id": environ["GENIE_JOB_NODE"],
        "gpu_ids": [int(text) for text in environ["GENIE_JOB_GPUS"].split(",") if text],
        "pid": os.getpid(),
        "boot_s": time.clock_gettime(time.CLOCK_BOOTTIME),
        **more,
    }
    line = json.dumps(event).encode() + b"\n"
    descriptor = os.open(f"{directory}/events.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(descriptor, line)  # one write: lines of several processes do not mix
    os.close(descriptor)


def lock_or_record_conflict(directory: str, resource: str) -> None:
    """The lock is held until this process ends."""
    descriptor = os.open(f"{directory}/{resource}.lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(descriptor, 200, 0).decode()
        record_event(directory, "conflict", resource=resource, holder=holder)
        return
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, os.environ["GENIE_JOB_ID"].encode(), 0)


def has_input(text: str) -> bool:
    """Whether the working directory has the file `input` with this text."""
    try:
        descriptor = os.open("input", os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        return os.read(descriptor, len(text) + 1).decode() == text
    finally:
        os.close(descriptor)


def main() -> int:
    directory, seconds, exit_code = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])

    def end_on_sigterm(_number: int, _frame: object) -> None:
        record_event(directory, "terminated")
        os._exit(_TERMINATED_EXIT_CODE)

    signal.signal(signal.SIGTERM, end_on_sigterm)
    record_event(directory, "start")
    lock_or_record_conflict(directory, f"job-{os.environ['GENIE_JOB_ID']}")
    for gpu in os.environ["GENIE_JOB_GPUS"].split(","):
        lock_or_record_conflict(directory, f"gpu-{os.environ['GENIE_JOB_NODE']}-{gpu}")
    if os.environ.get("FAULTS_INPUT") and not has_input(os.environ["FAULTS_INPUT"]):
        exit_code = _WRONG_INPUT_EXIT_CODE
    deadline_s = time.monotonic() + seconds
    while time.monotonic() < deadline_s or (not seconds and not os.access(f"{directory}/stop", os.F_OK)):
        time.sleep(_POLL_S)
    record_event(directory, "end", exit_code=exit_code)
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
