"""Policies by name, and what happens when a user's own one does not behave."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest

from genie.errors import UsageError
from genie.scheduler import filters, policies
from genie.scheduler.explain import explain
from genie.scheduler.order import FairShare, Fifo, Key, Lines, Priority, Scales
from genie.scheduler.policies import Fenced, Policies
from genie.scheduler.request import Amounts, NodeFacts, Request, Shape
from genie.scheduler.scheduler import Rules
from genie.scheduler.victims import Running
from tests.scheduler.clusters import Desk, node


class SmallFirst:
    """What a user may write."""

    def within(self, request: Request) -> Key:
        return (request.shape.gpus, request.sequence)

    def among(self, request: Request, scales: Scales) -> Key:
        return self.within(request)


class Ticking:
    """A clock that a policy turns."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def fenced(policy: Any, clock: Callable[[], float] = lambda: 0.0) -> Fenced:
    return Fenced(policy, budget_s=0.01, clock=clock)


def desk_under(policy: Any, *nodes: NodeFacts, clock: Callable[[], float] = lambda: 0.0) -> Desk:
    return Desk(*(nodes or (node("n", 4),)), rules=Rules().under(fenced(policy, clock)))


def test_policies_are_made_by_name() -> None:
    known = Policies()
    made = [known.make(name, budget_s=1.0, clock=lambda: 0.0) for name in ("fair", "fifo", "priority")]
    assert [type(each) for each in made] == [FairShare, Fifo, Priority]
    known.register("small", SmallFirst)
    assert known.names == ["fair", "fifo", "priority", "small"]
    own = known.make("small", budget_s=1.0, clock=lambda: 0.0)
    assert isinstance(own, Fenced)
    assert (own.name, own.fault) == ("small", "")


@pytest.mark.parametrize(
    ("do", "why"),
    [
        (lambda it: it.register("fifo", SmallFirst), "there is a policy 'fifo' already"),
        (lambda it: it.register("", SmallFirst), "needs a name"),
        (lambda it: it.make("none", budget_s=1.0, clock=float), "there are fair, fifo, priority"),
    ],
)
def test_names_are_given_once_and_must_be_known(do: Callable[[Policies], object], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        do(Policies())


def test_a_policy_that_cannot_be_made_is_refused() -> None:
    known = Policies()
    known.register("breaks", lambda: 1 / 0)  # type: ignore[arg-type, return-value]
    known.register("half", object)  # type: ignore[arg-type, return-value]
    with pytest.raises(UsageError, match="cannot be made: ZeroDivisionError"):
        known.make("breaks", budget_s=1.0, clock=lambda: 0.0)
    with pytest.raises(UsageError, match="has no method within"):
        known.make("half", budget_s=1.0, clock=lambda: 0.0)
    for number in range(policies.POLICIES_MAX - 5):
        known.register(f"p{number}", SmallFirst)
    with pytest.raises(UsageError, match="policies already"):
        known.register("last", SmallFirst)


def test_a_users_own_order_decides() -> None:
    desk = desk_under(SmallFirst())
    for name, gpus in (("large", 3), ("small", 1), ("middle", 2)):
        desk.submit(name, gpus)
    assert desk.started() == ["small", "middle"]
    assert desk.scheduler.fault == ""


def broken(answer: Callable[[], object], method: str = "within") -> Any:
    policy = SmallFirst()
    setattr(policy, method, lambda *_: answer())
    return policy


def fail() -> object:
    raise ValueError("no luck")


class UnspeakableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError


def fail_twice() -> object:
    raise UnspeakableError


def leave() -> object:
    raise SystemExit(3)


@pytest.mark.parametrize(
    ("answer", "what"),
    [
        (fail, "raised ValueError: no luck"),
        (fail_twice, "raised UnspeakableError"),
        (leave, "raised SystemExit: 3"),
        (lambda: [1], "answered a list, and not a tuple of numbers"),
        (lambda: None, "answered a NoneType, and not a tuple of numbers"),
        (lambda: ("a",), "answered a str where a number belongs"),
        (lambda: (1, math.nan), "answered a number that is not finite"),
        (lambda: (math.inf,), "answered a number that is not finite"),
        (lambda: (1,) * 17, "answered a tuple of 17, and 16 are allowed"),
    ],
)
@pytest.mark.parametrize("method", ["within", "among"])
def test_an_order_that_does_not_behave_is_out_of_use(
    method: str, answer: Callable[[], object], what: str
) -> None:
    desk = desk_under(broken(answer, method))
    desk.submit("one", gpus=3)
    desk.submit("two", gpus=1)
    assert sorted(desk.started()) == ["one", "two"], "the built-in one takes over"
    first = "one" if method == "within" else "two"
    assert desk.scheduler.fault.endswith(f"{method}() for job {first} {what}")
    assert "'SmallFirst' is out of use, and FairShare decides" in desk.scheduler.fault


def test_an_answer_that_takes_too_long_is_the_last_one() -> None:
    clock = Ticking()

    class Slow(SmallFirst):
        asked = 0

        def within(self, request: Request) -> Key:
            self.asked += 1
            clock.now += 0.5 if request.job_id == "large" else 0.001
            return super().within(request)

    policy = Slow()
    desk = desk_under(policy, clock=clock)
    desk.submit("middle", gpus=2)
    desk.submit("large", gpus=3)
    desk.submit("small", gpus=2, time_limit_s=1.0)
    assert desk.started() == ["middle", "small"]
    assert desk.scheduler.fault.endswith("within() for job large took 0.5 s, and may take 0.01 s")
    assert policy.asked == 2


def test_who_stood_in_line_by_a_policy_that_is_gone_stands_in_it_by_the_other() -> None:
    class Last(SmallFirst):
        def within(self, request: Request) -> Key:
            return (-request.sequence,) if request.job_id != "bad" else fail()  # type: ignore[return-value]

        def among(self, request: Request, scales: Scales) -> Key:
            return (0,)

    desk = desk_under(Last())
    desk.submit("runs", gpus=4, time_limit_s=5.0)
    desk.started()
    for number in range(4):
        desk.submit(f"j{number}", gpus=4, time_limit_s=5.0)
    assert desk.pass_time(5.0) == ["j3"]
    desk.submit("bad", gpus=4, time_limit_s=5.0)
    desk.scheduler.withdraw("j1")
    assert desk.pass_time(25.0) == ["j0", "j2", "bad"]


def test_an_order_that_never_says_the_same_twice_ends_and_loses_nobody() -> None:
    numbers = itertools.count()

    class Restless:
        def within(self, request: Request) -> Key:
            return (next(numbers) * (-1) ** request.sequence,)

        def among(self, request: Request, scales: Scales) -> Key:
            return (next(numbers),)

    lines = Lines(fenced(Restless()))
    requests = [Request(f"j{number}", "abc"[number % 3], number, Shape(gpus=1)) for number in range(9)]
    for request in requests:
        lines.add(request, (0, 0))
    scales = Scales(0.0, Amounts(8000), lambda _: Amounts(), {})
    walked = [each.job_id for each in lines.walk(scales, why_all=lambda *_: "", tell=lambda *_: None)]
    assert sorted(walked) == [f"j{number}" for number in range(9)]
    for request in requests:
        lines.remove(request, (0, 0))
    assert list(lines.walk(scales, why_all=lambda *_: "", tell=lambda *_: None)) == []


# --- filters ------------------------------------------------------------------------------------


class OwnNodes(SmallFirst):
    """Each tenant on nodes with its label."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []

    def allowed(self, request: Request, node: NodeFacts) -> str:
        self.asked.append((request.tenant, node.node_id))
        assert (request.job_id, request.priority, node.closed) == ("", 0, "")
        return "" if ("for", request.tenant) in node.labels else f"is not for {request.tenant}"


def labelled(name: str, tenant: str, **facts: object) -> NodeFacts:
    return node(name, 2, labels=frozenset({("for", tenant)}), **facts)


def test_a_filter_rules_nodes_out_and_is_told() -> None:
    desk = desk_under(OwnNodes(), labelled("x", "a"), labelled("y", "b"), labelled("z", "b"))
    desk.submit("no", tenant="c")
    assert desk.why("no").reason == "no node will do: x, y, z: is not for c"
    for number, tenant in enumerate("aabb"):
        desk.submit(f"j{number}", gpus=2, tenant=tenant, time_limit_s=5.0)
    assert sorted(desk.started()) == ["j0", "j2", "j3"]
    assert {desk.book.held[job].places[0].node_id for job in ("j2", "j3")} == {"y", "z"}
    found = explain(desk.scheduler, "j1", reason="", now=0.0)
    assert [(each.reason, each.nodes, each.ever) for each in found.ruled_out] == [
        ("0 of 2 GPUs are free", ("x",), False),
        ("is not for a", ("y", "z"), True),
    ]


def test_a_filter_is_asked_once_for_a_kind_of_jobs_and_a_node() -> None:
    policy = OwnNodes()
    desk = desk_under(policy, labelled("x", "a"), labelled("y", "b"))
    for number in range(4):
        desk.submit(f"j{number}", tenant="ab"[number % 2], priority=number, time_limit_s=1.0)
        desk.started()
    assert sorted(policy.asked) == [("a", "x"), ("a", "y"), ("b", "x"), ("b", "y")]
    desk.scheduler.set_node(labelled("z", "b"))
    desk.scheduler.set_node(labelled("x", "a", closed="draining", memory_outside_mib=(5, 5)))
    desk.submit("more", tenant="b")
    desk.decide()
    assert sorted(policy.asked[4:]) == [("b", "z")], "of a new node only"
    desk.scheduler.set_node(labelled("x", "b"))
    desk.submit("again", tenant="b")
    desk.decide()
    assert sorted(policy.asked[5:]) == [("b", "x")], "and of one that is another"


def test_filters_remember_a_bounded_number_of_kinds() -> None:
    policy = OwnNodes()
    made = filters.Filters(policy.allowed)
    facts = labelled("x", "a")
    several = [Request("j", f"t{number}", 0, Shape()) for number in range(filters.KINDS_MAX + 1)]
    for request in (*several, several[-1], several[0]):
        made.why_not(made.kind(request), facts)
    assert len(policy.asked) == filters.KINDS_MAX + 2, "the first was forgotten"
    assert len(made._known) == filters.KINDS_MAX


@pytest.mark.parametrize("answer", [fail, lambda: None, lambda: False])
def test_a_filter_that_does_not_behave_rules_out_nothing(answer: Callable[[], object]) -> None:
    class Strict(SmallFirst):
        def allowed(self, request: Request, node: NodeFacts) -> str:
            return "never there" if node.node_id == "x" else answer()  # type: ignore[return-value]

    desk = desk_under(Strict(), node("x", 1), node("y", 1))
    for number in range(2):
        desk.submit(f"j{number}")
    desk.decide()
    desk.decide()
    assert sorted(desk.book.held) == ["j0", "j1"]
    assert "allowed() for jobs of a on node y" in desk.scheduler.fault


# --- victims ------------------------------------------------------------------------------------


class NewestGoes(SmallFirst):
    def cost(self, running: Running, now: float) -> float:
        return -running.request.sequence


@pytest.mark.parametrize(
    ("policy", "victim", "is_out"),
    [
        (SmallFirst(), "old", False),
        (NewestGoes(), "new", False),
        (broken(lambda: "dear", "cost"), "old", True),
        (broken(fail, "cost"), "old", True),
    ],
)
def test_who_goes_first_is_a_matter_of_cost(policy: Any, victim: str, is_out: bool) -> None:
    """Without one's own: the lowest priority."""
    desk = desk_under(policy, node("n", 2))
    desk.submit("old", preemptible=True)
    desk.submit("new", preemptible=True, priority=1)
    assert len(desk.started()) == 2
    desk.submit("high", priority=5)
    assert desk.preempted() == [victim]
    assert bool(desk.scheduler.fault) == is_out


def test_another_policy_brings_its_own_and_takes_nothing_over() -> None:
    rules = Rules().under(fenced(OwnNodes()))
    assert rules.allowed is not None
    desk = Desk(labelled("x", "b"), rules=rules)
    desk.submit("job")
    assert desk.started() == []
    desk.scheduler.set_rules(rules.under(Fifo()))
    assert desk.scheduler.rules.allowed is None
    assert desk.started() == ["job"]
