"""The grid's nodes: config check and show.

Not for: reading the grid's file (grid/grid_file.py); here that is only shown.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import typer

from genie.cli import output
from genie.cli.app import AsJson, Invocation, grid, grid_command

if TYPE_CHECKING:
    from genie.grid.grid_file import GridFile

_config = typer.Typer(name="config", help="The grid's file.", no_args_is_help=True)
grid.add_typer(_config)


@grid_command("check", group=_config, example="grid-cli config check")
def check(invocation: Invocation, *, as_json: AsJson = False) -> None:
    """Read the grid's file and say what is wrong with it, with the line."""
    file = read_file(invocation)
    if as_json:
        output.write_json({"file": str(file.path), "nodes": len(file.nodes), "ok": True})
        return
    nodes = "1 node" if len(file.nodes) == 1 else f"{len(file.nodes)} nodes"
    output.write_line(f"{file.path} is right: {nodes}")


@grid_command("show", group=_config, example="grid-cli config show --json")
def show(invocation: Invocation, *, as_json: AsJson = False) -> None:
    """Show every key with its value, defaults included."""
    file = read_file(invocation)
    values: dict[str, Any] = dataclasses.asdict(file)
    values.pop("path")
    if as_json:
        output.write_json(values)
        return
    import yaml

    output.write_line(yaml.safe_dump(_plain(values), sort_keys=False, allow_unicode=True).rstrip())


def read_file(invocation: Invocation) -> GridFile:
    """The grid's file of this command; starts logging."""
    from genie.grid.grid_file import read_grid_file

    return read_grid_file(invocation.load_settings().grid.file)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, tuple) else value
