"""The durable state of an agent: incarnation, leader token, accepted jobs and their exit records.

One directory per node; files are replaced atomically. The directory of a job contains `job.json` (the
accepted launch), `exit.json` (the exit record, renamed to `settled.json` once the controller has stored it),
`log/`, `work/`, `tmp/`, and in `earlier/` the logs of earlier runs. The job can damage all of these; that
affects only its own record. Directories whose names start with a dot are to be removed.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec

from genie.agent import job_files
from genie.agent.job_files import RunDirectorySize
from genie.errors import AgentRunningError, FencedError, StoreCorruptError, StoreFullError
from genie.model.allocation import FULL_MILLI
from genie.model.fencing import describe_token
from genie.model.job import RUNS_KEPT, JobKind
from genie.model.limits import UNIX_TIME_S_MAX
from genie.model.messages import ExitReport
from genie.model.messages.numbers import Counter, Offset
from genie.model.names import validate_name
from genie.processes import files

_log = logging.getLogger(__name__)
_Struct = TypeVar("_Struct")

EXIT_REASON_CHARS_MAX = 600
PREPARED_LAUNCH_BYTES_MAX = 1 << 22
"""More than a launch with its environment can have."""
AGENT_LOCK_FILE = "agent.lock"
LEADER_TOKEN_FILE = "fence.json"
REGISTERED_FILE = "registered.json"
PREPARED_LAUNCHES_DIR = "prepared"
"""Has a file for each job that is prepared and whose start was not attempted yet. The files are not synced,
so this holds only until the machine is restarted."""
SHIM_SOCKETS_DIR = "shims"
"""Has a socket for each running job, at which the next agent of the node connects to its shim."""
_DISCARDED_NAME_PREFIX = "."
_EARLIER_RUNS_DIR = "earlier"


class JobRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An accepted launch, whether or not it has started. The shim of the job has a copy in its memory, which
    the job cannot damage; a later agent that adopts the job uses that one."""

    job_id: str
    epoch: int
    incarnation: int
    accepted_at: float
    gpu_ids: tuple[int, ...] | None = None
    """None if unknown: written by an older version."""
    tenant: str = ""
    gpu_milli: int = FULL_MILLI
    kind: JobKind = JobKind.COMMAND
    has_deadman_timer: bool = True
    boot_id: str = ""
    """The boot of the machine in which the launch was accepted; empty if unknown."""


class _ExitRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The job can write it: a number that does not fit into a heartbeat would make all of them fail."""

    job_id: str
    epoch: Counter
    exit_code: Annotated[int, msgspec.Meta(ge=-(1 << 31), le=(1 << 31) - 1)] | None
    reason: str
    ended_at: Annotated[float, msgspec.Meta(ge=0.0, le=UNIX_TIME_S_MAX)]
    started: bool = True
    is_caused_by_node: bool = msgspec.field(default=False, name="by_node")
    needed_disk_bytes: Offset = msgspec.field(default=0, name="needed_bytes")
    log_bytes_lost: int = 0


class _StoredLeaderToken(msgspec.Struct, frozen=True, kw_only=True):
    leader_token: int = 0


class Journal:
    """The files of one node. `open` locks the directory until `close` or the end of the process.

    Its methods block, except `accept_leader_token_and_check_new`. Those that change files must not run
    concurrently.
    """

    def __init__(self, node_dir: Path) -> None:
        self.node_dir = node_dir
        self.jobs_dir = node_dir / "jobs"
        self._lock: files.FileLock | None = None
        self._stored_leader_token = 0
        self.leader_token = 0
        """The highest leader token seen."""
        self.incarnation = 0
        self.has_discarded_directories = False
        """Whether a directory was moved aside since `discard_old_runs_and_list_discarded` was last called."""
        self._settled_but_not_renamed: set[str] = set()
        """Settled jobs whose `exit.json` could not be renamed."""
        self._discarded_count = 0

    def open(self) -> None:
        """Raises AgentRunningError if another agent holds the lock, StoreCorruptError for an invalid file."""
        files.make_private_directory(self.jobs_dir)
        self._lock = _lock_node_directory(self.node_dir / AGENT_LOCK_FILE)
        fence = (
            _read_record_if_exists(self.node_dir / LEADER_TOKEN_FILE, _StoredLeaderToken)
            or _StoredLeaderToken()
        )
        self.leader_token = self._stored_leader_token = fence.leader_token
        self.incarnation = _read_record_if_exists(self.node_dir / "incarnation", int) or 0

    def close(self) -> None:
        """Idempotent."""
        if self._lock is not None:
            self._lock.release()

    def begin_incarnation(self) -> int:
        """Increments the incarnation durably and returns it. Raises StoreFullError."""
        incarnation = self.incarnation + 1
        files.replace_or_overwrite_private_file(self.node_dir / "incarnation", str(incarnation).encode())
        self.incarnation = incarnation
        return incarnation

    def record_registration(self, controller: str, *, registered_at: float) -> None:
        """Writes the file by which the supervisor sees that this agent has registered."""
        body = {"incarnation": self.incarnation, "controller": controller, "at": registered_at}
        files.replace_or_overwrite_private_file(self.node_dir / REGISTERED_FILE, json.dumps(body).encode())

    def accept_leader_token_and_check_new(self, leader_token: int, *, message_name: str) -> bool:
        """Remembers the highest leader token, in memory. Raises FencedError for a lower one.

        Returns whether it is new; call `store_leader_token` then. A launch is accepted only after that. Until
        then the incarnation fences the orders of earlier leaders to a restarted agent.
        """
        if leader_token < self.leader_token:
            raise FencedError(
                f"{message_name} rejected: its leader token, {describe_token(leader_token)}, is older than "
                f"{describe_token(self.leader_token)}, which this node has seen",
                hint="another controller has replaced that one, or its store is an older copy; to return to "
                "an earlier state, use 'genie store restore', which raises the generation",
            )
        is_new = leader_token > self.leader_token
        self.leader_token = leader_token
        return is_new

    def store_leader_token(self) -> None:
        leader_token = self.leader_token
        if leader_token > self._stored_leader_token:
            body = msgspec.json.encode(_StoredLeaderToken(leader_token=leader_token))
            files.write_private(self.node_dir / LEADER_TOKEN_FILE, body)
            self._stored_leader_token = leader_token

    # --- jobs -------------------------------------------------------------------------------

    def job_dir(self, job_id: str) -> Path:
        """The directory of a job. Raises NameInvalidError for an ID that could be another path."""
        return self.jobs_dir / validate_name(job_id, what="job ID")

    def shim_socket_path(self, job_id: str, epoch: int) -> Path:
        return self.node_dir / SHIM_SOCKETS_DIR / f"{job_id}.{epoch}"

    def store_prepared_launch(self, record: JobRecord, plan: bytes) -> None:
        """Keeps what is needed to start a job until the launcher starts it. Raises StoreFullError."""
        path = self.prepared_launch_path(record.job_id, record.epoch)
        files.make_private_directory(path.parent)
        try:
            job_files.write_new_file(path, plan)
        except OSError as error:
            raise StoreFullError(
                f"cannot write {path}: {error.strerror}", hint="check free space and permissions"
            ) from error

    def discard_prepared_launch(self, job_id: str, epoch: int) -> None:
        """Call when the job has ended without a start. Raises OSError."""
        job_files.remove_any(self.prepared_launch_path(job_id, epoch))

    def take_prepared_launches(self, *, boot_id: str) -> list[tuple[JobRecord, bytes]]:
        """Launches of this boot that were prepared but neither started nor ended. Removes all others.

        Without a boot ID there are none: after a power failure, a deleted file may be back."""
        found, known_ids = [], self.list_job_ids()
        for path in sorted((self.node_dir / PREPARED_LAUNCHES_DIR).glob("*")):
            job_id, _, epoch = path.name.rpartition(".")
            record = self.read_job_record(job_id) if job_id in known_ids else None
            if (
                record is not None
                and boot_id
                and (str(record.epoch), record.boot_id) == (epoch, boot_id)
                and not self._has_exit_record(job_id)
            ):
                try:
                    body = job_files.read_small_file(path, bytes_max=PREPARED_LAUNCH_BYTES_MAX)
                except OSError as error:
                    _log.error("could not read the prepared launch of %s: %s", job_id, error)
                    body = b""  # reported as unreadable
                found.append((record, body))
            else:
                job_files.try_remove_any(path)
        return found

    def _has_exit_record(self, job_id: str) -> bool:
        names = ("exit.json", "settled.json")
        return any(job_files.path_exists(self.job_dir(job_id) / name) for name in names)

    def prepared_launch_path(self, job_id: str, epoch: int) -> Path:
        return self.node_dir / PREPARED_LAUNCHES_DIR / f"{job_id}.{epoch}"

    def read_job_record(self, job_id: str) -> JobRecord | None:
        try:
            return _read_record_if_exists(self.job_dir(job_id) / "job.json", JobRecord)
        except StoreCorruptError as error:
            _log.warning("ignoring the unreadable job record of %s: %s", job_id, error)
            return None

    def record_launch(self, record: JobRecord) -> Path:
        """Creates the directory of a job; moves that of an earlier run aside, except its logs.

        Raises FencedError for a launch that this node has seen before, StoreFullError or OSError.
        """
        self.store_leader_token()
        directory = self.job_dir(record.job_id)
        aside: Path | None = None
        before = self.read_job_record(record.job_id)
        if before is not None and record.epoch <= before.epoch:
            raise FencedError(
                f"the launch of {record.job_id} has epoch {record.epoch}; "
                f"this node has already seen {before.epoch}"
            )
        if job_files.path_exists(directory) and (aside := self._try_discard_directory(directory)) is None:
            raise StoreFullError(f"could not move the directory of an earlier run: {directory}")
        self._settled_but_not_renamed.discard(record.job_id)
        for path in (directory, *(directory / name for name in ("log", "work", "tmp"))):
            path.mkdir(mode=0o700)
        if aside is not None and before is not None:
            self._keep_earlier_logs(aside, directory, epoch=before.epoch)
        files.write_private(directory / "job.json", msgspec.json.encode(record))
        files.sync_directory(self.jobs_dir)
        return directory

    def run_dir(self, job_id: str, epoch: int) -> Path:
        """The directory with the log of the run with this epoch; epoch 0 is the last run."""
        directory = self.job_dir(job_id)
        record = self.read_job_record(job_id) if epoch else None
        return (
            directory
            if record is None or record.epoch == epoch
            else directory / _EARLIER_RUNS_DIR / str(epoch)
        )

    def _keep_earlier_logs(self, earlier_directory: Path, directory: Path, *, epoch: int) -> None:
        """Moves the logs of the newest runs to the new directory."""
        kept = directory / _EARLIER_RUNS_DIR
        try:
            if _is_real_directory(earlier_directory / _EARLIER_RUNS_DIR):
                (earlier_directory / _EARLIER_RUNS_DIR).rename(kept)
            if _is_real_directory(earlier_directory / "log") and any((earlier_directory / "log").iterdir()):
                files.make_private_directory(kept / str(epoch))
                (earlier_directory / "log").rename(kept / str(epoch) / "log")
            if _is_real_directory(kept):
                for old in sorted(kept.iterdir(), key=_epoch_sort_key)[:-RUNS_KEPT]:
                    self._try_discard_directory(old)
        except OSError as error:
            _log.warning("could not keep the logs of earlier runs of %s: %s", directory.name, error.strerror)

    def write_exit_record(self, report: ExitReport) -> None:
        """Writes the exit record where no shim has written it. Raises StoreFullError."""
        body = msgspec.json.encode(_ExitRecord(**msgspec.structs.asdict(report)))
        path = self.job_dir(report.job_id) / "exit.json"
        try:
            job_files.write_atomically(path, body)
        except OSError as error:
            raise StoreFullError(
                f"cannot write {path}: {error.strerror}", hint="check free space and permissions"
            ) from error

    def read_exit_report(self, job_id: str) -> ExitReport | None:
        try:
            found = _read_record_if_exists(self.job_dir(job_id) / "exit.json", _ExitRecord)
        except StoreCorruptError as error:
            _log.warning("ignoring the unreadable exit record of %s: %s", job_id, error)
            return None
        if found is not None and found.job_id != job_id:
            _log.warning("ignoring the exit record of %s, which belongs to another job", job_id)
            return None
        return _to_optional_exit_report(found)

    def unsettled_exits(self) -> dict[str, ExitReport]:
        """All exits that the controller has not confirmed yet, by job ID."""
        found = {
            job_id: self.read_exit_report(job_id)
            for job_id in self.list_job_ids()
            if job_id not in self._settled_but_not_renamed
        }
        return {job_id: report for job_id, report in found.items() if report is not None}

    def mark_exits_settled(self, job_ids: Iterable[str]) -> None:
        """Marks exits that the controller has stored. The directories stay until they are pruned."""
        moved = False
        for job_id in job_ids:
            directory = self.job_dir(job_id)
            try:
                (directory / "exit.json").replace(directory / "settled.json")
                moved = True
            except FileNotFoundError:
                pass
            except OSError as error:
                _log.warning("could not mark the exit of %s as settled: %s", job_id, error.strerror)
                if self._try_discard_directory(directory) is None:
                    self._settled_but_not_renamed.add(job_id)
        if moved:
            # One sync for all: reporting an exit twice after a crash is harmless.
            files.sync_directory(self.jobs_dir)

    def list_job_ids(self) -> list[str]:
        return sorted(
            path.name for path in self._job_directories() if job_files.path_exists(path / "job.json")
        )

    def discard_temporary_files(self, job_id: str) -> None:
        """Moves the temporary files of an ended job aside."""
        directory = self.job_dir(job_id) / "tmp"
        if job_files.path_exists(directory):
            self._try_discard_directory(directory)

    def discard_old_runs_and_list_discarded(
        self,
        *,
        kept_count: int,
        live_job_ids: Collection[str],
        sizes: Mapping[Path, RunDirectorySize] | None = None,
        bytes_max: int = 0,
        bytes_to_free: int = 0,
    ) -> list[Path]:
        """Moves the directories of settled jobs aside, except the newest `kept_count`. If the rest exceeds
        `bytes_max`, or the disk misses `bytes_to_free`, working directories follow, then logs, oldest first.

        `sizes` has what counts for that. Returns all directories that are to be removed.
        """
        done = self.finished_run_directories(live_job_ids)
        for directory in done[kept_count:]:
            self._try_discard_directory(directory)
        rest = [(path, size) for path in reversed(done[:kept_count]) if (size := (sizes or {}).get(path))]
        total_bytes = sum(size.work_dir_bytes + size.other_files_bytes for _, size in rest)
        excess_bytes = max(total_bytes - bytes_max, bytes_to_free)
        for path, size in rest:
            if excess_bytes > 0 and _is_real_directory(path / "work"):
                modified_s = _modified_time_s(path)
                self._try_discard_directory(path / "work")
                job_files.try_set_modified_time(path, modified_s)  # it does not become the newest
                excess_bytes -= size.work_dir_bytes
        for path, size in rest:
            if excess_bytes > 0:
                self._try_discard_directory(path)
                excess_bytes -= size.other_files_bytes
        self.has_discarded_directories = False
        return [path for path in self.jobs_dir.iterdir() if path.name.startswith(_DISCARDED_NAME_PREFIX)]

    def finished_run_directories(self, live_job_ids: Collection[str]) -> list[Path]:
        """Directories of jobs that have ended and are settled, newest first."""
        done = [
            directory
            for directory in self._job_directories()
            if directory.name not in live_job_ids
            and (
                directory.name in self._settled_but_not_renamed
                or not job_files.path_exists(directory / "exit.json")
            )
        ]
        return sorted(done, key=_modified_time_s, reverse=True)

    def _job_directories(self) -> list[Path]:
        return [path for path in self.jobs_dir.iterdir() if not path.name.startswith(_DISCARDED_NAME_PREFIX)]

    def _try_discard_directory(self, directory: Path) -> Path | None:
        """Renames the directory, to be removed later. Returns the new path, None on failure."""
        while True:
            self._discarded_count += 1
            name = f"{_DISCARDED_NAME_PREFIX}{directory.name}.{self.incarnation}.{self._discarded_count}"
            if not job_files.path_exists(self.jobs_dir / name):
                break
        try:
            os.rename(directory, self.jobs_dir / name)  # noqa: PTH104 - moves a link itself, not its target
        except OSError as error:
            _log.warning("could not rename %s for removal: %s", directory, error.strerror)
            return None
        self.has_discarded_directories = True
        return self.jobs_dir / name


def parse_exit_record(line: bytes, *, job_id: str, epoch: int) -> ExitReport:
    """Parses the exit record of a job. Raises msgspec.DecodeError, also if it is that of another one: a job
    can write anything into its directory."""
    record = msgspec.json.decode(line, type=_ExitRecord)
    if (record.job_id, record.epoch) != (job_id, epoch):
        raise msgspec.ValidationError(f"it is the exit record of {record.job_id!r:.80}, epoch {record.epoch}")
    return _to_exit_report(record)


def _to_optional_exit_report(record: _ExitRecord | None) -> ExitReport | None:
    return None if record is None else _to_exit_report(record)


def _to_exit_report(record: _ExitRecord) -> ExitReport:
    reason = record.reason[:EXIT_REASON_CHARS_MAX]
    if record.log_bytes_lost:
        reason += f"; {record.log_bytes_lost} bytes of its output were lost"
    return ExitReport(
        job_id=record.job_id,
        epoch=record.epoch,
        exit_code=record.exit_code,
        reason=reason,
        ended_at=record.ended_at,
        started=record.started,
        is_caused_by_node=record.is_caused_by_node,
        needed_disk_bytes=record.needed_disk_bytes,
    )


def _is_real_directory(path: Path) -> bool:
    """False for a link to a directory."""
    return path.is_dir() and not path.is_symlink()


def _epoch_sort_key(path: Path) -> tuple[bool, int, str]:
    """Sort key: directories of runs by epoch, after anything else."""
    return (path.name.isdecimal(), len(path.name), path.name)


def _modified_time_s(directory: Path) -> float:
    try:
        return directory.stat(follow_symlinks=False).st_mtime
    except OSError:
        return 0.0


def _lock_node_directory(path: Path) -> files.FileLock:
    lock = files.FileLock.try_acquire(path)
    if lock is None:
        raise AgentRunningError(
            f"another agent already uses {path.parent}",
            hint="stop it with 'genie down --keep-jobs', or pass another --node-id",
        )
    return lock


def _read_record_if_exists(path: Path, record_type: type[_Struct]) -> _Struct | None:
    try:
        return msgspec.json.decode(job_files.read_small_file(path), type=record_type)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise StoreCorruptError(
            f"could not read {path}: {error}",
            hint="restore the file, or remove the directory of the node and join again",
        ) from error
