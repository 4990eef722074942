"""Commands for the store of the controller: store backup, restore, migrate and adopt.

A backup of a running controller is read through its API. Everything else opens the store directly, on the
controller's machine, while the controller is stopped.
"""

from __future__ import annotations

import asyncio
import shlex
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from genie.cli import output
from genie.cli.app import Invocation, JsonOption, app, command
from genie.cli.quantities import format_count, format_size, parse_integer
from genie.errors import ConfigError, TokenMissingError, UnreachableError, UsageError
from genie.model.fencing import GENERATION_MAX

if TYPE_CHECKING:
    from genie.config import Settings
    from genie.controller.backups.backup_file import BackupHeader, BackupReader
    from genie.controller.backups.restore import RestoreResult
    from genie.controller.store import Store
    from genie.processes.tasks import Offload

store_app = typer.Typer(
    name="store",
    help="Back up, restore and migrate the store of the controller.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)
app.add_typer(store_app)

_PROGRESS_INTERVAL_S = 2.0
_PATH_CHARS_MAX = 4096

BackupFileArgument = Annotated[str, typer.Argument(metavar="FILE", help="File of the backup.")]


@command(store_app, "backup", example="genie store backup /backups/genie.backup")
def backup(
    invocation: Invocation,
    *,
    file: BackupFileArgument,
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
    path = _parse_backup_path(file)
    header = asyncio.run(_write_backup_of_controller_or_store(settings, path, direct=store is not None))
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
    file: BackupFileArgument,
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
    _check_store_would_be_used(settings)
    wanted = (
        None
        if generation is None
        else parse_integer(generation, what="--generation", low=1, high=GENERATION_MAX)
    )
    restored = asyncio.run(_restore_backup_file(settings, _parse_backup_path(file), generation=wanted))
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
    if restored.dropped_token_count:
        output.print_message(
            f"{format_count(restored.dropped_token_count, 'unused join or server token')} of the backup "
            "cannot be used: create new ones"
        )
    _print_next_steps(settings, ca_pin=restored.cluster.ca_pin)


def _parse_backup_path(text: str) -> Path:
    """Raise UsageError for what cannot be the name of a file, or could not be printed."""
    shown = repr(text if len(text) <= 80 else f"{text[:77]}...")
    if not text.isprintable() or len(text) > _PATH_CHARS_MAX:
        raise UsageError(
            f"FILE {shown} is too long or has control characters",
            hint=f"give a path of at most {_PATH_CHARS_MAX} printable characters",
        )
    path = Path(text).expanduser().absolute()
    if not text or path.is_dir():
        raise UsageError(
            f"FILE {shown} is {'a directory' if text else 'empty'}", hint="give the path of a file"
        )
    return path


def _check_store_would_be_used(settings: Settings) -> None:
    """Raise UsageError if this machine is a server with etcd, whose controller would ignore another store."""
    from genie.controller.etcd.local_member import LocalMember

    state_dir = settings.paths.state_dir
    is_default = settings.sources["controller.store"] == "default"
    if is_default and LocalMember.read(state_dir) is not None:
        raise UsageError(
            f"{state_dir} has an etcd member, which 'genie up' would use instead of a restored SQLite store",
            hint="restore into an empty GENIE_STATE_DIR, which starts a cluster with one controller, or into "
            "an etcd cluster of your own with --store etcd://HOST:PORT",
        )


async def _restore_backup_file(settings: Settings, path: Path, *, generation: int | None) -> RestoreResult:
    from genie.controller.backups.backup_file import BackupReader
    from genie.controller.controller_directory import lock_controller_directory, record_directory_location
    from genie.processes import files
    from genie.processes.tasks import file_io_threads

    reader = await asyncio.to_thread(BackupReader, path)
    directory = files.make_private_directory(_controller_dir(settings))
    with lock_controller_directory(directory), file_io_threads("genie-restore") as offload:
        async with _open_store(settings) as store:
            restored = await _restore_into_store(
                store, settings, reader, generation=generation, offload=offload
            )
        record_directory_location(directory)
        return restored


async def _restore_into_store(
    store: Store, settings: Settings, reader: BackupReader, *, generation: int | None, offload: Offload
) -> RestoreResult:
    from genie.controller.backups.restore import next_generation, restore_backup

    return await restore_backup(
        reader,
        store,
        store_name=_store_name(settings),
        generation=generation or next_generation(reader.header.generation, now_s=time.time()),
        offload=offload,
        progress=RowCountPrinter("restoring"),
    )


@command(store_app, "adopt", example="genie store adopt")
def adopt_state_directory(invocation: Invocation) -> None:
    """Accept a state directory that was moved or copied here, so that its controller starts.

    Raises the generation of the cluster: nodes reject a controller that still runs with the original.
    """
    settings = invocation.load_settings()
    generation = asyncio.run(_adopt_and_get_generation(settings))
    output.write_line(f"{_controller_dir(settings)} belongs to this machine now, generation {generation}")
    output.print_message("next: genie up --detach")


async def _adopt_and_get_generation(settings: Settings) -> int:
    from genie.controller.backups.restore import adopt_store
    from genie.controller.controller_directory import lock_controller_directory, record_directory_location

    _check_store_exists(settings)
    directory = _controller_dir(settings)
    with lock_controller_directory(directory):
        async with _open_store(settings) as store:
            cluster = await adopt_store(store, store_name=_store_name(settings), now_s=time.time())
        record_directory_location(directory)
    return cluster.generation if cluster else 0


@command(store_app, "migrate", example="genie store migrate --to etcd://10.0.0.5,10.0.0.6,10.0.0.7")
def migrate(
    invocation: Invocation,
    *,
    to: Annotated[
        str, typer.Option(metavar="URL", help="Empty store: etcd://HOST:PORT,..., sqlite or sqlite:/PATH.")
    ],
    source: Annotated[
        str | None,
        typer.Option("--from", metavar="URL", help="Store to copy (default: that of the settings, sqlite)."),
    ] = None,
) -> None:
    """Copy the store to an empty one, such as from SQLite to etcd. The controller must not be running.

    Keeps a backup in the state directory, reads the copy back, and prints the command that starts the
    controller with the new store.
    """
    settings = invocation.load_settings({"controller.store": source})
    for name, url in (("--to", to), ("--from", source)):
        if url == "":
            raise UsageError(
                f"{name} '' is empty", hint="give a store URL, such as sqlite or etcd://HOST:PORT"
            )
    target = invocation.load_settings({"controller.store": to})
    path, restored = asyncio.run(_migrate_store(settings, target))
    output.write_line(f"copied {restored.row_count} rows of cluster {restored.cluster.cluster_id} to {to}")
    output.print_message(f"a backup of the previous store is in {path}")
    _print_next_steps(target, ca_pin=restored.cluster.ca_pin)


async def _migrate_store(settings: Settings, target: Settings) -> tuple[Path, RestoreResult]:
    """Back up the store of the settings and restore it into that of `target`."""
    from genie.controller.backups.backup_file import BackupReader
    from genie.controller.backups.restore import check_store_empty, check_store_unused
    from genie.controller.controller_directory import lock_controller_directory
    from genie.processes import files
    from genie.processes.tasks import file_io_threads

    _check_store_exists(settings)
    if _store_name(settings) == _store_name(target):
        raise UsageError(
            f"{_store_name(target)} is both source and target of the migration",
            hint="choose another one with --to",
        )
    directory = files.make_private_directory(_controller_dir(settings))
    path = directory / f"migration-{time.strftime('%Y%m%d-%H%M%S')}.backup"
    with lock_controller_directory(directory), file_io_threads("genie-migrate") as offload:
        async with _open_store(settings) as store, _open_store(target) as target_store:
            await check_store_unused(store, store_name=_store_name(settings))
            await check_store_empty(target_store, store_name=_store_name(target))
            await _write_backup_of_store(store, path, offload=offload)
            reader = await offload(lambda: BackupReader(path))
            return path, await _restore_into_store(
                target_store, target, reader, generation=None, offload=offload
            )


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


async def _write_backup_of_controller_or_store(
    settings: Settings, path: Path, *, direct: bool
) -> BackupHeader:
    """Back up the store of the controller, or the store of the settings if `direct` or if no controller is
    running here."""
    from genie.cluster.client import open_client
    from genie.cluster.store_backup import open_controller_backup_source
    from genie.controller.backups.backup import write_backup
    from genie.processes.clock import SystemClock
    from genie.processes.tasks import file_io_threads

    async with AsyncExitStack() as stack:
        offload = stack.enter_context(file_io_threads("genie-backup"))
        if not direct:
            try:
                client = await stack.enter_async_context(open_client(settings))
            except (UnreachableError, ConfigError, TokenMissingError):
                if settings.cluster.master_addr is not None or not _is_etcd_or_existing_store(settings):
                    raise
                output.print_message("no controller is running here: reading the store directly")
            else:
                return await write_backup(
                    lambda: open_controller_backup_source(client),
                    path,
                    clock=SystemClock(),
                    offload=offload,
                    progress=RowCountPrinter("backing up"),
                )
        _check_store_exists(settings)
        store = await stack.enter_async_context(_open_store(settings))
        return await _write_backup_of_store(store, path, offload=offload)


async def _write_backup_of_store(store: Store, path: Path, *, offload: Offload) -> BackupHeader:
    from genie.controller.backups.backup import open_store_backup_source, write_backup
    from genie.processes.clock import SystemClock

    return await write_backup(
        lambda: open_store_backup_source(store),
        path,
        clock=SystemClock(),
        offload=offload,
        progress=RowCountPrinter("backing up"),
    )


def _is_etcd_or_existing_store(settings: Settings) -> bool:
    """Whether this machine has a store that can be read without its controller."""
    from genie.controller.store.open import sqlite_store_path

    path = sqlite_store_path(settings.controller.store, state_dir=_controller_dir(settings))
    return path is None or path.exists()


def _check_store_exists(settings: Settings) -> None:
    """Raise UsageError if the embedded store of the settings does not exist: opening it would create it."""
    if not _is_etcd_or_existing_store(settings):
        raise UsageError(
            f"there is no store at {_store_name(settings)}",
            hint="run this on the controller's machine, or set GENIE_STATE_DIR",
        )


@asynccontextmanager
async def _open_store(settings: Settings) -> AsyncIterator[Store]:
    from genie.controller.etcd.local_member import LocalMember
    from genie.controller.store.open import open_store
    from genie.processes.clock import SystemClock

    state_dir = settings.paths.state_dir
    member = LocalMember.read(state_dir)
    store = await open_store(
        settings.controller.store,
        state_dir=_controller_dir(settings),
        clock=SystemClock(),
        local_etcd=None if member is None else member.address(state_dir),
    )
    try:
        yield store
    finally:
        await store.close()


def _controller_dir(settings: Settings) -> Path:
    from genie.controller.store.open import CONTROLLER_DIRECTORY

    return settings.paths.state_dir / CONTROLLER_DIRECTORY


class RowCountPrinter:
    """Prints the progress of a long operation to standard error from time to time."""

    def __init__(self, operation: str) -> None:
        self._operation = operation
        self._next_print_at_s = time.monotonic() + _PROGRESS_INTERVAL_S

    def __call__(self, row_count: int, size_bytes: int) -> None:
        if time.monotonic() >= self._next_print_at_s:
            self._next_print_at_s = time.monotonic() + _PROGRESS_INTERVAL_S
            output.print_message(f"{self._operation}: {row_count} rows, {format_size(size_bytes)}")
