"""Indexing by tensors: integer indices are asynchronous, masks wait for the executor."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from genie.device import capture
from tests.device.conftest import D0

pytestmark = pytest.mark.usefixtures("devices")


def count_dynamic_ops() -> int:
    return int(torch.remote_accelerator.stream_stats(D0)["dynamic_ops"])


CALLS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "rows": lambda x, i: x[i],
    "columns": lambda x, i: x[:, i],
    "pairs": lambda x, i: x[i, i.flip(0)],
    "around a dimension": lambda x, i: x.view(5, 1, 5)[i, :, i],
    "with a new dimension": lambda x, i: x[None, i],
    "of 32 bits": lambda x, i: x[i.int()],
    "table": lambda x, i: x[i.view(2, 1)],
    "out=": lambda x, i: torch.ops.aten.index.Tensor_out(x, [i], out=x.new_empty(2, 5)),
}


@pytest.mark.parametrize("name", CALLS)
def test_integer_indexing_is_asynchronous_and_capturable(name: str) -> None:
    call, local = CALLS[name], torch.arange(25.0).view(5, 5)
    x = local.to(D0)
    captured = capture(call)
    for numbers in ([0, 3], [4, 4], [-1, 2]):
        index = torch.tensor(numbers)
        there, before = index.to(D0), count_dynamic_ops()
        found = call(x, there)
        assert count_dynamic_ops() == before
        expected = call(local, index)
        assert found.stride() == expected.stride()
        assert torch.equal(found.cpu(), expected)
        assert torch.equal(captured(x, there).cpu(), expected)


def test_cpu_index_is_asynchronous() -> None:
    x = torch.arange(5.0, device=D0)
    before = count_dynamic_ops()
    found = [x[[4, 0]], x[torch.tensor([4, 0])], x[torch.tensor([4, 0], dtype=torch.int32)]]
    assert count_dynamic_ops() == before
    assert [each.tolist() for each in found] == [[4, 0]] * 3


@pytest.mark.filterwarnings("ignore:indexing with dtype torch.uint8")
def test_masks_and_integer_indices_of_one_shape_differ() -> None:
    local = torch.arange(16.0).view(4, 4)
    x = local.to(D0)
    # Ones and zeros are row indices, or a mask that selects as many rows as it has ones.
    for bits in ([1, 0, 1, 0], [0, 0, 0, 1], [1, 1, 1, 1]):
        for dtype in (torch.int64, torch.bool, torch.int32, torch.uint8):
            index = torch.tensor(bits, dtype=dtype)
            for given in (index.to(D0), index):
                assert torch.equal(x[given].cpu(), local[index]), (bits, dtype)
                assert torch.equal(x[:, given].cpu(), local[:, index]), (bits, dtype)


def test_index_out_of_range_is_raised_when_the_value_is_read() -> None:
    x = torch.arange(3.0, device=D0)
    wrong = x[torch.tensor([3], device=D0)]
    assert wrong.shape == (1,)
    with pytest.raises(IndexError, match="out of bounds"):
        wrong.cpu()
