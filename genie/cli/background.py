"""`--detach`: the same command once more, in a session of its own, with its output in a log.

Returns when that process says that it is ready. When it ends instead, what it printed is shown
and its exit code becomes ours. Not for: what it does (cluster_commands.py).
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

_READY_S = 45.0
_STEP_S = 0.05
_SHOWN_BYTES_MAX = 16 * 1024


def start(
    arguments: list[str], *, settings: Settings, invocation: Invocation, token: str | None = None
) -> None:
    """`token` goes through a pipe: arguments can be read by everyone on the machine."""
    from genie.cluster import local, processes
    from genie.cluster.children import bound_log
    from genie.runtime import files

    state_dir = settings.paths.state_dir
    log = processes.log_path(state_dir, local.KEEPER)
    for folder in (state_dir, log.parent):  # each by itself: a parent made on the way is not private
        files.make_private_directory(folder)
    bound_log(log)
    argv = [sys.executable, "-m", "genie", *_shared(invocation), *arguments]
    argv += [] if token is None else ["--token-file", "-"]
    with log.open("ab") as file:
        log.chmod(0o600)
        before = file.tell()
        process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
    assert process.stdin is not None
    with process.stdin as pipe:
        pipe.write((token or "").encode())
    _wait_ready(process, state_dir=state_dir, log=log, before=before)
    # It outlives this process on purpose; without this, Python would warn about it at the end.
    process.returncode = 0


def _wait_ready(process: subprocess.Popen[bytes], *, state_dir: Path, log: Path, before: int) -> None:
    from genie.cluster import local, processes

    deadline = time.monotonic() + _READY_S
    while True:
        record = processes.read_record(state_dir, local.KEEPER)
        if record is not None and record.pid == process.pid and record.ready:
            return
        code = process.poll()
        if code is not None:
            _show(log, before)
            raise typer.Exit(code if code > 0 else 1)
        if time.monotonic() >= deadline:
            process.terminate()
            process.wait()
            _show(log, before)
            raise DeadlineError(f"it was not ready within {_READY_S:g} s, and was stopped", hint=f"see {log}")
        time.sleep(_STEP_S)


def _shared(invocation: Invocation) -> list[str]:
    shared = ["--debug"] if invocation.debug else []
    if invocation.log_level is not None:
        shared.append(f"--log-level={invocation.log_level}")
    return shared


def _show(log: Path, before: int) -> None:
    """What that process printed, which is what this one would have."""
    with log.open("rb") as file:
        file.seek(before)
        for line in file.read(_SHOWN_BYTES_MAX).decode("utf-8", "replace").splitlines():
            output.say(output.one_line(line))
