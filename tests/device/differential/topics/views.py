"""Views: shapes, strides, offsets, and writes through them."""

from __future__ import annotations

import torch

from tests.device.differential.snippets import Inputs, Table

SNIPPETS = Table(
    transpose=lambda on: on.count(3, 4).t(),
    transpose_twice=lambda on: on.count(3, 4).t().t(),
    permute=lambda on: on.count(2, 3, 4).permute(2, 0, 1),
    movedim=lambda on: on.count(2, 3, 4).movedim(0, -1),
    swapaxes=lambda on: on.count(2, 3, 4).swapaxes(0, 2),
    narrow=lambda on: on.count(5, 4).narrow(1, 1, 2),
    slice_step=lambda on: on.count(10)[1:9:3],
    slice_of_slice=lambda on: on.count(6, 6)[1:5, ::2][1:, 1:],
    select=lambda on: on.count(3, 4, 5).select(1, 2),
    select_negative=lambda on: on.count(3, 4, 5).select(-1, -1),
    diagonal=lambda on: on.count(4, 5).diagonal(1),
    diagonal_dims=lambda on: on.count(2, 4, 4).diagonal(0, 1, 2),
    unfold=lambda on: on.count(10).unfold(0, 3, 2),
    unfold_2d=lambda on: on.count(4, 8).unfold(1, 4, 2),
    expand=lambda on: on.count(3, 1).expand(3, 4),
    expand_new_dim=lambda on: on.count(3).expand(2, 3),
    expand_minus_one=lambda on: on.count(3, 1).expand(-1, 2),
    broadcast_to=lambda on: torch.broadcast_to(on.count(1, 4), (3, 4)),
    squeeze=lambda on: on.count(1, 3, 1).squeeze(),
    squeeze_dims=lambda on: on.count(1, 3, 1, 2).squeeze((0, 2)),
    unsqueeze=lambda on: on.count(3, 2).unsqueeze(1),
    view=lambda on: on.count(3, 4).view(2, 6),
    view_minus_one=lambda on: on.count(3, 4).view(-1, 2),
    view_transposed_impossible=lambda on: on.count(3, 4).t().view(12),
    reshape_copies=lambda on: on.count(3, 4).t().reshape(12),
    reshape_views=lambda on: (x := on.count(3, 4), x.reshape(4, 3)),
    flatten=lambda on: on.count(2, 3, 4).flatten(1),
    unflatten=lambda on: on.count(2, 12).unflatten(1, (3, 4)),
    ravel=lambda on: on.count(2, 3).t().ravel(),
    as_strided=lambda on: on.count(12).as_strided((3, 3), (2, 1), 1),
    as_strided_overlapping=lambda on: on.count(6).as_strided((4, 3), (1, 1)),
    view_as=lambda on: on.count(3, 4).view_as(on.count(6, 2)),
    chunk=lambda on: on.count(7, 2).chunk(3),
    split_sizes=lambda on: on.count(6, 2).split([1, 2, 3]),
    tensor_split=lambda on: on.count(7).tensor_split(3),
    unbind=lambda on: on.count(3, 2).unbind(1),
    hsplit=lambda on: on.count(4, 6).hsplit(3),
    unsafe_chunk=lambda on: on.count(6).unsafe_chunk(2),
    view_dtype_narrower=lambda on: on.count(2, 4).view(torch.int16),
    view_dtype_wider=lambda on: on.count(2, 4, dtype=torch.int32).view(torch.int64),
    view_dtype_impossible=lambda on: on.count(2, 3, dtype=torch.int32).view(torch.int64),
    view_bytes_as_float8=lambda on: on.count(16, dtype=torch.uint8).view(torch.float8_e4m3fn).float(),
    view_bytes_as_e8m0=lambda on: on.count(16, dtype=torch.uint8).view(torch.float8_e8m0fnu).float(),
    view_bytes_as_e5m2fnuz=lambda on: on.count(16, dtype=torch.uint8).view(torch.float8_e5m2fnuz).float(),
    view_bytes_as_bits=lambda on: on.count(4, dtype=torch.uint8).view(torch.bits8) + 1,
    mT=lambda on: on.count(2, 3, 4).mT,
    adjoint=lambda on: on.complex(2, 3, 4).adjoint(),
    write_transposed=lambda on: (x := on.count(3, 4), x.t().mul_(2)),
    write_diagonal=lambda on: (x := on.count(4, 4), x.diagonal().zero_()),
    write_slice=lambda on: (x := on.count(8), x[::2].fill_(-1)),
    write_expanded=lambda on: on.count(3, 1).expand(3, 4).add_(1),
    write_expanded_copy=lambda on: on.count(3, 1).expand(3, 4).copy_(on.count(3, 4)),
    transpose_in_place=lambda on: on.count(3, 4).t_(),
    unsqueeze_in_place=lambda on: on.count(3, 4).unsqueeze_(0),
    squeeze_in_place=lambda on: on.count(1, 4).squeeze_(),
    as_strided_in_place=lambda on: on.count(12).as_strided_((2, 2), (3, 1), 2),
    swapdims_in_place=lambda on: on.count(3, 4).swapdims_(0, 1),
    is_set_to=lambda on: (x := on.count(4)).is_set_to(x.view(4)),
    version_counter=lambda on: (x := on.count(4), x.view(2, 2).add_(1), x._version)[2],
    base_is_kept=lambda on: (x := on.count(4, grad=True).clone()).view(2, 2)._base is x,
    detach_shares=lambda on: (x := on.count(4, grad=True).clone(), x.detach()),
    alias_copy=lambda on: torch.ops.aten.alias_copy(on.count(3)),
    view_copy=lambda on: torch.view_copy(on.count(4, 3), (2, 6)),
    as_strided_scatter=lambda on: torch.as_strided_scatter(on.count(6), on.count(2), (2,), (2,), 1),
    slice_scatter=lambda on: torch.slice_scatter(on.count(6, 2), -on.count(2, 2), start=2, end=4),
    select_scatter=lambda on: torch.select_scatter(on.count(3, 3), -on.count(3), 0, 1),
    diagonal_scatter=lambda on: torch.diagonal_scatter(on.count(3, 3), -on.count(3)),
    atleast_3d=lambda on: torch.atleast_3d(on.count(3)),
    empty_view=lambda on: on.count(0, 3).view(3, 0, 2),
    empty_slice=lambda on: on.count(5)[5:],
    zero_dim_view=lambda on: on.count(1).view(()),
    sliding_window_sum=lambda on: on.count(8).unfold(0, 3, 1).sum(1),
    equal_of_views=lambda on: torch.equal(on.count(3, 4).t(), on.count(3, 4).t().contiguous()),
    data_pointer_of_view=lambda on: (x := on.count(8))[2:].data_ptr() - x.data_ptr(),
    storage_offset_bytes=lambda on: on.count(4, 4)[1:, 2:].storage_offset(),
    contiguous_is_same=lambda on: (x := on.count(3)).contiguous() is x,
    storage_nbytes=lambda on: on.count(3, 4)[1].untyped_storage().nbytes(),
    storage_to_list=lambda on: on.count(3, dtype=torch.uint8).untyped_storage().tolist(),
    storage_item=lambda on: on.count(3, dtype=torch.uint8).untyped_storage()[2],
    storage_fill=lambda on: (x := on.count(3, dtype=torch.uint8), x.untyped_storage().fill_(7))[0],
    storage_clone=lambda on: torch.empty(0, device=on.device).set_(on.count(3).untyped_storage().clone()),
    storage_copy=lambda on: (
        x := on.count(3),
        x.untyped_storage().copy_(on.count(3).mul(2).untyped_storage()),
    )[0],
    storage_byteswap=lambda on: (x := on.count(3), x.untyped_storage().byteswap(torch.float32))[0],
    storage_byteswap_complex=lambda on: (x := on.complex(3), x.untyped_storage().byteswap(torch.complex64))[
        0
    ],
)


@SNIPPETS.define
def write_through_two_views(on: Inputs) -> object:
    x = on.count(4, 4)
    rows, columns = x[1], x[:, 2]
    rows.add_(100)
    columns.mul_(2)
    return x, rows, columns


@SNIPPETS.define
def view_survives_its_base(on: Inputs) -> object:
    view = on.count(4, 4)[1:3]
    return view, view._base is None
