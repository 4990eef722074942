"""Quotas of tenants and what tenants hold now: the table, and the requests about it.

Enforcement is in scheduler/quota.py, permissions are in tenancy/access.py.
"""

from __future__ import annotations

from collections.abc import Callable

from genie.controller.checks import check_quota
from genie.controller.connection import Connection, Handlers
from genie.controller.ledger import Ledger, LedgerTables, Transaction
from genie.controller.requests.reply_size import truncate_to_reply
from genie.errors import QuotaNotFoundError, UsageError
from genie.model.messages import Done, ListQuotas, QuotasReply, QuotaView, RemoveQuota, SetQuota
from genie.model.tenant import Identity, QuotaRecord, TokenKind
from genie.scheduler.quota import Quota, Quotas, gpu_limit_amounts
from genie.scheduler.request import WHOLE_GPU_MILLI

QUOTAS_MAX = 2000


class QuotaTable:
    """Reads and writes quotas. The planner follows changes through the ledger."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    async def set_quota(self, quota: QuotaRecord) -> None:
        """Replace the quota of a tenant. Running jobs beyond it continue until their GPUs are reclaimed."""
        check_quota(quota)

        def build(txn: Transaction) -> None:
            quotas = self._ledger.quotas
            if quota.tenant not in quotas and len(quotas) >= QUOTAS_MAX:
                raise UsageError(f"the maximum of {QUOTAS_MAX} quotas is reached", hint="remove some first")
            txn.put(quotas, quota.tenant, quota)

        await self._ledger.write(build)

    async def remove_quota(self, tenant: str) -> None:
        def build(txn: Transaction) -> None:
            if tenant not in self._ledger.quotas:
                raise QuotaNotFoundError(
                    f"tenant {tenant[:80]!r} has no quota", hint="'genie quota' lists them"
                )
            txn.delete(self._ledger.quotas, tenant)

        await self._ledger.write(build)

    def make_quotas_reply(self, identity: Identity) -> QuotasReply:
        return make_quotas_reply(self._ledger, identity)

    def quotas_and_weights(self) -> tuple[Quotas, dict[str, float]]:
        """Return the quotas and fair-share weights of tenants for the scheduler."""
        rows = self._ledger.quotas.values()
        by_tenant = {
            row.tenant: _to_scheduler_quota(row, guaranteed_gpus=row.gpus)
            for row in rows
            if row.gpus is not None
        }
        return Quotas(by_tenant), {row.tenant: row.weight for row in rows}


class QuotaRequests:
    """`check_readable` raises NotLeaderError where another controller must respond."""

    def __init__(self, table: QuotaTable, *, check_readable: Callable[[], None]) -> None:
        self._quota_table = table
        self._check_readable = check_readable

    def handlers(self) -> Handlers:
        return {
            ListQuotas: self.list_quotas,
            SetQuota: self.set_quota,
            RemoveQuota: self.remove_quota,
        }

    async def list_quotas(self, connection: Connection, request: ListQuotas) -> QuotasReply:
        self._check_readable()
        return self._quota_table.make_quotas_reply(connection.identity)

    async def set_quota(self, connection: Connection, request: SetQuota) -> Done:
        await self._quota_table.set_quota(request.quota)
        return Done()

    async def remove_quota(self, connection: Connection, request: RemoveQuota) -> Done:
        await self._quota_table.remove_quota(request.tenant)
        return Done()


def make_quotas_reply(tables: LedgerTables, identity: Identity) -> QuotasReply:
    """List quotas by tenant name: for a user its own tenant, for the owner all with a quota or held GPUs."""
    held = _held_gpu_milli_by_tenant(tables)
    tenants = {*tables.quotas, *held} if identity.kind is TokenKind.OWNER else {identity.tenant}
    views = (
        QuotaView(
            quota=tables.quotas.get(tenant) or QuotaRecord(tenant=tenant),
            held_gpus=held.get(tenant, 0) / WHOLE_GPU_MILLI,
        )
        for tenant in sorted(tenants)
    )
    quotas, more = truncate_to_reply(views)
    return QuotasReply(quotas=quotas, more=more)


def _held_gpu_milli_by_tenant(tables: LedgerTables) -> dict[str, int]:
    held: dict[str, int] = {}
    for node in tables.holds.values():
        for hold in node.holds:
            held[hold.tenant] = held.get(hold.tenant, 0) + hold.gpu_milli * len(hold.gpu_ids)
    return held


def _to_scheduler_quota(row: QuotaRecord, *, guaranteed_gpus: float) -> Quota:
    if row.borrow_gpus is None:
        return Quota(gpu_limit_amounts(guaranteed_gpus))
    return Quota(gpu_limit_amounts(guaranteed_gpus), gpu_limit_amounts(row.borrow_gpus))
