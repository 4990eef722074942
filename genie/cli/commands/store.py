"""Commands for the store of the controller: store backup, restore, migrate and adopt.

A backup of a running controller is read through its API. Everything else opens the store directly, on the
controller's machine, while the controller is stopped.
"""

from __future__ import annotations

import asyncio
import shlex
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
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
    from genie.controller.etcd.local_member import LocalMember
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

MemberBindOption = Annotated[
    str | None,
    typer.Option(
        metavar="ADDRESS",
        help="With etcd run by Genie: address of this machine to listen on, for other servers.",
    ),
]
MemberPortOption = Annotated[
    str | None, typer.Option(metavar="N", help="With --bind: port of the controller (default: 5555).")
]
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
    """Back up the store to a file, while the cluster is running. Replaces an earlier backup, no other file.

    The file contains all jobs, nodes, quotas and hashes of tokens at one revision, and only you can read it.
    It does not contain the certificate authority of the cluster: see "Backup and restore" in the user guide.
    """
    settings = _load_settings_of_machine(invocation, {"controller.store": store})
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
            metavar="URL",
            help="Store to restore into: etcd (run by Genie), sqlite, or an empty etcd://HOST:PORT "
            "(default: etcd on a server with an etcd member, else sqlite).",
        ),
    ] = None,
    bind: MemberBindOption = None,
    port: MemberPortOption = None,
    generation: Annotated[
        str | None,
        typer.Option(metavar="N", help="New generation of the cluster (default: higher than any before)."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Restore a backup. The cluster must not be running.

    With etcd run by Genie, starts a new etcd cluster of one member, which replaces the one of this machine;
    the other servers join again. Other stores must be empty. The data of a replaced store is kept.

    Raises the generation of the cluster: nodes accept the restored controller and reject the previous one.
    Running jobs that are not in the backup are ended when their nodes connect.
    """
    from genie.controller.etcd.local_member import LocalMember

    given = {"controller.store": store, "controller.bind": bind, "controller.port": port}
    settings = _load_settings_of_machine(invocation, given)
    _check_address_is_for_member(settings, bind=bind, port=port)
    wanted = (
        None
        if generation is None
        else parse_integer(generation, what="--generation", low=1, high=GENERATION_MAX)
    )
    replaced_member = LocalMember.read(settings.paths.state_dir)
    restored, kept = asyncio.run(_restore_backup_file(settings, _parse_backup_path(file), generation=wanted))
    if as_json:
        output.write_json(
            {
                "header": output.struct_to_json(restored.header),
                "generation": restored.cluster.generation,
                "rows": restored.row_count,
                "kept": [str(path) for path in kept],
            }
        )
        return
    _print_restored(settings, restored, kept, replaced_member=replaced_member)


def _print_restored(
    settings: Settings, restored: RestoreResult, kept: list[Path], *, replaced_member: LocalMember | None
) -> None:
    output.write_line(
        f"restored {restored.row_count} rows of cluster {restored.cluster.cluster_id}, generation "
        f"{restored.cluster.generation}"
    )
    _print_rows_left_out(restored, verb="restored")
    if restored.dropped_token_count:
        output.print_message(
            f"{format_count(restored.dropped_token_count, 'unused join or server token')} of the backup "
            "cannot be used: create new ones"
        )
    _print_kept_stores(kept)
    _print_next_steps(settings, ca_pin=restored.cluster.ca_pin, replaced_member=replaced_member)
    if _is_run_by_genie(settings):
        output.print_message(
            "do not start a previous server before you have removed STATE/controller, STATE/etcd and "
            "STATE/owner.token there (STATE is its state directory); then it joins again with 'genie join "
            "--server'. Its previous owner token stays valid until 'genie token revoke ID' ('genie token "
            "list')"
        )


def _print_rows_left_out(restored: RestoreResult, *, verb: str) -> None:
    count = restored.header.row_count - restored.row_count - restored.dropped_token_count
    if count > 0:
        output.print_message(
            f"not {verb}: {format_count(count, 'row')} about the previous servers, which register again"
        )


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


def _load_settings_of_machine(invocation: Invocation, given: Mapping[str, object]) -> Settings:
    """Load the settings. Without a store, that of this machine: etcd if it has an etcd member."""
    from genie.controller.etcd.local_member import LocalMember
    from genie.controller.store.open import LOCAL_ETCD_STORE

    settings = invocation.load_settings(given)
    _finish_interrupted_replacement(settings)
    is_default = settings.sources["controller.store"] == "default"
    if is_default and LocalMember.read(settings.paths.state_dir) is not None:
        return replace(settings, controller=replace(settings.controller, store=LOCAL_ETCD_STORE))
    return settings


def _finish_interrupted_replacement(settings: Settings) -> bool:
    """Whether the store was being replaced by etcd when a command was killed, which is finished now."""
    from genie.supervisor.etcd_member import finish_interrupted_replacement

    kept = finish_interrupted_replacement(settings.paths.state_dir)
    if kept:
        output.print_message("finished the replacement of the store, which was interrupted")
        _print_kept_stores(kept)
    return bool(kept)


def _is_run_by_genie(settings: Settings) -> bool:
    from genie.controller.store.open import LOCAL_ETCD_STORE

    return settings.controller.store == LOCAL_ETCD_STORE


def _check_address_is_for_member(settings: Settings, *, bind: str | None, port: str | None) -> None:
    from genie.controller.store.open import check_store_url

    if (bind is not None or port is not None) and not _is_run_by_genie(settings):
        check_store_url(settings.controller.store)
        raise UsageError(
            f"--bind and --port are for etcd members that Genie runs, but the store is "
            f"{settings.controller.store}",
            hint="give them to 'genie up' instead, or choose the store etcd",
        )


async def _restore_backup_file(
    settings: Settings, path: Path, *, generation: int | None
) -> tuple[RestoreResult, list[Path]]:
    """Return also the names under which the replaced store is kept."""
    from genie.controller.backups.backup_file import BackupReader
    from genie.controller.controller_directory import lock_controller_directory, record_directory_location
    from genie.controller.etcd.replacement import retire_member
    from genie.processes import files
    from genie.processes.tasks import file_io_threads

    reader = await asyncio.to_thread(BackupReader, path)
    state_dir, directory = settings.paths.state_dir, files.make_private_directory(_controller_dir(settings))
    with lock_controller_directory(directory), file_io_threads("genie-restore") as offload:
        if _is_run_by_genie(settings):
            return await _restore_into_new_member(settings, reader, generation=generation, offload=offload)
        async with _hold_server_if_any(settings):
            async with _open_store(settings) as store:
                restored = await _restore_into_store(
                    store, settings, reader, generation=generation, offload=offload
                )
            record_directory_location(directory)
            kept = retire_member(state_dir)
        return restored, [] if kept is None else [kept]


async def _restore_into_new_member(
    settings: Settings, reader: BackupReader, *, generation: int | None, offload: Offload
) -> tuple[RestoreResult, list[Path]]:
    """Restore into a new etcd cluster on this machine, which replaces its etcd member and embedded store."""
    from genie.controller.backups.restore import read_cluster_of_backup
    from genie.controller.store.open import SQLITE_FILE_NAME
    from genie.supervisor.etcd_replacement import build_replacement

    cluster = await offload(lambda: read_cluster_of_backup(reader))
    sqlite_file = _controller_dir(settings) / SQLITE_FILE_NAME
    async with build_replacement(
        settings,
        ca_pin=cluster.ca_pin,
        sqlite_file=sqlite_file if sqlite_file.exists() else None,
        progress=output.print_message,
    ) as build:
        restored = await _restore_into_store(
            build.store, settings, reader, generation=generation, offload=offload
        )
    return restored, build.kept


@asynccontextmanager
async def _hold_server_if_any(settings: Settings) -> AsyncIterator[None]:
    """Keep the etcd member of this machine stopped for the block, if there is one."""
    from genie.controller.etcd.local_member import LocalMember
    from genie.supervisor.etcd_replacement import hold_stopped_server

    state_dir = settings.paths.state_dir
    if LocalMember.read(state_dir) is None:
        yield
        return
    async with hold_stopped_server(state_dir, progress=output.print_message):
        yield


async def _restore_into_store(
    store: Store, settings: Settings, reader: BackupReader, *, generation: int | None, offload: Offload
) -> RestoreResult:
    """Restore the backup, unless an earlier command has done so and was killed before the store was used."""
    from genie.controller.backups.restore import find_completed_restore, next_generation, restore_backup
    from genie.controller.backups.used_generations import (
        check_generation_unused,
        read_used_generation,
        record_used_generation,
    )
    from genie.controller.etcd.local_member import LocalMember

    if LocalMember.read(settings.paths.state_dir) is not None:  # it is retired only after the restore
        done = await find_completed_restore(reader, store, offload=offload)
        if done is not None and generation in (None, done.cluster.generation):
            return done
    directory = _controller_dir(settings)
    used = read_used_generation(directory)
    if generation is None:
        generation = next_generation(max(reader.header.generation, used), now_s=time.time())
    check_generation_unused(generation, used=used)
    record_used_generation(directory, generation)
    return await restore_backup(
        reader,
        store,
        store_name=_store_name(settings),
        generation=generation,
        offload=offload,
        progress=RowCountPrinter("restoring"),
        verify_progress=RowCountPrinter("verifying"),
    )


@command(store_app, "adopt", example="genie store adopt")
def adopt_state_directory(invocation: Invocation) -> None:
    """Accept a state directory that was moved or copied here, so that its controller starts.

    Raises the generation of the cluster: nodes reject a controller that still runs with the original.
    """
    settings = _load_settings_of_machine(invocation, {})
    if _is_run_by_genie(settings):
        raise UsageError(
            f"the store of {settings.paths.state_dir} is an etcd member that Genie runs, which cannot be "
            "adopted",
            hint="start it with 'genie up'; if its address has changed, remove the member on another server "
            "('genie etcd remove') and join again, or restore a backup with 'genie store restore'",
        )
    generation = asyncio.run(_adopt_and_get_generation(settings))
    output.write_line(f"{_controller_dir(settings)} belongs to this machine now, generation {generation}")
    output.print_message("next: genie up --detach")


async def _adopt_and_get_generation(settings: Settings) -> int:
    from genie.controller.backups.restore import adopt_store
    from genie.controller.backups.used_generations import read_used_generation, record_used_generation
    from genie.controller.controller_directory import lock_controller_directory, record_directory_location

    _check_store_exists(settings)
    directory = _controller_dir(settings)
    with lock_controller_directory(directory):
        async with _open_store(settings) as store:
            cluster = await adopt_store(
                store,
                store_name=_store_name(settings),
                now_s=time.time(),
                used_generation=read_used_generation(directory),
            )
        if cluster is not None:
            record_used_generation(directory, cluster.generation)
        record_directory_location(directory)
    return cluster.generation if cluster else 0


@command(store_app, "migrate", example="genie store migrate --to etcd --bind 10.0.0.1")
def migrate(
    invocation: Invocation,
    *,
    to: Annotated[
        str,
        typer.Option(
            metavar="URL",
            help="Store to move to: etcd (run by Genie), or an empty etcd://HOST:PORT,..., sqlite or "
            "sqlite:/PATH.",
        ),
    ],
    source: Annotated[
        str | None,
        typer.Option("--from", metavar="URL", help="Store to copy (default: that of this machine)."),
    ] = None,
    bind: MemberBindOption = None,
    port: MemberPortOption = None,
) -> None:
    """Move the cluster to another store, such as from SQLite to etcd. The controller must not be running.

    Keeps a backup in the state directory, reads the copy back, and prints the command that starts the
    controller with the new store. With --to etcd, the file of SQLite is renamed and kept.
    """
    for name, url in (("--to", to), ("--from", source)):
        if url == "":
            raise UsageError(
                f"{name} '' is empty", hint="give a store URL, such as sqlite or etcd://HOST:PORT"
            )
    given = {"controller.store": to, "controller.bind": bind, "controller.port": port}
    target = invocation.load_settings(given)
    if _finish_interrupted_replacement(target) and _is_run_by_genie(target):
        _print_next_command(target)
        return
    settings = _load_settings_of_machine(invocation, {"controller.store": source})
    _check_address_is_for_member(target, bind=bind, port=port)
    path, restored, kept = asyncio.run(_migrate_store(settings, target))
    output.write_line(f"copied {restored.row_count} rows of cluster {restored.cluster.cluster_id} to {to}")
    _print_rows_left_out(restored, verb="copied")
    output.print_message(f"a backup of the previous store is in {path}")
    _print_kept_stores(kept)
    _print_next_steps(target, ca_pin=restored.cluster.ca_pin)


async def _migrate_store(settings: Settings, target: Settings) -> tuple[Path, RestoreResult, list[Path]]:
    """Back up the store of the settings and restore it into that of `target`. Return also the names under
    which the previous store is kept."""
    from genie.controller.backups.backup_file import BackupReader
    from genie.controller.backups.restore import check_store_unused
    from genie.controller.controller_directory import lock_controller_directory
    from genie.processes import files
    from genie.processes.tasks import file_io_threads

    _check_can_migrate(settings, target)
    directory = files.make_private_directory(_controller_dir(settings))
    path = directory / f"migration-{time.strftime('%Y%m%d-%H%M%S')}.backup"
    with lock_controller_directory(directory), file_io_threads("genie-migrate") as offload:
        if not _is_run_by_genie(target):
            return path, await _migrate_into_open_store(settings, target, path, offload=offload), []
        async with _open_store(settings) as store:  # closed before its file is renamed
            await check_store_unused(store, store_name=_store_name(settings))
            await _write_backup_of_store(store, path, offload=offload)
        reader = await offload(lambda: BackupReader(path))
        restored, kept = await _restore_into_new_member(target, reader, generation=None, offload=offload)
        return path, restored, kept


async def _migrate_into_open_store(
    settings: Settings, target: Settings, path: Path, *, offload: Offload
) -> RestoreResult:
    from genie.controller.backups.backup_file import BackupReader
    from genie.controller.backups.restore import check_store_empty, check_store_unused

    async with _open_store(settings) as store, _open_store(target) as target_store:
        await check_store_unused(store, store_name=_store_name(settings))
        await check_store_empty(target_store, store_name=_store_name(target))
        await _write_backup_of_store(store, path, offload=offload)
        reader = await offload(lambda: BackupReader(path))
        return await _restore_into_store(target_store, target, reader, generation=None, offload=offload)


def _check_can_migrate(settings: Settings, target: Settings) -> None:
    from genie.supervisor.etcd_replacement import choose_new_member

    if _store_name(settings) == _store_name(target):
        raise UsageError(
            f"{_store_name(target)} is both source and target of the migration",
            hint="choose another one with --to",
        )
    if _is_run_by_genie(settings):
        raise UsageError(
            "cannot migrate from etcd members that Genie runs: they stop together with the controllers",
            hint="run 'genie store backup FILE' while the cluster is running, 'genie down --keep-jobs' on "
            f"all servers, and 'genie store restore FILE --store {target.controller.store}'",
        )
    _check_store_exists(settings)
    if _is_run_by_genie(target):
        choose_new_member(target)


def _store_name(settings: Settings) -> str:
    """The file of an embedded store, or the URL of etcd."""
    from genie.controller.store.open import sqlite_store_path

    url = settings.controller.store
    return str(sqlite_store_path(url, state_dir=_controller_dir(settings)) or url)


def _print_kept_stores(kept: list[Path]) -> None:
    for path in kept:
        output.print_message(f"the previous store is kept in {path}")


def _print_next_steps(settings: Settings, *, ca_pin: str, replaced_member: LocalMember | None = None) -> None:
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
    _print_next_command(settings, replaced_member)


def _print_next_command(settings: Settings, replaced_member: LocalMember | None = None) -> None:
    """`replaced_member` has the address of this machine's controller, which only etcd members remember."""
    url = settings.controller.store
    if _is_run_by_genie(settings):
        output.print_message(
            "next: genie up --detach; then add the other servers: genie token create --server"
        )
        return
    where = ""
    if replaced_member is not None:
        where = f" --bind {replaced_member.bind} --port {replaced_member.controller_port or 5555}"
    output.print_message(
        f"next: genie up --detach{'' if url == 'sqlite' else f' --store {shlex.quote(url)}'}{where}"
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
