"""`python -m genie.processes.with_parent PARENT_PID COMMAND...`: run a program that ends with its parent.

The kernel sends SIGKILL when the parent process ends, also when that was killed. Linux; elsewhere the program
is run all the same.
"""

from __future__ import annotations

import os
import sys

from genie.processes import process_table


def main(arguments: list[str]) -> None:
    """Replace this process by the program."""
    parent_pid, *command = arguments
    process_table.end_with_parent()
    if os.getppid() == int(parent_pid):  # else it has ended before the call above
        os.execvp(command[0], command)  # noqa: S606 - no shell


if __name__ == "__main__":
    main(sys.argv[1:])
