"""Implements `--detach`: starts the same command in the background, with its output in a log file.

Returns when the background process is ready. If it exits first, prints its output and exits with the
same code.
"""

from __future__ import annotations

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
    timeout_s = _READY_TIMEOUT_S + extra_timeout_s
    _wait_until_ready(
        process, state_dir=state_dir, log=log, log_offset_bytes=log_offset_bytes, timeout_s=timeout_s
    )
    # The process outlives this one on purpose; suppress the ResourceWarning.
    process.returncode = 0


def _wait_until_ready(
    process: subprocess.Popen[bytes], *, state_dir: Path, log: Path, log_offset_bytes: int, timeout_s: float
) -> None:
    from genie.supervisor import local_cluster, process_records

    deadline = time.monotonic() + timeout_s
    while True:
        record = process_records.read_process_record(state_dir, local_cluster.SUPERVISOR)
        if record is not None and record.pid == process.pid and record.ready:
            return
        code = process.poll()
        if code is not None:
            _print_log_from_offset(log, log_offset_bytes)
            raise typer.Exit(code if code > 0 else 1)
        if time.monotonic() >= deadline:
            process.terminate()
            process.wait()
            _print_log_from_offset(log, log_offset_bytes)
            raise DeadlineError(
                f"the background process was not ready within {timeout_s:g} s and was stopped",
                hint=f"read the log: {log}",
            )
        time.sleep(_READY_POLL_INTERVAL_S)


def _shared_option_arguments(invocation: Invocation) -> list[str]:
    shared = ["--debug"] if invocation.debug else []
    if invocation.log_level is not None:
        shared.append(f"--log-level={invocation.log_level}")
    return shared


def _print_log_from_offset(log: Path, offset_bytes: int) -> None:
    """Print the log from `offset_bytes`: the output of the background process."""
    with log.open("rb") as file:
        file.seek(offset_bytes)
        for line in file.read(_LOG_BYTES_PRINTED_MAX).decode("utf-8", "replace").splitlines():
            output.print_message(output.to_one_line(line))
