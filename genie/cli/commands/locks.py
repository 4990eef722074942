"""Commands for locks: lock list, run and release.

Running a command under a lock is in genie/cli/locked_command.py, the meaning of locks in docs/LOCKS.md.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Annotated

import typer

from genie.cli import output
from genie.cli.app import Invocation, JsonOption, app, command
from genie.cli.quantities import format_duration, parse_duration
from genie.errors import UsageError
from genie.model.limits import check_command

if TYPE_CHECKING:
    from genie.config import Settings
    from genie.model.messages.locks import LockBroken, LocksReply, LockView

_LOCK_COLUMNS = ("name", "tenant", "holder", "token", "age", "expires", "waiting")
_LOCK_COLUMNS_DROPPED_IF_NARROW = ("age", "waiting")

locks_app = typer.Typer(
    name="lock",
    help="List and release locks, and run commands under a lock.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)
app.add_typer(locks_app)

_NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="Name of the lock.")]


@command(locks_app, "list", example="genie lock list --json")
def list_locks(invocation: Invocation, *, as_json: JsonOption = False) -> None:
    """List held locks: holder, fencing token, age, time until the lease expires, and waiting clients."""
    reply, is_owner = asyncio.run(_fetch_locks_and_is_owner(invocation.load_settings()))
    if as_json:
        output.write_json(output.struct_to_json(reply))
        return
    if not reply.locks:
        output.print_message("no locks are held")
        return
    now = time.time()
    rows = [_lock_row(view, now=now) for view in reply.locks]
    output.write_table(
        _LOCK_COLUMNS,
        rows,
        droppable=_LOCK_COLUMNS_DROPPED_IF_NARROW,
        omitted=() if is_owner else ("tenant",),
    )
    if reply.more:
        output.print_message("the list is truncated")


@command(
    locks_app,
    "run",
    example="genie lock run checkpoint --timeout 1m -- ./save.sh",
)
def run_locked_command(
    invocation: Invocation,
    *,
    name: _NameArgument,
    argv: Annotated[
        list[str] | None, typer.Argument(metavar="-- CMD", help="Command to run, with its arguments.")
    ] = None,
    ttl: Annotated[
        str, typer.Option(metavar="DURATION", help="Lease of the lock without renewals, 1s to 1h.")
    ] = "15s",
    timeout: Annotated[
        str | None,
        typer.Option(metavar="DURATION", help="Maximum time to wait, 0: do not wait (default: no limit)."),
    ] = None,
) -> None:
    """Run a command while holding a lock, and exit with its exit code.

    The command gets the fencing token as GENIE_LOCK_TOKEN. It is ended if the lock is lost. If the lock is
    not acquired within --timeout, the exit code is 124, or 75 with --timeout 0.
    """
    from genie.cli.locked_command import LockedCommand
    from genie.model.lock import LOCK_TTL_S_MAX, LOCK_TTL_S_MIN, validate_lock_name

    if not argv:
        raise UsageError("no command given", hint="put it after --, as in: genie lock run NAME -- ./save.sh")
    check_command(argv)
    locked_command = LockedCommand(
        validate_lock_name(name),
        argv,
        ttl_s=parse_duration(ttl, what="--ttl", low_s=LOCK_TTL_S_MIN, high_s=LOCK_TTL_S_MAX),
        timeout_s=None if timeout is None else parse_duration(timeout, what="--timeout", zero_allowed=True),
    )
    settings = invocation.load_settings()
    raise typer.Exit(asyncio.run(locked_command.run_and_get_exit_code(settings)))


@command(locks_app, "release", example="genie lock release checkpoint --force")
def release_lock(
    invocation: Invocation,
    *,
    name: _NameArgument,
    force: Annotated[
        bool, typer.Option("--force", help="Required: confirm that the holder loses the lock.")
    ] = False,
    tenant: Annotated[
        str | None, typer.Option(metavar="TENANT", help="Tenant of the lock (default: the tenant 'default').")
    ] = None,
) -> None:
    """Release a lock that another client holds. Only the owner can do this.

    The holder is informed when it renews its lease, and may use the lock until then.
    """
    from genie.model.lock import validate_lock_name
    from genie.model.names import validate_name
    from genie.model.tenant import DEFAULT_TENANT

    validate_lock_name(name)
    if tenant is not None:
        validate_name(tenant, what="--tenant")
    if not force:
        raise UsageError(
            f"lock {name!r} is not released without --force: its holder may still use it",
            hint=f"end the holder, which 'genie lock list' shows; then: genie lock release {name} --force",
        )
    broken = asyncio.run(_break_lock(invocation.load_settings(), tenant or DEFAULT_TENANT, name))
    holder = f"; it was held by {broken.holder} with token {broken.fencing_token}" if broken.holder else ""
    output.write_line(output.to_one_line(f"{name}: released{holder}"))


async def _fetch_locks_and_is_owner(settings: Settings) -> tuple[LocksReply, bool]:
    from genie.cluster.client import open_client

    async with open_client(settings) as client:
        return await client.list_locks(), client.is_owner


async def _break_lock(settings: Settings, tenant: str, name: str) -> LockBroken:
    from genie.cluster.client import open_client

    async with open_client(settings) as client:
        return await client.break_lock(tenant, name)


def _lock_row(view: LockView, *, now: float) -> tuple[str, ...]:
    return (
        view.name,
        view.tenant,
        view.holder,
        str(view.fencing_token),
        format_duration(max(now - view.acquired_at, 0.0)),
        f"in {format_duration(view.expires_in_s)}",
        str(view.waiting),
    )
