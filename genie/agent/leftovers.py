"""Finds and kills all processes of a job, also those whose shim or agent died.

A job has a control group (processes/cgroups.py) where the agent may create one. Processes are also found by
start record, by GENIE_JOB_DIR in their environment, as descendants of those, and as orphans that the agent
has adopted. The normal end of a job is shim.py's.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from genie.agent import job_files
from genie.errors import StoreFullError
from genie.processes import cgroups, files, process_table
from genie.processes.process_identity import ProcessIdentity

_log = logging.getLogger(__name__)

JOB_DIR_VARIABLE = "GENIE_JOB_DIR"
CONTROL_GROUP_PREFIX = "genie-"
CONTROL_GROUPS_FILE = "cgroups"
LEFTOVERS_KILL_TIMEOUT_S = 2.0
SURVIVORS_SHOWN_MAX = 5
_KILL_RECHECK_INTERVAL_S_MIN = 0.02
_KILL_RECHECK_INTERVAL_S_MAX = 0.2

JobIdByProcess = dict[ProcessIdentity, str]
"""Processes that could not be killed, with the IDs of their jobs."""


@dataclass
class JobProcesses:
    """The processes of one job, or of all jobs under a directory."""

    directory: Path
    """Of the job, or of all jobs."""
    control_groups: Mapping[str, str] = field(default_factory=dict)
    """Control groups, with the IDs of their jobs."""
    recorded_processes: JobIdByProcess = field(default_factory=dict)
    """Processes that are known already, such as those of the start record, with the IDs of their jobs."""
    find_orphans: Callable[[], JobIdByProcess] = dict
    """Returns adopted processes that belong to these jobs."""
    excluded_job_ids: frozenset[str] = frozenset()
    """Jobs below `directory` that go on."""

    def has_process_in_group(self) -> bool:
        """Whether a control group has a process."""
        return any(cgroups.processes(path) for path in self.control_groups)

    def kill_all_processes(
        self, *, timeout_s: float = LEFTOVERS_KILL_TIMEOUT_S
    ) -> tuple[int, JobIdByProcess]:
        """Kills them. Returns their number and the survivors.

        Blocks. Repeats until none is found, to include processes that start meanwhile.
        """
        seen: set[ProcessIdentity] = set()
        deadline = time.monotonic() + timeout_s
        step_s = _KILL_RECHECK_INTERVAL_S_MIN
        while True:
            alive = self._find_processes()
            seen |= alive.keys()
            # Stop all before killing one: none may react by starting another process or writing an exit
            # record.
            for number in (signal.SIGSTOP, signal.SIGKILL):
                for mark in alive:
                    mark.send_signal(number)
            for path in self.control_groups:
                cgroups.kill(path)
            if not alive or time.monotonic() >= deadline:
                return len(seen), alive
            time.sleep(step_s)
            step_s = min(2 * step_s, _KILL_RECHECK_INTERVAL_S_MAX)

    def remove_control_groups(self) -> None:
        for path in self.control_groups:
            if not cgroups.remove(path):
                _log.info("could not remove the control group %s", path)

    def _find_processes(self) -> JobIdByProcess:
        found = dict(self.recorded_processes)
        for mark, job_id in _find_processes_by_job_dir_variable(self.directory).items():
            if job_id not in self.excluded_job_ids:
                found[mark] = job_id
        found |= self.find_orphans()
        for path, job_id in self.control_groups.items():
            found |= {ProcessIdentity(pid, start): job_id for pid, start in cgroups.processes(path).items()}
        # Never this process nor its children: a job can write anything into its start record.
        found = {mark: job_id for mark, job_id in found.items() if mark.pid != os.getpid() and mark.is_alive}
        for mark, job_id in list(found.items()):
            below = process_table.descendant_start_marks(mark.pid)
            if os.getpid() not in below:
                found |= {ProcessIdentity(pid, start): job_id for pid, start in below.items()}
        self.recorded_processes = {mark: job_id for mark, job_id in found.items() if mark.is_alive}
        return self.recorded_processes


def read_start_record(path: Path) -> tuple[ProcessIdentity, ...]:
    """Returns the processes of a start record (shim and command); empty if there is no valid record."""
    try:
        body = json.loads(job_files.read_small_file(path))
        return tuple(ProcessIdentity(int(pid), str(start)) for pid, start in body.values())
    except FileNotFoundError:
        return ()
    except (OSError, ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        _log.warning("could not read %s: %s", path, error)
        return ()


def parse_survivors(record: bytes) -> tuple[ProcessIdentity, ...]:
    """The processes that a shim could not kill, from its exit record; empty if it is invalid."""
    try:
        return tuple(ProcessIdentity(int(pid), str(start)) for pid, start in json.loads(record)["survivors"])
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return ()


def read_recorded_processes(job_dir: Path) -> tuple[ProcessIdentity, ...]:
    """All processes that the records in the directory of a job name."""
    survivors: tuple[ProcessIdentity, ...] = ()
    with contextlib.suppress(OSError):
        survivors = parse_survivors(job_files.read_small_file(job_dir / "exit.json"))
    return read_start_record(job_dir / "started.json") + survivors


def find_adopted_orphans() -> list[ProcessIdentity]:
    """Processes that this process, as a subreaper, has adopted. Reaps those that have ended.

    Children that it started itself are in its session, which no orphan of a job can enter, or in
    `children_in_own_sessions`.
    """
    session, found = os.getsid(0), []
    with process_table.children_in_own_sessions_lock:
        adopted = process_table.child_session_ids(os.getpid())
        own = set(process_table.children_in_own_sessions)
    for pid, child_session in adopted.items():
        mark = ProcessIdentity.of_pid(pid)
        if child_session == session or pid in own or mark is None:
            continue
        if mark.is_alive:
            found.append(mark)
        else:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
    return found


def read_recorded_control_groups(record_path: Path) -> set[str]:
    """Control groups that earlier agents of this node have used for jobs; empty if unknown."""
    try:
        lines = files.read_small_file(record_path).splitlines()
    except (OSError, UnicodeDecodeError):
        return set()
    return {line for line in lines if Path(line).name.startswith(CONTROL_GROUP_PREFIX)}


def record_control_groups(record_path: Path, groups: set[str]) -> None:
    """Records the control groups for the next agent of this node, which may be started in another one."""
    try:
        if groups != read_recorded_control_groups(record_path):
            files.write_private(record_path, "".join(f"{path}\n" for path in sorted(groups)).encode())
    except StoreFullError as error:
        _log.warning("could not record the control groups of jobs: %s", error)


def describe_survivors(survivors: Iterable[ProcessIdentity]) -> str:
    """For users: which processes could not be killed, and why."""
    pids = sorted(mark.pid for mark in survivors)
    shown = [
        str(pid) + (" (uninterruptible)" if _is_in_uninterruptible_sleep(pid) else "")
        for pid in pids[:SURVIVORS_SHOWN_MAX]
    ]
    more = f" and {len(pids) - SURVIVORS_SHOWN_MAX} more" if len(pids) > SURVIVORS_SHOWN_MAX else ""
    noun = "process" if len(pids) == 1 else "processes"
    return f"cannot kill {noun} {', '.join(shown)}{more}"


def _is_in_uninterruptible_sleep(pid: int) -> bool:
    return "D" in process_table.thread_states(pid)


def _find_processes_by_job_dir_variable(directory: Path) -> JobIdByProcess:
    prefix = f"{directory}{os.sep}"
    found: JobIdByProcess = {}
    for process in psutil.process_iter():
        try:
            job_dir = process.environ().get(JOB_DIR_VARIABLE, "")
        except (psutil.Error, OSError):
            continue  # ended, or another user's
        if process.pid == os.getpid() or not f"{job_dir}{os.sep}".startswith(prefix):
            continue
        mark = ProcessIdentity.of_pid(process.pid)
        if mark is not None:
            found[mark] = Path(job_dir).name
    return found
