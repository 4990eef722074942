"""The grid's sync: a folder of this machine on the nodes.

Not for: what is compared and how it gets there (grid/sync).
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from genie.cli import output
from genie.cli.app import AsJson, Invocation, grid_command
from genie.cli.grid_node_commands import complete_node, load_grid
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
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="What is sent.")] = Path(),
    node: Annotated[
        list[str] | None,
        typer.Option(
            "--node", metavar="NAME", help="Only to this node; may be repeated.", autocompletion=complete_node
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say what would be sent and deleted.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Bring a folder to the nodes: what changed is sent, into remote_root.

    What a sync put there and is gone here is deleted there, unless it was changed on the node.

    What sync.exclude_patterns and .gitignore files name is left out.
    """
    settings, file = load_grid(invocation)
    names = list(node) if node else [each.name for each in file.nodes]
    bar = SyncBar()
    try:
        reports = asyncio.run(_synced(settings, file, folder, names, bar, dry_run=dry_run))
    finally:
        bar.close()
    if as_json:
        output.write_json([_as_object(report) for report in reports])
    else:
        _show(reports, dry_run=dry_run)
    failed = [report.error for report in reports if report.error is not None]
    if failed:
        raise typer.Exit(max(error.exit_code for error in failed))


async def _synced(
    settings: Settings, file: GridFile, folder: Path, names: list[str], bar: SyncBar, *, dry_run: bool
) -> list[SyncReport]:
    from genie.grid.metrics import GridMetrics
    from genie.grid.ssh_pool import SshPool
    from genie.grid.sync.syncer import Syncer

    state_dir = settings.paths.state_dir.expanduser()
    async with SshPool(file, ssh_config=settings.grid.ssh_config) as pool:
        syncer = Syncer(pool, file, state_dir=state_dir, metrics=GridMetrics(state_dir))
        return await syncer.sync(folder, names, progress=bar, dry_run=dry_run)


class SyncBar:
    """All nodes together, on one line of a terminal; nothing anywhere else."""

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
    output.write_table(["node", "files", "sent", "deleted", "time", "state"], rows, spare=["time"])
    for report in reports:
        for what, names in (
            ("would be sent", report.paths),
            ("would be deleted", report.gone),
            ("stays, since it was changed there", report.kept),
            ("was there already and was replaced", report.overwritten),
        ):
            for name in names[:_NAMES_SHOWN]:
                output.say(f"{report.node}: {output.one_line(name)} {what}")
            if len(names) > _NAMES_SHOWN:
                output.say(f"{report.node}: and more")
        if report.error is not None:
            output.show_error(report.error, debug=False)


def _state(report: SyncReport, *, dry_run: bool) -> str:
    if report.error is not None:
        return "unreachable" if report.error.exit_code == TransportError.exit_code else "failed"
    if report.unchanged:
        return "up to date"
    parts = ["would be sent" if dry_run else "done"]
    if report.restored:
        parts.append(f"{report.restored} put back")
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
    found["gone"] = report.gone
    error = report.error
    found["error"] = None if error is None else {"code": error.code, "message": str(error)}
    return found
