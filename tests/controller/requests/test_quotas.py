"""Quotas with a real controller: permissions, held GPUs, and the rules of the scheduler."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from genie.controller.ledger import Ledger, LedgerTable
from genie.controller.requests import quotas
from genie.controller.requests.quotas import QuotaTable
from genie.errors import JobRefusedError, PermissionError_, QuotaNotFoundError, UsageError
from genie.model.allocation import Hold, NodeHolds
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
from genie.scheduler.quota import Quota, gpu_limit_amounts
from genie.scheduler.request import JobRequest, Shape
from genie.scheduler.rules import Rules
from tests.controller.running_controller import Client, running_controller
from tests.scheduler.clusters import SchedulerHarness, node
from tests.waiting import until

OWNER = Identity(token_id="o", kind=TokenKind.OWNER, tenant="default")


async def list_quotas(client: Client) -> list[QuotaView]:
    return list((await client.ask(ListQuotas())).quotas)


async def test_quota_is_set_replaced_and_removed_durably(tmp_path: Path) -> None:
    async with running_controller(tmp_path) as one:
        async with one.client() as owner:
            await owner.ask(SetQuota(quota=QuotaRecord(tenant="lab", gpus=4.0, borrow_gpus=2.0)))
            await owner.ask(SetQuota(quota=QuotaRecord(tenant="lab", gpus=8.0, weight=3.0)))
        await one.restart()
        async with one.client() as owner:
            expected = QuotaRecord(tenant="lab", gpus=8.0, borrow_gpus=None, weight=3.0)
            assert await list_quotas(owner) == [QuotaView(quota=expected, held_gpus=0.0)]
            await owner.ask(RemoveQuota(tenant="lab"))
            assert await list_quotas(owner) == []
            with pytest.raises(QuotaNotFoundError, match="'lab' has no quota"):
                await owner.ask(RemoveQuota(tenant="lab"))


async def test_user_sees_its_own_quota_and_cannot_set_one(tmp_path: Path) -> None:
    async with running_controller(tmp_path) as one, one.client() as owner:
        for tenant in ("blue", "red"):
            await owner.ask(SetQuota(quota=QuotaRecord(tenant=tenant, gpus=4.0)))
        blue = await one.token(TokenKind.USER, tenant="blue")
        green = await one.token(TokenKind.USER, tenant="green")
        async with one.client(blue) as user, one.client(green) as without:
            assert [view.quota.tenant for view in await list_quotas(user)] == ["blue"]
            assert await list_quotas(without) == [QuotaView(quota=QuotaRecord(tenant="green"), held_gpus=0.0)]
            with pytest.raises(PermissionError_, match="set quota"):
                await user.ask(SetQuota(quota=QuotaRecord(tenant="blue", gpus=99.0)))
            with pytest.raises(PermissionError_, match="remove quota"):
                await user.ask(RemoveQuota(tenant="blue"))
        assert [view.quota.gpus for view in await list_quotas(owner)] == [4.0, 4.0]


async def test_invalid_quota_is_rejected_and_not_written(tmp_path: Path) -> None:
    async with running_controller(tmp_path) as one, one.client() as owner:
        with pytest.raises(UsageError, match="weight"):
            await owner.ask(SetQuota(quota=QuotaRecord(tenant="lab", gpus=1.0, weight=0.0)))
        assert await list_quotas(owner) == []


async def test_number_of_quotas_is_limited(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(quotas, "QUOTAS_MAX", 1)
    async with running_controller(tmp_path) as one, one.client() as owner:
        await owner.ask(SetQuota(quota=QuotaRecord(tenant="a", gpus=1.0)))
        await owner.ask(SetQuota(quota=QuotaRecord(tenant="a", gpus=2.0)))
        with pytest.raises(UsageError, match="maximum of 1 quotas"):
            await owner.ask(SetQuota(quota=QuotaRecord(tenant="b", gpus=1.0)))


async def test_held_gpus_are_counted_with_and_without_a_quota(tmp_path: Path) -> None:
    async with running_controller(tmp_path) as one, one.client() as owner, one.agent(gpus=4) as agent:
        await owner.ask(SetQuota(quota=QuotaRecord(tenant="idle", gpus=1.0)))
        blue = await one.token(TokenKind.USER, tenant="blue")
        async with one.client(blue) as user:
            for wish in ({"gpus": 2}, {"gpus": 1, "gpu_milli": 500}):
                await user.submit(**wish)
                await agent.start_next()
            (view,) = await list_quotas(user)
            assert (view.quota, view.held_gpus) == (QuotaRecord(tenant="blue"), 2.5)
        assert [(view.quota.tenant, view.held_gpus) for view in await list_quotas(owner)] == [
            ("blue", 2.5),
            ("idle", 0.0),
        ]


async def test_job_larger_than_the_quota_is_rejected_with_a_hint(tmp_path: Path) -> None:
    async with running_controller(tmp_path) as one, one.client() as owner, one.agent(gpus=4):
        await owner.ask(SetQuota(quota=QuotaRecord(tenant="blue", gpus=2.0)))
        blue = await one.token(TokenKind.USER, tenant="blue")
        async with one.client(blue) as user:
            with pytest.raises(JobRefusedError, match=r"3 GPUs; the quota .* is 2 GPUs") as caught:
                await user.submit(gpus=3)
            assert "--preemptible" in caught.value.hint and "'genie quota'" in caught.value.hint
            await owner.ask(SetQuota(quota=QuotaRecord(tenant="blue", gpus=0.5)))
            device = OpenDevice(node_id="n1", gpu_id=0, session_node_id="c", request_id="r")
            with pytest.raises(JobRefusedError, match="can never start under the current quota"):
                await user.ask(device)
            assert (await user.ask(ListJobs())).jobs == ()


async def test_pending_job_over_a_lowered_quota_is_explained(
    tmp_path: Path,
) -> None:
    async with running_controller(tmp_path) as one, one.client() as owner, one.agent(gpus=4) as agent:
        blue = await one.token(TokenKind.USER, tenant="blue")
        await owner.submit(gpus=4)
        await agent.start_next()
        async with one.client(blue) as user:
            job = await user.submit(gpus=3)
            await owner.ask(SetQuota(quota=QuotaRecord(tenant="blue", gpus=2.0)))

            async def is_explained() -> bool:
                reason = (await user.ask(ExplainJob(job_id=job.job_id))).job.reason
                return all(
                    part in reason
                    for part in ("cannot start under the current quota", "3 GPUs", "tenant blue", "2 GPUs")
                )

            await until(is_explained, what="the pending reason names the quota")
            reply = await user.ask(ExplainJob(job_id=job.job_id))
            assert (reply.job.state, reply.starts_at) == (JobState.QUEUED, None)


def make_quota_table(*rows: QuotaRecord, holds: dict[str, NodeHolds] | None = None) -> QuotaTable:
    ledger = Ledger(None, None, None)  # type: ignore[arg-type]  # its tables only
    for row in rows:
        _set_row(ledger.quotas, row.tenant, row)
    for node_id, held in (holds or {}).items():
        _set_row(ledger.holds, node_id, held)
    return QuotaTable(ledger)


# Any: rows of every table.
def _set_row(into: LedgerTable[Any], row_id: str, row: Any) -> None:
    into.set_row(row_id, row)


def test_rules_contain_set_quotas_and_every_weight() -> None:
    found, weights = make_quota_table(
        QuotaRecord(tenant="a", gpus=1.5),
        QuotaRecord(tenant="b", gpus=0.0, borrow_gpus=2.0, weight=0.5),
        QuotaRecord(tenant="c", borrow_gpus=2.0, weight=4.0),
    ).quotas_and_weights()
    assert found.by_tenant == {
        "a": Quota(gpu_limit_amounts(1.5)),
        "b": Quota(gpu_limit_amounts(0), gpu_limit_amounts(2.0)),
    }
    assert weights == {"a": 1.0, "b": 0.5, "c": 4.0}


def test_scheduler_enforces_the_rules() -> None:
    found, weights = make_quota_table(QuotaRecord(tenant="a", gpus=1.0, borrow_gpus=1.0)).quotas_and_weights()
    desk = SchedulerHarness(node("n", 8), rules=Rules(quotas=found, weights=weights))
    for name in ("one", "two"):
        desk.submit(name)
    for name in ("three", "four"):
        desk.submit(name, preemptible=True)
    desk.scheduler.submit(JobRequest("free", "other", 9, Shape(gpus=4)))
    assert sorted(desk.started()) == ["free", "one", "three"], (
        "one of its own, one borrowed, others unbounded"
    )


def test_holds_on_all_nodes_are_counted() -> None:
    def hold(tenant: str, *gpu_ids: int, milli: int = 1000) -> Hold:
        return Hold(job_id="j", tenant=tenant, epoch=1, incarnation=1, gpu_ids=gpu_ids, gpu_milli=milli)

    found = (
        make_quota_table(
            holds={
                "n1": NodeHolds(node_id="n1", holds=(hold("a", 0, 1), hold("b", 2, milli=250))),
                "n2": NodeHolds(node_id="n2", holds=(hold("a", 0, milli=100), hold("c"))),
            }
        )
        .make_quotas_reply(OWNER)
        .quotas
    )
    assert {view.quota.tenant: view.held_gpus for view in found} == {"a": 2.1, "b": 0.25, "c": 0.0}
