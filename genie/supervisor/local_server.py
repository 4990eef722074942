"""What prevents the server of this machine from working, as its process records and logs show.

Commands use any server of the cluster, so without this they would show another server as if it were this one,
or say that there is no cluster. Does not connect to anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from genie.controller.etcd.local_member import LocalMember, has_member_record
from genie.errors import GenieError
from genie.processes import files
from genie.supervisor import process_records
from genie.supervisor.etcd_majority import format_join_again, is_removal_in_log
from genie.supervisor.process_records import AGENT, CONTROLLER, ETCD, SUPERVISOR, read_process_record

_CHILDREN = (CONTROLLER, AGENT, ETCD)
_REMOVAL_LOG_LINES = 300
_REMOVAL_LOG_BYTES = 1 << 17
"""etcd logs its removal, then its shutdown in dozens of lines."""


@dataclass(frozen=True, slots=True)
class LocalServerProblem:
    """`message` begins with "this server" or "this machine"; `hint` is what to do."""

    message: str
    hint: str


def find_local_server_problem(state_dir: Path) -> LocalServerProblem | None:
    """Returns why the server of this machine does not work; None if it does, or if this is no server."""
    supervisor = read_process_record(state_dir, SUPERVISOR)
    if supervisor is not None and supervisor.missing_servers:
        return LocalServerProblem(
            f"this server is {supervisor.missing_servers}",
            "it takes part as soon as enough servers run: start the others with 'genie up' there; "
            "'genie down --keep-jobs' stops this one",
        )
    records = [read_process_record(state_dir, name) for name in _CHILDREN]
    children = {record.name: record.pid for record in records if record is not None}
    if ETCD not in children and (removal := find_removal(state_dir)):
        return removal
    is_server = has_member_record(state_dir)
    if supervisor is not None or not (children or is_server) or _is_supervised_by_program(state_dir):
        return None
    if children:
        processes = ", ".join(f"{name}: process {pid}" for name, pid in children.items())
        return LocalServerProblem(
            f"this machine has processes without a supervisor, which nothing restarts ({processes})",
            "run 'genie down --keep-jobs', and start it again with the command that it prints",
        )
    return LocalServerProblem("this server is not running", "start it with 'genie up'")


def find_removal(state_dir: Path) -> LocalServerProblem | None:
    """Returns that this server was removed from its cluster, if the log of its etcd member ends with that."""
    try:
        member = LocalMember.read(state_dir)
    except GenieError:
        return None
    if member is None:
        return None
    lines = process_records.read_last_lines(
        process_records.log_path(state_dir, ETCD), count=_REMOVAL_LOG_LINES, bytes_max=_REMOVAL_LOG_BYTES
    )
    if not is_removal_in_log(lines):
        return None
    return LocalServerProblem(
        f"this server, {member.name}, was removed from the cluster with 'genie etcd remove'",
        f"to add this machine again, {format_join_again(state_dir)}",
    )


def _is_supervised_by_program(state_dir: Path) -> bool:
    """Whether a program that is not `genie up` or `genie join` supervises the processes."""
    path = state_dir / process_records.PROCESS_RECORDS_FOLDER / process_records.SUPERVISOR_LOCK_FILE
    return files.FileLock.is_held(path)
