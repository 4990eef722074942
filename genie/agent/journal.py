"""What the agent must still know after a crash: its incarnation, the leader token, its jobs, their ends.

One directory per node; each file is replaced whole and durably. A job's directory holds
`job.json` (what was accepted), `exit.json` (how it ended, until the controller has it for good,
then `settled.json`), `log/`, `work/` and `tmp/`, and in `earlier/` the logs of its runs before. The job
can spoil all of these; that costs it its record and nobody else anything. Directories whose names start
with a dot wait to be removed. Not for: processes (processes.py, launcher.py).
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import TypeVar

import msgspec

from genie.agent import jobfiles
from genie.errors import AgentRunningError, FencedError, LaunchError, StoreCorruptError, StoreFullError
from genie.model.job import RUNS_KEPT
from genie.model.messages import ExitReport
from genie.model.names import checked_name
from genie.runtime import files

_log = logging.getLogger(__name__)
_Struct = TypeVar("_Struct")

REASON_CHARS_MAX = 600
FENCE_FILE = "fence.json"
REGISTERED_FILE = "registered.json"
_ASIDE = "."
_EARLIER = "earlier"


class JobRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A launch that was accepted, whether or not it ever started."""

    job_id: str
    epoch: int
    incarnation: int
    accepted_at: float


class _ExitRecord(msgspec.Struct, frozen=True, kw_only=True):
    job_id: str
    epoch: int
    exit_code: int | None
    reason: str
    ended_at: float
    started: bool = True
    by_node: bool = False
    log_bytes_lost: int = 0


class _Fence(msgspec.Struct, frozen=True, kw_only=True):
    leader_token: int = 0


class Journal:
    """The files of one node. `open` locks the directory; the lock ends with the process or with `close`."""

    def __init__(self, node_dir: Path) -> None:
        self.node_dir = node_dir
        self.jobs_dir = node_dir / "jobs"
        self._lock: files.FileLock | None = None
        self._fence = _Fence()
        self.incarnation = 0
        self.has_rubbish = False
        """Whether a directory was set aside since `prunable` was asked."""
        self._settled: set[str] = set()
        """Ends that are settled although their directories could not be told so."""
        self._aside_count = 0

    def open(self) -> None:
        """AgentRunningError when another agent has it; StoreCorruptError when a file is not ours."""
        files.make_private_directory(self.jobs_dir)
        self._lock = _locked(self.node_dir / "agent.lock")
        self._fence = _read(self.node_dir / FENCE_FILE, _Fence) or _Fence()
        self.incarnation = _read(self.node_dir / "incarnation", int) or 0

    def close(self) -> None:
        """Idempotent."""
        if self._lock is not None:
            self._lock.release()

    def begin_incarnation(self) -> int:
        """One more than ever before, on disk before it is returned."""
        self.incarnation += 1
        files.write_private(self.node_dir / "incarnation", str(self.incarnation).encode())
        return self.incarnation

    def note_registered(self, controller: str, *, at: float) -> None:
        """Lets whoever started this agent see that it has arrived."""
        body = {"incarnation": self.incarnation, "controller": controller, "at": at}
        files.write_private(self.node_dir / REGISTERED_FILE, json.dumps(body).encode())

    @property
    def leader_token(self) -> int:
        return self._fence.leader_token

    def obey(self, leader_token: int, *, what: str) -> None:
        """Remembers the highest token; FencedError for an order by a leader that has been replaced."""
        if leader_token < self._fence.leader_token:
            raise FencedError(
                f"{what} refused: it carries leader token {leader_token}, "
                f"and this node has heard from a leader with {self._fence.leader_token}"
            )
        if leader_token > self._fence.leader_token:
            fence = _Fence(leader_token=leader_token)
            files.write_private(self.node_dir / FENCE_FILE, msgspec.json.encode(fence))
            self._fence = fence

    # --- jobs -------------------------------------------------------------------------------

    def job_dir(self, job_id: str) -> Path:
        """Where a job's files are; NameInvalidError for an id that could lead elsewhere."""
        return self.jobs_dir / checked_name(job_id, what="job id")

    def record(self, job_id: str) -> JobRecord | None:
        try:
            return _read(self.job_dir(job_id) / "job.json", JobRecord)
        except StoreCorruptError as error:
            _log.warning("%s", error)
            return None

    def accept(self, record: JobRecord) -> Path:
        """A fresh directory for a job; what an earlier attempt left there is set aside, but for logs.
        LaunchError."""
        directory = self.job_dir(record.job_id)
        aside: Path | None = None
        before = self.record(record.job_id)
        if jobfiles.exists(directory) and (aside := self._set_aside(directory)) is None:
            raise LaunchError(f"what an earlier attempt left at {directory} cannot be moved")
        self._settled.discard(record.job_id)
        for name in ("log", "work", "tmp"):
            files.make_private_directory(directory / name)
        if aside is not None and before is not None:
            self._keep_logs(aside, directory, epoch=before.epoch)
        files.write_private(directory / "job.json", msgspec.json.encode(record))
        files.sync_directory(self.jobs_dir)
        return directory

    def run_dir(self, job_id: str, epoch: int) -> Path:
        """Where the log of that run is, or was; 0 for the last."""
        directory = self.job_dir(job_id)
        record = self.record(job_id) if epoch else None
        return directory if record is None or record.epoch == epoch else directory / _EARLIER / str(epoch)

    def _keep_logs(self, aside: Path, directory: Path, *, epoch: int) -> None:
        """Those of the newest runs go on to the next attempt."""
        kept = directory / _EARLIER
        try:
            if _is_directory(aside / _EARLIER):
                (aside / _EARLIER).rename(kept)
            if _is_directory(aside / "log") and any((aside / "log").iterdir()):
                files.make_private_directory(kept / str(epoch))
                (aside / "log").rename(kept / str(epoch) / "log")
            if _is_directory(kept):
                runs = sorted(
                    kept.iterdir(), key=lambda path: (path.name.isdecimal(), len(path.name), path.name)
                )
                for old in runs[:-RUNS_KEPT]:
                    self._set_aside(old)
        except OSError as error:
            _log.warning("logs of earlier runs of %s are not kept: %s", directory.name, error.strerror)

    def write_exit(self, report: ExitReport) -> None:
        """For jobs that never got as far as a shim, or whose shim could not write it. StoreFullError."""
        body = msgspec.json.encode(_ExitRecord(**msgspec.structs.asdict(report)))
        path = self.job_dir(report.job_id) / "exit.json"
        try:
            jobfiles.write(path, body)
        except OSError as error:
            raise StoreFullError(
                f"cannot write {path}: {error.strerror}", hint="check free space and permissions"
            ) from error

    def exit_report(self, job_id: str) -> ExitReport | None:
        try:
            found = _read(self.job_dir(job_id) / "exit.json", _ExitRecord)
        except StoreCorruptError as error:
            _log.warning("%s", error)
            return None
        if found is not None and found.job_id != job_id:
            _log.warning("the exit record of %s names another job", job_id)
            return None
        return _as_report(found)

    def pending_exits(self) -> dict[str, ExitReport]:
        """Every end that the controller has not confirmed yet."""
        found = {job_id: self.exit_report(job_id) for job_id in self.job_ids() if job_id not in self._settled}
        return {job_id: report for job_id, report in found.items() if report is not None}

    def settle(self, job_ids: Iterable[str]) -> None:
        """The controller has these ends for good. The directories stay until they are pruned."""
        moved = False
        for job_id in job_ids:
            directory = self.job_dir(job_id)
            try:
                (directory / "exit.json").replace(directory / "settled.json")
                moved = True
            except FileNotFoundError:
                pass
            except OSError as error:
                _log.warning("the end of %s cannot be marked as settled: %s", job_id, error.strerror)
                if self._set_aside(directory) is None:
                    self._settled.add(job_id)
        if moved:
            # Once for all: an end that is told again after a crash does no harm.
            files.sync_directory(self.jobs_dir)

    def job_ids(self) -> list[str]:
        return sorted(path.name for path in self._directories() if jobfiles.exists(path / "job.json"))

    def prunable(self, *, kept: int, live: Collection[str]) -> list[Path]:
        """Directories of finished and settled jobs beyond the newest `kept`, and what was set aside."""
        self.has_rubbish = False
        rubbish = [path for path in self.jobs_dir.iterdir() if path.name.startswith(_ASIDE)]
        done = [
            directory
            for directory in self._directories()
            if directory.name not in live
            and (directory.name in self._settled or not jobfiles.exists(directory / "exit.json"))
        ]
        done.sort(key=_age_mark, reverse=True)
        return done[kept:] + rubbish

    def _directories(self) -> list[Path]:
        return [path for path in self.jobs_dir.iterdir() if not path.name.startswith(_ASIDE)]

    def _set_aside(self, directory: Path) -> Path | None:
        """Out of the way at once; whoever asks for `prunable` removes it. Where it is; None if it stays."""
        while True:
            self._aside_count += 1
            name = f"{_ASIDE}{directory.name}.{self.incarnation}.{self._aside_count}"
            if not jobfiles.exists(self.jobs_dir / name):
                break
        try:
            os.rename(directory, self.jobs_dir / name)  # noqa: PTH104 - a link itself, not its target
        except OSError as error:
            _log.warning("%s cannot be set aside: %s", directory, error.strerror)
            return None
        self.has_rubbish = True
        return self.jobs_dir / name


def parse_exit(line: bytes) -> ExitReport:
    """The record as a shim says it; msgspec.DecodeError when it is not one."""
    return _as_report_of(msgspec.json.decode(line, type=_ExitRecord))


def _as_report(record: _ExitRecord | None) -> ExitReport | None:
    return None if record is None else _as_report_of(record)


def _as_report_of(record: _ExitRecord) -> ExitReport:
    reason = record.reason[:REASON_CHARS_MAX]
    if record.log_bytes_lost:
        reason += f"; {record.log_bytes_lost} bytes of its output could not be written"
    return ExitReport(
        job_id=record.job_id,
        epoch=record.epoch,
        exit_code=record.exit_code,
        reason=reason,
        ended_at=record.ended_at,
        started=record.started,
        by_node=record.by_node,
    )


def _is_directory(path: Path) -> bool:
    """And not a link to one."""
    return path.is_dir() and not path.is_symlink()


def _run_mark(path: Path) -> tuple[bool, int, str]:
    """Sorts runs by their epochs, behind what is none."""
    return (path.name.isdecimal(), len(path.name), path.name)


def _age_mark(directory: Path) -> float:
    try:
        return directory.stat(follow_symlinks=False).st_mtime
    except OSError:
        return 0.0


def _locked(path: Path) -> files.FileLock:
    lock = files.FileLock.try_take(path)
    if lock is None:
        raise AgentRunningError(
            f"another agent already runs on {path.parent}",
            hint="stop it ('genie down'), or give this one another --node-id",
        )
    return lock


def _read(path: Path, kind: type[_Struct]) -> _Struct | None:
    try:
        return msgspec.json.decode(jobfiles.read(path), type=kind)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise StoreCorruptError(
            f"{path} cannot be read: {error}",
            hint="restore it, or remove the node's directory and join again",
        ) from error
