"""Cluster state: placements, changes of nodes, and bounded registrations."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from genie.errors import UsageError
from genie.model.job import Within
from genie.scheduler.cluster import placer_group
from genie.scheduler.cluster.allocations import ClusterAllocations
from genie.scheduler.cluster.registration_cache import RegistrationCache
from genie.scheduler.conversion import GPU_POSITION_UNKNOWN
from genie.scheduler.placement.python_placer import PythonPlacer
from genie.scheduler.request import GpuFacts, JobRequest, Shape, WorkerPlace
from tests.scheduler.clusters import H200, SchedulerHarness, node

PAIRS = tuple(replace(H200, island=10 + gpu // 2, numa=gpu // 2) for gpu in range(4))


def make_request(name: str, shape: Shape | None = None, **options: object) -> JobRequest:
    job = JobRequest(name, "a", 0, shape or Shape(gpus=1), name=name)
    return msgspec.structs.replace(job, **options)


def test_workers_within_an_island_share_one_nvlink_island() -> None:
    harness = SchedulerHarness(node("n", kinds=PAIRS))
    harness.submit("other")
    harness.submit("island", workers=2, within=Within.ISLAND)
    harness.submit("larger", workers=3, within=Within.ISLAND)
    harness.submit("second", workers=2, within=Within.ISLAND)
    assert harness.started() == ["other", "island"]
    held = harness.allocations.allocations_by_job
    assert held["other"].places == (WorkerPlace("n", (0,)),)
    assert held["island"].places == (WorkerPlace("n", (2,)), WorkerPlace("n", (3,)))
    harness.scheduler.record_end("other")
    assert harness.started() == ["second"]


def test_worker_within_an_island_has_all_its_gpus_there() -> None:
    harness = SchedulerHarness(node("n", kinds=PAIRS))
    harness.scheduler.record_start(make_request("there"), (WorkerPlace("n", (1,)),), started_at=0.0)
    harness.scheduler.record_start(make_request("here"), (WorkerPlace("n", (2,)),), started_at=0.0)
    harness.submit("pair", gpus=2, within=Within.ISLAND)
    assert harness.started() == []
    harness.scheduler.record_end("here")
    assert harness.started() == ["pair"]


def test_elastic_job_in_an_island_uses_the_largest_free_island() -> None:
    harness = SchedulerHarness(node("n", kinds=PAIRS))
    harness.submit("island", workers=4, workers_min=1, within=Within.ISLAND)
    assert harness.started() == ["island"]
    assert len(harness.allocations.allocations_by_job["island"].places) == 2


def test_closed_gpu_accepts_nothing_and_keeps_its_jobs() -> None:
    facts = node("n", 2)
    harness = SchedulerHarness(facts)
    harness.submit("early")
    assert harness.started() == ["early"]
    harness.scheduler.set_node(replace(facts, blocked_gpus=frozenset({0, 1})))
    harness.submit("late")
    assert harness.started() == []
    assert "early" in harness.allocations.allocations_by_job
    harness.scheduler.set_node(replace(facts, blocked_gpus=frozenset({0})))
    assert harness.started() == ["late"]
    assert harness.allocations.allocations_by_job["late"].places == (WorkerPlace("n", (1,)),)


def test_memory_used_outside_the_cluster_is_not_free() -> None:
    facts = node("n", 1)
    harness = SchedulerHarness(replace(facts, memory_used_outside_cluster_mib=(100_000,)))
    harness.submit("model", shape=Shape(1, 500, gpu_memory_mib=80_000))
    assert harness.started() == []
    harness.scheduler.set_node(facts)
    assert harness.started() == ["model"]


def test_running_job_can_be_held_on_a_closed_node() -> None:
    cluster = ClusterAllocations(PythonPlacer, policy="bestfit")
    cluster.set_node(node("n", 1, blocked_reason="draining"))
    cluster.hold(make_request("job"), [WorkerPlace("n", (0,))])
    with pytest.raises(UsageError):
        cluster.hold(make_request("second"), [WorkerPlace("n", (0,))])
    assert cluster.free_resources_of_node("n")[2] == ((0, 141_000),)


def test_node_counts_in_its_new_rack() -> None:
    harness = SchedulerHarness(node("a", 1, rack="x"), node("b", 1, rack="y"))
    harness.submit("gang", workers=2, within=Within.RACK)
    assert harness.started() == []
    harness.scheduler.set_node(node("b", 1, rack="x"))
    assert harness.started() == ["gang"]


def test_gang_near_a_job_and_within_a_rack_is_placed_near_it() -> None:
    harness = SchedulerHarness(*(node(f"{rack}{i}", 2, rack=rack) for rack in "xy" for i in range(2)))
    harness.allocations.place(make_request("server", Shape(nodes=frozenset({"y1"}))), 1)
    harness.submit("gang", workers=2, within=Within.RACK, near_job_names=frozenset({"server"}))
    harness.submit("other", workers=3, within=Within.RACK, near_job_names=frozenset({"server"}))
    assert harness.started() == ["gang"]
    assert {place.node_id for place in harness.allocations.allocations_by_job["gang"].places} == {"y1"}


def test_excluded_nodes_are_not_chosen_and_share_one_node_set() -> None:
    cluster = ClusterAllocations(PythonPlacer, policy="bestfit")
    for name in ("a", "b", "c"):
        cluster.set_node(node(name, 2))
    cluster.hold(make_request("server"), [WorkerPlace("b", (0,))])
    places = [cluster.place(make_request(f"j{n}"), 1, excluded_nodes={"a", "b"}) for n in range(3)]
    assert places == [(WorkerPlace("c", (0,)),), (WorkerPlace("c", (1,)),), None]
    assert len(cluster.placers.node_sets) == 1
    near = make_request("near", near_job_names=frozenset({"server"}))
    assert cluster.place(near, 1, excluded_nodes={"b"}) is None
    assert cluster.place(near, 1, excluded_nodes={"a"}) == (WorkerPlace("b", (1,)),)
    cluster.set_node(node("d", 1))
    assert cluster.place(make_request("last"), 1, excluded_nodes={"a", "b"}) == (WorkerPlace("d", (0,)),), (
        "a new node is used"
    )


@pytest.mark.parametrize(
    "picky", [{"models": frozenset({"old"})}, {"vendor": "red"}, {"capability_min": (9, 9)}]
)
def test_scarce_gpus_are_left_to_requests_that_need_them(picky: dict[str, Any]) -> None:
    cluster = ClusterAllocations(PythonPlacer, policy="supply")
    kinds = {
        "scarce": GpuFacts("old", "red", 9_000, (9, 9)),
        "common": GpuFacts("new", "green", 9_000, (9, 0)),
    }
    for number, (name, kind) in enumerate(kinds.items()):
        cluster.set_node(node(name, kinds=(kind, kind), cpu_milli=8_000 + 1_000 * number))
    for shape in (Shape(gpus=1), Shape(gpus=1, **picky)) * 20:
        cluster.record_arrival(make_request("job", shape))
    places = [cluster.place(make_request(f"any{number}"), 1) for number in range(2)]
    assert [place[0].node_id for place in places if place] == ["common", "common"]
    assert cluster.place(make_request("picky", Shape(gpus=1, **picky)), 1) == (WorkerPlace("scarce", (0,)),)


def test_node_with_two_gpu_models_is_used_only_for_gpus_by_number() -> None:
    mixed = (replace(H200, model="old"), H200)
    harness = SchedulerHarness(node("n", kinds=mixed), policy="supply")
    wanted = Shape(gpus=1, models=frozenset({"H200"}))
    harness.submit("any", shape=wanted)
    harness.submit("named", shape=replace(wanted, nodes=frozenset({"n"}), gpu_ids=(1,)))
    assert harness.started() == ["named"]


def test_registered_request_classes_and_node_sets_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placer_group, "CACHED_REQUEST_CLASSES_MAX", 3)
    monkeypatch.setattr(placer_group, "CACHED_NODE_SETS_MAX", 2)
    cluster = ClusterAllocations(PythonPlacer, policy="supply")
    for name in ("n", "m"):
        cluster.set_node(node(name, 4))
    before = [cluster.free_resources_of_node(name) for name in ("n", "m")]
    for number in range(1, 20):
        job = make_request(
            f"j{number}",
            Shape(1, 10 * number, cpu_milli=number),
            apart_job_names=frozenset({f"j{number - 4}"}),
        )
        cluster.record_arrival(job)
        assert cluster.place(job, 1) is not None
    for number in range(1, 20):
        cluster.release(f"j{number}")
    assert [cluster.free_resources_of_node(name) for name in ("n", "m")] == before
    caches = (
        cluster.placers.request_classes,
        cluster.placers.unconstrained_request_classes,
        cluster.placers.node_sets,
    )
    assert [len(cache) for cache in caches] == [3, 3, 2]
    assert cluster.placers.main_placer.register_request_class() == 6, "nothing else is registered"


def test_least_recently_used_request_class_is_dropped() -> None:
    placers = [PythonPlacer("bestfit"), PythonPlacer("bestfit")]
    numbers = RegistrationCache[int](
        placers,
        register=lambda cpus: lambda placer: placer.register_request_class(cpu_milli=cpus),
        drop=lambda placer, number: placer.drop_class(number),
        count_max=2,
    )
    first, second = numbers.get_number(10), numbers.get_number(20)
    assert numbers.get_number(10) == first
    assert numbers.get_number(30) == second, "20 was unused for longest"
    assert (numbers.get_number(10), len(numbers)) == (first, 2)
    numbers.clear()
    assert (len(numbers), numbers.get_number(40)) == (0, 0)


# --- changes of nodes ---------------------------------------------------------------------------


def test_changed_node_keeps_jobs_on_remaining_gpus() -> None:
    harness = SchedulerHarness(node("n", 4))
    for number in range(4):
        harness.submit(f"j{number}")
    harness.submit("wide", gpus=4)
    assert len(harness.started()) == 4
    harness.scheduler.set_node(node("n", 2, cpu_milli=32_000))
    assert harness.allocations.free_resources_of_node("n") == (32_000, 256_000, ((0, 141_000), (0, 141_000)))
    assert harness.allocations.usage("a").gpu_milli == 4000, "usage does not change"
    assert harness.allocations.capacity.gpu_milli == 2000
    for job_id in ("j3", "j2", "j0"):
        harness.scheduler.record_end(job_id)
    harness.submit("late")
    assert harness.started() == ["late"]
    assert harness.allocations.allocations_by_job["late"].places == (WorkerPlace("n", (0,)),), (
        "j1 uses the other GPU"
    )
    assert harness.allocations.usage("a").gpu_milli == 2000
    assert harness.pending("wide").reason == "no suitable node: n: has 2 GPUs"


def test_multi_gpu_job_keeps_remaining_gpus() -> None:
    cluster = ClusterAllocations(PythonPlacer, policy="bestfit")
    cluster.set_node(node("n", 4))
    wide = Shape(gpus=4, gpu_memory_mib=100_000, cpu_milli=20_000, memory_mib=9_000)
    cluster.hold(make_request("wide", wide), [WorkerPlace("n", (0, 1, 2, 3))])
    small = replace(H200, memory_mib=80_000)
    cluster.set_node(node("n", kinds=(small, small), cpu_milli=10_000, memory_mib=8_000))
    assert cluster.free_resources_of_node("n") == (0, 0, ((0, 0), (0, 0)))
    with cluster.dry_run() as then:
        then.release(cluster.allocations_by_job["wide"])
        assert then.place(make_request("two", Shape(gpus=2)), 1) == (WorkerPlace("n", (0, 1)),)
    cluster.set_node(node("n", 4))
    assert cluster.free_resources_of_node("n") == (44_000, 247_000, ((0, 41_000),) * 4), (
        "the job holds all of it again"
    )
    cluster.set_node(node("n", 0))
    cluster.release("wide")
    assert cluster.free_resources_of_node("n") == (64_000, 256_000, ())
    assert (cluster.usage("a"), cluster._reduced_holds) == (cluster.usage("nobody"), {})


def test_workers_at_one_place_share_the_remaining_resources() -> None:
    cluster = ClusterAllocations(PythonPlacer, policy="bestfit")
    cluster.set_node(node("n", 1))
    cluster.hold(make_request("two", Shape(1, 400, cpu_milli=3_000), workers=2), [WorkerPlace("n", (0,))] * 2)
    cluster.set_node(node("n", 1, cpu_milli=5_000))
    assert cluster.free_resources_of_node("n") == (0, 256_000, ((200, 141_000),))
    cluster.release("two")
    assert cluster.free_resources_of_node("n") == (5_000, 256_000, ((1000, 141_000),))


def test_changed_island_or_model_replaces_the_node() -> None:
    harness = SchedulerHarness(node("n", kinds=PAIRS))
    harness.submit("trio", workers=3, within=Within.ISLAND)
    harness.submit("old", shape=Shape(gpus=1, models=frozenset({"A100"})))
    assert harness.started() == []
    harness.scheduler.set_node(node("n", 4))
    assert harness.started() == ["trio"]
    harness.scheduler.set_node(node("n", kinds=(replace(H200, model="A100"),) * 4))
    assert harness.started() == ["old"]


def test_node_is_removed_only_without_jobs() -> None:
    harness = SchedulerHarness(node("n", 1), node("m", 1))
    harness.submit("job", shape=Shape(gpus=1, nodes=frozenset({"n"})))
    assert harness.started() == ["job"]
    with pytest.raises(UsageError, match="job job runs there"):
        harness.scheduler.remove_node("n")
    harness.scheduler.record_end("job")
    harness.scheduler.remove_node("n")
    with pytest.raises(UsageError, match="node n not found"):
        harness.scheduler.remove_node("n")
    assert [facts.node_id for facts in harness.allocations.nodes] == ["m"]
    assert harness.allocations.capacity.gpu_milli == 1000
    harness.submit("again", shape=Shape(gpus=1, nodes=frozenset({"n"})))
    harness.submit("any")
    assert harness.started() == ["any"]
    harness.scheduler.set_node(node("n", 1))
    assert harness.started() == ["again"]


def test_reservation_moves_from_a_removed_node() -> None:
    harness = SchedulerHarness(node("n", 2), node("m", 2))
    harness.submit("here", shape=Shape(gpus=2, nodes=frozenset({"n"})), time_limit_s=10.0)
    harness.submit("there", shape=Shape(gpus=2, nodes=frozenset({"m"})), time_limit_s=20.0)
    harness.submit("next", gpus=2)
    assert len(harness.started()) == 2
    harness.scheduler.record_end("here")
    harness.scheduler.remove_node("n")
    assert harness.pending("next").starts_at == 20.0
    assert harness.advance(20.0) == ["next"]


def test_registrations_of_removed_nodes_do_not_leak() -> None:
    cluster = ClusterAllocations(PythonPlacer, policy="supply")
    for number in range(300):
        name = f"n{number}"
        cluster.set_node(node(name, kinds=(replace(H200, model=name, memory_mib=1000 + number),)))
        cluster.record_arrival(
            make_request("job", Shape(gpus=1, nodes=frozenset({name}), models=frozenset({name})))
        )
        cluster.hold(make_request(name), [WorkerPlace(name, (0,))])
        cluster.set_node(node(name, 2))
        if number > 4:
            cluster.release(f"n{number - 4}")
            cluster.remove_node(f"n{number - 4}")
    assert len(cluster.nodes) == 5
    assert len(cluster.placers.node_id_by_number) <= 6
    assert len(cluster.placers.gpu_model_numbers) <= 2


def test_running_job_holds_what_its_nodes_still_have() -> None:
    cluster = ClusterAllocations(PythonPlacer, policy="bestfit")
    cluster.set_node(node("n", 2))
    cluster.set_node(node("m", 1))
    gone = WorkerPlace("n", (GPU_POSITION_UNKNOWN,))
    places = (gone, WorkerPlace("m", (0,)), gone, WorkerPlace("n", (1,)))
    with pytest.raises(UsageError):
        cluster.hold(make_request("gang", workers=4), places)
    assert cluster.free_resources_of_node("m")[2] == ((1000, 141_000),)
    cluster.hold(make_request("gang", workers=4), places, is_running=True)
    assert cluster.free_resources_of_node("m")[2] == ((0, 141_000),)
    assert cluster.free_resources_of_node("n")[2] == ((1000, 141_000), (0, 141_000))
    assert cluster.usage("a").gpu_milli == 4000, "usage is the full request"
    cluster.set_node(node("n", 3))
    assert cluster.free_resources_of_node("n")[2] == ((1000, 141_000), (0, 141_000), (1000, 141_000))
    cluster.release("gang")
    assert (cluster.usage("a"), cluster._reduced_holds) == (cluster.usage("nobody"), {})
    assert cluster.free_resources_of_node("n")[2] == ((1000, 141_000),) * 3


# --- workers per node ---------------------------------------------------------------------------


def test_workers_per_node_are_limited() -> None:
    cluster = ClusterAllocations(PythonPlacer, policy="bestfit", workers_per_node_max=2)
    cluster.set_node(node("n", 4))
    for number in range(2):
        assert cluster.place(JobRequest(f"j{number}", "t", number, Shape()), 1) is not None
    assert cluster.place(JobRequest("more", "t", 9, Shape(gpus=1)), 1) is None
    assert cluster.why_node_full(cluster.nodes[0]).startswith("runs 2 workers, the maximum per node")
    cluster.set_node(node("n", 4, labels=frozenset({("a", "b")})))
    assert cluster.place(JobRequest("more", "t", 9, Shape()), 1) is None, (
        "an update does not open a full node"
    )
    cluster.release("j0")
    assert cluster.why_node_full(cluster.nodes[0]) == ""
    assert cluster.place(JobRequest("more", "t", 9, Shape(gpus=1)), 1) is not None


def test_gang_without_resources_respects_the_worker_limit() -> None:
    cluster = ClusterAllocations(PythonPlacer, policy="bestfit", workers_per_node_max=3)
    for name in ("a", "b"):
        cluster.set_node(node(name, 4))
    places = cluster.place(JobRequest("two", "t", 1, Shape(), workers=2), 2)
    assert places is not None
    gang = cluster.place(JobRequest("gang", "t", 2, Shape(), workers=3), 3)
    assert gang is not None and {place.node_id for place in gang}.isdisjoint(p.node_id for p in places)
    assert cluster.place(JobRequest("last", "t", 3, Shape(), workers=2), 2) is None
    with pytest.raises(UsageError, match="more than 3 workers"):
        cluster.hold(JobRequest("last", "t", 3, Shape(), workers=2), places)
