"""Commands for access tokens: token create, list and revoke.

A new token is printed once, to standard output; the store keeps only its hash. Tokens are checked by
tenancy/access.py.
"""

from __future__ import annotations

import asyncio
import time
from datetime import datetime
from typing import TYPE_CHECKING, Annotated

import typer

from genie.cli import output
from genie.cli.app import Invocation, JsonOption, app, command
from genie.cli.quantities import format_duration, parse_duration
from genie.cli.reply_age import open_client_and_report_age
from genie.errors import GenieError, UsageError
from genie.model.names import parse_address

if TYPE_CHECKING:
    from genie.config import Settings
    from genie.model.messages import TokenCreated
    from genie.model.tenant import TokenKind, TokenRecord

tokens_app = typer.Typer(
    name="token",
    help="Create, list and revoke access tokens.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)
app.add_typer(tokens_app)

_TOKEN_COLUMNS_DROPPED_IF_NARROW = ("age",)
_TOKEN_COLUMNS = ("token", "kind", "tenant", "name", "age", "state")
_SECRET_RECORD_FIELDS = ("secret_sha256",)


@command(tokens_app, "create", example="genie token create --name alice --ttl 30d")
def create(
    invocation: Invocation,
    *,
    join: Annotated[
        bool, typer.Option("--join", help="Create a join token: single use, admits one machine.")
    ] = False,
    server: Annotated[
        bool,
        typer.Option(
            "--server", help="Create a server token: single use, admits one server (needs --store etcd)."
        ),
    ] = False,
    name: Annotated[
        str | None, typer.Option(metavar="NAME", help="Name of the token, such as its user.")
    ] = None,
    tenant: Annotated[
        str | None, typer.Option(metavar="NAME", help="Tenant of the token (default: the tenant 'default').")
    ] = None,
    ttl: Annotated[
        str | None,
        typer.Option(
            metavar="DURATION",
            help="Lifetime, such as 1h or 30d; a plain number is in seconds (default: 1h for join tokens, "
            "15m for server tokens, else unlimited).",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Create a token and print it. It cannot be shown again.

    Creates a user token for 'genie login', with --join a join token for 'genie join', or with --server a
    server token for 'genie join --server', which hands over the CA of the cluster: keep it secret.
    """
    from genie.model.names import validate_name

    if join and server:
        raise UsageError("--join and --server are mutually exclusive", hint="give one of them")
    for option, value in (("--name", name), ("--tenant", tenant)):
        if value is not None:
            validate_name(value, what=option)
    ttl_s = None if ttl is None else parse_duration(ttl, what="--ttl")
    created, where = asyncio.run(
        _create_token_and_get_address(
            invocation.load_settings(),
            kind=_token_kind(join=join, server=server),
            name=name or "",
            tenant=tenant or "",
            ttl_s=ttl_s,
        )
    )
    if as_json:
        record = output.struct_to_json(created.record, without=_SECRET_RECORD_FIELDS)
        output.write_json({"token": created.token, "record": record})
        return
    output.write_line(created.token)
    output.print_message(_format_expiry(created.record))
    _print_token_usage(created, where=where)


@command(tokens_app, "list", example="genie token list --json")
def list_tokens(invocation: Invocation, *, as_json: JsonOption = False) -> None:
    """List tokens with kind, tenant and state. Secrets are not shown."""
    found, age_s = asyncio.run(_fetch_tokens_and_age_s(invocation.load_settings()))
    if as_json:
        records = [output.struct_to_json(record, without=_SECRET_RECORD_FIELDS) for record in found]
        output.write_json({"tokens": records, "age_s": age_s})
        return
    now = time.time()
    rows = [
        (
            record.token_id,
            record.kind.value,
            record.tenant,
            record.name or "-",
            format_duration(now - record.created_at),
            _token_state(record, now=now),
        )
        for record in found
    ]
    output.write_table(_TOKEN_COLUMNS, rows, droppable=_TOKEN_COLUMNS_DROPPED_IF_NARROW)


@command(tokens_app, "revoke", example="genie token revoke 4f7a2c9d01be")
def revoke(
    invocation: Invocation,
    *,
    token_ids: Annotated[
        list[str], typer.Argument(metavar="ID...", help="Token IDs, as listed by 'genie token list'.")
    ],
) -> None:
    """Revoke tokens. They are rejected from now on."""
    failed = asyncio.run(_revoke_tokens_and_get_errors(invocation.load_settings(), token_ids))
    for token_id in token_ids:
        if token_id in failed:
            output.show_error(failed[token_id], debug=invocation.debug)
        else:
            output.write_line(f"{token_id}: revoked")
    if failed:
        raise typer.Exit(max(error.exit_code for error in failed.values()))


def _token_kind(*, join: bool, server: bool) -> TokenKind:
    from genie.model.tenant import TokenKind

    if server:
        return TokenKind.SERVER_JOIN
    return TokenKind.JOIN if join else TokenKind.USER


async def _create_token_and_get_address(
    settings: Settings, *, kind: TokenKind, name: str, tenant: str, ttl_s: float | None
) -> tuple[TokenCreated, str]:
    from genie.cluster.client import open_client

    async with open_client(settings) as client:
        created = await client.create_token(kind, tenant=tenant, name=name, ttl_s=ttl_s)
        return created, client.where


async def _fetch_tokens_and_age_s(settings: Settings) -> tuple[list[TokenRecord], float]:
    async with open_client_and_report_age(settings) as client:
        return list(await client.list_tokens()), client.reply_age_s


async def _revoke_tokens_and_get_errors(settings: Settings, token_ids: list[str]) -> dict[str, GenieError]:
    from genie.cluster.client import open_client

    failed: dict[str, GenieError] = {}
    async with open_client(settings) as client:
        for token_id in token_ids:
            try:
                await client.revoke_token(token_id)
            except GenieError as error:
                failed[token_id] = error
    return failed


def _print_token_usage(created: TokenCreated, *, where: str) -> None:
    from genie.model.names import is_loopback
    from genie.model.tenant import TokenKind

    host, _port = parse_address(where, what="the controller's address")
    if created.record.kind is TokenKind.JOIN:
        output.print_message(
            "to store a join token in a private file: (umask 077; genie token create --join > join.token)"
        )
        output.print_message(f"on the other machine: genie join {where} --token-file join.token")
    elif created.record.kind is TokenKind.SERVER_JOIN:
        output.print_message(
            "to store a server token in a private file: "
            "(umask 077; genie token create --server > server.token)"
        )
        output.print_message(
            f"on the other machine: genie join --server {where} --bind ADDRESS --token-file server.token"
        )
    else:
        output.print_message(
            f"on the user's machine: genie login {where} (paste the token), or set GENIE_TOKEN to it"
        )
    if is_loopback(host):
        output.print_message(
            f"note: {where} is reachable only from this machine; for others: genie up --bind ADDRESS"
        )


def _format_expiry(record: TokenRecord) -> str:
    if record.expires_at is None:
        return f"token {record.token_id} does not expire"
    at = datetime.fromtimestamp(record.expires_at).astimezone().isoformat(sep=" ", timespec="seconds")
    return (
        f"token {record.token_id} expires in {format_duration(record.expires_at - record.created_at)} ({at})"
    )


def _token_state(record: TokenRecord, *, now: float) -> str:
    if record.revoked_at is not None:
        return "revoked"
    if record.used_at is not None:
        return "used"
    if record.expires_at is None:
        return "valid"
    left_s = record.expires_at - now
    return f"valid for {format_duration(left_s)}" if left_s > 0 else "expired"
