"""Commands that move nodes between grid and cluster: promote and demote.

The steps on each node are in grid/promotion.py.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from genie.cli import output
from genie.cli.app import Invocation, JsonOption, grid_command
from genie.cli.grid.nodes import NodeNamesArgument
from genie.errors import UsageError

if TYPE_CHECKING:
    from genie.config import Settings
    from genie.grid.grid_file import GridFile
    from genie.grid.promotion import PromotionResult

_AllNodesOption = Annotated[bool, typer.Option("--all", help="Select all nodes of the grid file.")]


@grid_command("promote", example="grid-cli promote gpu1 gpu2 --controller 10.0.0.5", with_cluster=True)
def promote(
    invocation: Invocation,
    *,
    names: NodeNamesArgument = None,
    every: _AllNodesOption = False,
    controller: Annotated[
        str | None,
        typer.Option(metavar="HOST[:PORT]", help="Address of the controller as seen from the nodes."),
    ] = None,
    python: Annotated[
        str | None,
        typer.Option(metavar="PROGRAM", help="Python 3.11 or newer on the nodes (default: searched)."),
    ] = None,
    package: Annotated[
        list[str] | None,
        typer.Option(
            metavar="REQUIREMENT",
            help="Additional package to install on the nodes, such as torch; repeatable.",
        ),
    ] = None,
    wheels: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Install from the wheels in DIR, for nodes without internet access."
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Turn grid nodes into cluster nodes: install Genie, join, and wait until they are listed.

    Uses the cluster of 'genie status'; requires the owner token.
    """
    from genie.grid.setup import validate_packages

    if wheels is not None and not wheels.is_dir():
        raise UsageError(
            f"--wheels {str(wheels)!r} is not a directory", hint="give a directory with .whl files"
        )
    packages = validate_packages(package or ())
    settings = invocation.load_settings()
    chosen = _load_grid_file_and_node_names(settings, names, every=every)
    options = {"controller": controller, "python": python, "packages": packages, "wheels": wheels}
    _print_results_and_exit(
        asyncio.run(_promote_or_demote(settings, chosen, options, is_promotion=True)), as_json=as_json
    )


@grid_command("demote", example="grid-cli demote gpu1", with_cluster=True)
def demote(
    invocation: Invocation,
    *,
    names: NodeNamesArgument = None,
    every: _AllNodesOption = False,
    force: Annotated[
        bool, typer.Option("--force", help="Demote nodes with running jobs too; the jobs are terminated.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Turn cluster nodes back into grid nodes: stop the agent, leave the cluster, uninstall Genie."""
    settings = invocation.load_settings()
    chosen = _load_grid_file_and_node_names(settings, names, every=every)
    _print_results_and_exit(
        asyncio.run(_promote_or_demote(settings, chosen, {"force": force}, is_promotion=False)),
        as_json=as_json,
    )


def _load_grid_file_and_node_names(
    settings: Settings, names: list[str] | None, *, every: bool
) -> tuple[GridFile, list[str]]:
    from genie.grid.grid_file import read_grid_file

    file = read_grid_file(settings.grid.file)
    if every == bool(names):
        raise UsageError("give either node names or --all", hint=f"{file.path} has {len(file.nodes)} nodes")
    return file, [node.name for node in file.nodes] if every else [
        file.node(name).name for name in names or ()
    ]


async def _promote_or_demote(
    settings: Settings, chosen: tuple[GridFile, list[str]], options: Mapping[str, Any], *, is_promotion: bool
) -> list[PromotionResult]:
    from genie.cluster.client import open_client
    from genie.grid.promotion import NodePromoter
    from genie.grid.ssh.pool import SshPool

    file, names = chosen
    async with open_client(settings) as client, SshPool(file, ssh_config=settings.grid.ssh_config) as pool:
        where = options.get("controller") or (
            _validate_not_loopback(client.where) if is_promotion else client.where
        )
        moving = NodePromoter(
            pool, file, client, on_progress=_print_node_message, **{**options, "controller": where}
        )
        return await (moving.promote(names) if is_promotion else moving.demote(names))


def _validate_not_loopback(where: str) -> str:
    from genie.model.names import is_loopback, parse_address

    if is_loopback(parse_address(where, what="controller")[0]):
        raise UsageError(
            f"the address of the cluster, {where}, is not reachable from other machines",
            hint="start it with: genie up --bind ADDRESS; or give its address with --controller",
        )
    return where


def _print_node_message(node: str, text: str) -> None:
    output.print_message_lines(f"{node}: {text}")


def _print_results_and_exit(moved: list[PromotionResult], *, as_json: bool) -> None:
    if as_json:
        output.write_json({"nodes": [dataclasses.asdict(each) for each in moved]})
    else:
        output.write_table(("node", "outcome", "error"), [(m.node, m.outcome, m.error or "-") for m in moved])
    raise typer.Exit(max(each.exit_code for each in moved))
