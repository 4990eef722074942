"""Commands for the store of the controller: store backup.

A running controller is read through its API. Without one, the store is opened directly, on the controller's
machine.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from genie.cli import output
from genie.cli.app import Invocation, JsonOption, app, command
from genie.cli.quantities import format_size
from genie.errors import ConfigError, TokenMissingError, UnreachableError, UsageError

if TYPE_CHECKING:
    from genie.config import Settings
    from genie.controller.backups.backup import BackupSource
    from genie.controller.backups.backup_file import BackupHeader
    from genie.controller.store import Store

store_app = typer.Typer(
    name="store",
    help="Back up the store of the controller.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)
app.add_typer(store_app)

_PROGRESS_INTERVAL_S = 2.0

FileArgument = Annotated[str, typer.Argument(metavar="FILE", help="File of the backup.")]


@command(store_app, "backup", example="genie store backup /backups/genie.backup")
def backup(
    invocation: Invocation,
    *,
    file: FileArgument,
    store: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Read this store directly, such as etcd://HOST:PORT (default: the controller).",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Back up the store to a file, while the cluster is running.

    The file contains all jobs, nodes, quotas and hashes of tokens at one revision, and only you can read it.
    It does not contain the certificate authority of the cluster: see "Backup and restore" in the user guide.
    """
    settings = invocation.load_settings({"controller.store": store})
    path = Path(file).expanduser().absolute()
    header = asyncio.run(_write_backup(settings, path, direct=store is not None))
    if as_json:
        output.write_json({"file": str(path), "header": output.struct_to_json(header)})
        return
    output.write_line(
        f"{path}: {header.row_count} rows at revision {header.revision} of cluster {header.cluster_id}"
    )


async def _write_backup(settings: Settings, path: Path, *, direct: bool) -> BackupHeader:
    from genie.controller.backups.backup import write_backup
    from genie.processes.clock import SystemClock
    from genie.processes.tasks import file_io_threads

    async with AsyncExitStack() as stack:
        open_source = await _enter_source(settings, stack, direct=direct)
        with file_io_threads("genie-backup") as offload:
            return await write_backup(
                open_source, path, clock=SystemClock(), offload=offload, progress=RowProgress("backing up")
            )


async def _enter_source(
    settings: Settings, stack: AsyncExitStack, *, direct: bool
) -> Callable[[], AbstractAsyncContextManager[BackupSource]]:
    """Connect to the controller, or open the store if `direct` or if no controller is running here."""
    from genie.controller.backups.backup import open_store_source

    if not direct:
        from genie.cluster.client import open_client
        from genie.cluster.store_backup import open_controller_source

        try:
            client = await stack.enter_async_context(open_client(settings))
            return lambda: open_controller_source(client)
        except (UnreachableError, ConfigError, TokenMissingError):
            if settings.cluster.master_addr is not None or not _has_own_store(settings):
                raise
        output.print_message("no controller is running here: reading the store directly")
    store = await open_own_store(settings)
    stack.push_async_callback(store.close)
    return lambda: open_store_source(store)


def _has_own_store(settings: Settings) -> bool:
    """Whether this machine has a store that can be read without its controller."""
    from genie.controller.store.open import sqlite_store_path

    path = sqlite_store_path(settings.controller.store, state_dir=_controller_dir(settings))
    return path is None or path.exists()


async def open_own_store(settings: Settings) -> Store:
    """Open the store of the settings. The caller closes it."""
    from genie.controller.store.open import open_store, sqlite_store_path
    from genie.processes.clock import SystemClock

    directory = _controller_dir(settings)
    path = sqlite_store_path(settings.controller.store, state_dir=directory)
    if path is not None and not path.exists():
        raise UsageError(
            f"there is no store at {path}",
            hint="run this on the controller's machine, or set GENIE_STATE_DIR",
        )
    return await open_store(settings.controller.store, state_dir=directory, clock=SystemClock())


def _controller_dir(settings: Settings) -> Path:
    from genie.controller.store.open import CONTROLLER_DIRECTORY

    return settings.paths.state_dir / CONTROLLER_DIRECTORY


class RowProgress:
    """Prints the progress of a long operation to standard error from time to time."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._next_s = time.monotonic() + _PROGRESS_INTERVAL_S

    def __call__(self, row_count: int, size_bytes: int) -> None:
        if time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + _PROGRESS_INTERVAL_S
            output.print_message(f"{self._what}: {row_count} rows, {format_size(size_bytes)}")
