"""Sparse gradients of embeddings, and the optimizers that use them, match a local CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.device.conftest import D0

pytestmark = [
    pytest.mark.usefixtures("devices"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled:UserWarning"),
]


def train(device: str, make: Callable[[Any], torch.optim.Optimizer], kind: type[nn.Module]) -> torch.Tensor:
    torch.manual_seed(0)
    module = kind(10, 4, sparse=True).to(device)
    optimizer = make(module.parameters())
    indices = torch.tensor([[1, 2, 2, 7], [7, 3, 1, 1]]).to(device)
    for _ in range(3):
        optimizer.zero_grad()
        module(indices).square().sum().backward()
        module(indices[:1]).sum().backward()  # accumulated
        optimizer.step()
    return module.weight.detach()


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SparseAdam(p, lr=0.1),
        lambda p: torch.optim.SGD(p, lr=0.1),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.Adagrad(p, lr=0.1),
    ],
    ids=["sparse-adam", "sgd", "momentum", "adagrad"],
)
def test_optimizer_step_matches_local(make: Callable[[Any], torch.optim.Optimizer]) -> None:
    torch.testing.assert_close(train(D0, make, nn.Embedding).cpu(), train("cpu", make, nn.Embedding))


def test_embedding_bag_has_sparse_gradients() -> None:
    def make(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SparseAdam(parameters, lr=0.1)

    torch.testing.assert_close(train(D0, make, nn.EmbeddingBag).cpu(), train("cpu", make, nn.EmbeddingBag))


def sparse_tensors(device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """One with two sparse dimensions, and one with a dense dimension; both with repeated indices."""
    indices = torch.tensor([[2, 0, 2, 1], [1, 3, 1, 0]]).to(device)
    plain = torch.sparse_coo_tensor(indices, torch.tensor([1.0, 2, 3, 4]).to(device), (3, 4))
    hybrid = torch.sparse_coo_tensor(indices[:1], torch.arange(8.0).view(4, 2).to(device), (3, 2))
    return plain, hybrid


@pytest.mark.parametrize(
    "work",
    [
        lambda s: s,
        lambda s: s.coalesce(),
        lambda s: (s + s).to_dense(),  # a GPU concatenates, a CPU merges
        lambda s: s * 2,
        lambda s: s / 2,
        lambda s: -s,
        lambda s: s.to_dense() + s,
        lambda s: torch.ones(s.shape, device=s.device).sparse_mask(s.coalesce()),
        lambda s: s.to_dense(),
        lambda s: s.clone().zero_(),
        lambda s: s.detach(),
        lambda s: s.clone().mul_(3).add_(s, alpha=2).coalesce(),
        lambda s: s.cpu().to(s.device),
        lambda s: s.coalesce().values(),
        lambda s: s.coalesce().indices(),
    ],
)
def test_sparse_op_matches_local(work: Callable[[torch.Tensor], torch.Tensor]) -> None:
    for there, here in zip(sparse_tensors(D0), sparse_tensors("cpu"), strict=True):
        found, expected = work(there), work(here)
        assert str(found.device) == D0
        assert found.layout == expected.layout
        if expected.is_sparse:
            assert found.is_coalesced() == expected.is_coalesced()
            assert torch.equal(found._indices().cpu(), expected._indices())
            assert torch.equal(found._values().cpu(), expected._values())
        else:
            assert torch.equal(found.cpu(), expected)


def test_sparse_op_without_kernel_is_named() -> None:
    sparse, _ = sparse_tensors(D0)
    with pytest.raises(NotImplementedError, match="aten::"):
        torch.sparse.softmax(sparse, 1)
    with pytest.raises(RuntimeError, match="add\\(sparse, dense\\)"):
        sparse + torch.ones(3, 4, device=D0)
