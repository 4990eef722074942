"""Process records in the state directory, by which another process can find and end our processes.

A record contains process ID and start mark; a process that reused the ID does not match and is never
signalled.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from genie.errors import NodeError
from genie.processes import files
from genie.processes.process_identity import ProcessIdentity

PROCESS_RECORDS_FOLDER = "run"
LOG_FOLDER = "logs"
SUPERVISOR = "up"
"""Name of the record of a supervisor."""
CONTROLLER = "controller"
"""Name of the record of a controller."""
AGENT = "agent"
ETCD = "etcd"
SUPERVISOR_LOCK_FILE = "up.lock"
_EXIT_POLL_S = 0.02
_SIGKILL_WAIT_TIMEOUT_S = 5.0


def name_in_text(name: str) -> str:
    """How messages name the process of a record: etcd is a proper noun."""
    return name if name == "etcd" else f"the {name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessRecord:
    """One process of this state directory."""

    name: str
    identity: ProcessIdentity
    ready: bool = False
    """For the supervisor: whether all children have started."""
    node_id: str = ""
    """For an agent: its node ID."""
    missing_servers: str = ""
    """For the supervisor: what it waits for while there is no majority of the servers; empty otherwise."""

    @property
    def pid(self) -> int:
        return self.identity.pid

    @property
    def is_alive(self) -> bool:
        return self.identity.is_alive

    def write(self, state_dir: Path) -> None:
        body = {
            "pid": self.identity.pid,
            "start": self.identity.start_mark,
            "ready": self.ready,
            "node_id": self.node_id,
            "missing_servers": self.missing_servers,
        }
        files.write_private(_process_record_path(state_dir, self.name), json.dumps(body).encode())


def record_process(
    state_dir: Path,
    name: str,
    pid: int,
    *,
    ready: bool = False,
    node_id: str = "",
    missing_servers: str = "",
) -> ProcessRecord | None:
    """Writes the record of a process; None if it has already ended."""
    record = make_process_record(name, pid, ready=ready, node_id=node_id, missing_servers=missing_servers)
    if record is not None:
        record.write(state_dir)
    return record


def make_process_record(
    name: str, pid: int, *, ready: bool = False, node_id: str = "", missing_servers: str = ""
) -> ProcessRecord | None:
    """The record of a process, not written yet; None if it has already ended."""
    identity = ProcessIdentity.of_pid(pid)
    return (
        None
        if identity is None
        else ProcessRecord(
            name=name, identity=identity, ready=ready, node_id=node_id, missing_servers=missing_servers
        )
    )


def read_process_record(state_dir: Path, name: str) -> ProcessRecord | None:
    """Returns the record of this name if its process is running, else None."""
    try:
        body = json.loads(_process_record_path(state_dir, name).read_text("utf-8"))
        identity = ProcessIdentity(int(body["pid"]), str(body["start"]))
        record = ProcessRecord(
            name=name,
            identity=identity,
            ready=bool(body["ready"]),
            node_id=str(body.get("node_id", "")),
            missing_servers=str(body.get("missing_servers", "")),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return record if record.is_alive else None


def remove_process_record(state_dir: Path, name: str) -> None:
    _process_record_path(state_dir, name).unlink(missing_ok=True)


def supervisor_lock_path(state_dir: Path) -> Path:
    """The lock that the supervisor of this state directory holds, and a command that replaces its store."""
    return files.make_private_directory(state_dir / PROCESS_RECORDS_FOLDER) / SUPERVISOR_LOCK_FILE


def log_path(state_dir: Path, name: str) -> Path:
    return state_dir / LOG_FOLDER / f"{name}.log"


def read_last_lines(path: Path, *, count: int = 8, bytes_max: int = 8192, since_bytes: int = 0) -> list[str]:
    """The last lines of a log, for an error message; ignores its first `since_bytes`."""
    try:
        with path.open("rb") as file:
            size_bytes = file.seek(0, os.SEEK_END)
            # A shorter log has been truncated since.
            begin = since_bytes if since_bytes <= size_bytes else 0
            file.seek(max(size_bytes - bytes_max, begin))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return []
    return [line for line in text.splitlines() if line.strip()][-count:]


async def end_process(record: ProcessRecord, *, grace_s: float, number: int = signal.SIGTERM) -> None:
    """Sends SIGTERM or another signal, then SIGKILL after `grace_s`. Returns when the process has ended."""
    if not record.identity.send_signal(number) or await _wait_until_process_ended(record, grace_s):
        return
    record.identity.send_signal(signal.SIGKILL)
    if not await _wait_until_process_ended(record, _SIGKILL_WAIT_TIMEOUT_S):
        raise NodeError(
            f"could not kill process {record.pid} ({record.name})",
            hint="it hangs in the kernel; inspect it with 'ps'",
        )


async def _wait_until_process_ended(record: ProcessRecord, timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while record.is_alive:
        if time.monotonic() >= deadline:
            return False
        await asyncio.sleep(_EXIT_POLL_S)
    return True


def _process_record_path(state_dir: Path, name: str) -> Path:
    return state_dir / PROCESS_RECORDS_FOLDER / f"{name}.json"
