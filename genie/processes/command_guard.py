"""Runs a command, and kills it with all of its descendants when the process that started this one ends.

Started as a file, `python -I -S command_guard.py PIPE CMD ...`: it imports only the standard library and
process_table.py. PIPE is the read end of a pipe. END_REQUEST in it ends the command and all descendants with
SIGTERM; when its other end is closed, also because the parent was killed, they are killed. As subreaper, this
process also finds descendants in other process groups and sessions.

It exits with the exit code of the command, 128 + N if signal N ended it, 127 if it cannot be run. What the
command leaves running when it ends by itself is not ended.
"""

from __future__ import annotations

import importlib
import os
import select
import signal
import subprocess
import sys

if __package__:
    from genie.processes import process_table
else:  # started as a file, isolated from Genie's own path
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))  # noqa: PTH100, PTH120
    process_table = importlib.import_module("process_table")

PROGRAM_CHARS_SHOWN = 100
COMMAND_NOT_FOUND_EXIT_CODE = 127
END_REQUEST = b"e"
_KILL_TIMEOUT_S = 10.0
_DESCENDANTS_CHECK_INTERVAL_MS = 50
_HANDLED_BY_COMMAND = (signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGHUP)


def run(pipe_fd: int, argv: list[str]) -> int:
    """Return the exit code of the command."""
    process_table.become_subreaper()
    signal_fd = _install_signal_handlers()
    try:
        command = subprocess.Popen(argv, preexec_fn=process_table.end_with_parent)  # noqa: PLW1509 - one thread
    except (OSError, ValueError) as error:
        reason = (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
        sys.stderr.write(f"genie: could not run {argv[0][:PROGRAM_CHARS_SHOWN]!r}: {reason}\n")
        return COMMAND_NOT_FOUND_EXIT_CODE
    poll = select.poll()
    poll.register(pipe_fd, select.POLLIN)
    poll.register(signal_fd, select.POLLIN)
    is_ending = False
    while True:
        _reap_children(command)
        if command.returncode is not None and not (
            is_ending and process_table.running_descendants(os.getpid())
        ):
            return command.returncode if command.returncode >= 0 else 128 - command.returncode
        for fd, _ in poll.poll(_DESCENDANTS_CHECK_INTERVAL_MS if is_ending else None):
            if fd == signal_fd:
                os.read(signal_fd, 512)
            elif os.read(pipe_fd, 512):
                is_ending = True
                _signal_descendants(signal.SIGTERM)
            else:
                _kill_all()


def _signal_descendants(number: int) -> None:
    if process_table.LINUX:
        process_table.signal_descendants(os.getpid(), number)
    else:
        os.killpg(0, number)  # this process handles the signal


def _kill_all() -> None:
    """Kill all descendants, and this process."""
    survivors = process_table.kill_descendants(os.getpid(), timeout_s=_KILL_TIMEOUT_S)
    if survivors:
        pids = ", ".join(map(str, survivors))
        sys.stderr.write(f"genie: could not kill processes of the command: {pids}\n")
        sys.stderr.flush()
    os.killpg(0, signal.SIGKILL)  # all that is possible where there is no /proc


def _reap_children(command: subprocess.Popen[bytes]) -> None:
    """Reap all children that have ended, with orphans; set the exit code of the command when it has."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        if pid == command.pid:
            command.returncode = os.waitstatus_to_exitcode(status)  # so that Popen does not wait for it


def _install_signal_handlers() -> int:
    """Make signals that end the command not end this process. Return a descriptor that is readable after
    each signal."""
    read_fd, write_fd = os.pipe()
    for fd in (read_fd, write_fd):
        os.set_blocking(fd, False)
    signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, _noop_signal_handler)
    for number in _HANDLED_BY_COMMAND:
        # Not ignored: the command would inherit that. What is ignored already, such as by nohup, stays so.
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _noop_signal_handler)
    return read_fd


def _noop_signal_handler(number: int, frame: object) -> None:
    """The wakeup descriptor reports the signal."""


if __name__ == "__main__":
    sys.exit(run(int(sys.argv[1]), sys.argv[2:]))
