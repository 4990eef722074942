"""From the grid to the cluster and back: promote and demote.

Not for: what that takes on a node (grid/promotion.py).
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from genie.cli import output
from genie.cli.app import AsJson, Invocation, grid_command
from genie.cli.grid_node_commands import NodeNames
from genie.errors import UsageError

if TYPE_CHECKING:
    from genie.config import Settings
    from genie.grid.grid_file import GridFile
    from genie.grid.promotion import Moved

_All = Annotated[bool, typer.Option("--all", help="Every node of the grid's file.")]


@grid_command("promote", example="grid-cli promote gpu1 gpu2 --controller 10.0.0.5", with_cluster=True)
def promote(
    invocation: Invocation,
    *,
    names: NodeNames = None,
    every: _All = False,
    controller: Annotated[
        str | None,
        typer.Option(metavar="HOST[:PORT]", help="The cluster's controller, as the nodes reach it."),
    ] = None,
    python: Annotated[
        str | None,
        typer.Option(metavar="PROGRAM", help="Python 3.11 or newer on the nodes; else looked for."),
    ] = None,
    package: Annotated[
        list[str] | None,
        typer.Option(metavar="REQUIREMENT", help="Install this beside Genie, such as torch; repeatable."),
    ] = None,
    wheels: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Wheels to send and install from, for nodes without an index."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Turn SSH nodes into nodes of the cluster: install Genie there, join, and wait until they are seen.

    The cluster is the one that 'genie status' shows here; an owner's token is needed.
    """
    from genie.grid.setup import checked_packages

    if wheels is not None and not wheels.is_dir():
        raise UsageError(f"--wheels {str(wheels)!r} is not a folder", hint="give one that holds .whl files")
    packages = checked_packages(package or ())
    settings = invocation.load_settings()
    chosen = _chosen(settings, names, every=every)
    options = {"controller": controller, "python": python, "packages": packages, "wheels": wheels}
    _report(asyncio.run(_move(settings, chosen, options, forward=True)), as_json=as_json)


@grid_command("demote", example="grid-cli demote gpu1", with_cluster=True)
def demote(
    invocation: Invocation,
    *,
    names: NodeNames = None,
    every: _All = False,
    force: Annotated[bool, typer.Option("--force", help="Also where jobs run; they end.")] = False,
    as_json: AsJson = False,
) -> None:
    """Turn nodes of the cluster back into SSH nodes: stop the agent, leave, remove what was installed."""
    settings = invocation.load_settings()
    chosen = _chosen(settings, names, every=every)
    _report(asyncio.run(_move(settings, chosen, {"force": force}, forward=False)), as_json=as_json)


def _chosen(settings: Settings, names: list[str] | None, *, every: bool) -> tuple[GridFile, list[str]]:
    from genie.grid.grid_file import read_grid_file

    file = read_grid_file(settings.grid.file)
    if every == bool(names):
        raise UsageError("name the nodes, or give --all", hint=f"there are {len(file.nodes)} in {file.path}")
    return file, [node.name for node in file.nodes] if every else [
        file.node(name).name for name in names or ()
    ]


async def _move(
    settings: Settings, chosen: tuple[GridFile, list[str]], options: Mapping[str, Any], *, forward: bool
) -> list[Moved]:
    from genie.cluster.client import open_client
    from genie.grid.promotion import Promotion
    from genie.grid.ssh_pool import SshPool

    file, names = chosen
    async with open_client(settings) as client, SshPool(file, ssh_config=settings.grid.ssh_config) as pool:
        where = options.get("controller") or (_reachable(client.where) if forward else client.where)
        moving = Promotion(pool, file, client, say=_say, **{**options, "controller": where})
        return await (moving.promote(names) if forward else moving.demote(names))


def _reachable(where: str) -> str:
    from genie.model.names import parse_address
    from genie.runtime.credentials import is_loopback

    if is_loopback(parse_address(where, what="controller")[0]):
        raise UsageError(
            f"the cluster is known here as {where}, which other machines cannot reach",
            hint="start it with 'genie up --bind ADDRESS', or name its address with --controller",
        )
    return where


def _say(node: str, text: str) -> None:
    output.say_lines(f"{node}: {text}")


def _report(moved: list[Moved], *, as_json: bool) -> None:
    if as_json:
        output.write_json({"nodes": [dataclasses.asdict(each) for each in moved]})
    else:
        output.write_table(("node", "outcome", "error"), [(m.node, m.outcome, m.error or "-") for m in moved])
    raise typer.Exit(max(each.exit_code for each in moved))
