"""Commands for the grid file: nodes list, add, trust and remove; config init, check and show.

The file is parsed by grid/grid_file.py and edited by grid/grid_file_editor.py.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import pwd
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from genie.cli import output
from genie.cli.app import Invocation, JsonOption, grid_app, grid_command
from genie.cli.quantities import parse_labels, parse_number
from genie.errors import ConfigError, GenieError, HostKeyUnknownError, UsageError

if TYPE_CHECKING:
    from genie.config import Settings
    from genie.grid.grid_file import GridFile, GridNode
    from genie.grid.ssh.host_trust import HostKey

_config_app = typer.Typer(name="config", help="Create, check and show the grid file.", no_args_is_help=True)
_nodes_app = typer.Typer(
    name="nodes", help="Manage the nodes of the grid file and their host keys.", no_args_is_help=True
)
grid_app.add_typer(_nodes_app)
grid_app.add_typer(_config_app)

_FETCH_HOST_KEY_TIMEOUT_S = 10.0
_CONCURRENT_HOST_KEY_FETCHES_MAX = 20


def complete_node_name(context: typer.Context, incomplete: str) -> list[str]:
    """Complete node names. An unreadable file gives no completions; the command reports the error."""
    from genie.config import load
    from genie.grid.grid_file import read_grid_file

    try:
        settings = load({"grid.file": _get_config_option(context)})
        names = [node.name for node in read_grid_file(settings.grid.file).nodes]
    except GenieError:
        return []
    return [name for name in names if name.startswith(incomplete)]


def _get_config_option(context: typer.Context) -> str | None:
    """Return --config, given before or after the command name."""
    found: str | None = context.params.get("grid_file") or context.params.get("config")
    if found is None and context.parent is not None:
        return _get_config_option(context.parent)  # type: ignore[arg-type]  # click's context type
    return found


NodeNamesArgument = Annotated[
    list[str] | None,
    typer.Argument(metavar="NODE...", help="Node names in the grid file.", autocompletion=complete_node_name),
]
_NewNodesArgument = Annotated[
    list[str], typer.Argument(metavar="[USER@]NAME[:PORT]...", help="Hosts, or aliases in ~/.ssh/config.")
]
_LabelsOption = Annotated[
    list[str] | None,
    typer.Option("--label", metavar="KEY=VALUE", help="Label of the nodes; repeatable."),
]
_WeightOption = Annotated[
    str,
    typer.Option("--weight", metavar="NUMBER", help="Preference: above 1 is chosen sooner, below 1 later."),
]
_AllNodesOption = Annotated[bool, typer.Option("--all", help="Trust the keys of all nodes of the grid file.")]
_YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Trust the keys without confirmation.")]
_FingerprintOption = Annotated[
    str | None,
    typer.Option(
        "--fingerprint", metavar="SHA256:...", help="Trust the key only if it has this fingerprint."
    ),
]


@grid_command("list", group=_nodes_app, example="grid-cli nodes list --json")
def list_nodes(invocation: Invocation, *, as_json: JsonOption = False) -> None:
    """List the nodes of the grid file with resolved host, port and user. Does not connect."""
    settings, file = load_settings_and_grid_file(invocation)
    rows = asyncio.run(_resolve_node_rows(settings, file))
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
        droppable=("labels", "weight"),
    )


async def _resolve_node_rows(settings: Settings, file: GridFile) -> list[dict[str, Any]]:
    from genie.grid.ssh.target import KnownHostsCache, resolve_ssh_target

    trusted = KnownHostsCache()
    rows = []
    for node in file.nodes:
        row: dict[str, Any] = {"name": node.name, "weight": node.weight, "labels": dict(node.labels)}
        try:
            target = await resolve_ssh_target(node, file, settings.grid.ssh_config, trusted=trusted)
        except UsageError as error:
            row |= {"host": "", "port": None, "user": "", "host_key": error.message}
        else:
            known = "known" if target.known_host_keys else f"unknown: grid-cli nodes trust {node.name}"
            user = str(target.options.username)
            row |= {"host": target.host, "port": target.port, "user": user, "host_key": known}
        rows.append(row)
    return rows


@grid_command("add", group=_nodes_app, example="grid-cli nodes add gpu4 --label zone=a")
def add_nodes(
    invocation: Invocation,
    *,
    nodes: _NewNodesArgument,
    weight: _WeightOption = "1",
    labels: _LabelsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Add nodes to the grid file; creates the file if needed and keeps comments."""
    from genie.grid import grid_file_editor
    from genie.grid.grid_file import parse_node

    path = invocation.load_settings().grid.file
    shared = {
        "weight": parse_number(weight, what="--weight", low=0.01, high=100),
        "labels": parse_labels(labels),
    }
    made = [dataclasses.replace(parse_node(spelled), **shared) for spelled in nodes]  # type: ignore[arg-type]

    def add_to_text(text: str) -> str:
        for node in made:
            text = grid_file_editor.add_node_to_text(text, node, name=str(path))
        return text

    grid_file_editor.edit_grid_file(path, add_to_text)
    if as_json:
        output.write_json({"file": str(path), "added": [node.name for node in made]})
        return
    names = " ".join(node.name for node in made)
    output.write_line(f"{path}: added {names}")
    output.print_message(f"next: grid-cli nodes trust {names}")


@grid_command("remove", group=_nodes_app, example="grid-cli nodes remove gpu4")
def remove_nodes(
    invocation: Invocation,
    *,
    nodes: Annotated[
        list[str],
        typer.Argument(
            metavar="NODE...", help="Node names in the grid file.", autocompletion=complete_node_name
        ),
    ],
    as_json: JsonOption = False,
) -> None:
    """Remove nodes from the grid file. Their runs continue; known_hosts is not changed."""
    from genie.grid import grid_file_editor

    settings, file = load_settings_and_grid_file(invocation)
    if len(set(nodes)) > 1 and {node.name for node in file.nodes} <= set(nodes):
        raise UsageError(
            f"this would remove all nodes of {file.path}", hint="add another node first, or delete the file"
        )

    def remove_from_text(text: str) -> str:
        for name in nodes:
            text = grid_file_editor.remove_node_from_text(text, name, name=str(file.path))
        return text

    grid_file_editor.edit_grid_file(settings.grid.file, remove_from_text)
    if as_json:
        output.write_json({"file": str(file.path), "removed": nodes})
        return
    output.write_line(f"{file.path}: removed {' '.join(nodes)}")


@grid_command("trust", group=_nodes_app, example="grid-cli nodes trust gpu1")
def trust_host_keys(
    invocation: Invocation,
    *,
    nodes: NodeNamesArgument = None,
    all_nodes: _AllNodesOption = False,
    yes: _YesOption = False,
    fingerprint: _FingerprintOption = None,
    as_json: JsonOption = False,
) -> None:
    """Fetch host keys, show their fingerprints, and add them to known_hosts after confirmation."""
    settings, file = load_settings_and_grid_file(invocation)
    names = [node.name for node in file.nodes] if all_nodes else list(nodes or ())
    if all_nodes and nodes:
        raise UsageError("--all and node names are mutually exclusive", hint="give one of them")
    if not names:
        raise UsageError(
            "no nodes given", hint="name the nodes, as in: grid-cli nodes trust gpu1; or give --all"
        )
    if fingerprint is not None and len(names) != 1:
        raise UsageError("--fingerprint requires exactly one node", hint="name one node")
    chosen = [file.node(name) for name in names]
    found, errors = asyncio.run(_fetch_host_keys(settings, file, chosen))
    answers = [(key, _confirm_host_key(key, yes=yes, fingerprint=fingerprint)) for key in found]
    _add_and_print_confirmed_host_keys(settings, answers, as_json=as_json)
    for error in errors[1:]:
        output.show_error(error, debug=False)
    if errors:
        raise errors[0]
    if not all(confirmed for _, confirmed in answers):
        raise typer.Exit(1)


async def _fetch_host_keys(
    settings: Settings, file: GridFile, nodes: list[GridNode]
) -> tuple[list[HostKey], list[GenieError]]:
    from genie.grid.ssh.host_trust import fetch_host_key

    slots = asyncio.Semaphore(_CONCURRENT_HOST_KEY_FETCHES_MAX)
    limit_s = max(_FETCH_HOST_KEY_TIMEOUT_S, file.ssh.connect_timeout)

    async def fetch(node: GridNode) -> HostKey | GenieError:
        async with slots:
            try:
                return await fetch_host_key(node, file, settings.grid.ssh_config, timeout_s=limit_s)
            except GenieError as error:
                return error

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(fetch(node)) for node in nodes]
    results = [task.result() for task in tasks]
    errors = [each for each in results if isinstance(each, GenieError)]
    return [each for each in results if not isinstance(each, GenieError)], errors


def _confirm_host_key(key: HostKey, *, yes: bool, fingerprint: str | None) -> bool:
    """Return whether to trust the key. Raises if it cannot be confirmed."""
    if key.is_known and fingerprint in (None, key.fingerprint):
        return True
    output.print_message(f"{key.node}: {key.host} {key.kind} {key.fingerprint}")
    if fingerprint is not None:
        if fingerprint != key.fingerprint:
            raise HostKeyUnknownError(
                f"node {key.node}: host key has fingerprint {key.fingerprint}, expected {fingerprint}",
                hint="compare it with the output of 'ssh-keygen -lf' on the host",
            )
        return True
    if yes:
        return True
    if not sys.stdin.isatty():
        raise UsageError(
            f"node {key.node}: could not confirm the unknown host key: standard input is not a terminal",
            hint=f"verify the fingerprint, then give --fingerprint {key.fingerprint} or --yes",
        )
    return typer.confirm(f"Trust this key for {key.node}?", default=False, err=True)


def _add_and_print_confirmed_host_keys(
    settings: Settings, answers: list[tuple[HostKey, bool]], *, as_json: bool
) -> None:
    from genie.grid.health.check import HealthCache
    from genie.grid.ssh.host_trust import add_host_key_to_known_hosts

    rows = []
    for key, confirmed in answers:
        if confirmed and not key.is_known:
            add_host_key_to_known_hosts(key)
        state = "known" if key.is_known else "trusted" if confirmed else "refused"
        rows.append({"node": key.node, "host": key.host, "kind": key.kind, "fingerprint": key.fingerprint})
        rows[-1]["state"] = state
        if not as_json:
            where = f"added to {key.known_hosts_file}" if state == "trusted" else state
            output.write_line(f"{key.node}: {key.fingerprint} {where}")
    HealthCache(settings.paths.state_dir).delete()
    if as_json:
        output.write_json({"nodes": rows})


@grid_command("init", group=_config_app, example="grid-cli config init")
def init_grid_file(
    invocation: Invocation,
    *,
    path: Annotated[
        Path | None,
        typer.Argument(metavar="FILE", help="File to write (default: config/cluster_config.yaml)."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Write a commented grid file with every key and its default."""
    path = path or invocation.load_settings().grid.file
    try:
        path = path.expanduser()
        _write_sample_grid_file(path, force=force)
    except (OSError, RuntimeError, ConfigError) as error:  # RuntimeError: unknown user in ~user
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise UsageError(
            f"could not write {path}: {reason}", hint="choose another file: grid-cli config init FILE"
        ) from None
    if as_json:
        output.write_json({"file": str(path)})
        return
    output.write_line(f"{path}: written")
    output.print_message("next: replace the example nodes with yours, then run: grid-cli nodes trust --all")


def _write_sample_grid_file(path: Path, *, force: bool) -> None:
    from genie.grid.grid_file import read_sample_grid_file_text
    from genie.grid.grid_file_editor import write_grid_file

    if path.exists():
        if not path.is_file():
            raise UsageError(f"{path} is not a regular file and was not changed", hint="choose another file")
        if not force:
            raise UsageError(f"{path} already exists and was not changed", hint="use --force to overwrite it")
        write_grid_file(path, read_sample_grid_file_text())
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("x", encoding="utf-8") as file:  # does not overwrite a file that was created meanwhile
        try:
            file.write(read_sample_grid_file_text())
            file.flush()
        except OSError:
            path.unlink()
            raise


@grid_command("check", group=_config_app, example="grid-cli config check")
def check_grid_file(
    invocation: Invocation,
    *,
    path: Annotated[
        Path | None,
        typer.Argument(metavar="FILE", help="File to check (default: that of --config)."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Validate the grid file. Errors name the line."""
    if path is not None:
        invocation.grid_file = str(path)
    file = load_grid_file(invocation)
    if as_json:
        output.write_json({"file": str(file.path), "nodes": len(file.nodes), "ok": True})
        return
    nodes = "1 node" if len(file.nodes) == 1 else f"{len(file.nodes)} nodes"
    output.write_line(f"{file.path}: valid, {nodes}")


@grid_command("show", group=_config_app, example="grid-cli config show --json")
def show_grid_file(invocation: Invocation, *, as_json: JsonOption = False) -> None:
    """Print all keys with their values, including defaults."""
    file = load_grid_file(invocation)
    values: dict[str, Any] = dataclasses.asdict(file)
    values.pop("path")
    if as_json:
        output.write_json(values)
        return
    import yaml

    output.write_line(yaml.safe_dump(_tuples_to_lists(values), sort_keys=False, allow_unicode=True).rstrip())


def load_grid_file(invocation: Invocation) -> GridFile:
    """Load the settings and return the grid file."""
    return load_settings_and_grid_file(invocation)[1]


def load_settings_and_grid_file(invocation: Invocation) -> tuple[Settings, GridFile]:
    """Return the settings and the grid file."""
    from genie.grid.grid_file import read_grid_file

    settings = invocation.load_settings()
    return settings, read_grid_file(settings.grid.file)


def local_user_at_host() -> str:
    """Return USER@HOST of this process, which nodes show to other users."""
    try:
        user = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # no passwd entry, as in many containers
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"


def _tuples_to_lists(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _tuples_to_lists(each) for name, each in value.items()}
    return [_tuples_to_lists(each) for each in value] if isinstance(value, tuple) else value
