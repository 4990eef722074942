"""Implements `--detach`: starts the same command in the background, with its output in a log file.

Returns when the background process is ready. If it exits first, prints its output and exits with the
same code. What it waits for, and its warnings, are printed meanwhile. If it waits for other servers, the
command ends with an error and the process goes on waiting. Ctrl-C ends both.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import typer

from genie.cli import output
from genie.errors import DeadlineError

if TYPE_CHECKING:
    from pathlib import Path

    from genie.cli.app import Invocation
    from genie.config import Settings

_READY_TIMEOUT_S = 45.0
_READY_POLL_INTERVAL_S = 0.05
_LOG_BYTES_PRINTED_MAX = 16 * 1024
OTHER_SERVERS_WAIT_S = 30.0
"""Servers are often started one after another by one command each."""
_WARNING_PREFIX = "warning: "


def start_in_background(
    arguments: list[str],
    *,
    settings: Settings,
    invocation: Invocation,
    token: str | None = None,
    extra_timeout_s: float = 0.0,
) -> None:
    """Start the command and wait until it is ready.

    `token` is sent through a pipe: other users can read command lines. `extra_timeout_s` is added to the
    default timeout.
    """
    from genie.processes import files
    from genie.supervisor import local_cluster, process_records
    from genie.supervisor.child import rotate_log_if_large

    state_dir = settings.paths.state_dir
    log = process_records.log_path(state_dir, local_cluster.SUPERVISOR)
    for folder in (state_dir, log.parent):  # one at a time: mkdir -p would not make the parent private
        files.make_private_directory(folder)
    rotate_log_if_large(log)
    argv = [sys.executable, "-m", "genie", *_shared_option_arguments(invocation), *arguments]
    argv += [] if token is None else ["--token-file", "-"]
    with log.open("ab") as file:
        log.chmod(0o600)
        log_offset_bytes = file.tell()
        process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
    assert process.stdin is not None
    with process.stdin as pipe:
        pipe.write((token or "").encode())
    try:
        _wait_until_ready(
            process,
            state_dir=state_dir,
            log=_LogFollower(log, log_offset_bytes),
            timeout_s=_READY_TIMEOUT_S + extra_timeout_s,
        )
    except KeyboardInterrupt:
        output.print_message("stopping")
        _end_process(process)
        raise
    finally:
        # The process outlives this one on purpose; suppress the ResourceWarning.
        process.returncode = 0


def _wait_until_ready(
    process: subprocess.Popen[bytes], *, state_dir: Path, log: _LogFollower, timeout_s: float
) -> None:
    from genie.supervisor import local_cluster, process_records

    began_s = time.monotonic()
    while True:
        log.print_new_lines()
        record = process_records.read_process_record(state_dir, local_cluster.SUPERVISOR)
        if record is not None and record.pid != process.pid:
            record = None  # of a supervisor that was running before
        if record is not None and record.ready:
            return
        code = process.poll()
        if code is not None:
            log.print_rest()
            raise typer.Exit(code if code > 0 else 1)
        waited_s = time.monotonic() - began_s
        if record is not None and record.missing_servers and waited_s >= OTHER_SERVERS_WAIT_S:
            raise DeadlineError(
                f"this server is {output.to_one_line(record.missing_servers)}",
                hint="it goes on waiting in the background: start the other servers with 'genie up' there; "
                f"'genie etcd status' and the log {log.path} show when it is ready, 'genie down "
                "--keep-jobs' stops it",
            )
        if waited_s >= timeout_s:
            _end_process(process)
            log.print_rest()
            raise DeadlineError(
                f"the background process was not ready within {timeout_s:g} s and was stopped",
                hint=f"read the log: {log.path}",
            )
        time.sleep(_READY_POLL_INTERVAL_S)


def _end_process(process: subprocess.Popen[bytes]) -> None:
    """End the supervisor, which stops all that it has started, but ends no job. A further Ctrl-C does not
    interrupt this."""
    from genie.agent import KEEP_JOBS_SIGNAL

    process.send_signal(KEEP_JOBS_SIGNAL)
    while process.poll() is None:
        with contextlib.suppress(KeyboardInterrupt):
            process.wait()


class _LogFollower:
    """The log of the background process since its start."""

    def __init__(self, path: Path, offset_bytes: int) -> None:
        self.path = path
        self._offset_bytes = offset_bytes
        self._read_until_bytes = offset_bytes
        self._waiting_line = ""
        """What the process waits for; empty while it waits for nothing."""
        self._printed_warnings: set[str] = set()
        self._print_progress = output.ProgressPrinter()

    def print_new_lines(self) -> None:
        """Print warnings, and what the process waits for."""
        with self.path.open("rb") as file:
            file.seek(self._read_until_bytes)
            complete = file.read(_LOG_BYTES_PRINTED_MAX).rpartition(b"\n")[0]
        self._read_until_bytes += len(complete) + 1 if complete else 0
        for line in complete.decode("utf-8", "replace").splitlines():
            self._waiting_line = output.to_one_line(line) if line.startswith("waiting for ") else ""
            if line.startswith(_WARNING_PREFIX):
                self._printed_warnings.add(line)
                self._print_progress(output.to_one_line(line))
        if self._waiting_line:
            self._print_progress(self._waiting_line)

    def print_rest(self) -> None:
        """Print the output of the process from its start, without the warnings that were printed."""
        with self.path.open("rb") as file:
            file.seek(self._offset_bytes)
            for line in file.read(_LOG_BYTES_PRINTED_MAX).decode("utf-8", "replace").splitlines():
                if line not in self._printed_warnings:
                    output.print_message(output.to_one_line(line))


def _shared_option_arguments(invocation: Invocation) -> list[str]:
    shared = ["--debug"] if invocation.debug else []
    if invocation.log_level is not None:
        shared.append(f"--log-level={invocation.log_level}")
    return shared
