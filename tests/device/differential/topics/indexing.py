"""Indexing, gathering, scattering, sorting and searching."""

from __future__ import annotations

import torch

from tests.device.differential.snippets import Table


def _assigned(x: torch.Tensor, index: object, value: object) -> torch.Tensor:
    x[index] = value  # type: ignore[index]
    return x


SNIPPETS = Table(
    integers=lambda on: on.count(4, 3)[on.tensor([2, 0, 2])],
    integers_of_cpu=lambda on: on.count(4, 3)[torch.tensor([2, 0])],
    list_index=lambda on: on.count(4, 3)[[0, 3]],
    numpy_index=lambda on: on.count(4, 3)[__import__("numpy").array([1, 2])],
    negative_integers=lambda on: on.count(4)[on.tensor([-1, -4])],
    integers_out_of_range=lambda on: on.count(4)[on.tensor([4])],
    integer_out_of_range=lambda on: on.count(4)[4],
    too_many_indices=lambda on: on.count(4)[0, 0],
    mask=lambda on: on.count(3, 4)[on.bools(3, 4)],
    mask_rows=lambda on: on.count(3, 4)[on.bools(3)],
    mask_wrong_shape=lambda on: on.count(3, 4)[on.bools(4)],
    byte_mask=lambda on: on.count(4)[on.tensor([0, 1, 1, 0], torch.uint8)],
    mask_of_cpu=lambda on: on.count(4)[torch.tensor([True, False, True, False])],
    none_index=lambda on: on.count(3)[None, :, None],
    ellipsis_index=lambda on: on.count(2, 3, 4)[..., 1],
    zero_dim_index=lambda on: on.count(4, 2)[on.tensor(1)],
    bool_index=lambda on: on.count(3)[True],
    mixed_index=lambda on: on.count(3, 4, 5)[on.tensor([0, 2]), :, on.tensor([1, 1])],
    broadcast_index=lambda on: on.count(3, 4)[on.tensor([[0], [1]]), on.tensor([[0, 3]])],
    int32_index=lambda on: on.count(4)[on.tensor([1], torch.int32)],
    float_index=lambda on: on.count(4)[on.tensor([1.0])],
    empty_index=lambda on: on.count(4, 2)[on.tensor([], torch.int64)],
    assign_scalar=lambda on: _assigned(on.count(4), 1, 9),
    assign_slice=lambda on: _assigned(on.count(4, 2), slice(1, 3), -1.5),
    assign_tensor=lambda on: _assigned(on.count(4, 2), slice(0, 2), on.count(2)),
    assign_cpu_tensor=lambda on: _assigned(on.count(4), slice(0, 2), torch.ones(2)),
    assign_mask=lambda on: _assigned(on.count(4), on.bools(4), 7),
    assign_mask_tensor=lambda on: _assigned(
        on.count(4), on.tensor([True, False, True, False]), on.tensor([8.0, 9.0])
    ),
    assign_mask_wrong_count=lambda on: _assigned(on.count(4), on.tensor([True] * 4), on.tensor([8.0, 9.0])),
    assign_integers=lambda on: _assigned(on.count(4), on.tensor([0, 3]), on.tensor([8.0, 9.0])),
    assign_out_of_range=lambda on: _assigned(on.count(4), on.tensor([7]), 1.0),
    assign_wrong_shape=lambda on: _assigned(on.count(4), slice(0, 2), on.count(3)),
    assign_other_dtype=lambda on: _assigned(on.count(4), on.tensor([0]), on.tensor([1.0], torch.float64)),
    assign_integer_from_float=lambda on: _assigned(on.count(4, dtype=torch.int64), 0, 1.7),
    assign_through_transposed=lambda on: (x := on.count(3, 4), _assigned(x.t(), 1, -1))[0],
    index_put_accumulate=lambda on: torch.zeros(4, device=on.device).index_put(
        (on.tensor([1, 1]),), on.count(2) + 1, True
    ),
    index_add=lambda on: on.count(4, 2).index_add(0, on.tensor([0, 0]), on.count(2, 2), alpha=2),
    index_copy=lambda on: on.count(4, 2).index_copy(0, on.tensor([3, 1]), -on.count(2, 2)),
    index_fill=lambda on: on.count(4).index_fill(0, on.tensor([1, 2]), -1),
    index_reduce=lambda on: on.count(4).index_reduce(0, on.tensor([1, 1]), on.count(2) + 5, "amax"),
    index_select_out_of_range=lambda on: on.count(4).index_select(0, on.tensor([9])),
    index_select_wrong_dtype=lambda on: on.count(4).index_select(0, on.tensor([1.0])),
    take=lambda on: on.count(3, 4).take(on.tensor([0, 11, -1])),
    take_out_of_range=lambda on: on.count(3).take(on.tensor([3])),
    take_along_dim=lambda on: (x := on.normal(3, 4)).take_along_dim(x.argsort(1), 1),
    put=lambda on: on.count(4).put(on.tensor([1, 2]), on.tensor([-1.0, -2.0])),
    gather=lambda on: on.count(3, 4).gather(1, on.integers(3, 2, below=4)),
    gather_out_of_range=lambda on: on.count(3, 4).gather(1, on.tensor([[4]])),
    gather_wrong_rank=lambda on: on.count(3, 4).gather(1, on.tensor([1])),
    scatter=lambda on: torch.zeros(3, 4, device=on.device).scatter(
        1, on.tensor([[1], [0], [3]]), on.count(3, 1)
    ),
    scatter_scalar=lambda on: torch.zeros(3, device=on.device).scatter(0, on.tensor([1]), 5.0),
    scatter_out_of_range=lambda on: torch.zeros(3, device=on.device).scatter(0, on.tensor([3]), 5.0),
    scatter_reduce=lambda on: on.count(4).scatter_reduce(0, on.tensor([0, 0, 1]), on.count(3) + 3, "prod"),
    scatter_reduce_mean=lambda on: on.count(4).scatter_reduce(
        0, on.tensor([0, 0, 1]), on.count(3) + 3, "mean", include_self=False
    ),
    masked_select=lambda on: on.count(3, 4).masked_select(on.bools(4)),
    masked_scatter=lambda on: on.count(4).masked_scatter(on.tensor([True, False, True, False]), -on.count(4)),
    nonzero=lambda on: on.bools(3, 4).nonzero(),
    nonzero_tuple=lambda on: on.bools(3, 4).nonzero(as_tuple=True),
    nonzero_of_none=lambda on: torch.zeros(3, device=on.device).nonzero(),
    argwhere=lambda on: torch.argwhere(on.count(2, 3) > 2),
    where_condition=lambda on: torch.where(on.bools(3, 2)),
    count_nonzero=lambda on: on.count(2, 3).count_nonzero(1),
    sort_stable=lambda on: on.integers(8, below=3).sort(stable=True),
    sort_descending=lambda on: on.normal(3, 4).sort(1, descending=True),
    sort_nan=lambda on: on.tensor([1.0, float("nan"), -1.0]).sort(),
    argsort=lambda on: on.normal(6).argsort(),
    topk=lambda on: on.normal(3, 6).topk(2),
    topk_smallest=lambda on: on.normal(6).topk(3, largest=False),
    topk_too_many=lambda on: on.normal(3).topk(4),
    kthvalue=lambda on: on.normal(5).kthvalue(2),
    median=lambda on: on.normal(5).median(0),
    mode_of_integers=lambda on: on.integers(9, below=3).mode(),
    unique=lambda on: on.integers(9, below=4).unique(),
    unique_inverse=lambda on: on.integers(9, below=4).unique(return_inverse=True, return_counts=True),
    unique_rows=lambda on: on.integers(6, 2, below=2).unique(dim=0),
    unique_consecutive=lambda on: on.integers(9, below=2).unique_consecutive(return_counts=True),
    bincount=lambda on: on.integers(9, below=5).bincount(minlength=7),
    bincount_negative=lambda on: on.tensor([-1, 2]).bincount(),
    histc=lambda on: on.normal(20).histc(5, -2, 2),
    searchsorted=lambda on: torch.searchsorted(on.count(5), on.normal(4)),
    bucketize=lambda on: torch.bucketize(on.normal(4), on.count(3), right=True),
    isin=lambda on: torch.isin(on.integers(6), on.tensor([1, 2])),
    one_hot=lambda on: torch.nn.functional.one_hot(on.integers(4, below=3)),
    one_hot_negative=lambda on: torch.nn.functional.one_hot(on.tensor([-1])),
    embedding_out_of_range=lambda on: torch.nn.functional.embedding(on.tensor([7]), on.normal(4, 2)),
    embedding_bag=lambda on: torch.nn.functional.embedding_bag(
        on.integers(6, below=4), on.normal(4, 2), on.tensor([0, 3]), mode="mean"
    ),
    cross_entropy_out_of_range=lambda on: torch.nn.functional.cross_entropy(
        on.normal(2, 3), on.tensor([0, 5])
    ),
    cross_entropy_ignored=lambda on: torch.nn.functional.cross_entropy(on.normal(2, 3), on.tensor([0, -100])),
    repeat_interleave_tensor=lambda on: on.count(3).repeat_interleave(on.tensor([1, 0, 2])),
    item_of_several=lambda on: on.count(2).item(),
    truth_of_several=lambda on: bool(on.count(2)),
    truth_of_empty=lambda on: bool(on.count(0)),
    iteration=lambda on: [x * 2 for x in on.count(3)],
    iteration_of_scalar=lambda on: list(on.tensor(1.0)),
    length=lambda on: (len(on.count(3, 2)), on.count(3, 2).size(-1)),
    length_of_scalar=lambda on: len(on.tensor(1.0)),
    contains=lambda on: (2 in on.count(3), 9 in on.count(3)),
    as_index=lambda on: [10, 20, 30][on.tensor(1)],
    range_of_tensor=lambda on: list(range(on.tensor(3))),
    int_float=lambda on: (int(on.tensor(2.7)), float(on.tensor(3)), complex(on.tensor(1j))),
    format=lambda on: f"{on.tensor(2.5):.2f}",
    to_list=lambda on: on.count(2, 2).tolist(),
    trapezoid_indices=lambda on: torch.tril_indices(3, 3, device=on.device),
    meshgrid=lambda on: torch.meshgrid(on.count(2), on.count(3), indexing="ij"),
    cartesian_product=lambda on: torch.cartesian_prod(on.count(2), on.count(3)),
    combinations=lambda on: torch.combinations(on.count(4), 2),
)
