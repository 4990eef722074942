"""Islands of GPUs, compared with a plain graph search."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from genie.hardware.topology import GpuLinks, group_into_islands


def pci_address(gpu_id: int) -> tuple[int, int, int]:
    return (0, gpu_id + 1, 0)


@st.composite
def gpu_topologies(draw: st.DrawFn) -> tuple[int, set[tuple[int, int]], set[int]]:
    """Number of GPUs, links (reported by one side only), and GPUs with a switch."""
    count = draw(st.integers(0, 8))
    numbers = st.integers(0, max(count - 1, 0))
    pairs = draw(st.sets(st.tuples(numbers, numbers), max_size=8)) if count else set()
    return count, pairs, draw(st.sets(numbers)) if count else set()


@given(gpu_topologies())
def test_island_is_a_connected_component_of_links(
    machine: tuple[int, set[tuple[int, int]], set[int]],
) -> None:
    count, pairs, switched = machine
    links = {
        gpu_id: GpuLinks(
            pci_address(gpu_id),
            frozenset(pci_address(b) for a, b in pairs if a == gpu_id),
            gpu_id in switched,
        )
        for gpu_id in range(count)
    }
    joined = pairs | {(a, b) for a in switched for b in switched}
    expected = {}
    for gpu_id in range(count):
        reached, fresh = set(), {gpu_id}
        while fresh:
            reached |= fresh
            fresh = {b for a, b in joined | {(b, a) for a, b in joined} if a in reached} - reached
        expected[gpu_id] = min(reached)
    assert group_into_islands(links) == expected


def test_gpus_with_the_same_unlisted_peer_are_one_island() -> None:
    lost = frozenset({pci_address(7)})
    links = {
        0: GpuLinks(pci_address(0), lost),
        1: GpuLinks(pci_address(1)),
        2: GpuLinks(None, lost),
        3: GpuLinks(),
    }
    assert group_into_islands(links) == {0: 0, 1: 1, 2: 0, 3: 3}
