"""Quotas: what tenants may hold, as the owner has set it, and what they hold now.

Not for: what follows from a quota (scheduler/quota.py), and who may set one (tenancy/access.py).
"""

from __future__ import annotations

from collections.abc import Callable

from genie.controller.checks import check_quota
from genie.controller.connection import Connection, Handlers
from genie.controller.ledger import Ledger, Transaction
from genie.controller.users import first_fitting
from genie.errors import QuotaNotFoundError, UsageError
from genie.model.messages import Done, ListQuotas, QuotasReply, QuotaView, RemoveQuota, SetQuota
from genie.model.tenant import Identity, QuotaRecord, TokenKind
from genie.scheduler.quota import Quota, Quotas, of_gpus
from genie.scheduler.request import FULL_MILLI

QUOTAS_MAX = 2000


class QuotaTable:
    """Whoever decides by quotas hears of changes from the ledger's table itself."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    async def set(self, quota: QuotaRecord) -> None:
        """In place of the one that the tenant had. What it holds beyond that stays until it is needed."""
        check_quota(quota)

        def build(txn: Transaction) -> None:
            quotas = self._ledger.quotas
            if quota.tenant not in quotas and len(quotas) >= QUOTAS_MAX:
                raise UsageError(f"there are {QUOTAS_MAX} quotas already", hint="remove some first")
            txn.put(quotas, quota.tenant, quota)

        await self._ledger.write(build)

    async def remove(self, tenant: str) -> None:
        def build(txn: Transaction) -> None:
            if tenant not in self._ledger.quotas:
                raise QuotaNotFoundError(
                    f"tenant {tenant[:80]!r} has no quota", hint="'genie quota' lists them"
                )
            txn.delete(self._ledger.quotas, tenant)

        await self._ledger.write(build)

    def listed(self, identity: Identity) -> list[QuotaView]:
        """By name. A user's own tenant; for the owner all that have a quota or hold anything."""
        held = self._held_milli()
        tenants = {*self._ledger.quotas, *held} if identity.kind is TokenKind.OWNER else {identity.tenant}
        return [
            QuotaView(
                quota=self._ledger.quotas.get(tenant) or QuotaRecord(tenant=tenant),
                held_gpus=held.get(tenant, 0) / FULL_MILLI,
            )
            for tenant in sorted(tenants)
        ]

    def rules(self) -> tuple[Quotas, dict[str, float]]:
        """The quotas and the weights of tenants, as the scheduler takes them."""
        rows = self._ledger.quotas.values()
        by_tenant = {row.tenant: _quota(row, own=row.gpus) for row in rows if row.gpus is not None}
        return Quotas(by_tenant), {row.tenant: row.weight for row in rows}

    def _held_milli(self) -> dict[str, int]:
        held: dict[str, int] = {}
        for node in self._ledger.holds.values():
            for hold in node.holds:
                held[hold.tenant] = held.get(hold.tenant, 0) + hold.gpu_milli * len(hold.gpu_ids)
        return held


class QuotaRequests:
    """`check_readable` raises NotLeaderError where the memory is another controller's to answer from."""

    def __init__(self, table: QuotaTable, *, check_readable: Callable[[], None]) -> None:
        self._table = table
        self._check_readable = check_readable

    def handlers(self) -> Handlers:
        return {
            ListQuotas: self.list_quotas,
            SetQuota: self.set_quota,
            RemoveQuota: self.remove_quota,
        }

    async def list_quotas(self, connection: Connection, request: ListQuotas) -> QuotasReply:
        self._check_readable()
        quotas, more = first_fitting(self._table.listed(connection.identity))
        return QuotasReply(quotas=quotas, more=more)

    async def set_quota(self, connection: Connection, request: SetQuota) -> Done:
        await self._table.set(request.quota)
        return Done()

    async def remove_quota(self, connection: Connection, request: RemoveQuota) -> Done:
        await self._table.remove(request.tenant)
        return Done()


def _quota(row: QuotaRecord, *, own: float) -> Quota:
    if row.borrow_gpus is None:
        return Quota(of_gpus(own))
    return Quota(of_gpus(own), of_gpus(row.borrow_gpus))
