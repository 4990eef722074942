"""Compiles a library in the background, so that it is ready at its first use.

A separate process does that, with the lowest priority. A process that needs the library meanwhile waits for
it (libraries.py holds the lock) or works without it. A failure is logged with its reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Sequence

from genie.native.libraries import LibraryName
from genie.processes import process_table

_log = logging.getLogger(__name__)

_LOWEST_PROCESS_PRIORITY = 19
_FAILURE_REASON_CHARACTERS_MAX = 500


def prebuild_command(library: LibraryName) -> tuple[str, ...]:
    return (sys.executable, "-m", "genie.native", library)


async def try_build_in_background(command: Sequence[str], *, what: str, consequence: str) -> bool:
    """Run the command and return whether it succeeded; cancellation kills the compilers as well.

    `consequence`: what a failure means for the user, for the log.
    """
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
    except OSError as error:
        _log.warning("could not start compiling %s: %s", what, error)
        return False
    process_table.children_in_own_sessions.add(process.pid)
    try:
        with contextlib.suppress(OSError):  # the process may have exited
            os.setpriority(os.PRIO_PROCESS, process.pid, _LOWEST_PROCESS_PRIORITY)
        _, stderr = await process.communicate()
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await asyncio.shield(process.wait())
        process_table.children_in_own_sessions.discard(process.pid)
    if process.returncode != 0:
        reason = " ".join(stderr.decode("utf-8", "replace").split())[-_FAILURE_REASON_CHARACTERS_MAX:]
        _log.warning("could not compile %s: %s; %s", what, reason or "no reason was given", consequence)
        return False
    _log.info("%s is compiled", what)
    return True
