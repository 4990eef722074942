"""The native placer and the plain one are the same, and neither gives away what is not there."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from genie.runtime import native
from genie.scheduler.placement.plain import FIRST_LESSON, PlainPlacer
from genie.scheduler.placement.protocol import ANY_MODEL, Place, Placer, TypicalShape

TYPICAL = (
    TypicalShape(1, 500, 4000, share=0.4),
    TypicalShape(1, 1000, 8000, models=0b01, share=0.3),
    TypicalShape(2, 1000, 8000, share=0.2),
    TypicalShape(0, 0, 9000, share=0.1),
)

nodes = st.fixed_dictionaries(
    {
        "cpu_milli": st.sampled_from([0, 8000, 32000]),
        "memory_mib": st.sampled_from([1000, 64000]),
        "gpus": st.sampled_from([0, 1, 2, 4, 8]),
        "gpu_memory_mib": st.sampled_from([0, 16000]),
        "model": st.integers(0, 2),
    }
)
models = st.sampled_from([ANY_MODEL, 0b001, 0b010, 0b110, 0b1000])
allowed = st.sampled_from([None, None, None, [0], [0, 1]])
beside = {"cpu_milli": st.sampled_from([0, 100, 3000, 9000]), "memory_mib": st.sampled_from([0, 500, 9000])}
requests = st.one_of(
    st.fixed_dictionaries({"nodes": allowed, **beside}),
    st.fixed_dictionaries(
        {
            "gpus": st.sampled_from([1, 1, 1, 2]),
            "gpu_milli": st.sampled_from([1, 190, 250, 500, 810, 999]),
            "gpu_memory_mib": st.sampled_from([0, 0, 4000, 15999]),
            "models": models,
            "nodes": allowed,
            **beside,
        }
    ),
    st.fixed_dictionaries(
        {"gpus": st.sampled_from([1, 1, 2, 3, 8]), "gpu_milli": st.just(1000), "models": models, **beside}
    ),
)
numbers = st.integers(0, 63)
steps = st.one_of(
    st.tuples(st.sampled_from(["place", "place", "place", "choose", "release"]), numbers, numbers),
    st.tuples(st.sampled_from(["close", "open", "refresh", "node"]), numbers, numbers),
)


def placers(policy: str) -> tuple[Placer, Placer]:
    library = native.load("genie_scheduler")
    typical = [shape.as_tuple() for shape in TYPICAL]
    return library.Placement(policy, typical=typical), PlainPlacer(policy, typical=TYPICAL)


@dataclass
class Pair:
    """Both placers, told the same; every answer is compared."""

    both: tuple[Placer, Placer]
    nodes: int = 0
    classes: int = 0
    held: list[tuple[int, Place]] = field(default_factory=list)

    def add_node(self, node: dict[str, int]) -> None:
        assert [placer.add_node(**node) for placer in self.both] == [self.nodes] * 2
        self.nodes += 1

    def add_class(self, request: dict[str, Any]) -> None:
        if request.get("nodes"):
            request = request | {"nodes": [node for node in request["nodes"] if node < self.nodes]}
        assert [placer.request_class(**request) for placer in self.both] == [self.classes] * 2
        self.classes += 1

    def do(self, step: tuple[str, int, int]) -> None:
        word, one, other = step
        request_class, tenant, node = one % self.classes, other % 2 + 1, one % self.nodes
        match word:
            case "place" | "choose":
                for placer in self.both:
                    placer.observe(request_class, tenant)
                answers = [getattr(placer, word)(request_class, tenant) for placer in self.both]
                assert answers[0] == answers[1]
                if word == "place" and answers[0] is not None:
                    self.held.append((request_class, answers[0]))
            case "release" if self.held:
                released, (where, gpus) = self.held.pop(one % len(self.held))
                for placer in self.both:
                    placer.release(released, node=where, gpus=gpus)
            case "close" | "open":
                for placer in self.both:
                    placer.set_open(node, is_open=word == "open")
            case "refresh":
                assert [placer.refresh() for placer in self.both] == [True, True]

    def check_state(self) -> None:
        for node in range(self.nodes):
            states = [placer.node_state(node) for placer in self.both]
            assert states[0] == states[1]
            _, cpu_milli, memory_mib, gpus = states[0]
            assert min(cpu_milli, memory_mib) >= 0
            assert all(0 <= milli <= 1000 and memory >= 0 for milli, memory, _ in gpus)
            assert all((milli == 1000) == (tenant == 0) for milli, _, tenant in gpus)


@pytest.mark.parametrize("policy", ["bestfit", "fgd", "packing", "clustering", "dotprod"])
@settings(max_examples=40)
@given(data=st.data())
def test_native_and_plain_choose_the_same(policy: str, data: st.DataObject) -> None:
    play(Pair(placers(policy)), data, steps_max=60)


@settings(max_examples=30)
@given(seed=st.integers(0, 2**32))
def test_native_and_plain_learn_the_same(seed: int) -> None:
    """From many requests, so that lessons matter: what hypothesis draws itself is mostly too short."""
    chance = random.Random(seed)
    pair = Pair(placers("supply"))
    for _ in range(chance.randint(3, 8)):
        pair.add_node(some_node(chance))
    for _ in range(chance.randint(3, 8)):
        pair.add_class(some_request(chance))
    for _ in range(FIRST_LESSON * chance.randint(2, 10)):
        if chance.random() < 0.02:
            pair.add_node(some_node(chance))
        words = ["place", "place", "place", "release", "choose", "open", "close"]
        word = chance.choices(words, [60, 10, 10, 20, 5, 3, 1])[0]
        pair.do((word, chance.randrange(64), chance.randrange(64)))
        if seed % 3 == 0 and chance.random() < 0.3:
            pair.do(("refresh", 0, 0))
    pair.check_state()


def some_node(chance: random.Random) -> dict[str, int]:
    return {
        "cpu_milli": chance.choice([16000, 64000, 96000]),
        "memory_mib": chance.choice([64000, 256000]),
        "gpus": chance.choice([1, 2, 4, 8, 8]),
        "gpu_memory_mib": chance.choice([0, 16000, 16000]),
        "model": chance.randrange(3),
    }


def some_request(chance: random.Random) -> dict[str, Any]:
    gpus = chance.choice([0, 1, 1, 1, 1, 2, 3, 4])
    milli = chance.choice([1000, 1000, 810, 470, 320, 190]) if gpus == 1 else 1000 * bool(gpus)
    return {
        "gpus": gpus,
        "gpu_milli": milli,
        "gpu_memory_mib": chance.choice([0, 0, 3000]) if 0 < milli < 1000 else 0,
        "cpu_milli": chance.choice([100, 4000, 9000]) * max(gpus, 1),
        "memory_mib": chance.choice([0, 4000, 30000]),
        "models": chance.choice([ANY_MODEL, ANY_MODEL, 0b001, 0b110]),
    }


def play(pair: Pair, data: st.DataObject, *, steps_max: int) -> None:
    for node in data.draw(st.lists(nodes, min_size=1, max_size=5), label="nodes"):
        pair.add_node(node)
    for request in data.draw(st.lists(requests, min_size=1, max_size=6), label="requests"):
        pair.add_class(request)
    for step in data.draw(st.lists(steps, min_size=steps_max // 2, max_size=steps_max), label="steps"):
        if step[0] == "node":
            pair.add_node(data.draw(nodes))
        else:
            pair.do(step)
    pair.check_state()
