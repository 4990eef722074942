"""Processes of ours, remembered in files so that another process can find and end them, and no others.

A record holds the pid and when that process started; a pid that the system has given to someone else
since then does not match and is never signalled. Not for: starting processes (children.py).
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from genie.agent.processes import ProcessMark
from genie.errors import NodeError
from genie.runtime import files

RUN_FOLDER = "run"
LOG_FOLDER = "logs"
_STEP_S = 0.02
_KILLED_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessRecord:
    """One process that was started for this state directory."""

    name: str
    mark: ProcessMark
    ready: bool = False
    """For the process that keeps the others: whether all of them are up."""
    node_id: str = ""
    """For an agent: the node that it is."""

    @property
    def pid(self) -> int:
        return self.mark.pid

    @property
    def is_alive(self) -> bool:
        return self.mark.is_alive

    def write(self, state_dir: Path) -> None:
        body = {
            "pid": self.mark.pid,
            "start": self.mark.start,
            "ready": self.ready,
            "node_id": self.node_id,
        }
        files.write_private(_path(state_dir, self.name), json.dumps(body).encode())


def record_process(
    state_dir: Path, name: str, pid: int, *, ready: bool = False, node_id: str = ""
) -> ProcessRecord | None:
    """Writes it down; None when it is gone already."""
    mark = ProcessMark.of(pid)
    if mark is None:
        return None
    record = ProcessRecord(name=name, mark=mark, ready=ready, node_id=node_id)
    record.write(state_dir)
    return record


def read_record(state_dir: Path, name: str) -> ProcessRecord | None:
    """The process of that name if it is alive. A file that is stale or cannot be read counts as none."""
    try:
        body = json.loads(_path(state_dir, name).read_text("utf-8"))
        mark = ProcessMark(int(body["pid"]), str(body["start"]))
        record = ProcessRecord(
            name=name, mark=mark, ready=bool(body["ready"]), node_id=str(body.get("node_id", ""))
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return record if record.is_alive else None


def forget_record(state_dir: Path, name: str) -> None:
    _path(state_dir, name).unlink(missing_ok=True)


def log_path(state_dir: Path, name: str) -> Path:
    return state_dir / LOG_FOLDER / f"{name}.log"


def last_lines(path: Path, *, count: int = 8, bytes_max: int = 8192, since_bytes: int = 0) -> list[str]:
    """The end of a log, for an error message; nothing of what its first `since_bytes` hold."""
    try:
        with path.open("rb") as file:
            size_bytes = file.seek(0, os.SEEK_END)
            # A log that is shorter than it was has been emptied since.
            begin = since_bytes if since_bytes <= size_bytes else 0
            file.seek(max(size_bytes - bytes_max, begin))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return []
    return [line for line in text.splitlines() if line.strip()][-count:]


async def end_process(record: ProcessRecord, *, grace_s: float) -> None:
    """SIGTERM, and SIGKILL when it is still there after `grace_s`. Returns when it is gone."""
    if not record.mark.send_signal(signal.SIGTERM) or await _wait_gone(record, grace_s):
        return
    record.mark.send_signal(signal.SIGKILL)
    if not await _wait_gone(record, _KILLED_S):
        raise NodeError(
            f"process {record.pid} ({record.name}) does not end, not even when killed",
            hint="it hangs in the kernel; look at it with 'ps'",
        )


async def _wait_gone(record: ProcessRecord, timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while record.is_alive:
        if time.monotonic() >= deadline:
            return False
        await asyncio.sleep(_STEP_S)
    return True


def _path(state_dir: Path, name: str) -> Path:
    return state_dir / RUN_FOLDER / f"{name}.json"
