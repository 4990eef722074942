"""Invariants of the scheduler for any cluster, jobs and order of events."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from genie.errors import UsageError
from genie.model.job import Spread, Within
from genie.scheduler.decisions import Preempt, Start, Wait
from genie.scheduler.order import FairShare, Fifo, Priority
from genie.scheduler.quota import Quota, Quotas, fits_within, gpu_limit_amounts
from genie.scheduler.request import WHOLE_GPU_MILLI, Allocation, Amounts, NodeFacts, Shape
from genie.scheduler.rules import Rules
from tests.scheduler.clusters import H200, SchedulerHarness, node

TENANTS = ("a", "b", "c")
TIME_LIMIT_S_MAX = 50.0

clusters = st.lists(
    st.builds(
        node,
        name=st.just(""),
        gpus=st.sampled_from([0, 1, 2, 4, 8]),
        kinds=st.sampled_from([(), (), tuple(replace(H200, island=gpu // 2) for gpu in range(4))]),
        rack=st.sampled_from(["x", "y"]),
        cpu_milli=st.sampled_from([8_000, 64_000]),
    ),
    min_size=1,
    max_size=4,
)
shapes = st.one_of(
    st.builds(Shape, gpus=st.sampled_from([0, 1, 1, 2, 4]), cpu_milli=st.sampled_from([0, 1_000, 9_000])),
    st.builds(Shape, gpus=st.just(1), gpu_milli=st.sampled_from([100, 500, 700]), cpu_milli=st.just(500)),
    st.builds(
        Shape,
        gpus=st.just(1),
        gpu_milli=st.sampled_from([300, 1000, 1000]),
        cpu_milli=st.sampled_from([0, 0, 5_000]),
        nodes=st.sampled_from([frozenset({"n0"}), frozenset({"n1"})]),
        gpu_ids=st.sampled_from([(0,), (1,), (0, 1)]),
    ),
)
jobs = st.fixed_dictionaries(
    {
        "shape": shapes,
        "tenant": st.sampled_from(TENANTS),
        "workers": st.sampled_from([1, 1, 1, 2, 3, 6]),
        "elastic": st.booleans(),
        "within": st.sampled_from(list(Within)),
        "spread": st.sampled_from(list(Spread)),
        "priority": st.integers(0, 3),
        "preemptible": st.booleans(),
        "grace_s": st.sampled_from([0.0, 5.0]),
        "time_limit_s": st.sampled_from([1.0, 7.0, 20.0, TIME_LIMIT_S_MAX]),
    }
)
rules = st.builds(
    Rules,
    order=st.sampled_from([Fifo(), Priority(aging_s=20.0), FairShare()]),
    quotas=st.sampled_from(
        [
            Quotas(),
            Quotas(
                {
                    "a": Quota(gpu_limit_amounts(2)),
                    "b": Quota(gpu_limit_amounts(1), borrowable=gpu_limit_amounts(1)),
                }
            ),
            Quotas({tenant: Quota(gpu_limit_amounts(2)) for tenant in TENANTS}),
        ]
    ),
    allows_preemption=st.booleans(),
    allows_backfill=st.booleans(),
    migrations_per_job_max=st.integers(0, 2),
)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), jobs),
        st.tuples(st.just("submit"), jobs),
        st.tuples(st.just("time"), st.sampled_from([0.0, 1.0, 6.0, 20.0])),
        st.tuples(st.just("end"), st.integers(0, 30)),
        st.tuples(st.just("withdraw"), st.integers(0, 30)),
        st.tuples(st.just("close"), st.integers(0, 3)),
        st.tuples(st.just("open"), st.integers(0, 3)),
        st.tuples(st.just("remove"), st.integers(0, 3)),
        st.tuples(st.just("rules"), st.sampled_from([Fifo(), Priority(aging_s=20.0), FairShare()])),
        st.tuples(st.just("change"), st.integers(0, 15)),
    ),
    max_size=30,
)


@dataclass
class SchedulerWorld:
    """A harness and the events applied to it."""

    harness: SchedulerHarness
    nodes: list[NodeFacts]
    submitted: int = 0
    removed: set[str] = field(default_factory=set)
    changed: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, cluster: list[NodeFacts], how: Rules) -> SchedulerWorld:
        named = [_with_node_id(facts, f"n{number}") for number, facts in enumerate(cluster)]
        return cls(SchedulerHarness(*named, rules=how), named)

    def do(self, step: tuple[str, Any]) -> None:
        what, value = step
        scheduler = self.harness.scheduler
        if what == "submit":
            self.submit(value)
        elif what == "time":
            self.harness.advance(self.harness.now + value)
        elif what == "end" and scheduler.running_jobs:
            job = scheduler.running_jobs[value % len(scheduler.running_jobs)]
            scheduler.record_end(job.request.job_id)
        elif what == "withdraw" and scheduler.queued_requests:
            scheduler.withdraw(scheduler.queued_requests[value % len(scheduler.queued_requests)].job_id)
        elif what in ("close", "open"):
            facts = self.nodes[value % len(self.nodes)]
            scheduler.set_node(facts if what == "open" else _with_blocked_node(facts))
            self.removed.discard(facts.node_id)
        elif what == "rules":
            scheduler.set_rules(replace(scheduler.rules, order=value))
        elif what == "remove":
            self.remove(self.nodes[value % len(self.nodes)].node_id)
        elif what == "change":
            self.change(value % len(self.nodes), value // 4)

    def remove(self, node_id: str) -> None:
        try:
            self.harness.scheduler.remove_node(node_id)
        except UsageError:
            held = self.harness.allocations.allocations_by_job.values()
            runs = any(place.node_id == node_id for each in held for place in each.places)
            assert runs or node_id in self.removed
        else:
            self.removed.add(node_id)

    def change(self, number: int, how: int) -> None:
        """Fewer or more GPUs, CPUs and memory than before."""
        facts = self.nodes[number]
        kinds = (H200,) * [0, 1, 3, 8][how]
        facts = replace(facts, gpus=kinds, cpu_milli=[500, 8_000][how % 2], memory_mib=64_000 * (how + 1))
        self.nodes[number] = facts
        self.harness.scheduler.set_node(facts)
        self.removed.discard(facts.node_id)
        self.changed.add(facts.node_id)

    def submit(self, options: dict[str, Any]) -> None:
        options = dict(options)
        elastic = options.pop("elastic")
        least = 1 if elastic else 0
        self.harness.submit(f"j{self.submitted}", workers_min=least, **options)
        self.submitted += 1


def _with_node_id(facts: NodeFacts, name: str) -> NodeFacts:
    return NodeFacts(**(vars(facts) | {"node_id": name}))


def _with_blocked_node(facts: NodeFacts) -> NodeFacts:
    return NodeFacts(**(vars(facts) | {"blocked_reason": "draining"}))


def check_allocations(world: SchedulerWorld) -> None:
    """Capacity is never exceeded, gangs are whole, no GPU has two tenants, and the three placers agree."""
    harness = world.harness
    cpus: Counter[str] = Counter()
    shares: Counter[tuple[str, int]] = Counter()
    tenants: dict[tuple[str, int], set[str]] = {}
    for held in harness.allocations.allocations_by_job.values():
        request = held.request
        assert request.workers_required <= len(held.places) <= request.workers
        nodes = {place.node_id for place in held.places}
        if request.within in (Within.NODE, Within.ISLAND):
            assert len(nodes) == 1
        elif request.spread is Spread.SPREAD:
            assert len(nodes) == len(held.places)
        pinned = set(request.shape.gpu_ids)
        assert not pinned or all(set(place.gpu_ids) <= pinned for place in held.places)
        if request.within is Within.ISLAND and not nodes & world.changed:
            assert len(islands_of(world, held)) <= 1
        for shape, place in (harness.allocations.get_hold(request, place) for place in held.places):
            assert (shape == request.shape.without_constraints) or place.node_id in world.changed
            cpus[place.node_id] += shape.cpu_milli
            for gpu in place.gpu_ids:
                shares[place.node_id, gpu] += request.shape.gpu_milli
                tenants.setdefault((place.node_id, gpu), set()).add(request.tenant)
    assert all(len(found) == 1 for found in tenants.values())
    there = [facts for facts in world.nodes if facts.node_id not in world.removed]
    assert harness.allocations.capacity == sum((facts.amounts for facts in there), Amounts())
    for facts in there:
        cpu_milli, _, gpus = harness.allocations.free_resources_of_node(facts.node_id)
        assert cpu_milli == facts.cpu_milli - cpus[facts.node_id] >= 0
        for gpu, (free_milli, _) in enumerate(gpus):
            assert free_milli == WHOLE_GPU_MILLI - shares[facts.node_id, gpu] >= 0
    for placer in (harness.allocations.placers.dry_run_placer, harness.allocations.placers.projection_placer):
        for number in [each.node_number for each in harness.allocations.placers.nodes.values()]:
            assert placer.node_state(number) == harness.allocations.placers.main_placer.node_state(number)


def islands_of(world: SchedulerWorld, held: Allocation) -> set[int]:
    facts = {node.node_id: node for node in world.nodes}
    return {facts[place.node_id].gpus[gpu].island for place in held.places for gpu in place.gpu_ids}


def check_quotas(world: SchedulerWorld) -> None:
    quotas = world.harness.scheduler.rules.quotas
    for tenant, quota in quotas.by_tenant.items():
        usage = world.harness.allocations.usage(tenant)
        assert fits_within(usage, quota.guaranteed + quota.borrowable)
        held = [
            held
            for held in world.harness.allocations.allocations_by_job.values()
            if held.request.tenant == tenant
        ]
        fixed = sum((each.amounts for each in held if not each.request.preemptible), Amounts())
        assert fits_within(fixed, quota.guaranteed), "only preemptible jobs borrow"


@given(clusters, rules, steps)
@settings(max_examples=150)
def test_nothing_is_overcommitted_gangs_are_whole_and_quotas_hold(
    cluster: list[NodeFacts], how: Rules, events: list[tuple[str, Any]]
) -> None:
    world = SchedulerWorld.of(cluster, how)
    for event in events:
        world.do(event)
        decisions = world.harness.decide()
        check_allocations(world)
        check_quotas(world)
        counts = Counter(each.job_id for each in decisions)
        assert all(count == 1 for count in counts.values())
        logged = {each.job_id: each for each in world.harness.log if isinstance(each, Wait)}
        for wait in world.harness.scheduler.last_wait_decisions:
            assert logged.get(wait.job_id) == wait, "every queued job has a reason"


@given(clusters, rules, st.lists(jobs, max_size=14))
@settings(max_examples=150)
def test_every_feasible_job_runs_eventually(
    cluster: list[NodeFacts], how: Rules, several: list[dict[str, Any]]
) -> None:
    world = SchedulerWorld.of(cluster, how)
    feasible = set()
    for number, options in enumerate(several):
        single = SchedulerWorld.of(cluster, how)
        single.submit(options)
        if single.harness.started():
            feasible.add(f"j{number}")
    for options in several:
        world.submit(options)
    harness = world.harness
    ran = set(harness.started())
    for _ in range(60 * (len(several) + 1)):
        if not harness.scheduler.running_jobs:
            break
        ran |= set(harness.advance(harness.now + 2.0))
    assert feasible <= ran
    assert not harness.scheduler.running_jobs


@given(clusters, rules, st.lists(jobs, max_size=14))
@settings(max_examples=100)
def test_preemption_terminates(cluster: list[NodeFacts], how: Rules, several: list[dict[str, Any]]) -> None:
    """Without arrivals and ends, starts and preemptions stop."""
    world = SchedulerWorld.of(cluster, how)
    for options in several:
        world.submit(options | {"time_limit_s": None})
    harness = world.harness
    for _ in range(6 * len(several) + 1):
        decisions = harness.decide()
        if not any(isinstance(each, Preempt | Start) for each in decisions):
            return
        harness.now += 10.0
        for job in harness.scheduler.running_jobs:
            if job.is_stopping:
                harness.scheduler.record_end(job.request.job_id, requeue=True)
    raise AssertionError(f"preemption does not terminate: {decisions}")


@given(clusters, st.sampled_from([Fifo(), FairShare()]), steps)
@settings(max_examples=150)
def test_reservation_is_never_delayed(
    cluster: list[NodeFacts], order: Any, events: list[tuple[str, Any]]
) -> None:
    """By later jobs. Without preemption, quotas and closed nodes nothing else can delay it."""
    world = SchedulerWorld.of(cluster, Rules(order=order, allows_preemption=False))
    last: tuple[str, float] | None = None
    for what, value in events:
        if what in ("close", "open", "remove", "change", "rules"):
            continue
        world.do((what, value | {"priority": 0} if what == "submit" else value))
        world.harness.decide()
        reservation = world.harness.scheduler.reservation
        if reservation is not None and last is not None and reservation.job_id == last[0]:
            assert reservation.starts_at <= max(last[1], world.harness.now)
        last = None if reservation is None else (reservation.job_id, reservation.starts_at)


@given(clusters, rules, steps)
@settings(max_examples=50)
def test_decisions_are_deterministic(
    cluster: list[NodeFacts], how: Rules, events: list[tuple[str, Any]]
) -> None:
    logs = []
    for _ in range(2):
        world = SchedulerWorld.of(cluster, how)
        for event in events:
            world.do(event)
            world.harness.decide()
        logs.append(world.harness.log)
    assert logs[0] == logs[1]


@given(clusters, rules, steps)
@settings(max_examples=150)
def test_partial_scheduling_pass_misses_no_start(
    cluster: list[NodeFacts], how: Rules, events: list[tuple[str, Any]]
) -> None:
    """After a pass that needs no full pass, a full pass would start nothing."""
    world = SchedulerWorld.of(cluster, how)
    for event in events:
        world.do(event)
        world.harness.decide()
        scheduler = world.harness.scheduler
        if scheduler.job_table.needs_full_pass:
            continue
        scheduler.job_table.require_full_pass()
        assert all(isinstance(each, Wait) for each in world.harness.decide())
        scheduler.job_table.begin_full_pass()
