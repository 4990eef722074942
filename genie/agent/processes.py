"""Processes of jobs, told apart from strangers: by number and start time, by descent, by environment.

For ending what an earlier life of the agent or a dead shim left behind. A job's processes carry
GENIE_JOB_DIR in their environment; one that has shed it is still found below a process that is
known. Not for: the normal end of a job (shim.py does that from close by).
"""

from __future__ import annotations

import json
import logging
import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil

from genie.agent import jobfiles, shim

_log = logging.getLogger(__name__)

JOB_DIR_VARIABLE = "GENIE_JOB_DIR"
END_WITHIN_S = 10.0
_STEP_S = 0.02


@dataclass(frozen=True, slots=True)
class ProcessMark:
    """One process for good: a later one with the same number has another start."""

    pid: int
    start: str

    @classmethod
    def of(cls, pid: int) -> ProcessMark | None:
        start = shim.start_mark(pid)
        return cls(pid, start) if start else None

    @property
    def is_alive(self) -> bool:
        """A process that has ended but was not waited for counts as gone."""
        if not self.start or shim.start_mark(self.pid) != self.start:
            return False
        try:
            return psutil.Process(self.pid).status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            return False

    def send_signal(self, number: int) -> bool:
        return shim.send_signal(self.pid, self.start, number)


def read_started(path: Path) -> tuple[ProcessMark, ...]:
    """The shim and the command that a job's start record names; nothing when there is none."""
    try:
        body = json.loads(jobfiles.read(path))
        return tuple(ProcessMark(int(pid), str(start)) for pid, start in body.values())
    except FileNotFoundError:
        return ()
    except (OSError, ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        _log.warning("%s cannot be read: %s", path, error)
        return ()


def end_leftovers(
    directory: Path, started: Iterable[ProcessMark], *, within_s: float = END_WITHIN_S
) -> tuple[int, frozenset[int]]:
    """Kills every process of the jobs under `directory`. How many were found, and which would not die.

    Blocks; looks again until nothing is found, so that what is started meanwhile is caught, too.
    """
    known = {mark for mark in started if mark.pid != os.getpid() and mark.is_alive}
    seen: set[ProcessMark] = set()
    deadline = time.monotonic() + within_s
    while True:
        known |= _with_environment(directory)
        for mark in list(known):
            if mark.is_alive:
                known |= {ProcessMark(pid, start) for pid, start in shim.descendants(mark.pid).items()}
        alive = {mark for mark in known if mark.is_alive}
        seen |= alive
        # All stand still before the first one dies: none may see that, start another, or write down an end.
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for mark in alive:
                mark.send_signal(number)
        if not alive or time.monotonic() >= deadline:
            return len(seen), frozenset(mark.pid for mark in alive)
        time.sleep(_STEP_S)


def _with_environment(directory: Path) -> set[ProcessMark]:
    prefix = f"{directory}{os.sep}"
    found: set[ProcessMark] = set()
    for process in psutil.process_iter():
        try:
            job_dir = process.environ().get(JOB_DIR_VARIABLE, "")
        except (psutil.Error, OSError):
            continue  # gone, or somebody else's
        if process.pid == os.getpid() or not f"{job_dir}{os.sep}".startswith(prefix):
            continue
        mark = ProcessMark.of(process.pid)
        if mark is not None:
            found.add(mark)
    return found
