"""Compiles the executors' library ahead, so that the first client of a node does not wait for it.

A process of its own does that, with the lowest priority; executors that come meanwhile wait for it
(runtime/native.py has the lock). Where it cannot be done the log says why, and the agent goes on:
jobs need no library. Not for: how it is compiled.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Sequence

_log = logging.getLogger(__name__)

COMMAND = (sys.executable, "-m", "genie.runtime.native", "genie_executor")
_LOWEST = 19
_WORDS_MAX = 500


async def build_ahead(command: Sequence[str] = COMMAND) -> None:
    """Returns when it is done or has failed; cancelled, it ends the compilers as well."""
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
    except OSError as error:
        _log.warning("the executors' library cannot be compiled ahead: %s", error)
        return
    try:
        with contextlib.suppress(OSError):  # it may have ended already
            os.setpriority(os.PRIO_PROCESS, process.pid, _LOWEST)
        _, said = await process.communicate()
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await asyncio.shield(process.wait())
    if process.returncode == 0:
        _log.info("the executors' library is ready")
    else:
        words = " ".join(said.decode("utf-8", "replace").split())[-_WORDS_MAX:]
        _log.warning("remote_accelerator will not work on this node: %s", words or "no reason was given")
