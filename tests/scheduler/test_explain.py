"""What a waiting job is told."""

from __future__ import annotations

import pytest

from genie.model.job import Within
from genie.scheduler.explain import Explanation, RuledOut, explain, in_order
from genie.scheduler.order import Fifo
from genie.scheduler.quota import Quota, Quotas, of_gpus
from genie.scheduler.request import Shape
from genie.scheduler.scheduler import Rules
from tests.scheduler.clusters import Desk, node


def told(desk: Desk, job_id: str) -> Explanation:
    return explain(desk.scheduler, job_id, reason=desk.why(job_id).reason, now=desk.now)


def test_each_node_says_what_is_in_the_way() -> None:
    desk = Desk(
        node("full", 2),
        node("small", 1),
        node("shut", 2, closed="draining"),
        node("busy", 2, cpu_milli=5_000),
    )
    desk.submit("one", shape=Shape(gpus=1, nodes=frozenset({"full"})), time_limit_s=30.0)
    desk.submit("cpus", shape=Shape(cpu_milli=2_000, nodes=frozenset({"busy"})), time_limit_s=50.0)
    desk.started()
    desk.submit("wide", shape=Shape(gpus=2, cpu_milli=4_000))
    found = told(desk, "wide")
    assert found.ruled_out == (
        RuledOut("1 of 2 GPUs are free", ("full",), ever=False),
        RuledOut("3 of 5 CPUs are free", ("busy",), ever=False),
        RuledOut("draining", ("shut",), ever=True),
        RuledOut("has 1 GPU", ("small",), ever=True),
    )
    assert (found.starts_at, found.ahead) == (30.0, 0)
    assert found.reason == "has a reservation on full"


@pytest.mark.parametrize(
    ("shape", "why"),
    [
        (Shape(gpus=1, gpu_milli=600), "0 of 2 GPUs have a share of 0.6 free"),
        (Shape(gpus=1, gpu_milli=100, gpu_memory_mib=100_000), "0 of 2 GPUs have 100000 MiB free"),
        (Shape(memory_mib=250_000), "246000 of 256000 MiB of memory are free"),
    ],
)
def test_shares_and_memory_are_told_apart(shape: Shape, why: str) -> None:
    desk = Desk(node("n", 2))
    most = Shape(gpus=1, gpu_milli=600, gpu_memory_mib=50_000, memory_mib=5_000)
    for number in range(2):
        desk.submit(f"most{number}", shape=most, time_limit_s=9.0)
    desk.started()
    desk.submit("asks", shape=shape)
    assert [each.reason for each in told(desk, "asks").ruled_out] == [why]


def test_nodes_are_ruled_out_by_the_jobs_that_run_there() -> None:
    desk = Desk(node("n1", 2), node("n2", 2), node("n3", 2))
    for name, where in (("server", "n1"), ("noisy", "n2")):
        desk.submit(name, shape=Shape(gpus=2, nodes=frozenset({where})), time_limit_s=30.0)
    desk.started()
    desk.submit("beside", near=frozenset({"server"}))
    assert told(desk, "beside").ruled_out == (
        RuledOut("no job named server runs there", ("n2", "n3"), ever=False),
        RuledOut("0 of 2 GPUs are free", ("n1",), ever=False),
    )
    desk.submit("shy", shape=Shape(gpus=2), apart=frozenset({"noisy", "server"}), workers=2)
    assert {each.reason: each.nodes for each in told(desk, "shy").ruled_out} == {
        "a job named noisy runs there": ("n2",),
        "a job named server runs there": ("n1",),
    }


@pytest.mark.parametrize("within", [Within.NODE, Within.ISLAND])
def test_workers_that_must_be_together_are_counted_together(within: Within) -> None:
    desk = Desk(node("n", 4))
    desk.submit("other", gpus=1, time_limit_s=9.0)
    desk.started()
    desk.submit("pair", gpus=2, workers=2, within=within)
    assert [each.reason for each in told(desk, "pair").ruled_out] == ["3 of 4 GPUs are free"]


def test_those_ahead_go_first_in_what_is_foreseen() -> None:
    desk = Desk(node("n", 2), rules=Rules(order=Fifo()))
    desk.submit("runs", gpus=2, time_limit_s=10.0)
    desk.started()
    desk.submit("next", gpus=2, time_limit_s=10.0)
    desk.submit("last", gpus=2)
    assert (told(desk, "next").starts_at, told(desk, "next").ahead) == (10.0, 0)
    assert (told(desk, "last").starts_at, told(desk, "last").ahead) == (20.0, 1)


def test_who_has_a_reservation_is_first_in_line_whoever_came_after_it() -> None:
    desk = Desk(node("n", 2))
    desk.submit("runs", gpus=2, time_limit_s=30.0)
    desk.started()
    desk.submit("calm", gpus=2, time_limit_s=10.0)
    desk.decide()
    desk.submit("hasty", gpus=2, time_limit_s=10.0, deadline_at=60.0)
    assert told(desk, "hasty").reason == "no room now, and behind calm, which has a reservation"
    assert [request.job_id for request in in_order(desk.scheduler, desk.now)] == ["calm", "hasty"]
    assert (told(desk, "calm").ahead, told(desk, "hasty").ahead) == (0, 1)
    assert told(desk, "hasty").starts_at == 40.0


def test_who_is_over_his_quota_waits_for_his_own_and_who_does_not_wait_has_no_explanation() -> None:
    desk = Desk(node("n", 2), rules=Rules(quotas=Quotas({"a": Quota(of_gpus(1))})))
    desk.submit("one", time_limit_s=5.0)
    desk.submit("two")
    desk.started()
    found = told(desk, "two")
    assert found.starts_at == 5.0
    assert "its quota is 1 GPU" in found.reason
    with pytest.raises(KeyError):
        explain(desk.scheduler, "one", reason="", now=0.0)


def test_who_named_a_gpu_is_told_who_has_it_and_until_when() -> None:
    desk = Desk(node("n", 2), node("m", 1))
    mine = Shape(gpus=1, nodes=frozenset({"n"}), gpu_ids=(1,))
    desk.submit("holds", shape=mine, time_limit_s=30.0)
    desk.started()
    desk.submit("waits", shape=mine)
    desk.submit("wide", gpus=2)
    found = told(desk, "waits")
    assert (found.reason, found.starts_at) == ("GPU 1 of n is held by holds", 30.0)
    assert found.ruled_out == (
        RuledOut("GPU 1 of n is held by holds", ("n",), ever=False),
        RuledOut("another node is asked for", ("m",), ever=True),
    )
    desk.scheduler.ended("holds")
    desk.submit("first", tenant="b", shape=mine, priority=9)
    assert [each.reason for each in told(desk, "wide").ruled_out] == ["1 of 2 GPUs are free", "has 1 GPU"]
