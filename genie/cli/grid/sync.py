"""The command sync: copies a local directory to grid nodes. Implemented in grid/sync."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from genie.cli import output
from genie.cli.app import Invocation, JsonOption, grid_command
from genie.cli.grid.nodes import complete_node_name, load_settings_and_grid_file
from genie.cli.quantities import format_count, format_size
from genie.errors import TransportError

if TYPE_CHECKING:
    from genie.config import Settings
    from genie.grid.grid_file import GridFile
    from genie.grid.sync.syncer import SyncProgress, SyncReport

_PATHS_SHOWN_MAX = 10


@grid_command("sync", example="grid-cli sync . --node gpu1")
def sync(
    invocation: Invocation,
    *,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Directory to copy.")] = Path(),
    node: Annotated[
        list[str] | None,
        typer.Option(
            "--node",
            metavar="NAME",
            help="Sync only to this node; repeatable (default: all).",
            autocompletion=complete_node_name,
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only list the files that would be sent or deleted.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Copy changed files of a directory to remote_root on the nodes.

    Files deleted here are deleted on the nodes, if a sync created them and they were not changed there.

    Excludes sync.exclude_patterns and files ignored by .gitignore.
    """
    settings, file = load_settings_and_grid_file(invocation)
    names = list(node) if node else [each.name for each in file.nodes]
    bar = SyncProgressBar()
    try:
        reports = asyncio.run(_sync_folder(settings, file, folder, names, bar, dry_run=dry_run))
    finally:
        bar.close()
    if as_json:
        output.write_json([_report_to_json(report) for report in reports])
    else:
        _print_sync_reports(reports, dry_run=dry_run)
    failed = [report.error for report in reports if report.error is not None]
    if failed:
        raise typer.Exit(max(error.exit_code for error in failed))


async def _sync_folder(
    settings: Settings, file: GridFile, folder: Path, names: list[str], bar: SyncProgressBar, *, dry_run: bool
) -> list[SyncReport]:
    from genie.grid.metrics import GridMetrics
    from genie.grid.ssh.pool import SshPool
    from genie.grid.sync.syncer import Syncer

    state_dir = settings.paths.state_dir.expanduser()
    async with SshPool(file, ssh_config=settings.grid.ssh_config) as pool:
        syncer = Syncer(pool, file, state_dir=state_dir, metrics=GridMetrics(state_dir))
        return await syncer.sync(folder, names, progress=bar, dry_run=dry_run)


class SyncProgressBar:
    """Total progress of all nodes, on one line of a terminal; prints nothing without a terminal."""

    def __init__(self) -> None:
        self._progress_by_node: dict[str, SyncProgress] = {}
        self._is_shown = sys.stderr.isatty()
        self._progress_line = output.ProgressLine()

    def __call__(self, progress: SyncProgress) -> None:
        self._progress_by_node[progress.node] = progress
        if self._is_shown:
            done = sum(each.sent_bytes for each in self._progress_by_node.values())
            total = sum(each.bytes_total for each in self._progress_by_node.values())
            files = sum(each.sent_files for each in self._progress_by_node.values())
            nodes = format_count(len(self._progress_by_node), "node")
            self._progress_line(
                f"sending to {nodes}: {format_count(files, 'file')}, {format_size(done)}", done, total
            )

    def close(self) -> None:
        """Clear the line and print no more progress."""
        if self._is_shown:
            self._is_shown = False
            self._progress_line.close()


def _print_sync_reports(reports: list[SyncReport], *, dry_run: bool) -> None:
    rows = [
        [
            report.node,
            str(report.sent_files),
            format_size(report.sent_bytes),
            str(report.deleted),
            f"{report.seconds:.2f} s",
            _format_sync_state(report, dry_run=dry_run),
        ]
        for report in reports
    ]
    output.write_table(
        ["node", "files sent", "data sent", "files deleted", "duration", "state"],
        rows,
        droppable=["duration"],
    )
    for report in reports:
        for what, names in (
            ("would be sent", report.paths),
            ("would be deleted", report.paths_to_delete),
            ("kept: it was changed on the node", report.kept),
            ("overwritten: it existed on the node", report.overwritten),
        ):
            for name in names[:_PATHS_SHOWN_MAX]:
                output.print_message(f"{report.node}: {output.to_one_line(name)} {what}")
            if len(names) > _PATHS_SHOWN_MAX:
                output.print_message(f"{report.node}: more files are not listed")
        if report.error is not None:
            output.show_error(report.error, debug=False)


def _format_sync_state(report: SyncReport, *, dry_run: bool) -> str:
    if report.error is not None:
        return "unreachable" if report.error.exit_code == TransportError.exit_code else "failed"
    if report.unchanged:
        return "up to date"
    parts = ["would be sent" if dry_run else "done"]
    if report.restored:
        parts.append(f"{report.restored} restored")
    if report.kept:
        parts.append(f"{len(report.kept)} kept")
    if report.note and not dry_run:
        parts.append(report.note)
    return ", ".join(parts)


def _report_to_json(report: SyncReport) -> dict[str, Any]:
    names = ("sent_files", "sent_bytes", "deleted", "kept", "overwritten", "restored", "unchanged", "note")
    found: dict[str, Any] = {"node": report.node, **{name: getattr(report, name) for name in names}}
    found["seconds"] = round(report.seconds, 3)
    found["paths"] = report.paths
    found["paths_to_delete"] = report.paths_to_delete
    error = report.error
    found["error"] = None if error is None else {"code": error.code, "message": str(error)}
    return found
