"""Commands for the store of the controller: store backup and restore.

A backup of a running controller is read through its API. Everything else opens the store directly, on the
controller's machine, while the controller is stopped.
"""

from __future__ import annotations

import asyncio
import shlex
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from genie.cli import output
from genie.cli.app import Invocation, JsonOption, app, command
from genie.cli.quantities import format_size, parse_integer
from genie.errors import ConfigError, TokenMissingError, UnreachableError, UsageError

if TYPE_CHECKING:
    from genie.config import Settings
    from genie.controller.backups.backup import BackupSource
    from genie.controller.backups.backup_file import BackupHeader
    from genie.controller.backups.restore import Restored
    from genie.controller.store import Store

store_app = typer.Typer(
    name="store",
    help="Back up and restore the store of the controller.",
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


@command(store_app, "restore", example="genie store restore /backups/genie.backup")
def restore(
    invocation: Invocation,
    *,
    file: FileArgument,
    store: Annotated[
        str | None,
        typer.Option(
            metavar="URL", help="Empty store to restore into, such as etcd://HOST:PORT (default: sqlite)."
        ),
    ] = None,
    generation: Annotated[
        str | None,
        typer.Option(metavar="N", help="New generation of the cluster (default: higher than any before)."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Restore a backup into an empty store. The controller must not be running.

    Raises the generation of the cluster: nodes accept the restored controller and reject the previous one.
    Running jobs that are not in the backup are ended when their nodes connect.
    """
    settings = invocation.load_settings({"controller.store": store})
    wanted = (
        None if generation is None else parse_integer(generation, what="--generation", low=1, high=1 << 24)
    )
    restored = asyncio.run(_restore(settings, Path(file).expanduser().absolute(), generation=wanted))
    if as_json:
        output.write_json(
            {
                "header": output.struct_to_json(restored.header),
                "generation": restored.cluster.generation,
                "rows": restored.row_count,
            }
        )
        return
    output.write_line(
        f"restored {restored.row_count} rows of cluster {restored.cluster.cluster_id}, generation "
        f"{restored.cluster.generation}"
    )
    _print_next_steps(settings, ca_pin=restored.cluster.ca_pin)


async def _restore(settings: Settings, path: Path, *, generation: int | None) -> Restored:
    from genie.controller.backups.backup_file import BackupReader
    from genie.controller.backups.restore import next_generation, restore_backup
    from genie.controller.state_directory import lock_controller_directory
    from genie.controller.store.open import open_store
    from genie.processes import files
    from genie.processes.clock import SystemClock
    from genie.processes.tasks import file_io_threads

    reader, clock = await asyncio.to_thread(BackupReader, path), SystemClock()
    url, directory = settings.controller.store, _controller_dir(settings)
    files.make_private_directory(directory)
    with lock_controller_directory(directory), file_io_threads("genie-restore") as offload:
        store = await open_store(url, state_dir=directory, clock=clock)
        try:
            return await restore_backup(
                reader,
                store,
                store_name=_store_name(settings),
                generation=generation or next_generation(reader.header.generation, now_s=clock.wall_s()),
                offload=offload,
                progress=RowProgress("restoring"),
            )
        finally:
            await store.close()


def _store_name(settings: Settings) -> str:
    """The file of an embedded store, or the URL of etcd."""
    from genie.controller.store.open import sqlite_store_path

    url = settings.controller.store
    return str(sqlite_store_path(url, state_dir=_controller_dir(settings)) or url)


def _print_next_steps(settings: Settings, *, ca_pin: str) -> None:
    from genie.runtime import tls
    from genie.tenancy.access import NO_PIN

    directory = _controller_dir(settings)
    try:
        own_pin = tls.fingerprint((directory / "ca.pem").read_text("utf-8"))
    except OSError:
        own_pin = ""
    if ca_pin not in (own_pin, NO_PIN):
        output.print_message(
            f"first copy controller/ca.pem and controller/ca.key of the previous controller to {directory}: "
            "nodes and users trust only that certificate authority"
        )
    url = settings.controller.store
    output.print_message(
        f"next: genie up --detach{'' if url == 'sqlite' else f' --store {shlex.quote(url)}'}"
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
