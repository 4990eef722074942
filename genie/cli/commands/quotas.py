"""Commands for quotas: quota list, set and remove. Only the owner sets and removes quotas.

The meaning of a quota is in scheduler/quota.py and docs/SCHEDULING.md.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from genie.cli import output
from genie.cli.app import Invocation, JsonOption, app, command
from genie.cli.quantities import parse_number
from genie.cli.reply_age import open_client_and_report_age
from genie.errors import UsageError
from genie.model.limits import QUOTA_GPUS_MAX, WEIGHT_MAX, WEIGHT_MIN

if TYPE_CHECKING:
    from genie.config import Settings
    from genie.model.messages import QuotasReply, QuotaView
    from genie.model.tenant import QuotaRecord

_QUOTA_COLUMNS = ("tenant", "gpu quota", "borrow limit", "gpus in use", "weight")
_UNLIMITED_OPTION_VALUE = "all"
_UNLIMITED_TEXT = "unlimited"


class _ListByDefaultGroup(TyperGroup):
    """Runs `list` when no subcommand is given."""

    # Any: the types of the parser differ between versions of typer.
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        is_option = bool(args) and args[0].startswith("-") and args[0] not in ctx.help_option_names
        return super().parse_args(ctx, ["list", *args] if is_option or not args else args)


quotas_app = typer.Typer(
    name="quota",
    cls=_ListByDefaultGroup,
    help="List, set and remove GPU quotas of tenants.",
    rich_markup_mode="rich",
)
app.add_typer(quotas_app)


@command(quotas_app, "list", example="genie quota list --json")
def list_quotas(invocation: Invocation, *, as_json: JsonOption = False) -> None:
    """List quota, borrow limit and usage per tenant, in GPUs. Only the owner sees all tenants."""
    reply = asyncio.run(_fetch_quotas(invocation.load_settings()))
    if as_json:
        output.write_json(output.struct_to_json(reply))
        return
    if not reply.quotas:
        output.print_message("no quotas are set and no GPUs are in use")
        return
    output.write_table(_QUOTA_COLUMNS, [_quota_row(view) for view in reply.quotas])
    if reply.more:
        output.print_message("the list is truncated")


@command(quotas_app, "set", example="genie quota set lab --gpus 16 --borrow 8")
def set_quota(
    invocation: Invocation,
    *,
    tenant: Annotated[
        str, typer.Argument(metavar="TENANT", help="Tenant, as in 'genie token create --tenant'.")
    ],
    gpus: Annotated[
        str, typer.Option(metavar="N", help="Quota in GPUs, such as 16 or 0.5; all means unlimited.")
    ],
    borrow: Annotated[
        str | None,
        typer.Option(
            metavar="N", help="Additional GPUs for preemptible jobs; all means unlimited (default: all)."
        ),
    ] = None,
    weight: Annotated[str, typer.Option(metavar="W", help="Fair-share weight.")] = "1",
) -> None:
    """Set the quota of a tenant. Replaces all earlier values, including borrow limit and weight."""
    from genie.model.names import validate_name
    from genie.model.tenant import QuotaRecord

    if borrow is not None and gpus == _UNLIMITED_OPTION_VALUE:
        raise UsageError("--borrow has no effect with --gpus all", hint="remove --borrow, or give --gpus N")
    quota = QuotaRecord(
        tenant=validate_name(tenant, what="TENANT"),
        gpus=_parse_gpu_limit(gpus, what="--gpus"),
        borrow_gpus=_parse_gpu_limit(borrow or _UNLIMITED_OPTION_VALUE, what="--borrow"),
        weight=parse_number(weight, what="--weight", low=WEIGHT_MIN, high=WEIGHT_MAX),
    )
    asyncio.run(_send_quota_to_controller(invocation.load_settings(), quota))
    output.write_line(
        f"{quota.tenant}: quota {_gpu_quota_text(quota)}, borrow limit {_borrow_limit_text(quota)}, "
        f"weight {quota.weight:g}"
    )


@command(quotas_app, "remove", example="genie quota remove lab")
def remove_quota(
    invocation: Invocation,
    *,
    tenant: Annotated[str, typer.Argument(metavar="TENANT", help="Tenant, as listed by 'genie quota'.")],
) -> None:
    """Remove the quota of a tenant; its usage is then unlimited."""
    asyncio.run(_request_quota_removal(invocation.load_settings(), tenant))
    output.write_line(f"{output.to_one_line(tenant)}: quota removed")


async def _fetch_quotas(settings: Settings) -> QuotasReply:
    async with open_client_and_report_age(settings) as client:
        return await client.quotas()


async def _send_quota_to_controller(settings: Settings, quota: QuotaRecord) -> None:
    from genie.cluster.client import open_client

    async with open_client(settings) as client:
        await client.set_quota(quota)


async def _request_quota_removal(settings: Settings, tenant: str) -> None:
    from genie.cluster.client import open_client

    async with open_client(settings) as client:
        await client.remove_quota(tenant)


def _parse_gpu_limit(text: str, *, what: str) -> float | None:
    if text == _UNLIMITED_OPTION_VALUE:
        return None
    try:
        return parse_number(text, what=what, high=QUOTA_GPUS_MAX)
    except UsageError as error:
        raise UsageError(
            error.message, hint=f"{error.hint}, or '{_UNLIMITED_OPTION_VALUE}' for no limit"
        ) from None


def _quota_row(view: QuotaView) -> tuple[str, ...]:
    quota = view.quota
    return (
        quota.tenant,
        _gpu_quota_text(quota),
        _borrow_limit_text(quota),
        f"{view.held_gpus:g}",
        f"{quota.weight:g}",
    )


def _gpu_quota_text(quota: QuotaRecord) -> str:
    return _UNLIMITED_TEXT if quota.gpus is None else f"{quota.gpus:g}"


def _borrow_limit_text(quota: QuotaRecord) -> str:
    if quota.gpus is None:
        return "-"
    return _UNLIMITED_TEXT if quota.borrow_gpus is None else f"{quota.borrow_gpus:g}"
