"""The sampler of the reader test lists every category and nothing that is no name."""

from __future__ import annotations

import pytest

from tests.house.reader_sample import LISTS, draw_items, list_cpp_identifiers, list_python_identifiers


def test_sample_contains_every_category_by_its_share() -> None:
    items = draw_items(seed=1, count=100)
    assert len(items) == 100
    for category, (share, _) in LISTS.items():
        assert sum(item.startswith(f"[{category}] ") for item in items) == round(share * 100)


def test_sample_depends_on_the_seed_only() -> None:
    assert draw_items(seed=1, count=50) == draw_items(seed=1, count=50)
    assert draw_items(seed=1, count=50) != draw_items(seed=2, count=50)


@pytest.mark.parametrize(
    "item",
    [
        "[class] genie.model.node.NodeInfo(",
        "[field] genie.model.node.GPUInfo.available: bool = True",
        "[property] genie.model.job.Job.epoch(self) -> int",
        "[function] genie.model.job.make_worker_name(job_id: str, rank: int, *, workers: int) -> str",
        "[attribute] genie.controller.nodes.agents.Agents._clock = clock",
        "[constant] genie.model.job.RUNS_KEPT = 4",
    ],
)
def test_python_identifiers_are_listed_with_their_signature(item: str) -> None:
    assert any(listed.startswith(item) for listed in list_python_identifiers())


def test_cpp_types_and_functions_are_listed_without_calls() -> None:
    items = list(list_cpp_identifiers())
    assert "[type] native/scheduler/work_budget.h: class WorkBudget" in items
    assert any("int add_node(const Node& node)" in item for item in items)
    assert not any(": return " in item or ": if (" in item for item in items)
