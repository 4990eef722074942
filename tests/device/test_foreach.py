"""Optimizers send ops over lists of tensors whole, with the results of the same ops on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.device.conftest import D0, D1

pytestmark = pytest.mark.usefixtures("devices")

Optimizers = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def count_ops(work: Callable[[], Any]) -> int:
    stats = torch.remote_accelerator.stream_stats  # type: ignore[attr-defined]
    before = stats(0)["ops"]
    work()
    return int(stats(0)["ops"] - before)


def optimize(device: str, make: Optimizers) -> tuple[list[torch.Tensor], list[int]]:
    """40 parameters after four steps, and the number of ops of each step."""
    generator = torch.Generator().manual_seed(5)
    parameters = [nn.Parameter(torch.randn(3, generator=generator).to(device)) for _ in range(40)]
    optimizer = make(parameters)
    counts = []
    for number in range(4):
        for group in optimizer.param_groups:
            group["lr"] = 0.01 / (number + 1)
        for parameter in parameters:
            parameter.grad = parameter.detach() * 0.1 + number
        counts.append(count_ops(optimizer.step))
    return [parameter.detach().cpu() for parameter in parameters], counts


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.Adam(p, foreach=True),
        lambda p: torch.optim.AdamW(p, foreach=True, weight_decay=0.1, amsgrad=True),
        lambda p: torch.optim.Adam(p, fused=True),
        lambda p: torch.optim.SGD(p, foreach=True, momentum=0.9, nesterov=True),
        lambda p: torch.optim.RMSprop(p, foreach=True),
        lambda p: torch.optim.NAdam(p, foreach=True),
        lambda p: torch.optim.Adadelta(p, foreach=True),
    ],
    ids=["adam", "amsgrad", "fused", "sgd", "rmsprop", "nadam", "adadelta"],
)
def test_step_over_40_parameters_sends_a_dozen_ops(make: Optimizers) -> None:
    expected, _ = optimize("cpu", make)
    found, counts = optimize(D0, make)
    assert max(counts[1:]) <= 12
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


def test_lists_of_numbers_are_sent_as_data() -> None:
    """Changing numbers, such as bias corrections, define no new template."""
    tensors = [torch.ones(2, device=D0) for _ in range(3)]
    stats = torch.remote_accelerator.stream_stats  # type: ignore[attr-defined]
    torch._foreach_mul_(tensors, [1.0, 2.0, 3.0])
    before = stats(0)["misses"]
    torch._foreach_mul_(tensors, [2.0, 3.0, 4.0])
    assert stats(0)["misses"] == before
    torch._foreach_add_(tensors, [1, 2.5, True])
    assert [x.tolist() for x in tensors] == [[3, 3], [8.5, 8.5], [13, 13]]
    whole = [torch.ones(2, dtype=torch.int64, device=D0)]
    torch._foreach_mul_(whole, [3])
    assert whole[0].tolist() == [3, 3]
    with pytest.raises(RuntimeError, match="can't be cast"):
        torch._foreach_mul_(whole, [3.5])
        torch.remote_accelerator.synchronize()  # type: ignore[attr-defined]


def test_lists_across_devices_are_handled_one_tensor_at_a_time() -> None:
    mixed = [torch.ones(2, device=D0), torch.ones(2, device=D1), torch.ones(2)]
    torch._foreach_add_(mixed, [1.0, 2.0, 3.0])
    assert [x.tolist() for x in mixed] == [[2, 2], [3, 3], [4, 4]]
    doubled = torch._foreach_mul(mixed, 2.0)
    assert [str(x.device) for x in doubled] == [D0, D1, "cpu"]
    torch._foreach_copy_(mixed[:2], [torch.zeros(2), torch.ones(2)])
    assert [x.tolist() for x in mixed[:2]] == [[0, 0], [1, 1]]
    with pytest.raises(RuntimeError, match="same device"):
        torch._foreach_add_(mixed[:1], [torch.ones(2)])


def test_zero_dimensional_cpu_tensor_in_a_list_is_sent_as_a_number() -> None:
    tensors = [torch.ones(2, device=D0), torch.ones(3, device=D0)]
    torch._foreach_mul_(tensors, torch.tensor(3.0))
    torch._foreach_add_(tensors, [torch.tensor(1.0), torch.tensor(2.0)])
    assert [x.tolist() for x in tensors] == [[4, 4], [5, 5, 5]]


def test_in_place_op_over_a_list_counts_as_a_modification() -> None:
    x = torch.ones(2, device=D0, requires_grad=True)
    y = x * x
    with torch.no_grad():
        torch._foreach_add_([x], 1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_many_tensors_in_one_list() -> None:
    tensors = list(torch.zeros(3000, device=D0).unbind())
    assert count_ops(lambda: torch._foreach_add_(tensors, 1.0)) == 1
    assert torch.stack(tensors).sum().item() == 3000
