"""The first scheduler: order, fit, isolation, and the properties that hold for every cluster."""

from __future__ import annotations

from dataclasses import replace

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from genie.model.allocation import FULL_MILLI, Hold, NodeLedger
from genie.model.job import Accelerator, Job, JobSpec, JobState, Resources
from genie.model.node import GPUInfo, NodeInfo, NodeRole, Vendor
from genie.scheduler import ClusterView, Decision, FifoScheduler, NodeState, Place, Wait, check_possible
from genie.scheduler.fit import hold_of


def node(
    node_id: str,
    *,
    gpus: int = 0,
    vendor: Vendor = Vendor.NVIDIA,
    cpus: float = 8.0,
    memory_bytes: int = 1 << 34,
    holds: tuple[Hold, ...] = (),
    closed: str = "",
    broken: tuple[int, ...] = (),
) -> NodeState:
    info = NodeInfo(
        node_id=node_id,
        hostname=node_id,
        role=NodeRole.WORKER,
        host="h",
        gpus=tuple(
            GPUInfo(gpu_id=index, name="g", vendor=vendor, available=index not in broken)
            for index in range(gpus)
        ),
        cpus=cpus,
        memory_total_bytes=memory_bytes,
        incarnation=1,
    )
    return NodeState(info, NodeLedger(node_id=node_id, holds=holds), closed)


def job(
    job_id: str, *, tenant: str = "t", node_id: str = "", gpu_ids: tuple[int, ...] = (), **wish: object
) -> Job:
    spec = JobSpec(
        name="j",
        command=("true",),
        resources=Resources(**wish),  # type: ignore[arg-type]
        node_id=node_id,
        gpu_ids=gpu_ids,
    )
    return Job(
        job_id=job_id,
        tenant=tenant,
        owner="o",
        spec=spec,
        state=JobState.QUEUED,
        reason="",
        submitted_at=0.0,
        sequence=1,
    )


def hold(job_id: str, *gpu_ids: int, tenant: str = "t", milli: int = FULL_MILLI, cpus: float = 0.0) -> Hold:
    return Hold(
        job_id=job_id,
        tenant=tenant,
        epoch=1,
        incarnation=1,
        gpu_ids=gpu_ids,
        gpu_milli=milli,
        cpus=cpus,
    )


def decide(queue: list[Job], *nodes: NodeState) -> list[Decision]:
    return FifoScheduler().decide(queue, ClusterView.of(nodes), 0.0)


def placed(queue: list[Job], *nodes: NodeState) -> dict[str, tuple[str, tuple[int, ...]]]:
    found = [item for item in decide(queue, *nodes) if isinstance(item, Place)]
    return {item.job_id: (item.node_id, item.gpu_ids) for item in found}


def test_the_fullest_node_that_has_room_is_taken() -> None:
    small, large = node("small", gpus=2), node("large", gpus=8)
    assert placed([job("a", gpus=2)], large, small) == {"a": ("small", (0, 1))}
    assert placed([job("a", gpus=3)], large, small) == {"a": ("large", (0, 1, 2))}


def test_shares_fill_an_accelerator_before_they_break_a_whole_one() -> None:
    begun = node("n", gpus=2, holds=(hold("x", 1, milli=500),))
    assert placed([job("a", gpus=1, gpu_milli=500)], begun) == {"a": ("n", (1,))}
    assert placed([job("a", gpus=1, gpu_milli=501)], begun) == {"a": ("n", (0,))}


def test_tenants_do_not_share_an_accelerator() -> None:
    begun = node("n", gpus=1, holds=(hold("x", 0, tenant="other", milli=100),))
    (decision,) = decide([job("a", gpus=1, gpu_milli=100)], begun)
    assert decision == Wait("a", "needs 1 GPU on one node; n: 0 GPUs (share 0.1) free of 1")


def test_a_job_that_waits_holds_back_those_that_came_after_it() -> None:
    queue = [job("big", gpus=2), job("late", gpus=1)]
    first, second = decide(queue, node("n", gpus=2, holds=(hold("x", 0),)))
    assert first == Wait("big", "needs 2 GPUs on one node; n: 1 GPU free of 2")
    assert second == Wait("late", "behind big, which came first and waits")


def test_a_job_pinned_to_a_busy_accelerator_holds_nobody_back() -> None:
    queue = [job("pinned", gpus=1, node_id="n", gpu_ids=(0,)), job("late", gpus=1)]
    assert placed(queue, node("n", gpus=2, holds=(hold("x", 0),))) == {"late": ("n", (1,))}


def test_cpus_and_memory_are_counted() -> None:
    begun = node("n", cpus=4, holds=(hold("x", cpus=3),))
    assert placed([job("a", cpus=1)], begun) == {"a": ("n", ())}
    assert "1 CPU free of 4" in decide([job("a", cpus=1.5)], begun)[0].reason
    assert "of memory free" in decide([job("a", memory_bytes=1 << 35)], begun)[0].reason


def test_closed_nodes_and_broken_accelerators_are_avoided() -> None:
    shut, broken = node("a", gpus=1, closed="suspect: silent"), node("b", gpus=2, broken=(0,))
    assert placed([job("x", gpus=1)], shut, broken) == {"x": ("b", (1,))}
    assert "a: suspect: silent" in decide([job("x", gpus=2)], shut, broken)[0].reason


def test_cpu_accelerators_count_only_where_there_are_no_gpus_or_they_are_asked_for() -> None:
    cpu, gpu = node("cpu", gpus=1, vendor=Vendor.CPU), node("gpu", gpus=1)
    assert placed([job("a", gpus=1)], cpu) == {"a": ("cpu", (0,))}
    assert placed([job("a", gpus=1)], cpu, gpu) == {"a": ("gpu", (0,))}
    busy = replace(gpu, ledger=NodeLedger(node_id="gpu", holds=(hold("x", 0),)))
    assert placed([job("a", gpus=1)], cpu, busy) == {}, "it waits for the GPU"
    assert placed([job("a", gpus=1, accelerator=Accelerator.CPU)], cpu, gpu) == {"a": ("cpu", (0,))}
    assert placed([job("a", gpus=1, accelerator=Accelerator.GPU)], cpu) == {}


def test_equal_nodes_share_work_that_asks_for_nothing() -> None:
    found = placed([job("a"), job("b")], node("n1"), node("n2"))
    assert {where for where, _ in found.values()} == {"n1", "n2"}


def test_what_can_never_run_is_named_with_the_largest_node() -> None:
    cluster = ClusterView.of([node("small", gpus=1), node("large", gpus=4, closed="down")])
    assert check_possible(job("a", gpus=4).spec, cluster) is None, "a node that is down may come back"
    reason = check_possible(job("a", gpus=5).spec, cluster)
    assert reason == "it asks for 5 GPUs on one node; the largest node for that, large, has 4 GPUs"
    assert "no such node" in (check_possible(job("a", node_id="nowhere").spec, cluster) or "")
    assert "no accelerator 3" in (
        check_possible(job("a", gpus=1, node_id="small", gpu_ids=(3,)).spec, cluster) or ""
    )
    assert "100 CPUs" in (check_possible(job("a", cpus=100).spec, cluster) or "")
    on_cpu = job("a", gpus=1, accelerator=Accelerator.CPU).spec
    assert "0 CPU accelerators" in (check_possible(on_cpu, cluster) or "")
    assert check_possible(job("a", gpus=500).spec, ClusterView.of([])) is None


def test_only_what_does_not_fit_is_named() -> None:
    cluster = ClusterView.of([node("n", gpus=4, cpus=8), node("m", gpus=1, cpus=16)])
    reason = check_possible(job("a", gpus=2, cpus=100, memory_bytes=1 << 30).spec, cluster)
    assert reason == "it asks for 100 CPUs on one node; the largest node for that, m, has 16 CPUs"
    reason = check_possible(job("a", gpus=2, node_id="m").spec, cluster)
    assert reason == "it asks for 2 GPUs on one node; node m has 1 GPU"
    apart = check_possible(job("a", gpus=2, cpus=16).spec, cluster)
    assert apart == (
        "it asks for 2 GPUs, 16 CPUs on one node; there is enough of each, but no node has all of it"
    )


def test_one_of_a_thing_is_not_many() -> None:
    one = node("n", gpus=1, vendor=Vendor.CPU, cpus=1.0)
    reason = check_possible(job("a", gpus=2, cpus=2).spec, ClusterView.of([one]))
    assert reason == (
        "it asks for 2 CPU accelerators, 2 CPUs on one node; "
        "the largest node for that, n, has 1 CPU accelerator; the largest node for that, n, has 1 CPU"
    )
    busy = [node(f"n{index}", gpus=1, holds=(hold("h", 0),)) for index in range(4)]
    assert decide([job("a", gpus=1)], *busy)[0].reason.endswith("; and 1 more node")
    (two,) = decide([job("a", gpus=2)], node("n", gpus=2))
    assert two.reason == "best fit of 1: node n, accelerators 0, 1"


# -- properties --------------------------------------------------------------------------------

NODES = st.lists(
    st.builds(
        lambda gpus, vendor, cpus, closed, broken: (gpus, vendor, cpus, closed, broken),
        st.integers(0, 4),
        st.sampled_from([Vendor.NVIDIA, Vendor.CPU]),
        st.sampled_from([0.0, 2.0, 8.0]),
        st.sampled_from(["", "", "", "suspect"]),
        st.sets(st.integers(0, 3)),
    ),
    min_size=0,
    max_size=4,
).map(
    lambda rows: [
        node(f"n{i}", gpus=gpus, vendor=vendor, cpus=cpus, closed=closed, broken=tuple(broken))
        for i, (gpus, vendor, cpus, closed, broken) in enumerate(rows)
    ]
)
JOBS = st.lists(
    st.tuples(
        st.sampled_from(["blue", "red"]),
        st.integers(0, 3),
        st.sampled_from([100, 250, 500, 1000]),
        st.sampled_from([0.0, 0.5, 2.0]),
        st.sampled_from(list(Accelerator)),
        st.sampled_from(["", "", "n0", "n9"]),
    ),
    max_size=12,
).map(
    lambda rows: [
        job(f"j{i}", tenant=tenant, gpus=gpus, gpu_milli=milli, cpus=cpus, accelerator=kind, node_id=where)
        for i, (tenant, gpus, milli, cpus, kind, where) in enumerate(rows)
    ]
)


def carried_out(nodes: list[NodeState], queue: list[Job], decisions: list[Decision]) -> list[NodeState]:
    """The cluster after these decisions; fails if one of them does not fit."""
    after = {state.node_id: state for state in nodes}
    jobs = {item.job_id: item for item in queue}
    for decision in decisions:
        if isinstance(decision, Place):
            state = after[decision.node_id]
            taken = hold_of(jobs[decision.job_id], decision.gpu_ids, epoch=1, incarnation=1)
            after[decision.node_id] = replace(state, ledger=state.ledger.with_hold(taken))
    return list(after.values())


@given(nodes=NODES, queue=JOBS)
def test_nothing_is_over_allocated_or_placed_where_it_must_not_be(
    nodes: list[NodeState], queue: list[Job]
) -> None:
    decisions = decide(queue, *nodes)
    assert [item.job_id for item in decisions] == [item.job_id for item in queue]
    assert all(item.reason for item in decisions)
    assert decide(queue, *nodes) == decisions, "the same question has the same answer"
    for state in carried_out(nodes, queue, decisions):
        ledger, info = state.ledger, state.info
        assert ledger.cpus_used <= info.cpus + 1e-6
        assert ledger.memory_used_bytes <= info.memory_total_bytes
        for gpu in info.gpus:
            held = [item for item in ledger.holds if gpu.gpu_id in item.gpu_ids]
            assert ledger.gpu_used_milli(gpu.gpu_id) <= FULL_MILLI
            assert len({item.tenant for item in held}) <= 1
            assert gpu.available or not held
        assert not ledger.holds or not state.closed
    jobs = {item.job_id: item for item in queue}
    for decision in decisions:
        if isinstance(decision, Place):
            wish = jobs[decision.job_id].spec
            assert len(decision.gpu_ids) == wish.resources.gpus
            assert wish.node_id in ("", decision.node_id)


@given(nodes=NODES, queue=JOBS)
def test_all_that_fits_the_empty_cluster_is_placed_in_the_end_when_holds_go(
    nodes: list[NodeState], queue: list[Job]
) -> None:
    open_now = [item for item in queue if isinstance(decide([item], *nodes)[0], Place)]
    waiting = list(open_now)
    for _ in range(len(open_now)):
        done = {item.job_id for item in decide(waiting, *nodes) if isinstance(item, Place)}
        waiting = [item for item in waiting if item.job_id not in done]
    assert waiting == []


@given(nodes=NODES, queue=JOBS)
def test_what_can_never_run_is_never_placed_and_the_rest_could_be(
    nodes: list[NodeState], queue: list[Job]
) -> None:
    well = [
        NodeState(
            msgspec.structs.replace(
                state.info,
                gpus=tuple(msgspec.structs.replace(gpu, available=True) for gpu in state.info.gpus),
            ),
            state.ledger,
        )
        for state in nodes
    ]
    for item in queue:
        possible = check_possible(item.spec, ClusterView.of(nodes)) is None
        if nodes:
            assert possible == isinstance(decide([item], *well)[0], Place)


def test_a_pinned_job_does_not_wait_behind_one_that_may_go_anywhere() -> None:
    cluster = ClusterView.of([node("a", gpus=2)])
    big, pinned = job("big", gpus=4), job("pinned", node_id="a", gpu_ids=(0,), gpus=1)
    waits, placed = FifoScheduler().decide([big, pinned], cluster, 0.0)
    assert isinstance(waits, Wait)
    assert isinstance(placed, Place)
