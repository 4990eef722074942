"""Runs a command while holding a lock: `genie lock run`.

The command has a process group of its own, which is ended when the lock is lost. If standard input is a
terminal, the group is in its foreground. Signals that end this process are passed on to the group.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from genie.cli import output
from genie.cluster.client import open_client
from genie.config import environment_for_command
from genie.model.lock import HOLDER_LEASE_SHARE
from genie.processes.tasks import unwrapped_task_group

if TYPE_CHECKING:
    from genie.cluster.locking.lock_lease import LockLease
    from genie.config import Settings

TOKEN_ENV_VARIABLE = "GENIE_LOCK_TOKEN"
_FORWARDED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_COMMAND_NOT_FOUND_EXIT_CODE = 127


class LockedCommand:
    """Used once."""

    def __init__(self, name: str, argv: Sequence[str], *, ttl_s: float, timeout_s: float | None) -> None:
        self._name = name
        self._argv = argv
        self._ttl_s = ttl_s
        self._timeout_s = timeout_s

    async def run_and_get_exit_code(self, settings: Settings) -> int:
        """Raises DeadlineError if the lock was not acquired in time, LockLostError if it was lost."""
        from genie.cluster.locking.lock_lease import make_timeout_error

        async with open_client(settings) as client:
            holder = f"{socket.gethostname()} (process {os.getpid()})"
            lease = client.make_lock_lease(self._name, ttl_s=self._ttl_s, holder=holder)
            if not await lease.acquire(timeout_s=0.0):
                if self._timeout_s == 0:
                    raise make_timeout_error(lease, self._timeout_s)
                waits_for = f": {lease.other_holder} holds it" if lease.other_holder else ""
                output.print_message(output.to_one_line(f"waiting for lock {self._name}{waits_for}"))
                lease = client.make_lock_lease(self._name, ttl_s=self._ttl_s, holder=holder)
                if not await lease.acquire(timeout_s=self._timeout_s):
                    assert self._timeout_s is not None
                    raise make_timeout_error(lease, self._timeout_s)
            return await self._run_while_held(lease)

    async def _run_while_held(self, lease: LockLease) -> int:
        async with unwrapped_task_group() as group:
            keeping = group.create_task(lease.keep_until_ended())
            try:
                exit_code = await self._run_command(lease, keeping, group)
            except OSError as error:
                output.print_message(f"genie: could not run {self._argv[0]}: {error.strerror}")
                exit_code = _COMMAND_NOT_FOUND_EXIT_CODE
            finally:
                keeping.cancel()
                await lease.release()
        return exit_code

    async def _run_command(
        self, lease: LockLease, keeping: asyncio.Task[None], group: asyncio.TaskGroup
    ) -> int:
        """Return the exit code of the command, which is ended when the lease ends."""
        process = await asyncio.create_subprocess_exec(
            *self._argv,
            env=environment_for_command({TOKEN_ENV_VARIABLE: str(lease.fencing_token)}),
            process_group=0,
        )
        with _foreground_process_group(process.pid), _forwarded_signals(process.pid):
            ending = group.create_task(process.wait())
            await asyncio.wait({ending, keeping}, return_when=asyncio.FIRST_COMPLETED)
            if not ending.done():
                await self._end_command(process.pid, ending)
            exit_code = await ending
        return exit_code if exit_code >= 0 else 128 - exit_code

    async def _end_command(self, process_group: int, ending: asyncio.Task[int]) -> None:
        """End the command before the leader may grant the lock to another client."""
        output.print_message(f"genie: ending the command: lock {self._name} was lost")
        _signal_process_group(process_group, signal.SIGTERM)
        await asyncio.wait({ending}, timeout=(1 - HOLDER_LEASE_SHARE) * self._ttl_s)
        _signal_process_group(process_group, signal.SIGKILL)


@contextlib.contextmanager
def _forwarded_signals(process_group: int) -> Iterator[None]:
    """Pass signals that would end this process on to the process group while the block runs."""
    loop = asyncio.get_running_loop()
    for number in _FORWARDED_SIGNALS:
        loop.add_signal_handler(number, _signal_process_group, process_group, number)
    try:
        yield
    finally:
        for number in _FORWARDED_SIGNALS:
            loop.remove_signal_handler(number)


@contextlib.contextmanager
def _foreground_process_group(process_group: int) -> Iterator[None]:
    """Put the process group into the foreground of the terminal, if there is one."""
    if not sys.stdin.isatty():
        yield
        return
    terminal = sys.stdin.fileno()
    # Otherwise this process is stopped when it takes the terminal back.
    before = signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    try:
        with contextlib.suppress(OSError):  # the command has ended, or this process is in the background
            os.tcsetpgrp(terminal, process_group)
        yield
    finally:
        with contextlib.suppress(OSError):
            os.tcsetpgrp(terminal, os.getpgrp())
        signal.signal(signal.SIGTTOU, before)


def _signal_process_group(process_group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process_group, number)
