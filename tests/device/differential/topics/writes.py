"""In-place ops, out= and copy_."""

from __future__ import annotations

import torch

from tests.device.differential.snippets import Inputs, Table


def _out(on: Inputs, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=on.device)


SNIPPETS = Table(
    add_in_place=lambda on: (x := on.count(3), x.add_(1), x is x.mul_(2)),
    add_in_place_broadcast=lambda on: on.count(3, 2).add_(on.count(2)),
    add_in_place_wrong_shape=lambda on: on.count(2).add_(on.count(3, 2)),
    operator_in_place=lambda on: (x := on.count(3), x.__iadd__(2))[0],
    in_place_overlapping=lambda on: (x := on.count(4))[1:].add_(x[:-1]),
    in_place_same=lambda on: (x := on.count(4)).mul_(x),
    in_place_comparison=lambda on: on.count(3).gt_(1),
    in_place_logical=lambda on: on.bools(4).logical_not_(),
    zero_in_place=lambda on: on.count(3, 2).t().zero_(),
    fill_tensor=lambda on: on.count(3).fill_(on.tensor(2.5)),
    fill_wrong_shape=lambda on: on.count(3).fill_(on.tensor([1.0, 2.0])),
    fill_diagonal=lambda on: on.count(3, 3).fill_diagonal_(9),
    masked_fill_in_place=lambda on: on.count(4).masked_fill_(on.bools(4), -1),
    masked_fill_wrong_dtype=lambda on: on.count(4).masked_fill_(on.count(4), -1),
    clamp_in_place=lambda on: on.normal(5).clamp_(-0.5, 0.5),
    addcmul_in_place=lambda on: on.count(3).addcmul_(on.count(3), on.count(3), value=0.5),
    lerp_in_place=lambda on: on.count(3).lerp_(on.normal(3), 0.25),
    relu_in_place=lambda on: torch.relu_(on.normal(4)),
    copysign_in_place=lambda on: on.normal(4).copysign_(on.normal(4)),
    pow_in_place=lambda on: on.count(4).pow_(2),
    resize_larger=lambda on: on.count(2).resize_(1, 2),
    resize_smaller=lambda on: (x := on.count(6).resize_(2), x.untyped_storage().nbytes()),
    resize_negative=lambda on: on.count(3).resize_(-1),
    resize_as=lambda on: on.count(6).resize_as_(on.count(2, 3)),
    resize_leaf_with_grad=lambda on: on.count(3, grad=True).resize_(1),
    resize_too_large=lambda on: on.count(3).resize_(2**61),
    set_from_tensor=lambda on: torch.empty(0, device=on.device).set_(on.count(2, 3).t()),
    set_shares=lambda on: (x := on.count(4), torch.empty(0, device=on.device).set_(x)),
    set_storage_offset=lambda on: torch.empty(0, device=on.device).set_(
        on.count(6).untyped_storage(), 2, (2,), (1,)
    ),
    set_grows_storage=lambda on: (
        torch.empty(0, device=on.device).set_(on.count(2).untyped_storage(), 0, (4,), (1,)).shape
    ),
    set_other_dtype=lambda on: torch.empty(0, device=on.device).set_(on.count(2, dtype=torch.int32)),
    set_bytes_as_float=lambda on: torch.empty(0, dtype=torch.int16, device=on.device).set_(
        on.count(2).untyped_storage()
    ),
    set_nothing=lambda on: on.count(3).set_(),
    set_negative_offset=lambda on: on.count(3).set_(on.count(3).untyped_storage(), -1, (2,), (1,)),
    set_negative_size=lambda on: on.count(3).set_(on.count(3).untyped_storage(), 0, (-2,), (1,)),
    set_negative_stride=lambda on: on.count(3).set_(on.count(3).untyped_storage(), 0, (2,), (-1,)),
    set_unequal_lengths=lambda on: on.count(3).set_(on.count(3).untyped_storage(), 0, (2,), (1, 1)),
    set_other_device=lambda on: on.count(3).set_(torch.empty(3, device="meta")),
    set_storage_of_other_device=lambda on: on.count(3).set_(torch.empty(3, device="meta").untyped_storage()),
    storage_resize_negative=lambda on: on.count(3).untyped_storage().resize_(-2),
    storage_resize_zero=lambda on: (
        x := on.count(3),
        x.untyped_storage().resize_(0),
        x.untyped_storage().nbytes(),
    )[2],
    as_strided_past_the_end=lambda on: on.count(4).as_strided((10,), (1,)) + 1,
    as_strided_negative_offset=lambda on: on.count(4).as_strided((2,), (1,), -1) + 1,
    as_strided_negative_stride=lambda on: on.count(4).as_strided((2,), (-1,), 1),
    as_strided_in_place_past_the_end=lambda on: on.count(4).as_strided_((10,), (1,)) + 1,
    as_strided_copy_past_the_end=lambda on: torch.as_strided_copy(on.count(4), (10,), (1,)),
    as_strided_scatter_past_the_end=lambda on: torch.as_strided_scatter(
        on.count(4), on.count(10), (10,), (1,)
    ),
    data_assignment=lambda on: (x := on.count(3), setattr(x, "data", on.count(2, 2)), x.shape),
    data_assignment_other_dtype=lambda on: setattr(
        on.count(3, grad=True), "data", on.count(2, dtype=torch.int32)
    ),
    out_of_add=lambda on: torch.add(on.count(3), 1, out=_out(on, 3)),
    out_is_returned=lambda on: (o := _out(on, 3), torch.add(on.count(3), 1, out=o) is o),
    out_of_other_dtype=lambda on: torch.add(on.count(3), 1, out=_out(on, 3, dtype=torch.float64)),
    out_of_lower_dtype=lambda on: torch.add(on.count(3), 1, out=_out(on, 3, dtype=torch.int32)),
    out_transposed=lambda on: torch.mm(on.normal(2, 3), on.normal(3, 4), out=_out(on, 4, 2).t()),
    out_resized=lambda on: torch.add(on.count(3), 1, out=_out(on, 0)),
    out_resized_warns=lambda on: torch.add(on.count(3), 1, out=_out(on, 2)),
    out_of_matmul_resized=lambda on: torch.matmul(on.normal(2, 3), on.normal(3, 4), out=_out(on, 0)),
    out_of_sort=lambda on: torch.sort(on.normal(4), out=(_out(on, 0), _out(on, 0, dtype=torch.int64))),
    out_of_topk_transposed=lambda on: torch.topk(
        on.normal(4, 5), 2, out=(_out(on, 0), _out(on, 0, dtype=torch.int64))
    ),
    out_of_cat=lambda on: torch.cat([on.count(2), on.count(3)], out=_out(on, 0)),
    out_overlaps_input=lambda on: torch.add((x := on.count(4))[1:], 1, out=x[:-1]),
    out_with_grad=lambda on: torch.add(on.normal(3, grad=True), 1, out=_out(on, 3)),
    out_on_other_device=lambda on: torch.add(on.count(3), 1, out=torch.empty(3, device="meta")),
    out_of_sum=lambda on: torch.sum(on.normal(2, 3), 1, out=_out(on, 0)),
    out_of_max=lambda on: torch.max(on.normal(2, 3), 1, out=(_out(on, 2), _out(on, 2, dtype=torch.int64))),
    out_of_linalg=lambda on: torch.linalg.inv(on.normal(3, 3), out=_out(on, 0)),
    out_of_index_select=lambda on: torch.index_select(on.count(4, 2), 0, on.tensor([1]), out=_out(on, 0)),
    out_channels_last=lambda on: torch.add(
        on.normal(1, 2, 3, 3), 1, out=_out(on, 1, 2, 3, 3).to(memory_format=torch.channels_last)
    ),
    copy=lambda on: _out(on, 3).copy_(on.count(3)),
    copy_broadcast=lambda on: _out(on, 2, 3).copy_(on.count(3)),
    copy_scalar=lambda on: _out(on, 2, 3).copy_(on.tensor(2.0)),
    copy_empty_into_full=lambda on: on.count(3).copy_(_out(on, 0)),
    copy_full_into_empty=lambda on: _out(on, 0).copy_(on.count(3)),
    copy_one_into_empty=lambda on: _out(on, 0).copy_(on.count(1)),
    copy_empty_into_empty=lambda on: _out(on, 0, 3).copy_(_out(on, 0, 3)),
    copy_wrong_shape=lambda on: on.count(3).copy_(on.count(4)),
    copy_more_dimensions=lambda on: on.count(3).copy_(on.count(2, 3)),
    copy_from_cpu=lambda on: _out(on, 3).copy_(torch.arange(3.0)),
    copy_from_cpu_broadcast=lambda on: _out(on, 2, 3).copy_(torch.arange(3.0)),
    copy_from_cpu_wrong_shape=lambda on: _out(on, 3).copy_(torch.arange(4.0)),
    copy_from_cpu_empty=lambda on: _out(on, 3).copy_(torch.empty(0)),
    copy_into_expanded_from_cpu=lambda on: on.count(3, 1).expand(3, 4).copy_(torch.zeros(3, 4)),
    copy_from_cpu_to_transposed=lambda on: _out(on, 3, 2).t().copy_(torch.arange(6.0).view(2, 3)),
    copy_from_cpu_strided=lambda on: _out(on, 3).copy_(torch.arange(6.0)[::2]),
    copy_to_cpu=lambda on: torch.zeros(3).copy_(on.count(3)),
    copy_to_cpu_broadcast=lambda on: torch.zeros(2, 3).copy_(on.count(3)),
    copy_to_cpu_transposed=lambda on: torch.zeros(3, 2).t().copy_(on.count(2, 3)),
    copy_to_cpu_wrong_shape=lambda on: torch.zeros(2).copy_(on.count(3)),
    copy_to_cpu_empty=lambda on: torch.zeros(2).copy_(_out(on, 0)),
    copy_to_cpu_other_dtype=lambda on: torch.zeros(3, dtype=torch.int8).copy_(on.count(3)),
    copy_widens=lambda on: _out(on, 3, dtype=torch.float64).copy_(on.normal(3, dtype=torch.float16)),
    copy_narrows=lambda on: _out(on, 3, dtype=torch.bfloat16).copy_(on.normal(3)),
    copy_complex_to_real=lambda on: _out(on, 3).copy_(on.complex(3)),
    copy_real_to_complex=lambda on: on.complex(3).copy_(on.normal(3)),
    copy_bool_from_float=lambda on: _out(on, 3, dtype=torch.bool).copy_(on.count(3)),
    copy_overlapping=lambda on: (x := on.count(5), x[1:].copy_(x[:-1])),
    copy_itself=lambda on: (x := on.count(3)).copy_(x),
    copy_transposed_self=lambda on: (x := on.count(3, 3)).copy_(x.t()),
    copy_leaf_with_grad=lambda on: on.count(3, grad=True).copy_(on.count(3)),
    copy_through_graph=lambda on: torch.autograd.grad(
        _out(on, 3).copy_(x := on.normal(3, grad=True)).sum(), x
    ),
    copy_non_blocking=lambda on: _out(on, 3).copy_(torch.arange(3.0), non_blocking=True),
    to_same_is_same=lambda on: (x := on.count(3)).to(on.device) is x,
    to_copy_flag=lambda on: (x := on.count(3), x.to(on.device, copy=True) is x),
    to_other_tensor=lambda on: torch.zeros(2).to(on.count(1, dtype=torch.float16)),
    to_device_and_dtype=lambda on: torch.arange(4, dtype=torch.uint8).to(on.device, torch.float32),
    to_device_and_narrower=lambda on: torch.arange(4.0).to(on.device, torch.float16),
    to_device_float_to_integer=lambda on: torch.tensor([1.5, -2.5, 300.0]).to(on.device, torch.int64),
    to_cpu_and_wider=lambda on: on.count(4, dtype=torch.uint8).to("cpu", torch.float32),
    to_cpu_and_narrower=lambda on: on.normal(4).to("cpu", torch.bfloat16),
    to_cpu_float_to_integer=lambda on: on.tensor([1.5, -2.5, 300.0, -1.0]).to("cpu", torch.uint8),
    to_cpu_of_expanded=lambda on: on.count(3, 1).expand(3, 4).to("cpu", copy=True),
    to_device_of_expanded=lambda on: torch.arange(3.0).expand(4, 3).to(on.device, copy=True),
    to_device_of_conj=lambda on: torch.tensor([1 + 2j]).conj().to(on.device, copy=True),
    to_device_of_grad=lambda on: torch.ones(2, requires_grad=True).to(on.device, copy=True),
    to_meta=lambda on: on.count(3).to("meta"),
    from_meta=lambda on: torch.empty(3, device="meta").to(on.device),
    copy_from_meta=lambda on: on.count(3).copy_(torch.empty(3, device="meta")),
    numpy_shares_nothing=lambda on: on.count(3).cpu().numpy().sum().item(),
    from_list_of_tensors=lambda on: torch.tensor([on.count(1)[0], on.count(2)[1]], device=on.device),
    as_tensor_is_same=lambda on: (x := on.count(2)) is torch.as_tensor(x, device=on.device),
    asarray=lambda on: torch.asarray([1, 2], device=on.device),
    swap_tensors=lambda on: (x := on.count(2), y := on.count(3), torch.utils.swap_tensors(x, y), x.shape)[3],
)


@SNIPPETS.define
def foreach_in_place(on: Inputs) -> object:
    tensors = [on.count(3), on.count(2, 2), on.count(0)]
    torch._foreach_add_(tensors, 1.5)
    torch._foreach_mul_(tensors, [1.0, 2.0, 3.0])
    torch._foreach_addcdiv_(
        tensors, [on.normal(*x.shape) for x in tensors], [torch.ones_like(x) for x in tensors]
    )
    return tensors, torch._foreach_norm(tensors[:2])


@SNIPPETS.define
def tensor_after_failed_set(on: Inputs) -> object:
    x = on.count(3)
    try:
        x.set_(torch.empty(5, device="meta"))
    except RuntimeError:
        return x
    return "no error"
