"""Explanations of pending jobs."""

from __future__ import annotations

import pytest

from genie.model.job import Within
from genie.scheduler.explain import (
    BlockedNodes,
    PendingJobExplanation,
    explain_pending_job,
    queued_jobs_in_order,
)
from genie.scheduler.order import Fifo
from genie.scheduler.quota import Quota, Quotas, gpu_limit_amounts
from genie.scheduler.request import Shape
from genie.scheduler.rules import Rules
from tests.scheduler.clusters import SchedulerHarness, node


def explain_queued(harness: SchedulerHarness, job_id: str) -> PendingJobExplanation:
    return explain_pending_job(
        harness.scheduler, job_id, reason=harness.pending(job_id).reason, now=harness.now
    )


def test_explanation_lists_the_reason_of_each_node() -> None:
    harness = SchedulerHarness(
        node("full", 2),
        node("small", 1),
        node("shut", 2, blocked_reason="draining"),
        node("busy", 2, cpu_milli=5_000),
    )
    harness.submit("one", shape=Shape(gpus=1, nodes=frozenset({"full"})), time_limit_s=30.0)
    harness.submit("cpus", shape=Shape(cpu_milli=2_000, nodes=frozenset({"busy"})), time_limit_s=50.0)
    harness.started()
    harness.submit("wide", shape=Shape(gpus=2, cpu_milli=4_000))
    found = explain_queued(harness, "wide")
    assert found.blocked_nodes == (
        BlockedNodes("1 of 2 GPUs are free", ("full",), is_permanent=False),
        BlockedNodes("3 of 5 CPUs are free", ("busy",), is_permanent=False),
        BlockedNodes("draining", ("shut",), is_permanent=True),
        BlockedNodes("has 1 GPU", ("small",), is_permanent=True),
    )
    assert (found.starts_at, found.jobs_ahead) == (30.0, 0)
    assert found.reason == "waiting for resources on full (reserved for this job)"


@pytest.mark.parametrize(
    ("shape", "why"),
    [
        (Shape(gpus=1, gpu_milli=600), "0 of 2 GPUs have a fraction of 0.6 free"),
        (Shape(gpus=1, gpu_milli=100, gpu_memory_mib=100_000), "0 of 2 GPUs have 97.66 GiB of memory free"),
        (Shape(memory_mib=250_000), "240.23 GiB of 250 GiB of memory are free"),
    ],
)
def test_missing_fraction_and_missing_memory_have_different_reasons(shape: Shape, why: str) -> None:
    harness = SchedulerHarness(node("n", 2))
    most = Shape(gpus=1, gpu_milli=600, gpu_memory_mib=50_000, memory_mib=5_000)
    for number in range(2):
        harness.submit(f"most{number}", shape=most, time_limit_s=9.0)
    harness.started()
    harness.submit("asks", shape=shape)
    assert [each.reason for each in explain_queued(harness, "asks").blocked_nodes] == [why]


def test_nodes_are_blocked_by_near_and_apart_constraints() -> None:
    harness = SchedulerHarness(node("n1", 2), node("n2", 2), node("n3", 2))
    for name, where in (("server", "n1"), ("noisy", "n2")):
        harness.submit(name, shape=Shape(gpus=2, nodes=frozenset({where})), time_limit_s=30.0)
    harness.started()
    harness.submit("beside", near_job_names=frozenset({"server"}))
    assert explain_queued(harness, "beside").blocked_nodes == (
        BlockedNodes("runs no job named server", ("n2", "n3"), is_permanent=False),
        BlockedNodes("0 of 2 GPUs are free", ("n1",), is_permanent=False),
    )
    harness.submit("shy", shape=Shape(gpus=2), apart_job_names=frozenset({"noisy", "server"}), workers=2)
    assert {each.reason: each.nodes for each in explain_queued(harness, "shy").blocked_nodes} == {
        "runs a job named noisy": ("n2",),
        "runs a job named server": ("n1",),
    }


@pytest.mark.parametrize("within", [Within.NODE, Within.ISLAND])
def test_workers_on_one_node_are_counted_together(within: Within) -> None:
    harness = SchedulerHarness(node("n", 4))
    harness.submit("other", gpus=1, time_limit_s=9.0)
    harness.started()
    harness.submit("pair", gpus=2, workers=2, within=within)
    assert [each.reason for each in explain_queued(harness, "pair").blocked_nodes] == ["3 of 4 GPUs are free"]


def test_jobs_ahead_start_first_in_the_estimate() -> None:
    harness = SchedulerHarness(node("n", 2), rules=Rules(order=Fifo()))
    harness.submit("runs", gpus=2, time_limit_s=10.0)
    harness.started()
    harness.submit("next", gpus=2, time_limit_s=10.0)
    harness.submit("last", gpus=2)
    assert (
        explain_queued(harness, "next").starts_at,
        explain_queued(harness, "next").jobs_ahead,
    ) == (10.0, 0)
    assert (
        explain_queued(harness, "last").starts_at,
        explain_queued(harness, "last").jobs_ahead,
    ) == (20.0, 1)


def test_job_with_a_reservation_is_first_in_the_queue() -> None:
    harness = SchedulerHarness(node("n", 2))
    harness.submit("runs", gpus=2, time_limit_s=30.0)
    harness.started()
    harness.submit("calm", gpus=2, time_limit_s=10.0)
    harness.decide()
    harness.submit("hasty", gpus=2, time_limit_s=10.0, deadline_at=60.0)
    assert (
        explain_queued(harness, "hasty").reason
        == "not enough free resources, and behind calm, which has a reservation"
    )
    assert [request.job_id for request in queued_jobs_in_order(harness.scheduler, harness.now)] == [
        "calm",
        "hasty",
    ]
    assert (
        explain_queued(harness, "calm").jobs_ahead,
        explain_queued(harness, "hasty").jobs_ahead,
    ) == (0, 1)
    assert explain_queued(harness, "hasty").starts_at == 40.0


def test_job_over_quota_waits_for_its_tenant_and_running_job_has_no_explanation() -> None:
    harness = SchedulerHarness(node("n", 2), rules=Rules(quotas=Quotas({"a": Quota(gpu_limit_amounts(1))})))
    harness.submit("one", time_limit_s=5.0)
    harness.submit("two")
    harness.started()
    found = explain_queued(harness, "two")
    assert found.starts_at == 5.0
    assert "its quota of 1 GPU" in found.reason
    with pytest.raises(KeyError):
        explain_pending_job(harness.scheduler, "one", reason="", now=0.0)


def test_explanation_names_the_holder_of_a_requested_gpu() -> None:
    harness = SchedulerHarness(node("n", 2), node("m", 1))
    mine = Shape(gpus=1, nodes=frozenset({"n"}), gpu_ids=(1,))
    harness.submit("holds", shape=mine, time_limit_s=30.0)
    harness.started()
    harness.submit("waits", shape=mine)
    harness.submit("wide", gpus=2)
    found = explain_queued(harness, "waits")
    assert (found.reason, found.starts_at) == ("GPU 1 of n is held by holds", 30.0)
    assert found.blocked_nodes == (
        BlockedNodes("GPU 1 of n is held by holds", ("n",), is_permanent=False),
        BlockedNodes("is not a requested node", ("m",), is_permanent=True),
    )
    harness.scheduler.record_end("holds")
    harness.submit("first", tenant="b", shape=mine, priority=9)
    assert [each.reason for each in explain_queued(harness, "wide").blocked_nodes] == [
        "1 of 2 GPUs are free",
        "has 1 GPU",
    ]
