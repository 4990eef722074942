"""Policies by name, and isolation of policies written by users."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest

from genie.errors import UsageError
from genie.scheduler import policies
from genie.scheduler.cluster import filters
from genie.scheduler.explain import explain_pending_job
from genie.scheduler.order import FairShare, Fifo, JobQueue, Key, OrderInputs, Priority
from genie.scheduler.policies import IsolatedPolicy, PolicyRegistry
from genie.scheduler.preemption.victims import StartedJob
from genie.scheduler.request import Amounts, JobRequest, NodeFacts, Shape
from genie.scheduler.rules import Rules
from tests.scheduler.clusters import SchedulerHarness, node


class SmallJobsFirst:
    """A policy written by a user."""

    def within(self, request: JobRequest) -> Key:
        return (request.shape.gpus, request.sequence)

    def among(self, request: JobRequest, inputs: OrderInputs) -> Key:
        return self.within(request)


class ManualClock:
    """A clock that a policy advances."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def isolate(policy: Any, clock: Callable[[], float] = lambda: 0.0) -> IsolatedPolicy:
    return IsolatedPolicy(policy, budget_s=0.01, clock=clock)


def harness_with(
    policy: Any, *nodes: NodeFacts, clock: Callable[[], float] = lambda: 0.0
) -> SchedulerHarness:
    return SchedulerHarness(*(nodes or (node("n", 4),)), rules=Rules().with_order(isolate(policy, clock)))


def test_policies_are_created_by_name() -> None:
    known = PolicyRegistry()
    created = [known.create(name, budget_s=1.0, clock=lambda: 0.0) for name in ("fair", "fifo", "priority")]
    assert [type(each) for each in created] == [FairShare, Fifo, Priority]
    known.register("small", SmallJobsFirst)
    assert known.names == ["fair", "fifo", "priority", "small"]
    own = known.create("small", budget_s=1.0, clock=lambda: 0.0)
    assert isinstance(own, IsolatedPolicy)
    assert (own.name, own.disabled_reason) == ("small", "")


@pytest.mark.parametrize(
    ("do", "why"),
    [
        (lambda it: it.register("fifo", SmallJobsFirst), "policy 'fifo' already exists"),
        (lambda it: it.register("", SmallJobsFirst), "needs a name"),
        (lambda it: it.create("none", budget_s=1.0, clock=float), "known policies: fair, fifo, priority"),
    ],
)
def test_duplicate_and_unknown_policy_names_are_rejected(
    do: Callable[[PolicyRegistry], object], why: str
) -> None:
    with pytest.raises(UsageError, match=why):
        do(PolicyRegistry())


def test_policy_with_a_failing_factory_is_rejected() -> None:
    known = PolicyRegistry()
    known.register("breaks", lambda: 1 / 0)  # type: ignore[arg-type, return-value]
    known.register("half", object)  # type: ignore[arg-type, return-value]
    with pytest.raises(UsageError, match="could not create policy 'breaks': ZeroDivisionError"):
        known.create("breaks", budget_s=1.0, clock=lambda: 0.0)
    with pytest.raises(UsageError, match="has no method within"):
        known.create("half", budget_s=1.0, clock=lambda: 0.0)
    for number in range(policies.POLICIES_MAX - 5):
        known.register(f"p{number}", SmallJobsFirst)
    with pytest.raises(UsageError, match="the maximum is 64 policies"):
        known.register("last", SmallJobsFirst)


def test_user_policy_orders_the_queue() -> None:
    harness = harness_with(SmallJobsFirst())
    for name, gpus in (("large", 3), ("small", 1), ("middle", 2)):
        harness.submit(name, gpus)
    assert harness.started() == ["small", "middle"]
    assert harness.scheduler.policy_fault == ""


def policy_with_broken_method(result: Callable[[], object], method: str = "within") -> Any:
    policy = SmallJobsFirst()
    setattr(policy, method, lambda *_: result())
    return policy


def raise_value_error() -> object:
    raise ValueError("no luck")


class UnprintableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError


def raise_unprintable_error() -> object:
    raise UnprintableError


def exit_process() -> object:
    raise SystemExit(3)


@pytest.mark.parametrize(
    ("result", "what"),
    [
        (raise_value_error, "raised ValueError: no luck"),
        (raise_unprintable_error, "raised UnprintableError"),
        (exit_process, "raised SystemExit: 3"),
        (lambda: [1], "returned a list instead of a tuple of numbers"),
        (lambda: None, "returned a NoneType instead of a tuple of numbers"),
        (lambda: ("a",), "returned a str instead of a number"),
        (lambda: (1, math.nan), "returned a number that is not finite"),
        (lambda: (math.inf,), "returned a number that is not finite"),
        (lambda: (1,) * 17, "returned a tuple of 17 numbers; the maximum is 16"),
    ],
)
@pytest.mark.parametrize("method", ["within", "among"])
def test_policy_with_an_invalid_order_is_disabled(
    method: str, result: Callable[[], object], what: str
) -> None:
    harness = harness_with(policy_with_broken_method(result, method))
    harness.submit("one", gpus=3)
    harness.submit("two", gpus=1)
    assert sorted(harness.started()) == ["one", "two"], "the built-in order replaces it"
    first = "one" if method == "within" else "two"
    assert harness.scheduler.policy_fault.endswith(f"{method}() for job {first} {what}")
    assert "'SmallJobsFirst' is disabled and replaced by FairShare" in harness.scheduler.policy_fault


def test_slow_call_disables_the_policy() -> None:
    clock = ManualClock()

    class Slow(SmallJobsFirst):
        calls = 0

        def within(self, request: JobRequest) -> Key:
            self.calls += 1
            clock.now += 0.5 if request.job_id == "large" else 0.001
            return super().within(request)

    policy = Slow()
    harness = harness_with(policy, clock=clock)
    harness.submit("middle", gpus=2)
    harness.submit("large", gpus=3)
    harness.submit("small", gpus=2, time_limit_s=1.0)
    assert harness.started() == ["middle", "small"]
    assert harness.scheduler.policy_fault.endswith("within() for job large took 0.5 s; the limit is 0.01 s")
    assert policy.calls == 2


def test_queue_is_reordered_when_a_policy_is_disabled() -> None:
    class Last(SmallJobsFirst):
        def within(self, request: JobRequest) -> Key:
            return (-request.sequence,) if request.job_id != "bad" else raise_value_error()  # type: ignore[return-value]

        def among(self, request: JobRequest, inputs: OrderInputs) -> Key:
            return (0,)

    harness = harness_with(Last())
    harness.submit("runs", gpus=4, time_limit_s=5.0)
    harness.started()
    for number in range(4):
        harness.submit(f"j{number}", gpus=4, time_limit_s=5.0)
    assert harness.advance(5.0) == ["j3"]
    harness.submit("bad", gpus=4, time_limit_s=5.0)
    harness.scheduler.withdraw("j1")
    assert harness.advance(25.0) == ["j0", "j2", "bad"]


def test_queue_with_an_inconsistent_policy_yields_every_job_once() -> None:
    numbers = itertools.count()

    class Restless:
        def within(self, request: JobRequest) -> Key:
            return (next(numbers) * (-1) ** request.sequence,)

        def among(self, request: JobRequest, inputs: OrderInputs) -> Key:
            return (next(numbers),)

    queue = JobQueue(isolate(Restless()))
    requests = [JobRequest(f"j{number}", "abc"[number % 3], number, Shape(gpus=1)) for number in range(9)]
    for request in requests:
        queue.add(request, (0, 0))
    inputs = OrderInputs(0.0, Amounts(8000), lambda _: Amounts(), {})
    walked = [
        each.job_id
        for each in queue.iterate(inputs, why_skip_queue_group=lambda *_: "", on_skip=lambda *_: None)
    ]
    assert sorted(walked) == [f"j{number}" for number in range(9)]
    for request in requests:
        queue.remove(request, (0, 0))
    assert list(queue.iterate(inputs, why_skip_queue_group=lambda *_: "", on_skip=lambda *_: None)) == []


# --- filters ------------------------------------------------------------------------------------


class NodesOfTenantFilter(SmallJobsFirst):
    """Each tenant on nodes with its label."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []

    def allowed(self, request: JobRequest, node: NodeFacts) -> str:
        self.calls.append((request.tenant, node.node_id))
        assert (request.job_id, request.priority, node.blocked_reason) == ("", 0, "")
        return "" if ("for", request.tenant) in node.labels else f"is not for {request.tenant}"


def node_of_tenant(name: str, tenant: str, **facts: object) -> NodeFacts:
    return node(name, 2, labels=frozenset({("for", tenant)}), **facts)


def test_filter_excludes_nodes_with_its_reason() -> None:
    harness = harness_with(
        NodesOfTenantFilter(), node_of_tenant("x", "a"), node_of_tenant("y", "b"), node_of_tenant("z", "b")
    )
    harness.submit("no", tenant="c")
    assert harness.pending("no").reason == "no suitable node: x, y, z: is not for c"
    for number, tenant in enumerate("aabb"):
        harness.submit(f"j{number}", gpus=2, tenant=tenant, time_limit_s=5.0)
    assert sorted(harness.started()) == ["j0", "j2", "j3"]
    assert {harness.allocations.allocations_by_job[job].places[0].node_id for job in ("j2", "j3")} == {
        "y",
        "z",
    }
    found = explain_pending_job(harness.scheduler, "j1", reason="", now=0.0)
    assert [(each.reason, each.nodes, each.is_permanent) for each in found.blocked_nodes] == [
        ("0 of 2 GPUs are free", ("x",), False),
        ("is not for a", ("y", "z"), True),
    ]


def test_filter_is_called_once_per_kind_and_node() -> None:
    policy = NodesOfTenantFilter()
    harness = harness_with(policy, node_of_tenant("x", "a"), node_of_tenant("y", "b"))
    for number in range(4):
        harness.submit(f"j{number}", tenant="ab"[number % 2], priority=number, time_limit_s=1.0)
        harness.started()
    assert sorted(policy.calls) == [("a", "x"), ("a", "y"), ("b", "x"), ("b", "y")]
    harness.scheduler.set_node(node_of_tenant("z", "b"))
    harness.scheduler.set_node(
        node_of_tenant("x", "a", blocked_reason="draining", memory_used_outside_cluster_mib=(5, 5))
    )
    harness.submit("more", tenant="b")
    harness.decide()
    assert sorted(policy.calls[4:]) == [("b", "z")], "only the new node"
    harness.scheduler.set_node(node_of_tenant("x", "b"))
    harness.submit("again", tenant="b")
    harness.decide()
    assert sorted(policy.calls[5:]) == [("b", "x")], "and the changed node"


def test_filter_cache_is_bounded() -> None:
    policy = NodesOfTenantFilter()
    created = filters.NodeFilterCache(policy.allowed)
    facts = node_of_tenant("x", "a")
    several = [
        JobRequest("j", f"t{number}", 0, Shape()) for number in range(filters.CACHED_FILTER_REQUESTS_MAX + 1)
    ]
    for request in (*several, several[-1], several[0]):
        created.why_node_excluded(created.to_filter_request(request), facts)
    assert len(policy.calls) == filters.CACHED_FILTER_REQUESTS_MAX + 2, "the first was evicted"
    assert len(created._reasons_by_filter_request) == filters.CACHED_FILTER_REQUESTS_MAX


@pytest.mark.parametrize("result", [raise_value_error, lambda: None, lambda: False])
def test_invalid_filter_excludes_nothing(result: Callable[[], object]) -> None:
    class Strict(SmallJobsFirst):
        def allowed(self, request: JobRequest, node: NodeFacts) -> str:
            return "never there" if node.node_id == "x" else result()  # type: ignore[return-value]

    harness = harness_with(Strict(), node("x", 1), node("y", 1))
    for number in range(2):
        harness.submit(f"j{number}")
    harness.decide()
    harness.decide()
    assert sorted(harness.allocations.allocations_by_job) == ["j0", "j1"]
    assert "allowed() for jobs of a on node y" in harness.scheduler.policy_fault


# --- victims ------------------------------------------------------------------------------------


class PreemptNewestFirst(SmallJobsFirst):
    def cost(self, running: StartedJob, now: float) -> float:
        return -running.request.sequence


@pytest.mark.parametrize(
    ("policy", "victim", "is_out"),
    [
        (SmallJobsFirst(), "old", False),
        (PreemptNewestFirst(), "new", False),
        (policy_with_broken_method(lambda: "dear", "cost"), "old", True),
        (policy_with_broken_method(raise_value_error, "cost"), "old", True),
    ],
)
def test_victims_are_ordered_by_cost(policy: Any, victim: str, is_out: bool) -> None:
    """The default cost is the priority."""
    harness = harness_with(policy, node("n", 2))
    harness.submit("old", preemptible=True)
    harness.submit("new", preemptible=True, priority=1)
    assert len(harness.started()) == 2
    harness.submit("high", priority=5)
    assert harness.preempted() == [victim]
    assert bool(harness.scheduler.policy_fault) == is_out


def test_new_policy_replaces_filter_and_cost() -> None:
    rules = Rules().with_order(isolate(NodesOfTenantFilter()))
    assert rules.node_filter is not None
    harness = SchedulerHarness(node_of_tenant("x", "b"), rules=rules)
    harness.submit("job")
    assert harness.started() == []
    harness.scheduler.set_rules(rules.with_order(Fifo()))
    assert harness.scheduler.rules.node_filter is None
    assert harness.started() == ["job"]
