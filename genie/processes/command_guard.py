"""Runs a command, and kills it with all of its descendants when the process that started this one ends.

Started as a file, `python -I -S command_guard.py PIPE CMD ...`: it imports only the standard library and
process_table.py. PIPE is the read end of a pipe; its other end is closed when the parent ends, also by
SIGKILL. As subreaper, this process also finds descendants in other process groups and sessions. It exits with
the exit code of the command, 128 + N if signal N ended it, 127 if it cannot be run. What the command leaves
running when it ends is not killed.
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

COMMAND_NOT_FOUND_EXIT_CODE = 127
_KILL_TIMEOUT_S = 10.0
_HANDLED_BY_COMMAND = (signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGHUP)


def run(pipe_fd: int, argv: list[str]) -> int:
    """Return the exit code of the command."""
    process_table.become_subreaper()
    signal_fd = _install_signal_handlers()
    try:
        command = subprocess.Popen(argv, preexec_fn=process_table.end_with_parent)  # noqa: PLW1509 - one thread
    except (OSError, ValueError) as error:
        reason = (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
        sys.stderr.write(f"genie: could not run {argv[0]}: {reason}\n")
        return COMMAND_NOT_FOUND_EXIT_CODE
    poll = select.poll()
    poll.register(pipe_fd, select.POLLIN)
    poll.register(signal_fd, select.POLLIN)
    while (exit_code := _reap_children_and_get_exit_code(command)) is None:
        for fd, _ in poll.poll():
            if fd == signal_fd:
                os.read(signal_fd, 512)
            else:
                process_table.kill_descendants(os.getpid(), timeout_s=_KILL_TIMEOUT_S)
                os.killpg(0, signal.SIGKILL)  # the only way where there is no /proc
    return exit_code


def _reap_children_and_get_exit_code(command: subprocess.Popen[bytes]) -> int | None:
    """Reap all children that have ended; return the exit code of the command, or None if it runs."""
    while True:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return None
        if pid == command.pid:
            code = os.waitstatus_to_exitcode(status)
            command.returncode = code  # reaped here, so that Popen does not wait for it
            return code if code >= 0 else 128 - code


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
