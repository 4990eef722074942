"""Quotas against a real controller: who may set them, what they show, and what the scheduler is given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from genie.controller import quotas
from genie.controller.ledger import Ledger, Table
from genie.controller.quotas import QuotaTable
from genie.errors import JobRefusedError, PermissionError_, QuotaNotFoundError, UsageError
from genie.model.allocation import Hold, NodeLedger
from genie.model.job import JobState
from genie.model.messages import (
    ExplainJob,
    ListJobs,
    ListQuotas,
    OpenDevice,
    QuotaView,
    RemoveQuota,
    SetQuota,
)
from genie.model.tenant import Identity, QuotaRecord, TokenKind
from genie.scheduler.quota import Quota, of_gpus
from genie.scheduler.request import Request, Shape
from genie.scheduler.scheduler import Rules
from tests.controller.standing import Client, standing
from tests.scheduler.clusters import Desk, node
from tests.waiting import until

OWNER = Identity(token_id="o", kind=TokenKind.OWNER, tenant="default")


async def listed(client: Client) -> list[QuotaView]:
    return list((await client.ask(ListQuotas())).quotas)


async def test_a_quota_is_durable_replaced_as_a_whole_and_removed(tmp_path: Path) -> None:
    async with standing(tmp_path) as one:
        async with one.client() as owner:
            await owner.ask(SetQuota(quota=QuotaRecord(tenant="lab", gpus=4.0, borrow_gpus=2.0)))
            await owner.ask(SetQuota(quota=QuotaRecord(tenant="lab", gpus=8.0, weight=3.0)))
        await one.restart()
        async with one.client() as owner:
            expected = QuotaRecord(tenant="lab", gpus=8.0, borrow_gpus=None, weight=3.0)
            assert await listed(owner) == [QuotaView(quota=expected, held_gpus=0.0)]
            await owner.ask(RemoveQuota(tenant="lab"))
            assert await listed(owner) == []
            with pytest.raises(QuotaNotFoundError, match="'lab' has no quota"):
                await owner.ask(RemoveQuota(tenant="lab"))


async def test_a_user_sees_its_own_tenant_and_sets_nothing(tmp_path: Path) -> None:
    async with standing(tmp_path) as one, one.client() as owner:
        for tenant in ("blue", "red"):
            await owner.ask(SetQuota(quota=QuotaRecord(tenant=tenant, gpus=4.0)))
        blue = await one.token(TokenKind.USER, tenant="blue")
        green = await one.token(TokenKind.USER, tenant="green")
        async with one.client(blue) as user, one.client(green) as without:
            assert [view.quota.tenant for view in await listed(user)] == ["blue"]
            assert await listed(without) == [QuotaView(quota=QuotaRecord(tenant="green"), held_gpus=0.0)]
            with pytest.raises(PermissionError_, match="set quota"):
                await user.ask(SetQuota(quota=QuotaRecord(tenant="blue", gpus=99.0)))
            with pytest.raises(PermissionError_, match="remove quota"):
                await user.ask(RemoveQuota(tenant="blue"))
        assert [view.quota.gpus for view in await listed(owner)] == [4.0, 4.0]


async def test_what_makes_no_sense_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    async with standing(tmp_path) as one, one.client() as owner:
        with pytest.raises(UsageError, match="weight"):
            await owner.ask(SetQuota(quota=QuotaRecord(tenant="lab", gpus=1.0, weight=0.0)))
        assert await listed(owner) == []


async def test_there_is_a_bound_on_how_many_there_are(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(quotas, "QUOTAS_MAX", 1)
    async with standing(tmp_path) as one, one.client() as owner:
        await owner.ask(SetQuota(quota=QuotaRecord(tenant="a", gpus=1.0)))
        await owner.ask(SetQuota(quota=QuotaRecord(tenant="a", gpus=2.0)))
        with pytest.raises(UsageError, match="1 quotas already"):
            await owner.ask(SetQuota(quota=QuotaRecord(tenant="b", gpus=1.0)))


async def test_what_tenants_hold_is_counted_with_and_without_a_quota(tmp_path: Path) -> None:
    async with standing(tmp_path) as one, one.client() as owner, one.agent(gpus=4) as agent:
        await owner.ask(SetQuota(quota=QuotaRecord(tenant="idle", gpus=1.0)))
        blue = await one.token(TokenKind.USER, tenant="blue")
        async with one.client(blue) as user:
            for wish in ({"gpus": 2}, {"gpus": 1, "gpu_milli": 500}):
                await user.submit(**wish)
                await agent.start_next()
            (view,) = await listed(user)
            assert (view.quota, view.held_gpus) == (QuotaRecord(tenant="blue"), 2.5)
        assert [(view.quota.tenant, view.held_gpus) for view in await listed(owner)] == [
            ("blue", 2.5),
            ("idle", 0.0),
        ]


async def test_a_job_larger_than_the_quota_is_refused_and_told_what_to_do(tmp_path: Path) -> None:
    async with standing(tmp_path) as one, one.client() as owner, one.agent(gpus=4):
        await owner.ask(SetQuota(quota=QuotaRecord(tenant="blue", gpus=2.0)))
        blue = await one.token(TokenKind.USER, tenant="blue")
        async with one.client(blue) as user:
            with pytest.raises(JobRefusedError, match=r"3 GPUs, and the quota .* is 2 GPUs") as caught:
                await user.submit(gpus=3)
            assert "--preemptible" in caught.value.hint and "'genie quota'" in caught.value.hint
            await owner.ask(SetQuota(quota=QuotaRecord(tenant="blue", gpus=0.5)))
            device = OpenDevice(node_id="n1", gpu_id=0, session_node_id="c", request_id="r")
            with pytest.raises(JobRefusedError, match="can never start under the present quota"):
                await user.ask(device)
            assert (await user.ask(ListJobs())).jobs == ()


async def test_under_a_quota_that_was_lowered_it_waits_and_hears_that_it_can_never_start(
    tmp_path: Path,
) -> None:
    async with standing(tmp_path) as one, one.client() as owner, one.agent(gpus=4) as agent:
        blue = await one.token(TokenKind.USER, tenant="blue")
        await owner.submit(gpus=4)
        await agent.start_next()
        async with one.client(blue) as user:
            job = await user.submit(gpus=3)
            await owner.ask(SetQuota(quota=QuotaRecord(tenant="blue", gpus=2.0)))
            why = (
                "can never start under the present quota: it asks for 3 GPUs, and the quota of tenant blue "
                "is 2 GPUs; only preemptible jobs may borrow more"
            )

            async def told() -> bool:
                return (await user.ask(ExplainJob(job_id=job.job_id))).job.reason == why

            await until(told, what="it is told so")
            reply = await user.ask(ExplainJob(job_id=job.job_id))
            assert (reply.job.state, reply.starts_at) == (JobState.QUEUED, None)


def table(*rows: QuotaRecord, holds: dict[str, NodeLedger] | None = None) -> QuotaTable:
    ledger = Ledger(None, None, None)  # type: ignore[arg-type]  # its tables only
    for row in rows:
        _put(ledger.quotas, row.tenant, row)
    for node_id, held in (holds or {}).items():
        _put(ledger.holds, node_id, held)
    return QuotaTable(ledger)


# Any: rows of every table.
def _put(into: Table[Any], row_id: str, row: Any) -> None:
    into._show(row_id, row)


def test_the_scheduler_gets_bounds_where_there_are_some_and_every_weight() -> None:
    found, weights = table(
        QuotaRecord(tenant="a", gpus=1.5),
        QuotaRecord(tenant="b", gpus=0.0, borrow_gpus=2.0, weight=0.5),
        QuotaRecord(tenant="c", borrow_gpus=2.0, weight=4.0),
    ).rules()
    assert found.by_tenant == {"a": Quota(of_gpus(1.5)), "b": Quota(of_gpus(0), of_gpus(2.0))}
    assert weights == {"a": 1.0, "b": 0.5, "c": 4.0}


def test_the_rules_hold_in_the_scheduler() -> None:
    found, weights = table(QuotaRecord(tenant="a", gpus=1.0, borrow_gpus=1.0)).rules()
    desk = Desk(node("n", 8), rules=Rules(quotas=found, weights=weights))
    for name in ("one", "two"):
        desk.submit(name)
    for name in ("three", "four"):
        desk.submit(name, preemptible=True)
    desk.scheduler.submit(Request("free", "other", 9, Shape(gpus=4)))
    assert sorted(desk.started()) == ["free", "one", "three"], (
        "one of its own, one borrowed, others unbounded"
    )


def test_every_hold_on_every_node_counts() -> None:
    def hold(tenant: str, *gpu_ids: int, milli: int = 1000) -> Hold:
        return Hold(job_id="j", tenant=tenant, epoch=1, incarnation=1, gpu_ids=gpu_ids, gpu_milli=milli)

    found = table(
        holds={
            "n1": NodeLedger(node_id="n1", holds=(hold("a", 0, 1), hold("b", 2, milli=250))),
            "n2": NodeLedger(node_id="n2", holds=(hold("a", 0, milli=100), hold("c"))),
        }
    ).listed(OWNER)
    assert {view.quota.tenant: view.held_gpus for view in found} == {"a": 2.1, "b": 0.25, "c": 0.0}
