"""Quotas: what tenants may hold, hold now, and may borrow. Only the owner sets and removes them.

Not for: what a quota means (scheduler/quota.py, docs/SCHEDULING.md).
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated, Any

import typer

from genie.cli import output
from genie.cli.app import AsJson, Group, Invocation, app, command
from genie.cli.quantities import parse_amount
from genie.errors import UsageError

if TYPE_CHECKING:
    from genie.config import Settings
    from genie.model.messages import QuotasReply, QuotaView
    from genie.model.tenant import QuotaRecord

_COLUMNS = ("tenant", "own", "may borrow", "held now", "weight")
_GPUS_MAX = 1_000_000
_WEIGHT_MIN, _WEIGHT_MAX = 0.01, 1000
_ALL = "all"
_UNBOUNDED = "no bound"


class _ListsAlone(Group):
    """Without a command behind it, `genie quota` lists."""

    # Any: the parser's own context, which has another type in each version of typer.
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        is_option = bool(args) and args[0].startswith("-") and args[0] not in ctx.help_option_names
        return super().parse_args(ctx, ["list", *args] if is_option or not args else args)


quotas = typer.Typer(
    name="quota", cls=_ListsAlone, help="List, set and remove what tenants may hold.", rich_markup_mode="rich"
)
app.add_typer(quotas)


@command(quotas, "list", example="genie quota list --json")
def list_quotas(invocation: Invocation, *, as_json: AsJson = False) -> None:
    """List what tenants may hold, may borrow and hold now, in GPUs. Only the owner sees all of them."""
    reply = asyncio.run(_list(invocation.load_settings()))
    if as_json:
        output.write_json(output.as_object(reply))
        return
    if not reply.quotas:
        output.say("no tenant has a quota or holds anything")
        return
    output.write_table(_COLUMNS, [_row(view) for view in reply.quotas])
    if reply.more:
        output.say("the last ones are left out")


@command(quotas, "set", example="genie quota set lab --gpus 16 --borrow 8")
def set_quota(
    invocation: Invocation,
    *,
    tenant: Annotated[str, typer.Argument(metavar="TENANT", help="As in 'genie token create --tenant'.")],
    gpus: Annotated[
        str, typer.Option(metavar="N", help="GPUs of its own, such as 16 or 0.5; all for no bound.")
    ],
    borrow: Annotated[
        str | None, typer.Option(metavar="N", help="So many more for its preemptible jobs; all for no bound.")
    ] = None,
    weight: Annotated[str, typer.Option(metavar="W", help="Its share beside those of others.")] = "1",
) -> None:
    """Set what a tenant may hold. It takes the place of what was set before, as a whole."""
    from genie.model.names import checked_name
    from genie.model.tenant import QuotaRecord

    if borrow is not None and gpus == _ALL:
        raise UsageError("--borrow says nothing where --gpus is all", hint="leave it out, or give --gpus N")
    quota = QuotaRecord(
        tenant=checked_name(tenant, what="TENANT"),
        gpus=_bound(gpus, what="--gpus"),
        borrow_gpus=_bound(borrow or _ALL, what="--borrow"),
        weight=parse_amount(weight, what="--weight", low=_WEIGHT_MIN, high=_WEIGHT_MAX),
    )
    asyncio.run(_set(invocation.load_settings(), quota))
    output.write_line(
        f"{quota.tenant}  own {_own_text(quota)}, may borrow {_borrow_text(quota)}, weight {quota.weight:g}"
    )


@command(quotas, "remove", example="genie quota remove lab")
def remove_quota(
    invocation: Invocation,
    *,
    tenant: Annotated[str, typer.Argument(metavar="TENANT", help="As 'genie quota' shows it.")],
) -> None:
    """Remove a tenant's quota. It may hold anything from then on."""
    asyncio.run(_remove(invocation.load_settings(), tenant))
    output.write_line(f"{output.one_line(tenant)}  removed")


async def _list(settings: Settings) -> QuotasReply:
    from genie.cluster.client import open_client

    async with open_client(settings) as client:
        return await client.quotas()


async def _set(settings: Settings, quota: QuotaRecord) -> None:
    from genie.cluster.client import open_client

    async with open_client(settings) as client:
        await client.set_quota(quota)


async def _remove(settings: Settings, tenant: str) -> None:
    from genie.cluster.client import open_client

    async with open_client(settings) as client:
        await client.remove_quota(tenant)


def _bound(text: str, *, what: str) -> float | None:
    return None if text == _ALL else parse_amount(text, what=what, high=_GPUS_MAX)


def _row(view: QuotaView) -> tuple[str, ...]:
    quota = view.quota
    return (
        quota.tenant,
        _own_text(quota),
        _borrow_text(quota),
        f"{view.held_gpus:g}",
        f"{quota.weight:g}",
    )


def _own_text(quota: QuotaRecord) -> str:
    return _UNBOUNDED if quota.gpus is None else f"{quota.gpus:g}"


def _borrow_text(quota: QuotaRecord) -> str:
    if quota.gpus is None:
        return "-"
    return _UNBOUNDED if quota.borrow_gpus is None else f"{quota.borrow_gpus:g}"
