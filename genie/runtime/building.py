"""Compiles a library ahead, so that nobody waits for it when it is needed.

A process of its own does that, with the lowest priority; whoever needs the library meanwhile waits for it
(native.py has the lock) or does without. Where it cannot be done the log says why. Not for: how it is
compiled.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Sequence

from genie.runtime.native import Library

_log = logging.getLogger(__name__)

_LOWEST = 19
_WORDS_MAX = 500


def command_for(library: Library) -> tuple[str, ...]:
    return (sys.executable, "-m", "genie.runtime.native", library)


async def build_ahead(command: Sequence[str], *, what: str, without: str) -> bool:
    """Returns when it is done or has failed, and which; cancelled, it ends the compilers as well. `without`
    says what follows when `what` cannot be had."""
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
    except OSError as error:
        _log.warning("%s cannot be compiled ahead: %s", what, error)
        return False
    try:
        with contextlib.suppress(OSError):  # it may have ended already
            os.setpriority(os.PRIO_PROCESS, process.pid, _LOWEST)
        _, said = await process.communicate()
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await asyncio.shield(process.wait())
    if process.returncode != 0:
        words = " ".join(said.decode("utf-8", "replace").split())[-_WORDS_MAX:]
        _log.warning("%s: %s", without, words or "no reason was given")
        return False
    _log.info("%s is ready", what)
    return True
