"""Tokens: who may use the cluster, and which machines may join it.

A new token goes to standard output and is shown this once; the store keeps its hash. Not for: what
tokens mean (tenancy/access.py).
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Annotated

import typer

from genie.cli import output
from genie.cli.app import AsJson, Invocation, app, command
from genie.cli.quantities import duration_text, parse_duration
from genie.errors import GenieError
from genie.model.names import parse_address

if TYPE_CHECKING:
    from genie.config import Settings
    from genie.model.messages import TokenCreated
    from genie.model.tenant import TokenRecord

tokens = typer.Typer(
    name="token",
    help="Make, list and revoke access tokens.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)
app.add_typer(tokens)

_SPARE = ("age",)
_COLUMNS = ("token", "kind", "tenant", "name", "age", "state")
_HIDDEN = ("secret_sha256",)


@command(tokens, "create", example="genie token create --name alice --ttl 30d")
def create(
    invocation: Invocation,
    *,
    join: Annotated[bool, typer.Option("--join", help="A single-use token that admits one machine.")] = False,
    name: Annotated[str, typer.Option(metavar="NAME", help="A label, such as whose it is.")] = "",
    tenant: Annotated[str, typer.Option(metavar="NAME", help="The tenant that its holder works in.")] = "",
    ttl: Annotated[str | None, typer.Option(metavar="DURATION", help="Life, such as 1h or 30d.")] = None,
    as_json: AsJson = False,
) -> None:
    """Make a token and print it. It is shown this once.

    Without --join it lets someone use the cluster: give it to them as GENIE_TOKEN.

    With --join it lets one machine join, once, within an hour unless --ttl says otherwise.
    """
    from genie.model.names import checked_name

    for option, value in (("--name", name), ("--tenant", tenant)):
        if value:
            checked_name(value, what=option)
    ttl_s = None if ttl is None else parse_duration(ttl, what="--ttl")
    created, where = asyncio.run(
        _create(invocation.load_settings(), join=join, name=name, tenant=tenant, ttl_s=ttl_s)
    )
    if as_json:
        output.write_json(
            {"token": created.token, "record": output.as_object(created.record, without=_HIDDEN)}
        )
        return
    output.write_line(created.token)
    _say_how_to_use(created, where=where)


@command(tokens, "list", example="genie token list --json")
def list_tokens(invocation: Invocation, *, as_json: AsJson = False) -> None:
    """List tokens: what they are for and whether they still open anything. Never their secrets."""
    found = asyncio.run(_list(invocation.load_settings()))
    if as_json:
        output.write_json({"tokens": [output.as_object(record, without=_HIDDEN) for record in found]})
        return
    now = time.time()
    rows = [
        (
            record.token_id,
            record.kind.value,
            record.tenant,
            record.name or "-",
            duration_text(now - record.created_at),
            _state(record, now=now),
        )
        for record in found
    ]
    output.write_table(_COLUMNS, rows, spare=_SPARE)


@command(tokens, "revoke", example="genie token revoke 4f7a2c9d01be")
def revoke(
    invocation: Invocation,
    *,
    token_ids: Annotated[
        list[str], typer.Argument(metavar="ID...", help="Ids, as 'genie token list' shows them.")
    ],
) -> None:
    """Revoke tokens. They open nothing from now on."""
    failed = asyncio.run(_revoke(invocation.load_settings(), token_ids))
    for token_id in token_ids:
        if token_id in failed:
            output.show_error(failed[token_id], debug=invocation.debug)
        else:
            output.write_line(f"{token_id}  revoked")
    if failed:
        raise typer.Exit(max(error.exit_code for error in failed.values()))


async def _create(
    settings: Settings, *, join: bool, name: str, tenant: str, ttl_s: float | None
) -> tuple[TokenCreated, str]:
    from genie.cluster.client import open_client
    from genie.model.tenant import TokenKind

    async with open_client(settings) as client:
        kind = TokenKind.JOIN if join else TokenKind.USER
        created = await client.create_token(kind, tenant=tenant, name=name, ttl_s=ttl_s)
        return created, client.where


async def _list(settings: Settings) -> list[TokenRecord]:
    from genie.cluster.client import open_client

    async with open_client(settings) as client:
        return list(await client.list_tokens())


async def _revoke(settings: Settings, token_ids: list[str]) -> dict[str, GenieError]:
    from genie.cluster.client import open_client

    failed: dict[str, GenieError] = {}
    async with open_client(settings) as client:
        for token_id in token_ids:
            try:
                await client.revoke_token(token_id)
            except GenieError as error:
                failed[token_id] = error
    return failed


def _say_how_to_use(created: TokenCreated, *, where: str) -> None:
    from genie.model.tenant import TokenKind
    from genie.runtime.credentials import is_loopback

    host, _port = parse_address(where, what="the controller's address")
    if created.record.kind is TokenKind.JOIN:
        output.say("keep it in a file of your own: (umask 077; genie token create --join > join.token)")
        output.say(f"on the other machine: genie join {where} --token-file join.token")
    else:
        output.say(f"its holder sets GENIE_TOKEN to it, and GENIE_MASTER_ADDR={where}")
    if is_loopback(host):
        output.say(f"note: {where} is this machine only; for others: genie up --bind ADDRESS")


def _state(record: TokenRecord, *, now: float) -> str:
    if record.revoked_at is not None:
        return "revoked"
    if record.used_at is not None:
        return "used"
    if record.expires_at is None:
        return "valid"
    left_s = record.expires_at - now
    return f"valid for {duration_text(left_s)}" if left_s > 0 else "expired"
