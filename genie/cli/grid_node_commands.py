"""The grid's nodes: nodes list, add, trust and remove; config check and show.

Not for: reading the grid's file (grid/grid_file.py) or editing it (grid/node_list.py).
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import pwd
import socket
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from genie.cli import output
from genie.cli.app import AsJson, Invocation, grid, grid_command
from genie.cli.quantities import parse_amount, parse_pairs
from genie.errors import GenieError, HostKeyUnknownError, UsageError

if TYPE_CHECKING:
    from genie.config import Settings
    from genie.grid.grid_file import GridFile, GridNode
    from genie.grid.host_trust import HostKey

_config = typer.Typer(name="config", help="The grid's file.", no_args_is_help=True)
_nodes = typer.Typer(
    name="nodes", help="The nodes in the grid's file, and trust in them.", no_args_is_help=True
)
grid.add_typer(_nodes)
grid.add_typer(_config)

_TRUST_S = 10.0
_TRUST_AT_ONCE = 20


def complete_node(context: typer.Context, incomplete: str) -> list[str]:
    """Names for the shell. A file that cannot be read completes to nothing: the command will say why."""
    from genie.config import load
    from genie.grid.grid_file import read_grid_file

    try:
        settings = load({"grid.file": _given_file(context)})
        names = [node.name for node in read_grid_file(settings.grid.file).nodes]
    except GenieError:
        return []
    return [name for name in names if name.startswith(incomplete)]


def _given_file(context: typer.Context) -> str | None:
    """--config, which may stand behind the command's name or before it."""
    found: str | None = context.params.get("grid_file") or context.params.get("config")
    if found is None and context.parent is not None:
        return _given_file(context.parent)  # type: ignore[arg-type]  # click's own type of it
    return found


NodeNames = Annotated[
    list[str] | None,
    typer.Argument(metavar="NODE...", help="Names in the grid's file.", autocompletion=complete_node),
]
_NewNodes = Annotated[list[str], typer.Argument(metavar="[USER@]NAME[:PORT]", help="Hosts or aliases.")]
_Labels = Annotated[
    list[str] | None,
    typer.Option("--label", metavar="KEY=VALUE", help="A label; may be given more than once."),
]
_Weight = Annotated[
    str, typer.Option("--weight", metavar="NUMBER", help="2 makes the node chosen sooner, 0.5 later.")
]
_All = Annotated[bool, typer.Option("--all", help="Every node of the grid's file.")]
_Yes = Annotated[bool, typer.Option("--yes", "-y", help="Trust what is shown, without asking.")]
_Fingerprint = Annotated[
    str | None,
    typer.Option("--fingerprint", metavar="SHA256:...", help="Trust the key if it has this fingerprint."),
]


@grid_command("list", group=_nodes, example="grid-cli nodes list --json")
def list_nodes(invocation: Invocation, *, as_json: AsJson = False) -> None:
    """Show the nodes of the grid's file and where ~/.ssh/config leads for each. Connects to none."""
    settings, file = load_grid(invocation)
    rows = asyncio.run(_resolved(settings, file))
    if as_json:
        output.write_json({"file": str(file.path), "nodes": rows})
        return
    output.write_table(
        ("node", "host", "port", "user", "weight", "labels", "host key"),
        [
            (
                row["name"],
                row["host"],
                str(row["port"] or ""),
                row["user"],
                f"{row['weight']:g}",
                ", ".join(f"{key}={value}" for key, value in row["labels"].items()) or "-",
                row["host_key"],
            )
            for row in rows
        ],
        spare=("labels", "weight"),
    )


async def _resolved(settings: Settings, file: GridFile) -> list[dict[str, Any]]:
    from genie.grid.ssh_target import KnownHosts, resolve

    trusted = KnownHosts()
    rows = []
    for node in file.nodes:
        row: dict[str, Any] = {"name": node.name, "weight": node.weight, "labels": dict(node.labels)}
        try:
            target = await resolve(node, file, settings.grid.ssh_config, trusted=trusted)
        except UsageError as error:
            row |= {"host": "", "port": None, "user": "", "host_key": error.message}
        else:
            known = "known" if target.known_keys else f"unknown: grid-cli nodes trust {node.name}"
            user = str(target.options.username)
            row |= {"host": target.host, "port": target.port, "user": user, "host_key": known}
        rows.append(row)
    return rows


@grid_command("add", group=_nodes, example="grid-cli nodes add gpu4 --label zone=a")
def add(
    invocation: Invocation,
    *,
    nodes: _NewNodes,
    weight: _Weight = "1",
    labels: _Labels = None,
    as_json: AsJson = False,
) -> None:
    """Add nodes to the grid's file, and write the file if there is none. Comments in it stay."""
    from genie.grid import node_list
    from genie.grid.grid_file import parse_node
    from genie.model.names import checked_labels

    path = invocation.load_settings().grid.file
    shared = {
        "weight": parse_amount(weight, what="--weight", low=0.01, high=100),
        "labels": checked_labels(parse_pairs(labels, what="--label"), what="--label"),
    }
    made = [dataclasses.replace(parse_node(spelled), **shared) for spelled in nodes]  # type: ignore[arg-type]

    def added(text: str) -> str:
        for node in made:
            text = node_list.add(text, node, name=str(path))
        return text

    node_list.edit(path, added)
    if as_json:
        output.write_json({"file": str(path), "added": [node.name for node in made]})
        return
    names = " ".join(node.name for node in made)
    output.write_line(f"{path}: added {names}")
    output.say(f"next: grid-cli nodes trust {names}")


@grid_command("remove", group=_nodes, example="grid-cli nodes remove gpu4")
def remove(
    invocation: Invocation,
    *,
    nodes: Annotated[list[str], typer.Argument(metavar="NODE...", autocompletion=complete_node)],
    as_json: AsJson = False,
) -> None:
    """Take nodes out of the grid's file. What runs there goes on; known_hosts keeps their keys."""
    from genie.grid import node_list

    settings, file = load_grid(invocation)

    def left(text: str) -> str:
        for name in nodes:
            text = node_list.remove(text, name, name=str(file.path))
        return text

    node_list.edit(settings.grid.file, left)
    if as_json:
        output.write_json({"file": str(file.path), "removed": nodes})
        return
    output.write_line(f"{file.path}: removed {' '.join(nodes)}")


@grid_command("trust", group=_nodes, example="grid-cli nodes trust gpu1")
def trust(
    invocation: Invocation,
    *,
    nodes: NodeNames = None,
    all_nodes: _All = False,
    yes: _Yes = False,
    fingerprint: _Fingerprint = None,
    as_json: AsJson = False,
) -> None:
    """Fetch the host keys of nodes, show their fingerprints, and add them to known_hosts when you agree."""
    settings, file = load_grid(invocation)
    names = [node.name for node in file.nodes] if all_nodes else list(nodes or ())
    if all_nodes and nodes:
        raise UsageError("--all and names of nodes exclude each other", hint="take one of them")
    if not names:
        raise UsageError("name the nodes, or give --all", hint="grid-cli nodes trust gpu1")
    if fingerprint is not None and len(names) != 1:
        raise UsageError("--fingerprint is for one node", hint="name one node")
    chosen = [file.node(name) for name in names]
    found, errors = asyncio.run(_fetch_keys(settings, file, chosen))
    answers = [(key, _agreed(key, yes=yes, fingerprint=fingerprint)) for key in found]
    _add_keys(settings, answers, as_json=as_json)
    for error in errors[1:]:
        output.show_error(error, debug=False)
    if errors:
        raise errors[0]
    if not all(agreed for _, agreed in answers):
        raise typer.Exit(1)


async def _fetch_keys(
    settings: Settings, file: GridFile, nodes: list[GridNode]
) -> tuple[list[HostKey], list[GenieError]]:
    from genie.grid.host_trust import fetch_host_key

    places = asyncio.Semaphore(_TRUST_AT_ONCE)
    limit_s = max(_TRUST_S, file.ssh.connect_timeout)

    async def fetched(node: GridNode) -> HostKey | GenieError:
        async with places:
            try:
                return await fetch_host_key(node, file, settings.grid.ssh_config, timeout_s=limit_s)
            except GenieError as error:
                return error

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(fetched(node)) for node in nodes]
    results = [task.result() for task in tasks]
    errors = [each for each in results if isinstance(each, GenieError)]
    return [each for each in results if not isinstance(each, GenieError)], errors


def _agreed(key: HostKey, *, yes: bool, fingerprint: str | None) -> bool:
    """Whether the key is to be trusted; raises where nobody can say."""
    if key.known and fingerprint in (None, key.fingerprint):
        return True
    output.say(f"{key.node}: {key.host} {key.kind} {key.fingerprint}")
    if fingerprint is not None:
        if fingerprint != key.fingerprint:
            raise HostKeyUnknownError(
                f"node {key.node}: its key has the fingerprint {key.fingerprint}, not {fingerprint}",
                hint="compare it with what 'ssh-keygen -lf' says on the host itself",
            )
        return True
    if yes:
        return True
    if not sys.stdin.isatty():
        raise UsageError(
            f"node {key.node}: nobody can be asked whether its key is right",
            hint=f"compare it, then give --fingerprint {key.fingerprint} or --yes",
        )
    return typer.confirm(f"Is this the key of {key.node}?", default=False, err=True)


def _add_keys(settings: Settings, answers: list[tuple[HostKey, bool]], *, as_json: bool) -> None:
    from genie.grid.health_check import HealthCache
    from genie.grid.host_trust import add_host_key

    rows = []
    for key, agreed in answers:
        if agreed and not key.known:
            add_host_key(key)
        state = "known" if key.known else "trusted" if agreed else "refused"
        rows.append({"node": key.node, "host": key.host, "kind": key.kind, "fingerprint": key.fingerprint})
        rows[-1]["state"] = state
        if not as_json:
            where = f"added to {key.known_hosts}" if state == "trusted" else state
            output.write_line(f"{key.node}: {key.fingerprint} {where}")
    HealthCache(settings.paths.state_dir).forget()
    if as_json:
        output.write_json({"nodes": rows})


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
    return load_grid(invocation)[1]


def load_grid(invocation: Invocation) -> tuple[Settings, GridFile]:
    """The same, with the settings that it was found by."""
    from genie.grid.grid_file import read_grid_file

    settings = invocation.load_settings()
    return settings, read_grid_file(settings.grid.file)


def who_asks() -> str:
    """For nodes to tell others who look: this user, on this machine."""
    try:
        user = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # in a container, often nobody has written down who that is
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, tuple) else value
