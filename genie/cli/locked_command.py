"""Runs a command while holding a lock: `genie lock run`.

The command is started by processes/command_guard.py, which ends it and all of its descendants, also those in
other groups and sessions, when the lock is lost, and kills them when this process is killed. Both have a
process group of their own; if standard input is a terminal, the group is in its foreground. Signals that end
this process are passed on to the group.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from typing import IO, TYPE_CHECKING

from genie.cli import output
from genie.cluster.client import CONNECT_TIMEOUT_S, open_client
from genie.config import environment_for_command
from genie.errors import LockTimeoutError
from genie.model.lock import HOLDER_LEASE_SHARE
from genie.processes import command_guard
from genie.processes.tasks import unwrapped_task_group

if TYPE_CHECKING:
    from genie.cluster.locking.lock_lease import LockLease
    from genie.config import Settings

TOKEN_ENV_VARIABLE = "GENIE_LOCK_TOKEN"
_FORWARDED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class LockedCommand:
    """Used once."""

    def __init__(self, name: str, argv: Sequence[str], *, ttl_s: float, timeout_s: float | None) -> None:
        self._name = name
        self._argv = argv
        self._ttl_s = ttl_s
        self._timeout_s = timeout_s

    async def run_and_get_exit_code(self, settings: Settings) -> int:
        """Raises LockTimeoutError if the lock was not acquired in time, LockLostError if it was lost."""
        async with AsyncExitStack() as stack:
            return await self._run_while_held(await self._acquire(settings, stack))

    async def _acquire(self, settings: Settings, stack: AsyncExitStack) -> LockLease:
        """Connect to the cluster and acquire the lock. The timeout limits both; a reply that is due may take
        LOCK_REPLY_ALLOWANCE_S more."""
        from genie.cluster.locking.lock_lease import LOCK_REPLY_ALLOWANCE_S, make_timeout_error

        timeout_s, loop = self._timeout_s, asyncio.get_running_loop()
        deadline_s = None if timeout_s is None else loop.time() + timeout_s
        limit_s = None if timeout_s is None else timeout_s + LOCK_REPLY_ALLOWANCE_S
        lease: LockLease | None = None
        try:
            async with asyncio.timeout(limit_s):
                client = await stack.enter_async_context(
                    open_client(settings, timeout_s=min(CONNECT_TIMEOUT_S, limit_s or CONNECT_TIMEOUT_S))
                )
                holder = f"{socket.gethostname()} (process {os.getpid()})"
                lease = client.make_lock_lease(self._name, ttl_s=self._ttl_s, holder=holder)
                left_s = None if deadline_s is None else max(deadline_s - loop.time(), 0.0)
                print_waiting = functools.partial(self._print_waiting, lease)
                if await lease.acquire(timeout_s=left_s, on_waiting=print_waiting):
                    return lease
        except TimeoutError:
            assert timeout_s is not None
            if lease is None or not lease.has_reply:
                raise LockTimeoutError(
                    f"could not acquire lock {self._name!r} within {timeout_s:g} s: "
                    "the cluster did not reply in this time",
                    hint="'genie status' shows the state of the servers",
                ) from None
        assert lease is not None
        assert timeout_s is not None, "an acquisition without a timeout ends with a grant or an error"
        raise make_timeout_error(lease, timeout_s)

    def _print_waiting(self, lease: LockLease) -> None:
        waits_for = f": {lease.other_holder} holds it" if lease.other_holder else ""
        output.print_message(output.to_one_line(f"waiting for lock {self._name}{waits_for}"))

    async def _run_while_held(self, lease: LockLease) -> int:
        async with unwrapped_task_group() as group:
            keeping = group.create_task(lease.keep_until_ended())
            try:
                exit_code = await self._run_command(lease, keeping, group)
            finally:
                keeping.cancel()
                await lease.release()
        return exit_code

    async def _run_command(
        self, lease: LockLease, keeping: asyncio.Task[None], group: asyncio.TaskGroup
    ) -> int:
        """Return the exit code of the command, which is ended when the lease ends."""
        read_fd, write_fd = os.pipe()
        with os.fdopen(write_fd, "wb", buffering=0) as pipe:
            try:
                guard = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-I", "-S", command_guard.__file__, str(read_fd), *self._argv),
                    env=environment_for_command({TOKEN_ENV_VARIABLE: str(lease.fencing_token)}),
                    process_group=0,
                    pass_fds=(read_fd,),
                )
            finally:
                os.close(read_fd)
            with _foreground_process_group(guard.pid), _forwarded_signals(guard.pid):
                ending = group.create_task(guard.wait())
                await asyncio.wait({ending, keeping}, return_when=asyncio.FIRST_COMPLETED)
                if not ending.done():
                    output.print_message(f"genie: ending the command: lock {self._name} was lost")
                    await self._end_command(guard.pid, pipe, ending)
                exit_code = await ending
                if exit_code < 0:  # the guard was killed
                    _signal_process_group(guard.pid, signal.SIGKILL)
        return exit_code if exit_code >= 0 else 128 - exit_code

    async def _end_command(self, process_group: int, pipe: IO[bytes], ending: asyncio.Task[int]) -> None:
        """End the command before the leader may grant the lock to another client."""
        with contextlib.suppress(BrokenPipeError):  # it has just ended
            pipe.write(command_guard.END_REQUEST)
        _signal_process_group(process_group, signal.SIGCONT)  # it may be stopped with Ctrl-Z
        await asyncio.wait({ending}, timeout=(1 - HOLDER_LEASE_SHARE) * self._ttl_s)
        pipe.close()


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
