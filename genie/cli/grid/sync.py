"""The command sync: copies a local directory to grid nodes. Implemented in grid/sync."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from genie.cli import output
from genie.cli.app import AsJson, Invocation, grid_command
from genie.cli.grid.nodes import complete_node, load_grid
from genie.cli.quantities import count_text, size_text
from genie.errors import TransportError

if TYPE_CHECKING:
    from genie.config import Settings
    from genie.grid.grid_file import GridFile
    from genie.grid.sync.syncer import Progress, SyncReport

_NAMES_SHOWN = 10


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
            autocompletion=complete_node,
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only list the files that would be sent or deleted.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Copy changed files of a directory to remote_root on the nodes.

    Files deleted here are deleted on the nodes, if a sync created them and they were not changed there.

    Excludes sync.exclude_patterns and files ignored by .gitignore.
    """
    settings, file = load_grid(invocation)
    names = list(node) if node else [each.name for each in file.nodes]
    bar = SyncBar()
    try:
        reports = asyncio.run(_sync(settings, file, folder, names, bar, dry_run=dry_run))
    finally:
        bar.close()
    if as_json:
        output.write_json([_as_object(report) for report in reports])
    else:
        _show(reports, dry_run=dry_run)
    failed = [report.error for report in reports if report.error is not None]
    if failed:
        raise typer.Exit(max(error.exit_code for error in failed))


async def _sync(
    settings: Settings, file: GridFile, folder: Path, names: list[str], bar: SyncBar, *, dry_run: bool
) -> list[SyncReport]:
    from genie.grid.metrics import GridMetrics
    from genie.grid.ssh.pool import SshPool
    from genie.grid.sync.syncer import Syncer

    state_dir = settings.paths.state_dir.expanduser()
    async with SshPool(file, ssh_config=settings.grid.ssh_config) as pool:
        syncer = Syncer(pool, file, state_dir=state_dir, metrics=GridMetrics(state_dir))
        return await syncer.sync(folder, names, progress=bar, dry_run=dry_run)


class SyncBar:
    """Total progress of all nodes, on one line of a terminal; prints nothing without a terminal."""

    def __init__(self) -> None:
        self._nodes: dict[str, Progress] = {}
        self._shown = sys.stderr.isatty()
        self._line = output.ProgressLine()

    def __call__(self, progress: Progress) -> None:
        self._nodes[progress.node] = progress
        if self._shown:
            done = sum(each.bytes for each in self._nodes.values())
            total = sum(each.bytes_total for each in self._nodes.values())
            files = sum(each.files for each in self._nodes.values())
            nodes = count_text(len(self._nodes), "node")
            self._line(f"sending to {nodes}: {count_text(files, 'file')}, {size_text(done)}", done, total)

    def close(self) -> None:
        """Clear the line and print no more progress."""
        if self._shown:
            self._shown = False
            self._line.close()


def _show(reports: list[SyncReport], *, dry_run: bool) -> None:
    rows = [
        [
            report.node,
            str(report.sent_files),
            size_text(report.sent_bytes),
            str(report.deleted),
            f"{report.seconds:.2f} s",
            _state(report, dry_run=dry_run),
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
            for name in names[:_NAMES_SHOWN]:
                output.print_message(f"{report.node}: {output.one_line(name)} {what}")
            if len(names) > _NAMES_SHOWN:
                output.print_message(f"{report.node}: more files are not listed")
        if report.error is not None:
            output.show_error(report.error, debug=False)


def _state(report: SyncReport, *, dry_run: bool) -> str:
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


def _as_object(report: SyncReport) -> dict[str, Any]:
    names = ("sent_files", "sent_bytes", "deleted", "kept", "overwritten", "restored", "unchanged", "note")
    found: dict[str, Any] = {"node": report.node, **{name: getattr(report, name) for name in names}}
    found["seconds"] = round(report.seconds, 3)
    found["paths"] = report.paths
    found["paths_to_delete"] = report.paths_to_delete
    error = report.error
    found["error"] = None if error is None else {"code": error.code, "message": str(error)}
    return found
