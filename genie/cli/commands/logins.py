"""Commands that store and remove access to a cluster on another machine: login, logout.

Logins are stored by runtime/logins.py; tokens are created by tokens.py.
"""

from __future__ import annotations

import asyncio
import getpass
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from genie.cli import output
from genie.cli.app import Invocation, JsonOption, app, command
from genie.errors import TokenMissingError, UsageError
from genie.model.names import address_text, parse_address, parse_endpoint

if TYPE_CHECKING:
    from genie.config import Settings
    from genie.model.messages.handshake import Welcome

_LOGIN_TIMEOUT_S = 10.0

ClusterAddressArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="[ADDRESS]", help="Cluster address, HOST[:PORT] (or --address, GENIE_MASTER_ADDR)."
    ),
]


@command(app, "login", example="genie login gpu-box")
def login(
    invocation: Invocation,
    *,
    cluster: ClusterAddressArgument = None,
    show_list: Annotated[bool, typer.Option("--list", help="List the stored logins.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Store the token of a cluster on another machine for commands and genie.init().

    Prompts for the token, or reads it from --token-file. Only a token that the cluster accepts is stored.

    The owner of the cluster creates a token with 'genie token create'.
    """
    settings = _load_settings_without_token(invocation, cluster)
    if show_list:
        _list_stored_logins(settings, as_json=as_json)
        return
    host, port = _parse_given_address(settings)
    where = address_text(host, port)
    text = invocation.read_token() or _prompt_token(where)
    welcome = asyncio.run(_verify_and_store_token(settings, host, port, text))
    if as_json:
        output.write_json({"address": where, "kind": welcome.kind, "tenant": welcome.tenant})
    else:
        output.write_line(
            f"logged in to {where} with {_format_token_kind(welcome)} of tenant {welcome.tenant}"
        )
    _print_login_precedence(settings, host, port)


@command(app, "logout", example="genie logout gpu-box")
def logout(invocation: Invocation, *, cluster: ClusterAddressArgument = None) -> None:
    """Remove the stored token of a cluster (default: that of the last login).

    The token itself stays valid until it expires or is revoked with 'genie token revoke'.
    """
    from genie.runtime import logins

    settings = _load_settings_without_token(invocation, cluster)
    state_dir = settings.paths.state_dir
    found = (
        _parse_given_address(settings) if settings.cluster.master_addr else logins.default_login(state_dir)
    )
    if found is None:
        raise UsageError("no address given, and no default login", hint=_stored_logins_hint(settings))
    host, port = found
    if not logins.remove_login(state_dir, host, port):
        raise TokenMissingError(
            f"no login stored for {address_text(host, port)}", hint=_stored_logins_hint(settings)
        )
    output.write_line(f"logged out of {address_text(host, port)}")


def _load_settings_without_token(invocation: Invocation, cluster: str | None) -> Settings:
    """Load the settings without the token of --token-file, which is to be stored."""
    if cluster is not None and invocation.address is not None:
        raise UsageError("ADDRESS and --address are mutually exclusive", hint="give one of them")
    invocation.address = cluster or invocation.address
    if cluster is not None:
        parse_address(cluster, what="ADDRESS")  # load_settings() would name --address
    return invocation.load_settings({"cluster.token": None})


def _parse_given_address(settings: Settings) -> tuple[str, int]:
    config = settings.cluster
    if config.master_addr is None:
        raise UsageError("no address given", hint="genie login HOST[:PORT]")
    return parse_endpoint(config.master_addr, what="ADDRESS", port=config.master_port)


def _prompt_token(where: str) -> str:
    if not sys.stdin.isatty():
        raise UsageError(
            "could not prompt for the token: standard input is not a terminal",
            hint="give --token-file FILE, or --token-file - for standard input",
        )
    try:
        text = getpass.getpass(f"Token for {where} (not shown): ")
    except EOFError:
        text = ""
    if not text.strip():
        raise TokenMissingError(
            "no token entered", hint="create one on the controller's machine: genie token create"
        )
    return text


async def _verify_and_store_token(settings: Settings, host: str, port: int, text: str) -> Welcome:
    from genie.runtime.credentials import log_in
    from genie.runtime.network import TcpNetwork
    from genie.supervisor.this_machine import add_local_cluster_hint

    state_dir = settings.paths.state_dir
    async with add_local_cluster_hint(host, port, state_dir=state_dir):
        return await log_in(
            host, port, text, state_dir=state_dir, network=TcpNetwork(), timeout_s=_LOGIN_TIMEOUT_S
        )


def _print_login_precedence(settings: Settings, host: str, port: int) -> None:
    """Print which token or address takes precedence over the login just stored, and vice versa."""
    from genie.runtime.credentials import LocalCluster
    from genie.runtime.logins import login_name

    if (source := settings.sources["cluster.token"]) != "default":
        output.print_message(f"note: the token of {source} takes precedence over this login")
    local = LocalCluster.read(settings.paths.state_dir)
    if local is not None and login_name(local.host, local.port) == login_name(host, port):
        here = address_text(local.host, local.port)
        output.print_message(
            f"note: for the cluster of this machine at {here}, this login takes precedence over the owner's "
            f"token; 'genie logout {here}' removes it"
        )
    elif local is not None:
        here = address_text(local.host, local.port)
        output.print_message(f"note: without --address, commands use the cluster of this machine at {here}")
    else:
        output.print_message(f"commands and genie.init() without an address use {address_text(host, port)}")


def _list_stored_logins(settings: Settings, *, as_json: bool) -> None:
    from genie.runtime import logins

    found = logins.list_logins(settings.paths.state_dir)
    if as_json:
        rows = [
            {"address": one.address, "kind": one.token and one.token.kind, "default": one.is_default}
            for one in found
        ]
        output.write_json({"logins": rows})
        return
    if not found:
        output.print_message("no logins; add one with 'genie login ADDRESS'")
        return
    output.write_table(
        ("address", "token kind", "default"),
        [
            (one.address, one.token.kind if one.token else "unreadable", "yes" if one.is_default else "-")
            for one in found
        ],
    )


def _stored_logins_hint(settings: Settings) -> str:
    from genie.runtime import logins

    names = [one.address for one in logins.list_logins(settings.paths.state_dir)]
    return f"stored logins: {', '.join(names)}" if names else "no logins are stored"


def _format_token_kind(welcome: Welcome) -> str:
    return f"{'an' if welcome.kind == 'owner' else 'a'} {welcome.kind} token"
